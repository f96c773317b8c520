"""A hook in every process of a run that writes down which functions of the package are called: see :func:`site`."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

__all__ = ["FOLDER", "install", "site"]

#: The variable that names the folder in which each process has a file.
FOLDER = "BENCHMARKS_TRACE"
_PACKAGE = str(Path(__file__).parent.parent / "shared_rpc") + os.sep


def install(folder: str) -> Path:
    """Have every call of a function of the package add a line to a file, from now on; threads that run already are left out.

    :returns: the file of this process.
    """
    path = Path(folder) / str(os.getpid())
    # One write for each line: threads do not mix theirs.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    lines: dict[CodeType, bytes] = {}

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        line = lines.get(code)
        if line is None:
            place = code.co_filename
            # Comprehensions are no calls from Python 3.12 on, and a module is none.
            inside = place.startswith(_PACKAGE) and not (code.co_name.startswith("<") and code.co_name != "<lambda>")
            line = lines[code] = f"{place[len(_PACKAGE) :]}:{code.co_qualname}\n".encode() if inside else b""
        if line:
            os.write(file, line)

    threading.setprofile(hook)
    sys.setprofile(hook)
    return path


def site(folder: Path) -> dict[str, str]:
    """Return the environment in which Python processes install the hook as they begin."""
    (folder / "sitecustomize.py").write_text(
        f"import os\nfrom benchmarks.traced import install\nif {FOLDER!r} in os.environ:\n    install(os.environ[{FOLDER!r}])\n"
    )
    return {FOLDER: str(folder)}


def pause() -> Callable[[], None]:
    """Take the hook out of this thread; the result puts it back."""
    hook = sys.getprofile()
    sys.setprofile(None)
    return lambda: sys.setprofile(hook)
