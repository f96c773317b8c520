"""References in docstrings: resolved to a page, to plain text if the name exists but has no page, and otherwise a warning.

A docstring has ``:class:`Handle```, as suits a reader of the code; the page calls it ``shared_rpc.Handle``.
"""

from __future__ import annotations

import re
from pydoc import ErrorDuringImport, locate
from typing import Any, get_type_hints, is_typeddict

import msgspec
from catalogue import shown
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

#: Modules searched for short names, the public ones first.
HOMES = (
    "shared_rpc",
    "shared_rpc.errors",
    "shared_rpc.Client",
    "shared_rpc.Handle",
    "shared_rpc.provider.provider",
    "shared_rpc.protocol.records",
    *(f"shared_rpc.protocol.{part}" for part in ("messages", "worker", "exported", "generations", "sources", "tiers")),
)


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element) -> nodes.Element | None:
    """Resolve a reference to a name of this project that Sphinx did not find."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].removeprefix(".")
    scopes = [scope for scope in (node.get("py:class"), node.get("py:module"), *HOMES) if scope]
    candidates = [target, *(f"{scope}.{target}" for scope in scopes)]
    domain = env.domains.python_domain
    for name in candidates:
        if name in domain.objects:
            return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", name, _pointing_to(node, name), content)
    return content if any(_exists(name) for name in candidates) else None


def _pointing_to(node: pending_xref, name: str) -> pending_xref:
    pointed = node.deepcopy()
    pointed["reftarget"], pointed["refspecific"] = name, False
    return pointed


def _exists(name: str) -> bool:
    if name.partition(".")[0] not in ("shared_rpc", "shared_rpc_ray"):
        return False
    owner, _, last = name.rpartition(".")
    try:
        return locate(name) is not None or last in getattr(locate(owner), "__annotations__", ())
    except ErrorDuringImport:  # of a module that needs Ray, for example
        return False


def signature(
    app: Sphinx, what: str, name: str, item: object, options: Any, arguments: str, returned: str
) -> tuple[str, str] | None:
    """Return the signature to show, empty for a class whose parameters are not described: users get its objects."""
    made_by_us = what == "class" and ":param " not in (item.__doc__ or "") and not is_typeddict(item)
    return ("", "") if made_by_us else None


def docstring(app: Sphinx, what: str, name: str, item: object, options: Any, lines: list[str]) -> None:
    """Links to these pages, which the code calls ``docs/explanation/memory.md``; and fields of structs, keys of dicts."""
    for number, line in enumerate(lines):
        lines[number] = re.sub(r"``docs/([\w/-]+)\.md``", r":doc:`/\1`", line)
    if what == "class" and isinstance(item, type) and issubclass(item, msgspec.Struct):
        hints = get_type_hints(item)  # without the limits of a field
        for field in msgspec.structs.fields(item):
            lines += [f":ivar {field.name}:", f":vartype {field.name}: {shown(hints[field.name])}"]
    elif is_typeddict(item):
        for key, kind in get_type_hints(item).items():
            note = "" if key in item.__required_keys__ else " optional"
            lines += [f":ivar {key}:{note}", f":vartype {key}: {shown(kind)}"]


def bases(app: Sphinx, name: str, item: object, options: Any, found: list[Any]) -> None:
    """Keep only the public bases of a class."""
    found[:] = [base for base in found if not getattr(base, "__name__", "").startswith("_")]


def setup(app: Sphinx) -> dict[str, bool]:
    """See :mod:`sphinx.ext`."""
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-bases", bases)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
