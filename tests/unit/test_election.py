"""The lock of those who start a process that listens, and what it says of failed starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shared_rpc.protocol.election import Election


@pytest.fixture
def elections(tmp_path: Path) -> Iterator[tuple[Election, Election]]:
    """Two processes' views of one lock."""
    with closing(Election(f"{tmp_path}/s")) as one, closing(Election(f"{tmp_path}/s")) as other:
        yield one, other


@pytest.mark.parametrize("lasting", [True, False])
def test_a_failure_is_for_those_who_wait_and_a_lasting_one_for_all(
    elections: tuple[Election, Election], tmp_path: Path, lasting: bool
) -> None:
    """Until it is too old."""
    one, other = elections
    one.record_failure("the reason", lasting)
    assert other.failure() == "the reason"
    with closing(Election(f"{tmp_path}/s")) as later:
        assert later.failure() == ""
        assert later.lasting_failure(since=0.0) == ("the reason" if lasting else "")
        assert later.lasting_failure(since=float("inf")) == ""
