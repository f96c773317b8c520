"""One model behind any number of containers, with metrics::

    docker compose -f examples/deploy/docker-compose.yml up --build     # server, two clients, Prometheus, Grafana

or without containers::

    shared-rpc serve examples/deploy/app.py --metrics-port 9464         # in one terminal
    SHARED_TENSOR_ROLE=client python examples/deploy/app.py             # in others; --calls 100 limits the calls

Every client attaches to the encoder, which is in memory once, and also calls the server to encode batches.
"""

import argparse
import os
import signal
import time

import torch

from shared_rpc import Provider

provider = Provider()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS, WIDTH = 20_000, 256


@provider.share(managed=True)
def encoder() -> torch.nn.Module:
    """Build the encoder, once."""
    return torch.nn.EmbeddingBag(WORDS, WIDTH, device=DEVICE).eval().requires_grad_(False)


@provider.share(cache=False)
def encode(ids: torch.Tensor) -> torch.Tensor:
    """Encode a batch in the server: ``(batch, words)`` to ``(batch, width)``."""
    if ids.shape[1] == 0:
        raise ValueError("a sentence without words")
    return encoder().value(ids)


def main() -> None:
    """Make calls until interrupted, or ``--calls`` times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, help="number of batches; unlimited by default")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two batches")
    options = parser.parse_args()
    # The first process of a container ignores SIGTERM unless it has a handler.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        call(options.calls, options.pause)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        provider.close()


def call(calls: int | None, pause: float) -> None:
    """Encode ``calls`` batches, or an unlimited number."""
    done = 0
    with encoder() as handle:
        while calls is None or done < calls:
            ids = torch.randint(WORDS, (32, 16 if done % 50 else 0), device=DEVICE)
            try:
                there, here = encode(ids), handle.value(ids)
                assert torch.equal(there, here), "the same weights give the same result in both processes"
            except ValueError as error:  # with the request's id in the server's log
                print(f"pid {os.getpid()}: {error}, request {getattr(error, 'request_id', '-')}", flush=True)
            done += 1
            if done % 100 == 0 or done == calls:
                print(f"pid {os.getpid()}: {done} batches", flush=True)
            time.sleep(pause)


if __name__ == "__main__":
    main()
