"""Options and arguments that cannot be used: exit code 2, before a server is asked."""

from __future__ import annotations

import pytest

from tests.kit.commands import cli


@pytest.mark.parametrize(
    ("arguments", "choices"),
    [
        (("objects", "evict", "load", "--to", "moon"), ("host", "file")),
        (("top", "--once", "--sort", "colour"), ("size", "age", "leases", "name", "access")),
        (("tasks", "--status", "done"), ("pending", "running", "completed", "failed", "cancelled")),
        (("serve", "app", "--when-full", "wait"), ("evict", "refuse")),
    ],
    ids=" ".join,
)
def test_a_choice_that_there_is_not(base_path: str, arguments: tuple[str, ...], choices: tuple[str, ...]) -> None:
    """The error names the choices."""
    ran = cli(*arguments)
    assert (ran.code, ran.output) == (2, "")
    assert all(choice in ran.errors for choice in choices)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("objects", "invalidate", "load", "16"), "'16' is no argument: write key=value"),
        (("call", "load", "16"), "'16' is no argument: write key=value"),
        (("objects", "import", "x.record", "16", "--endpoint", "load"), "'16' is no argument: write key=value"),
        (("objects", "import", "x.record", "size=16"), "name its endpoint with --endpoint"),
        (("stop", "--all", "--socket", "x.sock"), "--all and --socket contradict each other"),
        (("tasks", "--json", "wait", "a-1"), "--json is of the list: write the options of 'wait' after it"),
        (("reload", "--keep-objects", "--drop-objects"), "--keep-objects and --drop-objects contradict each other"),
        (("serve", "app", "--device", "cpu", "--worker-device", "cpu"), "--device and --worker-device both name devices"),
        (("serve", "app", "--in-process", "--workers", "2"), "--in-process has no workers"),
    ],
    ids=" ".join,
)
def test_arguments_that_cannot_be_used_together(base_path: str, arguments: tuple[str, ...], words: str) -> None:
    """The error is one line."""
    assert words in cli(*arguments).misuse
