"""Hooks around the memory that is unmapped, and mapped again at its address: for libraries that register memory.

A network card's or another library's registration (NIXL, UCX, NCCL) is of memory, not of addresses: it must go before the
memory does, and be made anew when there is memory at the address again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shared_rpc.errors.interrupts import is_of_handler


class MappedRange(NamedTuple):
    """Memory of this process: ``nbytes`` bytes at ``address`` on ``device``, which is ``"cpu"`` or a GPU's UUID."""

    address: int
    nbytes: int
    device: str


#: What is called with the ranges.
Called = Callable[[Sequence[MappedRange]], object]


class RemapHook:
    """A hook of :func:`on_remap`, until it is closed."""

    def __init__(self, hooks: RemapHooks, before: Called | None, after: Called | None) -> None:
        self._hooks = hooks
        self.before = before
        self.after = after

    def close(self) -> None:
        """End the calls; closing twice is harmless."""
        self._hooks.remove(self)


class RemapHooks:
    """The hooks of this process, in the order of their registration. Thread-safe."""

    def __init__(self) -> None:
        #: Replaced and never changed.
        self._hooks: tuple[RemapHook, ...] = ()

    def add(self, before: Called | None, after: Called | None) -> RemapHook:
        """Register a hook."""
        hook = RemapHook(self, before, after)
        self._hooks = (*self._hooks, hook)
        return hook

    def remove(self, hook: RemapHook) -> None:
        """Remove a hook, if it is still registered."""
        self._hooks = tuple(other for other in self._hooks if other is not hook)

    def before(self, ranges: Sequence[MappedRange]) -> None:
        """Call the hooks for memory that is about to be unmapped.

        Where one raises, those that were called before it are told that the memory is still there; then its error is raised.
        """
        if not ranges:
            return
        called: list[RemapHook] = []
        try:
            for hook in self._hooks:
                if hook.before is not None:
                    hook.before(ranges)
                called.append(hook)
        except BaseException:
            for hook in called:
                if hook.after is not None:
                    hook.after(ranges)
            raise

    def after(self, ranges: Sequence[MappedRange]) -> None:
        """Call the hooks for memory that is mapped again: all of them, and then the first error is raised."""
        if not ranges:
            return
        first: Exception | None = None
        for hook in self._hooks:
            try:
                if hook.after is not None:
                    hook.after(ranges)
            except Exception as error:
                if is_of_handler(error):
                    raise
                first = first if first is not None else error
        if first is not None:
            raise first


REMAP_HOOKS = RemapHooks()


def on_remap(*, before: Called | None = None, after: Called | None = None) -> RemapHook:
    """Have functions called around the memory that :meth:`Handle.suspend` unmaps, and that is mapped again at its address.

    Each is called with a sequence of :class:`MappedRange`, in the thread that unmaps or maps. ``before`` is called when the
    device has done its work and the memory is still there, to deregister it with a network card or another library; an error
    of it is raised, and the memory stays. ``after`` is called when there is memory again at the addresses, which may be other
    memory with the same bytes, to register that; an error of it is raised by :meth:`Handle.resume`, and the handle is active.

    The memory of objects that end is not announced: deregister it before the last tensor over it goes.

    :returns: the hook, whose ``close()`` ends the calls.
    """
    return REMAP_HOOKS.add(before, after)
