"""The command line of the benchmarks: ``python -m benchmarks NAME``, and ``--help`` for the options of one."""

from __future__ import annotations

import importlib
import sys

import typer

#: What each benchmark measures. Its module has the function ``run``, whose parameters are the options.
BENCHMARKS = {
    "attach": "attaches of a module of many tensors: the first of a process, later ones, and their memory",
    "rpc": "round trips: ping, direct and managed calls, arguments, tasks, many calls at once; import and command line",
    "clients": "calls a second, against the number of client processes",
    "scale": "many clients: idle ones, simultaneous attaches, killed ones",
    "recovery": "a broker whose worker is killed: attaches across the kill, the next worker, the broker's own memory",
    "starts": "repeated starts of a script, by python and by 'shared-rpc run', until it has its model",
    "tiers": "models that sleep and wake: beside plain copies and a reload, in several processes, and more than memory",
    "records": "a warm start: a module that is read from a file, against its build",
    "channel": "named tensors to another process through a channel, beside two copies of as many bytes",
    "mechanisms": "the ways to share memory: the costs of each, and the memory after its maker was killed",
    "cluster": "deploys and refreshes on three Ray nodes of this machine, beside Ray's own transfer of the same bytes",
}


def main() -> None:
    """Run one benchmark."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in BENCHMARKS:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command()(importlib.import_module(f"benchmarks.{name}").run)
        app(sys.argv[2:], prog_name=f"python -m benchmarks {name}")
    lines = [f"  {known:<12}{what}" for known, what in BENCHMARKS.items()]
    print("\n".join(["usage: python -m benchmarks NAME [OPTIONS]", "", *lines]))
    sys.exit(0 if name in ("--help", "-h") else 2)


if __name__ == "__main__":
    main()
