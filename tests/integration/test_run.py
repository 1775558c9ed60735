"""Whole runs on this machine: real processes, real data, compared with one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from integration.jobs import MLP, write_job
from integration.launching import run_to_end
from safetensors.torch import load_file

from spectrain.coordinator.export import weights_sha256
from spectrain.coordinator.plan import make_plan
from spectrain.protocol.job import load_job
from spectrain.protocol.settings import Settings
from spectrain.worker.pipeline import run_in_one_process


@pytest.mark.parametrize(
    ("method", "microbatches"),
    [("spectrain", 1), ("vanilla", 1), ("sync", 3), ("spectrain-v2", 1), ("xpipe", 3), ("2bw", 2)],
)
def test_real_processes_and_one_process_end_with_the_same_bits(
    method: str, microbatches: int, tmp_path: Path
) -> None:
    job = write_job(tmp_path)
    options = ("--stages", "3", "--method", method, "--microbatches", str(microbatches))
    run = run_to_end(tmp_path / "run", *options, job=job)
    settings = Settings(
        job=str(job), run_dir="", stages=3, method=method, microbatches=microbatches,
        batch_size=16, epochs=3,
    )  # fmt: skip
    plan = make_plan(settings)
    outcome = run_in_one_process(load_job(job), settings, plan.feed, plan.layer_counts)
    assert run.summary()["weights_sha256"] == weights_sha256(outcome.state)
    assert run.losses() == [batch.loss for batch in outcome.batches]


def test_a_run_leaves_everything_a_user_looks_for(tmp_path: Path) -> None:
    run = run_to_end(tmp_path / "run", "--stages", "2", job=write_job(tmp_path))
    summary = run.summary()
    assert (summary["updates"], summary["epochs"], summary["restarts"]) == (21, 3, 0)
    assert set(summary["final_metrics"]) == {"accuracy", "loss"}
    assert summary["samples_per_s"] > 0
    assert [row["forward_max"] for row in summary["staleness"]] == [1, 0]
    names = {path.name for path in run.run_dir.iterdir()}
    assert {
        "settings.json", "plan.json", "metrics.jsonl", "model.safetensors", "summary.json",
        "status.json", "logs",
    } <= names  # fmt: skip
    logs = {path.name for path in (run.run_dir / "logs").iterdir()}
    assert logs == {"coordinator.log", "stage-0.localhost.log", "stage-1.localhost.log"}
    status = run.status()
    assert status["state"] == "done"
    assert [worker["stage"] for worker in status["workers"]] == [0, 1]


def test_the_plain_model_loads_the_exported_weights(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    run = run_to_end(tmp_path / "run", "--stages", "4", job=job)
    model = load_job(job).build_model(0, {})
    weights = load_file(run.run_dir / "model.safetensors")
    model.load_state_dict(weights)
    assert weights_sha256(weights) == run.summary()["weights_sha256"]


def test_two_runs_with_one_seed_agree_and_another_seed_differs(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    digests = [
        run_to_end(tmp_path / name, "--stages", "2", "--seed", seed, job=job).summary()[
            "weights_sha256"
        ]
        for name, seed in (("first", "5"), ("second", "5"), ("other", "6"))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_hyper_parameters_reach_the_functions_that_take_them(tmp_path: Path) -> None:
    options = ("--stages", "2", "--set", "lr=0.5", "--set", "width=9", "--max-batches", "2")
    run = run_to_end(tmp_path / "run", *options, job=write_job(tmp_path))
    weights = load_file(run.run_dir / "model.safetensors")
    assert weights["0.weight"].shape == (9, 8)
    first = json.loads((run.run_dir / "metrics.jsonl").read_text().partition("\n")[0])
    assert first["lr"] == 0.5


def test_a_single_batch_on_more_stages_than_batches(tmp_path: Path) -> None:
    options = ("--stages", "5", "--max-batches", "1")
    run = run_to_end(tmp_path / "run", *options, job=write_job(tmp_path))
    assert run.summary()["updates"] == 1


def test_bf16_trains_with_fp32_clean_weights(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    run = run_to_end(tmp_path / "run", "--stages", "2", "--precision", "bf16", job=job)
    weights = load_file(run.run_dir / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    settings = Settings(
        job=str(job), run_dir="", stages=2, precision="bf16", batch_size=16, epochs=3
    )  # fmt: skip
    plan = make_plan(settings)
    outcome = run_in_one_process(load_job(job), settings, plan.feed, plan.layer_counts)
    assert weights_sha256(weights) == weights_sha256(outcome.state)


def test_masks_and_several_tensors_cross_stage_boundaries(tmp_path: Path) -> None:
    text = MLP.replace(
        "    return nn.Sequential(*layers, nn.Linear(width, 3))",
        "    return nn.Sequential(Split(), *map(Masked, layers), Join(width))",
    )
    text += """
class Split(nn.Module):
    def forward(self, x):
        return {"x": x, "mask": x[:, 0] > 0, "nothing": None}

class Masked(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
    def forward(self, value):
        return {**value, "x": self.layer(value["x"])}

class Join(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, 3)
    def forward(self, value):
        return self.layer(value["x"] * value["mask"][:, None])
"""
    run = run_to_end(tmp_path / "run", "--stages", "3", job=write_job(tmp_path, text))
    assert run.summary()["updates"] == 21
