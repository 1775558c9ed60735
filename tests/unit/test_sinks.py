"""Files of a run directory: names, forms, atomic replacement, no run overwritten."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from spectrain.coordinator.sinks import RunDirectory, status_record
from spectrain.protocol.errors import UserError
from spectrain.protocol.messages import Cause, StageView, View, WorkerFault
from spectrain.protocol.settings import Settings
from spectrain.protocol.strict_json import json_text

STAGE = StageView(
    stage=1, host="node2", pid=42, incarnation=3, state="training", version=8, last_batch=7,
    in_flight=2, wait_share=0.25,
)  # fmt: skip


def read(path: Path) -> object:
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_missing_directory_is_made_with_its_parents(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "runs" / "one").close()
    assert (tmp_path / "runs" / "one" / "metrics.jsonl").exists()


def test_a_directory_that_holds_only_logs_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    RunDirectory(tmp_path).close()
    assert (tmp_path / "faults").is_dir()


def test_a_directory_that_holds_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("old\n")
    with pytest.raises(UserError, match="already holds a run") as raised:
        RunDirectory(tmp_path)
    assert str(tmp_path) in str(raised.value)
    assert (tmp_path / "metrics.jsonl").read_text() == "old\n"


def test_a_directory_that_cannot_be_written_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/run cannot be written: Not a directory"):
        RunDirectory(tmp_path / "file" / "run")


def test_settings_come_back_as_they_were(tmp_path: Path) -> None:
    settings = Settings(job="job.py", run_dir=str(tmp_path), stages=2, partition=(3, 5))
    files = RunDirectory(tmp_path)
    files.write_settings(settings)
    files.close()
    stored = json.loads((tmp_path / "settings.json").read_text())
    assert Settings.from_dict(stored) == settings


def test_plan_status_and_summary_have_their_own_files(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path)
    files.write_plan({"stages": [1]})
    files.write_status({"state": "training"})
    files.write_summary({"updates": 3})
    files.close()
    assert read(tmp_path / "plan.json") == {"stages": [1]}
    assert read(tmp_path / "status.json") == {"state": "training"}
    assert read(tmp_path / "summary.json") == {"updates": 3}
    assert files.model_path == tmp_path / "model.safetensors"


def test_writing_leaves_nothing_beside_the_files(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path)
    files.write_status({"state": "training"})
    files.write_status({"state": "done"})
    files.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "faults",
        "metrics.jsonl",
        "status.json",
    ]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path)
    status = {"state": "training", "filling": "x" * 100_000}
    files.write_status(status)
    written = threading.Event()

    def write() -> None:
        for _ in range(50):
            files.write_status(status)
        written.set()

    writer = threading.Thread(target=write, name="writer")
    writer.start()
    reads = 0
    while not written.is_set() or not reads:
        assert read(tmp_path / "status.json") == status
        reads += 1
    writer.join()
    files.close()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path)
    files.write_status({"state": "training"})
    with pytest.raises(TypeError):
        files.write_status({"state": object()})
    files.close()
    assert read(tmp_path / "status.json") == {"state": "training"}


def test_metrics_are_one_object_per_line_and_readable_at_once(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path)
    files.append_metrics([{"kind": "train", "loss": 0.1}, {"kind": "speed"}])
    files.append_metrics([{"kind": "train", "loss": 1 / 3}])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    files.close()
    assert lines == [
        '{"kind": "train", "loss": 0.1}',
        '{"kind": "speed"}',
        '{"kind": "train", "loss": 0.3333333333333333}',
    ]


def test_each_incarnation_that_failed_has_its_own_report(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path)
    for incarnation in range(2):
        fault = WorkerFault(
            stage=1, incarnation=incarnation, what="ValueError", message="no", op="F3",
            traceback="Traceback", exit_code=1, is_consequence=False, user_error=False,
        )  # fmt: skip
        files.write_fault(fault, host="node2")
    files.close()
    report = json.loads((tmp_path / "faults" / "stage-1.incarnation-1.json").read_text())
    assert (report["host"], report["what"], report["op"]) == ("node2", "ValueError", "F3")
    assert (tmp_path / "faults" / "stage-1.incarnation-0.json").exists()


# -- status.json --------------------------------------------------------------------------------


def test_a_status_lists_workers_and_names_the_coordinator() -> None:
    view = View(state="training", batch=8, train_batches=20, loss=0.5, stages=(STAGE,))
    status = status_record(view, coordinator_host="node1", coordinator_started=123.5, updated=200.0)
    assert status["state"] == "training"
    assert status["workers"] == [
        {
            "stage": 1, "host": "node2", "pid": 42, "incarnation": 3, "last_batch": 7,
            "state": "training",
        }
    ]  # fmt: skip
    assert status["coordinator"] == {"pid": os.getpid(), "host": "node1", "started": 123.5}
    assert (status["updated"], status["batch"], status["loss"]) == (200.0, 8, 0.5)
    assert (status["exit_code"], status["cause"]) == (None, None)


def test_the_status_of_a_failed_run_holds_its_cause() -> None:
    cause = Cause(stage=2, host="node2", what="ValueError", message="no", log_tail=("a",))
    status = status_record(
        View(state="failed"), coordinator_host="node1", coordinator_started=1.0, updated=2.0,
        exit_code=1, cause=cause,
    )  # fmt: skip
    assert status["exit_code"] == 1
    assert json.loads(json_text(status))["cause"]["log_tail"] == ["a"]


# -- strict JSON --------------------------------------------------------------------------------


def test_numbers_that_json_has_no_word_for_become_null() -> None:
    values = {"nan": float("nan"), "far": [float("inf"), -float("inf")], "near": (1.5, None)}
    assert json_text(values) == '{"nan": null, "far": [null, null], "near": [1.5, null]}'


def test_text_and_keys_stay_as_they_are() -> None:
    assert json_text({1: "ä\n", "ok": True}) == '{"1": "ä\\n", "ok": true}'


def test_floats_come_back_to_the_last_bit() -> None:
    for value in (0.1, 1 / 3, 1e-300, 2.0**-1074):
        assert json.loads(json_text({"value": value}))["value"] == value
