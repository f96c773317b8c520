"""Who may import whom, who reads the environment, and what starts without torch: data flows one way."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kit.processes import ROOT

PACKAGE = ROOT / "shared_rpc"

#: From the bottom up. A module may import its own package, and what stands on a line above its own.
LAYERS = [
    ["errors", "forks"],
    ["lifecycle", "protocol", "settings"],
    ["context", "memory"],
    ["codec", "observability"],
    ["client", "execution"],
    ["server"],
    ["zygote"],
    ["broker", "extras", "operations", "scripts"],
    ["provider"],
    ["cli", "integrations", "worker"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

#: What pure layers are free of: waiting, talking, and torch.
IMPURE = {"anyio", "asyncio", "concurrent", "select", "selectors", "signal", "socket", "threading", "time", "torch", "trio"}


class Import(NamedTuple):
    """One import: ``late`` is one that runs when a function is called, ``typing`` one that never does."""

    module: str
    target: str
    line: int
    late: bool
    typing: bool


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package, by its name below ``shared_rpc``; the package itself is the empty name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """A module's source."""
    return ast.parse(path.read_text(), str(path))


@functools.cache
def imports_in(module: str) -> list[Import]:
    """Those of one module."""
    return list(imports_of(module, tree_of(modules()[module])))


def imports_of(module: str, node: ast.AST, late: bool = False, typing: bool = False) -> Iterator[Import]:
    """Every import below ``node``, those by ``importlib.import_module("...")`` too."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(module, alias.name, node.lineno, late, typing)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{module}, line {node.lineno}: imports are absolute"
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            yield Import(module, whole if whole in submodules() else str(node.module), node.lineno, late, typing)
    elif _is_import_module(node):
        yield Import(module, node.args[0].value, node.lineno, late, typing)
    late = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for field in ast.iter_child_nodes(node):
        guarded = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and field in node.body
        yield from imports_of(module, field, late, typing or guarded)


def _is_import_module(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("import_module")
        and isinstance(node.args[0], ast.Constant)
    )


@functools.cache
def submodules() -> frozenset[str]:
    """The modules by their full names."""
    return frozenset(f"shared_rpc.{name}" if name else "shared_rpc" for name in modules())


def all_imports() -> list[Import]:
    """Every import of the package."""
    return [found for name in modules() for found in imports_in(name)]


def own(name: str) -> str:
    """The layer's name of ``shared_rpc.<name>.…``, empty for the package itself."""
    return name.removeprefix("shared_rpc").removeprefix(".").partition(".")[0] if name.startswith("shared_rpc") else ""


def test_every_module_has_its_layer() -> None:
    """A new one is given its place here, and one that has gone leaves none."""
    assert {name.partition(".")[0] for name in modules() if name} == set(RANK)


@pytest.mark.parametrize("module", [name for name in modules() if name])
def test_a_module_imports_only_what_is_below(module: str) -> None:
    """Its own package and lower layers; inside functions and for type checkers alone too."""
    layer = module.partition(".")[0]
    upward = [
        f"{module}, line {found.line}: imports {found.target}"
        for found in imports_in(module)
        if found.target.startswith("shared_rpc.")
        if own(found.target) != layer and RANK[own(found.target)] >= RANK[layer]
    ]
    assert upward == []


def test_modules_import_each_other_in_no_circle() -> None:
    """Not within a package either, nor by imports in functions or for type checkers."""
    graph = {f"shared_rpc.{name}": {found.target for found in imports_in(name)} & submodules() for name in modules() if name}
    for module, targets in graph.items():
        targets -= {module, "shared_rpc"}
    graphlib.TopologicalSorter(graph).prepare()


def test_only_the_top_imports_the_package_itself() -> None:
    """The package imports all others, when their names are asked for; below it that would be a circle."""
    users = {found.module.partition(".")[0] for found in all_imports() if found.target == "shared_rpc"}
    assert users <= {"cli", "extras", "scripts"}


def test_the_package_itself_imports_nothing_at_once() -> None:
    """Importing it configures nothing and costs nothing."""
    at_once = {found.target for found in all_imports() if found.module == "" and not found.late and not found.typing}
    assert at_once <= {"__future__", "importlib", "typing"}


def test_protocol_and_state_are_pure() -> None:
    """They neither wait nor talk, not even in a function, and neither does what they are made of."""
    server = ("server.state", "execution.endpoints", "execution.run")
    pure = ("errors", "protocol", *server, "client.exchange")
    impure = [
        f"{found.module}, line {found.line}: imports {found.target}"
        for found in all_imports()
        if f"{found.module}.".startswith(tuple(f"{name}." for name in pure))
        and found.target.partition(".")[0] in IMPURE
        and found.module
        not in ("errors.interrupts", "protocol.socket", "protocol.peers", "protocol.ticket", "protocol.election")
    ]
    assert impure == []


def test_torch_is_imported_by_the_codec_extras_and_integrations_alone() -> None:
    """Elsewhere it is imported by the function that needs it; both are loaded when they are used."""
    modules = {
        found.module
        for found in all_imports()
        if found.target.partition(".")[0] == "torch" and not found.late and not found.typing
    }
    assert {name.partition(".")[0] for name in modules} == {"codec", "extras", "integrations"}


def test_executor_and_client_load_the_codec_late() -> None:
    """Only when a tensor is to be taken apart or rebuilt; the server's state and the protocol never do."""
    users = {
        (found.module.partition(".")[0], found.late)
        for found in all_imports()
        if own(found.target) == "codec" and found.module.partition(".")[0] != "codec" and not found.typing
    }
    assert {layer for layer, late in users if not late} == set()
    assert {layer for layer, _ in users} == {"client", "execution", "provider", "extras", "integrations"}


ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}


def environment_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where the environment is touched: the line, and whether it is read or set."""
    setters = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            setters.add(node.value)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
            setters |= {node.value.func.value} if node.value.func.attr in {"pop", "setdefault", "update"} else set()
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        imported = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) and node.module == "os" else set()
        if (name in ENVIRONMENT and (isinstance(node, ast.Attribute) or name != "environ")) or imported & ENVIRONMENT:
            yield node.lineno, "set" if node in setters else "read"


def test_settings_alone_read_the_environment() -> None:
    """What a process does is decided in one place; the command line may set a role for the app it is about to load."""
    uses = {(name, use) for name, path in modules().items() for _, use in environment_uses(tree_of(path))}
    assert ("settings", "read") in uses
    assert {(name, use) for name, use in uses if name != "settings"} <= {("cli.serving", "set")}


@pytest.mark.parametrize(
    ("source", "use"),
    [
        ("import os\nos.environ.get('A')", "read"),
        ("import os\nprint(os.environ['A'])", "read"),
        ("import os\nx = os.environ.pop('A')", "read"),
        ("import os\nos.getenv('A')", "read"),
        ("from os import environ", "read"),
        ("from os import getenv", "read"),
        ("import os\nos.environ['A'] = 'b'", "set"),
        ("import os\ndel os.environ['A']", "set"),
        ("import os\nos.environ.pop('A', None)", "set"),
    ],
)
def test_a_use_of_the_environment_is_noticed(source: str, use: str) -> None:
    """The check above would see it, in whatever form."""
    assert use in {found for _, found in environment_uses(ast.parse(source))}
