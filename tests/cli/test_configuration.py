"""Configuration files of ``shared-rpc serve``: their options, and the search for a file."""

from __future__ import annotations

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
    """Write a file that only this user can write to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))
    path.chmod(0o644)
    return path


def test_options_of_every_type(serve: Serve, tmp_path: Path) -> None:
    """A number, a string, a choice, a list and a flag have their types of TOML."""
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


def test_the_nearest_file_is_used(serve: Serve, tmp_path: Path) -> None:
    """It hides those above it, even if it has no table; the command line takes precedence, over a whole list too."""
    write(tmp_path / "pyproject.toml", "[tool.shared-rpc]", "workers = 2", "threads = 3", 'quota = ["cpu=1G", "cuda=0.5"]')
    options = serve(tmp_path / "a" / "b" / "app.py:provider", "--workers", "4", "--quota", "cpu=2G")
    assert (options.workers, options.threads, options.quotas) == (4, 3, {"cpu": 2 << 30})
    write(tmp_path / "a" / "pyproject.toml", "[project]")
    assert serve(tmp_path / "a" / "b" / "app.py:provider") == ServeOptions()


def test_the_working_directory_does_not_matter(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another user's: its file is not read for an app elsewhere, nor for one that is a module."""
    write(tmp_path / "here" / "pyproject.toml", "[tool.shared-rpc]", "workers = 2")
    monkeypatch.chdir(tmp_path / "here")
    assert serve(tmp_path / "there" / "app.py") == serve("app") == ServeOptions()


@pytest.mark.parametrize("kind", ["file of another user", "file that all can write to"])
def test_files_that_others_may_have_written_are_not_used(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """A line says so, and how to use the file: one that is named is used, whoever owns it."""
    path = write(tmp_path / "pyproject.toml", "[tool.shared-rpc]", "workers = 2")
    reason = "every user can write to it"
    if kind == "file of another user":
        monkeypatch.setattr(configuration, "is_own_or_root", lambda uid: False)
        reason = f"it belongs to uid {path.stat().st_uid}"
    else:
        path.chmod(0o646)
    assert serve(tmp_path / "app.py") == ServeOptions()
    error = capsys.readouterr().err
    assert f"{path} is not used: {reason}" in error and "--config" in error
    assert serve(tmp_path / "app.py", "--config", path).workers == 2


def test_a_named_file(serve: Serve, tmp_path: Path) -> None:
    """It has options at its top level, and replaces that of the project."""
    write(tmp_path / "pyproject.toml", "[tool.shared-rpc]", "threads = 2")
    path = write(tmp_path / "serve.toml", "workers = 2")
    assert serve(tmp_path / "app.py", "--config", path) == serve("--config", path, "app") == ServeOptions(workers=2)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("worker = 2", "'worker' is no option of 'shared-rpc serve': use base-path, build-timeout, "),
        ("workers = '2'", "workers = '2': Expected `int`, got `str`"),
        ("workers = 0", "workers = 0: "),
        ("when-full = 'wait'", "when-full = 'wait': Invalid enum value 'wait'"),
        ("workers 2", "is not TOML: Expected '='"),
        ("tool.shared-rpc = 2", "is not a table"),
    ],
    ids=str,
)
def test_invalid_options(serve: Serve, tmp_path: Path, line: str, error: str) -> None:
    """The error names the file and the key."""
    table = [] if line.startswith("tool") else ["[tool.shared-rpc]"]
    path = write(tmp_path / "pyproject.toml", *table, line)
    with pytest.raises(Misuse) as caught:
        serve(tmp_path / "app.py")
    assert str(path) in str(caught.value) and error in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    """It is misuse, as all errors of files are: one line, and exit code 2."""
    ran = cli("serve", "app.py", "--config", "none.toml", cwd=tmp_path)
    assert ran.misuse == "none.toml cannot be read: No such file or directory"
