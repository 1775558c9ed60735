"""A link that breaks alone is built again; one that broke with a worker waits for its successor."""

from __future__ import annotations

from unit.test_repairs import come_back, die, training
from unit.test_run_state import Run, exited, links

from spectrain.coordinator.broken_links import EXPLAINED_WITHIN_S
from spectrain.coordinator.events import Instruction, Tell
from spectrain.protocol.messages import LinkLost


def lose_link(run: Run, stage: int, incarnation: int = 0) -> list[Instruction]:
    lost = LinkLost(
        stage=stage, incarnation=incarnation, stream="activations", reason="no more bytes"
    )
    return run.hear(f"worker/{stage}/{incarnation}", lost)


def test_a_link_that_no_death_explains_is_built_again() -> None:
    run = training()
    lose_link(run, 1)
    told = run.wait(EXPLAINED_WITHIN_S)
    assert {to for to, *_ in links(told)} == {"worker/0/0", "worker/1/0", "worker/2/0"}
    assert any("no more bytes" in each.text for each in told if isinstance(each, Tell))


def test_an_end_of_the_pipeline_has_one_link_to_build_again() -> None:
    run = training()
    lose_link(run, 2)
    assert {to for to, *_ in links(run.wait(EXPLAINED_WITHIN_S))} == {"worker/1/0", "worker/2/0"}


def test_it_is_built_again_once_for_each_time_it_breaks() -> None:
    run = training()
    for _ in range(2):
        lose_link(run, 1)
        lose_link(run, 1)
        assert links(run.wait(EXPLAINED_WITHIN_S))
        assert links(run.wait(EXPLAINED_WITHIN_S)) == []


def test_a_death_that_is_told_later_explains_it() -> None:
    run = training()
    lose_link(run, 1)
    assert links(run.wait(1)) == []
    run.hear("agent/1", exited(2, -9))  # not restarted yet, or on its way
    assert links(run.wait(EXPLAINED_WITHIN_S)) == []


def test_a_neighbour_that_was_restarted_meanwhile_explains_it() -> None:
    run = training()
    lose_link(run, 1)
    die(run, 2)
    come_back(run, 2, 1)
    assert links(run.wait(EXPLAINED_WITHIN_S)) == []


def test_a_link_that_breaks_after_a_restart_is_built_again() -> None:
    run = training()
    die(run, 2)
    come_back(run, 2, 1)
    lose_link(run, 2, 1)
    assert {to for to, *_ in links(run.wait(EXPLAINED_WITHIN_S))} == {"worker/1/0", "worker/2/1"}
