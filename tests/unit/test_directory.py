"""The directory of a cluster: who builds, who receives from whom, and what a loss changes. Without processes and clocks."""

from __future__ import annotations

import dataclasses
import pickle

import msgspec
import pytest

from shared_rpc.cluster.orders import (
    Abandon,
    Blame,
    Build,
    BuildCandidate,
    ChangeOver,
    Decision,
    Done,
    Dropped,
    Fetch,
    Holding,
    Invalidate,
    Key,
    Missed,
    MissWithdrawn,
    NodeFacts,
    NodeJoined,
    Rejoin,
    Version,
)
from tests.kit.clusters import GROUP, KEY, Cluster

V1 = Version(1, "d1")


def held(version: Version = V1, *, candidate: bool = False) -> Holding:
    """A node's word that it has a version."""
    return Holding(KEY, version, 1000, candidate)


def test_who_asks_first_builds_and_the_others_wait() -> None:
    """One build, whatever the number of calls."""
    cluster = Cluster("a", "b", "c")
    cluster.miss("b", "a", "c", "b")
    assert [type(order) for order in cluster.orders] == [Build]
    assert cluster.order(Build).node == "b"


def test_who_waited_receives_from_the_builder() -> None:
    """And answers its callers with that: it is no candidate."""
    cluster = Cluster("a", "b")
    cluster.miss("a", "b")
    cluster.answer(cluster.order(Build))
    fetch = cluster.order(Fetch)
    assert (fetch.node, fetch.source, fetch.version, fetch.candidate) == ("b", "a", V1, False)


def test_a_node_serves_no_more_than_the_fan_out_at_a_time() -> None:
    """The next one begins when one has ended, and may get it from the one that has just received it."""
    cluster = Cluster(*"abcde", fan_out=2)
    cluster.miss(*"abcde")
    cluster.answer(cluster.order(Build))
    assert [fetch.source for fetch in cluster.ordered(Fetch)] == ["a", "a"]
    cluster.answer(cluster.ordered(Fetch)[0])
    assert len(cluster.ordered(Fetch)) == 3
    assert {fetch.source for fetch in cluster.ordered(Fetch)} == {"a", "b"}


def test_all_have_it_in_the_end() -> None:
    """Of a hundred nodes that called at once."""
    nodes = [f"n{number}" for number in range(100)]
    cluster = Cluster(*nodes)
    cluster.miss(*nodes)
    cluster.carry_out()
    assert cluster.versions() == dict.fromkeys(nodes, 1)


def test_a_source_on_the_same_host_is_preferred() -> None:
    """Between two brokers of a host the bytes need no network."""
    cluster = Cluster("a", "b")
    cluster.join("c1", host="c")
    cluster.join("c2", host="c")
    cluster.miss("a", "b", "c1")
    cluster.carry_out()
    cluster.miss("c2")
    assert cluster.order(Fetch).source == "c1"


def relaying() -> Cluster:
    """Node ``a`` has it and sends it to ``b``, who relays it to ``c``, who relays it to ``d``."""
    cluster = Cluster(*"abcd", fan_out=1, relay=True)
    cluster.miss(*"abcd")
    cluster.answer(cluster.order(Build))
    assert [(fetch.node, fetch.source, fetch.relay) for fetch in cluster.ordered(Fetch)] == [
        ("b", "a", False),
        ("c", "b", True),
        ("d", "c", True),
    ]
    return cluster


def sources(cluster: Cluster) -> dict[str, str]:
    """From whom each node is receiving."""
    return {fetch.node: fetch.source for fetch in cluster.ordered(Fetch)}


def test_a_node_relays_while_it_receives() -> None:
    """Where those who have all of it have no room; and all get it."""
    cluster = relaying()
    cluster.carry_out()
    assert cluster.versions() == dict.fromkeys("abcd", 1)


def test_of_relays_on_a_host_the_nearest_to_all_bytes_is_asked() -> None:
    """Whatever the order in which they joined."""
    cluster = Cluster(relay=True, fan_out=2)
    for node in "abc":
        cluster.join(node, host="one")
    cluster.miss("c", "b", "a")
    cluster.answer(cluster.order(Build))
    assert sources(cluster) == {"a": "c", "b": "c"}


def test_who_is_asked_for_parts_by_others_gets_another_source_and_keeps_them() -> None:
    """Damage on the way to a relay is seen there: those behind it wait, and nobody else is blamed or asked anew."""
    cluster = relaying()
    cluster.join("e", held())
    [to_b, to_c, to_d] = cluster.ordered(Fetch)
    cluster.fail(to_b, Blame.SOURCE, "the digests do not fit")
    assert sources(cluster) == {"b": "e", "c": "b", "d": "c"}
    assert {to_c, to_d} < set(cluster.orders)
    cluster.carry_out()
    # That it has relayed counts for nothing against it later.
    cluster.join("f")
    cluster.miss("f")
    assert cluster.order(Fetch).source != "a"


def test_a_relay_that_waits_for_a_source_and_is_lost_is_replaced() -> None:
    """Those behind it do not wait for ever."""
    cluster = relaying()
    cluster.join("e", misses=[KEY])
    cluster.fail(cluster.order(Fetch, "c"), Blame.SOURCE)
    assert sources(cluster)["d"] == "c"
    cluster.lose("c")
    cluster.answer(cluster.order(Fetch, "b"))
    assert sources(cluster)["d"] in ("a", "b")
    cluster.carry_out()
    assert cluster.versions() == dict.fromkeys("abde", 1)


def test_a_relay_that_no_bytes_reach_is_left_out_and_replaced() -> None:
    """Its callers get the error, and those behind it another source."""
    cluster = relaying()
    while fetch := next(iter(cluster.ordered(Fetch, "b")), None):
        cluster.fail(fetch, Blame.SOURCE)
    assert set(cluster.failed) == {"b"}
    assert sources(cluster) == {"c": "a", "d": "c"}


def test_a_relay_whose_callers_gave_up_is_replaced() -> None:
    """While it had no source, and others waited for its parts."""
    cluster = relaying()
    cluster.join("e", misses=[KEY])
    cluster.fail(cluster.order(Fetch, "c"), Blame.SOURCE)
    assert "c" not in sources(cluster)
    cluster.handle(MissWithdrawn("c", KEY))
    cluster.answer(cluster.order(Fetch, "b"))
    assert sources(cluster)["d"] in ("a", "b")


def test_a_relay_that_gives_up_is_not_to_blame() -> None:
    """Another one is asked in its place, as often as that happens; it goes on to be a source as good as any."""
    cluster = Cluster(*"abcd", fan_out=2, relay=True, transfers=2)
    cluster.miss(*"abcd")
    cluster.answer(cluster.order(Build))
    assert sources(cluster) == {"b": "a", "c": "a", "d": "b"}
    cluster.fail(cluster.order(Fetch, "d"), Blame.RELAY)
    assert sources(cluster)["d"] == "c"
    cluster.fail(cluster.order(Fetch, "d"), Blame.RELAY)
    assert "d" not in sources(cluster)  # until a node that has all of it has room
    cluster.join("f", misses=[KEY])
    assert sources(cluster)["f"] == "b"
    cluster.carry_out()
    assert (cluster.versions(), cluster.failed) == (dict.fromkeys("abcdf", 1), {})


def test_relays_that_were_tried_are_not_all_that_there_is() -> None:
    """Who could not get it from a relay waits for room at a node that has all of it, and does not ask the relay again."""
    cluster = Cluster(*"abcd", fan_out=1, relay=True)
    cluster.miss(*"abc")
    cluster.answer(cluster.order(Build))
    assert sources(cluster) == {"b": "a", "c": "b"}
    cluster.fail(cluster.order(Fetch, "c"), Blame.RELAY)
    assert sources(cluster) == {"b": "a"}
    cluster.answer(cluster.order(Fetch, "b"))
    assert sources(cluster) == {"c": "a"}


def test_a_builder_that_is_lost_is_replaced_by_the_next_who_waits() -> None:
    """It is no error for anybody."""
    cluster = Cluster("a", "b", "c")
    cluster.miss("a", "b", "c")
    cluster.lose("a")
    assert cluster.order(Build).node == "b"
    cluster.carry_out()
    assert cluster.versions() == {"b": 2, "c": 2}
    assert cluster.failed == {}


def test_an_exception_of_the_endpoint_goes_to_all_who_wait() -> None:
    """The builder's callers know it already; nobody else builds."""
    cluster = Cluster("a", "b", "c")
    cluster.miss("a", "b", "c")
    cluster.fail(cluster.order(Build), Blame.ENDPOINT, "ValueError: no such file")
    assert cluster.failed == dict.fromkeys("bc", "ValueError: no such file")
    assert cluster.orders == []


def test_the_next_call_after_an_exception_tries_anew() -> None:
    """The error is not remembered."""
    cluster = Cluster("a", "b")
    cluster.miss("a", "b")
    cluster.fail(cluster.order(Build), Blame.ENDPOINT)
    cluster.miss("b")
    assert cluster.order(Build).node == "b"


def test_builders_that_cannot_are_replaced_a_few_times_only() -> None:
    """An endpoint that ends its worker would end that of every node else; who waits is told of each."""
    cluster = Cluster(*"abcde", builders=3)
    cluster.miss(*"abcde")
    for node in "abc":
        assert cluster.order(Build).node == node
        cluster.fail(cluster.order(Build), Blame.NODE, f"the worker of {node} crashed")
    assert set(cluster.failed) == set("de")
    assert all(f"the worker of {node} crashed" in cluster.failed["e"] for node in "abc")


def test_a_builder_that_says_nothing_loses_its_order() -> None:
    """Its process is stopped, or its network is gone, and nobody has noticed."""
    cluster = Cluster("a", "b", silence=30)
    cluster.miss("a", "b")
    cluster.wait(32)
    assert cluster.ordered(Build, "b")


def test_a_late_builder_is_believed_too() -> None:
    """What it built is as good as another; the newest version is what all end with."""
    cluster = Cluster("a", "b", "c", silence=30)
    cluster.miss("a", "b", "c")
    cluster.wait(32)
    cluster.answer(cluster.order(Build, "a"))
    assert cluster.ordered(Fetch, "c")
    cluster.carry_out()
    cluster.wait(10)
    cluster.carry_out()
    assert set(cluster.versions().values()) == {2}


def test_a_source_that_is_lost_is_replaced() -> None:
    """By another node that has it."""
    cluster = Cluster("a", "b", "c")
    cluster.miss("a", "b")
    cluster.carry_out()
    cluster.miss("c")
    source = cluster.order(Fetch).source
    cluster.lose(source)
    assert cluster.order(Fetch).source == ({"a", "b"} - {source}).pop()


def test_a_source_without_the_bytes_is_not_asked_again() -> None:
    """As long as there is another one."""
    cluster = Cluster("a", "b", "c")
    cluster.miss("a", "b")
    cluster.carry_out()
    cluster.miss("c")
    first = cluster.order(Fetch)
    cluster.fail(first, Blame.SOURCE, "the digest of part 3 does not fit")
    assert cluster.order(Fetch).source != first.source


def test_a_source_that_was_blamed_keeps_nobody_from_the_others() -> None:
    """Those that have room are asked, whichever had it first."""
    cluster = Cluster("a", "b", "c")
    cluster.miss("a", "b")
    cluster.answer(cluster.order(Build))
    fetch = cluster.order(Fetch)
    cluster.join("d", held())
    cluster.fail(fetch, Blame.SOURCE)
    cluster.carry_out()
    cluster.miss("c")
    assert cluster.order(Fetch).source in ("b", "d")


def test_a_node_that_no_bytes_reach_gets_the_error() -> None:
    """After a few attempts; it is told from which node, and why."""
    cluster = Cluster("a", "b", transfers=3)
    cluster.miss("a", "b")
    cluster.answer(cluster.order(Build))
    for _ in range(3):
        cluster.fail(cluster.order(Fetch), Blame.SOURCE, "no route to host")
    assert "from a: no route to host" in cluster.failed["b"]
    assert cluster.orders == []


def test_a_full_node_is_left_out_at_once_and_others_go_on() -> None:
    """Another source would not help it."""
    cluster = Cluster("a", "b", "c")
    cluster.miss("a", "b", "c")
    cluster.answer(cluster.order(Build))
    cluster.fail(cluster.order(Fetch, "b"), Blame.NODE, "the quota of 1 GiB is used up")
    cluster.carry_out()
    assert cluster.failed == {"b": "the quota of 1 GiB is used up"}
    assert cluster.versions() == {"a": 1, "c": 1}


def test_the_last_source_is_lost_and_the_next_who_waits_builds() -> None:
    """What was being received is abandoned: nobody has the rest."""
    cluster = Cluster("a", "b", "c")
    cluster.miss("a", "b", "c")
    cluster.answer(cluster.order(Build))
    cluster.lose("a")
    assert cluster.order(Build).node == "b"
    assert {(notice.node, notice.version) for notice in cluster.noticed(Abandon)} == {("b", V1), ("c", V1)}


def test_callers_that_gave_up_are_not_built_for() -> None:
    """The next builder is one that still waits."""
    cluster = Cluster("a", "b", "c")
    cluster.miss("a", "b", "c")
    cluster.handle(MissWithdrawn("b", KEY))
    cluster.lose("a")
    assert cluster.order(Build).node == "c"


def test_a_node_that_dropped_a_version_is_no_source() -> None:
    """It was evicted there."""
    cluster = Cluster("a", "b", "c")
    cluster.miss("a", "b")
    cluster.carry_out()
    cluster.handle(Dropped("a", KEY, V1))
    cluster.miss("c")
    assert cluster.order(Fetch).source == "b"


def test_a_miss_of_what_a_node_should_have_means_that_it_was_evicted() -> None:
    """The word of it may come later than the call."""
    cluster = Cluster("a", "b")
    cluster.miss("a", "b")
    cluster.carry_out()
    cluster.miss("a")
    assert (cluster.order(Fetch).node, cluster.order(Fetch).source) == ("a", "b")


@pytest.mark.parametrize("field", ["fingerprint", "device", "python", "torch", "shared_rpc"])
def test_nodes_that_differ_build_for_themselves(field: str) -> None:
    """Their records are of no use to each other, and the status says in what they differ."""
    other = Key(KEY.endpoint, KEY.cache_key, msgspec.structs.replace(GROUP, **{field: "another"}))
    cluster = Cluster("a", "b")
    cluster.miss("a")
    cluster.miss("b", key=other)
    cluster.carry_out()
    assert cluster.versions() == {"a": 1} and cluster.versions(other) == {"b": 1}
    assert cluster.status()["differs"] == cluster.status(other)["differs"] == [field]


def test_a_refresh_prepares_everywhere_before_anybody_changes_over() -> None:
    """The builder of the candidate is the asker; the others receive it as a candidate."""
    cluster = Cluster("a", "b", "c")
    cluster.miss("a", "b", "c")
    cluster.carry_out()
    cluster.refresh("b", payload=b"args")
    prepare = cluster.order(BuildCandidate)
    assert (prepare.node, prepare.number, prepare.payload) == ("b", 2, b"args")
    cluster.answer(prepare)
    first, second = cluster.ordered(Fetch)
    assert first.candidate and second.candidate
    cluster.answer(first)
    assert cluster.ordered(ChangeOver) == []
    cluster.answer(second)
    assert {promote.node for promote in cluster.ordered(ChangeOver)} == set("abc")
    assert cluster.versions() == dict.fromkeys("abc", 1)
    cluster.carry_out()
    assert cluster.versions() == dict.fromkeys("abc", 2)
    (result,) = cluster.answers[0].results
    assert (cluster.answers[0].node, set(result.nodes), result.left_out, result.version) == (
        "b",
        set("abc"),
        {},
        Version(2, "d2"),
    )


def test_a_node_that_fails_in_a_refresh_is_left_out_named_and_mended() -> None:
    """The others change over; it gets the new version when it can."""
    cluster = Cluster("a", "b", "c", retry_after=5)
    cluster.miss("a", "b", "c")
    cluster.carry_out()
    cluster.refresh("a")
    cluster.answer(cluster.order(BuildCandidate))
    cluster.fail(cluster.order(Fetch, "c"), Blame.NODE, "the quota is used up")
    cluster.carry_out()
    (result,) = cluster.answers[0].results
    assert set(result.nodes) == {"a", "b"} and result.left_out == {"c": "the quota is used up"}
    assert cluster.versions() == {"a": 2, "b": 2, "c": 1}
    assert cluster.status()["left_out"] == {"c": "the quota is used up"}
    cluster.wait(6)
    cluster.carry_out()
    assert cluster.versions()["c"] == 2
    assert cluster.status()["left_out"] == {}


def test_a_node_that_is_too_slow_for_a_refresh_is_left_out_and_goes_on() -> None:
    """When it has the version, it promotes it at once."""
    cluster = Cluster("a", "b", "c", prepare_timeout=20, patience_least=20, silence=60)
    cluster.miss("a", "b", "c")
    cluster.carry_out()
    cluster.refresh("a")
    cluster.carry_out(lambda order: isinstance(order, Fetch) and order.node == "c")
    cluster.wait(22)
    cluster.carry_out(lambda order: isinstance(order, Fetch))
    assert "in 21 s" in cluster.answers[0].results[0].left_out["c"]
    cluster.carry_out()
    assert cluster.versions() == dict.fromkeys("abc", 2)


def test_an_exception_in_a_refresh_changes_nothing() -> None:
    """It goes to who asked for it."""
    cluster = Cluster("a", "b")
    cluster.miss("a", "b")
    cluster.carry_out()
    cluster.refresh("a")
    cluster.fail(cluster.order(BuildCandidate), Blame.ENDPOINT, "ValueError: broken file")
    assert cluster.answers[0].results[0].error == "ValueError: broken file"
    assert cluster.versions() == {"a": 1, "b": 1} and cluster.orders == []


def test_the_builder_of_a_candidate_is_lost_and_another_builds() -> None:
    """The refresh goes on without the node."""
    cluster = Cluster("a", "b", "c")
    cluster.miss("a", "b", "c")
    cluster.carry_out()
    cluster.refresh("a")
    cluster.lose("a")
    cluster.carry_out()
    assert set(cluster.versions().values()) == {2}


def test_refreshes_come_one_after_the_other() -> None:
    """And each is answered."""
    cluster = Cluster("a", "b")
    cluster.miss("a", "b")
    cluster.carry_out()
    cluster.refresh("a", "r1", b"1")
    cluster.refresh("b", "r2", b"2")
    assert [order.payload for order in cluster.ordered(BuildCandidate)] == [b"1"]
    cluster.carry_out()
    assert [answer.request for answer in cluster.answers] == ["r1", "r2"]
    assert cluster.versions() == {"a": 3, "b": 3}


def test_equal_refreshes_that_have_not_begun_are_one() -> None:
    """A build that began after both were asked for is new enough for both."""
    cluster = Cluster("a", "b")
    cluster.miss("a", "b")
    cluster.carry_out()
    for request in ("r1", "r2", "r3"):
        cluster.refresh("a", request)
    cluster.carry_out()
    assert [answer.request for answer in cluster.answers] == ["r1", "r2", "r3"]
    assert cluster.versions() == {"a": 3, "b": 3}


def test_a_refresh_of_what_nobody_has_builds_it_at_the_asker() -> None:
    """As a refresh of a single server does."""
    cluster = Cluster("a", "b")
    cluster.refresh("b")
    cluster.carry_out()
    assert cluster.versions() == {"b": 1}


def test_who_calls_during_a_swap_gets_the_newest() -> None:
    """The old version is a source no more once nodes promote."""
    cluster = Cluster("a", "b")
    cluster.miss("a", "b")
    cluster.carry_out()
    cluster.refresh("a")
    cluster.carry_out(lambda order: isinstance(order, ChangeOver))
    cluster.join("c")
    cluster.miss("c")
    assert cluster.order(Fetch).version.number == 2
    cluster.carry_out()
    assert cluster.versions() == dict.fromkeys("abc", 2)


def test_who_calls_while_a_candidate_is_built_gets_the_old_version_and_then_the_new_one() -> None:
    """It need not wait for minutes."""
    cluster = Cluster("a", "b")
    cluster.miss("a", "b")
    cluster.carry_out()
    cluster.refresh("a")
    cluster.join("c")
    cluster.miss("c")
    cluster.answer(cluster.order(Fetch))
    assert cluster.versions()["c"] == 1
    cluster.carry_out()
    assert cluster.versions() == dict.fromkeys("abc", 2)


def test_a_node_that_comes_back_with_an_old_version_gets_the_current_one() -> None:
    """It was away during the refresh."""
    cluster = Cluster("a", "b", "c")
    cluster.miss("a", "b", "c")
    cluster.carry_out()
    cluster.lose("c")
    cluster.refresh("a")
    cluster.carry_out()
    cluster.join("c", held())
    fetch = cluster.order(Fetch)
    assert (fetch.node, fetch.version.number, fetch.candidate) == ("c", 2, True)
    cluster.carry_out()
    assert cluster.versions() == dict.fromkeys("abc", 2)


def test_an_invalidation_reaches_every_node_that_has_it() -> None:
    """It is answered when all have confirmed, and the next call builds."""
    cluster = Cluster("a", "b", "c")
    cluster.miss("a", "b")
    cluster.carry_out()
    cluster.invalidate("c")
    assert {order.node for order in cluster.ordered(Invalidate)} == {"a", "b"}
    assert cluster.answers == []
    cluster.carry_out()
    assert set(cluster.answers[0].results[0].nodes) == {"a", "b"}
    cluster.miss("c")
    assert cluster.order(Build).node == "c"


def test_what_was_being_built_when_it_was_invalidated_goes_to_nobody_else() -> None:
    """The next who waits builds anew."""
    cluster = Cluster("a", "b")
    cluster.miss("a", "b")
    cluster.invalidate("a")
    cluster.answer(cluster.order(Build))
    assert cluster.order(Build).node == "b"


def test_an_invalid_version_of_a_node_that_was_away_is_invalidated_when_it_comes_back() -> None:
    """It has not heard of it."""
    cluster = Cluster("a", "b")
    cluster.miss("a", "b")
    cluster.carry_out()
    cluster.lose("b")
    cluster.invalidate("a")
    cluster.carry_out()
    cluster.join("b", held())
    assert cluster.order(Invalidate).node == "b"


def test_a_node_that_did_not_confirm_an_invalidation_is_told_again() -> None:
    """It would go on to serve what is invalid; who asked is told which node it is."""
    cluster = Cluster("a", "b", retry_after=5)
    cluster.miss("a", "b")
    cluster.carry_out()
    cluster.invalidate("a")
    cluster.fail(cluster.order(Invalidate, "b"), Blame.NODE, "the broker does not answer")
    cluster.carry_out()
    assert cluster.answers[0].results[0].left_out == {"b": "the broker does not answer"}
    cluster.wait(6)
    assert cluster.order(Invalidate).node == "b"


def test_a_candidate_whose_promotion_failed_is_promoted_later() -> None:
    """At a node that had nothing before, too."""
    cluster = Cluster("a", retry_after=5)
    cluster.refresh("a")
    cluster.answer(cluster.order(BuildCandidate))
    cluster.fail(cluster.order(ChangeOver), Blame.NODE, "the broker does not answer")
    cluster.wait(6)
    cluster.carry_out()
    assert cluster.versions() == {"a": 1}


def test_a_directory_that_starts_anew_learns_from_the_nodes_what_they_hold() -> None:
    """Nobody builds what another node has."""
    cluster = Cluster("a", "b", expected=["a", "b", "c"])
    cluster.miss("a")
    assert cluster.orders == []
    cluster.join("c", held(Version(7, "x")))
    assert (cluster.order(Fetch).node, cluster.order(Fetch).source) == ("a", "c")


def test_a_directory_that_starts_anew_does_not_wait_for_ever() -> None:
    """A node that is expected may be gone."""
    cluster = Cluster("a", expected=["a", "b"], recovery=10)
    cluster.miss("a")
    cluster.wait(11)
    assert cluster.order(Build).node == "a"


def test_a_build_that_an_earlier_directory_ordered_goes_on() -> None:
    """It is stated with the holdings."""
    before = Cluster("a", "b")
    before.miss("a", "b")
    build = before.order(Build)
    cluster = Cluster("b", expected=["a", "b"])
    cluster.miss("b")
    cluster.handle(NodeJoined("a", NodeFacts("a"), (), (KEY,), (build,)))
    assert cluster.orders == []
    cluster.orders.append(build)
    cluster.answer(build)
    assert (cluster.order(Fetch).node, cluster.order(Fetch).source) == ("b", "a")


def test_a_candidate_of_an_earlier_directory_that_fails_fails_no_calls() -> None:
    """Nobody waits for it any more; who calls waits for a build of its own."""
    before = Cluster("a")
    before.refresh("a")
    prepare = before.order(BuildCandidate)
    cluster = Cluster(expected=["a"])
    cluster.handle(NodeJoined("a", NodeFacts("a"), (), (KEY,), (prepare,)))
    cluster.orders.append(prepare)
    cluster.fail(prepare, Blame.ENDPOINT, "ValueError: broken file")
    assert cluster.failed == {}
    assert cluster.order(Build).node == "a"


def test_versions_known_by_digest_alone_are_recognised() -> None:
    """An agent that was restarted knows the bytes, and not their number."""
    cluster = Cluster("a", "b")
    cluster.miss("a", "b")
    cluster.carry_out()
    cluster.join("b", held(Version(0, "d1")))
    assert cluster.versions() == {"a": 1, "b": 1} and cluster.orders == []


def test_the_only_node_of_a_version_is_recognised_by_the_digest_alone_too() -> None:
    """Its agent was restarted, and nobody else can say which version it is; an invalidation before does not count for it."""
    cluster = Cluster("a")
    cluster.miss("a")
    cluster.carry_out()
    cluster.invalidate("a")
    cluster.carry_out()
    cluster.miss("a")
    cluster.carry_out()
    cluster.join("a", held(Version(0, "d2")))
    assert cluster.versions() == {"a": 2} and cluster.orders == []


def test_a_node_whose_late_build_replaces_the_current_version_receives_that_again() -> None:
    """It has what it has built, and no longer what it had received."""
    cluster = Cluster("a", "b", silence=30)
    cluster.miss("a", "b")
    late = cluster.order(Build, "a")
    cluster.wait(32)
    cluster.answer(cluster.order(Build, "b"))
    cluster.miss("a")
    cluster.answer(cluster.order(Fetch, "a"))
    cluster.answer(late)
    assert cluster.ordered(ChangeOver) == []
    assert cluster.order(Fetch).node == "a"
    cluster.carry_out(lambda order: order is late)
    assert cluster.versions() == {"a": 2, "b": 2}


def test_a_call_at_a_node_that_has_the_candidate_of_the_current_version_promotes_it() -> None:
    """Its old object was evicted; nothing has to be built or sent."""
    cluster = Cluster("a", retry_after=300)
    cluster.miss("a")
    cluster.carry_out()
    cluster.refresh("a")
    cluster.answer(cluster.order(BuildCandidate))
    cluster.fail(cluster.order(ChangeOver), Blame.NODE)
    cluster.miss("a")
    assert [type(order) for order in cluster.orders] == [ChangeOver]


def test_a_candidate_is_recognised_by_its_digest_alone() -> None:
    """It was built after an invalidation, and its agent was restarted before it could promote it."""
    cluster = Cluster("a")
    cluster.miss("a")
    cluster.carry_out()
    cluster.invalidate("a")
    cluster.carry_out()
    cluster.refresh("a")
    cluster.answer(cluster.order(BuildCandidate))
    cluster.orders.clear()
    cluster.join("a", held(Version(0, "d2"), candidate=True))
    assert cluster.ordered(Invalidate) == []
    assert [notice.version for notice in cluster.noticed(Abandon)] == [Version(2, "d2")]


def test_a_node_that_cannot_promote_again_and_again_receives_the_version_anew() -> None:
    """Its candidate is gone, whatever became of it."""
    cluster = Cluster("a", "b", retry_after=5)
    cluster.miss("a", "b")
    cluster.carry_out()
    cluster.refresh("a")
    cluster.carry_out(lambda order: isinstance(order, ChangeOver) and order.node == "b")
    cluster.fail(cluster.order(ChangeOver), Blame.NODE, "there is no candidate")
    cluster.wait(6)
    cluster.fail(cluster.order(ChangeOver), Blame.NODE, "there is no candidate")
    assert [notice.node for notice in cluster.noticed(Abandon)] == ["b"]
    cluster.wait(11)
    assert cluster.order(Fetch).node == "b"
    cluster.carry_out()
    assert cluster.versions() == {"a": 2, "b": 2}


def test_an_unknown_node_is_asked_who_it_is() -> None:
    """It reports to a directory that was restarted."""
    cluster = Cluster()
    assert cluster.handle(Missed("a", KEY)) == [Rejoin("a")]


def test_orders_travel() -> None:
    """By pickle and by MessagePack."""
    fetch = Fetch("a", KEY, 1, V1, 10, "b")
    assert pickle.loads(pickle.dumps(fetch)) == fetch
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fetch), type=Decision) == fetch
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Done(fetch)), type=Done) == Done(fetch)


def test_messages_are_counted() -> None:
    """Those that came and those that went, by kind."""
    cluster = Cluster("a", "b")
    cluster.miss("a", "b")
    cluster.carry_out()
    assert cluster.directory.status()["messages"] == {
        "events": {"NodeJoined": 2, "Missed": 2, "Built": 1, "Done": 1},
        "decisions": {"Build": 1, "Fetch": 1},
    }


def test_rules_are_frozen() -> None:
    """They are chosen when the directory starts."""
    cluster = Cluster()
    with pytest.raises(dataclasses.FrozenInstanceError):
        cluster.rules.fan_out = 3


def test_a_node_that_was_left_out_of_a_version_that_is_lost_is_left_out_of_nothing() -> None:
    """Two nodes in turn have built candidates, and have not promoted them."""
    cluster = Cluster("a", "b")
    cluster.refresh("a", "r1")
    cluster.answer(cluster.order(BuildCandidate), "d1")
    cluster.join("c")
    cluster.refresh("b", "r2")
    cluster.fail(cluster.order(ChangeOver), Blame.NODE)
    cluster.answer(cluster.order(BuildCandidate), "d2")
    cluster.lose("b")
    cluster.wait(60)
    assert cluster.status()["left_out"] == {}
