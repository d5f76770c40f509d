"""The gateway's counters: one row for each service there is, and none for those that are gone."""

from __future__ import annotations

from metal_supervisor.gateway.traffic import NO_SERVICE, Traffic

TINY = ("default", "tiny")
OLD = ("default", "old")


def test_what_is_gone_is_dropped_and_what_is_there_is_counted_on() -> None:
    traffic = Traffic()
    for service in (TINY, OLD, NO_SERVICE):
        traffic.ended("alice", service, 200, 0.1, 0.5, events=3)
        traffic.waited(service, 1.0)
    traffic.forget_all_but([TINY])
    traffic.ended("alice", TINY, 200, 0.1, 0.5, events=3)
    told = traffic.as_json()
    assert told["requests"] == [["alice", *TINY, 200, 2], ["alice", *NO_SERVICE, 200, 1]]
    assert told["events"] == [["alice", *TINY, 6], ["alice", *NO_SERVICE, 3]]
    for name in ("firstByte", "wait", "whole"):
        assert [row[:-1][-2:] for row in told[name]] == [[*TINY], [*NO_SERVICE]]
