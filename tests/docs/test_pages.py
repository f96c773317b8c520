"""The documentation is true: its instructions work, and the reference is complete."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import typer

import shared_rpc
from shared_rpc import errors
from shared_rpc.cli.app import app as program
from shared_rpc_ray.cli import app as clusters
from tests.kit.processes import ROOT
from tests.kit.walkthrough import Page, Walk

DOCS = ROOT / "docs"
#: The directories in which pages name files.
ROOTS = (ROOT, ROOT / "shared_rpc", *(ROOT / "integrations").iterdir())
#: Every block of code: its page, its language, and its text.
BLOCKS = [
    (path, *found)
    for path in (*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    for found in re.findall(r"^```(?:\{code-block\} )?(\w+)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
]
#: The names of these objects on the pages, and their possible types.
CALLED = {
    "client": (shared_rpc.Client, shared_rpc.AsyncClient),
    "provider": (shared_rpc.Provider,),
    "handle": (shared_rpc.Handle, shared_rpc.AsyncHandle),
    "server": (shared_rpc.Server,),
}
#: Pages with terminals; the others have nothing to follow.
#: The tutorial has a separate file, since it takes as long as most of them together.
FOLLOWED = [page for path in sorted(DOCS.rglob("*.md")) if "tutorial" not in path.parts and (page := Page(path)).steps]
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
COMMANDS = {**typer.main.get_command(program).commands, "cluster": typer.main.get_command(clusters)}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: page.path.stem)
def test_a_page_can_be_followed(page: Page, tmp_path: Path) -> None:
    """Its files are written, and its commands, run by real processes, print the documented output."""
    if page.missing:
        pytest.skip(f"{', '.join(page.missing)} cannot be imported")
    with Walk(page, tmp_path) as walk:
        walk.follow()
        assert len(walk.printed) == len(page.steps)


@pytest.mark.parametrize("name", sorted(set(shared_rpc.__all__) - {"__version__", "errors"}))
def test_every_public_name_has_its_place(name: str) -> None:
    """A page of docs/reference/api has ``.. autoclass:: shared_rpc.Name``, or autofunction."""
    pages = "".join(path.read_text() for path in (DOCS / "reference" / "api").glob("*.md"))
    assert re.search(rf"^\.\. auto\w+:: shared_rpc\.{name}$", pages, re.MULTILINE)


@pytest.mark.parametrize(
    "name",
    [
        "observability.events",
        "observability.logs",
        "extras.progress_bar",
        "extras.safetensors",
        "extras.sharding",
        "extras.verify",
    ],
)
def test_every_public_module_has_its_page(name: str) -> None:
    """With the module's name and every class and function, by itself or as a member of the module."""
    page = (DOCS / "reference" / "api" / f"{name.rpartition('.')[2].replace('_', '-')}.md").read_text()
    shown = set(re.findall(rf"^\.\. auto\w+:: shared_rpc\.{name}\.(\w+)$", page, re.MULTILINE))
    module = importlib.import_module(f"shared_rpc.{name}")
    public = {each for each in module.__all__ if inspect.isclass(value := getattr(module, each)) or inspect.isfunction(value)}
    if f".. automodule:: shared_rpc.{name}\n" in page:
        options = dict(re.findall(r"^   :(members|exclude-members):(.*)$", page, re.MULTILINE))
        members = {each for each in public if getattr(module, each).__doc__}
        listed, excluded = (set(re.findall(r"\w+", options.get(option, ""))) for option in ("members", "exclude-members"))
        shown |= (members & listed if listed else members) - excluded if "members" in options else set()
    assert public - shown <= set(errors.__all__)


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - {"SharedRPCError", "RemoteTraceback"}))
def test_every_error_has_a_remedy(name: str) -> None:
    """The tables of docs/reference/errors.md have a row for it and for its code."""
    page = (DOCS / "reference" / "errors.md").read_text()
    assert f"\n| `{name}`" in page and f"\n| `{getattr(errors, name).code}` | `{name}` |" in page


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_is_documented(name: str) -> None:
    """The overview of docs/reference/command-line.md has it."""
    overview = (DOCS / "reference" / "command-line.md").read_text().partition("\n## Output")[0]
    assert re.search(rf"`{name}\b", overview)


@pytest.mark.parametrize("picture", sorted((DOCS / "_static" / "cli").glob("*.svg")), ids=lambda picture: picture.stem)
def test_pictures_are_shown_and_self_contained(picture: Path) -> None:
    """A page has each, with an alternative text, and it loads nothing."""
    pages = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    assert re.search(rf"_static/cli/{picture.stem}\.svg\n:alt: .+", pages)
    assert set(re.findall(r"https?://[^\"< ]*", picture.read_text())) == {"http://www.w3.org/2000/svg"}


def test_python_on_a_page_uses_existing_names() -> None:
    """Even in fragments that cannot run: they parse, and their names of this library exist."""
    for path, language, block in BLOCKS:
        if language != "python":
            continue
        tree = ast.parse(re.sub(r"\A(?::\w+:.*\n)+", "", block), str(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "shared_rpc":
                exec(compile(ast.Module([node], []), str(path), "exec"), {})
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in CALLED:
                kinds = CALLED[node.value.id]
                there = {name for kind in kinds for name in (*dir(kind), *kind.__init__.__code__.co_names)}
                assert node.attr in there, f"{path.name}: {ast.unparse(node)}"


def test_files_of_the_package_on_a_page_exist() -> None:
    """A page names a file by its path in the repository, in the package, or in a distribution of ``integrations``."""
    for path in sorted(DOCS.rglob("*.md")):
        for name in re.findall(r"`([\w./]+/\w+\.py)`", path.read_text()):
            assert any((root / name).is_file() for root in ROOTS), f"{path.name}: {name}"


def test_functions_on_a_page_are_in_their_files() -> None:
    """A page names a function, a class or a method, and in brackets its file."""
    for path in sorted(DOCS.rglob("*.md")):
        for dotted, name in re.findall(r"`([\w.]+)`\s+\(`(\w[\w/]+\.py)`\)", path.read_text()):
            found: ast.AST = ast.parse(next(file for root in ROOTS if (file := root / name).is_file()).read_text())
            for part in dotted.split("."):
                named = {node.name: node for node in ast.iter_child_nodes(found) if isinstance(node, _NAMED)}
                assert part in named, f"{path.name}: {dotted} is not in {name}"
                found = named[part]


def test_commands_on_a_page_have_existing_options() -> None:
    """Every ``shared-rpc …`` on every page is an existing command with existing options."""
    for path, language, block in BLOCKS:
        if language not in ("bash", "console", "ini"):
            continue
        for name, rest in re.findall(r"shared-rpc ((?!-)\S+)([^\n#|;&>]*)", re.sub(r"#.*", "", block)):
            assert name in COMMANDS, f"{path.name}: shared-rpc {name}"
            commands = [COMMANDS[name], *getattr(COMMANDS[name], "commands", {}).values()]
            options = {option for command in commands for one in command.params for option in one.opts}
            given = {word.partition("=")[0] for word in rest.split() if word.startswith("-")}
            assert given <= options, f"{path.name}: shared-rpc {name}{rest}"
