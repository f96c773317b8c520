"""Leases that a client's next session renews."""

from __future__ import annotations

from shared_rpc.client.handle import Lease
from shared_rpc.client.session import LeaseBook, Renewal
from shared_rpc.client.steps import Reply
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.frames import Frame


class Giver:
    """Ends no lease."""

    def _end_lease_soon(self, object_id: str, session: object) -> None:
        """Never called here."""
        raise AssertionError(object_id)


def test_handles_changed_during_a_renewal_are_corrected() -> None:
    """Handles suspended since are suspended in the new session; resumed ones have their memory renewed."""
    earlier, later, leases = object(), object(), LeaseBook()
    handles = [Lease(1, object_id=name, server_id="s", generation=1, issuer=Giver(), session=earlier) for name in "abcd"]
    inactive, suspended, resumed, dropped = handles
    for handle in handles:
        leases.add(handle)
    for handle in (inactive, resumed):
        handle._request_suspension()
        handle._become_suspended()
    renewal = Renewal(leases, handles)
    assert renewal.request.message == m.Hold([*"abcd"], [*"ac"])
    suspended._request_suspension()
    suspended._become_suspended()
    resumed._become_active()
    dropped._drop()
    renewal.granted(Reply(m.Held([*"abcd"]), Frame(0, 0, b"")))
    renewal.move(later)
    assert [str(message) for message in renewal.corrections()] == ["Release(object_ids=['d'])", "Suspend(object_ids=['b'])"]
    assert renewal.outdated() == [resumed]
    for handle in (inactive, suspended, resumed):
        handle._drop()


def test_leases_of_handles_released_during_a_renewal_are_returned() -> None:
    """The new session has one more lease than there are handles: its id is returned for a release."""
    earlier, later = object(), object()
    handles = [
        Lease(1, object_id=object_id, server_id="s", generation=1, issuer=Giver(), session=earlier)
        for object_id in ("a", "a", "b")
    ]
    leases = LeaseBook()
    for handle in handles:
        leases.add(handle)
    renewal = Renewal(leases, leases.of_server("s"))
    assert handles[0]._drop()
    renewal.granted(Reply(m.Held(["a", "a"]), Frame(0, 0, b"")))
    renewal.move(later)
    assert renewal.corrections() == [m.Release(["a"])]
    assert [handle._in_session(later) for handle in handles] == [False, True, False]
    assert handles[2]._in_session(earlier)
    assert handles[2]._drop()
    assert handles[1]._drop()
