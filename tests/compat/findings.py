"""What was found of each object on a device, as it is kept beside the page about compatibility, which says the same.

``docs/reference/compatibility/<device>.json`` has ``{library: {case: finding}}``. A finding has the date and the releases that
it is of, and its ``outcome``, ``works`` or ``refused``. Of what is refused it has the ``words``; of what works the ``class``,
the bytes that are shared, and what each process has of its own. Bytes differ from release to release: they are not compared.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import platform
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shared_rpc import Handle
from tests.compat.cases import LIBRARIES, cases_of, requires
from tests.compat.places import own_parts
from tests.kit.processes import ROOT

FOLDER = ROOT / "docs" / "reference" / "compatibility"
DEVICES = ("cpu", "cuda")

#: Of one device: by library and case.
Findings = dict[str, dict[str, dict[str, Any]]]

#: What a page says of a finding, and every run has to find again.
_SAID = ("outcome", "words", "own")


def attached(handle: Handle[Any], *, parameters_alone: bool) -> dict[str, Any]:
    """Return what is found of an object that was just attached."""
    info = handle.get_object_info()
    kind = type(handle.value)
    return {
        "outcome": "works",
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "shared_nbytes": info["nbytes"],
        "private_nbytes": info["private_nbytes"],
        "own": own_parts(handle.value, parameters_alone=parameters_alone),
    }


def refused(error: Exception) -> dict[str, Any]:
    """Return what is found of an object that was refused: the words from the path of the attribute on."""
    words = re.sub(r"\Aendpoint '\w+':? ", "", str(error))
    return {"outcome": "refused", "words": re.sub(r"0x[0-9a-f]+", "0x…", words)}


@functools.cache
def releases(library: str, device: str) -> str:
    """Return the releases that a library's cases are run with here, and on what."""
    modules = dict.fromkeys([*requires(library), "torch"])
    found = [_release(module) for module in modules if module != "numpy"]
    found.append(f"Python {platform.python_version().rpartition('.')[0]}")
    if device == "cuda":
        found.append(torch.cuda.get_device_name())
    return ", ".join(found)


def _release(module: str) -> str:
    name = _distributions().get(module, [module])[0]
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = importlib.import_module(module).__version__  # one that was not installed from a package
    return f"{name} {version.partition('+')[0]}"


_distributions = functools.cache(importlib.metadata.packages_distributions)


def load(device: str) -> Findings:
    """Return what is kept of a device; nothing where it was never looked at."""
    path = _path(device)
    found: Findings = json.loads(path.read_text()) if path.exists() else {}
    return found


def save(device: str, findings: Findings) -> Path:
    """Keep the findings of a device, in the order of the cases, and none of a case that is gone."""
    ordered = {
        library: {case: findings[library][case] for case in cases_of(library) if case in findings[library]}
        for library in LIBRARIES
        if library in findings
    }
    FOLDER.mkdir(exist_ok=True)
    path = _path(device)
    path.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    return path


def _path(device: str) -> Path:
    return FOLDER / f"{device}.json"


def merged(findings: Findings, device: str, reports: Mapping[tuple[str, str], dict[str, Any]]) -> tuple[Findings, list[str]]:
    """Replace kept findings by those that visitors report.

    :param reports: by library and host.
    :returns: the findings, and a line for each case that keeps its former finding because a check fails.
    """
    result = {library: dict(cases) for library, cases in findings.items()}
    left = []
    date = time.strftime("%Y-%m-%d", time.gmtime())
    for (library, host), report in reports.items():
        for case, found in report["found"].items():
            fails = [name for name, check in report["cases"][case].items() if check[0] == "fails"]
            if fails:
                left.append(f"{library}, {case}, {host}: {', '.join(fails)} failed")
            else:
                result.setdefault(library, {})[case] = {"date": date, "of": releases(library, device), **found}
    return result, left


def differs(findings: Findings, library: str, case: str, found: Mapping[str, Any]) -> str:
    """Return how a finding differs from the kept one, in words; an empty text if it does not."""
    kept = findings.get(library, {}).get(case)
    if kept is None:
        return "nothing is kept of it"
    return "; ".join(
        f"{name}: {kept.get(name)!r} is now {found.get(name)!r}" for name in _SAID if found.get(name) != kept.get(name)
    )
