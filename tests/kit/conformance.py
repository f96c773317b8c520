"""The contract of :class:`~shared_rpc.memory.segments.Backend`, as tests.

Derive a class, give it a ``backend`` fixture, and define a measure of its memory (:meth:`BackendConformance.footprint`) and
the end of a process after a forbidden write (:meth:`BackendConformance.assert_died_of_write`). Everything that the contract
promises is then tested, between real processes where it concerns processes.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import ClassVar

import pytest

from shared_rpc.errors import CapabilityError
from shared_rpc.memory.segments import Backend, Segment
from tests.kit import segment_peer
from tests.kit.processes import Child, eventually, open_fds


class Peer(Child):
    """A :mod:`tests.kit.segment_peer`, and our end of its socket."""

    def __init__(self, folder: Path, *backend: str) -> None:
        path = str(folder / "peer.sock")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            super().__init__("-m", "tests.kit.segment_peer", path, *backend)
            self.sock, _ = listener.accept()
        os.unlink(path)

    def ask(self, command: str) -> str:
        """Send a command, and return the answer."""
        self.tell(command)
        return self.expect("answer:").removeprefix("answer: ")

    def give(self, segment: Segment) -> None:
        """Send a segment, which the peer receives."""
        segment_peer.send(self.sock, segment)
        self.ask("receive")

    def create(self, device: str, mechanism: str, nbytes: int) -> Segment:
        """Make the peer create a segment; return it with a descriptor of our own."""
        self.ask(f"create {device} {mechanism} {nbytes}")
        return segment_peer.receive(self.sock)

    def close(self, number: int = 0) -> tuple[int, str]:
        """See :meth:`Child.close`; closes our end of the socket too."""
        self.sock.close()
        return super().close(number)


def _await_makers() -> None:
    """Wait until this process has detected the last user of each segment that it made; a thread waits for each."""
    waiting = "shared-rpc-export"
    eventually(lambda: waiting not in {thread.name for thread in threading.enumerate()}, what=f"no thread {waiting}")


class BackendConformance:
    """The contract of :class:`~shared_rpc.memory.segments.Backend`."""

    #: Whether :meth:`Backend.seal` can refuse a writable mapping, rather than rely on the consumer.
    seals: ClassVar[bool]
    #: Whether a process can have a segment at several addresses. Legacy IPC and pools return the existing address.
    remaps: ClassVar[bool] = True
    #: Whether the memory outlives the process that made it. Legacy IPC and pools allocate for their process.
    survives_maker: ClassVar[bool] = True
    #: Whether a mapping for reading refuses writes. Legacy IPC has no such mapping, nor have pools for their own GPU.
    protects: ClassVar[bool] = True
    #: Whether memory can be unmapped and mapped again at its address. Legacy IPC and pools choose the address.
    vacates: ClassVar[bool] = True
    #: ``module:name`` of the backend, unless it is one of the library's.
    own: ClassVar[str] = ""
    #: Tolerance of the footprint, less than the footprint of one segment.
    slack: ClassVar[int] = 0

    @pytest.fixture
    def backend(self) -> Backend:
        """The backend under test."""
        raise NotImplementedError

    def footprint(self, backend: Backend) -> int:
        """Return the memory mapped or in use now, in any unit that a leaked segment or mapping increases."""
        raise NotImplementedError

    def assert_died_of_write(self, code: int, errors: str) -> None:
        """Check the end of a process that wrote to a read-only mapping."""
        raise NotImplementedError

    @pytest.fixture
    def device(self, backend: Backend) -> str:
        """The backend's device id."""
        with closing(backend.create(1)) as segment:
            return segment.info.device

    @pytest.fixture
    def mechanism(self, backend: Backend) -> str:
        """The backend's mechanism, as named by segments."""
        with closing(backend.create(1)) as segment:
            return segment.info.mechanism

    @pytest.fixture
    def segment(self, backend: Backend) -> Iterator[Segment]:
        """A segment of two granules."""
        with closing(backend.create(2 * backend.granularity)) as segment:
            yield segment

    @pytest.fixture
    def mapped(self, backend: Backend) -> Iterator[Callable[..., int]]:
        """``mapped(segment, access)`` maps a segment, which is unmapped at the end."""
        with ExitStack() as stack:

            def mapped(segment: Segment, access: str = "read_write") -> int:
                nbytes = segment.info.nbytes
                address = backend.map(segment.fileno(), nbytes, access)
                stack.callback(backend.unmap, address, nbytes)
                stack.callback(backend.synchronize)
                return address

            yield mapped

    @pytest.fixture
    def peer(self, tmp_path: Path) -> Iterator[Callable[[], Peer]]:
        """``peer()`` starts a process, which is ended at the end."""
        with ExitStack() as stack:

            def start() -> Peer:
                peer = Peer(tmp_path, *([self.own] if self.own else []))
                stack.callback(lambda: peer.process.stdout.closed or peer.kill())
                return peer

            yield start

    @pytest.fixture
    def nothing_left(self, backend: Backend, device: str) -> Iterator[None]:
        """Fail if descriptors, mappings or memory remain. Request it before fixtures that open any."""
        # Resources that a driver keeps from the first use of memory on must exist before anything is counted.
        with closing(backend.create(1)) as segment:
            address = backend.map(segment.fileno(), segment.info.nbytes, "read_write")
            segment_peer.store(backend, address, b"warm")
            segment_peer.load(backend, address, 4)
            backend.unmap(address, segment.info.nbytes)
        gc.collect()
        _await_makers()
        fds, footprint = open_fds(), self.footprint(backend)
        yield
        gc.collect()
        _await_makers()
        assert open_fds() <= fds
        # A driver frees the memory of a dead process with a delay.
        eventually(lambda: self.footprint(backend) <= footprint + self.slack, what=f"footprint back to {footprint}")

    # Creating.

    @pytest.mark.parametrize("granules, extra, expected", [(0, 1, 1), (1, 0, 1), (1, 1, 2), (3, -1, 3)])
    def test_size_is_rounded_up_to_granules(self, backend: Backend, granules: int, extra: int, expected: int) -> None:
        """A segment consists of whole granules, and has at least the requested bytes."""
        with closing(backend.create(granules * backend.granularity + extra)) as segment:
            assert segment.info.nbytes == expected * backend.granularity

    def test_memory_is_zeroed(self, backend: Backend, mapped: Callable[..., int]) -> None:
        """New memory holds zeros, also directly after used memory was freed."""
        with closing(backend.create(backend.granularity)) as used:
            nbytes = used.info.nbytes
            address = backend.map(used.fileno(), nbytes, "read_write")
            segment_peer.store(backend, address, b"\xff" * nbytes)
            backend.unmap(address, nbytes)
        with closing(backend.create(backend.granularity)) as segment:
            assert segment_peer.load(backend, mapped(segment), nbytes) == bytes(nbytes)

    def test_more_than_there_is(self, nothing_left: None, backend: Backend) -> None:
        """A request for too much memory is refused with its size, and leaves nothing behind."""
        with pytest.raises(CapabilityError, match=str(1 << 60)), closing(backend.create(1 << 60)) as segment:
            backend.map(segment.fileno(), segment.info.nbytes, "read_write")

    # Owning a descriptor.

    def test_a_closed_segment_has_no_descriptor(self, nothing_left: None, backend: Backend) -> None:
        """Using it is an error that names it; closing it again never closes a foreign descriptor with the same number."""
        segment = backend.create(1)
        number = segment.fileno()
        segment.close()
        with open(os.devnull) as reused:
            assert reused.fileno() == number
            segment.close()
            os.fstat(reused.fileno())
        with pytest.raises(ValueError, match=segment.info.id):
            segment.fileno()

    def test_duplicate_owns_its_descriptor(self, nothing_left: None, backend: Backend, mapped: Callable[..., int]) -> None:
        """A duplicate is the same memory under another descriptor, and may grant consumers another access.

        No program that is started later inherits either.
        """
        with closing(backend.create(1)) as segment:
            address = mapped(segment)
            duplicate = segment.duplicate("read")
            assert not any(map(os.get_inheritable, (segment.fileno(), duplicate.fileno())))
        with closing(duplicate):
            assert (duplicate.info.id, duplicate.info.access, segment.info.access) == (segment.info.id, "read", "read_write")
            segment_peer.store(backend, address, b"same")
            assert segment_peer.load(backend, mapped(duplicate, "read"), 4) == b"same"

    def test_dropping_an_open_segment_warns(self, nothing_left: None, backend: Backend) -> None:
        """A segment that is dropped unclosed warns and is closed."""
        with pytest.warns(ResourceWarning, match="collected with its fd"):
            backend.create(1)
            gc.collect()

    # Mapping.

    def test_mappings_share_the_memory(self, backend: Backend, segment: Segment, mapped: Callable[..., int]) -> None:
        """A write through one mapping is visible in another, to the last byte."""
        one, other = mapped(segment), mapped(segment)
        last = segment.info.nbytes - 4
        segment_peer.store(backend, one + last, b"last")
        assert (one != other) == self.remaps
        assert segment_peer.load(backend, other + last, 4) == b"last"

    # Vacating.

    @pytest.fixture
    def vacated(self, backend: Backend) -> Iterator[Callable[..., int]]:
        """``vacated(segment, access)`` maps and vacates; at the end, its mapping is undone and the range freed."""
        if not self.vacates:
            pytest.skip("the mechanism chooses the addresses")
        with ExitStack() as stack:

            def vacated(segment: Segment, access: str = "read_write") -> int:
                nbytes = segment.info.nbytes
                address = backend.map(segment.fileno(), nbytes, access)
                stack.callback(backend.free_range, address, nbytes)
                backend.vacate(address, nbytes)
                return address

            yield vacated

    def fill(self, backend: Backend, segment: Segment, address: int) -> None:
        """Map a segment at a vacated address."""
        assert backend.map(segment.fileno(), segment.info.nbytes, "read_write", at=address) == address

    def empty(self, backend: Backend, segment: Segment, address: int) -> None:
        """Vacate a filled range."""
        assert backend.synchronize()
        backend.vacate(address, segment.info.nbytes)

    def test_vacated_memory_is_mapped_again_where_it_was(
        self, nothing_left: None, backend: Backend, segment: Segment, vacated: Callable[..., int]
    ) -> None:
        """Same address and bytes, any number of times: everything that holds the address is valid again."""
        address = vacated(segment)
        for word in (b"once", b"more"):
            self.fill(backend, segment, address)
            segment_peer.store(backend, address, word)
            self.empty(backend, segment, address)
            self.fill(backend, segment, address)
            assert segment_peer.load(backend, address, 4) == word
            self.empty(backend, segment, address)

    def test_other_memory_comes_to_a_vacated_address(
        self, nothing_left: None, backend: Backend, segment: Segment, mapped: Callable[..., int], vacated: Callable[..., int]
    ) -> None:
        """The range belongs to no particular segment: another one of its size can be mapped there."""
        address = vacated(segment)
        with closing(backend.create(segment.info.nbytes)) as other:
            segment_peer.store(backend, mapped(other), b"other")
            self.fill(backend, other, address)
            assert segment_peer.load(backend, address, 5) == b"other"
            self.empty(backend, other, address)

    def test_a_vacated_mapping_keeps_no_memory(self, nothing_left: None, backend: Backend, vacated: Callable[..., int]) -> None:
        """The memory is freed when the descriptor closes, although the range is kept."""
        before = self.footprint(backend)
        with closing(backend.create(32 << 20)) as segment:
            vacated(segment)
        eventually(lambda: self.footprint(backend) <= before + self.slack, what=f"footprint back to {before}")

    def test_a_range_stays_vacated_where_mapping_fails(
        self, nothing_left: None, backend: Backend, segment: Segment, vacated: Callable[..., int]
    ) -> None:
        """A non-segment is refused there too, and the right segment can still be mapped."""
        address = vacated(segment)
        with open(os.devnull) as foreign, pytest.raises(CapabilityError):
            backend.map(foreign.fileno(), segment.info.nbytes, "read_write", at=address)
        self.fill(backend, segment, address)
        self.empty(backend, segment, address)

    def test_a_mapping_is_replaced_in_one_step(
        self, nothing_left: None, backend: Backend, segment: Segment, mapped: Callable[..., int]
    ) -> None:
        """If the device can, memory replaces a mapping atomically: a thread that reads sees either the old or the new bytes."""
        if not backend.replaces:
            pytest.skip("the device has to be waited for")
        address, nbytes = mapped(segment), segment.info.nbytes
        with closing(backend.create(nbytes)) as other:
            segment_peer.store(backend, address, b"one")
            segment_peer.store(backend, mapped(other), b"two")
            seen, over = set(), threading.Event()

            def read() -> None:
                while not over.is_set():
                    seen.add(segment_peer.load(backend, address, 3))

            reader = threading.Thread(target=read)
            reader.start()
            for _ in range(200):
                self.fill(backend, other, address)
                self.fill(backend, segment, address)
            over.set()
            reader.join()
        assert seen <= {b"one", b"two"}
        assert segment_peer.load(backend, address, 3) == b"one"

    def test_backends_that_cannot_vacate_refuse_it(
        self, backend: Backend, segment: Segment, mapped: Callable[..., int]
    ) -> None:
        """If the mechanism chooses addresses, nothing is unmapped, and the error names a mechanism that can."""
        if self.vacates:
            assert backend.vacates
            return
        address = mapped(segment)
        segment_peer.store(backend, address, b"stays")
        for refused in (
            lambda: backend.vacate(address, segment.info.nbytes),
            lambda: backend.map(segment.fileno(), segment.info.nbytes, "read_write", at=address),
            lambda: backend.free_range(address, segment.info.nbytes),
        ):
            with pytest.raises(CapabilityError, match="mechanism='vmm'"):
                refused()
        assert not backend.vacates
        assert segment_peer.load(backend, address, 5) == b"stays"

    # Refusing other descriptors. Each failure must leave the descriptor to its owner, and nothing else behind.

    def test_announced_size_is_not_believed(self, nothing_left: None, backend: Backend) -> None:
        """A segment smaller than announced is refused: reading past its end would end the process."""
        with closing(backend.create(1)) as segment:
            nbytes = segment.info.nbytes + backend.granularity
            with pytest.raises(CapabilityError, match=str(nbytes)):
                backend.map(segment.fileno(), nbytes, "read_write")
            os.fstat(segment.fileno())

    @pytest.mark.parametrize("kind", ["unsealed memfd", "file", "pipe"])
    def test_foreign_descriptor_is_refused(self, nothing_left: None, backend: Backend, tmp_path: Path, kind: str) -> None:
        """A descriptor of another kind is refused, and remains its owner's."""
        nbytes = backend.granularity
        if kind == "pipe":
            fd, other = os.pipe()
            os.close(other)
        else:
            fd = os.memfd_create("foreign") if kind == "unsealed memfd" else os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
            os.ftruncate(fd, nbytes)
        for access in ("read_write", "read"):
            with pytest.raises(CapabilityError):
                backend.map(fd, nbytes, access)
        os.close(fd)

    # Sealing.

    def test_sealing_refuses_new_writers(
        self, nothing_left: None, backend: Backend, segment: Segment, mapped: Callable[..., int]
    ) -> None:
        """After a seal, existing mappings can still write and new readers are accepted; new writers are refused if possible."""
        writable = mapped(segment)
        backend.seal(segment.fileno())
        segment_peer.store(backend, writable, b"sealed")
        assert segment_peer.load(backend, mapped(segment, "read"), 6) == b"sealed"
        if self.seals:
            with pytest.raises(CapabilityError, match="access='read'"):
                backend.map(segment.fileno(), segment.info.nbytes, "read_write")

    # Between processes.

    def test_another_process_maps_it(
        self, nothing_left: None, backend: Backend, segment: Segment, mapped: Callable[..., int], peer: Callable[[], Peer]
    ) -> None:
        """A process that received the descriptor sees our writes, and we see its."""
        address = mapped(segment)
        segment_peer.store(backend, address, b"ours")
        other = peer()
        other.give(segment)
        other.ask("map read_write")
        assert bytes.fromhex(other.ask("read 0 4")) == b"ours"
        other.ask(f"write 1 {b'eir'.hex()}")
        assert segment_peer.load(backend, address, 4) == b"oeir"

    def test_memory_after_the_kill_of_its_maker(
        self,
        nothing_left: None,
        backend: Backend,
        device: str,
        mechanism: str,
        mapped: Callable[..., int],
        peer: Callable[[], Peer],
    ) -> None:
        """SIGKILL of the maker leaves the memory to all holders of the descriptor, even if it is mapped nowhere.

        If the memory ends with its maker, mapping it is refused from then on, and the error names the maker.
        """
        maker = peer()
        with closing(maker.create(device, mechanism, 1)) as segment:
            maker.ask("map read_write")
            maker.ask(f"write 0 {b'survives'.hex()}")
            maker.kill()
            if not self.survives_maker:
                with pytest.raises(CapabilityError, match=rf"pid {maker.pid}.*has ended.*mechanism='vmm'"):
                    mapped(segment)
                return
            late = peer()
            late.give(segment)
            late.ask("map read")
            assert bytes.fromhex(late.ask("read 0 8")) == b"survives"
            assert segment_peer.load(backend, mapped(segment), 8) == b"survives"
            late.kill()

    def test_memory_stays_while_another_process_maps_it(
        self, nothing_left: None, backend: Backend, segment: Segment, peer: Callable[[], Peer]
    ) -> None:
        """Its maker unmaps and closes it; a process that has it mapped reads on, and its end frees the memory."""
        address = backend.map(segment.fileno(), segment.info.nbytes, "read_write")
        segment_peer.store(backend, address, b"stays")
        used = self.footprint(backend)
        other = peer()
        other.give(segment)
        other.ask("map read")
        other.ask("close")
        backend.synchronize()
        backend.unmap(address, segment.info.nbytes)
        segment.close()
        with closing(backend.create(segment.info.nbytes)) as next_one:
            again = backend.map(next_one.fileno(), next_one.info.nbytes, "read_write")
            segment_peer.store(backend, again, b"other")
            assert bytes.fromhex(other.ask("read 0 5")) == b"stays"
            backend.synchronize()
            backend.unmap(again, next_one.info.nbytes)
        assert used > 0
        other.kill()

    @pytest.mark.parametrize("commands", [["map read"], ["map read_write", "vacate"], ["map read", "vacate", "fill read"]])
    def test_a_forbidden_write_ends_the_writer_alone(
        self, backend: Backend, segment: Segment, mapped: Callable[..., int], peer: Callable[[], Peer], commands: list[str]
    ) -> None:
        """A process that writes to a read-only mapping or a vacated range dies; the bytes and other processes are unaffected.

        If the mechanism cannot protect memory, such a write succeeds; mapping for reading must work nevertheless.
        """
        if "vacate" in commands and not (self.vacates and self.protects):
            pytest.skip("the mechanism chooses the addresses, or does not watch over them")
        address = mapped(segment)
        segment_peer.store(backend, address, b"intact")
        bystander, culprit = peer(), peer()
        for process in (bystander, culprit):
            process.give(segment)
        bystander.ask("map read")
        for command in commands:
            culprit.ask(command)
        if command != "vacate":
            assert bytes.fromhex(culprit.ask("read 0 6")) == b"intact"
        if not self.protects:
            culprit.ask(f"write 0 {b'broken'.hex()}")
            assert segment_peer.load(backend, address, 6) == b"broken"
            return
        culprit.tell(f"write 0 {b'broken'.hex()}")
        self.assert_died_of_write(*culprit.close())
        assert bytes.fromhex(bystander.ask("read 0 6")) == b"intact"
        assert segment_peer.load(backend, address, 6) == b"intact"
