"""Segments on the host and on a GPU: one contract, see tests/kit/conformance.py."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from shared_rpc.errors import CapabilityError
from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.backends.host import HOST, MemfdBackend
from shared_rpc.memory.segments import Backend, Segment
from shared_rpc.protocol.records import Access, Mechanism
from tests.kit import segment_peer
from tests.kit.bound_host import BACKEND
from tests.kit.conformance import BackendConformance
from tests.kit.processes import rights
from tests.kit.raw import F_ADD_SEALS, F_SEAL_SHRINK


class TestHost(BackendConformance):
    """Host memory."""

    seals = True

    @pytest.fixture
    def backend(self) -> Backend:
        """Anonymous files."""
        return MemfdBackend()

    def footprint(self, backend: Backend) -> int:
        """Count mappings of segments in the kernel's list."""
        with open("/proc/self/maps") as maps:
            return sum("memfd:shared-rpc-" in line for line in maps)

    def assert_died_of_write(self, code: int, errors: str) -> None:
        """The process ends by a signal, at the very instruction."""
        assert code == -signal.SIGSEGV


class TestBoundHost(BackendConformance):
    """Memory that belongs to its maker, like that of CUDA's IPC and pools, without a GPU."""

    seals = False
    remaps = False
    vacates = False
    survives_maker = False
    protects = False
    own = "tests.kit.bound_host:BACKEND"

    @pytest.fixture
    def backend(self) -> Backend:
        """Host memory behind export descriptors."""
        return BACKEND

    def footprint(self, backend: Backend) -> int:
        """Count mappings in the kernel's list."""
        return TestHost.footprint(self, backend)


def _gpu_backend(mechanism: Mechanism) -> Backend:
    from shared_rpc.memory.backends.choice import survey
    from shared_rpc.memory.backends.cuda import visible_gpus

    uuid = visible_gpus()[0]
    if survey(uuid)[mechanism]:
        pytest.skip(f"the GPU has {survey(uuid)[mechanism]}")
    return backend_for(uuid, mechanism)


@pytest.mark.gpu
@pytest.mark.whole_gpu
class TestVmm(BackendConformance):
    """The memory of one GPU."""

    seals = False
    slack = 1 << 20

    @pytest.fixture
    def backend(self) -> Backend:
        """The first visible GPU."""
        return _gpu_backend("vmm")

    def footprint(self, backend: Backend) -> int:
        """Return the bytes in use on the GPU, by any process; a segment has 2 MiB at least."""
        import torch

        free, total = torch.cuda.mem_get_info(backend.ordinal)
        return total - free

    def assert_died_of_write(self, code: int, errors: str) -> None:
        """The process ends with an error of the driver that names the cause."""
        assert code != 0
        assert "illegal memory access" in errors

    def test_other_gpus_can_use_mapped_memory(self, backend: Backend, segment: Segment, mapped: Callable[..., int]) -> None:
        """A tensor is copied to a peer GPU, and comes back intact."""
        import torch

        if not backend.peers:
            pytest.skip("needs two GPUs that are peers")
        address = mapped(segment)
        segment_peer.store(backend, address, b"away")
        here = segment_peer.tensor_of(backend, address, 4)
        away = here.to(f"cuda:{backend.peers[0]}")
        assert bytes(away.tolist()) == b"away"
        torch.cuda.synchronize(away.device)

    def test_invisible_gpus_cannot_allocate(self, backend: Backend) -> None:
        """They are accessible through a visible peer, but not for allocations."""
        elsewhere = "GPU-00000000-0000-0000-0000-000000000000"
        with pytest.raises(CapabilityError, match=f"{elsewhere} is not visible"):
            backend_for(elsewhere).create(1)


@pytest.mark.gpu
@pytest.mark.whole_gpu
class TestHostVmm(BackendConformance):
    """Host memory allocated by a GPU's driver."""

    seals = False
    # Only who copies maps it, and does so for writing.
    protects = False
    # Other processes use some of the host's memory in the meantime: a leak of one segment in each of 200 rounds is more.
    slack = 1 << 30

    @pytest.fixture
    def backend(self) -> Backend:
        """The host memory of the first visible GPU."""
        from shared_rpc.memory.backends.cuda import attribute

        backend: Any = _gpu_backend("vmm")
        if not attribute(backend.ordinal, "HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
            pytest.skip("the driver makes no host memory by virtual memory management")
        return backend_for(backend.uuid, "host_vmm")

    def footprint(self, backend: Backend) -> int:
        """Return the bytes of host memory in use, by any process."""
        with open("/proc/meminfo", encoding="ascii") as file:
            amounts = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
        return amounts["MemTotal"] - amounts["MemAvailable"]

    def test_copies_of_a_gpu_are_visible_to_the_processor(
        self, backend: Backend, segment: Segment, mapped: Callable[..., int]
    ) -> None:
        """The processor reads the copied bytes."""
        import torch

        address = mapped(segment)
        there = torch.arange(4, dtype=torch.uint8, device="cuda")
        backend.copy(address, there.data_ptr(), 4, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        assert segment_peer.load(backend, address, 4) == bytes(range(4))
        segment_peer.store(backend, address, b"back")
        backend.copy(there.data_ptr(), address, 4, torch.cuda.current_stream().cuda_stream)
        assert bytes(there.tolist()) == b"back"


class _Bound(TestVmm):
    """Common tests of both mechanisms whose memory ends with its maker."""

    remaps = False
    vacates = False
    survives_maker = False
    protects = False

    def test_a_segment_selects_its_mechanism(self, backend: Backend, segment: Segment) -> None:
        """A consumer opens it by that, whatever it would use itself."""
        assert backend_for(segment.info.device, segment.info.mechanism) is backend


@pytest.mark.gpu
@pytest.mark.whole_gpu
class TestIpc(_Bound):
    """The memory of one GPU by legacy CUDA IPC."""

    @pytest.fixture
    def backend(self) -> Backend:
        """The first visible GPU."""
        return _gpu_backend("ipc")


@pytest.mark.gpu
@pytest.mark.whole_gpu
class TestPool(_Bound):
    """The memory of one GPU by stream-ordered pools."""

    # A pool reserves more than requested.
    slack = 64 << 20

    @pytest.fixture
    def backend(self) -> Backend:
        """The first visible GPU."""
        return _gpu_backend("pool")


@pytest.fixture
def vmm() -> Backend:
    """A backend of the first visible GPU that has allocated nothing yet."""
    from shared_rpc.memory.backends.vmm import VmmBackend

    return VmmBackend(_gpu_backend("vmm").uuid)


def _supports_rdma(backend: Backend) -> bool:
    from shared_rpc.memory.backends.cuda import attribute

    return attribute(backend.ordinal, "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED") == 1


def _refusing_rdma(monkeypatch: pytest.MonkeyPatch, code: str) -> list[bool]:
    """Make the driver refuse memory for network cards; the list has an item for each request, true if it was for that."""
    from cuda.bindings import driver

    create, asked = driver.cuMemCreate, []

    def refuse(size: int, allocation: Any, flags: int) -> tuple[Any, ...]:
        asked.append(bool(allocation.allocFlags.gpuDirectRDMACapable))
        if asked[-1]:
            return getattr(driver.CUresult, f"CUDA_ERROR_{code}"), None
        return create(size, allocation, flags)

    monkeypatch.setattr(driver, "cuMemCreate", refuse)
    return asked


@pytest.mark.gpu
def test_a_driver_that_refuses_rdma_still_allocates(vmm: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is made for GPUDirect RDMA first; after a refusal, segments are made without asking."""
    if not _supports_rdma(vmm):
        pytest.skip("the GPU has no GPUDirect RDMA for virtual memory management")
    asked = _refusing_rdma(monkeypatch, "NOT_SUPPORTED")
    for _ in range(2):
        vmm.create(1).close()
    assert asked == [True, False, False]


def test_vacated_host_ranges_are_freed() -> None:
    """According to the kernel's list of mappings."""
    with closing(HOST.create(1)) as segment:
        address = HOST.map(segment.fileno(), segment.info.nbytes, "read_write")
        HOST.vacate(address, segment.info.nbytes)
        assert rights(address) == "---p"
        HOST.free_range(address, segment.info.nbytes)
        assert rights(address) == ""


def test_host_size_is_sealed() -> None:
    """No holder of the descriptor can truncate the memory under a reader, which would end it with SIGBUS."""
    with closing(HOST.create(1)) as segment:
        for nbytes in (0, 2 * segment.info.nbytes):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fileno(), nbytes)
        assert os.fstat(segment.fileno()).st_size == segment.info.nbytes


def test_host_seal_refuses_other_ways_to_write() -> None:
    """After a seal, neither a new description of the file nor write(2) changes the memory."""
    with closing(HOST.create(1)) as segment:
        HOST.seal(segment.fileno())
        again = os.open(f"/proc/self/fd/{segment.fileno()}", os.O_RDWR | os.O_CLOEXEC)
        try:
            with pytest.raises(CapabilityError, match="access='read'"):
                HOST.map(again, segment.info.nbytes, "read_write")
            with pytest.raises(PermissionError):
                os.write(again, b"x")
        finally:
            os.close(again)


@pytest.mark.parametrize("access", ["read", "read_write"])
def test_host_seals_are_final(access: Access) -> None:
    """A process that receives a sealed segment cannot add a seal that would affect other processes."""
    with closing(HOST.create(1)) as segment:
        HOST.seal(segment.fileno(), access)
        with pytest.raises(PermissionError):
            HOST.seal(segment.fileno())


def test_host_memory_of_huge_pages_is_refused() -> None:
    """A hole punched later by its sender would end this process with SIGBUS, whatever the seals."""
    try:
        fd = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"no memfd of huge pages: {error}")
    try:
        nbytes = os.fstat(fd).st_blksize
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)
        with pytest.raises(CapabilityError, match="huge pages"):
            HOST.map(fd, nbytes, "read")
    finally:
        os.close(fd)
