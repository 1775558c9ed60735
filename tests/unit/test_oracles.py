"""What any method must not change: plain PyTorch, evaluation, dropout, sizes, precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipelines import (
    ListFeed,
    Pair,
    adamw,
    assert_same_bits,
    least_microbatches,
    make_job,
    mlp,
    nadam,
    regression,
    sgd,
    train,
    train_plainly,
)
from torch import Tensor, nn

from spectrain.protocol.methods import METHODS
from spectrain.protocol.staleness import predicted

# -- plain PyTorch --------------------------------------------------------------------------------


def mlp_with_batch_norm() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True),
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 3),
    )  # fmt: skip


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": sgd(lr=0.05, momentum=0.9),
    "sgd with decay": sgd(lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": adamw(),
    "NAdam": nadam,
}


PAIRS = [
    (method, optimizer)
    for method, spec in METHODS.items()
    for optimizer in OPTIMIZERS
    if not spec.optimizers or optimizer in spec.optimizers
]


@pytest.mark.parametrize(("method", "optimizer"), PAIRS)
@pytest.mark.parametrize("model", [mlp, mlp_with_batch_norm])
def test_one_stage_is_plain_pytorch_bit_for_bit(
    method: str, model: Callable[[], nn.Module], optimizer: str
) -> None:
    job = make_job(model, optimizer=OPTIMIZERS[optimizer])
    feed = ListFeed(regression(12), microbatches=least_microbatches(method, 1))
    state, losses = train_plainly(job, feed)
    outcome = train(job, feed, [7], method)
    assert_same_bits(outcome.state, state)
    assert [result.loss for result in outcome.batches] == pytest.approx(losses, rel=1e-6)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("method", ["stash", "spectrain", "spectrain-v2", "pipeoptim", "2bw"])
@pytest.mark.parametrize("stages", [1, 3])
def test_muon_trains_under_methods_that_need_no_velocity(method: str, stages: int) -> None:
    def matrices() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(3)))

    job = make_job(matrices, optimizer=lambda params: torch.optim.Muon(params, lr=0.02))
    microbatches = least_microbatches(method, stages)
    feed = ListFeed(regression(1, outputs=5) * 40, microbatches=microbatches)
    predictor = "last-delta" if METHODS[method].predictors else "velocity"
    outcome = train(job, feed, [3 // stages] * stages, method, predictor=predictor)
    if stages == 1:
        assert_same_bits(outcome.state, train_plainly(job, feed)[0])
    assert outcome.batches[-1].loss < 0.9 * outcome.batches[0].loss


@pytest.mark.parametrize("counts", [[3, 4], [1, 2, 1, 3], [1] * 7])
@pytest.mark.parametrize("model", [mlp, mlp_with_batch_norm])
def test_sync_is_plain_pytorch_bit_for_bit_however_the_model_is_cut(
    counts: list[int], model: Callable[[], nn.Module]
) -> None:
    job = make_job(model, optimizer=sgd(lr=0.05, momentum=0.9))
    feed = ListFeed(regression(10))
    state, losses = train_plainly(job, feed)
    outcome = train(job, feed, counts, "sync")
    assert_same_bits(outcome.state, state)
    assert [result.loss for result in outcome.batches] == losses


@pytest.mark.parametrize("microbatches", [2, 3, 7])
def test_sync_with_micro_batches_is_plain_pytorch_to_rounding(microbatches: int) -> None:
    job = make_job(mlp, optimizer=sgd(lr=0.05, momentum=0.9))
    pairs = regression(10, rows=7)  # 7 samples: micro-batches of different sizes
    state, losses = train_plainly(job, ListFeed(pairs))
    feed = ListFeed(pairs, microbatches=microbatches)
    outcome = train(job, feed, [3, 2, 2], "sync")
    for name, tensor in outcome.state.items():
        torch.testing.assert_close(tensor, state[name])
    assert [result.loss for result in outcome.batches] == pytest.approx(losses, rel=1e-5)
    assert {result.samples for result in outcome.batches} == {7}


def test_initial_weights_do_not_depend_on_the_cut() -> None:
    job = make_job(mlp, optimizer=sgd(lr=0.0))
    feed = ListFeed(regression(1))
    states = [train(job, feed, counts, "vanilla", seed=3).state for counts in ([7], [3, 4])]
    assert_same_bits(*states)
    other = train(job, feed, [7], "vanilla", seed=4).state
    assert not torch.equal(other["0.weight"], states[0]["0.weight"])


# -- asynchronous runs ----------------------------------------------------------------------------


def noisy() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 8), nn.Dropout(0.3), nn.ReLU(),
        nn.Linear(8, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


def test_dropout_does_not_depend_on_the_cut() -> None:
    job, feed = make_job(noisy), ListFeed(regression(6))
    states = [train(job, feed, counts, "sync").state for counts in ([7], [2, 5], [1] * 7)]
    for state in states[1:]:
        assert_same_bits(state, states[0])


@pytest.mark.parametrize("method", ["spectrain", "vanilla", "sync"])
def test_two_runs_with_one_seed_end_with_the_same_bits(method: str) -> None:
    job, feed = make_job(noisy), ListFeed(regression(9))
    runs = [train(job, feed, [2, 2, 3], method) for _ in range(2)]
    assert_same_bits(runs[0].state, runs[1].state)
    assert runs[0].batches == runs[1].batches


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batches", [1, 2, 3, 9])
def test_measured_staleness_is_the_predicted_one(method: str, batches: int) -> None:
    feed = ListFeed(regression(batches), microbatches=least_microbatches(method, 4))
    job = make_job(mlp, optimizer=nadam if method == "nesterov" else None)
    outcome = train(job, feed, [2, 1, 2, 2], method)
    assert outcome.staleness == [
        predicted(METHODS[method].schedule, k, 4, feed.work) for k in range(4)
    ]


@pytest.mark.parametrize("method", ["spectrain", "vanilla", "sync"])
def test_evaluation_in_between_changes_no_weight(method: str) -> None:
    job = make_job(noisy)
    pairs = regression(8)
    plain = train(job, ListFeed(pairs, epoch_batches=3), [2, 2, 3], method)
    test = regression(2, rows=4)
    evaluated = train(job, ListFeed(pairs, test=test, epoch_batches=3), [2, 2, 3], method)
    assert_same_bits(plain.state, evaluated.state)
    assert [result.round for result in evaluated.evaluations] == [0, 1, 2]


def test_evaluation_reads_the_weights_after_the_same_update_on_every_stage() -> None:
    job = make_job(mlp)
    pairs, test = regression(8), regression(2, rows=4)
    rounds = train(job, ListFeed(pairs, test=test, epoch_batches=4), [2, 2, 3]).evaluations
    for count, result in ((4, rounds[0]), (8, rounds[1])):
        model = mlp()
        # Later batches had no part in these weights, so a shorter run ends with them.
        model.load_state_dict(train(job, ListFeed(pairs[:count]), [2, 2, 3]).state)
        losses = [job.loss(model(inputs), targets).item() for inputs, targets in test]
        assert result.loss == pytest.approx(sum(losses) / 2, rel=1e-6)
        assert result.samples == 8


def test_shapes_may_change_with_every_batch() -> None:
    rows = (6, 1, 4, 9, 2)
    pairs: list[Pair] = [regression(1, rows=count)[0] for count in rows]
    job, feed = make_job(mlp, optimizer=sgd(lr=0.05, momentum=0.9)), ListFeed(pairs)
    state, _ = train_plainly(job, feed)
    assert_same_bits(train(job, feed, [3, 4], "sync").state, state)
    outcome = train(job, feed, [3, 4], "spectrain")
    assert [result.samples for result in outcome.batches] == list(rows)


class Masked(nn.Module):
    """One layer of several that hand on ``(activations, mask, None)``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: tuple[Tensor, Tensor, None]) -> tuple[Tensor, Tensor, None]:
        x, mask, rest = value
        return self.linear(x) * mask, mask, rest


class First(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor, None]) -> Tensor:
        return value[0]


def test_an_integer_mask_and_none_cross_every_boundary() -> None:
    generator = torch.Generator().manual_seed(1)
    pairs: list[Pair] = [
        (
            (torch.randn(3, 4, generator=generator), torch.tensor([[1], [0], [1]]), None),
            torch.zeros(3, 4),
        )
        for _ in range(5)
    ]
    job = make_job(lambda: nn.Sequential(Masked(), Masked(), Masked(), First()))
    feed = ListFeed(pairs)
    state, _ = train_plainly(job, feed)
    assert_same_bits(train(job, feed, [1] * 4, "sync").state, state)


@pytest.mark.parametrize("frozen", [(0,), (2,), (0, 2), (0, 2, 4, 6)])
@pytest.mark.parametrize("method", ["sync", "spectrain"])
def test_frozen_stages_train_as_frozen_layers_do(frozen: tuple[int, ...], method: str) -> None:
    def model() -> nn.Sequential:
        built = mlp()
        for index in frozen:
            built[index].requires_grad_(False)
        return built

    job = make_job(model, optimizer=sgd(lr=0.05, momentum=0.9))
    feed = ListFeed(regression(6))
    outcome = train(job, feed, [2, 2, 2, 1], method)
    before = job.build_model(0, {}).state_dict()
    changed = {name for name, tensor in outcome.state.items() if not tensor.equal(before[name])}
    assert changed == {name for name in before if int(name[0]) not in frozen}
    if method == "sync" and len(frozen) < 4:
        assert_same_bits(outcome.state, train_plainly(job, feed)[0])


@pytest.mark.parametrize("method", ["spectrain", "vanilla", "sync"])
def test_bf16_trains_like_fp32_to_its_precision(method: str) -> None:
    job = make_job(mlp_with_batch_norm, optimizer=sgd(lr=0.02, momentum=0.9))
    feed = ListFeed(regression(1) * 30)
    losses = {
        precision: train(job, feed, [2, 2, 3], method, precision=precision).batches[-1].loss
        for precision in ("fp32", "bf16")
    }
    first = train(job, feed, [7], method).batches[0].loss
    assert losses["bf16"] == pytest.approx(losses["fp32"], abs=0.1 * first)
    assert losses["bf16"] < 0.6 * first


def test_lr_of_a_batch_is_that_of_its_update() -> None:
    job = make_job(mlp, optimizer=sgd(lr=0.5), lr_schedule=lambda update: 0.5**update)
    outcome = train(job, ListFeed(regression(4)), [3, 4])
    assert [result.lr for result in outcome.batches] == [0.5, 0.25, 0.125, 0.0625]
