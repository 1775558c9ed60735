"""The cut against every possible cut of small models."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from spectrain.coordinator.partition import check_counts, equal, partition
from spectrain.protocol.errors import SettingsError

Counts = tuple[int, ...]


def every_cut(layers: int, stages: int) -> list[Counts]:
    cuts = combinations(range(1, layers), stages - 1)
    return [tuple(b - a for a, b in pairwise((0, *cut, layers))) for cut in cuts]


def stage_costs(costs: list[int], counts: Counts) -> list[int]:
    first = [sum(counts[:stage]) for stage in range(len(counts))]
    return [sum(costs[a : a + count]) for a, count in zip(first, counts, strict=True)]


def rank(costs: list[int], counts: Counts) -> tuple[int, int, Counts]:
    loads = stage_costs(costs, counts)
    return max(loads), sum(load * load for load in loads), counts


@given(st.lists(st.integers(0, 12), min_size=1, max_size=9), st.integers(1, 9))
def test_no_cut_is_better(costs: list[int], stages: int) -> None:
    assume(stages <= len(costs))
    best = min(every_cut(len(costs), stages), key=lambda counts: rank(costs, counts))
    assert partition(costs, stages) == best


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=60), st.integers(1, 16))
def test_every_layer_is_placed_once_and_no_stage_is_empty(costs: list[float], stages: int) -> None:
    assume(stages <= len(costs))
    counts = partition(costs, stages)
    check_counts(counts, len(costs), stages)
    assert partition(costs, stages) == counts


@given(st.integers(1, 200), st.integers(1, 40))
def test_equal_is_the_cut_of_equal_costs(layers: int, stages: int) -> None:
    assume(stages <= layers)
    counts = equal(layers, stages)
    assert counts == partition([1] * layers, stages)
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.integers(-1, 4), max_size=6), st.integers(1, 12), st.integers(1, 6))
def test_only_real_cuts_pass_the_check(counts: list[int], layers: int, stages: int) -> None:
    if stages <= layers and tuple(counts) in every_cut(layers, stages):
        check_counts(counts, layers, stages)
    else:
        with pytest.raises(SettingsError):
            check_counts(counts, layers, stages)
