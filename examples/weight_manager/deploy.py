"""Swap a model's version under load::

    python deploy.py resnet18 v2                  # load v2 while v1 is served, then serve v2
    python deploy.py resnet18 v1                  # roll back immediately, if v1 is still loaded
    python deploy.py resnet18 v2 --release v1     # swap, and release v1's memory

This process neither loads nor maps weights.
"""

import argparse
from collections.abc import Callable

from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from shared_rpc import Client, Generation, Progress, TaskInfo, TaskStatus


def deploy(client: Client, name: str, version: str, report: Callable[[Progress], object]) -> Generation:
    """Load a version, then swap to it in one step. If loading fails, raise the error and leave the served version unchanged."""

    def changed(info: TaskInfo) -> None:
        if info.progress is not None:
            report(info.progress)

    task_id = client.submit("load", name, version)
    if client.watch_task(task_id, callback=changed).status is not TaskStatus.COMPLETED:
        client.get_task_result(task_id)  # raises the manager's exception
    return client.refresh("serving", name, version)


def release(client: Client, name: str, version: str) -> int:
    """Release a version; return the number of remaining leases, whose memory is freed when the last worker releases it."""
    client.invalidate_call_cache("load", name, version)
    return sum(info["leases"] for info in client.list_objects() if not info["current"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("version")
    parser.add_argument("--release", metavar="VERSION")
    options = parser.parse_args()
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Client(connect_timeout=60) as client, Bars(*columns) as bars:
        bar = bars.add_task(f"{options.name} {options.version}", total=None)
        made = deploy(client, options.name, options.version, lambda p: bars.update(bar, completed=p.done, total=p.total))
        bars.print(f"{options.name} {options.version} is served, as generation {made.generation}")
        if options.release is not None:
            leases = release(client, options.name, options.release)
            bars.print(f"{options.release} is released: {leases} leases on superseded generations are left")


if __name__ == "__main__":
    main()
