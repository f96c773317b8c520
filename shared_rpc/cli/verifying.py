"""``shared-rpc verify``."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Annotated

import typer

from shared_rpc.cli.options import Json, in_bytes
from shared_rpc.cli.rendering import as_json, bars, complain, table
from shared_rpc.errors import SharedRPCError, one_line

if TYPE_CHECKING:
    from shared_rpc.extras.verify import Report

#: Exit codes: a check failed; there was nothing to check.
_FAILED, _COULD_NOT_RUN = 1, 2


def verify(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:<index>.")] = "auto",
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes that share the model.")] = 4,
    size: Annotated[
        # Its name, because typer 0.27 would derive one from the metavar.
        str | None,
        typer.Option("--size", metavar="SIZE", help="Size of the model; 64MiB by default, 1GiB on a GPU; 16MiB at least."),
    ] = None,
    check: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this check; the error for an unknown name lists all names. May be repeated."),
    ] = None,
    json: Json = False,
) -> None:
    """Verify sharing on this machine, with real processes, a real server, a real model, and kills.

    It starts its own server in its own directory and leaves nothing behind. Exit code 0 if all checks passed, 1 if one failed,
    2 if there was nothing to check, 130 if a signal interrupted it.
    """
    from rich.console import Console
    from rich.progress import TimeElapsedColumn

    from shared_rpc.extras import verify as verification

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup it stays ignored
            signal.signal(number, signal.default_int_handler)
    try:
        nbytes = in_bytes(f"--size {size}", size) if size is not None else None
        settings = verification.Settings(device, workers, nbytes, tuple(check or ()))
        with bars(Console(stderr=True), TimeElapsedColumn()) as bar:
            task = bar.add_task("", total=1)
            report = verification.verify(settings, lambda title, done: bar.update(task, completed=done, description=title))
    except (verification.CannotRun, SharedRPCError, OSError) as error:
        if json:
            as_json({"schema": verification.SCHEMA, "error": str(error)})
        complain(f"cannot verify: {one_line(str(error))}")
        raise typer.Exit(_COULD_NOT_RUN) from None
    if json:
        as_json(report.as_json())
    else:
        _show(report)
    if not report.passed:
        raise typer.Exit(_FAILED)


def _show(report: Report) -> None:
    where = report.device
    print(f"{where['name']}, {where['mechanism']}, torch {where['torch']}\n")
    rows = []
    for outcome in report.checks:
        first, *more = outcome.found or [""]
        rows.append(("ok" if outcome.passed else "x", outcome.title, f"{outcome.seconds:.1f} s", first))
        rows += [("", "", "", line) for line in more]
    table("", ["", "check", "time>", "found"], rows)
    failed = [outcome for outcome in report.checks if not outcome.passed]
    for outcome in failed:
        print(f"\n{outcome.title}")
        for problem in outcome.problems:
            for name, text in problem.items():
                print(f"  {name + ':':<10}{one_line(text)}")
        print(f"  advice:   {outcome.advice}")
    if failed and report.log:
        print("\nthe server's log ends with")
        print("\n".join(f"  {one_line(line)}" for line in report.log))
    counts = f"{len(report.checks) - len(failed)} passed" + (f", {len(failed)} failed" if failed else "")
    print(f"\n{counts}, in {report.seconds:.0f} s")
