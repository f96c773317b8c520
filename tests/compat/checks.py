"""What the users of a library do with a model, each as a check of an attached object beside one of one's own."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shared_rpc import Handle
from tests.compat import app
from tests.compat.cases import Case, build, cases_of
from tests.compat.modes import repeatable
from tests.compat.places import beside_parameters, in_memfd, in_slab, outside
from tests.kit.comparing import bits, differences, digest, is_memory, memories, strided_tensors
from tests.kit.processes import eventually


def own_of(library: str, name: str, device: str) -> Any:
    """An object that is not shared, to compare with."""
    made = build(library, name, device)
    return pickle.loads(pickle.dumps(made)) if cases_of(library)[name].as_pickled else made


class Visit:
    """An object as a client has it, and one of its own that was built alike."""

    def __init__(self, library: str, name: str, case: Case, device: str, host: str) -> None:
        self.library = library
        self.name = name
        self.case = case
        self.device = device
        self.host = host
        self.handle: Handle[Any] = app.shared(library, name)
        #: Built after attaching, which therefore imported what it needed by itself.
        self.own = self.build()
        self.bits = digest(self.own)
        self.is_module = isinstance(self.own, torch.nn.Module)

    def build(self) -> Any:
        """Another object of one's own."""
        return own_of(self.library, self.name, self.device)

    @property
    def value(self) -> Any:
        """What is attached."""
        return self.handle.value

    def attach_anew(self) -> None:
        """Release it and attach again: it is rebuilt around the shared memory."""
        self.handle.release()
        del self.handle
        gc.collect()
        self.handle = app.shared(self.library, self.name)

    def run(self, value: Any) -> Any:
        """What the case computes, without a graph."""
        assert self.case.run is not None
        torch.manual_seed(7)
        with torch.no_grad():
            return self.case.run(value, self.device)

    def same(self, one: Any, other: Any) -> None:
        """Fail where two objects differ."""
        found = differences(one, other, self.case.ignored)
        assert not found, "; ".join(found)

    def digest_there(self) -> str:
        """Return the digest of the shared object in the process that built it."""
        return bytes(app.digest_there(self.library, self.name).tolist()).decode()

    def undisturbed(self) -> None:
        """Fail unless the shared memory has the bits that it began with, here and there."""
        if digest(self.value) != self.bits:
            found = differences(self.build(), self.value, self.case.ignored)
            raise AssertionError(f"the attached object has other bits: {'; '.join(found)}")
        assert self.digest_there() == self.bits, "the shared object has other bits where it was built"


def same(visit: Visit) -> None:
    """Class, attributes, strides, ties, ``requires_grad``, train mode, hooks, and every bit."""
    visit.same(visit.own, visit.value)


def in_shared_memory(visit: Visit) -> None:
    """Every tensor lies in memory that is shared, but for private ones, and on the host the kernel says so."""
    private = _private(visit)
    alone = outside(visit.value)
    assert alone == private, f"of its own memory: {alone[:8]}, and should be: {private[:8]}"
    if visit.device == "cpu":
        alone = [path for address, path in memories(visit.value).items() if not in_memfd(address)]
        assert alone == private, f"the kernel says, of its own memory: {alone[:8]}, and should be: {private[:8]}"


def _private(visit: Visit) -> list[str]:
    """The paths of the tensors that each process is to have for itself."""
    return beside_parameters(visit.value) if visit.case.parameters_alone else []


def private(visit: Visit) -> None:
    """Each process writes to its own copy of what no parameter uses, under ``access="read"`` too, and sees no other's."""
    paths = _private(visit)
    assert paths, "the case shows nothing: parameters use all its memory"
    tensors = [tensor for path, tensor in strided_tensors(visit.value) if path in paths]
    with app.read_only(visit.library, visit.name) as handle:
        tensors += [tensor for path, tensor in strided_tensors(handle.value) if path in paths]
        assert len(tensors) == 2 * len(paths)
        for tensor in tensors:
            tensor.data.fill_(1)
    _synchronize(visit.device)
    assert visit.digest_there() == visit.bits, "what is written here is there too"
    visit.attach_anew()
    visit.same(visit.own, visit.value)


def counted(visit: Visit) -> None:
    """What each process makes for itself, such as packed weights, is part of the object's description."""
    assert visit.handle.get_object_info()["private_nbytes"] > 0


def outputs(visit: Visit) -> None:
    """It computes the same bits, twice."""
    expected = visit.run(visit.own)
    for _ in range(2):
        visit.same(expected, visit.run(visit.value))


def outputs_there(visit: Visit) -> None:
    """It computes the same bits in the process that built it."""
    here = [tensor.to(visit.device) for _, tensor in strided_tensors(visit.run(visit.value))]
    there = app.compute_there(visit.library, visit.name)
    assert len(here) == len(there)
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(here, there, strict=True))


def state_dict(visit: Visit) -> None:
    """``state_dict`` has the same keys, order and bits, and goes into the attached model, and into one's own, strictly."""
    visit.same(visit.own.state_dict(), visit.value.state_dict())
    strict = {"strict": True} if visit.is_module else {}
    visit.value.load_state_dict(visit.own.state_dict(), **strict)
    visit.build().load_state_dict(visit.value.state_dict(), **strict)


def deepcopied(visit: Visit) -> None:
    """``copy.deepcopy`` gives an object like a copy of one's own, in memory of its own."""
    expected, copied = copy.deepcopy(visit.own), copy.deepcopy(visit.value)
    visit.same(expected, copied)
    # torch itself leaves some memory to both, such as the scales of a quantised tensor.
    assert _common(copied, visit.value) == _common(expected, visit.own)
    if visit.case.run is not None:
        visit.same(visit.run(expected), visit.run(copied))


def _common(one: Any, other: Any) -> set[str]:
    """The paths in ``one`` of the memory that it has in common with ``other``."""
    others = memories(other)
    return {path for address, path in memories(one).items() if address in others}


def pickled(visit: Visit) -> None:
    """``pickle`` takes it as it takes one's own, and what comes out has memory of its own."""
    expected, again = (pickle.loads(pickle.dumps(value)) for value in (visit.own, visit.value))
    visit.same(expected, again)
    assert not _common(again, visit.value)


def saved(visit: Visit) -> None:
    """``torch.save`` and ``torch.load``."""
    visit.same(*map(_saved, (visit.own, visit.value)))


def _saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def written_here(visit: Visit) -> None:
    """What the client writes is there where it was built."""
    _, tensor = strided_tensors(visit.value)[_some_float(visit)]
    before = tensor.detach().clone()
    try:
        with torch.no_grad():
            tensor.data.fill_(0.5)
        _synchronize(visit.device)
        there = visit.digest_there()
        assert there == digest(visit.value), "not seen there"
        assert there != visit.bits
    finally:
        with torch.no_grad():
            tensor.data.copy_(before)
        _synchronize(visit.device)


def _some_float(visit: Visit) -> int:
    """The index of a tensor of numbers that is to be shared."""
    private = _private(visit)
    tensors = strided_tensors(visit.value)
    return next(index for index in _floats(visit.value) if tensors[index][0] not in private)


def _floats(value: Any) -> list[int]:
    tensors = enumerate(strided_tensors(value))
    return [index for index, (path, tensor) in tensors if tensor.dtype in _FLOATS and is_memory(path)]


_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def trained(visit: Visit) -> None:
    """A head trained on top of the frozen model, and gradients of the whole: the same numbers, in the client's own memory."""
    _train_alike(visit, visit.value)


def _train_alike(visit: Visit, value: Any) -> None:
    expected, learned = _train(visit, visit.own), _train(visit, value)
    if differences(expected, learned, visit.case.ignored) and not _repeats(visit, expected):
        torch.testing.assert_close(learned, expected, rtol=1e-3, atol=1e-4)
    else:
        visit.same(expected, learned)


def _repeats(visit: Visit, learned: Any) -> bool:
    """Whether one's own model learns the same bits again, which not every kernel of a GPU allows, see :func:`repeatable`."""
    return visit.device == "cpu" or not differences(learned, _train(visit, visit.own), visit.case.ignored)


def _train(visit: Visit, value: Any) -> Any:
    with repeatable(visit.device):
        return _learned(visit, value)


def _learned(visit: Visit, value: Any) -> Any:
    assert visit.case.run is not None
    found = []
    flags = [(parameter, parameter.requires_grad) for parameter in value.parameters()]
    for frozen in (True, False):
        for parameter, flag in flags:
            parameter.requires_grad_(flag and not frozen)
        torch.manual_seed(3)
        features = _features(visit.case.run(value, visit.device))
        head = torch.nn.Linear(features.shape[-1], 2, device=visit.device)
        optimizer = torch.optim.AdamW(head.parameters(), lr=0.1)
        for _ in range(2):
            loss = head(_features(visit.case.run(value, visit.device)).float()).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append([loss.detach(), *(parameter.detach().clone() for parameter in head.parameters())])
    found.append([None if parameter.grad is None else parameter.grad.clone() for parameter, _ in flags])
    for parameter, flag in flags:
        parameter.grad = None
        parameter.requires_grad_(flag)
    return found


def _features(output: Any) -> torch.Tensor:
    floats = [tensor for _, tensor in strided_tensors(output) if tensor.is_floating_point()]
    return floats[0].reshape(floats[0].shape[0], -1)


def read_only(visit: Visit) -> None:
    """Under ``access="read"`` it is the same, computes the same, and can be copied and built upon."""
    visit.own = visit.build()
    with app.read_only(visit.library, visit.name) as handle:
        visit.same(visit.own, handle.value)
        if visit.case.run is not None and not visit.case.writes:
            visit.same(visit.run(visit.own), visit.run(handle.value))
            if visit.is_module and any(parameter.requires_grad for parameter in visit.own.parameters()):
                _train_alike(visit, handle.value)
        try:
            mine = copy.deepcopy(handle.value)
        except Exception:
            copy_of_own_fails = False
            try:
                copy.deepcopy(visit.own)
            except Exception:
                copy_of_own_fails = True
            assert copy_of_own_fails, "cannot be copied, and one's own can"
        else:
            common = _common(mine, handle.value)
            for path, tensor in strided_tensors(mine):
                if path not in common and is_memory(path):
                    tensor.data.zero_()
    gc.collect()
    with app.read_only(visit.library, visit.name) as handle:
        assert digest(handle.value) == visit.bits


def compiled(backend: str) -> Callable[[Visit], None]:
    """The check of ``torch.compile`` in the client."""

    def check(visit: Visit) -> None:
        assert visit.case.run is not None
        found = []
        for value in (visit.own, visit.value):
            torch._dynamo.reset()
            made = torch.compile(value, backend=backend)
            with torch.no_grad():
                found.append([made(*_call(value, visit)[0], **_call(value, visit)[1])])
        torch._dynamo.reset()
        visit.same(*([tensor for _, tensor in strided_tensors(output)] for output in found))

    check.__doc__ = f"`torch.compile` with {backend} computes what it computes over a model of one's own."
    return check


def _call(module: Any, visit: Visit) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the first call of the module itself in what the case runs."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = module.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    try:
        visit.run(module)
    finally:
        hook.remove()
    return calls[0]


def released(visit: Visit) -> None:
    """Nothing of it stays mapped once it was let go, but slabs, which a session keeps for its next small results."""
    if visit.device != "cpu":
        return
    addresses = {address: path for address, path in memories(visit.value).items() if not in_slab(address)}
    visit.handle.release()
    gc.collect()
    left = [path for address, path in addresses.items() if in_memfd(address)]
    with contextlib.suppress(AssertionError):
        # Unmapping is left to another thread.
        eventually(lambda: not any(map(in_memfd, addresses)), app.PATIENCE)
        left = []
    visit.handle = app.shared(visit.library, visit.name)
    assert not left, f"still mapped: {left[:8]}"


def beside(function: Callable[[Any, Any, str], None]) -> Callable[[Visit], None]:
    """A check of a library's own."""

    def check(visit: Visit) -> None:
        torch.manual_seed(5)
        function(visit.value, visit.own, visit.device)

    check.__doc__ = function.__doc__
    return check


#: Those that change the client's object, its bits, flags or stored state; later checks attach again.
CHANGES = {
    *("outputs", "outputs there", "deepcopy", "read-only"),
    *("state_dict", "written here", "trained"),
}


def changes(visit: Visit, check: str) -> bool:
    """Return True if the objects must be attached again after a check."""
    return check in CHANGES or check in visit.case.besides or check.startswith("compiled")


def checks_of(visit: Visit, heavy: bool) -> Iterator[tuple[str, Callable[[Visit], None]]]:
    """The checks that a case calls for, by name.

    :param heavy: also those that take seconds and do not depend on how the server was started.
    """
    case = visit.case
    yield "same", same
    yield "shared memory", in_shared_memory
    if case.parameters_alone:
        yield "private tensors", private
    if any(" reduction" in path for path, _ in strided_tensors(visit.own)):
        yield "counted", counted
    if case.run is not None:
        yield "outputs", outputs
        yield "outputs there", outputs_there
    yield "deepcopy", deepcopied
    yield "pickle", pickled
    yield "torch.save", saved
    if hasattr(visit.own, "state_dict") and hasattr(visit.own, "load_state_dict"):
        yield "state_dict", state_dict
    if _floats(visit.own):
        yield "written here", written_here
    if visit.is_module and case.run is not None and any(parameter.requires_grad for parameter in visit.own.parameters()):
        yield "trained", trained
    yield "read-only", read_only
    for name, function in case.besides.items():
        yield name, beside(function)
    for backend in case.compiled:
        if heavy or backend == "aot_eager":
            yield f"compiled by {backend}", compiled(backend)
    yield "released", released


def outcome(visit: Visit, check: Callable[[Visit], None]) -> tuple[str, str]:
    """``("works", "")``, ``("as alone", words)`` where one's own object cannot do it either, or ``("fails", words)``."""
    try:
        check(visit)
    except Exception as error:
        words = describe(error)
        if _fails_alone(visit, check, error):
            return "as alone", words
        return "fails", words
    return "works", ""


def _fails_alone(visit: Visit, check: Callable[[Visit], None], error: Exception) -> bool:
    """Whether the same check ends in the same error with an object of one's own in the place of the attached one."""
    if _is_ours(error):
        return False
    alone = copy.copy(visit)
    alone.own = visit.build()
    alone.handle = _Own(visit.build())
    try:
        check(alone)
    except Exception as other:
        return type(other) is type(error) and _without_numbers(str(other)) == _without_numbers(str(error))
    return False


def _is_ours(error: BaseException) -> bool:
    """Whether an error came by way of this package, or is a check that does not hold; a library may assert things too."""
    frame, name = error.__traceback__, ""
    while frame is not None:
        name = frame.tb_frame.f_globals.get("__name__", "")
        if name.startswith("shared_rpc."):
            return True
        frame = frame.tb_next
    return isinstance(error, AssertionError) and name.startswith("tests.")


class _Own:
    """Stands for a handle."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def release(self) -> None:
        """Nothing is held."""


def _without_numbers(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text)[:200]


def describe(error: BaseException) -> str:
    """An error in a few words, with the line that it comes from."""
    frame, line = error.__traceback__, ""
    while frame is not None:
        code = frame.tb_frame.f_code
        line = f"{code.co_filename.rpartition('site-packages/')[2].rpartition('/tests/')[2]}:{frame.tb_lineno}"
        frame = frame.tb_next
    with contextlib.suppress(Exception):
        return f"{type(error).__name__} at {line}: {str(error)[:600]}"
    return type(error).__name__
