"""What the tests of brokers have in common."""

from __future__ import annotations

import pytest

from tests.kit.brokers import BrokerApp


@pytest.fixture
def app(broker_app: BrokerApp) -> BrokerApp:
    """An app that is not served yet."""
    return broker_app
