"""The loop of a zygote."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from dataclasses import dataclass

from shared_rpc.lifecycle import collector
from shared_rpc.settings import change_environment, environment
from shared_rpc.zygote.child import Identity, become, run_module
from shared_rpc.zygote.descriptors import open_descriptors
from shared_rpc.zygote.forking import fork_for_subreaper
from shared_rpc.zygote.framing import Lost
from shared_rpc.zygote.messages import Answer, Fork, Forked, ForkRefused, Preload, Ready, Unfit, packed, requests
from shared_rpc.zygote.preloading import Files, preload, shadowed
from shared_rpc.zygote.safety import try_fork, unsafe

__all__ = ["Born", "Zygote"]

#: Makes torch ask the management library, not CUDA, whether there is a GPU: several libraries ask when they are imported.
_ASK_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@dataclass(frozen=True)
class Born:
    """A fork that is no process of its own yet.

    :param kept: descriptors that stay open though the request did not bring them.
    :param mask: signals that are to be blocked in it.
    """

    request: Fork
    identity: Identity
    fds: list[int]
    kept: list[int]
    mask: list[int]

    def run(self) -> None:
        """Be the process that was asked for, to its end."""
        become(self.identity, self.fds, self.kept, self.mask)
        run_module(self.request.module)


class Zygote:
    """A process that is forked. In the main thread of a process that has no other, and nothing open that it need not.

    The steps of a :class:`Preload` that change the environment are for what is imported after them, and undone in the forks.

    :param path: ``sys.path`` as a new process would have it.
    """

    def __init__(self, path: list[str]) -> None:
        #: The initial ``sys.path`` of forks, and the descriptors that imports have opened.
        self.path = path
        self.kept = _of_libraries()
        #: The environment at the beginning, and with the changes of the imports.
        self.inherited = environment()
        self.variables = environment()
        self._fds = frozenset(open_descriptors())
        self._mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
        self._files: Files
        self._names: list[str] = []

    @property
    def ready(self) -> bool:
        """Whether it has been prepared, and can be forked."""
        return bool(self._names)

    def prepare(self, request: Preload) -> Ready | Unfit:
        """Import the requested modules, and find out whether this process can be forked then."""
        change_environment(_ASK_NVML)
        if why := unsafe(self._fds):
            return Unfit(why)
        begin = sys.path[:]
        with collector.paused():
            done = preload(request.steps, request.folders, lambda: unsafe(self._fds))
        if done.spoiled:
            why = f"importing {done.module} makes the process unfit for forks: {done.spoiled}"
            return Unfit(why, done.module)
        changed = self.variables | done.variables
        self.variables = {name: value for name, value in changed.items() if value is not None}
        self.path += [entry for entry in sys.path if entry not in begin]
        for name in request.own:
            if name in sys.modules:
                return Unfit(f"the imports have a module {name!r}, and the app has another one")
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()
        # A collection in a fork would touch every object, and so copy its page.
        gc.freeze()
        if why := try_fork() or unsafe(self._fds):
            return Unfit(why)
        self.kept = sorted({*self.kept, *({*open_descriptors()} - self._fds)})
        self._files = Files()
        self._names = [name for name, imported in sys.modules.items() if imported is not None]
        return Ready(self._names, done.dropped)

    def refusal(self, folders: list[str]) -> ForkRefused | None:
        """Return why a new process would import other code; None if it would not.

        :param folders: where that one looks first.
        """
        if not self.ready:
            return ForkRefused("the zygote has no imports yet")
        if name := self.changed():
            return ForkRefused(f"{name} has changed", stale=True)
        if name := shadowed(folders):
            return ForkRefused(f"the app's path has another {name} than the zygote has imported", stale=True)
        return None

    def changed(self) -> str:
        """Return an imported file that has changed; empty for none."""
        return self._files.changed()

    def serve(self, connection: socket.socket) -> Born | None:
        """Answer requests until the other side hangs up. Returns in each fork; and None in the zygote, at the end."""
        incoming = requests()
        while True:
            try:
                received = incoming.receive(connection)
            except Lost:
                return None
            if received is None:
                continue
            request, fds = received
            result = self.prepare(request) if isinstance(request, Preload) else self._begin(request, fds)
            if isinstance(result, Born):
                connection.detach()  # its descriptor has been closed with all others
                return result
            for fd in fds:
                os.close(fd)
            connection.sendall(packed(result))
            if isinstance(result, Unfit):
                return None

    def _begin(self, request: Fork, fds: list[int]) -> Answer | Born:
        if len(fds) != len(request.fds):
            return ForkRefused(f"received {len(fds)} descriptors instead of the announced {len(request.fds)}")
        if taken := sorted({*request.fds} & {*self.kept}):
            return ForkRefused(f"a library in the zygote uses descriptor {taken[0]}, which the new process needs")
        if refused := self.refusal(request.folders):
            return refused
        try:
            pid = fork_for_subreaper()
        except (OSError, MemoryError) as error:
            return ForkRefused(f"cannot fork the zygote: {str(error) or 'out of memory'}")
        if pid:
            return Forked(pid)
        identity = Identity(
            fds=request.fds,
            argv=["-m", *request.words],
            variables=self.variables,
            path=self.path,
            title=["-m", request.module, *request.words],
            inherited=self.inherited,
        )
        return Born(request, identity, fds, self.kept, self._mask)


def _of_libraries() -> list[int]:
    """Return the descriptors of shared libraries: libffi of 3.5 maps its own file whenever it needs trampolines."""
    names = {fd: os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) for fd in open_descriptors()}
    return [fd for fd, name in names.items() if ".so." in name or name.endswith(".so")]
