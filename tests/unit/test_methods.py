"""What each method makes the layers read, what it costs, and what it cannot work with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipelines import (
    ListFeed,
    build_all,
    join,
    least_microbatches,
    make_job,
    mlp,
    nadam,
    regression,
    sgd,
    train,
)
from torch import nn

from spectrain.protocol.errors import JobError
from spectrain.protocol.methods import METHODS, PREDICTORS, remembered_copies
from spectrain.protocol.schedule import Kind, Op, Schedule, Work, stage_ops
from spectrain.protocol.staleness import with_versions
from spectrain.worker import methods
from spectrain.worker.methods import Method, Place
from spectrain.worker.pipeline import drive
from spectrain.worker.reading import NEWEST, Ahead, Kept, Reading, Version
from spectrain.worker.weights import Weights


def method(name: str, stage: int, stages: int, **options: Any) -> Method:
    return methods.METHODS[name](Place(stage=stage, stages=stages, **options))


def reads(
    name: str, stage: int, stages: int, *, batches: int = 12, microbatches: int = 1, **options: Any
) -> dict[str, Reading]:
    """Return what every pass of a short run reads, by op."""
    chosen = method(name, stage, stages, microbatches=microbatches, **options)
    work = Work(train_batches=batches, epoch_batches=99, microbatches=microbatches)
    found: dict[str, Reading] = {}
    for op, version in with_versions(stage_ops(Schedule.ASYNCHRONOUS, stage, stages, work)):
        if op.kind is Kind.FORWARD:
            found[str(op)] = chosen.forward(op, version)
        elif op.kind is Kind.BACKWARD:
            found[str(op)] = chosen.backward(op, version)
    return found


def horizons(name: str, stage: int, stages: int, **options: Any) -> tuple[int, int]:
    """Return how far a forward and a backward look ahead once the pipeline is full."""
    found = reads(name, stage, stages, batches=3 * stages, **options)
    forward, backward = found[f"F{2 * stages}"], found[f"B{2 * stages}"]
    assert isinstance(forward, Ahead)
    assert isinstance(backward, Ahead)
    return forward.updates, backward.updates


def test_every_method_of_the_settings_exists_under_its_name() -> None:
    assert list(methods.METHODS) == list(METHODS)


@pytest.mark.parametrize("name", ["vanilla", "paci", "sync"])
@pytest.mark.parametrize("stage", [0, 3, 7])
def test_methods_without_a_remedy_read_the_newest_weights(name: str, stage: int) -> None:
    assert set(reads(name, stage, 8).values()) == {NEWEST}


@pytest.mark.parametrize("name", ["stash", "nesterov"])
def test_a_stashing_backward_reads_what_its_forward_kept(name: str) -> None:
    found = reads(name, 1, 4)
    assert found["F5"] == Ahead(0, keep=(5, 0))
    assert found["B5"] == Kept((5, 0))
    assert set(reads(name, 3, 4).values()) == {NEWEST}


def test_the_second_spectrain_looks_ahead_to_its_own_update_and_keeps_what_it_saw() -> None:
    found = reads("spectrain-v2", 1, 4)
    assert [found[f"F{batch}"] for batch in (0, 1, 2, 7)] == [
        Ahead(0, keep=(0, 0)), Ahead(1, keep=(1, 0)), Ahead(2, keep=(2, 0)), Ahead(2, keep=(7, 0)),
    ]  # fmt: skip
    assert found["B7"] == Kept((7, 0))
    assert set(reads("spectrain-v2", 3, 4).values()) == {NEWEST}


@pytest.mark.parametrize("stages", range(1, 17))
def test_spectrain_looks_as_far_ahead_as_the_paper_in_steady_state(stages: int) -> None:
    for k in range(stages):
        assert horizons("spectrain", k, stages) == (k // 2 + stages - k - 1, k // 2)


@pytest.mark.parametrize("stages", range(1, 17))
def test_with_backwards_of_two_forwards_it_looks_two_thirds_of_a_stage_further(stages: int) -> None:
    for k in range(stages):
        expected = (2 * k // 3 + stages - k - 1, 2 * k // 3)
        assert horizons("spectrain", k, stages, horizon="exact") == expected


def test_spectrain_looks_less_far_while_the_pipeline_fills() -> None:
    found = reads("spectrain", 2, 4, batches=6)
    assert [found[f"F{batch}"] for batch in range(6)] == [Ahead(1), *[Ahead(2)] * 5]
    assert found["B0"] == found["B5"] == Ahead(1)


@pytest.mark.parametrize("name", ["spectrain", "spectrain-v2", "stash"])
def test_damped_methods_read_the_same_and_learn_slower_the_longer_their_delay(name: str) -> None:
    for k in range(4):
        assert reads(f"{name}-damped", k, 4) == reads(name, k, 4)
    factors = [method(f"{name}-damped", k, 4).lr_factor(7) for k in range(4)]
    assert factors == [1 / 4, 1 / 3, 1 / 2, 1]


@pytest.mark.parametrize("name", ["spectrain-damped", "pipemare"])
def test_factors_of_a_method_multiply_the_jobs_schedule(name: str) -> None:
    job = make_job(mlp, optimizer=sgd(lr=0.5), lr_schedule=lambda _: 0.5)
    for k, part in enumerate(build_all(job, [2, 2, 3], name)):
        factor = part.method.lr_factor(0)
        assert part.weights.lr == pytest.approx(0.25 * factor)
        assert (factor == 1) == (k == 2 or (name == "pipemare" and k == 1))


def test_spectrain_counts_updates_of_several_micro_batches() -> None:
    found = reads("spectrain", 2, 4, batches=4, microbatches=2)
    # One later micro-batch is back by then: the second of a batch makes that an update more.
    assert [found[op] for op in ("F0", "F0.1", "F1", "F1.1")] == [
        Ahead(0), Ahead(1), Ahead(1), Ahead(1),
    ]  # fmt: skip
    assert [found[op] for op in ("B1", "B1.1")] == [Ahead(0), Ahead(1)]


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("name", ["spectrain", "spectrain-v2", "pipeoptim", "pipemare"])
def test_a_method_says_whether_a_stage_ever_looks_ahead(name: str, stages: int) -> None:
    for k in range(stages):
        found = reads(name, k, stages, batches=3 * stages).values()
        looks = any(isinstance(each, Ahead) and each.updates != 0 for each in found)
        assert method(name, k, stages).predicts == looks


def test_pipeoptim_predicts_forwards_only() -> None:
    assert [horizons("pipeoptim", k, 4) for k in range(4)] == [(3, 0), (2, 0), (1, 0), (0, 0)]


@pytest.mark.parametrize("stage", range(4))
def test_vertical_sync_reads_the_version_with_which_the_batch_entered(stage: int) -> None:
    found = reads("vertical-sync", stage, 4)
    for batch, version in ((0, 0), (3, 0), (4, 1), (9, 6)):
        assert found[f"F{batch}"] == found[f"B{batch}"] == Version(version)


@pytest.mark.parametrize("stage", range(4))
def test_2bw_reads_the_version_before_the_newest(stage: int) -> None:
    found = reads("2bw", stage, 4, microbatches=3)
    assert {found[f"F5{part}"] for part in ("", ".1", ".2")} == {Version(4)}
    assert {found[f"B5{part}"] for part in ("", ".1", ".2")} == {Version(4)}
    assert found["F0"] == Version(0)


@pytest.mark.parametrize("name", ["vertical-sync", "2bw"])
@pytest.mark.parametrize("stages", range(2, 9))
def test_versions_read_are_there_already_and_not_too_old(name: str, stages: int) -> None:
    microbatches = least_microbatches(name, stages)
    work = Work(train_batches=3 * stages, epoch_batches=99, microbatches=microbatches)
    for k in range(stages):
        chosen = method(name, k, stages, microbatches=microbatches)
        for op, version in with_versions(stage_ops(Schedule.ASYNCHRONOUS, k, stages, work)):
            if op.kind in (Kind.FORWARD, Kind.BACKWARD):
                reading = chosen.forward(op, version)
                assert isinstance(reading, Version)
                assert version - chosen.older <= reading.number <= version


def test_the_first_micro_batch_predicts_for_the_others_under_xpipe() -> None:
    found = reads("xpipe", 1, 4, microbatches=4)
    # round((4 + 4 - 1/2 - 2) / 4) = 1 and round((4 + 0 - 1) / 4) = 1
    assert found["F2"] == Ahead(1, keep=(2, 0))
    assert {found[f"F2.{part}"] for part in (1, 2, 3)} == {Kept((2, 0))}
    assert {found[op] for op in ("B2", "B2.1", "B2.3")} == {Ahead(1)}


@pytest.mark.parametrize(
    ("stages", "microbatches", "expected"),
    [
        (4, 1, [(3, 0), (3, 0), (2, 1), (2, 1)]),
        (4, 2, [(2, 1), (2, 1), (2, 1), (1, 1)]),
        (8, 4, [(3, 1), (2, 1), (2, 1), (2, 1), (2, 1), (2, 1), (2, 2), (2, 2)]),
    ],
)
def test_xpipe_looks_as_far_as_its_formulas(
    stages: int, microbatches: int, expected: list[tuple[int, int]]
) -> None:
    found = [horizons("xpipe", k, stages, microbatches=microbatches) for k in range(stages)]
    assert found == expected


def test_xpipe_can_count_instead() -> None:
    found = reads("xpipe", 3, 8, microbatches=2, horizon="exact")
    assert found["F6"] == Ahead(2 + 1, keep=(6, 0))  # 4 micro-batches behind, 2 later ones back
    assert found["B6"] == Ahead(1)


def test_pipemare_goes_back_by_the_delay_of_the_forward() -> None:
    found = reads("pipemare", 1, 4)
    assert [found[f"B{batch}"] for batch in (0, 1, 2, 7)] == [
        NEWEST,
        Ahead(-1),
        Ahead(-2),
        Ahead(-2),
    ]
    assert {found[f"F{batch}"] for batch in range(12)} == {NEWEST}


def test_pipemare_lets_early_stages_learn_slower_at_first() -> None:
    first = [method("pipemare", k, 4).lr_factor(0) for k in range(4)]
    assert first == pytest.approx([1 / 3, 1 / 2, 1, 1])
    assert method("pipemare", 0, 4).lr_factor(500) == pytest.approx(3**-0.5)
    assert method("pipemare", 0, 4).lr_factor(5000) == 1


# -- what it costs --------------------------------------------------------------------------------


def splits(name: str, stages: int) -> list[int]:
    least = least_microbatches(name, stages)
    return [least, least + 2] if METHODS[name].several else [least]


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("name", METHODS)
def test_a_stage_holds_as_many_copies_of_its_weights_as_declared(name: str, stages: int) -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(5, 5) for _ in range(stages)))

    job = make_job(model, optimizer=nadam if name == "nesterov" else sgd())
    for microbatches in splits(name, stages):
        feed = ListFeed(regression(9, outputs=5), microbatches=microbatches)
        parts = build_all(job, [1] * stages, name, microbatches=microbatches)
        drive(join(parts, feed, name, microbatches=microbatches))
        declared = METHODS[name].weight_copies
        assert [part.weights.copies for part in parts] == [
            declared(k, stages, microbatches) for k in range(stages)
        ]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("predictor", PREDICTORS)
def test_snapshots_hold_as_many_more_copies_as_declared(name: str, predictor: str) -> None:
    if predictor != "velocity" and predictor not in METHODS[name].predictors:
        return
    job = make_job(mlp, optimizer=nadam if name == "nesterov" else sgd())
    microbatches = least_microbatches(name, 4)
    feed = ListFeed(regression(9), microbatches=microbatches)
    options: dict[str, Any] = {"microbatches": microbatches, "predictor": predictor}
    parts = build_all(job, [2, 1, 2, 2], name, **options)
    drive(join(parts, feed, name, **options))
    for k, part in enumerate(parts):
        held = len(part.weights.memory())
        has_weights = bool(part.weights.clean)
        assert held <= remembered_copies(name, predictor, k, 4)
        if has_weights and part.method.predicts:
            assert held == remembered_copies(name, predictor, k, 4)


@pytest.mark.parametrize("microbatches", [2, 3, 7])
def test_staleness_of_paci_has_a_bound(microbatches: int) -> None:
    feed = ListFeed(regression(9, rows=7), microbatches=microbatches)
    outcome = train(make_job(mlp), feed, [2, 1, 1, 1, 2], "paci")
    bounds = [-(-(5 - 1 - k) // microbatches) for k in range(5)]
    assert [each.forward_max for each in outcome.staleness] == bounds


# -- what it cannot work with ---------------------------------------------------------------------


def test_an_optimizer_that_the_method_is_not_made_for_is_refused() -> None:
    with pytest.raises(JobError, match=r"returned SGD, and --method nesterov works with .* NAdam"):
        build_all(make_job(mlp), [4, 3], "nesterov")
    assert build_all(make_job(mlp, optimizer=nadam), [4, 3], "nesterov")


@pytest.mark.parametrize("name", [name for name, spec in METHODS.items() if spec.predictors])
def test_an_optimizer_that_cannot_be_predicted_is_refused_by_methods_that_predict(
    name: str,
) -> None:
    job = make_job(mlp, optimizer=sgd(nesterov=True))
    with pytest.raises(JobError, match="SGD with nesterov = True, whose next update cannot be"):
        build_all(job, [4, 3], name)
    assert build_all(job, [4, 3], name, predictor="last-delta")


def test_prediction_leaves_buffers_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    weights = Weights(list(model.named_children()), sgd(), predicts=True)
    model(torch.randn(4, 2)).pow(3).sum().backward()
    weights.collect_gradients()
    weights.step()
    mean = model[0].running_mean.clone()
    weights.read(method("spectrain", 1, 4).forward(Op.parse("F9"), weights.version))
    assert torch.equal(model[0].running_mean, mean)
