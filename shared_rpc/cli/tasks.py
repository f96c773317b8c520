"""The commands for tasks."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from shared_rpc.cli.discovery import live_servers, the_owner, the_server
from shared_rpc.cli.options import Arguments, BasePath, Json, Socket, Timeout, is_list, keywords
from shared_rpc.cli.rendering import ago, as_json, listing, status_of, steps, task_object, took
from shared_rpc.errors import ConfigurationError, one_line
from shared_rpc.protocol.tasks import TaskInfo, TaskStatus

#: Maximum characters of an error in the table.
_SHOWN = 200

TaskId = Annotated[str, typer.Argument(metavar="TASK", help="The task's id, which names its server too.")]


def tasks(
    context: typer.Context,
    status: Annotated[TaskStatus | None, typer.Option(help="Only tasks of this status.")] = None,
    socket: Annotated[str | None, typer.Option("--socket", help="One server's socket; all live servers by default.")] = None,
    base_path: BasePath = None,
    json: Json = False,
) -> None:
    """List the tasks of this user's servers, with progress and outcome; its commands wait for one and cancel one."""
    if not is_list(context):
        return
    infos: list[TaskInfo] = []
    if socket is not None:
        with the_server(socket, base_path) as client:
            infos += client.list_tasks(status)
    else:
        with live_servers(base_path) as clients:
            for client in clients:
                infos += client.list_tasks(status)
    infos.sort(key=lambda info: info.created_at)
    if json:
        as_json([task_object(info) for info in infos])
        return
    if not infos:
        print("there are no tasks" if status is None else f"no task is {status}")
        return
    listing(
        "",
        infos,
        {
            "task": lambda info: info.task_id,
            "endpoint": lambda info: info.endpoint,
            "status": status_of,
            "progress": lambda info: steps(info.progress),
            "submitted>": lambda info: f"{ago(info.created_at)} ago",
            "took>": took,
            "error or key": _error_or_key,
        },
    )


def wait(task: TaskId, timeout: Timeout = None, socket: Socket = None, base_path: BasePath = None, json: Json = False) -> None:
    """Wait for a task, and show its progress. Exit code 1 if it fails, is cancelled, or exceeds the timeout.

    The result is not fetched.
    """
    from shared_rpc.cli import waiting

    with the_owner(task, socket, base_path) as client, _interruptible(task, socket, base_path):
        waiting.wait(client, task, timeout, waiting.display_for(json))


def cancel(task: TaskId, socket: Socket = None, base_path: BasePath = None, json: Json = False) -> None:
    """Cancel a pending task, or request a running one to stop."""
    with the_owner(task, socket, base_path) as client:
        done = client.cancel_task(task)
        info = client.get_task_status(task)
    if not done:
        outcome = "ended"
    elif info.status is TaskStatus.CANCELLED:
        outcome = "cancelled"
    else:
        outcome = "asked"
    if json:
        as_json({"outcome": outcome, "task": task_object(info)})
    elif outcome == "ended":
        print(f"task {task} had ended: it is {info.status}")
    elif outcome == "cancelled":
        print(f"task {task} was cancelled")
    else:
        print(f"task {task} was asked to stop; it ends when its endpoint checks")


def call(
    endpoint: str,
    arguments: Annotated[Arguments, typer.Argument(help="key=value")] = None,
    timeout: Timeout = None,
    socket: Socket = None,
    base_path: BasePath = None,
    json: Json = False,
) -> None:
    """Call an endpoint as a task: print the task's id, then wait for it."""
    from shared_rpc.cli import waiting

    kwargs = keywords(arguments)
    with the_server(socket, base_path) as client:
        try:
            task = client.submit(endpoint, **kwargs)
        except TypeError as error:
            raise ConfigurationError(str(error)) from error
        with _interruptible(task, socket, base_path):
            display = waiting.display_for(json)
            display.begin(task)
            waiting.wait(client, task, timeout, display, fetch=True)


@contextmanager
def _interruptible(task: str, socket: str | None, base_path: str | None) -> Iterator[None]:
    """End the wait on Ctrl-C, and print that the task continues."""
    try:
        yield
    except KeyboardInterrupt:
        where = {"--socket": socket, "--base-path": base_path}
        options = "".join(f" {name} {shlex.quote(path)}" for name, path in where.items() if path is not None)
        print(f"shared-rpc: task {task} goes on; to cancel it: shared-rpc tasks cancel {task}{options}", file=sys.stderr)
        raise typer.Exit(130) from None


def _error_or_key(info: TaskInfo) -> str:
    if info.waits_for is not None:
        return one_line(info.waits_for)
    if info.error_type is None:
        return one_line(info.cache_key or "")
    text = one_line(f"{info.error_type}: {info.error_message or ''}").rstrip(": ")
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
