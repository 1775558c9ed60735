"""Cutting layers into stages: known cuts, ties, and what a user may get wrong."""

from __future__ import annotations

import math

import pytest

from spectrain.coordinator.partition import LayerCost, check_counts, cost, equal, partition
from spectrain.protocol.errors import ExitCode, SettingsError


def layer(*, flops: int = 0, bytes_moved: int = 0, parameters: int = 0) -> LayerCost:
    return LayerCost(name="layer", flops=flops, bytes_moved=bytes_moved, parameters=parameters)


@pytest.mark.parametrize(
    ("costs", "stages", "counts"),
    [
        ([5], 1, (1,)),
        ([1, 2, 3], 1, (3,)),
        ([1, 2, 3], 3, (1, 1, 1)),
        ([1, 1, 1, 1, 1, 1], 3, (2, 2, 2)),
        ([4, 1, 1, 1, 1], 2, (1, 4)),
        ([1, 1, 1, 1, 4], 2, (4, 1)),
        ([1, 9, 1, 1], 3, (1, 1, 2)),
        ([0, 0, 0, 7, 0], 2, (1, 4)),
    ],
)
def test_the_costliest_stage_costs_least(
    costs: list[float], stages: int, counts: tuple[int, ...]
) -> None:
    assert partition(costs, stages) == counts


def test_of_cuts_with_one_pace_the_most_even_is_taken() -> None:
    """The last layer sets the pace; (1, 1, 10, 1) would be as fast on paper."""
    assert partition([1] * 12 + [10], 4) == (4, 4, 4, 1)


def test_pace_comes_before_evenness() -> None:
    """Stage costs 6, 2, 3 would have the smaller squares, but 1, 5, 5 have the better pace."""
    assert partition([1, 5, 2, 3], 3) == (1, 1, 2)


def test_of_equally_even_cuts_early_stages_get_fewer_layers() -> None:
    assert partition([1] * 9, 4) == (2, 2, 2, 3)
    assert partition([0] * 5, 3) == (1, 1, 3)


def test_rounding_does_not_decide_a_tie() -> None:
    """Sums of 0.1 differ in the last bit by where they start."""
    assert partition([0.1] * 9, 4) == partition([1] * 9, 4)


def test_the_unit_of_the_costs_does_not_matter() -> None:
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    assert partition([value * 2.0**-40 for value in costs], 3) == partition(costs, 3)


def test_more_stages_than_layers_is_a_settings_error_with_both_numbers() -> None:
    with pytest.raises(SettingsError, match=r"stages = 5, but the model has only 3 layers") as it:
        partition([1, 1, 1], 5)
    assert "Use --stages 3 or fewer" in str(it.value)
    assert it.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_cost_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=f"layer 1 costs {value}"):
        partition([1.0, value], 2)


def test_equal_counts_layers_only() -> None:
    assert equal(8, 4) == (2, 2, 2, 2)
    assert equal(10, 4) == (2, 2, 3, 3)
    assert equal(3, 3) == (1, 1, 1)


def test_equal_refuses_more_stages_than_layers() -> None:
    with pytest.raises(SettingsError, match=r"stages = 4, but the model has only 2 layers"):
        equal(2, 4)


def test_counts_that_fit_pass() -> None:
    check_counts((1, 4, 3), layers=8, stages=3)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ((4, 4), "partition = 4,4 names 2 stages, but stages = 3"),
        ((), "names 0 stages"),
        ((4, 0, 4), "partition = 4,0,4 leaves stage 1 without a layer"),
        ((5, -1, 4), "partition = 5,-1,4 leaves stage 1 without a layer"),
        ((4, 4, 4), "partition = 4,4,4 places 12 layers, but the model has 8"),
    ],
)
def test_counts_that_do_not_fit_are_refused(counts: tuple[int, ...], text: str) -> None:
    with pytest.raises(SettingsError, match=text) as caught:
        check_counts(counts, layers=8, stages=3)
    assert "Give 3 counts of at least 1 that sum to 8" in str(caught.value)


def test_counts_for_a_model_with_too_few_layers_are_refused() -> None:
    with pytest.raises(SettingsError, match="only 2 layers"):
        check_counts((1, 1, 1), layers=2, stages=3)


def test_cost_is_the_slower_of_arithmetic_and_memory() -> None:
    arithmetic = cost(layer(flops=10**12))
    memory = cost(layer(bytes_moved=10**9))
    assert arithmetic == pytest.approx(3 * 0.1)
    assert memory == pytest.approx(3 * 0.001)
    assert cost(layer(flops=10**12, bytes_moved=10**9)) == arithmetic


def test_parameters_cost_their_updates_even_if_hardly_read() -> None:
    assert cost(layer(parameters=10**9)) == pytest.approx(0.044)


def test_a_layer_that_does_nothing_costs_nothing() -> None:
    assert cost(layer()) == 0.0
