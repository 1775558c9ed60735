"""Hosts, agents and workers: who is meant by a name, who hears a message, where a stage may go."""

from __future__ import annotations

from unit.test_run_state import agent_hello, done, progress, ready

from spectrain.coordinator.events import Send
from spectrain.coordinator.fleet import Agent, Fleet, Worker, new_home
from spectrain.protocol.messages import Go, Heartbeat, Peer


def a_worker(stage: int = 1, slot: tuple[int, int] = (0, 1)) -> Worker:
    return Worker(stage, slot, "left", incarnation=2)


def test_a_worker_is_named_by_stage_and_incarnation() -> None:
    assert (a_worker().identity, a_worker().agent) == ("worker/1/2", "agent/0")


def test_an_older_or_newer_incarnation_is_nobody() -> None:
    fleet = Fleet(("left",), workers=[a_worker(0), a_worker(1)])
    assert fleet.named("worker/1/2") is fleet.workers[1]
    assert fleet.named("worker/1/1") is fleet.named("worker/1/3") is None


def test_what_is_no_workers_name_is_nobodys() -> None:
    fleet = Fleet(("left",), workers=[a_worker(0)])
    for name in ("worker/1/2", "worker/x/2", "worker/0", "agent/0", "launcher", "worker/0/2/feed"):
        assert fleet.named(name) is None


def test_a_workers_state_goes_from_starting_to_ended() -> None:
    worker = a_worker()
    assert worker.state == "starting"
    worker.heard = 1.0
    assert worker.state == "building"
    worker.progress = progress(1)
    assert worker.state == "training"
    worker.exited = True
    assert worker.state == "ended"


def test_what_a_worker_does_is_told_by_its_newest_report() -> None:
    worker = a_worker()
    assert (worker.doing, worker.version) == ("starting", 0)
    worker.progress = progress(1, last_op="")
    assert worker.doing == "before its first op"
    worker.progress = progress(1, last_op="U3", waiting_for="F4 from stage 0")
    assert (worker.doing, worker.version) == ("after U3, waiting for F4 from stage 0", 3)


def test_neighbours_are_told_the_endpoint_of_the_stream_they_send_on() -> None:
    worker = a_worker()
    worker.ready = ready(1)
    assert worker.peer(gradients=True) == Peer(
        stage=1, incarnation=2, endpoint="g1", public_key="k1"
    )
    assert worker.peer(gradients=False).endpoint == "a1"


def test_a_worker_that_begins_again_keeps_nothing_of_its_former_self() -> None:
    worker = Worker(
        1, (0, 1), "left", incarnation=2, pid=77, heard=1.0, ready=ready(1), connected=True,
        progress=progress(1), done=done(1), exited=True,
    )  # fmt: skip
    worker.begin_again(now=9.0)
    assert worker == Worker(1, (0, 1), "left", incarnation=3, moved=9.0)


def test_slots_are_those_of_living_hosts_in_the_order_of_the_hosts() -> None:
    agents = {
        2: Agent(agent_hello(2, slots=1), 0.0),
        1: Agent(agent_hello(1, slots=5), 0.0, lost=True),
        0: Agent(agent_hello(0, slots=2), 0.0),
    }
    assert Fleet(("a", "b", "c"), agents).slots() == [(0, 0), (0, 1), (2, 0)]


def test_workers_are_found_by_their_host() -> None:
    fleet = Fleet(("left", "right"), workers=[a_worker(0, (0, 0)), a_worker(1, (1, 0))])
    assert fleet.on_host(1) == [fleet.workers[1]]


def test_a_message_goes_to_workers_that_have_said_hello_and_live() -> None:
    silent, living, dead = (a_worker(stage) for stage in range(3))
    living.heard = dead.heard = 1.0
    dead.exited = True
    fleet = Fleet(("left",), workers=[silent, living, dead])
    assert fleet.to_workers(Go()) == [Send("worker/1/2", Go())]


def test_a_message_goes_to_agents_that_live() -> None:
    agents = {
        0: Agent(agent_hello(0), 0.0, lost=True),
        1: Agent(agent_hello(1), 0.0),
    }
    assert Fleet(("left", "right"), agents).to_agents(Heartbeat()) == [Send("agent/1", Heartbeat())]


def test_a_homeless_stage_takes_a_free_slot_before_a_shared_one() -> None:
    slots = [(0, 0), (0, 1), (1, 0)]
    assert new_home(slots, taken=[(0, 0), (0, 1)]) == (1, 0)


def test_without_a_free_slot_the_least_crowded_is_shared() -> None:
    assert new_home([(0, 0), (1, 0)], taken=[(0, 0), (0, 0), (1, 0)]) == (1, 0)


def test_slots_that_are_lost_do_not_count_as_homes() -> None:
    assert new_home([(1, 0)], taken=[(0, 0)]) == (1, 0)
    assert new_home([], taken=[(0, 0)]) is None
