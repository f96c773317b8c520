"""Holdings of a node: which version of what is current in its broker, as far as the directory was told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from shared_rpc.cluster.memo import Memo
from shared_rpc.cluster.orders import Holding, Key, Version

__all__ = ["Holdings", "Listed"]


class Listed(NamedTuple):
    """An object that is current in the broker."""

    key: Key
    object_id: str
    nbytes: int


class _Held(NamedTuple):
    """Version of a key that the directory was told of."""

    version: Version
    object_id: str
    nbytes: int


class Holdings:
    """The versions that are current in a broker.

    :param memo: knows the versions of objects that an earlier agent has brought there.
    """

    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self._held: dict[Key, _Held] = {}

    def object_of(self, key: Key, version: Version) -> str | None:
        """Return the object that is a version of a key; None if that is not current."""
        held = self._held.get(key)
        return held.object_id if held is not None and held.version.digest == version.digest else None

    def hold(self, key: Key, version: Version, object_id: str, nbytes: int) -> None:
        """Note that a version is current from now on."""
        self._held[key] = _Held(version, object_id, nbytes)
        self._memo.note(object_id, version)

    def forget(self, key: Key) -> None:
        """Note that a key has no current version any more."""
        self._held.pop(key, None)

    def objects(self, endpoint: str, cache_key: str) -> Iterator[str]:
        """Yield the objects of a call."""
        for key, held in self._held.items():
            if (key.endpoint, key.cache_key) == (endpoint, cache_key):
                yield held.object_id

    def state(self, listed: Iterable[Listed]) -> tuple[Holding, ...]:
        """Take what the broker lists as it is; return it for the directory.

        An object without a known version was built by the broker on its own: its id tells it from all others.
        """
        self._held = {
            found.key: _Held(
                self._memo.versions.get(found.object_id, Version(0, found.object_id)), found.object_id, found.nbytes
            )
            for found in listed
        }
        self._memo.keep_only({held.object_id for held in self._held.values()})
        return tuple(Holding(key, held.version, held.nbytes) for key, held in self._held.items())

    def known(self) -> Mapping[Key, object]:
        """Return what is current, to be compared with later."""
        return dict(self._held)

    def lost(self, listed: Iterable[Listed], known: Mapping[Key, object], busy: set[Key]) -> list[tuple[Key, Version]]:
        """Return the versions that the broker has dropped or replaced by itself since the directory was told of them.

        :param known: what was current when the broker began to list: what has changed since is not lost.
        :param busy: keys that orders are changing, or were then.
        """
        there = {found.key: found.object_id for found in listed}
        gone = [
            (key, held.version)
            for key, held in self._held.items()
            if key not in busy and known.get(key) is held and there.get(key) != held.object_id
        ]
        for key, _ in gone:
            del self._held[key]
        return gone

    def __len__(self) -> int:
        return len(self._held)
