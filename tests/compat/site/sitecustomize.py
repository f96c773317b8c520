"""Lets a torchvision that was built for CUDA load beside a torch without it, in every process of these tests.

The wheels of torchvision on the package index are such builds. Their Python half is all that models need, but its import
describes two operators that the compiled half would have defined. They are defined here, without an implementation, just
before torchvision is imported, if its compiled half does not load.
"""

import importlib.abc
import importlib.util
import sys


class _Torchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            if spec is not None:
                _define(spec.submodule_search_locations[0])


def _define(folder):
    import torch

    try:
        torch.ops.load_library(f"{folder}/_C.so")
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)


_kept = []
sys.meta_path.insert(0, _Torchvision())
