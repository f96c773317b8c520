"""Digests of memory that lies in a file, against damage: one for each part."""

from __future__ import annotations

import xxhash

#: Bytes of a part, which has a digest of its own; and bytes of a digest.
PART = 64 << 20
DIGEST = 16


def digest(*pieces: bytes | memoryview) -> bytes:
    """Return the xxh3_128 of some bytes after one another."""
    found = xxhash.xxh3_128()
    for piece in pieces:
        found.update(piece)
    return found.digest()
