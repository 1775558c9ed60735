"""From options to a run: what is refused, what is only told, and with what a run is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.jobs import write_job

from spectrain.launch import run as module
from spectrain.launch.cli import launch
from spectrain.launch.hosts import Host
from spectrain.launch.preflight import ProbeResult
from spectrain.launch.probe import HostFacts, ProbeRequest, gather
from spectrain.protocol.errors import HostError, SettingsError, UserError
from spectrain.protocol.settings import Settings

NOT_GIVEN = {each.name: None for each in launch.params if each.name not in ("version", "help")}
LISTS = dict.fromkeys(("assignments", "exports", "ssh_options"), ())


class Started:
    """Stands in for the supervisor."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.places: list[Any] = []
        self.options: dict[str, Any] = {}

    def __call__(self, settings: Settings, places: list[Any], **options: Any) -> Started:
        self.settings, self.places, self.options = settings, places, options
        return self

    def run(self) -> int:
        return 42


Run = Callable[..., int]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    started = Started()
    monkeypatch.setattr(module, "Supervisor", started)
    return started


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run the command in a folder with a job, given only what is named."""
    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)

    def run_with(**options: Any) -> int:
        given = {**NOT_GIVEN, **LISTS, "quiet": True, **options}
        return module.run(**given)

    return run_with


def answers(monkeypatch: pytest.MonkeyPatch, gpus: int = 0) -> list[ProbeRequest]:
    """Let pre-flight find hosts with so many GPUs; return what it is asked."""
    asked: list[ProbeRequest] = []

    def preflight(hosts: tuple[Host, ...], request: ProbeRequest, **_: Any) -> Any:
        asked.append(request)
        return tuple(ProbeResult(host=host, facts=facts(request, gpus)) for host in hosts)

    monkeypatch.setattr(module, "run_preflight", preflight)
    monkeypatch.setattr(module, "listen_address", lambda _: "10.0.0.1")
    return asked


def facts(request: ProbeRequest, gpus: int) -> HostFacts:
    from dataclasses import replace

    own = gather(replace(request, device="cpu"))
    return replace(own, gpus=("a GPU",) * gpus)


def test_the_jobs_own_settings_and_the_options_make_the_run(run: Run, started: Started) -> None:
    assert run(device="cpu", stages=3, epochs=2, assignments=("width=4",)) == 42
    settings = started.settings
    assert settings is not None
    assert (settings.stages, settings.epochs, settings.batch_size) == (3, 2, 16)
    assert settings.hyper == {"width": "4"}
    assert settings.job == str(Path("job.py").resolve())


def test_a_run_on_this_machine_listens_nowhere_and_begins_anew(run: Run, started: Started) -> None:
    run(device="cpu", stages=2)
    assert (started.options["bind"], started.options["resumes"]) == (None, None)
    (place,) = started.places
    assert (place.is_here, place.devices) == (True, ("cpu", "cpu"))


def test_without_a_choice_gpus_are_taken_if_there_are_any(
    run: Run, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "gather", lambda request: facts(request, gpus=2))
    run()
    assert started.settings is not None
    assert (started.settings.device, started.settings.stages) == ("cuda", 2)
    monkeypatch.setattr(module, "gather", lambda request: facts(request, gpus=0))
    run(stages=3)
    assert (started.settings.device, started.settings.stages) == ("cpu", 3)


def test_hosts_are_checked_and_give_a_slot_for_each_gpu(
    run: Run, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answers(monkeypatch, gpus=2)
    run(hosts="left,right")
    assert [request.device for request in asked] == ["cuda"]
    assert [place.devices for place in started.places] == [("cuda:0", "cuda:1")] * 2
    assert started.settings is not None
    assert (started.settings.stages, started.settings.device) == (4, "cuda")
    assert started.options["bind"] == "10.0.0.1"


def test_hosts_on_cpu_have_the_slots_that_were_named(
    run: Run, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch)
    run(hosts="localhost:2,right:1", device="cpu", bind="10.0.0.9:5000")
    assert [len(place.devices) for place in started.places] == [2, 1]
    assert [place.is_here for place in started.places] == [True, False]
    assert started.options["bind"] == "10.0.0.9:5000"


def test_more_stages_than_slots_are_refused_before_anything_is_started(
    run: Run, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch)
    with pytest.raises(HostError, match="4 stages need 4 slots"):
        run(hosts="left:2,right:1", device="cpu", stages=4)
    assert started.settings is None


def test_wrong_hosts_are_told_before_a_wrong_job(run: Run) -> None:
    with pytest.raises(HostError, match="name hosts twice"):
        run(nodes="a", hosts="b", job="nowhere.py")


def test_a_job_that_is_not_there_is_refused(run: Run) -> None:
    with pytest.raises(UserError, match=r"nowhere\.py: no such job file"):
        run(device="cpu", stages=2, job="nowhere.py")


def test_all_mistakes_in_settings_are_told(run: Run, started: Started) -> None:
    with pytest.raises(SettingsError, match=r"(?s)epochs = 0.*microbatches = 2"):
        run(device="cpu", stages=2, epochs=0, microbatches=2, method="stash")
    assert started.settings is None


def test_how_to_reach_hosts_and_what_they_get_is_passed_on(
    run: Run, started: Started, tmp_path: Path
) -> None:
    (tmp_path / "env").write_text("COLOUR=blue\n")
    run(
        device="cpu", stages=1, ssh_port=2222, ssh_identity="key", ssh_options=("A=b",),
        python="/usr/bin/python9", exports=("SIZE=3",), env_file=tmp_path / "env",
    )  # fmt: skip
    ssh = started.options["ssh"]
    assert (ssh.port, ssh.identity, ssh.options) == (2222, "key", ("A=b",))
    assert started.options["python"] == "/usr/bin/python9"
    environment = started.options["environment"]
    assert (environment["COLOUR"], environment["SIZE"]) == ("blue", "3")


def test_the_layer_counts_of_the_user_reach_the_run(run: Run, started: Started) -> None:
    run(device="cpu", stages=2, partition="4,7")
    assert started.settings is not None
    assert started.settings.partition == (4, 7)


def test_a_dry_run_prints_and_starts_nothing(
    run: Run, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[tuple[Any, ...]] = []

    def print_plan(*arguments: Any) -> int:
        printed.append(arguments)
        return 0

    monkeypatch.setattr(module, "print_plan", print_plan)
    assert run(device="cpu", stages=2, dry_run=True) == 0
    assert printed[0][0].stages == 2
    assert started.settings is None


# -- going on with an earlier run ---------------------------------------------------------------


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """Return the run directory of an earlier launch."""
    folder = tmp_path / "earlier"
    folder.mkdir()
    settings = Settings(job=str(tmp_path / "job.py"), run_dir="/old", stages=2, seed=5)
    (folder / "settings.json").write_text(settings.to_json())
    (folder / "run.json").write_text('{"run_id": "abcd"}')
    return folder


def test_a_resumed_run_has_the_id_and_the_settings_of_the_earlier(
    run: Run, started: Started, earlier: Path
) -> None:
    run(resume=earlier, epochs=9)
    assert started.options["resumes"] == "abcd"
    assert started.settings is not None
    assert (started.settings.seed, started.settings.epochs) == (5, 9)
    assert started.settings.run_dir == str(earlier)


@pytest.mark.parametrize(
    "option", [{"job": "job.py"}, {"assignments": ("lr=1",)}, {"run_dir": "other"}]
)
def test_what_the_earlier_launch_has_settled_is_not_given_again(
    run: Run, earlier: Path, option: dict[str, Any]
) -> None:
    with pytest.raises(SettingsError, match="--resume takes the job, --set and --run-dir"):
        run(resume=earlier, **option)


def test_another_seed_is_another_run(run: Run, started: Started, earlier: Path) -> None:
    with pytest.raises(SettingsError, match="--seed would make another run of it"):
        run(resume=earlier, seed=6)
    assert started.settings is None
