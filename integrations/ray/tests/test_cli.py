"""What ``shared-rpc cluster`` prints beside what Ray prints in its process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from shared_rpc_ray import Change
from shared_rpc_ray import cli as commands

SAID = "(raylet) The node with node id: 7c8e has been marked dead"
CHANGE = Change("load", "load()", {}, 2, ("a",), {})


class Talking:
    """A connection to a cluster in whose process Ray says something, as its threads do, at any time until it is closed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        print(SAID)

    def __enter__(self) -> Talking:
        return self

    def __exit__(self, *_: object) -> None:
        print(SAID)

    def status(self) -> dict[str, Any]:
        """An empty one."""
        print(SAID)
        return {"cluster": "c", "nodes": {}, "left": {}, "keys": []}

    def _changes(self, *_: Any, **__: Any) -> list[Change]:
        print(SAID)
        return [CHANGE]

    refresh_all: Callable[..., list[Change]] = _changes
    invalidate: Callable[..., list[Change]] = _changes
    invalidate_endpoint: Callable[..., list[Change]] = _changes


@pytest.mark.parametrize("json", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize(
    "change",
    [
        Change("load", "load()", {}, 2, ("a",), {"b": "it was too slow"}),
        Change("load", "load()", {}, None, (), {}, "ValueError"),
    ],
    ids=["left-out", "failed"],
)
@pytest.mark.parametrize("words", [["refresh", "load"], ["invalidate", "load"]], ids=" ".join)
def test_a_change_that_did_not_reach_all_nodes_fails(
    monkeypatch: pytest.MonkeyPatch, words: list[str], change: Change, json: list[str]
) -> None:
    """The exit code is 1, and what was done is printed."""
    done = [CHANGE, change]
    monkeypatch.setattr(Talking, "refresh_all", lambda *_: done)
    monkeypatch.setattr(Talking, "invalidate_endpoint", lambda *_: done)
    monkeypatch.setattr(commands, "Cluster", Talking)
    ran = CliRunner().invoke(commands.app, [*words, *json])
    assert ran.exit_code == 1
    assert "load()" in ran.stdout and (change.error or "too slow") in ran.stdout


@pytest.mark.parametrize(
    "words", [["status"], ["refresh", "load"], ["invalidate", "load"], ["invalidate", "load", "size=1"]], ids=" ".join
)
def test_what_ray_prints_is_no_output(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """Programs read that: it goes to standard error."""
    monkeypatch.setattr(commands, "Cluster", Talking)
    ran = CliRunner().invoke(commands.app, [*words, "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["cluster"] == "c" if words == ["status"] else found[0]["cache_key"] == "load()"
    assert ran.stderr.splitlines() == [SAID] * 3
