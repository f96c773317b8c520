"""The server itself: its description, its users, its runs, and its end."""

from __future__ import annotations

import os

from shared_rpc.errors import ConfigurationError
from shared_rpc.execution.outcomes import Failure
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import monitoring as mo
from shared_rpc.protocol.infos import ReloadInfo
from shared_rpc.server.handlers.table import Caller, handles

#: Runs in one reply.
_MOST_RUNS = 1000


@handles(m.Ping)
def ping(caller: Caller, message: m.Ping) -> m.Pong:
    return m.Pong()


@handles(m.Goodbye)
def goodbye(caller: Caller, message: m.Goodbye) -> None:
    caller.core.sessions.closing(caller.session)


@handles(m.GetServerInfo)
def get_server_info(caller: Caller, message: m.GetServerInfo) -> m.ServerReply:
    return m.ServerReply(caller.core.info(caller.session))


@handles(m.ListEndpoints)
def list_endpoints(caller: Caller, message: m.ListEndpoints) -> m.Endpoints:
    return m.Endpoints(caller.core.registry.all())


@handles(mo.ListSessions)
def list_sessions(caller: Caller, message: mo.ListSessions) -> mo.SessionsReply:
    return mo.SessionsReply(caller.core.sessions.infos())


@handles(mo.ListRuns)
def list_runs(caller: Caller, message: mo.ListRuns) -> mo.RunsReply:
    return mo.RunsReply(caller.core.runs.infos(min(max(message.limit, 1), _MOST_RUNS)))


@handles(mo.GetStatistics)
def get_statistics(caller: Caller, message: mo.GetStatistics) -> mo.StatisticsReply:
    return mo.StatisticsReply(caller.core.runs.statistics.infos())


@handles(m.Reload)
def reload(caller: Caller, message: m.Reload) -> None:
    if caller.core.on_reload is None:
        raise ConfigurationError(
            f"this server (pid {os.getpid()}) runs its endpoints in its own process, whose code cannot be reloaded: "
            f"start it with 'shared-rpc serve'"
        )
    caller.wait()

    def told(outcome: ReloadInfo | Failure) -> None:
        if isinstance(outcome, Failure):
            caller.fail(outcome)
        else:
            caller.reply(m.ReloadReply(outcome))

    caller.core.on_reload(message.objects, told)


@handles(m.StopServer)
def stop_server(caller: Caller, message: m.StopServer) -> m.StopReply:
    if caller.core.on_stop is None:
        raise ConfigurationError(
            f"this server is part of process {os.getpid()}, which may do more than serve: end the process with "
            f"'kill {os.getpid()}' or Ctrl-C"
        )
    return m.StopReply(caller.core.on_stop(caller.session, message.if_idle))
