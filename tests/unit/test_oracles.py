"""Numbers known beforehand: plain PyTorch, trajectories computed by hand, closed forms.

The chain is ``y = w_{N-1} * ... * w_0 * 1`` with loss ``y**2 / 2``, one weight per stage, all 1 at
first; lr = 0.1, momentum 0.5. Rows are forward weight and backward weight of each mini-batch.
"""

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
    half_square,
    make_job,
    mlp,
    regression,
    sgd,
    train,
    train_chain,
    train_plainly,
)
from torch import Tensor, nn

from spectrain.protocol.settings import METHODS
from spectrain.protocol.staleness import predicted

SIX_DIGITS = 1e-6

TRAJECTORIES: dict[tuple[int, str], list[str]] = {
    (2, "vanilla"): [
        "1/1 1/.9 .9/.769 .769/.651516 .651516/.562403 .562403/.499856",
        "1/1 .9/.9 .76/.76 .62844/.62844 .525497/.525497 .451719/.451719",
    ],
    (2, "spectrain"): [
        "1/1 1/.9 .8/.769 .638/.657292 .545584/.575194 .493097/.517284",
        "1/1 .9/.9 .76/.76 .64136/.64136 .555934/.555934 .496673/.496673",
    ],
    (3, "vanilla"): [
        "1/1 1/.9 1/.7771 .9/.675674 .7771/.607153 .675674/.564734",
        "1/1 1/.9 .9/.769 .769/.651516 .651516/.568174 .568174/.515344",
        "1/1 .9/.9 .76/.76 .62844/.62844 .532558/.532558 .470965/.470965",
    ],
    (3, "spectrain"): [
        "1/1 1/.9 1/.7924 .7/.712844 .5772/.662866 .553733/.631493",
        "1/1 1/.9 .8/.786 .672/.696232 .606464/.641092 .585953/.607774",
        "1/1 .8/.8 .64/.64 .55808/.55808 .533382/.533382 .52031/.52031",
    ],
}

ENDS: dict[tuple[int, float, str], list[float]] = {
    (2, 0.5, "vanilla"): [0.457106, 0.400542],
    (2, 0.5, "spectrain"): [0.476164, 0.454966],
    (3, 0.5, "vanilla"): [0.539136, 0.483176, 0.433228],
    (3, 0.5, "spectrain"): [0.610467, 0.586252, 0.534433],
    (4, 0.5, "vanilla"): [0.588035, 0.543109, 0.488530, 0.439765],
    (4, 0.5, "spectrain"): [0.669138, 0.649054, 0.604685, 0.569383],
    (4, 0.0, "vanilla"): [0.743882, 0.716667, 0.688147, 0.666372],
    (1, 0.5, "spectrain"): [0.270416],
    (1, 0.0, "vanilla"): [0.531441],
}


@pytest.mark.parametrize(("stages", "method"), TRAJECTORIES)
def test_a_chain_follows_the_trajectory_computed_by_hand(stages: int, method: str) -> None:
    layers, _ = train_chain(stages, 6, method)
    for layer, row in zip(layers, TRAJECTORIES[stages, method], strict=True):
        pairs = [tuple(map(float, entry.split("/"))) for entry in row.split()]
        assert layer.forward_weights == pytest.approx([f for f, _ in pairs], abs=SIX_DIGITS)
        assert layer.backward_weights == pytest.approx([b for _, b in pairs], abs=SIX_DIGITS)


@pytest.mark.parametrize(("stages", "momentum", "method"), ENDS)
def test_a_chain_ends_where_computed_by_hand(stages: int, momentum: float, method: str) -> None:
    _, ends = train_chain(stages, 6, method, sgd(momentum=momentum))
    assert ends == pytest.approx(ENDS[stages, momentum, method], abs=SIX_DIGITS)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_flushed_chain_equals_serial_descent(stages: int) -> None:
    _, ends = train_chain(stages, 6, "sync")
    serial = {2: 0.477313, 3: 0.575280, 4: 0.634845}[stages]
    assert ends == pytest.approx([serial] * stages, abs=SIX_DIGITS)


def test_without_learning_rate_nothing_moves() -> None:
    for method in ("vanilla", "spectrain", "sync"):
        _, ends = train_chain(3, 5, method, sgd(lr=0.0))
        assert ends == [1, 1, 1]


# -- delayed quadratic: only stage k has a weight, so its loss is w**2 / 2 ------------------------

DELAYED: dict[tuple[int, str], list[float]] = {
    (0, "vanilla"): [1, 0.9, 0.8, 0.7, 0.6, 0.51, 0.43],
    (1, "vanilla"): [1, 0.9, 0.8, 0.7, 0.61, 0.53, 0.46],
    (2, "vanilla"): [1, 0.9, 0.8, 0.71, 0.63, 0.559, 0.496],
    (3, "vanilla"): [1, 0.9, 0.81, 0.729, 0.6561, 0.59049, 0.531441],
}

DELAYED_ENDS: dict[tuple[int, str], float] = {
    (0, "vanilla"): -0.213281,
    (0, "spectrain"): 0.056719,
    (1, "vanilla"): -0.093156,
    (1, "spectrain"): 0.126094,
    (2, "vanilla"): 0.033919,
    (2, "spectrain"): 0.222969,
    (3, "vanilla"): 0.139699,
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


def delayed_end(stage: int, method: str, momentum: float, batches: int) -> float:
    def model() -> nn.Sequential:
        return nn.Sequential(*(Quadratic() if k == stage else nn.Identity() for k in range(4)))

    job = make_job(model, loss=half_square, optimizer=sgd(lr=0.1, momentum=momentum))
    feed = ListFeed([(torch.zeros(1), torch.zeros(1))] * batches)
    return train(job, feed, [1] * 4, method).state[f"{stage}.weight"].item()


@pytest.mark.parametrize(("stage", "method"), DELAYED)
def test_a_delayed_quadratic_descends_as_computed(stage: int, method: str) -> None:
    for batches, expected in enumerate(DELAYED[stage, method][1:], start=1):
        assert delayed_end(stage, method, 0.0, batches) == pytest.approx(expected, abs=SIX_DIGITS)


@pytest.mark.parametrize(("stage", "method"), DELAYED_ENDS)
def test_a_delayed_quadratic_with_momentum_ends_as_computed(stage: int, method: str) -> None:
    expected = DELAYED_ENDS[stage, method]
    assert delayed_end(stage, method, 0.5, 8) == pytest.approx(expected, abs=SIX_DIGITS)


# -- plain PyTorch --------------------------------------------------------------------------------


def mlp_with_batch_norm() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True),
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 3),
    )  # fmt: skip


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": sgd(lr=0.05, momentum=0.9),
    "sgd with decay": sgd(lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": adamw(),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", [mlp, mlp_with_batch_norm])
@pytest.mark.parametrize("method", ["spectrain", "vanilla", "sync"])
def test_one_stage_is_plain_pytorch_bit_for_bit(
    method: str, model: Callable[[], nn.Module], optimizer: str
) -> None:
    job = make_job(model, optimizer=OPTIMIZERS[optimizer])
    feed = ListFeed(regression(12))
    state, losses = train_plainly(job, feed)
    outcome = train(job, feed, [7], method)
    assert_same_bits(outcome.state, state)
    assert [result.loss for result in outcome.batches] == losses


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


@pytest.mark.parametrize("method", ["spectrain", "vanilla", "sync"])
@pytest.mark.parametrize("batches", [1, 2, 3, 9])
def test_measured_staleness_is_the_predicted_one(method: str, batches: int) -> None:
    feed = ListFeed(regression(batches))
    outcome = train(make_job(mlp), feed, [2, 1, 2, 2], method)
    assert outcome.staleness == [predicted(METHODS[method], k, 4, feed.work) for k in range(4)]


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
