"""What a case is: an object of a library, how it computes, and what else its users do with it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

#: By the names of their modules in ``libraries/``, the slowest first, so that two at once end together.
LIBRARIES = (
    "transformers",
    "torch",
    "torch_tensors",
    "torch_programs",
    "peft",
    "diffusers",
    "torchao",
    "sentence_transformers",
    "timm",
    "torchvision",
    "bitsandbytes",
)


@dataclass(frozen=True)
class Case:
    """An object as an endpoint returns it, on a device, and what is known of it.

    ``build`` is called with random numbers seeded, so that each process that calls it has an object of the same bits.
    """

    build: Callable[[str], Any]
    #: Computes something of it, the same each time: tensors in containers.
    run: Callable[[Any, str], Any] | None = None
    #: Words of the error with which sharing it is refused.
    refused: str | None = None
    #: Backends of ``torch.compile`` that it is compiled with, in the client.
    compiled: tuple[str, ...] = ()
    #: What its users do with it besides, by names: ``function(attached, own, device)`` raises where it does not work.
    besides: dict[str, Callable[[Any, Any, str], None]] = field(default_factory=dict)
    #: Whether its class has a pickling of its own that makes another object of it, with which the attached one is compared.
    as_pickled: bool = False
    #: Whether computing changes it: its attributes, which are each process's own, and are not as they were.
    remembers: bool = False
    #: Whether computing writes to its memory, if only what is there already, so that it cannot be done under ``access="read"``.
    writes: bool = False
    #: Whether the endpoint shares its parameters alone, so that each process has every other tensor for itself.
    parameters_alone: bool = False
    #: Checks that do not hold for it, each with the reason.
    excused: dict[str, str] = field(default_factory=dict)
    #: A pattern of attribute paths that differ between two objects that were built alike.
    ignored: str | None = None
    #: The kinds of device that the library runs it on.
    devices: tuple[str, ...] = ("cpu", "cuda")
    #: What the page about compatibility says of it besides, in Markdown.
    note: str = ""


def cases_of(library: str) -> dict[str, Case]:
    """The cases of a library, by name. Does not import the library itself."""
    cases: dict[str, Case] = importlib.import_module(f"tests.compat.libraries.{library}").CASES
    return cases


def requires(library: str) -> tuple[str, ...]:
    """The modules that have to be installed for a library's cases."""
    required: tuple[str, ...] = importlib.import_module(f"tests.compat.libraries.{library}").REQUIRES
    return required


def title(library: str) -> str:
    """What the page about compatibility calls a library, or a part of one."""
    found: str = importlib.import_module(f"tests.compat.libraries.{library}").TITLE
    return found


def build(library: str, name: str, device: str) -> Any:
    """The object of a case: the same bits in every process."""
    torch.manual_seed(0)
    return cases_of(library)[name].build(device)
