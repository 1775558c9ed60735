"""What each method makes the layers read, and that settings and methods know each other."""

from __future__ import annotations

import pytest
import torch
from pipelines import assert_same_bits, mlp, sgd
from torch import nn

from spectrain.protocol.schedule import Kind, Op, Schedule, Work, stage_ops
from spectrain.protocol.settings import METHODS
from spectrain.worker.methods import method_named
from spectrain.worker.weights import Weights


class Recorder(Weights):
    """Weights that remember how far ahead they were asked to look."""

    def __init__(self, updates: int = 0) -> None:
        self.model = mlp()
        self.horizons: list[int] = []
        super().__init__(list(self.model.named_children()), sgd(), predicts=True)
        for _ in range(updates):
            self.model(torch.ones(1, 5)).sum().backward()
            self.collect_gradients()
            self.step()

    def predict(self, horizon: int) -> None:
        self.horizons.append(horizon)
        super().predict(horizon)


def test_every_method_of_the_settings_exists_under_its_name() -> None:
    assert {method_named(name).name for name in METHODS} == set(METHODS)


def test_an_unknown_method_is_no_method() -> None:
    with pytest.raises(KeyError):
        method_named("oracle")


def test_only_spectrain_predicts() -> None:
    assert {name for name in METHODS if method_named(name).predicts} == {"spectrain"}


@pytest.mark.parametrize("name", ["vanilla", "sync"])
@pytest.mark.parametrize("op", ["F9", "B9"])
def test_vanilla_and_sync_read_clean_weights(name: str, op: str) -> None:
    weights = Recorder(updates=2)
    method_named(name).prepare(weights, Op.parse(op), 3)
    assert weights.horizons == []
    assert_same_bits(weights.model.state_dict(), weights.clean_state())


def test_spectrain_reads_predicted_weights() -> None:
    weights = Recorder(updates=2)
    method_named("spectrain").prepare(weights, Op.parse("F5"), 2)
    expected = {
        name: clean - 4 * 0.1 * weights.optimizer.state[param]["momentum_buffer"]
        for (name, clean), param in zip(
            weights.clean_state().items(), weights.optimizer.param_groups[0]["params"], strict=True
        )
    }
    assert weights.horizons == [4]  # 5 - 2 updates until its own, and 2 // 2 beyond
    for name, param in weights.model.named_parameters():
        torch.testing.assert_close(param.detach(), expected[name])


@pytest.mark.parametrize("stages", range(1, 17))
def test_spectrain_looks_as_far_ahead_as_the_paper_in_steady_state(stages: int) -> None:
    method = method_named("spectrain")
    for stage in range(stages):
        weights = Recorder()
        work = Work(train_batches=3 * stages, epoch_batches=3 * stages)
        for op in stage_ops(Schedule.ASYNCHRONOUS, stage, stages, work):
            if op.kind is Kind.UPDATE:
                weights.step()
            elif op.batch >= stages:  # the pipeline is full
                method.prepare(weights, op, stage)
                forward = stage // 2 + stages - stage - 1
                expected = forward if op.kind is Kind.FORWARD else stage // 2
                assert weights.horizons.pop() == expected, f"{op} on stage {stage} of {stages}"
                weights.restore()


def test_prediction_leaves_buffers_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    weights = Weights(list(model.named_children()), sgd(), predicts=True)
    model(torch.randn(4, 2)).pow(3).sum().backward()
    weights.collect_gradients()
    weights.step()
    mean = model[0].running_mean.clone()
    method_named("spectrain").prepare(weights, Op.parse("F9"), 1)
    assert torch.equal(model[0].running_mean, mean)
