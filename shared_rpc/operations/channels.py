"""Channels: named tensors from one process to others, through slots of shared memory.

A channel is two buffers of a server. One has the slots, on the device of the tensors. The other one has the channel's name, and
in host memory its settings and a header for each slot; the page of its revision has the ring's counters, see
:mod:`shared_rpc.memory.ring`. Once both sides have the buffers, no message goes through the server.

Small content for a GPU lies in host memory behind the slot's header: copies within a GPU are kernels, and two processes that
run kernels in turn make the GPU switch contexts, for 0.15 ms each time (measured on an H200), while its copy engines read and
write host memory without a switch.

The sender copies tensors into a slot, waits for the device, writes the header, and publishes the slot. A reader copies them
out, waits for the device, and acknowledges the slot. So no work of one process on a device waits for that of another.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import msgspec

from shared_rpc.client.handle import Lease
from shared_rpc.client.steps import BlockingMethods, Operation, Request, Work
from shared_rpc.client.suspension import Context
from shared_rpc.errors import BufferNotFound, CapabilityError, ChannelClosed, ConfigurationError, ProtocolError
from shared_rpc.memory.devices import device_id
from shared_rpc.memory.layout import aligned
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.ring import MOST_READERS, Ring
from shared_rpc.operations.binding import BlockingPart, CoroutinePart, Opened, Part, Steps, bound, operation, take_result
from shared_rpc.operations.buffers import created, request_of
from shared_rpc.operations.generations import GenerationOperations
from shared_rpc.operations.handles import HandleOperations, until_of
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.buffers import ITEM_SIZES, Extent

if TYPE_CHECKING:
    import torch

#: Bytes of the settings, of the header of a slot, and of small content behind it. Some ten thousand tensors fit into one slot.
_SETTINGS, _HEADER, _SMALL = 4096, 1 << 20, 64 << 10
#: Maximum bytes of ``meta``, and of a tensor's name.
_META, _NAME = _HEADER // 2, 1000
#: Upper bound of a piece's bytes in a header besides its name.
_PIECE = 700
_MOST_SLOTS = 1024
#: Places of tensors that a process remembers for all slots: messages often repeat the same tensors.
_MOST_PLACES = 8192


class _Settings(msgspec.Struct, array_like=True):
    """The settings of a channel. ``buffer_id`` names the buffer with the slots, of ``nbytes`` each."""

    buffer_id: str
    nbytes: int
    slots: int
    readers: int


class _Piece(msgspec.Struct, array_like=True, frozen=True):
    """All of a tensor, or ``nbytes`` bytes from ``start`` on: at ``offset`` of the slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    offset: int

    @property
    def extent(self) -> Extent:
        """The extent of the whole tensor."""
        return _extent(self.shape, self.dtype)


#: Messages often repeat the same tensors.
_extent = functools.lru_cache(8192)(Extent.of)
_NOTHING = msgspec.Raw(b"\xc0")  # None


class _Header(msgspec.Struct, array_like=True):
    """The content of a slot. A message is the slots from one that is ``first`` to one that is ``last``."""

    first: bool
    last: bool
    pieces: list[_Piece]
    meta: msgspec.Raw = _NOTHING
    #: True if the pieces lie behind the header.
    small: bool = False


_headers = msgspec.msgpack.Decoder(_Header)
_encode = msgspec.msgpack.Encoder().encode


def create(
    ctx: Context, name: str, nbytes: int, slots: int, readers: int, device: torch.device | str | None
) -> Operation[Parts]:
    """Create and return the buffers of a channel."""
    if not 0 < len(name) <= _NAME:
        raise ConfigurationError(f"a channel's name has 1 to {_NAME} characters, and not {len(name)}")
    if not (1 <= slots <= _MOST_SLOTS and 1 <= readers <= MOST_READERS and nbytes > 0):
        raise ConfigurationError(
            f"nbytes={nbytes}, slots={slots}, readers={readers}: use a positive size of each slot in bytes, 1 to {_MOST_SLOTS} "
            f"slots, and 1 to {MOST_READERS} readers"
        )
    nbytes = aligned(nbytes)
    chosen = ""
    if device is not None:
        chosen = yield Work(lambda: device_id(str(device)))
    data: Lease[Any] = yield from created(ctx, request_of(nbytes * slots, "uint8", chosen))
    request = request_of(_SETTINGS + (_HEADER + _SMALL) * slots, "uint8", "cpu", zero=True)
    control: Lease[Any] = yield from created(ctx, msgspec.structs.replace(request, name=name))
    page = yield from GenerationOperations.revision_page.body(ctx, control.object_id)
    settings = _Settings(data.object_id, nbytes, slots, readers)
    ring = Ring(page, slots, readers, f"channel {name!r}")
    ring.take("creator")
    _write(control.value.data_ptr(), _encode(settings))
    return Parts(name, settings, data, control, ring)


def open_once(ctx: Context, name: str) -> Operation[Parts]:
    """Get and return the buffers of a channel."""
    what = f"open_channel({name!r})"
    control: Lease[Any] = yield from take_result(ctx, what, (yield Request(m.GetBuffer("", name[: _NAME + 1]), what)))
    page = yield from GenerationOperations.revision_page.body(ctx, control.object_id)
    settings: _Settings = yield Work(lambda: _settings_of(control.value, name))
    data: Lease[Any] = yield from take_result(ctx, what, (yield Request(m.GetBuffer(settings.buffer_id), what)))
    if data.value.nbytes < settings.nbytes * settings.slots:
        raise ProtocolError(f"channel {name!r} has slots of {settings.nbytes} bytes outside of its buffer")
    return Parts(name, settings, data, control, Ring(page, settings.slots, settings.readers, f"channel {name!r}"))


def _settings_of(control: torch.Tensor, name: str) -> _Settings:
    text = _read(control.data_ptr(), _SETTINGS)
    if not text:
        raise BufferNotFound(f"channel {name!r} is being created, or its buffer is no channel", reason="unknown")
    try:
        settings = msgspec.msgpack.decode(text, type=_Settings)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"buffer {name!r} is no channel: {error}") from error
    if control.nbytes < _SETTINGS + (_HEADER + _SMALL) * settings.slots or not 1 <= settings.readers <= MOST_READERS:
        raise ProtocolError(f"buffer {name!r} is no channel: it is too small for {settings}")
    if settings.nbytes <= 0 or settings.nbytes != aligned(settings.nbytes):
        raise ProtocolError(f"buffer {name!r} is no channel: it has slots of {settings.nbytes} bytes")
    return settings


def _write(address: int, text: bytes) -> None:
    """Write a text and then its length, which publishes it to the reader."""
    ctypes.memmove(address + 8, text, len(text))
    ctypes.c_uint64.from_address(address).value = len(text)


def _read(address: int, limit: int) -> bytes:
    length = ctypes.c_uint64.from_address(address).value
    if length > limit - 8:
        raise ProtocolError(f"a header of a channel names {length} bytes, and has at most {limit - 8}")
    return ctypes.string_at(address + 8, length)


class _Slot:
    """The memory of a slot."""

    def __init__(self, flat: torch.Tensor, places: int) -> None:
        self.flat = flat
        #: Like :func:`_view`, of which ``places`` results are remembered, for this module alone.
        self.place = functools.lru_cache(places)(functools.partial(_view, flat))

    def read_from(self, address: int, header: _Header) -> None:
        """Copy the content of a small slot, in host memory."""
        used = max((piece.offset + piece.nbytes for piece in header.pieces), default=0)
        ctypes.memmove(self.flat.data_ptr(), address, min(max(used, 0), len(self.flat)))


def _view(flat: torch.Tensor, piece: _Piece) -> torch.Tensor:
    """Return a new tensor over a piece's elements in a slot: of the whole's shape, or a flat part of it."""
    import torch

    total, item = piece.extent.nbytes, ITEM_SIZES[piece.dtype]
    offset, nbytes, start = piece.offset, piece.nbytes, piece.start
    if not (0 <= offset <= offset + nbytes <= len(flat) and 0 <= start <= start + nbytes <= total):
        raise ProtocolError(f"a channel's header places {nbytes} bytes of {piece.name[:200]!r} outside of its slot")
    if offset % item or nbytes % item or start % item:
        raise ProtocolError(f"a channel's header cuts an element of {piece.name[:200]!r}, of {piece.dtype}")
    with _plainly():
        part = flat[offset : offset + nbytes].view(getattr(torch, piece.dtype))
        return part.view(piece.shape) if nbytes == total and len(piece.shape) != 1 else part


class Parts:
    """The buffers of a channel in one process."""

    def __init__(self, name: str, settings: _Settings, data: Lease[Any], control: Lease[Any], ring: Ring) -> None:
        import torch

        self.name = name
        self.settings = settings
        self.handles: tuple[Any, ...] = data, control
        self.ring = ring
        flat: torch.Tensor = data.value.view(-1)
        places = max(_MOST_PLACES // settings.slots, 64)
        self.slots = [_Slot(flat[at * settings.nbytes : (at + 1) * settings.nbytes], places) for at in range(settings.slots)]
        headers = range(_SETTINGS, _SETTINGS + (_HEADER + _SMALL) * settings.slots, _HEADER + _SMALL)
        self.headers = [control.value.data_ptr() + at for at in headers]
        self.small_slots = [_Slot(control.value[at + _HEADER : at + _HEADER + _SMALL], places) for at in headers]
        #: A reader's copy of the content of a small slot.
        with _plainly():
            self.private = _Slot(torch.empty(_SMALL, dtype=torch.uint8, device="cpu"), places)
        mapping = MAPPINGS.find(flat.data_ptr())
        assert mapping is not None, "a buffer is mapped"
        self._backend: Any = mapping[0].backend
        self.device = flat.device

    def synchronize(self, *, copied: bool) -> None:
        """Wait until no queued work of this process accesses a slot.

        :param copied: True if only copies on the current stream do, so that nothing else is waited for.
        """
        self.check_capture()
        if copied and self.device.type == "cuda":
            import torch

            self._backend.wait(torch.cuda.current_stream(self.device).cuda_stream)
        elif not self._backend.synchronize():
            raise self._captured()

    def check_capture(self) -> None:
        """Check that no CUDA graph is being captured on the current stream.

        :raises CapabilityError: if one is.
        """
        import torch

        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise self._captured()

    def _captured(self) -> CapabilityError:
        return CapabilityError(
            f"channel {self.name!r} waits for the GPU, and a CUDA graph is being captured: send and receive before or after"
        )


def _work(function: Callable[..., Any], *args: Any, waits: bool = False) -> Work:
    return Work(functools.partial(function, *args), waits=waits)


def _fills(tensors: Mapping[str, torch.Tensor], nbytes: int) -> Iterator[list[tuple[_Piece, torch.Tensor]]]:
    """Pack tensors into slots: the pieces of one slot after the other. A tensor that fits into a slot is in one piece."""
    fill: list[tuple[_Piece, torch.Tensor]] = []
    used = length = 0
    for name, tensor in tensors.items():
        dtype, shape, total = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes
        start = 0
        while True:
            size = min(total - start, nbytes)
            if fill and (used + size > nbytes or length + len(name) * 4 + _PIECE > _HEADER - _META - 64):
                yield fill
                fill, used, length = [], 0, 0
            fill.append((_Piece(name, dtype, shape, start, size, used), tensor))
            used += aligned(size)
            length += len(name) * 4 + _PIECE
            start += size
            if start >= total:
                break
    yield fill


def _meta_of(meta: Any) -> msgspec.Raw:
    try:
        text = msgspec.Raw(_encode(meta))
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise ConfigurationError(f"meta is not plain data (None, bool, int, float, str, bytes, list, dict): {error}") from error
    if len(text) > _META:
        raise ConfigurationError(f"meta has {len(text)} bytes, and may have {_META}: send large data as a tensor")
    return text


def _check(tensors: Mapping[str, torch.Tensor]) -> None:
    import torch

    for name, tensor in tensors.items():
        what = f"tensor {str(name)[:200]!r}"
        if not isinstance(name, str) or len(name) > _NAME:
            raise ConfigurationError(f"{what}: a tensor's name is a str of at most {_NAME} characters")
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
            raise CapabilityError(f"{what} is no plain strided tensor: send its parts, or a dense tensor")
        if str(tensor.dtype).removeprefix("torch.") not in ITEM_SIZES or tensor.dim() > 64:
            raise CapabilityError(f"{what} has {tensor.dim()} dimensions of {tensor.dtype}, which a channel does not carry")


def _plainly() -> AbstractContextManager[object]:
    """Leave inference mode for a block: tensors created or written in it could not be used outside."""
    import torch

    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _part(tensor: torch.Tensor, piece: _Piece) -> torch.Tensor:
    """Return a piece's part of a contiguous tensor."""
    item = ITEM_SIZES[piece.dtype]
    return tensor.view(-1)[piece.start // item : (piece.start + piece.nbytes) // item]


def _put(parts: Parts, slot: _Slot, fill: Sequence[tuple[_Piece, torch.Tensor]]) -> None:
    parts.check_capture()
    for piece, tensor in fill:
        whole = piece.nbytes == tensor.nbytes
        _copy(slot.place(piece), tensor.detach() if whole else _part(tensor.detach().contiguous(), piece))
    if slot.flat.device.type == "cuda":  # a copy to the host is complete
        parts.synchronize(copied=True)


def _new(piece: _Piece, device: torch.device) -> torch.Tensor:
    import torch

    with _plainly():
        return torch.empty(piece.shape, dtype=getattr(torch, piece.dtype), device=device)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with _plainly():
        # It may be a parameter. A target on the host is read without waiting for a stream.
        target.detach().copy_(source, non_blocking=target.is_cuda)


class _Message(Part):
    """The reception of one message: its current slot, and the current piece in that."""

    def __init__(self, driver: Any, parts: Parts, timeout: float | None) -> None:
        super().__init__(driver)
        #: The ``meta`` sent with the tensors, None before the block is entered.
        self.meta: Any = None
        self._parts = parts
        self._timeout = timeout
        self._header: _Header | None = None
        self._slot = parts.private
        self._pieces: Iterator[_Piece] = iter(())
        self._over = False
        #: True if the caller was given tensors in a slot, which may be used on any stream.
        self._lent = False
        #: True if a block ends the reception, rather than an iterator.
        self._in_block = False

    @operation
    def copy_to(self, targets: Mapping[str, torch.Tensor]) -> Steps[list[str]]:
        """Copy the remaining tensors into targets of the same name and shape, without a temporary; return their names.

        :raises ConfigurationError: if there is no such target.
        """
        names = []
        yield from self._begin()
        while (piece := (yield from self._next_piece())) is not None:
            target = targets.get(piece.name)
            if target is None or tuple(target.shape) != piece.shape:
                there = "none of that name" if target is None else f"one of shape {tuple(target.shape)}"
                raise ConfigurationError(
                    f"tensor {piece.name[:200]!r} of shape {piece.shape} was received, and the targets have {there}"
                )
            if piece.nbytes == piece.extent.nbytes:
                yield _work(_copy, target, self._slot.place(piece))
            elif target.is_contiguous():
                yield from self._assemble(piece, target.detach())
            else:
                whole = yield _work(_new, piece, self._parts.device)
                yield from self._assemble(piece, whole)
                yield _work(_copy, target, whole)
            names.append(piece.name)
        if not self._in_block:
            yield from self._leave()
        return names

    def _enter(self) -> Steps[None]:
        self._in_block = True
        yield from self._begin()

    def _leave(self) -> Steps[None]:
        """Acknowledge the slot, from any position."""
        self._pieces, self._over = iter(()), True
        if self._header is not None:
            yield Work(self._acknowledge)

    def _begin(self) -> Steps[None]:
        """Wait for the message, unless that was done before. The rest of an earlier one is skipped."""
        if self._header is not None or self._over:
            return
        self._parts.ring.take("reader")
        while not (header := (yield from self._next_header())).first:
            self._parts.ring.advance()
        self._open(header)
        try:
            self.meta = msgspec.msgpack.decode(header.meta)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"the meta of a message in channel {self._parts.name!r} cannot be read: {error}") from error

    def _next_header(self) -> Steps[_Header]:
        ring, until = self._parts.ring, until_of(self._timeout)
        while not ring.given():
            yield _work(ring.wait_given, until, waits=True)
        try:
            return _headers.decode(_read(self._parts.headers[ring.turn], _HEADER))
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a header of channel {self._parts.name!r} cannot be read: {error}") from error

    def _open(self, header: _Header) -> None:
        turn, parts = self._parts.ring.turn, self._parts
        if header.small:
            parts.private.read_from(parts.headers[turn] + _HEADER, header)
        self._slot = parts.private if header.small else parts.slots[turn]
        self._header = header
        self._pieces = iter(header.pieces)

    def _next_piece(self) -> Steps[_Piece | None]:
        """Return the next piece, None at the end of the message, whose last slot is not yet acknowledged then."""
        yield from self._begin()
        while (piece := next(self._pieces, None)) is None:
            if self._header is None or self._header.last:
                return None
            yield Work(self._acknowledge)
            following = yield from self._next_header()
            if following.first:
                self._over = True
                pid = self._parts.ring.sender_pid
                raise ChannelClosed(
                    f"the sender of channel {self._parts.name!r} (pid {pid}) abandoned a message, or was replaced "
                    f"during one: receive the next message",
                    reason="abandoned",
                    pid=pid,
                )
            self._open(following)
        return piece

    def _acknowledge(self) -> None:
        """Acknowledge the slot, once, whatever interrupts it."""
        header = self._header
        if header is None:
            return
        if not header.small:
            self._parts.synchronize(copied=not self._lent)
        self._header = None
        self._parts.ring.advance()
        if header.small:  # the sender need not wait for the copies of the copied content
            self._parts.synchronize(copied=True)

    def _next(self) -> Steps[tuple[str, torch.Tensor] | None]:
        piece = yield from self._next_piece()
        if piece is None:
            return None
        if piece.nbytes == piece.extent.nbytes and self._slot.flat.device == self._parts.device:
            self._lent = True
            return piece.name, _view(self._slot.flat, piece)
        whole = yield _work(_new, piece, self._parts.device)
        if piece.nbytes == piece.extent.nbytes:
            yield _work(_copy, whole, self._slot.place(piece))
        else:
            yield from self._assemble(piece, whole)
        if isinstance(self, CoroutinePart):  # steps run in another thread than the caller's, whose streams are others
            yield Work(functools.partial(self._parts.synchronize, copied=True))
        return piece.name, whole

    def _assemble(self, piece: _Piece, whole: torch.Tensor) -> Steps[None]:
        """Copy a piece, and the following ones of the same tensor, into a contiguous tensor."""
        total = piece.extent.nbytes
        while True:
            yield _work(_copy, _part(whole, piece), self._slot.place(piece))
            if piece.start + piece.nbytes >= total:
                return
            following = yield from self._next_piece()
            if following is None or (following.name, following.start) != (piece.name, piece.start + piece.nbytes):
                raise ProtocolError(f"channel {self._parts.name!r} lacks a piece of tensor {piece.name[:200]!r}")
            piece = following


@bound
class TensorMessage(_Message, BlockingPart):
    """Named tensors of one message, as a context manager, and as an iterator over pairs of name and tensor.

    A tensor lies in a slot, and is valid until a step reaches the next slot, or the block or iterator ends: clone or copy
    tensors to keep. One that is larger than a slot is a separate tensor, and so are those of a small message on a GPU. The
    unread rest of a message is skipped.
    """

    def close(self) -> None:
        """End the reception, and skip the rest."""
        self._run(self._leave())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            while (pair := self._run(self._next())) is not None:
                yield pair
                del pair
        finally:
            if not self._in_block:
                self.close()


@bound
class AsyncTensorMessage(_Message, CoroutinePart):
    """:class:`TensorMessage` for coroutines: ``async with``, and ``async for`` over pairs of name and tensor."""

    async def close(self) -> None:
        """Behave like :meth:`TensorMessage.close`, also in a cancelled scope."""
        await self.__aexit__()

    async def __aiter__(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        try:
            while (pair := await self._run(self._next())) is not None:
                yield pair
                del pair
        finally:
            if not self._in_block:
                await self.close()


class _Channel(Part):
    """The operations of a channel in one process."""

    def __init__(self, driver: Any, parts: Parts) -> None:
        super().__init__(driver)
        self._parts = parts

    @property
    def name(self) -> str:
        """The name under which other processes open the channel."""
        return self._parts.name

    @property
    def nbytes(self) -> int:
        """Bytes of a slot."""
        return self._parts.settings.nbytes

    @property
    def slots(self) -> int:
        """The number of slots."""
        return self._parts.settings.slots

    @property
    def readers(self) -> int:
        """The number of readers that acknowledge each slot."""
        return self._parts.settings.readers

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {self.slots} slots of {self.nbytes} bytes, {self.readers} readers>"

    @operation
    def send(self, tensors: Mapping[str, torch.Tensor], meta: Any = None, timeout: float | None = None) -> Steps[None]:
        """Copy tensors into slots, as one message; return when all are copied and may be changed.

        Waits for work queued on the GPU. Tensors may have any dtype and strides, and be on another device than the channel; a
        message may be larger than all slots. ``requires_grad`` and the class of parameters are not sent.

        :param meta: plain data sent along: None, bool, int, float, str, bytes, lists and dicts.
        :param timeout: seconds to wait for a free slot, each time; None for no limit.
        :raises DeadlineExceeded: if the readers have not acknowledged a slot in that time; they skip the incomplete
            message.
        :raises ChannelClosed: if a reader has closed the channel, or its process has ended.
        :raises CapabilityError: for a tensor that is not strided; while a CUDA graph is being captured.
        :raises ConfigurationError: if another process is the sender.
        """
        text = _meta_of(meta)
        _check(tensors)
        parts, ring, first = self._parts, self._parts.ring, True
        ring.take("sender")
        ring.check_readers()
        fills = _fills(tensors, parts.settings.nbytes)
        fill: list[tuple[_Piece, torch.Tensor]] | None = next(fills)
        while fill is not None:
            following, until = next(fills, None), until_of(timeout)
            while not ring.acknowledged(ring.slots - 1):
                yield _work(ring.wait_acknowledged, ring.slots - 1, until, waits=True)
            turn = ring.turn
            pieces = [piece for piece, _ in fill]
            small = parts.device.type == "cuda" and (not pieces or pieces[-1].offset + pieces[-1].nbytes <= _SMALL)
            yield _work(_put, parts, (parts.small_slots if small else parts.slots)[turn], fill)
            header = _Header(first, following is None, pieces, text if first else _NOTHING, small)
            _write(parts.headers[turn], _encode(header))
            ring.advance()
            fill, first = following, False

    @operation
    def flush(self, timeout: float | None = None) -> Steps[None]:
        """Wait until every reader has acknowledged everything sent. For the errors see :meth:`send`.

        :param timeout: seconds to wait; None for no limit.
        """
        ring, until = self._parts.ring, until_of(timeout)
        ring.take("sender")
        while not ring.acknowledged(0):
            yield _work(ring.wait_acknowledged, 0, until, waits=True)

    @operation
    def close(self) -> Steps[None]:
        """Leave the channel, visibly for its peers. The memory is freed when all sides have left it, or have ended."""
        yield from self._leave()

    def _leave(self) -> Steps[None]:
        self._parts.ring.leave()
        for handle in self._parts.handles:
            yield from HandleOperations.release.body(handle)


@bound
class TensorChannel(_Channel, BlockingPart):
    """A channel of :class:`Client`. Its first :meth:`send` makes this process the sender, its first :meth:`receive` a reader.

    Use it in one thread at a time. A forked child must open the channel again.
    """

    def receive(self, timeout: float | None = None) -> TensorMessage:
        """Return the next message; entering its block, or starting its iterator, waits for it and raises the errors below.

        :param timeout: seconds to wait for a slot, each time; None for no limit.
        :raises DeadlineExceeded: if the sender has not published a slot in that time.
        :raises ChannelClosed: after the last slot, if the sender has closed the channel, or its process has ended; with
            ``reason="abandoned"`` if it gave up in the middle of a message.
        :raises ConfigurationError: if the channel already has its number of readers.
        """
        return TensorMessage(self._driver, self._parts, timeout)

    def __iter__(self) -> Iterator[TensorMessage]:
        """Iterate over messages until the sender closes the channel."""
        while True:
            try:
                message = self.receive().__enter__()
            except ChannelClosed as error:
                if error.reason == "closed":
                    return
                raise
            with message:
                yield message


@bound
class AsyncTensorChannel(_Channel, CoroutinePart):
    """:class:`TensorChannel` for coroutines. Copies and waits run in a thread, whose streams are the default ones."""

    def receive(self, timeout: float | None = None) -> AsyncTensorMessage:
        """Return the next message, like :meth:`TensorChannel.receive`."""
        return AsyncTensorMessage(self._driver, self._parts, timeout)

    async def __aiter__(self) -> AsyncIterator[AsyncTensorMessage]:
        """Iterate over messages until the sender closes the channel."""
        while True:
            try:
                message = await self.receive().__aenter__()
            except ChannelClosed as error:
                if error.reason == "closed":
                    return
                raise
            async with message:
                yield message


def opened(ctx: Context, parts: Parts) -> Opened:
    """Return the channel of a driver."""
    return cast(Opened, TensorChannel(ctx, parts) if isinstance(ctx, BlockingMethods) else AsyncTensorChannel(ctx, parts))
