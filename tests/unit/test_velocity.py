"""The direction of the next update, read from optimizer state; which optimizers have one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from spectrain.protocol.errors import JobError
from spectrain.worker.segment import Segment
from spectrain.worker.velocity import Velocity
from spectrain.worker.weights import Weights

SHAPES = ((3, 4), (5,), (2, 2, 2))


class Rig:
    """An optimizer over flat parameters beside the same one over ordinary parameters."""

    def __init__(self, build: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        generator = torch.Generator().manual_seed(3)
        values = [torch.randn(shape, generator=generator) for shape in SHAPES]
        self.params = [nn.Parameter(value.clone()) for value in values]
        self.plain = [nn.Parameter(value.clone()) for value in values]
        self.optimizer = build(self.params)
        self.plain_optimizer = build(self.plain)
        group = self.optimizer.param_groups[0]
        self.segment = Segment(group, self.params, live_dtype=torch.float32, shared=False)
        self.velocity = Velocity(self.optimizer, [self.segment])
        self._generator = generator

    def step(self, *, without: int | None = None) -> None:
        for index, (param, plain) in enumerate(zip(self.params, self.plain, strict=True)):
            gradient = torch.randn(param.shape, generator=self._generator)
            param.grad = plain.grad = None if index == without else gradient
        self.optimizer.step()
        self.plain_optimizer.step()

    def directions(self) -> list[Tensor]:
        """Return v of each parameter, as far as ``clean - (clean - v)`` tells."""
        return [view.clone() for view in self.segment.views(self.flat_direction())]

    def flat_direction(self) -> Tensor:
        self.velocity.extrapolate(self.segment, 1, [1.0])
        return self.segment.clean - self.segment.live


FAMILIES: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "sgd dampening": lambda params: SGD(params, lr=0.1, momentum=0.9, dampening=0.3),
    "sgd decay": lambda params: SGD(params, lr=0.1, momentum=0.5, weight_decay=0.1),
    "sgd foreach": lambda params: SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda params: SGD(params, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda params: Adam(params, lr=0.1, betas=(0.8, 0.99)),
    "adam L2": lambda params: Adam(params, lr=0.1, weight_decay=0.1),
    "adamw foreach": lambda params: AdamW(params, lr=0.1, weight_decay=0, foreach=True),
    "adamw fused": lambda params: AdamW(params, lr=0.1, weight_decay=0, fused=True),
}


@pytest.fixture(params=FAMILIES)
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(FAMILIES[request.param])


def test_the_direction_is_what_the_last_update_multiplied_by_lr(rig: Rig) -> None:
    for _ in range(3):
        before = [param.detach().clone() for param in rig.params]
        rig.step()
        for old, new, direction in zip(before, rig.params, rig.directions(), strict=True):
            torch.testing.assert_close(new.detach(), old - 0.1 * direction)


def test_moving_the_state_does_not_change_training_by_a_bit(rig: Rig) -> None:
    for _ in range(4):
        rig.step()
        rig.directions()
    for param, plain in zip(rig.params, rig.plain, strict=True):
        assert torch.equal(param, plain)


def test_state_stays_where_it_was_moved(rig: Rig) -> None:
    rig.step()
    rig.directions()
    states = [dict(rig.optimizer.state[param]) for param in rig.params]
    rig.step()
    rig.directions()
    for state, param in zip(states, rig.params, strict=True):
        for key in {"momentum_buffer", "exp_avg", "exp_avg_sq"} & state.keys():
            assert rig.optimizer.state[param][key] is state[key]


def test_there_is_no_velocity_before_the_first_update(rig: Rig) -> None:
    assert not rig.flat_direction().any()


def test_loaded_state_is_predicted_at_once(rig: Rig) -> None:
    rig.step()
    saved = copy.deepcopy(rig.optimizer.state_dict())
    expected = rig.directions()
    rig.step()
    rig.directions()
    rig.optimizer.load_state_dict(saved)
    for direction, wanted in zip(rig.directions(), expected, strict=True):
        torch.testing.assert_close(direction, wanted, rtol=1e-5, atol=1e-6)


def test_saved_state_loads_into_a_plain_optimizer(rig: Rig) -> None:
    rig.step()
    rig.directions()
    rig.plain_optimizer.load_state_dict(copy.deepcopy(rig.optimizer.state_dict()))
    rig.step()
    for param, plain in zip(rig.params, rig.plain, strict=True):
        assert torch.equal(param, plain)


def test_a_parameter_that_never_had_a_gradient_has_no_velocity(rig: Rig) -> None:
    rig.step(without=1)
    directions = rig.directions()
    assert not directions[1].any()
    assert directions[0].all()


@pytest.mark.parametrize("family", ["sgd", "adam", "adamw foreach"])
def test_state_that_comes_later_is_moved_in_later(family: str) -> None:
    rig = Rig(FAMILIES[family])
    rig.step(without=1)
    rig.directions()
    rig.step()
    assert rig.directions()[1].any()
    for param, plain in zip(rig.params, rig.plain, strict=True):
        assert torch.equal(param, plain)


def test_padding_between_parameters_does_not_move(rig: Rig) -> None:
    for _ in range(3):
        rig.step()
    direction = rig.flat_direction()
    used = sum(param.numel() for param in rig.params)
    assert torch.count_nonzero(direction) <= used < direction.numel()


def test_decoupled_decay_is_not_predicted() -> None:
    rig = Rig(lambda params: AdamW(params, lr=0.1, weight_decay=0.5))
    for param in rig.params:
        param.grad = torch.zeros_like(param)
    before = rig.params[0].detach().clone()
    rig.optimizer.step()
    torch.testing.assert_close(rig.params[0].detach(), before * (1 - 0.1 * 0.5))
    assert not any(direction.any() for direction in rig.directions())


def _predict(rig: Rig, horizon: int) -> float:
    rig.velocity.extrapolate(rig.segment, horizon, [rig.segment.group["lr"]] * horizon)
    return rig.segment.views(rig.segment.live)[0].flatten()[0].item()


def _constant_gradient(build: Callable[[list[nn.Parameter]], Optimizer], updates: int) -> Any:
    """Return weights after 0..updates updates with gradient 1, and predictions 3 ahead of each."""
    rig = Rig(build)
    with torch.no_grad():
        for param in rig.params:
            param.fill_(1)
    weights, predictions = [1.0], [_predict(rig, 3)]
    for _ in range(updates):
        for param in rig.params:
            param.grad = torch.ones_like(param)
        rig.optimizer.step()
        weights.append(rig.params[0].flatten()[0].item())
        predictions.append(_predict(rig, 3))
    return weights, predictions


def test_momentum_under_a_constant_gradient_is_predicted_with_the_known_error() -> None:
    weights, predictions = _constant_gradient(lambda ps: SGD(ps, lr=0.1, momentum=0.5), 9)
    assert weights[:7] == pytest.approx([1, 0.9, 0.75, 0.575, 0.3875, 0.19375, -0.003125], abs=1e-6)
    assert predictions[1:7] == pytest.approx([0.6, 0.3, 0.05, -0.175, -0.3875, -0.59375])
    errors = [weights[t + 3] - predictions[t] for t in range(1, 7)]
    # -lr * c * u^t / (1 - u) * sum_{j=1..s} (1 - u^j)
    formula = [-0.1 * 0.5**t / 0.5 * (0.5 + 0.75 + 0.875) for t in range(1, 7)]
    assert errors == pytest.approx(formula, abs=1e-6)
    assert errors[0] == pytest.approx(-0.2125)
    assert errors[5] == pytest.approx(-0.006640625, abs=1e-6)


@pytest.mark.parametrize("family", [Adam, AdamW])
def test_adam_under_a_constant_gradient_is_predicted_exactly_from_the_first_update(
    family: type[Optimizer],
) -> None:
    weights, predictions = _constant_gradient(
        lambda params: family(params, lr=0.1, eps=0.0, weight_decay=0.0), 8
    )
    assert weights == pytest.approx([1 - 0.1 * t for t in range(9)], abs=1e-6)
    assert predictions[1:6] == pytest.approx(weights[4:9], abs=1e-6)


# -- without further gradients ----------------------------------------------------------------


def _coast(build: Callable[[list[nn.Parameter]], Optimizer], updates: int, ahead: int) -> Any:
    """Return what is predicted after some updates, and what updates without gradient lead to."""
    rig = Rig(build)
    rig.velocity = Velocity(rig.optimizer, [rig.segment], fades=True)
    for _ in range(updates):
        rig.step()
    rig.velocity.extrapolate(rig.segment, ahead, [0.1] * ahead)
    predicted = rig.segment.live.clone()
    for _ in range(ahead):
        for param in rig.params:
            param.grad = torch.zeros_like(param)
        rig.optimizer.step()
    return predicted, rig.segment.clean


@pytest.mark.parametrize("updates", [1, 2, 6])
@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_a_fading_momentum_is_exact_where_no_gradients_come(updates: int, ahead: int) -> None:
    predicted, weights = _coast(lambda ps: SGD(ps, lr=0.1, momentum=0.9), updates, ahead)
    torch.testing.assert_close(predicted, weights)


@pytest.mark.parametrize("family", [Adam, AdamW])
def test_fading_moments_are_exact_where_no_gradients_come_and_squares_stay(family: Any) -> None:
    predicted, weights = _coast(
        lambda ps: family(ps, lr=0.1, betas=(0.9, 1 - 1e-7), eps=1e-4, weight_decay=0), 4, 5
    )
    torch.testing.assert_close(predicted, weights, rtol=1e-3, atol=1e-3)


def test_a_fading_momentum_goes_less_far_the_further_it_goes() -> None:
    rig = Rig(FAMILIES["sgd"])
    fading = Velocity(rig.optimizer, [rig.segment], fades=True)
    rig.step()
    velocity = rig.flat_direction()
    for updates, distance in ((1, 0.9), (2, 1.71), (3, 2.439), (4, 3.0951)):
        fading.extrapolate(rig.segment, updates, [1.0] * updates)
        torch.testing.assert_close(rig.segment.live, rig.segment.clean - distance * velocity)


@pytest.mark.parametrize("fades", [True, False])
def test_each_update_ahead_has_its_own_learning_rate(*, fades: bool) -> None:
    rig = Rig(FAMILIES["sgd"])
    predictor = Velocity(rig.optimizer, [rig.segment], fades=fades)
    rig.step()
    velocity = rig.flat_direction()
    predictor.extrapolate(rig.segment, 2, [0.5, 0.25])
    distance = 0.5 * 0.9 + 0.25 * 0.81 if fades else 0.75
    torch.testing.assert_close(rig.segment.live, rig.segment.clean - distance * velocity)


def test_looking_ahead_may_go_by_the_learning_rates_to_come() -> None:
    asked: list[int] = []

    def schedule(update: int) -> float:
        asked.append(update)
        return 1 / (update + 1)

    layer = nn.Linear(2, 1, bias=False)
    weights = Weights(
        [("0", layer)], FAMILIES["sgd decay"], lr_schedule=schedule, predicts=True, foresees_lr=True
    )
    layer.weight.grad = torch.ones(1, 2)
    weights.collect_gradients()
    weights.step()
    (state,) = weights.optimizer.state.values()
    weights.predict(3)
    distance = 0.1 * (1 / 2 + 1 / 3 + 1 / 4)
    clean = weights.clean_state()["0.weight"]
    torch.testing.assert_close(layer.weight, clean - distance * state["momentum_buffer"])
    asked.clear()
    weights.predict(2)
    assert asked == []  # what is known already is not asked for again


# -- what cannot be predicted -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "build"),
    [
        ("SGD with momentum = 0", lambda ps: SGD(ps, lr=0.1)),
        ("SGD with nesterov", lambda ps: SGD(ps, lr=0.1, momentum=0.9, nesterov=True)),
        ("SGD with maximize", lambda ps: SGD(ps, lr=0.1, momentum=0.9, maximize=True)),
        ("Adam with amsgrad", lambda ps: Adam(ps, amsgrad=True)),
        ("AdamW with maximize", lambda ps: AdamW(ps, maximize=True)),
        ("RMSprop, whose", torch.optim.RMSprop),
        ("NAdam, whose", torch.optim.NAdam),
    ],
)
def test_an_optimizer_that_cannot_be_predicted_is_refused(found: str, build: Any) -> None:
    with pytest.raises(JobError, match=found) as refused:
        Velocity(build([nn.Parameter(torch.ones(1))]), [])
    assert "SGD with momentum" in str(refused.value)
    assert "--method vanilla" in str(refused.value)


def test_a_subclass_may_step_as_it_likes_and_is_refused() -> None:
    class MyAdam(Adam):
        pass

    with pytest.raises(JobError, match="MyAdam"):
        Velocity(MyAdam([nn.Parameter(torch.ones(1))]), [])


def test_one_unpredictable_group_is_enough_to_refuse() -> None:
    groups = [
        {"params": [nn.Parameter(torch.ones(1))]},
        {"params": [nn.Parameter(torch.ones(1))], "momentum": 0},
    ]
    with pytest.raises(JobError, match="momentum = 0"):
        Velocity(SGD(groups, lr=0.1, momentum=0.9), [])
