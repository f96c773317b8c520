"""Options of a server, which also travel on the command lines of its processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from shared_rpc.errors import ConfigurationError

#: The clients whose pickles a server accepts, see :class:`shared_rpc.Server`.
ClientCode = Literal["all", "namespace", "none"]


class ServeOptions(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Options of a server: read by the command line of ``shared-rpc serve``, a broker, its workers, and the core.

    None leaves an option to the app, or to the server's own default.

    :param devices: the device of each worker, in turn.
    :param threads: threads of a worker, or of a server of this process, that run endpoints.
    :param build_timeout: seconds after which a run counts as stuck.
    :param preload: True if workers may be forks of a zygote.
    :param quotas: bytes, or a fraction of the memory, by device; resolved by a worker, which has the devices.
    :param spill_dir: the directory for objects evicted to files, None for no files.
    :param when_full: the policy for requests that exceed a quota.
    :param host_quota: bytes of host copies, or a fraction of the host's memory.
    :param cluster: the cluster that the server joins, see :func:`resolve_cluster`; ``""`` for none.
    :param source_grace: seconds that misses wait for a source of records.
    :param client_code: which clients may send pickled code.
    """

    base_path: str | None = None
    socket: str | None = None
    devices: tuple[str, ...] = ()
    workers: int = 1
    threads: int | None = None
    build_timeout: float | None = None
    preload: bool = True
    max_bytes: int | None = None
    quotas: Mapping[str, int | float] = {}
    spill_dir: str | None = None
    when_full: Literal["evict", "refuse"] = "refuse"
    host_quota: int | float | None = None
    max_tasks: int = 1000
    result_ttl: float = 3600.0
    max_connections: int = 8192
    cluster: str | None = None
    source_grace: float = 15.0
    client_code: ClientCode = "all"
    idle_exit: float | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    log_format: str | None = None
    log_level: str | None = None
    hooks: tuple[str, ...] = ()

    def device_of(self, number: int) -> str | None:
        """Return the device of a worker, by its number from 0; None if the app decides."""
        return self.devices[number % len(self.devices)] if self.devices else None

    @property
    def words(self) -> list[str]:
        """The command-line arguments that :meth:`of` parses."""
        return ["--options", msgspec.json.encode(self).decode()]

    @classmethod
    def of(cls, text: str) -> ServeOptions:
        """Read the options written by :attr:`words`.

        :raises ConfigurationError: for a text of another release, or an invalid one written by hand.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"--options {text}: {error}") from error


def check_when_full(when_full: str, quotas: Mapping[str, int | float]) -> None:
    """Check the policy for a full device.

    :raises ConfigurationError: for an unknown word, and if no device has a quota and can become full.
    """
    if when_full not in ("evict", "refuse"):
        raise ConfigurationError(f"when_full={when_full!r}: use 'evict' or 'refuse'")
    if when_full == "evict" and not quotas:
        raise ConfigurationError(
            "when_full='evict' needs a quota: without one no device is full before its driver refuses memory. Give the server "
            "quotas={'cuda:0': 0.8}, or --quota cuda:0=0.8"
        )
