"""Copies of segments in lower tiers, and whether they are up to date.

A copy belongs to a segment, by the segment's id; a cold object already has the ids of its next segments. A copy is good while
the revision of the objects in the segment equals the one at which it was made, see :func:`is_good`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from shared_rpc.errors import CapabilityError
from shared_rpc.memory.copies import LowerCopy
from shared_rpc.protocol.records import HostCopy, SegmentInfo, Tier

#: The tiers below a device, nearest first.
LOWER: tuple[Tier, ...] = ("host", "file")
#: The revision of a copy with undefined bytes: its memory is reused for the next copy.
STALE = -1


def next_tier(current: Tier, devices: Collection[str], to: str, *, files: bool) -> Tier | None:
    """Return the target tier of an object's move down, None if the object is already there, or lower.

    :param devices: those of its segments. An object that is only in host memory has no tier between its own and files.
    :param to: the requested tier, ``""`` for the next one that the server has.
    :param files: True if the server has a directory for files.
    :raises CapabilityError: if there is no such tier for the object.
    """
    on_host = all(device == "cpu" for device in devices)
    if to not in ("", *LOWER):
        raise CapabilityError(f"objects are not evicted to {to[:100]!r}: use 'host' or 'file'")
    if to == "host" and on_host:
        raise CapabilityError("an object in host memory cannot be evicted to 'host', where it is: use to='file'")
    if to == "":
        to = "file" if on_host or (current == "host" and files) else "host"
    tiers: tuple[Tier, ...] = ("device", *LOWER)
    chosen = tiers[tiers.index("file" if to == "file" else "host")]
    if tiers.index(chosen) <= tiers.index(current):
        return None
    if chosen == "file" and not files:
        raise CapabilityError(
            "there is no tier below for it, because the server has no directory for files: start it with --spill-dir "
            "DIRECTORY, or Server(spill_dir=...)"
        )
    return chosen


def outlives_use(infos: Iterable[SegmentInfo], host_copy: HostCopy) -> bool:
    """Return True if a copy may be reused after the object was in use, because every write has a revision.

    That holds if clients cannot write, and if the app has promised it by ``host_copy="at_build"``.
    """
    return host_copy == "at_build" or all(info.access != "read_write" for info in infos)


def is_good(copy: LowerCopy | None, revision: int | None) -> bool:
    """Return True if a copy has the bytes of the memory at a revision; the revision is None while a write is in progress."""
    return copy is not None and copy.revision == revision


class Copies:
    """All copies of a server's objects. It owns the copies that are added."""

    def __init__(self) -> None:
        self._by_segment: defaultdict[str, dict[Tier, LowerCopy]] = defaultdict(dict)
        self._count_of_all = 0
        #: Bytes by tier and the device of the segment.
        self._nbytes: Counter[tuple[Tier, str]] = Counter()
        self._devices: dict[str, str] = {}

    def add(self, info: SegmentInfo, copy: LowerCopy) -> None:
        """Add the copy of a segment, replacing an earlier one of the same tier."""
        self.discard(info.id, copy.tier)
        self._by_segment[info.id][copy.tier] = copy
        self._devices[info.id] = info.device
        self._count(info.id, copy, 1)

    def get(self, segment_id: str, tier: Tier) -> LowerCopy | None:
        """Return the copy of a segment in a tier, good or not."""
        return self._by_segment[segment_id].get(tier) if segment_id in self._by_segment else None

    def highest(self, segment_id: str) -> LowerCopy:
        """Return the copy of a cold segment in the highest tier."""
        return next(copy for tier in LOWER if (copy := self.get(segment_id, tier)) is not None)

    def of(self, segment_id: str) -> list[LowerCopy]:
        """Return the copies of a segment."""
        return list(self._by_segment[segment_id].values()) if segment_id in self._by_segment else []

    def discard(self, segment_id: str, tier: Tier | None = None) -> None:
        """Close the copies of a segment, those of one tier or all."""
        for copy in self.of(segment_id):
            if tier is None or copy.tier == tier:
                self._count(segment_id, copy, -1)
                del self._by_segment[segment_id][copy.tier]
                copy.close()
        if not self._by_segment.get(segment_id, True):
            del self._by_segment[segment_id], self._devices[segment_id]

    def rename(self, old: str, new: str) -> None:
        """Rename a segment."""
        if old in self._by_segment:
            self._by_segment[new] = self._by_segment.pop(old)
            self._devices[new] = self._devices.pop(old)

    def nbytes(self, tier: Tier, device: str | None = None) -> int:
        """Return the bytes of the copies in a tier, of the segments of one device or of all."""
        return sum(count for (each, of), count in self._nbytes.items() if each == tier and device in (None, of))

    def usage(self, device: str | None = None) -> dict[Tier, int]:
        """Return the bytes of the copies by tier, without empty tiers."""
        found = {tier: self.nbytes(tier, device) for tier in LOWER}
        return {tier: nbytes for tier, nbytes in found.items() if nbytes}

    def __len__(self) -> int:
        """Return the number of copies."""
        return self._count_of_all

    def _count(self, segment_id: str, copy: LowerCopy, sign: int) -> None:
        self._count_of_all += sign
        self._nbytes[copy.tier, self._devices[segment_id]] += sign * copy.segment.info.nbytes
