"""Tensors that are made when somebody needs them: until then they are on torch's meta device, and take no memory.

While a :class:`Deferred` is entered, whatever this thread does with tensors is carried out on the meta device, and written
down. What a tensor would have been is found out by doing again what led to it, and nothing else: :meth:`Deferred.compute`.
So a constructor may look at a tensor that it has made (``.item()``, ``.tolist()``, an ``if``), and gets what it would get.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shared_rpc.building.steps import Step, View

__all__ = ["Deferred"]

#: Bytes. What is computed at once takes so much at most, each and together, until the end of the block.
_SMALL, _SMALL_TOGETHER = 16 << 20, 64 << 20

#: Bytes of an element of what is computed; complex128 is twice that, and rare.
_WIDE = 8
_META = torch.device("meta")
#: What makes a tensor over a storage that was read from a file.
_SET = torch.ops.aten.set_
#: What ``torch.tensor`` ends with: its argument is a tensor of given values.
_GIVEN = torch.ops.aten.lift_fresh.default
#: They read memory without an operation that could be seen.
_READERS = frozenset(
    {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__repr__, torch.Tensor.__format__}
)
#: They read that of tensors in lists.
_GATHERERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
#: They read that of their arguments, to check them.
_CHECKERS = frozenset(
    {torch.sparse_coo_tensor, torch.sparse_compressed_tensor, torch.sparse_csr_tensor, torch.sparse_csc_tensor}
)


class Deferred(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """See the module. To be entered once, by one thread, which alone it concerns."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would be imported, which takes seconds, and nothing is compiled here

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[Step] = []
        #: Of all that was made; kept, because a key is an address.
        self._storages: dict[int, torch.UntypedStorage] = {}
        #: What code that asks a tensor for its device, and is told "meta", would have been told most likely.
        self._device = torch.get_default_device()
        if self._device == _META:
            self._device = torch.device("cpu")  # what is computed has to have memory somewhere
        self._reading = _Reading(self)
        self._computing = False
        #: Bytes of values that are kept.
        self._spent = 0

    def __enter__(self) -> Deferred:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._reading.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._reading.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """See :class:`TorchDispatchMode`."""
        kwargs = kwargs or {}
        if self._computing:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(self.made(tensor) for tensor in tensors):
            if func is _GIVEN:
                return self._given(args[0])
            if tensors or not any(argument.name == "device" for argument in func._schema.arguments):
                return func(*args, **kwargs)
        elif func.overloadpacket is _SET and len(args) > 1 and getattr(args[1], "device", _META) != _META:
            return self._see(args[0], func, args[1:])
        elif _tells(func) or _without_storage(tensors) or any(not self.made(tensor) for tensor in _written(func, args, kwargs)):
            return func(*self.known(args), **self.known(kwargs))
        if self._is_quick(func, args, tensors):
            with suppress(RuntimeError):  # tensors on two devices, where the code asked a tensor of the block for its own
                return self._given(func(*self.known(args), **self.known(self._asked(kwargs))))
        return self._note(func, args, kwargs)

    def _is_quick(self, func: Any, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> bool:
        """Whether an operation is done at once: ``arange``, and what goes element by element, if it is small.

        For the shapes of many of these torch imports its compiler, which takes seconds and 90 MB.
        """
        if self._spent >= _SMALL_TOGETHER:
            self._forget()
        tags = func.tags
        if self._spent >= _SMALL_TOGETHER or func._schema.is_mutable:
            return False
        if func.overloadpacket is torch.ops.aten.arange:
            return _elements(*args) * _WIDE <= _SMALL
        return (
            bool(tensors)
            and torch.Tag.pointwise in tags
            and torch.Tag.nondeterministic_seeded not in tags
            and len(func._schema.returns) == 1
            and _broadcast(tensors) * _WIDE <= _SMALL
        )

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has its memory from here, and so has none."""
        return tensor.is_meta and tensor.untyped_storage()._cdata in self._storages

    def compute(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What these tensors would be, on the devices that the block asked for. Those that share memory do here as well."""
        views = [View.of(tensor) for tensor in tensors]
        needed, chosen = {view.key for view in views}, []
        for step in reversed(self._steps):
            if needed & step.changes:
                chosen.append(step)
                needed |= step.reads
        storages: dict[int, torch.UntypedStorage] = {}
        self._computing = True
        try:
            with torch.inference_mode(False), torch.no_grad():
                for step in reversed(chosen):
                    step.repeat(storages)
                return [view.over(storages) for view in views]
        finally:
            self._computing = False

    def in_use(self) -> bool:
        """Whether a tensor of the block is still alive."""
        # One use is the one here.
        return any(torch._C._storage_Use_Count(key) > 1 for key in self._storages)

    def alive(self) -> Iterator[torch.Tensor]:
        """Those tensors of the block that Python knows. Takes a while: it looks at every object."""
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor) and self.made(thing):
                yield thing

    def _forget(self) -> None:
        """Let go of steps that led to tensors which have gone."""
        needed = {key for key in self._storages if torch._C._storage_Use_Count(key) > 1}
        kept: list[Step] = []
        for step in reversed(self._steps):
            if needed & step.changes:
                kept.append(step)
                needed |= step.reads
        self._steps = kept[::-1]
        self._storages = {key: self._storages[key] for key in needed}
        self._spent = sum(step.kept for step in kept)

    def known(self, values: Any) -> Any:
        """The same values, with what the block has made in them computed."""
        return tree_map_only(torch.Tensor, lambda t: self.compute([t])[0] if self.made(t) else t, values)

    def _asked(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs | {"device": self._device} if kwargs.get("device") == _META else kwargs

    def _given(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor for values that are there: it takes no memory either, but for the values themselves."""
        stand_in = _on_meta(tensor)
        self._spent += tensor.nbytes
        return self._keep(Step(torch.clone, (tensor,), {}, set(), set(), kept=tensor.nbytes), stand_in)  # type: ignore[no-any-return]

    def _has_room(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether values of this size are kept, so that a generator of the block's own goes on as everywhere."""
        if self._spent >= _SMALL_TOGETHER:
            self._forget()
        return self._spent < _SMALL_TOGETHER and sum(tensor.nbytes for tensor in tensors) <= _SMALL

    def _see(self, tensor: torch.Tensor, func: Any, place: tuple[Any, ...]) -> torch.Tensor:
        """Have a tensor of the block see a storage that is there: the values in it are given."""
        real = torch.empty(0, dtype=tensor.dtype, device=place[0].device)
        return tensor.set_(self._given(func(real, *place)))  # type: ignore[no-any-return, call-overload]

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        asked = self._asked(kwargs)
        noted_args, noted = tree_map_only(torch.Tensor, lambda t: View.of(t) if self.made(t) else t, (args, asked))
        reads = {leaf.key for leaf in tree_leaves((noted_args, noted)) if isinstance(leaf, View)}
        changes = {tensor.untyped_storage()._cdata for tensor in _written(func, args, kwargs)}
        step = Step(func, noted_args, noted, changes, reads)
        drawn = kwargs.get("generator") is not None
        if func._schema.name.endswith("_") and torch.Tag.inplace_view not in func.tags:
            if drawn and self._has_room(args[:1]):
                values = func(*self.known(args), **kwargs)
                step = Step(torch.Tensor.copy_, (noted_args[0], values), {}, changes, reads, kept=values.nbytes)
                self._spent += values.nbytes
            return self._keep(step, args[0])  # it has the shape that it had, whatever is written to it
        names = {argument.name for argument in func._schema.arguments}
        elsewhere: dict[str, Any] = {"device": _META} if "device" in names else {}
        elsewhere |= {name: None for name in ("generator", "pin_memory") if name in kwargs}
        moved_args, moved = tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
        try:
            result = func(*moved_args, **(moved | elsewhere))
        except RuntimeError:  # NotImplementedError, too
            if func._schema.is_mutable:
                raise
            # What comes out depends on values, as with nonzero(), or it would be an error in any case.
            known = func(*self.known(args), **self.known(asked))
            return known if _without_storage(tree_leaves(known)) else tree_map_only(torch.Tensor, self._given, known)
        if _without_storage(tree_leaves(result)):
            return func(*self.known(args), **self.known(asked))
        if drawn and self._has_room(tree_leaves(result)):
            return self._given(func(*self.known(args), **self.known(asked)))
        return self._keep(step, result)

    def _keep(self, step: Step, result: Any) -> Any:
        """Remember a step if it made memory, or wrote some."""
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        step.outputs = [View.of(tensor) for tensor in outputs]
        for tensor, view in zip(outputs, step.outputs, strict=True):
            if view.key not in self._storages:
                self._storages[view.key] = tensor.untyped_storage()
                step.changes.add(view.key)
        if step.changes:
            self._steps.append(step)
        return result


class _Reading(TorchFunctionMode):
    """Beside a :class:`Deferred`: hands real tensors to what reads memory without a word."""

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _READERS and self._deferred.made(args[0]):
            args = (self._deferred.compute(args[:1])[0].cpu(), *args[1:])
        elif func in _CHECKERS or (func in _GATHERERS and not isinstance(args[0] if args else None, torch.Tensor)):
            args = self._deferred.known(args)
        return func(*args, **(kwargs or {}))


def _without_storage(leaves: Iterable[Any]) -> bool:
    """Whether one is a tensor that keeps its values in other tensors, as sparse ones do: it is made as everywhere."""
    return any(isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided for leaf in leaves)


@functools.cache
def _tells(func: Any) -> bool:
    """Whether an operation's result is no tensor, but depends on what is in one: ``item()``, ``equal()``."""
    returns = func._schema.returns
    return bool(returns) and not any("Tensor" in str(result.type) for result in returns)


def _broadcast(tensors: Sequence[torch.Tensor]) -> int:
    """Elements of what comes of tensors element by element, at most."""
    ranks = max(tensor.dim() for tensor in tensors)
    return math.prod(
        max((tensor.shape[-place] for tensor in tensors if tensor.dim() >= place), default=1) for place in range(1, ranks + 1)
    )


def _elements(first: float, end: float | None = None, step: float = 1) -> float:
    """How many ``arange`` has."""
    begin, end = (0, first) if end is None else (first, end)
    return (end - begin) / step


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[torch.Tensor]:
    """The tensors that an operation writes to."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
