"""What an earlier launch left, and what may be changed when a run goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spectrain.launch.resume import resumed_run
from spectrain.protocol.errors import SettingsError, UserError
from spectrain.protocol.settings import Settings

SETTINGS = Settings(
    job="/job.py", run_dir="/elsewhere", stages=3, seed=5, epochs=4, partition=(2, 2, 3)
)
NOTHING: dict[str, Any] = dict.fromkeys(Settings.__dataclass_fields__)
MAY_CHANGE = {
    "epochs": 9, "max_batches": 7, "max_restarts": 3, "snapshot_every": 11,
    "log_memory_bytes": 1000, "start_timeout_s": 5.0, "wait_timeout_s": 6.0, "lease_s": 20.0,
    "grace_s": 3.0,
}  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return the directory of a run that did not come to its end."""
    (tmp_path / "settings.json").write_text(SETTINGS.to_json())
    (tmp_path / "run.json").write_text('{"run_id": "abcd"}')
    return tmp_path


def finish(run_dir: Path, *, early: bool) -> None:
    (run_dir / "summary.json").write_text(json.dumps({"stopped_early": early}))


def test_a_run_goes_on_with_its_settings_and_its_id(run_dir: Path) -> None:
    values, run_id = resumed_run(run_dir, NOTHING)
    assert run_id == "abcd"
    assert Settings.from_dict(values) == replace(SETTINGS, run_dir=str(run_dir))


def test_the_run_directory_may_have_moved(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_dir.parent)
    values, _ = resumed_run(Path(run_dir.name), NOTHING)
    assert values["run_dir"] == str(run_dir)


@pytest.mark.parametrize(("name", "value"), MAY_CHANGE.items())
def test_what_does_not_touch_the_weights_may_change(
    name: str, value: object, run_dir: Path
) -> None:
    values, _ = resumed_run(run_dir, {**NOTHING, name: value})
    assert values[name] == value
    assert Settings.from_dict(values).stages == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("stages", 2), ("method", "sync"), ("microbatches", 2), ("device", "cuda"),
     ("precision", "bf16"), ("batch_size", 1), ("seed", 6), ("threads", 2), ("evaluate", False),
     ("partition", (3, 2, 2))],
)  # fmt: skip
def test_what_would_make_another_run_of_it_is_refused_by_its_option(
    name: str, value: object, run_dir: Path
) -> None:
    option = "--" + name.replace("_", "-")
    with pytest.raises(SettingsError, match=f"{option} would make another run of it"):
        resumed_run(run_dir, {**NOTHING, name: value})


def test_all_that_may_not_change_is_named(run_dir: Path) -> None:
    with pytest.raises(SettingsError, match="--batch-size, --seed would make"):
        resumed_run(run_dir, {**NOTHING, "seed": 6, "batch_size": 1})


def test_saying_again_what_holds_is_no_change(run_dir: Path) -> None:
    values, _ = resumed_run(run_dir, {**NOTHING, "seed": 5, "stages": 3})
    assert (values["seed"], values["stages"]) == (5, 3)


def test_layer_counts_may_be_said_again_too(run_dir: Path) -> None:
    values, _ = resumed_run(run_dir, {**NOTHING, "partition": (2, 2, 3)})
    assert tuple(values["partition"]) == (2, 2, 3)


@pytest.mark.parametrize("name", ["settings.json", "run.json"])
def test_a_directory_without_a_run_is_refused_with_the_missing_file(
    name: str, run_dir: Path
) -> None:
    (run_dir / name).unlink()
    with pytest.raises(UserError, match=f"{name} cannot be read .No such file"):
        resumed_run(run_dir, NOTHING)


@pytest.mark.parametrize("name", ["settings.json", "run.json"])
@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_file_that_is_not_a_runs_is_refused(name: str, text: str, run_dir: Path) -> None:
    (run_dir / name).write_text(text)
    with pytest.raises(UserError, match="name the run directory of an earlier launch"):
        resumed_run(run_dir, NOTHING)


def test_a_run_that_is_done_is_refused_unless_it_is_made_longer(run_dir: Path) -> None:
    finish(run_dir, early=False)
    with pytest.raises(UserError, match="that run is done; with --epochs it can be made longer"):
        resumed_run(run_dir, NOTHING)
    values, _ = resumed_run(run_dir, {**NOTHING, "epochs": 9})
    assert values["epochs"] == 9


def test_a_run_that_was_stopped_may_go_on(run_dir: Path) -> None:
    finish(run_dir, early=True)
    assert resumed_run(run_dir, NOTHING)[1] == "abcd"
