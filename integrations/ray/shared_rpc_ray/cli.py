"""``shared-rpc cluster``: the status of a cluster, and changes on all of its nodes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from shared_rpc.cli.options import Arguments, Json, keywords
from shared_rpc.cli.rendering import as_json, several, size, table
from shared_rpc.errors import one_line

if TYPE_CHECKING:
    from shared_rpc_ray import Change, Cluster

__all__ = ["app"]

app = typer.Typer(help="Show and change the cluster of servers that were started with --cluster.", no_args_is_help=True)

Name = Annotated[str | None, typer.Option("--name", help="The cluster's name; SHARED_TENSOR_CLUSTER by default.")]
Address = Annotated[str | None, typer.Option("--address", help="Ray's address; RAY_ADDRESS, or this machine's, by default.")]
Call = Annotated[Arguments, typer.Argument(help="key=value for each argument of the call")]


@contextmanager
def _connected(name: str | None, address: str | None) -> Iterator[Cluster]:
    """Connect to a cluster. Ray's own output, for example about a dead node, goes to standard error."""
    from shared_rpc_ray import Cluster  # late, because it imports Ray

    with redirect_stdout(sys.stderr), Cluster(name, address=address) as cluster:
        yield cluster


@app.command()
def status(name: Name = None, address: Address = None, json: Json = False) -> None:
    """Show the nodes with their activity, and the objects with their nodes."""
    with _connected(name, address) as cluster:
        found = cluster.status()
    if json:
        as_json(found)
        return
    table(
        f"cluster {found['cluster']}",
        ["node", "device", "python", "torch", "broker", "received>", "sent>", "does"],
        [
            (
                name,
                node["device"],
                node["python"],
                node["torch"],
                node["broker"],
                size(node["bytes_received"]),
                size(node["bytes_sent"]),
                "; ".join(node["activity"]) or "-",
            )
            for name, node in found["nodes"].items()
        ],
    )
    table(
        "\nobjects",
        ["call", "version>", "size>", "on", "state"],
        [
            (
                key["cache_key"],
                key["version"] if key["version"] is not None else "-",
                size(key["nbytes"]) if key["nbytes"] is not None else "-",
                ", ".join(_versions(key)) or "no node",
                _state(key),
            )
            for key in found["keys"]
        ],
    )


@app.command()
def refresh(endpoint: str, arguments: Call = None, name: Name = None, address: Address = None, json: Json = False) -> None:
    """Build a new version of a cached object, and make it current on all nodes that have the object.

    The exit code is 1 if a node was left out or a kind of nodes has no new version.
    """
    with _connected(name, address) as cluster:
        changes = cluster.refresh(endpoint, **keywords(arguments))
    _show(changes, json)


@app.command()
def invalidate(endpoint: str, arguments: Call = None, name: Name = None, address: Address = None, json: Json = False) -> None:
    """Drop the object of a call, or without arguments all objects of an endpoint, on every node.

    The exit code is 1 if a node was left out.
    """
    with _connected(name, address) as cluster:
        changes = cluster.invalidate(endpoint, **keywords(arguments)) if arguments else cluster.invalidate_endpoint(endpoint)
    _show(changes, json)


def _show(changes: list[Change], json: bool) -> None:
    if json:
        as_json(msgspec.to_builtins(changes, enc_hook=str))
    elif not changes:
        print("no node has it")
    else:
        for change in changes:
            what = f"version {change.version} is current" if change.version is not None else "dropped"
            print(one_line(f"{change.cache_key}: {change.error or what} on {several(len(change.nodes), 'node')}"))
            for node, reason in change.left_out.items():
                print(f"  left out: {one_line(node)}: {one_line(reason)}")
    if any(change.error or change.left_out for change in changes):
        raise typer.Exit(1)


def _versions(key: dict[str, Any]) -> list[str]:
    return [node if version == key["version"] else f"{node} (version {version})" for node, version in key["nodes"].items()]


def _state(key: dict[str, Any]) -> str:
    words = [f"{node} builds" for node in (key["building"],) if node]
    words += [f"waiting: {', '.join(key['waiting'])}"] if key["waiting"] else []
    words += ["is refreshed"] if key["refreshing"] else []
    words += [f"left out: {node}: {reason}" for node, reason in key["left_out"].items()]
    words += [f"built once for each {', '.join(key['differs'])}"] if key["differs"] else []
    return "; ".join(words) or "-"
