"""``spectrain simulate``: all stages in one process, with the bits of a run of many."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spectrain import examples

pytestmark = pytest.mark.integration

COMMAND = Path(sys.executable).with_name("spectrain")
DIGITS = Path(examples.__file__).with_name("digits.py")
OPTIONS = ("--stages", "3", "--max-batches", "12", "--seed", "3", "--partition", "equal")


def simulate(*options: str) -> subprocess.CompletedProcess[str]:
    argv = [str(COMMAND), "simulate", *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=50, check=False)


def test_a_simulation_ends_with_the_weights_of_a_real_run(tmp_path: Path) -> None:
    simulated = simulate(*OPTIONS, str(DIGITS))
    records = [json.loads(line) for line in simulated.stdout.splitlines()]
    assert [record["kind"] for record in records] == ["batch"] * 12 + ["evaluation", "summary"]
    launch = [str(COMMAND), "launch", "--device", "cpu", "--quiet", "--run-dir", str(tmp_path)]
    subprocess.run([*launch, *OPTIONS, str(DIGITS)], check=True, capture_output=True, timeout=50)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert records[-1]["weights_sha256"] == summary["weights_sha256"]
    assert simulated.returncode == 0


def test_a_mistake_is_one_sentence() -> None:
    refused = simulate("--stages", "2", "--set", "widht=3", str(DIGITS))
    assert refused.returncode != 0
    assert "widht" in refused.stderr
    assert "Traceback" not in refused.stderr
