"""The metrics of a process's servers, for a registry of prometheus-client. Imported only if metrics are requested."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from shared_rpc.observability.events import Event
from shared_rpc.observability.metrics import EVENTS, Counted, Read, Reading

PREFIX = "shared_rpc"

_Instrument = prometheus_client.Counter | prometheus_client.Histogram


class Collector:
    """Hook that counts the events of servers, and collector of a registry.

    Events and readings name registered endpoints only, so the number of labels is bounded.

    :param read: the metrics of a :class:`~shared_rpc.observability.metrics.Reading`.
    """

    def __init__(self, read: Iterable[Read[Any]]) -> None:
        #: Ids of the servers whose events are counted.
        self.servers: set[str] = set()
        self._read = {metric.name: metric for metric in read}
        self._reading = Reading((), {})
        self._endpoints: set[str] = set()
        self._counted: list[tuple[Counted, _Instrument]] = [(metric, _counted(metric)) for metric in EVENTS]
        self._by_event: defaultdict[type[Event], list[tuple[Counted, _Instrument]]] = defaultdict(list)
        for metric, counted in self._counted:
            self._by_event[metric.event].append((metric, counted))
            if "endpoint" not in metric.labels:
                _begin(metric, counted, ())

    def __call__(self, event: Event) -> None:
        """Count an event."""
        if event.server_id not in self.servers:
            return
        for metric, counted in self._by_event.get(type(event), ()):
            amount = metric.amount(event)
            series = counted.labels(*metric.labels_of(event)) if metric.labels else counted
            series.inc(amount) if isinstance(series, prometheus_client.Counter) else series.observe(amount)

    def update(self, reading: Reading) -> None:
        """Set the numbers for :meth:`collect`, with zeros for events that have not happened yet, so that rates begin with 1."""
        self._reading = reading
        added = set(reading.endpoints) - self._endpoints
        self._endpoints |= added
        for metric, counted in self._counted:
            if "endpoint" in metric.labels:
                _begin(metric, counted, added)

    def describe(self) -> Iterator[prometheus_client.Metric]:
        """Yield every metric without numbers, to register the names."""
        for _, counted in self._counted:
            yield from counted.describe()
        for metric in self._read.values():
            yield _family(metric)

    def collect(self) -> Iterator[prometheus_client.Metric]:
        """Yield every metric with its numbers."""
        for _, counted in self._counted:
            for found in counted.collect():
                found.samples = [sample for sample in found.samples if not sample.name.endswith("_created")]
                yield found
        for name, numbers in self._reading.numbers.items():
            metric = self._read[name]
            family = _family(metric)
            for labels, number in {**dict.fromkeys(metric.zeros(self._reading.endpoints), 0.0), **numbers}.items():
                family.add_metric(labels, number)
            yield family


def _counted(metric: Counted) -> _Instrument:
    name, labels = f"{PREFIX}_{metric.name}", tuple(metric.labels)
    if metric.buckets:
        return prometheus_client.Histogram(name, metric.help, labels, registry=None, buckets=metric.buckets)
    return prometheus_client.Counter(name, metric.help, labels, registry=None)


def _begin(metric: Counted, counted: _Instrument, endpoints: Iterable[str]) -> None:
    for labels in metric.zeros(endpoints):
        if labels:
            counted.labels(*labels)


def _family(metric: Read[Any]) -> CounterMetricFamily | GaugeMetricFamily:
    family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return family(f"{PREFIX}_{metric.name}", metric.help, labels=tuple(metric.labels))
