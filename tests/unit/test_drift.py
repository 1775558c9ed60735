"""Looking ahead by the last update, and back along the average of all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pipelines import adamw, nadam, sgd
from torch import Tensor, nn

from spectrain.worker.drift import Drift, LastDelta
from spectrain.worker.weights import Weights


class Rig:
    """One weight matrix with gradients at will."""

    def __init__(self, optimizer: Any, predictor: Any = LastDelta, **options: Any) -> None:
        self.model = nn.Sequential(nn.Linear(4, 3, bias=False))
        self.generator = torch.Generator().manual_seed(5)
        self.weights = Weights(
            [("0", self.model[0])], optimizer, predicts=True, predictor=predictor, **options
        )

    def step(self, gradient: float | None = None) -> None:
        param = self.model[0].weight
        values = torch.randn(param.shape, generator=self.generator)
        param.grad = (values if gradient is None else torch.full_like(values, gradient)).to(param)
        self.weights.collect_gradients()
        self.weights.step()

    def clean(self) -> Tensor:
        return self.weights.clean_state()["0.weight"].clone()

    def ahead(self, updates: int) -> Tensor:
        self.weights.predict(updates)
        return self.model[0].weight.detach().clone()


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd without momentum": sgd(momentum=0.0),
    "sgd nesterov": sgd(momentum=0.9, nesterov=True),
    "adamw": adamw(weight_decay=0.5),
    "nadam": nadam,
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_last_update_is_done_again_whatever_the_optimizer(optimizer: str) -> None:
    rig = Rig(OPTIMIZERS[optimizer])
    for _ in range(3):
        before = rig.clean()
        rig.step()
        now = rig.clean()
        torch.testing.assert_close(rig.ahead(3), now + 3 * (now - before))
        assert torch.equal(rig.clean(), now)


@pytest.mark.parametrize("predictor", [LastDelta, partial(Drift, decay=0.5)])
def test_before_the_first_update_nothing_moves(predictor: Any) -> None:
    rig = Rig(sgd(), predictor)
    assert torch.equal(rig.ahead(4), rig.clean())


def test_under_momentum_the_last_update_is_lr_times_velocity() -> None:
    rig = Rig(sgd(lr=0.1, momentum=0.9, weight_decay=0.01))
    for _ in range(4):
        rig.step()
        (state,) = rig.weights.optimizer.state.values()
        expected = rig.clean() - 5 * 0.1 * state["momentum_buffer"]
        torch.testing.assert_close(rig.ahead(5), expected)


def test_the_drift_is_the_average_of_all_updates() -> None:
    decay, rig = 0.75, Rig(sgd(momentum=0.0), partial(Drift, decay=0.75))
    average = torch.zeros(3, 4)
    for _ in range(5):
        before = rig.clean()
        rig.step()
        average = decay * average + (1 - decay) * (rig.clean() - before)
        torch.testing.assert_close(rig.ahead(-2), rig.clean() - 2 * average)


def test_under_a_constant_drift_looking_back_finds_what_was_there() -> None:
    rig = Rig(sgd(lr=0.1, momentum=0.0), partial(Drift, decay=0.5))
    weights = []
    for _ in range(30):
        weights.append(rig.clean())
        rig.step(gradient=1.0)
    torch.testing.assert_close(rig.ahead(-3), weights[-3])


@pytest.mark.parametrize("predictor", [LastDelta, partial(Drift, decay=0.5)])
def test_it_goes_on_after_a_restart_as_if_nothing_had_happened(predictor: Any) -> None:
    rig, other = Rig(adamw(), predictor), Rig(adamw(), predictor)
    for _ in range(3):
        rig.step()
    other.generator.set_state(rig.generator.get_state())
    memory = {name: tensor.clone() for name, tensor in rig.weights.memory().items()}
    clean = [tensor.clone() for tensor in rig.weights.clean]
    state = copy.deepcopy(rig.weights.optimizer.state_dict())
    other.weights.resume(3, clean, state, memory)
    assert torch.equal(rig.ahead(2), other.ahead(2))
    for each in (rig, other):
        each.step()
    assert torch.equal(rig.ahead(2), other.ahead(2))


def test_a_bf16_look_is_computed_in_fp32_and_rounded_once() -> None:
    rig = Rig(sgd(), live_dtype=torch.bfloat16)
    before = rig.clean()
    rig.step()
    now = rig.clean()
    assert torch.equal(rig.ahead(2), (now + 2 * (now - before)).bfloat16())


def test_its_memory_is_counted() -> None:
    assert Rig(sgd()).weights.copies == Rig(sgd(), partial(Drift, decay=0.5)).weights.copies == 3
