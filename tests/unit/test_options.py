"""One run's settings out of what was said where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spectrain.launch.hosts import Host
from spectrain.launch.options import (
    check,
    choose_hosts,
    local_place,
    make_settings,
    parse_hyper,
    parse_partition,
    parse_size,
    stages_for,
)
from spectrain.launch.supervisor import Place
from spectrain.protocol.errors import HostError, JobError, SettingsError
from spectrain.protocol.job_file import JobSource

SLURM = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS_PER_NODE": "3"}


def names(hosts: tuple[Host, ...]) -> list[str]:
    return [host.name for host in hosts]


def place(name: str, slots: int) -> Place:
    return Place(host=Host(name), devices=("cpu",) * slots, is_here=False)


def job(folder: Path, text: str = "") -> JobSource:
    path = folder / "job.py"
    path.write_text(text)
    return JobSource(path, "a test")


def made(folder: Path, text: str = "", *, run_dir: str | None = None, **given: Any) -> Any:
    return make_settings(job(folder, text), given, {"lr": "0.1"}, run_dir)


# -- hosts --------------------------------------------------------------------------------------


def test_without_hosts_it_is_this_machine() -> None:
    assert choose_hosts(None, None, SLURM) == ()


def test_hosts_come_from_a_list_a_file_or_slurm(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("left slots=2\nright slots=1\n")
    assert names(choose_hosts(None, "a:2,b:1", {})) == ["a", "b"]
    assert names(choose_hosts(str(tmp_path / "hosts"), None, {})) == ["left", "right"]
    assert names(choose_hosts("slurm", None, SLURM)) == ["node1", "node2"]


def test_slurms_older_names_are_understood() -> None:
    older = {"SLURM_NODELIST": "node7", "SLURM_TASKS_PER_NODE": "2"}
    (host,) = choose_hosts("slurm", None, older)
    assert (host.name, host.slots) == ("node7", 2)


def test_two_ways_to_name_hosts_are_refused() -> None:
    with pytest.raises(HostError, match="--nodes and --hosts name hosts twice"):
        choose_hosts("hosts.txt", "a:2", {})


def test_slurm_outside_an_allocation_is_refused() -> None:
    with pytest.raises(HostError, match="SLURM_JOB_NODELIST is not set; run inside an allocation"):
        choose_hosts("slurm", None, {})


def test_a_local_run_on_cpu_has_as_many_slots_as_stages() -> None:
    assert local_place("cpu", 3, gpus=8).devices == ("cpu", "cpu", "cpu")
    assert local_place("cpu", 3, gpus=8).is_here


def test_a_local_run_on_gpus_has_a_slot_for_each() -> None:
    assert local_place("cuda", 2, gpus=3).devices == ("cuda:0", "cuda:1", "cuda:2")


def test_a_local_run_on_cpu_needs_a_number_of_stages() -> None:
    with pytest.raises(SettingsError, match="--device cpu without hosts needs --stages"):
        local_place("cpu", None, gpus=0)


def test_there_is_a_stage_for_each_slot_unless_fewer_are_wanted() -> None:
    places = [place("a", 2), place("b", 1)]
    assert (stages_for(None, places), stages_for(2, places)) == (3, 2)


def test_more_stages_than_slots_are_refused_with_what_each_host_offers() -> None:
    with pytest.raises(HostError, match=r"4 stages need 4 slots, .* offer 3 \(a: 2, b: 1\)"):
        stages_for(4, [place("a", 2), place("b", 1)])


# -- settings -----------------------------------------------------------------------------------


def test_the_command_line_wins_over_the_job_and_the_job_over_the_defaults(tmp_path: Path) -> None:
    values = made(tmp_path, 'settings = {"epochs": 9, "batch_size": 8}', epochs=2, seed=None)
    assert (values["epochs"], values["batch_size"]) == (2, 8)
    assert "seed" not in values
    assert check(values, 2).seed == 0


@pytest.mark.parametrize("value", [0, False])
def test_a_value_of_nothing_is_a_value(tmp_path: Path, value: object) -> None:
    assert made(tmp_path, 'settings = {"evaluate": True}', evaluate=value)["evaluate"] is value


def test_layer_counts_in_the_job_may_be_a_list(tmp_path: Path) -> None:
    assert made(tmp_path, 'settings = {"partition": [3, 5]}')["partition"] == (3, 5)


def test_the_job_and_the_hyper_parameters_are_part_of_the_settings(tmp_path: Path) -> None:
    values = made(tmp_path)
    assert (values["job"], values["hyper"]) == (str(tmp_path / "job.py"), {"lr": "0.1"})


def test_the_run_directory_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert made(tmp_path, run_dir="here/run")["run_dir"] == str(tmp_path / "here" / "run")
    assert made(tmp_path)["run_dir"].startswith(str(tmp_path / "runs" / "2"))


def test_a_setting_of_the_job_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="epoch"):
        made(tmp_path, 'settings = {"epoch": 3}')


def test_all_mistakes_in_the_settings_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"(?s)epochs = '3'.*|.*batch_size = None"):
        check(made(tmp_path, 'settings = {"epochs": "3", "batch_size": None}'), 2)


# -- single options -----------------------------------------------------------------------------


def test_hyper_parameters_keep_their_text() -> None:
    found = parse_hyper(["lr=0.01", "name=a=b", "empty=", "lr=0.5"])
    assert found == {"lr": "0.5", "name": "a=b", "empty": ""}


@pytest.mark.parametrize("text", ["lr", "=3", "a b=3", "1x=3", ""])
def test_what_is_no_assignment_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"expected name=value, for example --set lr=0.01"):
        parse_hyper([text])


@pytest.mark.parametrize(
    ("text", "value"),
    [(None, None), ("auto", "auto"), ("equal", "equal"), ("8,10, 10", (8, 10, 10)), ("7", (7,))],
)
def test_a_partition_is_a_word_or_layer_counts(text: str | None, value: object) -> None:
    assert parse_partition(text) == value


def test_another_word_is_refused_and_the_nearest_suggested() -> None:
    with pytest.raises(SettingsError, match=r"'equals': .* 8,10,10; did you mean equal\?"):
        parse_partition("equals")
    with pytest.raises(SettingsError, match=r"'8;10': .* 8,10,10$"):
        parse_partition("8;10")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("1000000", 1_000_000),
        ("7B", 7),
        ("512MiB", 512 << 20),
        ("512mib", 512 << 20),
        ("2GB", 2_000_000_000),
        ("2G", 2_000_000_000),
        ("3 KiB", 3072),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_are_read_with_their_unit(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "MB", "1.5GB", "-1", "2 apples", "1iB", "1XB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size; write 512MiB, 2GB or a number of bytes"):
        parse_size(text)
