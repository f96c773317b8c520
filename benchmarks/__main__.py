"""The command line of the benchmarks: ``python -m benchmarks NAME``, and ``--help`` for the options of one."""

from __future__ import annotations

import importlib
import sys

import typer

#: The benchmarks and their subjects. Each module has a function ``run``, whose parameters are the options.
BENCHMARKS = {
    "attach": "attaches of a module of many tensors: the first of a process, later ones, and their memory",
    "rpc": "round trips: ping, direct and managed calls, arguments, tasks, many calls at once; import and command line",
    "clients": "calls per second by number of client processes, and replicas that share a model",
    "scale": "many clients: idle connections, killed clients",
    "recovery": "a killed worker of a broker: attaches during the kill, the next worker, the broker's own memory",
    "starts": "repeated starts of a script, with python and with 'shared-rpc run', until it has its model",
    "tiers": "sleep and wake of models, compared with plain copies and a reload; several processes; more models than memory",
    "records": "a warm start: reading a module from a file, compared with its build",
    "channel": "named tensors to another process through a channel, compared with two copies of as many bytes",
    "mechanisms": "the mechanisms that share memory: their costs, and the memory after its maker is killed",
    "cluster": "deploys and refreshes on three Ray nodes of this machine, compared with Ray's own transfer of the same bytes",
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
