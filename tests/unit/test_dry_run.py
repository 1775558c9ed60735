"""What a dry run prints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from integration.jobs import MLP, write_job

from spectrain.launch.dry_run import print_plan
from spectrain.launch.hosts import Host
from spectrain.launch.supervisor import Place
from spectrain.protocol.errors import JobError
from spectrain.protocol.settings import Settings

PLACES = (
    Place(host=Host("left"), devices=("cpu",), is_here=True),
    Place(host=Host("right"), devices=("cuda:0", "cuda:1"), is_here=False),
)


def settings(job: Path, **changes: Any) -> Settings:
    values = {"stages": 2, "batch_size": 16, "epochs": 3, "partition": (1, 10), **changes}
    return Settings(job=str(job), run_dir="", **values)


def test_the_hosts_come_first_then_every_stage_then_spare_slots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = settings(write_job(tmp_path))
    assert print_plan(given, PLACES, "what the hosts said", sys.executable) == 0
    hosts, nothing, heading, first, second, spare = capsys.readouterr().out.splitlines()
    assert (hosts, nothing) == ("what the hosts said", "")
    assert heading.split() == [
        "host", "device", "stage", "parameters", "cost", "staleness", "F/B", "layers"
    ]  # fmt: skip
    host, device, stage, parameters, cost, staleness, layers = first.split()
    assert (host, device, stage, parameters, staleness) == ("left", "cpu", "0", "144", "1/0")
    assert cost.endswith("%")
    assert layers == "0"
    assert second.split()[:3] == ["right", "cuda:0", "1"]
    assert second.endswith("1 … 10 (10)")
    assert spare.split() == ["right", "cuda:1", "spare"]


def test_a_job_that_cannot_be_cut_is_refused_with_its_reason(tmp_path: Path) -> None:
    job = write_job(tmp_path, MLP.replace("def loss", "").replace("def model", "def modal"))
    with pytest.raises(JobError, match="model") as raised:
        print_plan(settings(job), PLACES, "", sys.executable)
    assert "Traceback" not in str(raised.value)
