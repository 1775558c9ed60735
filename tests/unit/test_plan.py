"""From a job file to a plan: data, work, layers per stage; and what is refused on the way."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.jobs import MLP, write_job

from spectrain.coordinator import plan as module
from spectrain.coordinator.partition import equal
from spectrain.coordinator.plan import Plan, make_plan, stage_rows
from spectrain.protocol.errors import JobError, SettingsError
from spectrain.protocol.schedule import Work
from spectrain.protocol.settings import Settings

LAYERS = 11  # of MLP

TIED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def model():
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), last)

def datasets():
    return TensorDataset(torch.zeros(4, 4), torch.zeros(4, 4)), None

loss = nn.functional.mse_loss

def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)
"""


def settings(job: Path, **changes: Any) -> Settings:
    return Settings(
        **{"job": str(job), "run_dir": "", "stages": 2, "batch_size": 16, "epochs": 3, **changes}
    )


def a_plan(folder: Path, **changes: Any) -> Plan:
    return make_plan(settings(write_job(folder), **changes))


def test_the_work_follows_from_data_batch_size_and_epochs(tmp_path: Path) -> None:
    expected = Work(train_batches=21, epoch_batches=7, evaluation_batches=2)
    assert a_plan(tmp_path).work == expected


def test_without_evaluation_the_test_set_is_left_out(tmp_path: Path) -> None:
    assert a_plan(tmp_path, evaluate=False).work.evaluation_batches == 0


def test_a_limit_of_batches_shortens_the_work(tmp_path: Path) -> None:
    assert a_plan(tmp_path, max_batches=5).work.train_batches == 5


def test_the_plan_knows_layers_and_the_models_own_names(tmp_path: Path) -> None:
    plan = a_plan(tmp_path)
    assert len(plan.layers) == LAYERS
    assert plan.state_names[:2] == ("0.weight", "0.bias")
    assert sum(layer.parameters for layer in plan.layers) == 8 * 16 + 16 + 4 * 272 + 51


def test_layers_are_cut_as_the_user_says(tmp_path: Path) -> None:
    assert a_plan(tmp_path, partition=(4, 7)).layer_counts == (4, 7)
    assert a_plan(tmp_path, partition="equal").layer_counts == equal(LAYERS, 2)
    automatic = a_plan(tmp_path, partition="auto").layer_counts
    assert sum(automatic) == LAYERS
    assert min(automatic) >= 1


def test_counts_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=str(LAYERS)):
        a_plan(tmp_path, partition=(4, 4))


def test_a_last_batch_that_is_too_small_to_split_is_refused(tmp_path: Path) -> None:
    refusal = r"microbatches = 4: 2bw on 6 stages needs at least 5, and a mini-batch of an epoch"
    with pytest.raises(SettingsError, match=refusal):
        a_plan(tmp_path, method="2bw", stages=6, microbatches=5)  # the last one has 4 samples
    assert a_plan(tmp_path, method="2bw", stages=5, microbatches=5).work.last_microbatches == 4


@pytest.mark.parametrize("partition", ["auto", "equal"])
def test_more_stages_than_layers_are_refused(partition: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"12"):
        a_plan(tmp_path, stages=12, partition=partition)


def test_hyper_parameters_reach_the_model(tmp_path: Path) -> None:
    narrow = a_plan(tmp_path, hyper={"width": 4})
    assert narrow.layers[0].parameters == 8 * 4 + 4


def test_a_parameter_shared_by_two_stages_is_refused_with_both_its_names(tmp_path: Path) -> None:
    job = write_job(tmp_path, TIED)
    with pytest.raises(JobError, match=r"0\.weight.*2\.weight.* stages 0 and 1: .*Untie"):
        make_plan(settings(job, partition=(2, 1)))
    assert make_plan(settings(job, stages=1)).layer_counts == (3,)


def test_the_seed_decides_the_data(tmp_path: Path) -> None:
    from spectrain.protocol.schedule import Op

    def inputs(seed: int) -> Any:
        return a_plan(tmp_path, seed=seed).feed.part("inputs", Op.parse("F0")).value

    assert torch.equal(inputs(1), inputs(1))
    assert not torch.equal(inputs(1), inputs(2))


def test_rows_tell_layers_size_cost_and_staleness_of_each_stage(tmp_path: Path) -> None:
    plan = a_plan(tmp_path, partition=(4, 7))
    first, second = stage_rows(plan, settings(tmp_path / "job.py", partition=(4, 7)))
    assert (first["stage"], second["stage"]) == (0, 1)
    assert (len(first["layers"]), len(second["layers"])) == (4, 7)
    assert first["parameters"] == 8 * 16 + 16 + 272
    assert first["cost_share"] + second["cost_share"] == pytest.approx(1, abs=1e-3)
    assert [row["staleness"]["forward_max"] for row in (first, second)] == [1, 0]


def run_main(monkeypatch: pytest.MonkeyPatch, given: Settings) -> int:
    monkeypatch.setattr(module.sys, "stdin", io.StringIO(given.to_json()))
    return module.main()


def test_the_dry_run_prints_the_rows_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, settings(write_job(tmp_path), partition=(4, 7))) == 0
    assert [len(row["layers"]) for row in json.loads(capsys.readouterr().out)] == [4, 7]


def test_the_dry_run_of_a_job_that_cannot_run_says_why_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, MLP.replace("def model", "def modal"))
    assert run_main(monkeypatch, settings(job)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "model" in printed.err
    assert "Traceback" not in printed.err
