"""Build three models concurrently, and show their progress::

    shared-rpc serve examples/async_service.py        # in one terminal
    python examples/async_service.py                  # in another one, any number of times

The second run attaches to the existing models.
"""

import anyio
import torch
from rich.progress import Progress

import shared_rpc
from shared_rpc import AsyncClient, Provider, TaskInfo

provider = Provider()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"small": 128, "medium": 256, "large": 512}
LAYERS = 24


@provider.share(execution="task", managed=True)
def build(name: str) -> torch.nn.Module:
    """Build a stack of layers with a slow, orthogonal initialisation."""
    size = SIZES[name]
    layers = []
    for number in range(LAYERS):
        shared_rpc.raise_if_cancelled()
        layers.append(torch.nn.Linear(size, size, device=DEVICE))
        torch.nn.init.orthogonal_(layers[-1].weight)
        shared_rpc.progress(number + 1, LAYERS, name)
    return torch.nn.Sequential(*layers).eval()


async def attend(client: AsyncClient, name: str, bars: Progress) -> None:
    """Build one model, show its progress in a bar, and use it."""
    bar = bars.add_task(name, total=LAYERS)

    def show(task: TaskInfo) -> None:
        if task.progress is not None:
            bars.update(bar, completed=task.progress.done)

    task_id = await client.submit("build", name)
    async with await client.wait_for_task(task_id, timeout=300, callback=show) as handle:
        bars.update(bar, completed=LAYERS)
        size = SIZES[name]
        with torch.inference_mode():
            norm = handle.value(torch.ones(1, size, device=DEVICE)).norm().item()
        info = await handle.get_object_info()
        bars.print(f"{name}: {info['nbytes'] >> 10} KiB, held by {info['leases']}, output norm {norm:.2f}")


async def main() -> None:
    with Progress() as bars:
        async with AsyncClient(connect_timeout=30) as client, anyio.create_task_group() as group:
            for name in SIZES:
                group.start_soon(attend, client, name, bars)


if __name__ == "__main__":
    anyio.run(main)
