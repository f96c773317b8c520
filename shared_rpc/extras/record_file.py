"""A file of a record: an object on disk, which a server can restore without building it.

::

    offset  size
    0       20    magic, with the number of the format: b"shared-rpc record 1\\n"
    20      8     bytes of the header; integers are big-endian
    28      8     number of parts
    36      16    xxh3_128 of bytes 0 to 36, the header and the parts' digests
    52            the header, a RecordHeader
                  the xxh3_128 of each part, 16 bytes; a part is 64 MiB of a segment, the last one of a segment may be less
                  zeros to a whole page
                  the segments, each from the beginning of a page

The digests protect against damage, not against malice: the header contains a pickle. So a file is read only if no user except
its reader and root can have written it.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from shared_rpc.client.exported import ExportedRecord
from shared_rpc.errors import RecordError
from shared_rpc.memory.backends.host import write_exactly
from shared_rpc.memory.file_parts import (
    DIGEST,
    PART,
    Part,
    PartError,
    carrier_of,
    digest,
    place_in,
    read_parts,
    write_parts,
)
from shared_rpc.protocol.exported import RecordHeader
from shared_rpc.protocol.own_files import file_problem
from shared_rpc.protocol.records import SegmentInfo

if TYPE_CHECKING:
    from shared_rpc import Client, Provider

__all__ = ["FileRecord", "save"]

#: The first bytes, without the format version; and that version, raised with every change.
_NAME, _FORMAT = b"shared-rpc record ", 1
_MAGIC = _NAME + b"%d\n" % _FORMAT
#: Bytes of the header, and number of parts.
_COUNTS = struct.Struct(">QQ")
_FIXED = len(_MAGIC) + _COUNTS.size + DIGEST
_PAGE = 4096
#: Maximum bytes before the segments, which are read at once.
_LARGEST = 512 << 20


class _Part(NamedTuple):
    """A piece of a segment, at ``start`` of that, and ``offset`` in the file."""

    segment: int
    start: int
    nbytes: int
    offset: int


class _Layout:
    """Places in a file, according to its header."""

    def __init__(self, nbytes: int, segments: tuple[SegmentInfo, ...]) -> None:
        count = sum(-(-info.nbytes // PART) for info in segments)
        self.head = _FIXED + nbytes + count * DIGEST
        self.parts: list[_Part] = []
        end = self.head
        for segment, info in enumerate(segments):
            begin = -(-end // _PAGE) * _PAGE
            for start in range(0, info.nbytes, PART):
                size = min(PART, info.nbytes - start)
                self.parts.append(_Part(segment, start, size, begin + start))
            end = begin + info.nbytes
        #: Bytes of the whole file.
        self.nbytes = end


def save(client: Client | Provider, object_id: str, path: str | os.PathLike[str]) -> RecordHeader:
    """Write an object of a server to a file, atomically and of one revision; return its header.

    An existing file is replaced; a concurrent reader gets that or the whole of the new one. The new one is private to this
    user (0600).

    :param client: a client of the server, or its provider.
    :raises RecordError: if it cannot be written, or the object is updated during the write; an earlier file is unchanged.
    :raises StaleHandleError: if the server has no such object.
    """
    name = os.fspath(path)
    with client.export(object_id) as record:
        # Memory that is shared for reading is written only by its maker.
        page = client.revision_page(object_id) if record.header.access == "read_write" and record.segments else None
        revision = page.wait(0, float("inf")) if page is not None else 0
        header = record.header.to_bytes()
        layout = _Layout(len(header), record.header.segments)
        try:
            with _drafted(name, layout.nbytes) as fd:
                digests = b"".join(_write_parts(fd, layout, record))
                begin = _MAGIC + _COUNTS.pack(len(header), len(layout.parts))
                write_exactly(fd, memoryview(b"".join([begin, digest(begin, header, digests), header, digests])), 0)
                os.fsync(fd)
                if page is not None and page.revision != revision:
                    raise RecordError(
                        f"object {object_id} was written to in place while it was exported: export it again",
                        reason="unreadable",
                    )
        except OSError as error:
            if error.errno is None:  # a signal handler's own
                raise
            what = f"cannot write the record {name} of {layout.nbytes} bytes: {error.strerror}"
            raise RecordError(what, reason="unreadable") from error
        return record.header


@contextmanager
def _drafted(name: str, nbytes: int) -> Iterator[int]:
    """Yield the descriptor of a new file, which gets its name when the block has succeeded.

    Until then it has no name, if the file system supports that: then not even a killed process leaves one.
    """
    folder = os.path.dirname(name) or "."
    draft, flags = f"{name}.{secrets.token_hex(4)}.part", os.O_RDWR | os.O_CLOEXEC
    nameless = True
    try:
        fd = os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        fd, nameless = os.open(draft, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), False
    try:
        os.fchmod(fd, 0o600)
        os.posix_fallocate(fd, 0, nbytes)  # before anything is written: a full disk is detected at once
        yield fd
        if nameless:
            # With a directory CPython follows the link (linkat(2)), and without one it does not, to 3.14 at least.
            os.link(f"/proc/self/fd/{fd}", draft, src_dir_fd=fd, follow_symlinks=True)
        os.replace(draft, name)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
    finally:
        os.close(fd)


def _write_parts(fd: int, layout: _Layout, record: ExportedRecord) -> list[bytes]:
    """Write the segments, and return the digests of their parts."""
    for segment in record.segments:
        segment.synchronize()  # complete this process's pending writes
    digests: dict[int, bytes] = {}
    try:
        for device, parts in _by_device(fd, layout, record).items():
            write_parts(parts, carrier_of(device), lambda part, found: digests.update({part.offset: found}))
    except PartError as error:
        raise error.problem or error from None
    return [digests[part.offset] for part in layout.parts]


def _by_device(fd: int, layout: _Layout, record: ExportedRecord, digests: bytes = b"") -> dict[str, list[Part]]:
    """Return the parts of the file with their places in a record's memory, by the device of that."""
    found: dict[str, list[Part]] = {}
    for number, part in enumerate(layout.parts):
        segment = record.segments[part.segment]
        mapping = segment._mapped().mapping
        expected = digests[number * DIGEST : (number + 1) * DIGEST]
        place = place_in(mapping, segment._offset + part.start)
        found.setdefault(mapping.info.device, []).append(Part(fd, part.offset, part.nbytes, *place, expected))
    return found


class FileRecord(ExportedRecord):
    """A record in a file, for :meth:`Client.adopt`; must be closed, for example by ``with``.

    Opening it only reads the header; :meth:`Client.adopt` reads the rest, after the check that the record can be adopted.

    :raises RecordError: if the file cannot be read, may be another user's work, or is invalid, damaged or of another format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        with ExitStack() as opened:
            self._fd = -1
            opened.callback(self.close)
            try:
                # Opening a pipe without a writer would block.
                self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                status = os.fstat(self._fd)
                if not stat.S_ISREG(status.st_mode):
                    raise RecordError(f"the record {self.path} is no regular file", reason="unreadable")
                if why := file_problem(status):
                    raise RecordError(
                        f"the record {self.path} {why}: it holds a pickle, which is loaded by those who call the endpoint: "
                        f"check it, and copy it or chmod 600",
                        reason="untrusted",
                    )
                header, self._layout, self._digests = _read_head(self._fd, self.path, status.st_size)
            except OSError as error:
                if error.errno is None:  # a signal handler's own
                    raise
                raise RecordError(f"cannot read the record {self.path}: {error.strerror}", reason="unreadable") from error
            opened.pop_all()
        parts: Any = [SimpleNamespace(info=info, nbytes=info.nbytes, _unmap=lambda: None) for info in header.segments]
        super().__init__(header, parts, (), allocated=False)

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        self._closed = True
        if fd >= 0:
            os.close(fd)

    def copy_to(self, target: ExportedRecord) -> None:
        """Read the segments directly into their target memory.

        :raises RecordError: if they differ from the written ones.
        """
        try:
            for device, parts in _by_device(self._fd, self._layout, target, self._digests).items():
                read_parts(parts, carrier_of(device), lambda _: None)
        except PartError as error:
            raise RecordError(
                f"the record {self.path} is damaged: bytes {error.part.offset} to {error.part.offset + error.part.nbytes} are "
                f"{error.problem or 'not those that were written'}. Export it again",
                reason="damaged",
            ) from None


def _read_head(fd: int, path: str, size: int) -> tuple[RecordHeader, _Layout, bytes]:
    fixed = os.pread(fd, _FIXED, 0)
    magic = fixed[: len(_MAGIC)]
    if not fixed.startswith(_NAME):
        raise RecordError(f"{path} is no record: it begins with {fixed[:20]!r}", reason="malformed")
    if len(fixed) == _FIXED and magic != _MAGIC:
        raise RecordError(
            f"the record {path} has format {magic[len(_NAME) :].decode('ascii', 'replace').strip()}, and this release of "
            f"shared-rpc reads format {_FORMAT}: use one release on both sides",
            reason="version",
        )
    damaged = RecordError(
        f"the record {path} is damaged: its {size} bytes are not those that were written. Export it again", reason="damaged"
    )
    if len(fixed) < _FIXED:
        raise damaged
    nbytes, count = _COUNTS.unpack_from(fixed, len(_MAGIC))
    if nbytes + count * DIGEST > min(size - _FIXED, _LARGEST):
        raise damaged
    rest = os.pread(fd, nbytes + count * DIGEST, _FIXED)
    if digest(fixed[:-DIGEST], rest) != fixed[-DIGEST:]:
        raise damaged
    header = RecordHeader.from_bytes(rest[:nbytes])
    sizes = [info.nbytes for info in header.segments]
    # Before the parts are laid out, of which there is one for each piece of the claimed size.
    if min(sizes, default=1) <= 0 or sum(sizes) > size:
        raise damaged
    layout = _Layout(nbytes, header.segments)
    if (len(layout.parts), layout.nbytes) != (count, size):
        raise damaged
    return header, layout, rest[nbytes:]
