"""The commands. Those that print a server's state are here, the others in their own modules."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated, Any

import msgspec
import typer
from typer.core import TyperGroup

from shared_rpc import __version__
from shared_rpc.cli.discovery import the_server
from shared_rpc.cli.listing import command_line, print_servers
from shared_rpc.cli.objects import evict, export_object, import_file, invalidate, objects, restore
from shared_rpc.cli.options import BasePath, Json, Socket
from shared_rpc.cli.rendering import MPS, ago, as_json, copies_of, listing, several, size, table
from shared_rpc.cli.serving import reload, run, serve, stop
from shared_rpc.cli.tasks import call, cancel, tasks, wait
from shared_rpc.cli.top.command import top
from shared_rpc.cli.verifying import verify
from shared_rpc.errors import ConfigurationError
from shared_rpc.protocol.infos import DeviceInfo, SourceInfo, ZygoteInfo

_GROUP = "shared_rpc.cli"
#: Commands of known distributions, and how to install these.
_KNOWN = {"cluster": "pip install 'shared-rpc[ray]'"}


class Commands(TyperGroup):
    """The commands of this package, and those of other distributions, which are imported on use."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands that are installed."""
        return [*super().list_commands(ctx), *sorted(entry_points(group=_GROUP).names)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, None if there is none of that name.

        :raises ConfigurationError: for one whose distribution is not installed.
        """
        command = super().get_command(ctx, cmd_name)
        for found in entry_points(group=_GROUP, name=cmd_name) if command is None else ():
            command = typer.main.get_command(found.load())
            command.name = cmd_name
        if command is None and cmd_name in _KNOWN:
            raise ConfigurationError(f"the command {cmd_name!r} is not installed: {_KNOWN[cmd_name]}")
        return command


app = typer.Typer(
    name="shared-rpc",
    cls=Commands,
    help="Share GPU models between the processes of this host.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line."""
    with command_line():
        app()


def ls(base_path: BasePath = None, json: Json = False) -> None:
    """List the live servers of this user, and the zygotes of 'shared-rpc run'."""
    print_servers(base_path, json)


def info(socket: Socket = None, base_path: BasePath = None, json: Json = False) -> None:
    """Show a server and its endpoints."""
    with the_server(socket, base_path) as client:
        facts = client.get_server_info()
        endpoints = client.list_endpoints()
    if json:
        as_json({"server": facts, "endpoints": msgspec.to_builtins(endpoints)})
        return
    counts = ", ".join(f"{count} {status}" for status, count in facts["tasks"].items() if count) or "none"
    shown = facts | {
        "nbytes": size(facts["nbytes"]),
        "copies": copies_of(facts),
        "started_at": f"{ago(facts['started_at'])} ago",
        "tasks": counts,
    }
    if facts["mechanism"] is not None:
        text = "{name}: {reason}".format_map(facts["mechanism"])
        shown["mechanism"] = f"{text}; {MPS}" if facts["mechanism"]["mps"] else text
    workers = [f"pid {worker['pid']} {worker['state']}, {worker['runs']} runs" for worker in facts["workers"]]
    shown["pools"] = f"{size(facts['pools']['nbytes'])}, {facts['pools']['chunks']} results in use"
    shown["descriptors"] = "{used} of {limit}".format_map(facts["descriptors"])
    shown["workers"] = "; ".join(workers) or "none, endpoints run in the server"
    if facts["source"] is not None:
        shown["source"] = _source(facts["source"])
    if "zygote" in facts:
        shown["zygote"] = _zygote(facts["zygote"])
    left_out = {"endpoints", "uptime", *(["source"] if facts["source"] is None else [])}
    table("server", ["", ""], [(key, value) for key, value in shown.items() if key not in left_out])
    listing(
        "\nendpoints",
        endpoints.values(),
        {
            "name": lambda spec: spec.name,
            "managed": lambda spec: "yes" if spec.managed else "no",
            "cached by": lambda spec: (spec.cache_format_key or "all arguments") if spec.cache else "-",
            "concurrency": lambda spec: spec.concurrency,
            "access": lambda spec: spec.access,
            "tensors": lambda spec: spec.tensors,
            "idle_ttl": lambda spec: "never" if spec.idle_ttl is None else f"{spec.idle_ttl:g} s",
            "host copy": lambda spec: f"{spec.host_copy}{', pinned' if spec.pinned else ''}",
            "what it does": lambda spec: spec.doc,
        },
    )


def _source(facts: SourceInfo) -> str:
    """Describe the source of records, with its status, and the process that joins the server to a cluster."""
    pieces = [f"pid {facts['pid']}, for {ago(facts['since'] or 0.0)}" if facts["session"] is not None else "none is attached"]
    if facts["misses"]:
        pieces.append(f"{several(facts['misses'], 'run')} asked")
    status: dict[str, Any] = {**facts["status"]}
    activity = status.pop("activity", [])
    counts = [f"{name.replace('_', ' ')} {size(fact) if 'bytes' in name else fact}" for name, fact in status.items()]
    pieces += [*([", ".join(counts)] if counts else []), *activity]
    joiner = facts["joiner"]
    if joiner is not None:
        pieces.append(f"joiner pid {joiner['pid']}" if joiner["pid"] is not None else "no joiner runs")
        if joiner["problem"]:
            pieces.append(f"before that {joiner['problem']}")
    return "; ".join(pieces)


def _zygote(facts: ZygoteInfo) -> str:
    """Describe the process from which workers are forked, or the reason why there is none."""
    if facts["state"] != "ready":
        return f"none ({facts['state']})" + (f": {facts['why']}" if facts.get("why") else "")
    left_out = f", without {', '.join(facts['dropped'])}" if facts["dropped"] else ""
    return f"pid {facts['pid']}, {facts['modules']:,} modules{left_out}, {size(facts['rss'])}"


def devices(socket: Socket = None, base_path: BasePath = None, json: Json = False) -> None:
    """List the devices of a server, and how much of their memory it uses."""
    with the_server(socket, base_path) as client:
        items = client.list_devices()
    columns: dict[str, Callable[[DeviceInfo], object]] = {
        "device": lambda item: item["id"],
        "name": lambda item: item["name"],
        "memory>": lambda item: size(item["total"]),
        "free>": lambda item: size(item["free"]) if item["free"] is not None else "-",
        "used>": lambda item: size(item["used"]),
        "quota>": lambda item: size(item["limit"]) if item["limit"] is not None else "none",
        "copies?": copies_of,
    }
    listing("", items, columns, json)


def doctor(base_path: BasePath = None, json: Json = False) -> None:
    """Show what this machine can share, with remedies for what it cannot. Exit code 1 if it can share nothing."""
    from shared_rpc.cli.doctor import examine

    findings = examine(base_path)
    if json:
        as_json([finding._asdict() for finding in findings])
    else:
        marks = {"good": "ok", "limited": "!", "broken": "x"}
        table("", ["", "what", "found", "what to do"], [(marks[f.state], f.what, f.found, f.fix) for f in findings])
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


def _version(asked: bool) -> None:
    if asked:
        print(f"shared-rpc {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Share GPU models between the processes of this host."""


#: The commands by the panels of the help. The name of each is the first word of its function's.
_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Servers": (serve, run, ls, info, top, devices, reload, stop),
    "Calls and objects": (call, tasks, objects),
    "Checks": (doctor, verify),
}
#: Subcommands of the commands that list their subjects.
_OF_LISTS: dict[str, tuple[Callable[..., None], ...]] = {
    "tasks": (wait, cancel),
    "objects": (invalidate, evict, restore, export_object, import_file),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        _name = _command.__name__
        if _name not in _OF_LISTS:
            # The words after a script's name are the script's arguments.
            app.command(_name, rich_help_panel=_panel, context_settings={"allow_interspersed_args": _name != "run"})(_command)
            continue
        _list = typer.Typer(invoke_without_command=True, callback=_command)
        for _action in _OF_LISTS[_name]:
            _list.command(_action.__name__.partition("_")[0])(_action)
        app.add_typer(_list, name=_name, rich_help_panel=_panel)
