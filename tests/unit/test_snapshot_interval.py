"""How far apart snapshot rounds are."""

from __future__ import annotations

from math import sqrt

import pytest

from spectrain.coordinator.snapshot_interval import (
    FAULTS_PER_WORKER_S,
    LARGEST_SHARE,
    LEAST_INTERVAL_S,
    LIGHT_LOG_BYTES,
    LONGEST_INTERVAL_S,
    choose_interval,
)


def interval_s(*, capture_s: float, workers: int = 4, update_s: float = 0.001) -> float:
    every = choose_interval(capture_s=capture_s, update_s=update_s, workers=workers)
    return every * update_s


def test_the_interval_follows_young_and_daly() -> None:
    capture_s = 0.002
    expected_s = sqrt(2 * capture_s / (4 * FAULTS_PER_WORKER_S))
    assert interval_s(capture_s=capture_s) == pytest.approx(expected_s, rel=1e-3)


def test_more_workers_fail_more_often_and_need_rounds_nearer_together() -> None:
    few, many = (interval_s(capture_s=0.002, workers=workers) for workers in (4, 64))
    assert many == pytest.approx(few / 4, rel=1e-2)


def test_snapshots_never_cost_more_than_their_share() -> None:
    capture_s = 0.1
    found_s = interval_s(capture_s=capture_s, workers=10_000)
    assert found_s == pytest.approx(capture_s / LARGEST_SHARE, rel=1e-3)


def test_snapshots_that_cost_nothing_still_keep_a_distance() -> None:
    assert interval_s(capture_s=0) == pytest.approx(LEAST_INTERVAL_S)


def test_rounds_are_never_further_apart_than_logs_and_replay_can_bear() -> None:
    assert interval_s(capture_s=10) == pytest.approx(LONGEST_INTERVAL_S)


@pytest.mark.parametrize("update_s", [1.0, 59.9, 60.0, 3600.0])
def test_there_is_a_whole_number_of_updates_and_at_least_one(update_s: float) -> None:
    every = choose_interval(capture_s=10, update_s=update_s, workers=4)
    assert every == max(1, -(-60 // update_s))


def test_the_room_in_the_logs_is_a_limit() -> None:
    assert choose_interval(capture_s=10, update_s=1, workers=4, most=7) == 7
    assert choose_interval(capture_s=10, update_s=1, workers=4, most=1000) == 60


def test_large_parcels_need_rounds_nearer_together_than_the_rule_says() -> None:
    few, many = (
        choose_interval(capture_s=0.001, update_s=0.01, workers=4, update_bytes=update_bytes)
        for update_bytes in (1 << 10, 4 << 20)
    )
    assert few > 500
    assert many == LIGHT_LOG_BYTES // (4 << 20)


def test_a_light_log_is_no_reason_to_stop_stages_for_more_than_their_share() -> None:
    every = choose_interval(capture_s=0.1, update_s=0.01, workers=4, update_bytes=1 << 30)
    assert every * 0.01 == pytest.approx(0.1 / LARGEST_SHARE, rel=1e-3)
