"""What ``shared-rpc serve`` can be told, declared once for its command line, a broker and its workers."""

from __future__ import annotations

import msgspec

from shared_rpc.errors import ConfigurationError

__all__ = ["ServeOptions"]


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What ``shared-rpc serve`` was told, in one word of the command lines of a broker and of its workers.

    None stands for what is left to the app, or to the server's own default.

    :param devices: the device of each worker, in turn.
    :param threads: of a worker, that run endpoints.
    :param build_timeout: seconds after which a run is taken for stuck.
    :param preload: whether workers may be forks of a zygote.
    :param quotas: as ``--quota`` has them: a worker resolves them, which knows the devices.
    :param allow_uids: users beside the server's own whose clients are let in.
    :param pool_initial: bytes with which a session's pool begins; see :class:`shared_rpc.PoolOptions`.
    :param pool_limit: bytes up to which a session's pool grows.
    """

    base_path: str | None = None
    socket: str | None = None
    devices: tuple[str, ...] = ()
    workers: int = 1
    threads: int | None = None
    build_timeout: float | None = None
    preload: bool = True
    max_bytes: int | None = None
    quotas: tuple[str, ...] = ()
    max_tasks: int = 1000
    result_ttl: float = 3600.0
    max_connections: int = 8192
    allow_uids: tuple[int, ...] = ()
    pool_initial: int | None = None
    pool_limit: int | None = None
    idle_exit: float | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    log_format: str | None = None
    log_level: str | None = None
    hooks: tuple[str, ...] = ()

    def device_of(self, number: int) -> str | None:
        """Return the device of a worker, by its number from 0; None where the app decides."""
        return self.devices[number % len(self.devices)] if self.devices else None

    @property
    def words(self) -> list[str]:
        """The words of a command line that :meth:`of` reads."""
        return ["--options", msgspec.json.encode(self).decode()]

    @classmethod
    def of(cls, text: str) -> ServeOptions:
        """Read what :attr:`words` wrote.

        :raises ConfigurationError: for a text that is of another release, or was written by hand and is wrong.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"--options {text}: {error}") from error
