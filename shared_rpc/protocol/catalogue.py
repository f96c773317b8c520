"""The catalogue of messages: their numbers on the wire, and the conversion between messages and bodies of frames."""

from __future__ import annotations

import msgspec

from shared_rpc.errors import ProtocolError
from shared_rpc.protocol import exported as x
from shared_rpc.protocol import generations as g
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import sources as s
from shared_rpc.protocol import tiers as t
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame

#: The kind byte of every message. A number is never reused for another message.
_KINDS: dict[int, type[m.Message]] = {
    1: m.Hello,
    2: m.Welcome,
    3: m.Ping,
    4: m.Pong,
    5: m.GetServerInfo,
    6: m.ListEndpoints,
    8: m.Call,
    9: m.Result,
    10: m.Cancel,
    11: m.Release,
    12: m.Count,
    13: m.GetObjectInfo,
    14: m.ListObjects,
    16: m.ObjectsReply,
    17: m.InvalidateCall,
    18: m.InvalidateEndpoint,
    19: m.Error,
    20: m.Submit,
    21: m.GetTask,
    22: m.TaskIs,
    23: m.WaitTask,
    24: m.CancelTask,
    25: m.ListTasks,
    26: m.TaskPage,
    27: m.FetchTask,
    28: m.TaskUpdate,
    29: m.Free,
    30: m.AwaitFree,
    31: m.OutOfPoolMemory,
    36: m.ListHolders,
    40: m.CreateBuffer,
    41: m.GetBuffer,
    42: m.FreeBuffer,
    43: m.ListDevices,
    50: g.Refresh,
    51: g.Refreshed,
    52: g.AwaitRefreshes,
    53: g.Refreshes,
    54: g.GetLatest,
    56: g.GetRevision,
    57: g.RevisionPage,
    60: m.Reload,
    61: m.StopServer,
    62: m.Hold,
    63: m.Held,
    64: w.Serve,
    65: w.Shared,
    66: w.Loaded,
    67: w.RunStarted,
    68: w.RunProgress,
    69: w.AwaitingMemory,
    70: w.RunFinished,
    71: w.RunFailed,
    72: w.ChunksReturned,
    73: w.Allocated,
    74: w.Refused,
    75: w.RunWithdrawn,
    76: w.CopyProgress,
    77: w.SegmentsCopied,
    80: w.StartRun,
    81: w.Withdraw,
    82: w.Stop,
    84: w.ReleaseChunks,
    85: w.AwaitChunks,
    86: w.SessionEnded,
    87: w.Reclaim,
    88: w.Allocate,
    89: w.FreeBytes,
    90: g.GetObject,
    91: w.CopySegments,
    93: w.ForgetCopies,
    95: m.Goodbye,
    96: m.Answer,
    100: m.ListSessions,
    101: m.ListRuns,
    102: m.InvalidateObject,
    103: m.GetStatistics,
    120: x.ExportObject,
    121: x.Exported,
    122: x.CheckRecord,
    124: x.Adopt,
    125: x.PrepareCandidate,
    126: x.Candidate,
    127: x.PromoteCandidate,
    140: s.AttachSource,
    141: s.SourceAttached,
    142: s.AwaitMisses,
    143: s.Misses,
    144: s.BuildMiss,
    145: s.AdoptMiss,
    146: s.FailMiss,
    147: s.ReportStatus,
    148: s.DetachSource,
    150: m.KeepSegments,
    160: t.Suspend,
    161: t.Resume,
    162: t.Resumed,
    163: t.Evict,
    164: t.Restore,
}
#: The kind byte by the message's class.
NUMBERS = {kind: number for number, kind in _KINDS.items()}
#: Decoders by kind byte, each made on first use: to make all of them takes some milliseconds of an import.
_decoders: dict[int, msgspec.msgpack.Decoder[m.Message]] = {}
#: Encodes the body of a message; raises one of :data:`UNWRITABLE`, from which :func:`unwritable` makes the error.
encode_body = msgspec.msgpack.Encoder().encode
UNWRITABLE = (UnicodeEncodeError, OverflowError, TypeError)


def encode_message(message: m.Message) -> tuple[int, bytes]:
    """Return ``(kind, body)`` for a frame.

    :raises ProtocolError: for values that MessagePack cannot hold, such as a text with surrogates.
    """
    try:
        return NUMBERS[type(message)], encode_body(message)
    except UNWRITABLE as error:
        raise unwritable(message, error) from error


def unwritable(message: m.Message, error: Exception) -> ProtocolError:
    """Return the error for a message that MessagePack cannot hold."""
    return ProtocolError(f"cannot encode a {type(message).__name__} message: {error}")


def decode_message(frame: Frame) -> m.Message:
    """Decode the message of a frame.

    :raises ProtocolError: for an unknown kind, or a body of another kind.
    """
    decoder = _decoders.get(frame.kind)
    if decoder is None:
        if frame.kind not in _KINDS:
            raise ProtocolError(f"unknown message kind {frame.kind}")
        decoder = _decoders[frame.kind] = msgspec.msgpack.Decoder(_KINDS[frame.kind])
    try:
        return decoder.decode(frame.body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"cannot decode a {_KINDS[frame.kind].__name__} message: {error}") from error
