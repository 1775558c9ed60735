"""What each method makes the layers read, and that settings and methods know each other."""

from __future__ import annotations

import pytest
import torch
from pipelines import sgd
from torch import nn

from spectrain.protocol.schedule import Kind, Op, Schedule, Work, stage_ops
from spectrain.protocol.settings import METHODS
from spectrain.protocol.staleness import with_versions
from spectrain.worker import methods
from spectrain.worker.methods.spectrain import SpecTrain
from spectrain.worker.weights import Weights


def test_every_method_of_the_settings_exists_under_its_name() -> None:
    assert set(methods.METHODS) == set(METHODS)


def test_only_spectrain_predicts() -> None:
    assert {name for name, method in methods.METHODS.items() if method(0, 4).predicts} == {
        "spectrain"
    }


@pytest.mark.parametrize("name", ["vanilla", "sync"])
@pytest.mark.parametrize("op", ["F9", "B9"])
def test_vanilla_and_sync_read_the_newest_weights(name: str, op: str) -> None:
    assert methods.METHODS[name](3, 8).horizon(Op.parse(op), 2) == 0


def test_spectrain_counts_the_updates_until_its_own_and_half_the_stages_before() -> None:
    assert SpecTrain(2, 8).horizon(Op.parse("F5"), 2) == 5 - 2 + 2 // 2


@pytest.mark.parametrize("stages", range(1, 9))
def test_spectrain_says_whether_a_stage_ever_looks_ahead(stages: int) -> None:
    work = Work(train_batches=3 * stages, epoch_batches=3 * stages)
    for stage in range(stages):
        method = SpecTrain(stage, stages)
        ops = with_versions(stage_ops(Schedule.ASYNCHRONOUS, stage, stages, work))
        reads = [(op, version) for op, version in ops if op.kind is not Kind.UPDATE]
        assert method.predicts == any(method.horizon(op, version) for op, version in reads)


@pytest.mark.parametrize("stages", range(1, 17))
def test_spectrain_looks_as_far_ahead_as_the_paper_in_steady_state(stages: int) -> None:
    work = Work(train_batches=3 * stages, epoch_batches=3 * stages)
    for stage in range(stages):
        method = SpecTrain(stage, stages)
        expected = {
            Kind.FORWARD: stage // 2 + stages - stage - 1,
            Kind.BACKWARD: stage // 2,
        }
        for op, version in with_versions(stage_ops(Schedule.ASYNCHRONOUS, stage, stages, work)):
            if op.kind in expected and op.batch >= stages:  # the pipeline is full
                assert method.horizon(op, version) == expected[op.kind], f"{op} on stage {stage}"


def test_prediction_leaves_buffers_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    weights = Weights(list(model.named_children()), sgd(), predicts=True)
    model(torch.randn(4, 2)).pow(3).sum().backward()
    weights.collect_gradients()
    weights.step()
    mean = model[0].running_mean.clone()
    weights.predict(SpecTrain(1, 4).horizon(Op.parse("F9"), weights.version))
    assert torch.equal(model[0].running_mean, mean)
