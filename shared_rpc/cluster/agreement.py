"""Agreement on what carries a record: the first mover that its receiver wants and its source has. All have the object store."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from shared_rpc.cluster import nixl_mover
from shared_rpc.cluster.movers import OBJECTS, Mover, ObjectStoreMover
from shared_rpc.errors import ConfigurationError

__all__ = ["Movers", "movers_of"]

#: The name of :class:`~shared_rpc.cluster.nixl_mover.NixlMover`.
_NIXL = "nixl"
#: In place of a name: the best of those that are here.
_AUTO = "auto"


class Movers:
    """The movers of an agent by their names, and which of them it wants for what it receives.

    :param movers: those that there are beside :data:`OBJECTS`.
    :param wanted: the names, the best first; the last is :data:`OBJECTS`.
    :param lacking: why one that was asked for is not here, ``""`` if all are.
    """

    def __init__(self, movers: Mapping[str, type[Mover]], wanted: Sequence[str], lacking: str = "") -> None:
        self._movers: dict[str, type[Mover]] = {OBJECTS: ObjectStoreMover, **movers}
        self.wanted = (*(name for name in wanted if name != OBJECTS), OBJECTS)
        self.lacking = lacking

    def make(self, name: str) -> Mover:
        """Return a mover for one end of a transfer."""
        return self._movers[name]()

    def agree(self, wanted: Sequence[str]) -> str:
        """Return the first of the movers that a receiver wants that is here."""
        return next((name for name in wanted if name in self._movers), OBJECTS)


def movers_of(setting: str, device: str) -> Movers:
    """Return the movers of an agent.

    :param setting: ``"auto"``, ``"objects"``, ``"nixl"``, or ``module:class``.
    :param device: the kind of device that the broker's objects are on.
    :raises ConfigurationError: if there is no such mover. One that is not installed is none to complain of.
    """
    if setting == OBJECTS:
        return Movers({}, ())
    if setting in (_AUTO, _NIXL):
        lacking = nixl_mover.lacking()
        # NIXL opens a port that serves whoever reaches it: not without being asked, where it would not be used.
        if lacking or (setting == _AUTO and not nixl_mover.is_of_use(device)):
            return Movers({}, (), lacking if setting == _NIXL else "")
        return Movers({_NIXL: nixl_mover.NixlMover}, (_NIXL,))
    module, colon, kind = setting.partition(":")
    if not colon:
        raise ConfigurationError(f"SHARED_TENSOR_CLUSTER_MOVER={setting!r}: use {_AUTO}, {OBJECTS}, {_NIXL}, or module:class")
    try:
        found: type[Mover] = getattr(importlib.import_module(module), kind)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"SHARED_TENSOR_CLUSTER_MOVER={setting!r} cannot be loaded: {error}") from error
    return Movers({setting: found}, (setting,))
