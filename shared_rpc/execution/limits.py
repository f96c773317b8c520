"""Configured memory limits of a server, in bytes."""

from __future__ import annotations

from collections.abc import Mapping

from shared_rpc.errors import CapabilityError, ConfigurationError
from shared_rpc.memory.devices import device_id, devices_of, facts_of


def resolve_quotas(quotas: Mapping[str, int | float], device: str) -> dict[str, int]:
    """Return the configured quotas in bytes, by device id.

    :param device: the id of the server's device.
    :raises ConfigurationError: for a device of another server, and for an amount that is neither bytes nor a fraction.
    """
    resolved: dict[str, int] = {}
    for name, amount in quotas.items():
        what = f"quota {name}={amount!r}"
        try:
            chosen = device_id(name)
        except (ConfigurationError, CapabilityError) as error:
            raise ConfigurationError(f"{what}: {error}") from error
        if chosen not in devices_of(device):
            raise ConfigurationError(f"{what}: use a device of this server: {', '.join(devices_of(device))}")
        if chosen in resolved:
            raise ConfigurationError(f"{what}: another name of {chosen} has a quota already")
        resolved[chosen] = _in_bytes(what, amount, chosen)
    return resolved


def resolve_host_quota(amount: float | None) -> int | None:
    """Return the limit of host copies in bytes, None for no limit.

    :raises ConfigurationError: for an amount that is neither bytes nor a fraction of the host's memory.
    """
    return _in_bytes(f"host_quota={amount!r}", amount, "cpu") if amount is not None else None


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


def _in_bytes(what: str, amount: float, device: str) -> int:
    if isinstance(amount, float) and 0 < amount <= 1:
        return int(facts_of(device).total * amount)
    if isinstance(amount, int) and not isinstance(amount, bool) and amount >= 0:
        return amount
    raise ConfigurationError(f"{what}: use bytes as an int, or a fraction of the device's memory as a float up to 1.0")
