"""Stages die and come back from the committed round; no bit of the result may tell.

Runs real loops, stages and snapshot files in one process, over streams that follow the rules of
the real ones, with faults at random moments. The negative controls show that it would notice.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from pipelines import ListFeed, adamw, assert_same_bits, make_job, nadam, regression, sgd, train
from replay import Pipeline, cut, noisy_model, random_kills
from torch import Tensor

from spectrain.protocol.job import Job
from spectrain.protocol.methods import METHODS
from spectrain.worker.reading import Key
from spectrain.worker.restore import Rebuild
from spectrain.worker.snapshot import Snapshot
from spectrain.worker.stage import Stage
from spectrain.worker.weights import Weights

torch.set_num_threads(1)

MOMENTUM = sgd(lr=0.05, momentum=0.9)
UPDATES = 14


def noisy_job(optimizer: Any = MOMENTUM) -> Job:
    return make_job(noisy_model, optimizer=optimizer, lr_schedule=lambda update: 1 / (1 + update))


def feed(microbatches: int = 1) -> ListFeed:
    pairs = regression(UPDATES + 2)
    return ListFeed(
        pairs[:UPDATES], test=pairs[UPDATES:], epoch_batches=4, microbatches=microbatches
    )


def disturbed(directory: Path, stages: int, *, seed: int, **options: Any) -> Pipeline:
    random = Random(seed)
    pipeline = Pipeline(layer_counts=cut(stages), directory=directory, **options)
    pipeline.run(random, random_kills(random, stages))
    assert pipeline.kills > 0
    return pipeline


def assert_undisturbed(pipeline: Pipeline) -> None:
    job, feed, options = pipeline.job, pipeline.feed, pipeline.options
    quiet = train(job, feed, pipeline.layer_counts, pipeline.method, **options)
    assert list(pipeline.losses.values()) == quiet.batches
    assert list(pipeline.rounds.values()) == quiet.evaluations
    assert_same_bits(pipeline.state(), quiet.state)
    assert pipeline.staleness() == quiet.staleness


@pytest.mark.parametrize("every", [1, 3, 5])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("method", ["spectrain", "vanilla", "sync"])
def test_a_run_with_restarts_ends_with_the_same_bits(
    method: str, stages: int, every: int, tmp_path: Path
) -> None:
    microbatches = 2 if method == "sync" else 1
    reruns = 0
    for seed in range(3):
        pipeline = disturbed(
            tmp_path, stages, seed=seed, job=noisy_job(), feed=feed(microbatches), method=method,
            every=every,
        )  # fmt: skip
        assert_undisturbed(pipeline)
        reruns += pipeline.reruns
    assert (reruns > 0) == (stages > 1 and method != "sync")


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((method, {}) for method in METHODS if method not in ("spectrain", "vanilla", "sync")),
        ("spectrain", {"predictor": "msnag", "predict_lr": "scheduled"}),
        ("spectrain", {"predictor": "last-delta", "horizon": "exact"}),
        ("spectrain-v2", {"predictor": "last-delta"}),
        ("spectrain-v2", {"precision": "bf16"}),
        ("vertical-sync", {"precision": "bf16"}),
        ("xpipe", {"precision": "bf16"}),
    ],
)
def test_what_a_method_keeps_comes_back_too(
    method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    microbatches = 3 if METHODS[method].several else 1
    for seed in range(2):
        pipeline = disturbed(
            tmp_path, 4, seed=seed, job=noisy_job(nadam if method == "nesterov" else MOMENTUM),
            feed=feed(microbatches), method=method, every=2 + 2 * seed, options=options,
        )  # fmt: skip
        assert_undisturbed(pipeline)


@pytest.mark.parametrize("method", ["spectrain", "vanilla"])
def test_adamw_comes_back_with_its_moments_and_step_counts(method: str, tmp_path: Path) -> None:
    for seed in range(3):
        pipeline = disturbed(
            tmp_path, 3, seed=seed, job=noisy_job(adamw()), feed=feed(), method=method, every=3
        )
        assert_undisturbed(pipeline)


def test_snapshots_alone_change_nothing(tmp_path: Path) -> None:
    pipeline = Pipeline(
        job=noisy_job(), feed=feed(), layer_counts=cut(4), directory=tmp_path, every=1
    )
    pipeline.run(Random(0))
    assert pipeline.committed == UPDATES
    assert_undisturbed(pipeline)


# -- negative controls --------------------------------------------------------------------------


def goes_wrong(directory: Path, seed: int, **options: Any) -> bool:
    """Tell whether a disturbed run is seen to differ from the quiet one."""
    try:
        pipeline = disturbed(
            directory, 4, seed=seed, job=noisy_job(), feed=feed(), every=3, **options
        )
        assert_undisturbed(pipeline)
    except AssertionError:
        return True
    return False


def differs(directory: Path, **options: Any) -> bool:
    """Tell whether any of a few disturbed runs goes wrong."""
    return any(goes_wrong(directory, seed, **options) for seed in range(4))


def test_without_the_old_live_weights_the_result_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Weights, "show", lambda *_: None)
    assert differs(tmp_path)


def test_without_the_old_buffers_the_result_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(rebuild: Rebuild, keep: Key | None) -> None:
        again = rebuild.next
        assert again is not None
        rebuild._weights.show(again.live, keep)

    monkeypatch.setattr(Rebuild, "show", show)
    assert differs(tmp_path)


def test_without_the_optimizer_state_the_result_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resume = Weights.resume

    def forget(
        weights: Weights, version: int, clean: Any, state: dict[str, Any], memory: Any
    ) -> None:
        resume(weights, version, clean, {**state, "state": {}}, memory)

    monkeypatch.setattr(Weights, "resume", forget)
    assert differs(tmp_path)


@pytest.mark.parametrize(
    ("method", "options"),
    [("vertical-sync", {}), ("pipemare", {}), ("spectrain", {"predictor": "last-delta"})],
)
def test_with_another_memory_of_earlier_updates_the_result_differs(
    method: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resume = Weights.resume

    def distort(
        weights: Weights, version: int, clean: Any, state: Any, memory: dict[str, Tensor]
    ) -> None:
        memory = {name: tensor * 0.9 for name, tensor in memory.items()}
        resume(weights, version, clean, state, memory)

    monkeypatch.setattr(Weights, "resume", distort)
    assert differs(tmp_path, method=method, options=options)


def test_nothing_goes_wrong_where_nothing_is_left_out(tmp_path: Path) -> None:
    assert not differs(tmp_path)


def test_buffers_written_in_place_break_the_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overwrite(stage: Stage, values: Snapshot) -> None:
        for name, buffer in stage.buffers().items():
            buffer.copy_(values[name])

    monkeypatch.setattr(Stage, "rebind_buffers", overwrite)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        disturbed(tmp_path, 4, seed=0, job=noisy_job(), feed=feed(), every=3)
