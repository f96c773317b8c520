"""Options of ``shared-rpc serve`` in a file, and which file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from shared_rpc.cli import configuration, serving
from shared_rpc.cli.app import app as program
from shared_rpc.cli.options import Misuse
from shared_rpc.settings import ServeOptions
from tests.kit.commands import cli

Serve = Callable[..., ServeOptions]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """``serve(*words)`` returns the options with which 'shared-rpc serve' becomes a broker."""
    monkeypatch.setenv("SHARED_TENSOR_ROLE", "local")  # which the command sets
    commands = typer.main.get_command(program)

    def serve(*words: object) -> ServeOptions:
        started: list[list[str]] = []
        with monkeypatch.context() as patched:
            patched.setattr(serving.os, "execv", lambda _, words: started.append(words))
            commands(["serve", *map(str, words)], standalone_mode=False)
        (broker,) = started
        return ServeOptions.of(broker[broker.index("--options") + 1])

    return serve


def write(path: Path, *lines: str) -> Path:
    """Write a file that no other user can write to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))
    path.chmod(0o644)
    return path


def test_the_table_beside_the_app(serve: Serve, tmp_path: Path) -> None:
    """Every kind of option has its type of TOML: a number, a string, a choice, a list, a flag."""
    write(
        tmp_path / "pyproject.toml",
        "[tool.shared-rpc]",
        *("workers = 2", "build-timeout = 600", "result-ttl = 0.5", 'max-bytes = "32MiB"', 'when-full = "evict"'),
        *('quota = ["cpu=64MiB"]', "no-preload = true", 'log-format = "json"'),
    )
    assert serve(tmp_path / "app.py") == ServeOptions(
        workers=2,
        build_timeout=600.0,
        result_ttl=0.5,
        max_bytes=32 << 20,
        when_full="evict",
        quotas={"cpu": 64 << 20},
        preload=False,
        log_format="json",
    )


def test_the_nearest_project_counts(serve: Serve, tmp_path: Path) -> None:
    """A file above the app's folder is used; one that is nearer hides it, with a table or without."""
    write(tmp_path / "pyproject.toml", "[tool.shared-rpc]", "workers = 2")
    assert serve(tmp_path / "a" / "b" / "app.py:provider").workers == 2
    write(tmp_path / "a" / "pyproject.toml", "[project]")
    assert serve(tmp_path / "a" / "b" / "app.py:provider") == ServeOptions()


def test_the_command_line_takes_precedence(serve: Serve, tmp_path: Path) -> None:
    """Over a value, and over a whole list."""
    write(tmp_path / "pyproject.toml", "[tool.shared-rpc]", "workers = 2", "threads = 3", 'quota = ["cpu=1G", "cuda=0.5"]')
    options = serve(tmp_path / "app.py", "--workers", "4", "--quota", "cpu=2G")
    assert (options.workers, options.threads, options.quotas) == (4, 3, {"cpu": 2 << 30})


def test_the_working_directory_decides_nothing(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another user's: its file is not read for an app elsewhere, nor for one that is a module."""
    write(tmp_path / "here" / "pyproject.toml", "[tool.shared-rpc]", "workers = 2")
    monkeypatch.chdir(tmp_path / "here")
    assert serve(tmp_path / "there" / "app.py") == serve("app") == ServeOptions()


def test_a_file_of_another_user_is_not_used(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line says so, and how to use it; a file that is named is used, whoever owns it."""
    path = write(tmp_path / "pyproject.toml", "[tool.shared-rpc]", "workers = 2")
    monkeypatch.setattr(configuration, "is_own_or_root", lambda uid: False)
    assert serve(tmp_path / "app.py") == ServeOptions()
    assert f"{path} is not used: it belongs to uid {path.stat().st_uid}. To use it, add --config" in capsys.readouterr().err
    assert serve(tmp_path / "app.py", "--config", path).workers == 2


def test_a_link_of_another_user_is_not_used(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It leads to a file of this user, but of another app."""
    target = write(tmp_path / "mine" / "pyproject.toml", "[tool.shared-rpc]", "workers = 2")
    link = tmp_path / "pyproject.toml"
    link.symlink_to(target)
    assert serve(tmp_path / "app.py").workers == 2
    try:
        os.lchown(link, os.geteuid() + 1, -1)
    except OSError as error:
        pytest.skip(f"a link cannot be given to another user: {error}")
    assert serve(tmp_path / "app.py") == ServeOptions()
    assert f"{link} is not used: it belongs to uid {os.geteuid() + 1}." in capsys.readouterr().err


def test_a_file_that_all_can_write_to_is_not_used(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another user may have written it."""
    write(tmp_path / "pyproject.toml", "[tool.shared-rpc]", "workers = 2").chmod(0o646)
    assert serve(tmp_path / "app.py") == ServeOptions()
    assert "is not used: every user can write to it" in capsys.readouterr().err


def test_a_file_of_its_own(serve: Serve, tmp_path: Path) -> None:
    """It has the options at its top level, and is used in place of the project's."""
    write(tmp_path / "pyproject.toml", "[tool.shared-rpc]", "threads = 2")
    path = write(tmp_path / "serve.toml", "workers = 2")
    assert serve(tmp_path / "app.py", "--config", path) == serve("--config", path, "app") == ServeOptions(workers=2)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("worker = 2", "'worker' is no option of 'shared-rpc serve': use base-path, build-timeout, "),
        ("config = 'x.toml'", "'config' is no option"),
        ("help = true", "'help' is no option"),
        ("target = 'app.py'", "'target' is no option"),
        ("workers = '2'", "workers = '2': Expected `int`, got `str`"),
        ("workers = true", "workers = True: Expected `int`, got `bool`"),
        ("workers = 0", "workers = 0: "),
        ("max-bytes = 5", "max-bytes = 5: Expected `str`, got `int`"),
        ("quota = 'cpu=1G'", "quota = 'cpu=1G': Expected `array`, got `str`"),
        ("quota = [1]", "quota = [1]: Expected `str`, got `int` - at `$[0]`"),
        ("in-process = 1", "in-process = 1: Expected `bool`, got `int`"),
        ("when-full = 'wait'", "when-full = 'wait': Invalid enum value 'wait'"),
        ("log-level = 'loud'", "log-level = 'loud': Invalid enum value 'loud'"),
        ("workers 2", "is not TOML: Expected '='"),
    ],
    ids=str,
)
def test_what_a_file_cannot_have(serve: Serve, tmp_path: Path, line: str, error: str) -> None:
    """The error names the file and the key."""
    path = write(tmp_path / "pyproject.toml", "[tool.shared-rpc]", line)
    with pytest.raises(Misuse) as caught:
        serve(tmp_path / "app.py")
    assert str(path) in str(caught.value) and error in str(caught.value)


@pytest.mark.parametrize("line", ["tool.shared-rpc = 2", "tool = 2"])
def test_the_table_has_to_be_a_table(serve: Serve, tmp_path: Path, line: str) -> None:
    """Also the one that it is in."""
    write(tmp_path / "pyproject.toml", line)
    with pytest.raises(Misuse, match="is not a table"):
        serve(tmp_path / "app.py")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """It is misuse, as all errors of a file are: one line, and exit code 2."""
    ran = cli("serve", "app.py", "--config", "none.toml", cwd=tmp_path)
    assert ran.misuse == "none.toml cannot be read: No such file or directory"


def test_the_help_of_serve() -> None:
    """It says where options can stand besides the command line, and has them in groups."""
    words = " ".join(cli("serve", "--help").output.split())
    assert "Every option can stand in the table tool.shared-rpc of a pyproject.toml" in words
    assert all(f"─ {group} ─" in words for group in ("Workers", "Memory", "Tasks and clients", "Cluster", "Observability"))
