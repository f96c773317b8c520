"""A directory for copies of objects: files without a name, which end with their last descriptor."""

from __future__ import annotations

import errno
import os

from shared_rpc.errors import CapabilityError, ConfigurationError
from shared_rpc.memory.segments import Segment, new_segment_id
from shared_rpc.protocol.records import SegmentInfo

#: No file can be linked into the directory afterwards (O_EXCL): only holders of its descriptor read it.
_FLAGS = os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC


class SpillDirectory:
    """A directory for a server's files of objects. Not even a killed process leaves any there: they have no names.

    :raises ConfigurationError: if this process cannot make such files in it.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        try:
            os.close(os.open(self.path, _FLAGS, 0o600))
        except OSError as error:
            raise ConfigurationError(f"cannot spill objects to {self.path}: {self._why(error)}") from error

    def _why(self, error: OSError) -> str:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return "it is no directory: create it first, for this user alone"
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            return "its file system has no files without a name (O_TMPFILE): use a directory on ext4, xfs, btrfs or tmpfs"
        return f"{error.strerror} (uid {os.geteuid()})"

    def create(self, nbytes: int) -> Segment:
        """Make a file with preallocated space. The caller owns it. Called in a thread.

        :raises CapabilityError: if the disk has too little space for it.
        """
        info = SegmentInfo(new_segment_id(), nbytes, "cpu", mechanism="file")
        try:
            segment = Segment.owning(info, os.open(self.path, _FLAGS, 0o600))
        except OSError as error:
            raise CapabilityError(f"cannot make a file in the spill directory {self.path}: {error.strerror}") from error
        try:
            os.posix_fallocate(segment.fileno(), 0, nbytes)
        except OSError as error:
            segment.close()
            raise CapabilityError(
                f"the spill directory {self.path} has no space for {nbytes} bytes ({error.strerror}; {_free(self.path)} are "
                f"free): free space there, or start the server with another --spill-dir"
            ) from error
        except BaseException:
            segment.close()
            raise
        return segment


def _free(path: str) -> int:
    there = os.statvfs(path)
    return there.f_bavail * there.f_frsize
