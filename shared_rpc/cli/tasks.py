"""The commands for tasks. A wait is shown as a bar on a terminal, as lines on a pipe, or as JSON events."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared_rpc import Client
from shared_rpc.cli.discovery import live_servers, the_owner, the_server
from shared_rpc.cli.options import Arguments, BasePath, Json, Socket, Timeout, as_misuse, is_list, keywords
from shared_rpc.cli.rendering import ago, as_json, bars, listing, percent, size, status_of, steps, task_object, took
from shared_rpc.errors import SharedRPCError, StaleHandleError, TaskCancelled, TaskError, one_line
from shared_rpc.operations.tasks import fetched
from shared_rpc.protocol.infos import ObjectInfo
from shared_rpc.protocol.tasks import TaskInfo, TaskStatus

if TYPE_CHECKING:
    from rich.console import Console

#: 30 years in seconds: the limit of the clocks that measure a wait.
_LONGEST = 1e9
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
    with the_owner(task, socket, base_path) as client, _interruptible(task, socket, base_path):
        _await_task(client, task, timeout, _display_for(json))


def cancel(task: TaskId, socket: Socket = None, base_path: BasePath = None, json: Json = False) -> None:
    """Cancel a pending task, or request a running one to stop."""
    with the_owner(task, socket, base_path) as client:
        done = client.cancel_task(task)
        info = client.get_task_status(task)
    outcome = "ended" if not done else "cancelled" if info.status is TaskStatus.CANCELLED else "asked"
    if json:
        as_json({"outcome": outcome, "task": task_object(info)})
        return
    texts = {
        "ended": f"had ended: it is {info.status}",
        "cancelled": "was cancelled",
        "asked": "was asked to stop; it ends when its endpoint checks",
    }
    print(f"task {task} {texts[outcome]}")


def call(
    endpoint: str,
    arguments: Annotated[Arguments, typer.Argument(help="key=value")] = None,
    timeout: Timeout = None,
    socket: Socket = None,
    base_path: BasePath = None,
    json: Json = False,
) -> None:
    """Call an endpoint as a task: print the task's id, then wait for it."""
    kwargs = keywords(arguments)
    with the_server(socket, base_path) as client:
        with as_misuse():
            task = client.submit(endpoint, **kwargs)
        with _interruptible(task, socket, base_path):
            display = _display_for(json)
            display.begin(task)
            _await_task(client, task, timeout, display, fetch=True)


@contextmanager
def _interruptible(task: str, socket: str | None, base_path: str | None) -> Iterator[None]:
    """End the wait on Ctrl-C, and print that the task continues."""
    try:
        yield
    except KeyboardInterrupt:
        where = {"--socket": socket, "--base-path": base_path}
        options = "".join(f" {name} {shlex.quote(path)}" for name, path in where.items() if path is not None)
        print(f"shared-rpc: task {task} continues; cancel it with: shared-rpc tasks cancel {task}{options}", file=sys.stderr)
        raise typer.Exit(130) from None


def _error_or_key(info: TaskInfo) -> str:
    if info.waits_for is not None:
        return one_line(info.waits_for)
    if info.error_type is None:
        return one_line(info.cache_key or "")
    text = one_line(f"{info.error_type}: {info.error_message or ''}").rstrip(": ")
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _await_task(client: Client, task_id: str, timeout: float | None, display: Lines, *, fetch: bool = False) -> None:
    """Show a task's status and progress until it ends, and then its result, which is not rebuilt here.

    :param timeout: see :meth:`Client.wait_for_task`.
    :param fetch: take the result from the server, for a single user.
    :raises SharedRPCError: if the task failed, was cancelled, is unknown, or is still running after ``timeout`` seconds.
    """

    def changed(info: TaskInfo) -> None:
        display.update(info)
        # The reply that follows would be rebuilt with the exception's class, whose module would be imported here.
        _check(info)

    seconds = timeout if timeout is None or timeout < _LONGEST else None
    with display:
        info = client.watch_task(task_id, seconds, changed)
        _check(info)
        facts = _facts(client, info)
        if fetch:
            with suppress(TaskError):  # another client has fetched it
                client._run(fetched(task_id)).close()
    display.end(facts)


def _facts(client: Client, info: TaskInfo) -> dict[str, Any]:
    known: ObjectInfo | None = None
    with suppress(StaleHandleError):  # another client has fetched it, and nothing keeps it
        known = client.get_object_info(info.object_id or "")
    return {
        "object_id": info.object_id,
        "nbytes": known["nbytes"] if known is not None else None,
        "device": known["device"] if known is not None else None,
    }


def _check(info: TaskInfo) -> None:
    what = f"task {info.task_id} of {info.endpoint!r}"
    if info.status is TaskStatus.FAILED:
        raise SharedRPCError(one_line(f"{what} failed: {info.error_type}: {info.error_message}"))
    if info.status is TaskStatus.CANCELLED:
        raise TaskCancelled(f"{what} was cancelled")


def _display_for(machine: bool) -> Lines:
    """Choose the display for the reader of standard output."""
    if machine:
        return _Events()
    from rich.console import Console

    console = Console()
    return _Bar(console) if sys.stdout.isatty() and console.is_interactive else Lines()


class Lines:
    """Displays a line for each step. Of steps smaller than a hundredth of the whole, not all are shown."""

    def __init__(self) -> None:
        self._info: TaskInfo | None = None
        self._shown: object = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, task_id: str) -> None:
        """Show the task's id, before anything else."""
        print(task_id, flush=True)

    def update(self, info: TaskInfo) -> None:
        """Show the current state of the task. Its end is shown by :meth:`end`, or is an error."""
        self._info = info
        progress = info.progress
        share = percent(progress)
        shown = (status_of(info), progress and (progress.done if share is None else int(share), progress.message))
        if shown == self._shown or info.status.finished:
            return
        self._shown = shown
        print(f"{info.endpoint}: {status_of(info)}{', ' if progress else ''}{steps(progress)}", flush=True)

    def end(self, facts: dict[str, Any]) -> None:
        """Show the result."""
        assert self._info is not None, "the first event comes at once"
        cached = self._info.status is TaskStatus.COMPLETED and self._info.started_at is None
        lasted = "from the cache" if cached else f"in {took(self._info)}"
        gone = facts["nbytes"] is None
        what = "dropped since" if gone else f"{size(facts['nbytes'])} on {facts['device']}, object {facts['object_id']}"
        print(f"{self._info.endpoint}: completed {lasted}, {what}")


class _Events(Lines):
    """Displays a JSON document, on its own line, for each event and for the result."""

    def begin(self, task_id: str) -> None:
        self._print({"task_id": task_id})

    def update(self, info: TaskInfo) -> None:
        self._print(task_object(info))

    def end(self, facts: dict[str, Any]) -> None:
        self._print(facts)

    def _print(self, document: dict[str, Any]) -> None:
        print(json.dumps(document), flush=True)


class _Bar(Lines):
    """Displays a bar on one line, which pulses while the total is unknown."""

    def __init__(self, console: Console) -> None:
        from rich.progress import TextColumn, TimeElapsedColumn
        from rich.table import Column

        super().__init__()
        words = TextColumn("{task.fields[steps]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
        self._bar = bars(console, words, TimeElapsedColumn())
        self._task = self._bar.add_task("waiting", total=None, steps="")

    def __enter__(self) -> None:
        self._bar.start()

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, info: TaskInfo) -> None:
        self._info = info
        share = percent(info.progress)
        self._bar.update(
            self._task,
            description=f"{info.endpoint}: {status_of(info)}",
            completed=share or 0,
            steps=steps(info.progress),
        )
        # An update with None would leave the total unchanged.
        self._bar.tasks[0].total = 100.0 if share is not None else None
