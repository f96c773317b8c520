"""The command line of the benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="benchmarks", help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Json = Annotated[Path | None, typer.Option("--json", help="Where to write the numbers; benchmarks/results/<name>.json.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Shape = Annotated[str | None, typer.Option(help="llama-3-8b (on a GPU by default), small (on the host by default) or tiny.")]


@app.command()
def attach(
    shape: Shape = None,
    device: Device = "auto",
    fresh: Annotated[int, typer.Option(help="Fresh processes that attach, of each kind.")] = 5,
    repeats: Annotated[int, typer.Option(help="Later attaches in each process, held and released.")] = 20,
    rounds: Annotated[int, typer.Option(help="Processes that go through the sweeps; 0 for no sweeps.")] = 2,
    tensors: Annotated[str, typer.Option(help="The sweep over tensors.")] = "10,100,1000,10000",
    megabytes: Annotated[
        str | None, typer.Option(help="The sweep over megabytes; up to 100 on the host, 10000 on a GPU.")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Load the model from a file that is written to this folder.")] = None,
    json: Json = None,
) -> None:
    """Measure attaches of a module of many tensors: the first of a process, later ones, and their memory."""
    from benchmarks.attach import Settings, run

    run(
        Settings(
            device=device,
            shape=shape,
            fresh=fresh,
            repeats=repeats,
            rounds=rounds,
            tensors=_numbers(tensors),
            megabytes=_numbers(megabytes) if megabytes is not None else None,
            checkpoint=checkpoint,
        ),
        json,
    )


@app.command()
def rpc(
    cuda: Annotated[bool, typer.Option("--cuda", help="Tensors on the GPU, beside shared-tensor.")] = False,
    rounds: Annotated[int, typer.Option(help="Turns that each side has.")] = 10,
    calls: Annotated[int, typer.Option(help="Calls in a turn.")] = 300,
    processes: Annotated[int, typer.Option(help="Processes for the times of import and of 'shared-rpc ls'.")] = 7,
    megabytes: Annotated[int, typer.Option(help="MiB of the large argument.")] = 64,
    tasks: Annotated[int, typer.Option(help="Finished tasks that the server remembers.")] = 9_000,
    clients: Annotated[int | None, typer.Option(help="Processes that call at once; 8, on the host one a core at most.")] = None,
    long_run: Annotated[
        int | None, typer.Option(help="Calls of the long run, 0 for none; 100000 on a GPU, 2000 on the host.")
    ] = None,
    json: Json = None,
) -> None:
    """Round trips: ping, direct and managed calls, arguments, tasks, many calls at once, very many calls; import and command
    line.
    """
    from benchmarks.rpc import run

    run(
        cuda=cuda,
        rounds=rounds,
        calls=calls,
        tasks=tasks,
        processes=processes,
        mebibytes=megabytes,
        clients=clients,
        long=long_run,
        path=json,
    )


@app.command()
def scale(
    idle: Annotated[str, typer.Option(help="Idle connections, ascending.")] = "0,100,1000",
    rounds: Annotated[int, typer.Option(help="Turns at each number of idle connections.")] = 5,
    calls: Annotated[int, typer.Option(help="Pings in a turn.")] = 300,
    clients: Annotated[
        int | None, typer.Option(help="Processes that attach at once; one a core by default, 8 at most.")
    ] = None,
    killed: Annotated[int, typer.Option(help="Light clients killed with SIGKILL.")] = 200,
    patience: Annotated[float, typer.Option(help="Seconds to wait for a server that does not answer.")] = 1.0,
    shape: Shape = None,
    json: Json = None,
) -> None:
    """Measure many clients: idle ones, simultaneous attaches, killed ones. On host memory."""
    from benchmarks.scale import run

    run(
        idle=_numbers(idle),
        rounds=rounds,
        calls=calls,
        clients=clients,
        killed=killed,
        patience=patience,
        shape=shape or "small",
        path=json,
    )


@app.command()
def mechanisms(
    megabytes: Annotated[str, typer.Option(help="Sizes of segments, in MiB.")] = "2,64,1024",
    rounds: Annotated[int, typer.Option(help="Segments that are made and mapped, of each size.")] = 30,
    calls: Annotated[int, typer.Option(help="Calls that are timed.")] = 1000,
    json: Json = None,
) -> None:
    """Measure the ways to share memory: the costs of each, and the memory after its maker was killed."""
    from benchmarks.mechanisms import run

    run(mebibytes=_numbers(megabytes), rounds=rounds, calls=calls, path=json)


@app.command()
def records(
    device: Device = "auto",
    megabytes: Annotated[int, typer.Option(help="MiB of the module.")] = 256,
    rounds: Annotated[int, typer.Option(help="Builds, exports and imports.")] = 5,
    folder: Annotated[Path | None, typer.Option(help="Where the file is; the system's temporary folder.")] = None,
    json: Json = None,
) -> None:
    """Measure a warm start: a module that is read from a file, against its build; and a move from memory to memory."""
    from benchmarks.records import run

    run(device=device, megabytes=megabytes, rounds=rounds, folder=folder, path=json)


@app.command()
def tiers(
    cuda: Annotated[bool, typer.Option("--cuda", help="Models on the GPU, copies in the host's memory.")] = False,
    megabytes: Annotated[int | None, typer.Option(help="MiB of the model; 16384 on a GPU, 256 on the host.")] = None,
    rounds: Annotated[int, typer.Option(help="Times that the model sleeps and wakes.")] = 5,
    models: Annotated[int, typer.Option(help="Models that take turns, with memory for three.")] = 10,
    engines: Annotated[str, typer.Option(help="Processes that sleep and wake together, ascending.")] = "1,2,4",
    json: Json = None,
) -> None:
    """Measure models that sleep and wake: beside plain copies and a reload, in several processes, and more than memory."""
    from benchmarks.tiers import run

    run(cuda=cuda, mebibytes=megabytes, rounds=rounds, models=models, engines=_numbers(engines), path=json)


@app.command()
def recovery(
    device: Device = "auto",
    shape: Shape = None,
    attaches: Annotated[int, typer.Option(help="Attaches across the kill.")] = 1000,
    rate: Annotated[float, typer.Option(help="Attaches a second.")] = 200.0,
    processes: Annotated[int | None, typer.Option(help="Processes that attach; half a core each, up to 4.")] = None,
    kills: Annotated[int, typer.Option(help="Times that so many attaches are made and the worker is killed.")] = 3,
    restarts: Annotated[int, typer.Option(help="Workers killed to see how soon there is another one.")] = 3,
    pace: Annotated[float, typer.Option(help="Seconds from one kill to the next: a few in a short time are a loop.")] = 8.0,
    json: Json = None,
) -> None:
    """Measure a broker whose worker is killed: attaches meanwhile, the next worker, and the broker's own memory."""
    from benchmarks.recovery import run

    run(
        device=device,
        shape=shape,
        attaches=attaches,
        rate=rate,
        processes=processes,
        kills=kills,
        restarts=restarts,
        pace=pace,
        path=json,
    )


@app.command()
def starts(
    device: Device = "auto",
    shape: Shape = None,
    starts: Annotated[int, typer.Option(help="Starts of each kind.")] = 10,
    json: Json = None,
) -> None:
    """Measure repeated starts of a script, by python and by 'shared-rpc run', until it has its model."""
    from benchmarks.starts import run

    run(device=device, shape=shape, starts=starts, path=json)


@app.command()
def clients(
    device: Device = "auto",
    clients: Annotated[str, typer.Option(help="Client processes, ascending.")] = "1,2,4,8,16",
    rounds: Annotated[int, typer.Option(help="Turns that each side has, of half a second.")] = 5,
    json: Json = None,
) -> None:
    """Measure calls a second, against the number of client processes."""
    from benchmarks.clients import run

    run(device=device, clients=_numbers(clients), rounds=rounds, path=json)


@app.command()
def steps(
    rounds: Annotated[int, typer.Option(help="Requests of each kind.")] = 15,
    names: Annotated[bool, typer.Option("--names", help="Print the functions as well.")] = False,
    json: Json = None,
) -> None:
    """Python calls of the package for one request, in client, broker and worker. On host memory."""
    from benchmarks.steps import run

    run(rounds=rounds, names=names, path=json)


@app.command()
def cluster(
    megabytes: Annotated[str, typer.Option(help="MiB of the modules.")] = "64,1024",
    rounds: Annotated[int, typer.Option(help="Deploys of each, and as many turns of Ray alone.")] = 5,
    fresh: Annotated[int, typer.Option(help="Other processes that attach, of each.")] = 3,
    json: Json = None,
) -> None:
    """Measure deploys and refreshes on three Ray nodes of this machine, beside Ray's own transfer of the same bytes."""
    from benchmarks.cluster import run

    run(megabytes=_numbers(megabytes), rounds=rounds, fresh=fresh, path=json)


@app.command("cluster-simulation")
def cluster_simulation(
    nodes: Annotated[str, typer.Option(help="Nodes of the clusters; the most have bad luck too.")] = "2,10,100,1000",
    fan_out: Annotated[str, typer.Option(help="Transfers that a node serves at a time.")] = "1,2,4",
    megabytes: Annotated[int, typer.Option(help="MiB of the object.")] = 16384,
    build: Annotated[float, typer.Option(help="Seconds of a build.")] = 60.0,
    gigabits: Annotated[float, typer.Option(help="Gbit/s of a node's link, in each direction.")] = 25.0,
    stream: Annotated[float, typer.Option(help="The share of a link that one transfer can use.")] = 1.0,
    json: Json = None,
) -> None:
    """Simulate a cluster with the directory's own code: the time to all nodes, slow nodes, lost nodes, refreshes."""
    from benchmarks.cluster_simulation import run

    run(
        nodes=_numbers(nodes),
        fan_outs=_numbers(fan_out),
        mebibytes=megabytes,
        build=build,
        gigabits=gigabits,
        stream=stream,
        path=json,
    )


@app.command()
def plot(
    results: Annotated[list[Path], typer.Argument(help="JSON that 'attach', 'rpc' or 'clients' has written.")],
    out: Annotated[Path, typer.Option(help="The folder for the SVGs.")] = Path("docs/_static/plots"),
) -> None:
    """Draw what was measured: attach times, distributions of latency, calls a second."""
    from benchmarks.plot import Unplottable, plot

    try:
        for path in results:
            for drawn in plot(path, out):
                print(drawn)
    except Unplottable as error:
        raise typer.BadParameter(str(error)) from error


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",") if number.strip()]
    except ValueError:
        raise typer.BadParameter(f"{text!r}: use numbers with commas between them, such as 10,100") from None


if __name__ == "__main__":
    app()
