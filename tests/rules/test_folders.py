"""Each test is in the folder of the processes that it needs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.kit.processes import ROOT

#: Modules with names for users: they list them.
PUBLIC = {
    ".".join(path.with_suffix("").relative_to(ROOT).parts).removesuffix(".__init__")
    for path in Path(ROOT, "shared_rpc").rglob("*.py")
    if "\n__all__ = " in path.read_text()
}
#: Modules that start a process, or a thread with a server.
RUNNING = {"subprocess", "multiprocessing", "shared_rpc.Server"}


def imported(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the files of a folder, each with a name that it imports: of a module, or of an attribute of one."""
    for path in Path(ROOT, "tests", folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path.name, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((path.name, f"{node.module}.{alias.name}") for alias in node.names)


def test_the_api_is_tested_by_public_names_and_the_kit() -> None:
    """These tests show what users can write."""
    ours = [(path, name) for path, name in imported("api") if name.startswith("shared_rpc")]
    assert ours and [(path, name) for path, name in ours if not {name, name.rpartition(".")[0]} & PUBLIC] == []


def test_rules_need_no_process() -> None:
    """They are checked in seconds, while one writes them."""
    assert [(path, name) for path, name in imported("rules") if name in RUNNING] == []
