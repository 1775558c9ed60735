"""Trajectories computed by hand and closed forms, for methods whose delays and predictions differ.

The chain is ``y = w_{N-1} * ... * w_0 * 1`` with loss ``y**2 / 2``, one weight per stage, all 1 at
first; lr = 0.1, momentum 0.5. Rows are forward weight and backward weight of each mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipelines import ListFeed, half_square, make_job, sgd, train, train_chain
from torch import Tensor, nn

SIX_DIGITS = 1e-6
NO_MOMENTUM: dict[str, Any] = {"predictor": "last-delta"}
"""Without momentum the optimizer has no velocity; the last update is lr times the last gradient."""

TRAJECTORIES: dict[tuple[int, str], list[str]] = {
    (2, "vanilla"): [
        "1/1 1/.9 .9/.769 .769/.651516 .651516/.562403 .562403/.499856",
        "1/1 .9/.9 .76/.76 .62844/.62844 .525497/.525497 .451719/.451719",
    ],
    (2, "stash"): [
        "1/1 1/1 .9/.9 .769/.769 .651516/.651516 .562403/.562403",
        "1/1 .9/.9 .76/.76 .62844/.62844 .525497/.525497 .451719/.451719",
    ],
    (2, "spectrain"): [
        "1/1 1/.9 .8/.769 .638/.657292 .545584/.575194 .493097/.517284",
        "1/1 .9/.9 .76/.76 .64136/.64136 .555934/.555934 .496673/.496673",
    ],
    (2, "spectrain-v2"): [
        "1/1 1/1 .8/.8 .638/.638 .545584/.545584 .493097/.493097",
        "1/1 .9/.9 .76/.76 .64136/.64136 .555934/.555934 .496673/.496673",
    ],
    (3, "vanilla"): [
        "1/1 1/.9 1/.7771 .9/.675674 .7771/.607153 .675674/.564734",
        "1/1 1/.9 .9/.769 .769/.651516 .651516/.568174 .568174/.515344",
        "1/1 .9/.9 .76/.76 .62844/.62844 .532558/.532558 .470965/.470965",
    ],
    (3, "stash"): [
        "1/1 1/1 1/1 .9/.9 .769/.769 .656714/.656714",
        "1/1 1/1 .9/.9 .769/.769 .651516/.651516 .568174/.568174",
        "1/1 .9/.9 .76/.76 .62844/.62844 .532558/.532558 .471248/.471248",
    ],
    (3, "spectrain"): [
        "1/1 1/.9 1/.7924 .7/.712844 .5772/.662866 .553733/.631493",
        "1/1 1/.9 .8/.786 .672/.696232 .606464/.641092 .585953/.607774",
        "1/1 .8/.8 .64/.64 .55808/.55808 .533382/.533382 .52031/.52031",
    ],
    (3, "spectrain-v2"): [
        "1/1 1/1 1/1 .7/.7 .507/.507 .461601/.461601",
        "1/1 1/1 .8/.8 .638/.638 .545584/.545584 .519865/.519865",
        "1/1 .9/.9 .76/.76 .64136/.64136 .569248/.569248 .528836/.528836",
    ],
}

ENDS: dict[tuple[int, float, str], list[float]] = {
    (2, 0.5, "vanilla"): [0.457106, 0.400542],
    (2, 0.5, "stash"): [0.457106, 0.400542],
    (2, 0.5, "spectrain"): [0.476164, 0.454966],
    (2, 0.5, "spectrain-v2"): [0.476164, 0.454966],
    (3, 0.5, "vanilla"): [0.539136, 0.483176, 0.433228],
    (3, 0.5, "stash"): [0.503086, 0.483835, 0.434033],
    (3, 0.5, "spectrain"): [0.610467, 0.586252, 0.534433],
    (3, 0.5, "spectrain-v2"): [0.545540, 0.527129, 0.505585],
    (3, 0.5, "pipeoptim"): [0.561956, 0.526127, 0.504614],
    (4, 0.5, "vanilla"): [0.588035, 0.543109, 0.488530, 0.439765],
    (4, 0.5, "stash"): [0.513344, 0.507618, 0.489138, 0.440503],
    (4, 0.5, "spectrain"): [0.669138, 0.649054, 0.604685, 0.569383],
    (4, 0.5, "spectrain-v2"): [0.559675, 0.553226, 0.534147, 0.512379],
    (4, 0.5, "pipeoptim"): [0.605763, 0.570384, 0.533684, 0.511931],
    (4, 0.0, "vanilla"): [0.743882, 0.716667, 0.688147, 0.666372],
    (4, 0.0, "stash"): [0.706792, 0.700928, 0.689503, 0.667828],
    (4, 0.0, "spectrain"): [0.787047, 0.777641, 0.757914, 0.745460],
    (4, 0.0, "spectrain-v2"): [0.746687, 0.742053, 0.733493, 0.725950],
    (1, 0.5, "spectrain"): [0.270416],
    (1, 0.0, "vanilla"): [0.531441],
}

AVERAGED_ENDS: dict[tuple[int, str], list[float]] = {
    (3, "vanilla"): [0.688585, 0.663732, 0.645522],
    (3, "stash"): [0.673716, 0.664029, 0.645848],
    (3, "spectrain"): [0.724481, 0.713882, 0.694397],
    (3, "spectrain-v2"): [0.698342, 0.690549, 0.684460],
    (1, "spectrain"): [0.571606734],
}
"""With the paper's ``v = 0.5 * v + 0.5 * g`` from zero on."""


@pytest.mark.parametrize(("stages", "method"), TRAJECTORIES)
def test_a_chain_follows_the_trajectory_computed_by_hand(stages: int, method: str) -> None:
    layers, _ = train_chain(stages, 6, method)
    for layer, row in zip(layers, TRAJECTORIES[stages, method], strict=True):
        pairs = [tuple(map(float, entry.split("/"))) for entry in row.split()]
        assert layer.forward_weights == pytest.approx([f for f, _ in pairs], abs=SIX_DIGITS)
        assert layer.backward_weights == pytest.approx([b for _, b in pairs], abs=SIX_DIGITS)


@pytest.mark.parametrize(("stages", "momentum", "method"), ENDS)
def test_a_chain_ends_where_computed_by_hand(stages: int, momentum: float, method: str) -> None:
    options = NO_MOMENTUM if momentum == 0 and method.startswith("spectrain") else {}
    _, ends = train_chain(stages, 6, method, sgd(momentum=momentum), **options)
    assert ends == pytest.approx(ENDS[stages, momentum, method], abs=SIX_DIGITS)


def averaged_sgd(params: list[nn.Parameter]) -> torch.optim.SGD:
    """Return SGD in the paper's form: torch would take the first gradient undamped."""
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.5, dampening=0.5)
    for param in params:
        optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
    return optimizer


@pytest.mark.parametrize(("stages", "method"), AVERAGED_ENDS)
def test_a_chain_under_the_papers_averaged_gradient_ends_where_computed_by_hand(
    stages: int, method: str
) -> None:
    _, ends = train_chain(stages, 6, method, averaged_sgd)
    assert ends == pytest.approx(AVERAGED_ENDS[stages, method], abs=SIX_DIGITS)


@pytest.mark.parametrize("method", ["vanilla", "stash", "spectrain", "spectrain-v2", "pipeoptim"])
def test_a_chain_equals_the_one_that_predicts_by_the_last_update(method: str) -> None:
    """At a constant lr, momentum makes the last update minus lr times the velocity."""
    expected = ENDS.get((4, 0.5, method))
    looks_ahead = method not in ("vanilla", "stash")
    options = {"predictor": "last-delta"} if looks_ahead else {}
    assert train_chain(4, 6, method, **options)[1] == pytest.approx(expected, abs=SIX_DIGITS)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_flushed_chain_equals_serial_descent(stages: int) -> None:
    _, ends = train_chain(stages, 6, "sync")
    serial = {2: 0.477313, 3: 0.575280, 4: 0.634845}[stages]
    assert ends == pytest.approx([serial] * stages, abs=SIX_DIGITS)


WITHOUT_SPLITTING = (
    "spectrain", "spectrain-v2", "pipeoptim", "xpipe", "vanilla", "stash", "vertical-sync",
    "pipemare", "sync",
)  # fmt: skip


@pytest.mark.parametrize("method", WITHOUT_SPLITTING)
def test_without_learning_rate_nothing_moves(method: str) -> None:
    _, ends = train_chain(3, 5, method, sgd(lr=0.0))
    assert ends == [1, 1, 1]


@pytest.mark.parametrize("method", ["vanilla", "stash", "spectrain", "spectrain-v2", "pipeoptim"])
def test_updates_between_a_forward_and_its_backward_are_all_that_the_stage_is_behind(
    method: str,
) -> None:
    """Stage 0 of 4 reads in forward i what its weights were three updates before, or the first."""
    layers, _ = train_chain(4, 8, method)
    if method in ("vanilla", "pipeoptim"):
        newest = layers[0].backward_weights
        if method == "vanilla":
            assert layers[0].forward_weights == [newest[max(0, i - 3)] for i in range(8)]
    elif method != "spectrain":
        assert layers[0].forward_weights == layers[0].backward_weights


# -- delayed quadratic: only stage k has a weight, so its loss is w**2 / 2 ------------------------

BY_DELAY: list[list[float]] = [
    [1, 0.9, 0.81, 0.729, 0.6561, 0.59049, 0.531441],
    [1, 0.9, 0.8, 0.71, 0.63, 0.559, 0.496],
    [1, 0.9, 0.8, 0.7, 0.61, 0.53, 0.46],
    [1, 0.9, 0.8, 0.7, 0.6, 0.51, 0.43],
]
"""Without momentum: ``w -= 0.1 * (w of so many updates before, or the first)``."""

PREDICTED: dict[tuple[int, str], list[float]] = {
    (0, "spectrain-v2"): [1, 0.9, 0.8, 0.7, 0.6, 0.54, 0.49],
    (1, "spectrain-v2"): [1, 0.9, 0.8, 0.7, 0.63, 0.57, 0.52],
    (2, "spectrain-v2"): [1, 0.9, 0.8, 0.72, 0.65, 0.586, 0.528],
    (3, "spectrain-v2"): BY_DELAY[0],
    (0, "spectrain"): [1, 0.9, 0.8, 0.7, 0.6, 0.54, 0.49],
    (1, "spectrain"): [1, 0.9, 0.8, 0.7, 0.63, 0.57, 0.52],
    (2, "spectrain"): [1, 0.9, 0.8, 0.73, 0.67, 0.611, 0.556],
    (3, "spectrain"): [1, 0.9, 0.82, 0.746, 0.6788, 0.61764, 0.561992],
}

DELAYED_ENDS: dict[tuple[int, str], float] = {
    (0, "vanilla"): -0.213281,
    (0, "stash"): -0.213281,
    (0, "spectrain"): 0.056719,
    (0, "spectrain-v2"): 0.056719,
    (1, "vanilla"): -0.093156,
    (1, "spectrain"): 0.126094,
    (1, "spectrain-v2"): 0.126094,
    (2, "vanilla"): 0.033919,
    (2, "spectrain"): 0.222969,
    (2, "spectrain-v2"): 0.138494,
    (2, "pipeoptim"): 0.138494,
    (3, "vanilla"): 0.139699,
    (3, "stash"): 0.139699,
    (3, "spectrain-v2"): 0.139699,
    (3, "spectrain"): 0.222394,
}
"""After 8 updates of stage k of 4, momentum 0.5."""


class Quadratic(nn.Module):
    """``w + x``: its gradient is the loss's own, whatever stands before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight + x


def quadratic(
    stage: int, method: str, batches: int, *, momentum: float = 0.0, microbatches: int = 1,
    **options: Any,
) -> float:  # fmt: skip
    """Return the weight of ``stage`` of 4, the only one that has any, after so many updates."""

    def model() -> nn.Sequential:
        return nn.Sequential(*(Quadratic() if k == stage else nn.Identity() for k in range(4)))

    job = make_job(model, loss=half_square, optimizer=sgd(lr=0.1, momentum=momentum))
    pair = (torch.zeros(microbatches), torch.zeros(microbatches))
    feed = ListFeed([pair] * batches, microbatches=microbatches)
    return train(job, feed, [1] * 4, method, **options).state[f"{stage}.weight"].item()


def assert_descends(run: Callable[[int], float], expected: list[float]) -> None:
    assert [run(batches) for batches in range(1, len(expected))] == pytest.approx(
        expected[1:], abs=SIX_DIGITS
    )


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("method", ["vanilla", "stash"])
def test_gradients_are_as_old_as_the_stage_is_far_from_the_last(method: str, stage: int) -> None:
    assert_descends(lambda batches: quadratic(stage, method, batches), BY_DELAY[3 - stage])


@pytest.mark.parametrize("stage", range(4))
def test_under_vertical_sync_gradients_are_as_old_as_on_the_first_stage(stage: int) -> None:
    assert_descends(lambda batches: quadratic(stage, "vertical-sync", batches), BY_DELAY[3])


@pytest.mark.parametrize("microbatches", [3, 5])
@pytest.mark.parametrize("stage", range(4))
def test_under_2bw_gradients_are_one_update_old_everywhere(stage: int, microbatches: int) -> None:
    assert_descends(
        lambda batches: quadratic(stage, "2bw", batches, microbatches=microbatches), BY_DELAY[1]
    )


@pytest.mark.parametrize(("stage", "method"), PREDICTED)
def test_a_predicted_quadratic_descends_as_computed(stage: int, method: str) -> None:
    assert_descends(
        lambda batches: quadratic(stage, method, batches, **NO_MOMENTUM), PREDICTED[stage, method]
    )


@pytest.mark.parametrize(("stage", "method"), DELAYED_ENDS)
def test_a_delayed_quadratic_with_momentum_ends_as_computed(stage: int, method: str) -> None:
    expected = DELAYED_ENDS[stage, method]
    assert quadratic(stage, method, 8, momentum=0.5) == pytest.approx(expected, abs=SIX_DIGITS)


@pytest.mark.parametrize(
    ("method", "stage", "stable", "unstable"),
    [("vanilla", 2, 0.0255, 0.135), ("vanilla", 0, 0.0174, 0.0696),
     ("pipeoptim", 2, 0.135, 0.405), ("pipeoptim", 0, 0.036, 0.0964)],
)  # fmt: skip
def test_prediction_widens_the_range_of_stable_learning_rates_at_high_momentum(
    method: str, stage: int, stable: float, unstable: float
) -> None:
    """Limits at momentum 0.9: delay 1: .1, predicted .27; delay 3: .0348, predicted .0723."""

    def end(lr: float) -> float:
        def model() -> nn.Sequential:
            return nn.Sequential(*(Quadratic() if k == stage else nn.Identity() for k in range(4)))

        job = make_job(model, loss=half_square, optimizer=sgd(lr=lr, momentum=0.9))
        feed = ListFeed([(torch.zeros(1), torch.zeros(1))] * 400)
        return abs(train(job, feed, [1] * 4, method).state[f"{stage}.weight"].item())

    assert end(stable) < 0.1
    assert end(unstable) > 10
