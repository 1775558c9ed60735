"""Cuts a model's layers into stages from their costs. Pure: it measures nothing and builds nothing.

The cut decides how stale each layer's weights are and with that the trained weights themselves,
so it must come out the same on every run and every machine: costs are counted, not timed, and
compared exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from ..protocol.errors import SettingsError

__all__ = ["LayerCost", "check_counts", "cost", "equal", "partition"]

FLOPS_PER_S = 10e12
"""Arithmetic of a nominal device in fp32; only its ratio to ``BYTES_PER_S`` moves a cut."""

BYTES_PER_S = 1e12
"""Memory traffic of the same device: ten operations per byte, as CPUs and GPUs of today have."""

FORWARDS_PER_BATCH = 3
"""A backward makes two products, by input and by weight, for the forward's one."""

UPDATE_BYTES_PER_PARAMETER = 44
"""Traffic of fp32 weights per batch, 4 bytes each: two predictions that read weight and velocity
and write the live weight (24), one update that reads both and the gradient and writes both (20).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer was counted to do in one forward of one mini-batch.

    Attributes:
        name: the layer's name in the model.
        flops: floating-point operations.
        bytes_moved: bytes of its inputs, outputs and parameters.
        parameters: how many trainable numbers it has.
    """

    name: str
    flops: int
    bytes_moved: int
    parameters: int


def cost(layer: LayerCost) -> float:
    """Estimate the seconds one mini-batch costs in ``layer`` on a nominal device, 0 or more.

    A roofline: a pass takes as long as the slower of arithmetic and memory. The traffic of
    prediction and update comes on top, and dominates for a layer with many rarely used parameters.
    """
    forward_s = max(layer.flops / FLOPS_PER_S, layer.bytes_moved / BYTES_PER_S)
    update_s = layer.parameters * UPDATE_BYTES_PER_PARAMETER / BYTES_PER_S
    return FORWARDS_PER_BATCH * forward_s + update_s


def partition(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return how many layers each stage gets, so that the costliest stage costs least.

    The costliest stage sets the pace of the pipeline. Among cuts of one pace the most even one is
    taken (least sum of squared stage costs), for an estimate may be wrong about which stage is
    costliest; among those, the one with the fewest layers on the earliest stages, which keep the
    most batches in flight and have the stalest weights.

    Args:
        costs: of each layer in order, finite and at least 0, in any one unit.
        stages: at least 1.

    Returns:
        Layer counts per stage, in order, each at least 1; they sum to ``len(costs)``.

    Raises:
        SettingsError: there are more stages than layers.
        ValueError: a cost is negative, infinite or NaN.
    """
    _check_enough(len(costs), stages)
    exact = _exact(costs)
    return _most_even(exact, stages, limit=_least_limit(exact, stages))


def equal(layers: int, stages: int) -> tuple[int, ...]:
    """Return layer counts that differ by one at most, the larger ones on the last stages.

    Raises:
        SettingsError: there are more stages than layers.
    """
    _check_enough(layers, stages)
    each, rest = divmod(layers, stages)
    return (each,) * (stages - rest) + (each + 1,) * rest


def check_counts(counts: Sequence[int], layers: int, stages: int) -> None:
    """Check that ``counts``, as the user gave them, cut ``layers`` layers into ``stages`` stages.

    Raises:
        SettingsError: they do not; the text says in what.
    """
    _check_enough(layers, stages)
    text = f"partition = {','.join(map(str, counts))}"
    advice = f"Give {stages} counts of at least 1 that sum to {layers}, or use partition = auto."
    if len(counts) != stages:
        raise SettingsError(f"{text} names {len(counts)} stages, but stages = {stages}. {advice}")
    if min(counts) < 1:
        raise SettingsError(
            f"{text} leaves stage {list(counts).index(min(counts))} without a layer. {advice}"
        )
    if sum(counts) != layers:
        raise SettingsError(
            f"{text} places {sum(counts)} layers, but the model has {layers}. {advice}"
        )


def _check_enough(layers: int, stages: int) -> None:
    assert stages >= 1, f"{stages} stages"
    if layers < stages:
        raise SettingsError(
            f"stages = {stages}, but the model has only {layers} layers, and every stage needs at "
            f"least one. Use --stages {max(layers, 1)} or fewer, or give the model's nn.Sequential "
            f"more layers."
        )


def _exact(costs: Sequence[float]) -> list[int]:
    """Scale ``costs`` to whole numbers without rounding, so that equal sums compare equal."""
    for index, value in enumerate(costs):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"layer {index} costs {value}: a cost is finite and at least 0")
    fractions = [Fraction(value) for value in costs]
    # Denominators of floats are powers of two, so the largest is a multiple of all others.
    scale = max(value.denominator for value in fractions)
    return [int(value * scale) for value in fractions]


def _least_limit(costs: Sequence[int], stages: int) -> int:
    """Return the least cost that no stage need exceed, by bisection."""
    low, high = max(costs), sum(costs)
    while low < high:
        limit = (low + high) // 2
        if _stages_needed(costs, limit) <= stages:
            high = limit
        else:
            low = limit + 1
    return low


def _stages_needed(costs: Sequence[int], limit: int) -> int:
    """Fill one stage after the other up to ``limit``; no way needs fewer stages."""
    stages, load = 1, 0
    for value in costs:
        load += value
        if load > limit:
            stages, load = stages + 1, value
    return stages


def _most_even(costs: Sequence[int], stages: int, *, limit: int) -> tuple[int, ...]:
    """Return the cut of least squared stage costs, none above ``limit``, by dynamic programming.

    Works from the last stage back to the first, so that of equally good cuts the earlier stages
    can take the fewest layers.
    """
    layers = len(costs)
    before = [0, *accumulate(costs)]  # before[i]: cost of the layers 0..i-1
    least: list[int | None] = [None] * layers + [0]  # least[i]: squares, layers i.. on the rest
    taken: list[list[int]] = []  # taken[-1 - k][i]: layers of stage k if it begins with layer i
    for _ in range(stages):
        squares: list[int | None] = [None] * (layers + 1)
        counts = [0] * (layers + 1)
        for first in range(layers):
            for end in range(first + 1, layers + 1):
                load = before[end] - before[first]
                if load > limit:
                    break
                rest = least[end]
                best = squares[first]
                if rest is not None and (best is None or load * load + rest < best):
                    squares[first] = load * load + rest
                    counts[first] = end - first
        least = squares
        taken.append(counts)
    result: list[int] = []
    for counts in reversed(taken):
        result.append(counts[sum(result)])
    return tuple(result)
