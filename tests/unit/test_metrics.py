"""Numbers of a run: folding reports, throughput, view, summary, reproducible records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spectrain.coordinator.metrics import LOSS_WINDOW_BATCHES, Metrics, Placement, Throughput
from spectrain.protocol.errors import ProtocolError
from spectrain.protocol.messages import (
    BatchResult,
    Evaluated,
    Progress,
    SnapshotWritten,
    StageDone,
    Trained,
)
from spectrain.protocol.schedule import Work
from spectrain.protocol.settings import Settings

SETTINGS = Settings(job="job.py", run_dir="/run", stages=2, seed=7)
WORK = Work(train_batches=10, epoch_batches=4, evaluation_batches=2)


def new_metrics() -> Metrics:
    return Metrics(SETTINGS, WORK, layer_counts=(3, 2))


def result(batch: int, *, loss: float = 0.5, samples: int = 8, **metrics: float) -> BatchResult:
    return BatchResult(batch=batch, samples=samples, loss=loss, metrics=metrics, lr=0.1)


def trained(*results: BatchResult) -> Trained:
    return Trained(stage=1, incarnation=0, batches=results)


def evaluated(round_: int, *, loss: float = 0.3, accuracy: float = 0.9) -> Evaluated:
    return Evaluated(
        stage=1, incarnation=0, round=round_, samples=20, loss=loss, metrics={"accuracy": accuracy}
    )


def progress(stage: int = 0, **changes: Any) -> Progress:
    idle = Progress(
        stage=stage, incarnation=0, state="training", last_op="B3", waiting_for="", version=4,
        in_flight=2, forward_s=0.0, backward_s=0.0, predict_s=0.0, update_s=0.0, evaluate_s=0.0,
        wait_upstream_s=0.0, wait_downstream_s=0.0, wait_feed_s=0.0, peak_memory_bytes=1000,
        messages=30, dropped=0,
    )  # fmt: skip
    return replace(idle, **changes)


def done(stage: int) -> StageDone:
    return StageDone(
        stage=stage, incarnation=0, updates=10, forward_staleness=0.9, forward_staleness_max=1,
        backward_staleness=0.0, backward_staleness_max=0, tensors=4,
    )  # fmt: skip


def placement(stage: int = 0, incarnation: int = 0) -> Placement:
    return Placement(stage=stage, host="node1", pid=42, incarnation=incarnation, state="training")


# -- throughput ---------------------------------------------------------------------------------


def test_throughput_is_unknown_before_time_has_passed() -> None:
    throughput = Throughput()
    assert throughput.per_s(5.0) is None
    throughput.add(5.0, 0)
    assert throughput.per_s(5.0) is None


def test_throughput_counts_from_the_first_point() -> None:
    throughput = Throughput()
    throughput.add(100.0, 0)
    throughput.add(102.0, 60)
    assert throughput.per_s(102.0) == 30.0


def test_throughput_forgets_what_is_older_than_the_window() -> None:
    throughput = Throughput(window_s=10.0)
    throughput.add(0.0, 0)
    throughput.add(1.0, 1000)
    throughput.add(11.0, 1100)
    assert throughput.per_s(11.0) == 10.0


def test_throughput_falls_to_zero_when_nothing_arrives() -> None:
    throughput = Throughput(window_s=10.0)
    throughput.add(0.0, 0)
    throughput.add(1.0, 1000)
    assert throughput.per_s(30.0) == 0.0


# -- records ------------------------------------------------------------------------------------


def test_each_batch_makes_one_train_record() -> None:
    records = new_metrics().trained(trained(result(0, accuracy=0.25), result(1)), now_s=1.0)
    assert records == [
        {
            "kind": "train", "update": 0, "epoch": 0, "samples": 8, "loss": 0.5, "lr": 0.1,
            "metrics": {"accuracy": 0.25},
        },
        {
            "kind": "train", "update": 1, "epoch": 0, "samples": 8, "loss": 0.5, "lr": 0.1,
            "metrics": {},
        },
    ]  # fmt: skip


def test_train_records_do_not_depend_on_time_or_on_how_batches_were_grouped() -> None:
    results = [result(batch, loss=1 / (batch + 3)) for batch in range(10)]
    at_once = new_metrics()
    one_by_one = new_metrics()
    one_by_one.started(50.0)
    grouped = at_once.trained(trained(*results), now_s=1.0)
    single = [
        record
        for number, each in enumerate(results)
        for record in one_by_one.trained(trained(each), now_s=60.0 + number)
    ]
    assert json.dumps(grouped) == json.dumps(single)


def test_a_batch_reported_again_with_the_same_loss_is_ignored() -> None:
    metrics = new_metrics()
    metrics.trained(trained(result(0), result(1)), now_s=1.0)
    assert metrics.trained(trained(result(1)), now_s=2.0) == []
    assert (metrics.batches, metrics.samples, metrics.mismatches) == (2, 16, 0)


def test_a_batch_reported_again_with_another_loss_is_a_mismatch() -> None:
    metrics = new_metrics()
    metrics.trained(trained(result(0, loss=0.5)), now_s=1.0)
    assert metrics.trained(trained(result(0, loss=0.25)), now_s=2.0) == []
    assert metrics.mismatches == 1
    assert metrics.summary(weights_sha256=None, restarts=1)["mismatches"] == 1


@pytest.mark.parametrize("batch", [-1, 10])
def test_a_batch_outside_the_run_is_refused(batch: int) -> None:
    with pytest.raises(ProtocolError, match=rf"batch {batch}: this run has batches 0\.\.9"):
        new_metrics().trained(trained(result(batch)), now_s=1.0)


def test_an_evaluation_record_says_after_how_many_updates() -> None:
    metrics = new_metrics()
    rounds = [metrics.evaluated(evaluated(number))[0] for number in range(3)]
    assert [record["updates"] for record in rounds] == [4, 8, 10]
    assert rounds[0] == {
        "kind": "evaluation", "round": 0, "updates": 4, "samples": 20, "loss": 0.3,
        "metrics": {"accuracy": 0.9},
    }  # fmt: skip


def test_an_evaluation_repeated_is_ignored_and_compared() -> None:
    metrics = new_metrics()
    metrics.evaluated(evaluated(0))
    assert metrics.evaluated(replace(evaluated(0), incarnation=1)) == []
    assert metrics.mismatches == 0
    assert metrics.evaluated(evaluated(0, accuracy=0.8)) == []
    assert metrics.mismatches == 1


def test_timings_hold_speed_and_each_stage() -> None:
    metrics = new_metrics()
    metrics.started(100.0)
    metrics.trained(trained(result(0), result(1)), now_s=104.0)
    metrics.progress(progress(1, forward_s=1.5))
    metrics.progress(progress(0))
    speed, first, second = metrics.timings(104.0)
    assert speed == {
        "kind": "speed", "wall_s": 4.0, "updates": 2, "samples": 16, "samples_per_s": 4.0,
    }  # fmt: skip
    assert (first["kind"], first["stage"], first["wall_s"]) == ("stage", 0, 4.0)
    assert (second["stage"], second["forward_s"], second["messages"]) == (1, 1.5, 30)


def snapshot(stage: int, size_bytes: int) -> SnapshotWritten:
    return SnapshotWritten(
        stage=stage, incarnation=0, update=5, path="/dev/shm/s", size_bytes=size_bytes, digest="d",
        capture_s=0.1, write_s=0.2,
    )  # fmt: skip


SIZES = {
    "log_bytes": 300, "peak_activations_log_bytes": 500, "peak_gradients_log_bytes": 400,
}  # fmt: skip


def test_a_stage_record_tells_what_its_worker_keeps_for_restarts() -> None:
    metrics = new_metrics()
    metrics.progress(progress(0, **SIZES))
    metrics.progress(progress(1))
    metrics.snapshot_written(snapshot(0, size_bytes=7000))
    metrics.snapshot_written(snapshot(0, size_bytes=9000))
    _, first, second = metrics.timings(1.0)
    assert {name: first[name] for name in SIZES} == SIZES
    assert (first["snapshot_bytes"], second["snapshot_bytes"]) == (9000, 0)
    assert second["log_bytes"] == 0


def test_the_summary_tells_the_most_that_each_stage_kept() -> None:
    metrics = new_metrics()
    metrics.progress(progress(0, **SIZES))
    metrics.snapshot_written(snapshot(0, size_bytes=9000))
    (stage,) = metrics.summary(weights_sha256=None, restarts=0)["stages"]
    assert stage["peak_activations_log_bytes"] == 500
    assert stage["peak_gradients_log_bytes"] == 400
    assert stage["snapshot_bytes"] == 9000


def test_every_field_of_every_record_is_in_the_documents() -> None:
    document = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    metrics = new_metrics()
    metrics.progress(progress(0))
    records = metrics.trained(trained(result(0)), now_s=1.0) + metrics.evaluated(evaluated(0))
    for record in records + metrics.timings(1.0):
        assert [name for name in (record["kind"], *record) if f"`{name}`" not in document] == []


def test_timings_before_the_start_know_no_wall_time() -> None:
    (speed,) = new_metrics().timings(104.0)
    assert (speed["wall_s"], speed["samples_per_s"]) == (None, None)


# -- view ---------------------------------------------------------------------------------------


def test_a_view_before_training_leaves_unknown_numbers_out() -> None:
    view = new_metrics().view("starting", [], 1.0, waiting_for=("stage 0: building",))
    assert (view.batch, view.train_batches, view.epochs) == (0, 10, 3)
    assert (view.loss, view.lr, view.samples_per_s, view.eta_s) == (None, None, None, None)
    assert view.waiting_for == ("stage 0: building",)
    assert view.metrics == {}


def test_a_view_in_training_shows_loss_speed_and_time_left() -> None:
    metrics = new_metrics()
    metrics.started(0.0)
    results = [result(batch, loss=float(batch)) for batch in range(5)]
    metrics.trained(trained(*results), now_s=2.0)
    metrics.evaluated(evaluated(0))
    view = metrics.view("training", [placement()], 2.0)
    assert (view.batch, view.epoch, view.loss, view.lr) == (5, 1, 2.0, 0.1)
    assert view.samples_per_s == 20.0
    assert view.eta_s == 2.0  # 5 batches of 8 samples are left
    assert view.metrics == {"accuracy": 0.9, "loss": 0.3}


def test_the_training_loss_is_weighted_by_samples_over_the_newest_batches() -> None:
    metrics = Metrics(SETTINGS, Work(train_batches=200, epoch_batches=200), (3, 2))
    metrics.trained(trained(*(result(batch, loss=100.0) for batch in range(20))), now_s=1.0)
    newest = range(20, 20 + LOSS_WINDOW_BATCHES - 1)
    metrics.trained(trained(*(result(batch, loss=1.0) for batch in newest)), now_s=2.0)
    metrics.trained(trained(result(199, loss=4.0, samples=4)), now_s=3.0)
    expected = ((LOSS_WINDOW_BATCHES - 1) * 8 * 1.0 + 4 * 4.0) / ((LOSS_WINDOW_BATCHES - 1) * 8 + 4)
    assert metrics.view("training", [], 3.0).loss == pytest.approx(expected)


def test_a_run_cut_short_counts_to_its_new_end() -> None:
    metrics = new_metrics()
    metrics.trained(trained(*(result(batch) for batch in range(5))), now_s=1.0)
    metrics.cut(WORK.stopped_before(6))
    view = metrics.view("training", [], 1.0)
    assert (view.train_batches, view.epochs) == (6, 2)
    assert metrics.evaluated(evaluated(1))[0]["updates"] == 6


def test_a_stage_view_joins_place_and_counters() -> None:
    metrics = new_metrics()
    metrics.progress(progress(version=4, in_flight=2))
    (stage,) = metrics.view("training", [placement()], 1.0).stages
    assert (stage.host, stage.pid, stage.state) == ("node1", 42, "training")
    assert (stage.version, stage.last_batch, stage.in_flight) == (4, 3, 2)


def test_a_stage_that_has_not_reported_has_done_nothing() -> None:
    (stage,) = new_metrics().view("starting", [placement()], 1.0).stages
    assert (stage.version, stage.last_batch, stage.in_flight, stage.wait_share) == (0, -1, 0, 0.0)


def test_a_restarted_worker_does_not_inherit_counters() -> None:
    metrics = new_metrics()
    metrics.progress(progress(version=4))
    (stage,) = metrics.view("training", [placement(incarnation=1)], 1.0).stages
    assert stage.version == 0


def test_reports_of_a_replaced_worker_are_ignored() -> None:
    metrics = new_metrics()
    metrics.progress(progress(incarnation=1, version=2))
    metrics.progress(progress(incarnation=0, version=9))
    (stage,) = metrics.view("training", [placement(incarnation=1)], 1.0).stages
    assert stage.version == 2


def wait_share(*reports: Progress) -> float:
    metrics = new_metrics()
    for report in reports:
        metrics.progress(report)
    newest = placement(incarnation=reports[-1].incarnation)
    return metrics.view("training", [newest], 1.0).stages[0].wait_share


def test_wait_share_covers_the_time_between_the_newest_two_reports() -> None:
    earlier = progress(forward_s=10.0, wait_upstream_s=0.0)
    later = progress(forward_s=13.0, wait_upstream_s=0.5, wait_feed_s=0.5)
    assert wait_share(earlier, later) == 0.25


def test_wait_share_starts_anew_with_a_new_worker() -> None:
    before = progress(forward_s=10.0, wait_upstream_s=9.0)
    after = progress(incarnation=1, forward_s=1.0, wait_upstream_s=1.0)
    assert wait_share(before, after) == 0.5


def test_a_stage_inside_one_long_wait_waits_all_the_time() -> None:
    assert wait_share(progress(), progress(waiting_for="F4 from stage 0")) == 1.0


def test_a_stage_inside_one_long_op_does_not_wait() -> None:
    assert wait_share(progress(), progress()) == 0.0


# -- summary ------------------------------------------------------------------------------------


def whole_run() -> Metrics:
    metrics = new_metrics()
    metrics.started(100.0)
    metrics.progress(progress(0, forward_s=1.0, backward_s=2.0, wait_feed_s=1.0))
    metrics.progress(progress(1, forward_s=2.0, backward_s=4.0, wait_upstream_s=2.0))
    metrics.trained(trained(*(result(batch) for batch in range(10))), now_s=104.0)
    metrics.evaluated(evaluated(1, accuracy=0.8))
    metrics.evaluated(evaluated(2, accuracy=0.97))
    metrics.done(done(1))
    metrics.done(done(0))
    return metrics


def test_the_summary_holds_what_was_promised() -> None:
    summary = whole_run().summary(weights_sha256="ab", restarts=1)
    assert summary["updates"] == 10
    assert summary["epochs"] == 2.5
    assert summary["final_metrics"] == {"accuracy": 0.97, "loss": 0.3}
    assert summary["final_metrics_of"] == "test"
    assert (summary["wall_s"], summary["samples_per_s"]) == (4.0, 20.0)
    assert (summary["restarts"], summary["weights_sha256"]) == (1, "ab")
    assert (summary["method"], summary["seed"]) == ("spectrain", 7)
    assert summary["messages_per_batch"] == 6.0


def test_the_summary_lists_measured_staleness_by_stage() -> None:
    staleness = whole_run().summary(weights_sha256="ab", restarts=0)["staleness"]
    assert [entry["stage"] for entry in staleness] == [0, 1]
    assert staleness[0] == {
        "stage": 0, "forward": 0.9, "forward_max": 1, "backward": 0.0, "backward_max": 0,
    }  # fmt: skip


def test_the_summary_shares_out_each_stages_time() -> None:
    summary = whole_run().summary(weights_sha256="ab", restarts=0)
    first, second = summary["stages"]
    assert (first["layers"], second["layers"]) == (3, 2)
    assert (first["forward"], first["backward"], first["wait_feed"]) == (0.25, 0.5, 0.25)
    assert (second["wait_upstream"], second["idle"]) == (0.25, 0.25)
    assert first["peak_memory_bytes"] == 1000
    assert summary["slowest_stage"] == 1


def test_whole_epochs_are_a_whole_number() -> None:
    metrics = Metrics(SETTINGS, Work(train_batches=8, epoch_batches=4), (3, 2))
    metrics.trained(trained(*(result(batch) for batch in range(8))), now_s=1.0)
    assert json.dumps(metrics.summary(weights_sha256=None, restarts=0)["epochs"]) == "2"


def test_without_evaluation_the_final_metrics_are_those_of_training() -> None:
    metrics = new_metrics()
    metrics.trained(trained(result(0, loss=0.2, accuracy=0.5)), now_s=1.0)
    summary = metrics.summary(weights_sha256=None, restarts=0)
    assert summary["final_metrics"] == {"accuracy": 0.5, "loss": 0.2}
    assert summary["final_metrics_of"] == "train"


def test_a_summary_of_nothing_divides_by_nothing() -> None:
    metrics = new_metrics()
    metrics.progress(progress())
    summary = metrics.summary(weights_sha256=None, restarts=0)
    assert (summary["updates"], summary["samples_per_s"]) == (0, None)
    assert (summary["messages_per_batch"], summary["slowest_stage"]) == (None, None)
    assert summary["stages"][0]["idle"] == 0.0
