"""The server itself: its state, its sessions and runs, and its end."""

from __future__ import annotations

import functools
import os
import select
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, overload

from shared_rpc.client.steps import BlockingMethods, CoroutineMethods, Pause, Request, Within, Work, ask, query
from shared_rpc.client.suspension import Context
from shared_rpc.errors import BufferNotFound, DeadlineExceeded
from shared_rpc.operations.binding import Opened, Steps, Unbound, operation
from shared_rpc.operations.handles import until_of
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.infos import EndpointStatistics, ReloadInfo, RunInfo, ServerInfo, SessionInfo, StopInfo
from shared_rpc.protocol.specs import EndpointSpec

if TYPE_CHECKING:
    import torch

    from shared_rpc.operations.channels import AsyncTensorChannel, TensorChannel

P = ParamSpec("P")

#: Seconds between two checks of a process without a pidfd.
_LOOK = 0.05


class ServerOperations:
    """The server itself."""

    @operation
    def ping(ctx: Context) -> Steps[float]:
        """Make one round trip; return the seconds that it took."""
        begin = time.perf_counter()
        yield from ask(Request(m.Ping(), "ping"), m.Answer)
        return time.perf_counter() - begin

    @operation
    def get_server_info(ctx: Context) -> Steps[ServerInfo]:
        """Return the server's description of itself."""
        return (yield from query(m.GetServerInfo(), "get_server_info"))

    @operation
    def list_endpoints(ctx: Context) -> Steps[dict[str, EndpointSpec]]:
        """Return the options of every endpoint, by name."""
        specs = yield from query(m.ListEndpoints(), "list_endpoints")
        return {spec.name: spec for spec in specs}

    @operation
    def list_sessions(ctx: Context) -> Steps[list[SessionInfo]]:
        """Return the connected processes, including this one."""
        return (yield from query(m.ListSessions(), "list_sessions"))

    @operation
    def list_runs(ctx: Context, limit: int = 1000) -> Steps[list[RunInfo]]:
        """Return the runs of endpoints that have not ended, for calls and for tasks, the oldest first.

        :param limit: the number of runs to return; at most 1,000.
        """
        return (yield from query(m.ListRuns(limit), "list_runs"))

    @operation
    def get_statistics(ctx: Context) -> Steps[dict[str, EndpointStatistics]]:
        """Return the counts of each called endpoint since the server started, by name."""
        return (yield from query(m.GetStatistics(), "get_statistics"))

    @operation
    def reload(
        ctx: Context, objects: Literal["changed", "all", "none"] = "changed", timeout: float | None = None
    ) -> Steps[ReloadInfo]:
        """Restart the server's workers with the app's new code. The old workers serve until the new ones are ready.

        :param objects: the cached objects to drop: those whose endpoint has ``"changed"``, ``"all"`` or ``"none"``. Handles
            stay valid; ``get_object_info`` has ``stale`` for objects whose endpoint has changed.
        :param timeout: seconds to wait at most, None for as long as the app takes to load.
        :raises WorkerCrashed: if the new code cannot be loaded; then nothing has changed.
        :raises ConfigurationError: if the server has no workers.
        """
        yield Within(timeout)
        return (yield from query(m.Reload(objects), "reload"))

    @operation
    def stop_server(ctx: Context, if_idle: bool = False, timeout: float | None = 10.0) -> Steps[StopInfo]:
        """Stop the server, like SIGTERM, and wait until its process has exited. Clients keep their memory.

        :param if_idle: refuse if other processes are connected, hold a lease, or have a task or a call that has not ended.
        :param timeout: seconds to wait for its end, None for no limit.
        :returns: the server's counts at its end.
        :raises ServerBusy: with ``if_idle``, if other processes use it.
        :raises ConfigurationError: if the server is part of another program, such as a script in the server role.
        :raises CapabilityError: in the local role, which has no server.
        :raises DeadlineExceeded: if it has not ended after ``timeout`` seconds.
        """
        yield from ask(Request(m.Ping(), "ping"), m.Answer)  # of the server that is there now
        server, path = (yield from ctx._reached()), ctx.socket_path
        with ExitStack() as stack:
            pidfd = -1
            if server.pid:  # of the process that answers, which need not be the one that listened
                with suppress(ProcessLookupError):
                    pidfd = os.pidfd_open(server.pid)
                    stack.callback(os.close, pidfd)
            info = yield from query(m.StopServer(if_idle), "stop_server")
            yield Work(functools.partial(await_exit, path, pidfd, timeout))
        return info


def await_exit(path: str, pidfd: int, timeout: float | None) -> None:
    """Wait until a server's process has ended.

    :param path: its socket.
    :param pidfd: its pidfd; -1 for a process in another pid namespace, which counts as ended when no process listens.
    :raises DeadlineExceeded: after ``timeout`` seconds.
    """
    from shared_rpc.client.starting import listens

    ended, until = select.poll(), until_of(timeout)
    if pidfd >= 0:
        ended.register(pidfd, select.POLLIN)
    while not ended.poll(_LOOK * 1000) and (pidfd >= 0 or listens(path)):
        if time.monotonic() > until:
            raise DeadlineExceeded(f"the server at {path} did not exit within {timeout:g} s")


class opening(Unbound[P, Opened]):
    """A public operation that returns a channel."""

    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...
    @overload
    def __get__(self, owner: BlockingMethods, kind: type) -> Callable[P, TensorChannel]: ...
    @overload
    def __get__(self, owner: CoroutineMethods, kind: type) -> Callable[P, Coroutine[Any, Any, AsyncTensorChannel]]: ...
    def __get__(self, owner: Any, kind: type) -> Any:
        return self


class ChannelOperations:
    """Channels."""

    @opening
    def create_channel(
        ctx: Context, name: str, nbytes: int, slots: int = 2, readers: int = 1, device: torch.device | str | None = None
    ) -> Steps[Opened]:
        """Create a channel, through which a process sends named tensors to others, which use :meth:`open_channel`.

        It exists while a process has it open: killed processes leave nothing behind.

        :param name: a name that no other channel of the server has.
        :param nbytes: bytes of a slot. A tensor that fits into one slot is received without an intermediate copy.
        :param slots: the number of slots: with two, the sender fills one while the readers read the other.
        :param readers: the number of processes that receive everything sent.
        :param device: the device of the slots, like in :meth:`create_buffer`; None for the server's own device.
        :raises ConfigurationError: for an invalid size, and if there is a channel or buffer of that name.
        :raises ServerBusy, CapabilityError: like :meth:`create_buffer`.
        """
        from shared_rpc.operations.channels import create, opened  # few processes have any

        return opened(ctx, (yield from create(ctx, name, nbytes, slots, readers, device)))

    @opening
    def open_channel(ctx: Context, name: str, timeout: float = 0.0) -> Steps[Opened]:
        """Return the channel with this name, to send or to receive.

        :param timeout: seconds to wait for its creation.
        :raises BufferNotFound: if it does not exist by then.
        """
        from shared_rpc.operations.channels import open_once, opened

        until = time.monotonic() + timeout
        while True:
            try:
                return opened(ctx, (yield from open_once(ctx, name)))
            except BufferNotFound as error:
                if error.reason != "unknown":
                    raise
                if time.monotonic() >= until:
                    raise BufferNotFound(
                        f"there is no channel {name[:200]!r} at {ctx.socket_path}: none was created, all sides have closed it, "
                        f"or the server has restarted (open channels keep working, but cannot be opened by name): create it",
                        reason="unknown",
                    ) from None
            yield Pause(0.02)
