"""Fixtures of all tests of brokers."""

from __future__ import annotations

import pytest

from tests.kit.brokers import BrokerApp


@pytest.fixture
def app(broker_app: BrokerApp) -> BrokerApp:
    """An app, not served yet."""
    return broker_app
