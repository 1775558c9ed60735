"""What a run waits for in each phase, in the words the user reads."""

from __future__ import annotations

import pytest
from unit.test_run_state import agent_hello, progress, ready

from spectrain.coordinator.fleet import Agent, Fleet, Worker
from spectrain.coordinator.phase import Phase, missing_in


def fleet(agents: tuple[int, ...] = (), workers: int = 0) -> Fleet:
    hosts = ("left", "right")
    return Fleet(
        hosts,
        {index: Agent(agent_hello(index), 0.0) for index in agents},
        [Worker(stage, (stage, 3), hosts[stage]) for stage in range(workers)],
    )


def test_hosts_whose_agents_have_not_reported_are_named() -> None:
    assert missing_in(Phase.GATHERING, fleet(agents=(0,))) == (
        "host right: its agent has not reported yet",
    )


def test_with_all_agents_there_it_is_the_job_that_is_missing() -> None:
    assert missing_in(Phase.GATHERING, fleet(agents=(0, 1))) == ("the job: being loaded and cut",)


def test_stages_that_are_being_built_are_named_with_what_they_do() -> None:
    starting = fleet(agents=(0, 1), workers=2)
    starting.workers[0].heard = 1.0
    assert missing_in(Phase.STARTING, starting) == (
        "stage 0 (left, slot 3): building", "stage 1 (right, slot 3): starting",
    )  # fmt: skip
    starting.workers[0].ready = ready(0)
    assert missing_in(Phase.STARTING, starting) == ("stage 1 (right, slot 3): starting",)


def test_stages_whose_links_do_not_stand_are_named() -> None:
    connecting = fleet(agents=(0, 1), workers=2)
    connecting.workers[1].connected = True
    assert missing_in(Phase.CONNECTING, connecting) == (
        "stage 0 (left): connecting to its neighbours",
    )


@pytest.mark.parametrize(
    "phase",
    [Phase.REJOINING, Phase.TRAINING, Phase.FINISHING, Phase.FAILING, Phase.ENDED],
)
def test_nothing_is_missing_once_the_run_trains(phase: Phase) -> None:
    training = fleet(workers=2)
    training.workers[0].progress = progress(0)
    assert missing_in(phase, training) == ()
