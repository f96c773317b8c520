"""A Prometheus scraper for tests: an HTTP request, and a parser of the text."""

from __future__ import annotations

import urllib.request


class Scrape:
    """One scrape: samples by name and labels."""

    def __init__(self, text: str) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        #: By the sample's name, including ``_total``, ``_bucket`` etc.: the labels and the value of each.
        self.samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in self.families.values():
            for sample in family.samples:
                self.samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def __call__(self, name: str, **labels: str) -> float:
        """Return the value of a sample; its name has no ``shared_rpc_``."""
        found = [value for of, value in self.samples[f"shared_rpc_{name}"] if labels.items() <= of.items()]
        assert len(found) == 1, f"{name}{labels} has {len(found)} samples"
        return found[0]


def scrape(url: str) -> Scrape:
    """Send a request, and parse the answer."""
    with urllib.request.urlopen(url, timeout=10) as response:
        assert response.status == 200
        return Scrape(response.read().decode())
