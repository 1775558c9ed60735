"""What a run writes down and shows, put together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.jobs import write_job
from safetensors.torch import load_file
from unit.test_run_state import Run, done, fault, progress

from spectrain.coordinator.events import End
from spectrain.coordinator.export import weights_sha256
from spectrain.coordinator.plan import Plan, make_plan
from spectrain.coordinator.record import RunRecord
from spectrain.coordinator.recovery import Repair
from spectrain.coordinator.sinks import RunDirectory
from spectrain.protocol.messages import (
    BatchResult,
    Cause,
    Evaluated,
    TensorSpec,
    Trained,
    WeightsPart,
)
from spectrain.protocol.settings import Settings

NOW = 100.0


class Record:
    """A record in a folder, by the side of a state machine that trains."""

    def __init__(self, folder: Path, *, goes_on: bool = False) -> None:
        self.folder = folder / "run"
        self.settings = Settings(
            job=str(folder / "job.py"), run_dir=str(self.folder), stages=2, batch_size=16,
            epochs=3, partition=(4, 7),
        )  # fmt: skip
        self.record = RunRecord(self.settings, RunDirectory(self.folder, goes_on=goes_on))
        self.run = Run(stages=2, hosts=("left",))

    def read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def metrics(self) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def train(self, *batches: int) -> None:
        self.record.trained(trained(*batches), NOW)


def trained(*batches: int) -> Trained:
    results = tuple(BatchResult(batch=b, samples=16, loss=1 / (1 + b), lr=0.05) for b in batches)
    return Trained(stage=1, incarnation=0, batches=results)


def evaluated(number: int) -> Evaluated:
    return Evaluated(
        stage=1, incarnation=0, round=number, samples=30, loss=0.5, metrics={"accuracy": 0.25}
    )


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    job = write_job(tmp_path_factory.mktemp("job"))
    settings = Settings(
        job=str(job), run_dir="", stages=2, batch_size=16, epochs=3, partition=(4, 7)
    )
    return make_plan(settings)


@pytest.fixture
def unplanned(tmp_path: Path) -> Iterator[Record]:
    record = Record(tmp_path)
    yield record
    record.record.close()


@pytest.fixture
def record(unplanned: Record, plan: Plan) -> Record:
    unplanned.record.planned(plan)
    return unplanned


def deliver(record: Record, plan: Plan) -> tuple[list[bool], dict[str, torch.Tensor]]:
    """Deliver every tensor; return what was answered to each, and the tensors."""
    tensors = {name: torch.full((2,), float(index)) for index, name in enumerate(plan.state_names)}
    answers = [
        record.record.take_weights(
            WeightsPart(
                stage=0, incarnation=0, name=name, spec=TensorSpec(dtype="float32", shape=(2,))
            ),
            tensor.numpy().tobytes(),
        )
        for name, tensor in tensors.items()
    ]
    return answers, tensors


# -- files --------------------------------------------------------------------------------------


def test_settings_are_written_at_once_and_the_id_when_the_run_begins(unplanned: Record) -> None:
    assert Settings.from_dict(unplanned.read("settings.json")) == unplanned.settings
    unplanned.record.begin("ab" * 16)
    assert unplanned.read("run.json") == {"run_id": "ab" * 16}


def test_the_plan_is_written_when_it_is_known(unplanned: Record, plan: Plan) -> None:
    assert not unplanned.record.is_planned
    unplanned.record.planned(plan)
    assert unplanned.record.is_planned
    assert [row["stage"] for row in unplanned.read("plan.json")["stages"]] == [0, 1]


def test_trained_batches_and_evaluations_become_lines(record: Record) -> None:
    record.train(0, 1)
    record.record.evaluated(evaluated(0))
    kinds = [(line["kind"], line.get("update", line.get("round"))) for line in record.metrics()]
    assert kinds == [("train", 0), ("train", 1), ("evaluation", 0)]


def test_what_is_reported_twice_is_written_once(record: Record) -> None:
    record.train(0, 1)
    record.train(1, 2)
    assert [line["update"] for line in record.metrics()] == [0, 1, 2]


def test_timings_are_lines_of_their_own_kind(record: Record) -> None:
    record.record.started(NOW)
    record.record.progress(progress(0))
    record.record.timings(NOW + 2)
    speed, *stages = record.metrics()
    assert (speed["kind"], speed["wall_s"]) == ("speed", 2)
    assert {line["kind"] for line in stages} == {"stage"}


def test_a_workers_own_account_of_its_end_is_kept(unplanned: Record) -> None:
    unplanned.record.fault(fault(1, "ValueError"), "left")
    report = unplanned.read("faults/stage-1.incarnation-0.json")
    assert (report["host"], report["what"]) == ("left", "ValueError")


def test_what_was_persisted_is_what_is_remembered(unplanned: Record) -> None:
    unplanned.run.up_to_training()
    persist = unplanned.run.state._persist()
    unplanned.record.persist(persist.text)
    assert unplanned.record.memory().to_json() == persist.text


def test_without_a_commit_file_there_is_nothing_to_remember(unplanned: Record) -> None:
    with pytest.raises(FileNotFoundError):
        unplanned.record.memory()


# -- numbers across coordinators and launches ---------------------------------------------------


def test_a_coordinator_that_goes_on_knows_what_was_trained(record: Record, plan: Plan) -> None:
    record.train(0, 1)
    again = RunRecord(record.settings, RunDirectory(record.folder, goes_on=True))
    again.planned(plan)
    again.trained(trained(1, 2), NOW)
    again.close()
    assert [line["update"] for line in record.metrics()] == [0, 1, 2]
    assert again.view(record.run.state, NOW).batch == 3


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(record: Record) -> None:
    record.train(*range(10))
    record.record.evaluated(evaluated(0))
    record.record.resumed_from(5)
    assert [line["update"] for line in record.metrics()] == [0, 1, 2, 3, 4]
    record.train(5)
    assert record.record.view(record.run.state, NOW).batch == 6


def test_an_evaluation_is_kept_if_an_update_after_it_was_in_the_checkpoint(record: Record) -> None:
    record.train(*range(8))
    record.record.evaluated(evaluated(0))
    record.record.resumed_from(8)
    assert record.metrics()[-1]["kind"] == "evaluation"
    record.record.resumed_from(7)
    assert record.metrics()[-1]["kind"] == "train"


def test_a_stop_shortens_what_there_is_to_do(record: Record) -> None:
    assert record.record.view(record.run.state, NOW).train_batches == 21
    record.record.stopped_before(9)
    assert record.record.view(record.run.state, NOW).train_batches == 9


# -- views --------------------------------------------------------------------------------------


def test_before_the_plan_the_view_says_who_is_missing(unplanned: Record) -> None:
    view = unplanned.record.view(unplanned.run.state, NOW)
    assert view.state == "gathering"
    assert view.waiting_for == ("host left: its agent has not reported yet",)
    assert view.stages == ()


def test_progress_before_the_plan_is_no_mistake(unplanned: Record) -> None:
    unplanned.record.progress(progress(0))
    assert not unplanned.record.is_planned


def test_the_view_shows_every_stages_worker(record: Record) -> None:
    record.run.up_to_training()
    record.run.worker(1, progress(1))
    record.record.progress(progress(1))
    stages = record.record.view(record.run.state, NOW).stages
    assert [(stage.stage, stage.host, stage.pid) for stage in stages] == [
        (0, "left", 50), (1, "left", 51),
    ]  # fmt: skip
    assert (stages[1].state, stages[1].version) == ("training", 3)


def test_the_status_says_where_the_coordinator_is(record: Record) -> None:
    record.record.write_status(record.run.state, NOW, None)
    status = record.read("status.json")
    assert (status["state"], status["exit_code"], status["cause"]) == ("gathering", None, None)
    assert status["coordinator"]["pid"] > 0


def test_the_last_status_says_how_the_run_ended_and_why(record: Record) -> None:
    cause = Cause(stage=1, host="left", what="SIGKILL", message="killed", exit_code=137)
    record.record.write_status(record.run.state, NOW, End("failed", 137, cause))
    status = record.read("status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 137)
    assert status["cause"]["what"] == "SIGKILL"


# -- the end ------------------------------------------------------------------------------------


def test_the_last_tensor_of_the_model_is_known_as_such(record: Record, plan: Plan) -> None:
    answers, _ = deliver(record, plan)
    assert answers == [False] * (len(plan.state_names) - 1) + [True]


def test_the_model_and_the_summary_are_written_at_the_end(record: Record, plan: Plan) -> None:
    record.run.up_to_training()
    record.train(0, 1, 2)
    record.record.done(done(0))
    repair = Repair(1, "SIGKILL", 10.0, from_update=2, replayed=3).record()
    record.run.state.repairs.records.append(repair)
    _, tensors = deliver(record, plan)
    record.record.export(record.run.state)
    weights = load_file(record.folder / "model.safetensors")
    assert set(weights) == set(plan.state_names)
    summary = record.read("summary.json")
    assert summary == json.loads(record.record.summary_json)
    assert summary["weights_sha256"] == weights_sha256(tensors)
    assert (summary["updates"], summary["stopped_early"]) == (3, False)
    assert summary["repairs"] == [repair]
