"""The rules of the folders of tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

#: Modules with public names, and what tests share.
_PUBLIC = re.compile(r"shared_rpc(\.(errors|context|observability(\.events)?|(extras|integrations)\.\w+))?|tests\.kit(\.\w+)*")


def test_tests_of_the_interface_import_public_modules_and_the_kit() -> None:
    """They hold for any implementation."""
    for path in Path(__file__).parents[1].glob("api/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            inner = [name for name in names if name.startswith(("shared_rpc", "tests")) and not _PUBLIC.fullmatch(name)]
            assert not inner, f"{path.name} imports {', '.join(inner)}: such a test belongs in tests/processes or tests/rules"
