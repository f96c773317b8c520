"""A second process that runs pieces of code and answers: one import of torch for many tests."""

from __future__ import annotations

import hashlib
import json
import sys
import textwrap
import traceback
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tests.kit.processes import Child

if TYPE_CHECKING:
    import torch


_MARK = "answer: "


class Interpreter(Child):
    """Runs code, piece by piece, in its own process."""

    def __init__(self, environ: dict[str, str] | None = None) -> None:
        super().__init__("-m", "tests.kit.interpreter", environ=environ)

    def run(self, code: str, **names: Any) -> Any:
        """Return the value that the code assigns to ``answer``, through JSON.

        Its variables are ``names``, ``torch``, ``bits``, a ``client`` if the names have a ``base_path`` and a ``device``, and
        ``kept``, a dict that persists between pieces.
        """
        self.tell(json.dumps([textwrap.dedent(code), names]))
        problem, answer = json.loads(self.expect(_MARK).removeprefix(_MARK))
        assert problem is None, f"in the other process:\n{problem}"
        return answer


def bits(tensor: torch.Tensor) -> str:
    """Return shape, dtype and all bits of a tensor as a digest; NaNs and the signs of zeros count."""
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    # A dimension of one element may keep any stride, which view() would refuse.
    data = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(data).hexdigest()}"


def main() -> None:
    """Answer until standard input ends."""
    import gc

    import torch

    from shared_rpc import Client
    from shared_rpc.memory.mapping import MAPPINGS

    kept: dict[str, Any] = {}
    for line in sys.stdin:
        code, names = json.loads(line)
        space = {"torch": torch, "bits": bits, "kept": kept, **names}
        problem = None
        try:
            with ExitStack() as stack:
                if names.get("base_path"):
                    client = Client(names["base_path"], device=names["device"], timeout=30, connect_timeout=0)
                    space["client"] = stack.enter_context(client)
                exec(compile(code, "<piece>", "exec"), space)
        except Exception:
            problem = traceback.format_exc()
        answer = space.get("answer")
        del space
        gc.collect()
        MAPPINGS.drain()
        print(_MARK + json.dumps([problem, answer]), flush=True)


if __name__ == "__main__":
    main()
