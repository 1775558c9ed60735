"""A stage built anew goes on from a snapshot as its former self would have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from logged_streams import FeedEnd, Receiver, Sender
from pipelines import (
    ListFeed,
    adamw,
    assert_same_bits,
    make_job,
    make_settings,
    mlp,
    regression,
    sgd,
)
from replay import RUN_ID, Pipeline, cut, noisy_model
from torch import Tensor, nn

from spectrain.protocol.errors import SnapshotError
from spectrain.protocol.schedule import Op
from spectrain.worker.build import Parts, build_stage
from spectrain.worker.loop import Loop, Streams
from spectrain.worker.restore import Rebuild, load_snapshot, resume_streams
from spectrain.worker.snapshot import Origin, Position, Snapshot
from spectrain.worker.stage import Stage
from spectrain.worker.weights import Weights

torch.set_num_threads(1)

UPDATES = 6


def adam(params: list[nn.Parameter]) -> torch.optim.Adam:
    return torch.optim.Adam(params, lr=0.01)


def two_groups(params: list[nn.Parameter]) -> torch.optim.SGD:
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.01}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def partly_frozen_model() -> nn.Sequential:
    model = noisy_model()
    for layer in model[:6]:  # the first of two stages
        for param in layer.parameters():
            param.requires_grad_(False)
    return model


def trained(
    directory: Path,
    *,
    stages: int = 2,
    every: int = UPDATES,
    model: Callable[[], nn.Module] = noisy_model,
    optimizer: Any = None,
    method: str = "spectrain",
    **options: Any,
) -> Pipeline:
    job = make_job(model, optimizer=optimizer, lr_schedule=lambda update: 1 / (1 + update))
    pipeline = Pipeline(
        job=job,
        feed=ListFeed(regression(UPDATES)),
        layer_counts=cut(stages),
        directory=directory,
        method=method,
        every=every,
        options=options,
    )
    pipeline.run(Random(0))
    return pipeline


def loaded(pipeline: Pipeline, index: int, update: int) -> Snapshot:
    written = pipeline.durable[index][update]
    return load_snapshot([written.path], written.digest, Origin(RUN_ID, index, pipeline.stages))


def built(pipeline: Pipeline, index: int) -> Parts:
    return build_stage(pipeline.job, pipeline.settings, pipeline.layer_counts, index)


def restored(pipeline: Pipeline, index: int) -> Parts:
    parts = built(pipeline, index)
    Rebuild(loaded(pipeline, index, UPDATES), parts.stage, parts.weights)
    return parts


def flat(state: object, name: str = "") -> Mapping[str, object]:
    """Return the leaves of nested state by path."""
    if isinstance(state, dict):
        items = state.items()
    elif isinstance(state, (list, tuple)):
        items = enumerate(state)
    else:
        return {name: state}
    leaves: dict[str, object] = {f"{name} is": type(state)}
    for key, value in items:
        leaves.update(flat(value, f"{name}.{key}"))
    return leaves


def assert_same_state(left: Parts, right: Parts) -> None:
    assert left.weights.version == right.weights.version == UPDATES
    assert left.weights.lr == right.weights.lr
    assert_same_bits(left.weights.clean_state(), right.weights.clean_state())
    left.weights.predict(0)
    right.weights.predict(0)
    assert all(map(torch.equal, left.weights.live, right.weights.live))
    assert_same_bits(left.weights.memory(), right.weights.memory())
    one, other = (flat(parts.weights.optimizer.state_dict()) for parts in (left, right))
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = (
            torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        )
        assert same, name


@pytest.mark.parametrize("method", ["spectrain", "vanilla", "vertical-sync", "pipemare"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", [sgd(), adam, adamw(), two_groups])
def test_a_restored_stage_has_every_bit_of_the_old_one(
    optimizer: Any, precision: str, method: str, tmp_path: Path
) -> None:
    pipeline = trained(tmp_path, optimizer=optimizer, precision=precision, method=method)
    for index, worker in enumerate(pipeline.workers):
        assert_same_state(restored(pipeline, index), worker.parts)


def test_a_frozen_stage_comes_back_with_its_buffers(tmp_path: Path) -> None:
    pipeline = trained(tmp_path, model=partly_frozen_model)
    parts = restored(pipeline, 0)
    assert parts.weights.clean == []
    assert_same_state(parts, pipeline.workers[0].parts)
    counts = [value for name, value in parts.stage.buffers().items() if "num_batches" in name]
    assert [count.item() for count in counts] == [UPDATES]


def test_a_stage_without_any_weights_comes_back(tmp_path: Path) -> None:
    job, feed = make_job(mlp), ListFeed(regression(UPDATES))
    pipeline = Pipeline(
        job=job, feed=feed, layer_counts=[1, 1, 5], directory=tmp_path, every=UPDATES
    )
    pipeline.run(Random(0))
    assert_same_state(restored(pipeline, 1), pipeline.workers[1].parts)


def test_the_next_update_and_prediction_are_those_of_the_old_stage(tmp_path: Path) -> None:
    pipeline = trained(tmp_path, optimizer=two_groups)
    results: list[list[Tensor]] = []
    for parts in (restored(pipeline, 0), pipeline.workers[0].parts):
        parts.weights.predict(2)
        predicted = [live.clone() for live in parts.weights.live]
        parts.weights.predict(0)
        for param in (param for _, layer in parts.stage.layers for param in layer.parameters()):
            param.grad = torch.ones_like(param)
        parts.weights.collect_gradients()
        parts.weights.step()
        parts.weights.predict(1)
        results.append([*predicted, *parts.weights.live, *parts.weights.clean])
    assert all(map(torch.equal, *results))


def test_shared_buffers_stay_shared() -> None:
    first, second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    second.running_mean = first.running_mean
    stage = Stage([("a", first), ("b", second)], index=0, stages=2)
    stage.rebind_buffers({name: value + 1 for name, value in stage.buffers().items()})
    assert first.running_mean is second.running_mean
    assert first.running_mean.tolist() == [1, 1, 1]
    assert first.running_var is not second.running_var


def test_a_buffer_that_was_made_later_is_made_again() -> None:
    layer = nn.Linear(1, 1)
    layer.register_buffer("cache", None)
    stage = Stage([("a", layer)], index=0, stages=2)
    values = {"a.cache": torch.ones(2)}
    stage.rebind_buffers(values)
    assert layer.cache.tolist() == [1, 1]
    assert layer.cache is not values["a.cache"]


def test_the_first_path_with_a_whole_file_is_used(tmp_path: Path) -> None:
    pipeline = trained(tmp_path)
    written = pipeline.durable[0][UPDATES]
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"nonsense")
    paths = [tmp_path / "gone", damaged, written.path]
    snapshot = load_snapshot(paths, written.digest, Origin(RUN_ID, 0, 2))
    assert snapshot.position.update == UPDATES


def test_a_snapshot_that_is_nowhere_is_told_for_each_path(tmp_path: Path) -> None:
    (tmp_path / "damaged").write_bytes(b"nonsense")
    with pytest.raises(SnapshotError, match=r"gone cannot be read.*\n.*damaged is damaged"):
        load_snapshot([tmp_path / "gone", tmp_path / "damaged"], "00", Origin(RUN_ID, 0, 2))
    with pytest.raises(SnapshotError, match="no path to a snapshot was given"):
        load_snapshot([], "00", Origin(RUN_ID, 0, 2))


def test_each_stream_goes_on_with_its_own_number() -> None:
    position = Position(
        update=3, staleness=((0, 0, 0), (0, 0, 0)), next_activation=7, next_gradient=3,
        needed_activation=4, needed_gradient=2,
    )  # fmt: skip
    ends = {
        "activations_in": Receiver(),
        "gradients_in": Receiver(),
        "activations_out": Sender(),
        "gradients_out": Sender(),
    }
    resume_streams(position, **ends)
    assert [ends["activations_in"].position, ends["gradients_in"].position] == [4, 2]
    assert [ends["activations_out"].number, ends["gradients_out"].number] == [7, 3]


# -- the loop -----------------------------------------------------------------------------------


class Resumed:
    """The first of three stages, restored to update 2, with nobody beside it."""

    def __init__(self, directory: Path) -> None:
        pipeline = trained(directory, stages=3, every=2)
        self.snapshot = loaded(pipeline, 0, 2)
        self.parts = built(pipeline, 0)
        self.sender, self.gradients = Sender(), Receiver()
        settings = make_settings(3)
        self.loop = Loop(
            self.parts.stage, self.parts.weights, self.parts.method,
            Streams(
                inputs=FeedEnd(pipeline.feed, "inputs"),
                activations=self.sender,
                gradients_in=self.gradients,
            ),
            schedule=settings.schedule, work=pipeline.feed.work,
        )  # fmt: skip
        self.loop.resume(self.snapshot)


def test_a_resumed_loop_first_runs_the_forwards_in_flight_then_goes_on(tmp_path: Path) -> None:
    resumed = Resumed(tmp_path)
    loop = resumed.loop
    assert (loop.last_op, loop.version, loop.done) == ("U1", 2, False)
    seen = []
    for _ in range(3):
        seen.append((loop.current_op, loop.in_flight))
        assert loop.ready()
        loop.step()
    assert seen == [("F2", 0), ("F3", 1), ("F4", 2)]
    assert (loop.current_op, loop.last_op) == ("B2", "F4")
    assert not loop.ready()
    assert list(resumed.sender.log) == [2, 3, 4]
    assert resumed.sender.number == 5
    assert resumed.gradients.position == 2


def test_weights_are_those_of_the_snapshot_once_the_forwards_have_run(tmp_path: Path) -> None:
    resumed = Resumed(tmp_path)
    clean = [tensor.clone() for tensor in resumed.parts.weights.clean]
    for again in resumed.snapshot.in_flight:
        assert not torch.equal(again.live[0], clean[0])
        resumed.loop.step()
    assert all(map(torch.equal, resumed.parts.weights.clean, clean))
    resumed.parts.weights.predict(0)
    assert all(map(torch.equal, resumed.parts.weights.live, clean))
    assert all(map(torch.equal, clean, resumed.snapshot.clean))


def test_a_resumed_loop_wants_what_its_former_self_had_not_used_up(tmp_path: Path) -> None:
    loop = Resumed(tmp_path).loop
    wanted = {op: loop.wants(Op.parse(op)) for op in ("F1", "F2", "B1", "B2", "E0.0")}
    assert wanted == {"F1": False, "F2": True, "B1": False, "B2": True, "E0.0": True}
    loop.step()
    assert not loop.wants(Op.parse("F2"))
    assert loop.wants(Op.parse("F3"))


def test_a_resumed_loop_can_be_stopped_early(tmp_path: Path) -> None:
    loop = Resumed(tmp_path).loop
    loop.stop_before(4)
    loop.step()
    loop.step()
    assert not loop.ready()
    assert loop.current_op == "B2"


def test_a_loop_is_resumed_before_it_begins(tmp_path: Path) -> None:
    resumed = Resumed(tmp_path)
    with pytest.raises(AssertionError, match="resumed after U1"):
        resumed.loop.resume(resumed.snapshot)


def test_a_rebuild_without_anything_in_flight_is_done_at_once(tmp_path: Path) -> None:
    pipeline = trained(tmp_path)
    parts = built(pipeline, 1)
    snapshot = loaded(pipeline, 1, UPDATES)
    assert Rebuild(snapshot, parts.stage, parts.weights).next is None
    assert torch.equal(parts.weights.clean[0], snapshot.clean[0])


def test_weights_of_another_layout_are_refused(tmp_path: Path) -> None:
    snapshot = loaded(trained(tmp_path), 0, UPDATES)
    layer = nn.Linear(2, 2)
    weights = Weights([("a", layer)], sgd(), predicts=True)
    with pytest.raises(ValueError, match="parameter group"):
        Rebuild(replace(snapshot, buffers={}), Stage([("a", layer)], index=0, stages=2), weights)
