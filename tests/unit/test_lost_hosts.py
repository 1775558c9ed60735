"""Which hosts are lost, for how long, and when their agents are tried again."""

from __future__ import annotations

from spectrain.coordinator.lost_hosts import LostHosts


def lost(max_restarts: int = 100) -> LostHosts:
    return LostHosts(lease_s=10, max_restarts=max_restarts)


def test_the_first_sign_of_a_loss_counts() -> None:
    hosts = lost()
    hosts.add(1, since=100)
    hosts.add(1, since=115)
    assert hosts.overdue(now=119.9) == []
    assert hosts.overdue(now=120) == [1]
    assert hosts.lost_for_s(now=120) == {1: 20}


def test_a_host_that_is_back_is_not_lost() -> None:
    hosts = lost()
    hosts.add(1, since=100)
    hosts.restart_agent(1, progress=0, now=100)
    hosts.remove(1)
    assert (1 in hosts, len(hosts)) == (False, 0)
    assert hosts.agents_due(now=200) == []
    assert hosts.overdue(now=200) == []


def test_an_agent_is_started_at_once_and_named_once() -> None:
    hosts = lost()
    hosts.restart_agent(1, progress=0, now=100)
    assert hosts.agents_due(now=100) == [1]
    assert hosts.agents_due(now=200) == []


def test_without_progress_the_next_try_comes_later_and_with_it_at_once() -> None:
    hosts = lost()
    for progress, now in ((3, 100), (3, 101)):
        hosts.restart_agent(1, progress, now)
        hosts.agents_due(now)
    assert hosts.agents_due(now=101.4) == []
    assert hosts.agents_due(now=101.5) == [1]
    hosts.restart_agent(1, progress=4, now=102)
    assert hosts.agents_due(now=102) == [1]


def test_an_agent_that_was_started_often_enough_is_left_alone() -> None:
    hosts = lost(max_restarts=2)
    for progress in range(3):
        hosts.restart_agent(1, progress, now=100)
        due = hosts.agents_due(now=1000)
        assert due == ([1] if progress < 2 else [])
