"""Mappings: one for each segment, shared by all users, undone after the last; and the placement of blocks."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_rpc.errors import CapabilityError, ConfigurationError
from shared_rpc.lifecycle.finalizer import FINALIZER
from shared_rpc.memory import mapping as mapping_module
from shared_rpc.memory.backends.host import HOST, MemfdBackend
from shared_rpc.memory.devices import device_id
from shared_rpc.memory.layout import pack
from shared_rpc.memory.mapping import MappingTable
from shared_rpc.memory.segments import Segment
from tests.kit.bound_host import BoundHost
from tests.kit.interrupting import Interrupted, interrupted_at, points_of, raising_handler
from tests.kit.processes import eventually

MakeSegments = Callable[[int], list[Segment]]


class User:
    """A user of mapped memory."""


class Device(MemfdBackend):
    """Host memory that records operations and their threads, and that may be as busy as a GPU."""

    def __init__(self) -> None:
        self.unmaps_in_background = True
        self.idle = True
        self.log: list[tuple[str, threading.Thread]] = []

    def synchronize(self) -> bool:
        """Return whether waiting for the device succeeded."""
        self.log.append(("synchronize", threading.current_thread()))
        return self.idle

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap, and record it."""
        self.log.append(("unmap", threading.current_thread()))
        super().unmap(address, nbytes)

    @property
    def events(self) -> list[str]:
        """The operations, in order."""
        return [event for event, _ in self.log]


@pytest.fixture
def table() -> MappingTable:
    """An empty table."""
    return MappingTable()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """The device of all segments that the table maps in this test."""
    device = Device()
    monkeypatch.setattr(mapping_module, "backend_for", lambda name, mechanism=None: device)
    return device


@pytest.fixture
def segments() -> Iterator[Callable[[int], list[Segment]]]:
    """``segments(n)`` makes host segments; they are closed at the end."""
    with ExitStack() as stack:
        yield lambda count: [stack.enter_context(closing(HOST.create(1))) for _ in range(count)]


@pytest.fixture
def finalizer_held() -> Iterator[threading.Event]:
    """Block the finaliser thread until the event is set."""
    free, held = threading.Event(), threading.Event()
    FINALIZER.start()
    FINALIZER.submit(lambda: (held.set(), free.wait(30)))
    assert held.wait(10)
    yield free
    free.set()


def let_finalizer_work() -> None:
    """Wait until the finaliser thread has run all jobs submitted so far."""
    done = threading.Event()
    FINALIZER.submit(done.set, after=0.05)  # host memory lingers before it is unmapped
    assert done.wait(10)


def mapped() -> list[str]:
    """Return the segment id of every host mapping of this process, from the kernel's list."""
    with open("/proc/self/maps") as maps:
        return re.findall(r"memfd:shared-rpc-(\w+)", maps.read())


# One mapping for each segment.


@pytest.mark.parametrize("fails", [False, True])
def test_created_memory_is_mapped_while_the_block_runs(no_leaks: None, table: MappingTable, fails: bool) -> None:
    """Memory without further holders is unmapped and closed at the end of the block that created it, however that ends."""
    with suppress(ZeroDivisionError), table.create(1, "cpu") as mapping:
        HOST.view(mapping.address, 3)[:] = b"abc"
        assert mapped().count(mapping.info.id) == 1
        if fails:
            raise ZeroDivisionError
    assert mapping.info.id not in mapped()
    assert mapping.descriptor is None
    assert len(table) == 0


def test_a_segment_is_mapped_once(table: MappingTable, segments: MakeSegments) -> None:
    """Every attach of a segment, also through another descriptor, gets the same mapping."""
    (segment,) = segments(1)
    with (
        closing(segment.duplicate()) as other,
        table.attach([segment]) as [one],
        table.attach([other, segment]) as [two, three],
    ):
        assert one is two is three
        assert mapped().count(segment.info.id) == 1


def test_each_access_has_its_mapping(table: MappingTable, segments: MakeSegments) -> None:
    """A segment mapped for writing is mapped again for a read-only consumer."""
    (segment,) = segments(1)
    with closing(segment.duplicate("read")) as readable, table.attach([segment, readable]) as [writer, reader]:
        assert writer.address != reader.address
        HOST.view(writer.address, 2)[:] = b"rw"
        assert bytes(HOST.view(reader.address, 2)) == b"rw"


def test_keep_holds_a_descriptor(no_leaks: None, table: MappingTable, segments: MakeSegments) -> None:
    """With ``keep`` the memory can be published again; also if it was mapped without before."""
    first, second = segments(2)
    with table.attach([second]) as [plain]:
        assert plain.descriptor is None
        with table.attach([first, second], keep=True) as kept:
            assert kept[1] is plain
            assert [os.fstat(mapping.descriptor.fileno()).st_ino for mapping in kept] == [
                os.fstat(segment.fileno()).st_ino for segment in (first, second)
            ]
    assert all(mapping.descriptor is None for mapping in kept)


def test_a_kept_export_descriptor_goes_with_its_mapping(table: MappingTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that belongs to its maker is freed with the last mapping."""
    backend, user = BoundHost(), User()
    monkeypatch.setattr(mapping_module, "backend_for", lambda name, mechanism=None: backend)
    with closing(backend.create(1)) as segment, table.attach([segment], keep=True) as [mapping]:
        table.keep_for([(mapping, user)])
    assert mapping.descriptor is not None
    assert backend.freed == []
    del user
    table.drain()
    eventually(lambda: backend.freed == [mapping.address])


# Coming back.


def test_received_memory_is_kept_while_it_is_held(no_leaks: None, table: MappingTable, segments: MakeSegments) -> None:
    """Memory received from another process uses an existing mapping, and ends with its last holder."""
    (segment,) = segments(1)
    with table.attach([segment], owner="server") as [mapping], table.attach([segment]) as [again]:
        hold = table.hold(again)
    assert hold.mapping is mapping
    assert mapping.owner == "server"
    del hold
    table.drain()
    assert len(table) == 0


# Failing.


def test_a_failed_attach_leaves_nothing(no_leaks: None, table: MappingTable, segments: MakeSegments) -> None:
    """If one segment of several cannot be mapped, the earlier ones are released and the error gives the reason."""
    good, other, used = segments(3)
    with closing(HOST.create(1)) as short:
        lying = Segment.owning(other.info.__class__(other.info.id, 1 << 30, "cpu"), os.dup(short.fileno()))
    with closing(lying), table.attach([used]) as [mapping]:
        with pytest.raises(CapabilityError, match=str(1 << 30)), table.attach([good, used, lying], keep=True):
            pass
        HOST.view(mapping.address, 4)[:] = b"mine"
        assert mapped().count(used.info.id) == len(table) == 1
    assert len(table) == 0
    assert mapped().count(good.info.id) == 0


# Who uses a mapping, and its end.


def test_a_mapping_stays_for_its_last_user(table: MappingTable, segments: MakeSegments) -> None:
    """It ends with the last object that it was lent to; they count separately."""
    (segment,) = segments(1)
    users = [User(), User()]
    with table.attach([segment]) as [mapping]:
        table.keep_for((mapping, user) for user in users)
    users.pop()
    table.drain()
    assert mapped().count(segment.info.id) == len(table) == 1
    users.pop()
    table.drain()
    assert mapped().count(segment.info.id) == len(table) == 0


def test_a_finaliser_unmaps_nothing(
    table: MappingTable, device: Device, segments: MakeSegments, finalizer_held: threading.Event
) -> None:
    """The end of the last user only enqueues: with the finaliser thread busy, the memory is still mapped after it."""
    (segment,) = segments(1)
    user = User()
    user.itself = user  # goes in a collection, between any two instructions
    with table.attach([segment]) as [mapping]:
        table.keep_for([(mapping, user)])
    HOST.view(mapping.address, 5)[:] = b"still"
    device.log.clear()
    del user
    gc.collect()
    assert device.events == []
    assert bytes(HOST.view(mapping.address, 5)) == b"still"
    finalizer_held.set()
    eventually(lambda: device.events == ["unmap"], what="unmapped")


def test_an_unused_mapping_can_be_reused(table: MappingTable, segments: MakeSegments, finalizer_held: threading.Event) -> None:
    """If it is attached again before it is unmapped."""
    (segment,) = segments(1)
    user = User()
    with table.attach([segment]) as [mapping]:
        table.keep_for([(mapping, user)])
    del user
    with table.attach([segment]) as [again]:
        finalizer_held.set()
        let_finalizer_work()
        assert again is mapping
        assert mapped().count(segment.info.id) == 1
    assert mapped().count(segment.info.id) == 0


def test_the_device_is_waited_for_before_unmapping(table: MappingTable, device: Device, segments: MakeSegments) -> None:
    """A queued kernel may still use the memory: first wait, then unmap everything pending."""
    with table.attach(segments(2)) as mappings:
        holds = [table.hold(mapping) for mapping in mappings]
    device.unmaps_in_background = False
    device.log.clear()
    del holds
    table.drain()
    assert device.events == ["synchronize", "unmap", "unmap"]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # descriptors dropped with the interrupted frames
@pytest.mark.parametrize("creates", [False, True])
def test_interrupted_blocks_leave_no_mapping(table: MappingTable, segments: MakeSegments, creates: bool) -> None:
    """At any point where a signal handler may raise."""
    made = segments(2)

    def block() -> None:
        with table.create(1, "cpu") if creates else table.attach(made):
            pass

    with raising_handler(Interrupted):
        for point in range(1, points_of(block) + 1):
            place, _ = interrupted_at(point, block)
            table.drain()
            assert (len(table), table._by_address) == (0, ([], [])), f"at {place}"


@pytest.mark.parametrize("raises", [False, True])
def test_a_drain_may_be_interrupted(table: MappingTable, device: Device, segments: MakeSegments, raises: bool) -> None:
    """At any point, by a signal handler that drains too, as the release of a handle does, or raises: nothing stays listed."""
    device.unmaps_in_background = False
    made = segments(2)

    def leave_unused() -> None:
        with table.attach(made) as mappings:
            holds = [table.hold(mapping) for mapping in mappings]
        del holds

    leave_unused()
    points = points_of(table.drain)
    with raising_handler(Interrupted):
        if not raises:
            signal.signal(signal.SIGUSR1, lambda *_: table.drain())
        for point in range(1, points + 1):
            leave_unused()
            place, raised = interrupted_at(point, table.drain)
            assert raised == ("Interrupted: from the handler" if raises else ""), f"at {place}"
            table.drain()
            assert (len(table), table._by_address) == (0, ([], [])), f"at {place}"


def test_a_device_that_the_process_works_on_is_left_alone(table: MappingTable, device: Device, segments: MakeSegments) -> None:
    """No thread of the library disturbs a GPU; the next safe point unmaps, in the thread that reaches it."""
    device.unmaps_in_background = False
    user = User()
    with table.attach(segments(1)) as [mapping]:
        table.keep_for([(mapping, user)])
    device.log.clear()
    del user
    let_finalizer_work()
    assert device.events == []
    assert len(table) == 1
    table.drain()
    assert device.log[-1] == ("unmap", threading.current_thread())
    assert len(table) == 0


def test_segments_with_a_pending_unmap_can_be_attached(
    no_leaks: None, table: MappingTable, device: Device, segments: MakeSegments
) -> None:
    """They are mapped again, and both mappings are finally removed."""
    device.unmaps_in_background = device.idle = False
    (segment,) = segments(1)
    user = User()
    with table.attach([segment]) as [old]:
        table.keep_for([(old, user)])
    del user
    table.drain()
    user = User()
    with table.attach([segment]) as [new]:
        table.keep_for([(new, user)])
        assert new is not old
    device.idle = True
    table.drain()
    assert mapped().count(segment.info.id) == 1
    HOST.view(new.address, 3)[:] = b"new"
    assert table.find(new.address) == (new, 0)
    del user
    table.drain()
    assert mapped().count(segment.info.id) == 0


# Finding.


def test_find_names_mapping_and_offset(table: MappingTable, segments: MakeSegments) -> None:
    """From the first byte of a mapping to its last, and no address outside."""
    with table.attach(segments(5)) as mappings:
        for mapping in mappings:
            nbytes = mapping.info.nbytes
            assert table.find(mapping.address) == (mapping, 0)
            assert table.find(mapping.address + nbytes - 1) == (mapping, nbytes - 1)
            neighbour = table.find(mapping.address + nbytes)
            assert neighbour is None or neighbour[0] is not mapping
        assert table.find(min(mapping.address for mapping in mappings) - 1) is None
        assert table.find(0) is None
    assert table.find(mappings[0].address) is None


# Laying blocks out.


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 8000), st.sampled_from([1, 2, 64, 512]))
def test_blocks_are_packed_in_order(sizes: list[int], limit: int, alignment: int) -> None:
    """Aligned and without overlap; a block that exceeds the segment's limit begins the next segment."""
    expected, ends = [], [0]
    for size in sizes:
        offset = -(-ends[-1] // alignment) * alignment
        if ends[-1] and offset + size > limit:
            ends.append(0)
            offset = 0
        expected.append((len(ends) - 1, offset))
        ends[-1] = offset + size
    assert pack(sizes, limit=limit, alignment=alignment) == (ends if sizes else [], expected)


# Names of devices.


@pytest.mark.parametrize("device", ["tpu", "", "cuda:x", "cuda:-1", "auto:0", "gpu-1234", "CPU"])
def test_unknown_device_is_a_configuration_error(device: str) -> None:
    """The error shows the given value and the permitted ones."""
    with pytest.raises(ConfigurationError, match=re.escape(f"device={device!r}") + ".*'cuda:<index>'"):
        device_id(device)


@pytest.mark.gpu
def test_devices_where_a_gpu_is_visible() -> None:
    """``auto`` and ``cuda`` are the current GPU's UUID; for an index that is too high, the error has the number of GPUs."""
    import torch

    from shared_rpc.memory.backends.cuda import visible_gpus

    seen = visible_gpus()
    assert device_id("auto") == device_id("cuda") == seen[torch.cuda.current_device()]
    assert device_id("cuda:0") == seen[0]
    with pytest.raises(CapabilityError, match=f"device='cuda:99'.*sees {len(seen)} GPUs"):
        device_id("cuda:99")
