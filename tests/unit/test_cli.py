"""From the command line to ``run``, and from what that does to an exit code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from spectrain import __version__
from spectrain.launch import run as run_module
from spectrain.launch.cli import launch, main
from spectrain.protocol.errors import DeadlineError, PreflightError, SettingsError

Invoke = Callable[..., Result]


class Recorder:
    """Stands in for ``run``: keeps what it was called with, and does what it is told."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.raises: BaseException | None = None

    def __call__(self, **options: Any) -> int:
        self.options = options
        if self.raises is not None:
            raise self.raises
        return 42


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(run_module, "run", recorder)
    return recorder


def invoke(*arguments: str, env: Mapping[str, str] | None = None) -> Result:
    return CliRunner().invoke(launch, arguments, env=env)


def test_the_exit_code_is_that_of_the_run(recorder: Recorder) -> None:
    assert invoke("train.py").exit_code == 42
    assert recorder.options["job"] == "train.py"


def test_what_is_not_given_is_none_so_that_the_job_may_say_it(recorder: Recorder) -> None:
    invoke()
    empty = {"assignments": (), "exports": (), "ssh_options": ()}
    flags = dict.fromkeys(("quiet", "json_lines", "dry_run"), False)
    assert recorder.options == {**dict.fromkeys(recorder.options), **empty, **flags}


def test_options_arrive_as_what_they_are(recorder: Recorder) -> None:
    invoke(
        "--stages", "3", "--lease", "2.5", "--no-evaluate", "--set", "lr=0.1", "--set", "width=3",
        "-x", "A", "-H", "a:2,b", "-q", "--log-memory", "2MiB", "--resume", "runs/x",
    )  # fmt: skip
    expected = {
        "stages": 3, "lease_s": 2.5, "evaluate": False, "assignments": ("lr=0.1", "width=3"),
        "exports": ("A",), "hosts": "a:2,b", "quiet": True, "log_memory_bytes": 2 << 20,
        "resume": Path("runs/x"),
    }  # fmt: skip
    assert recorder.options.items() >= expected.items()


def test_underscores_are_taken_for_dashes(recorder: Recorder) -> None:
    invoke("--batch_size", "8")
    assert recorder.options["batch_size"] == 8


def test_options_come_from_the_environment_and_the_command_line_wins(recorder: Recorder) -> None:
    env = {"SPECTRAIN_LAUNCH_EPOCHS": "5", "SPECTRAIN_LAUNCH_LEASE": "7"}
    invoke("--epochs", "6", env=env)
    assert (recorder.options["epochs"], recorder.options["lease_s"]) == (6, 7)


@pytest.mark.parametrize(
    "arguments",
    [("--stages", "many"), ("--device", "tpu"), ("--precision", "fp16"), ("--unknown",),
     ("a.py", "b.py"), ("--log-memory", "lots"), ("--env-file", "/nowhere")],
)  # fmt: skip
def test_what_click_cannot_read_is_a_usage_error(
    recorder: Recorder, arguments: tuple[str, ...]
) -> None:
    assert invoke(*arguments).exit_code == 2
    assert recorder.options == {}


def test_a_size_that_is_none_says_what_one_looks_like(recorder: Recorder) -> None:
    assert "'lots' is no size; write 512MiB" in invoke("--log-memory", "lots").output


@pytest.mark.parametrize(
    ("error", "code"), [(SettingsError, 2), (PreflightError, 3), (DeadlineError, 4)]
)
def test_an_error_is_one_message_with_its_exit_code(
    recorder: Recorder, error: type[Exception], code: int
) -> None:
    recorder.raises = error("it cannot be")
    result = invoke()
    assert (result.exit_code, result.stderr) == (code, "spectrain: it cannot be\n")
    assert result.stdout == ""


def test_a_fault_of_ours_is_not_hidden(recorder: Recorder) -> None:
    recorder.raises = ZeroDivisionError("ours")
    assert isinstance(invoke().exception, ZeroDivisionError)


def test_ctrl_c_before_anything_was_started_is_no_traceback(recorder: Recorder) -> None:
    recorder.raises = KeyboardInterrupt()
    result = invoke()
    assert (result.exit_code, "Traceback" in result.output) == (130, False)


def test_the_version_is_told() -> None:
    assert invoke("--version").output == f"spectrain, version {__version__}\n"


def test_help_says_what_is_done_without_a_job() -> None:
    help_text = " ".join(invoke("-h").output.split())
    assert "else the digits example that comes with the package" in help_text


def test_launch_is_also_a_command_of_spectrain(recorder: Recorder) -> None:
    result = CliRunner().invoke(main, ["launch", "--stages", "2"])
    assert (result.exit_code, recorder.options["stages"]) == (42, 2)


def status_of(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["status", str(folder), *options])


def test_the_status_of_a_run_is_shown_or_printed_as_json(tmp_path: Path) -> None:
    status = {
        "state": "done", "workers": [], "coordinator": {"pid": 1, "host": "left", "started": 0.0},
        "updated": 0.0, "waiting_for": [], "batch": 5, "train_batches": 5, "epoch": 0, "epochs": 1,
        "loss": 0.5, "lr": 0.1, "samples_per_s": None, "eta_s": None, "metrics": {},
        "exit_code": 0, "cause": None,
    }  # fmt: skip
    (tmp_path / "status.json").write_text(json.dumps(status))
    shown = status_of(tmp_path)
    assert shown.exit_code == 0
    assert "done" in shown.output
    assert json.loads(status_of(tmp_path, "--json").output).items() >= {"state": "done"}.items()


def test_the_status_of_no_run_is_a_users_error(tmp_path: Path) -> None:
    result = status_of(tmp_path / "nothing")
    assert result.exit_code == 2
    assert result.stderr.startswith("spectrain: ")
