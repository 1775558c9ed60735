"""The job file is found as the user means it, and its settings are read without running it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spectrain.protocol.errors import JobError
from spectrain.protocol.job_file import did_you_mean, find_job, read_settings


def written(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


# -- finding ------------------------------------------------------------------------------------


def test_without_a_name_the_job_py_of_the_directory_is_taken(tmp_path: Path) -> None:
    job = written(tmp_path / "job.py")
    source = find_job(None, tmp_path)
    assert source.path == job
    assert source.origin == f"job.py in {tmp_path}"


def test_without_a_name_and_a_job_py_the_shipped_digits_example_is_taken(tmp_path: Path) -> None:
    source = find_job(None, tmp_path)
    assert source.path.name == "digits.py"
    assert source.path.is_file()
    assert "shipped digits example" in source.origin


@pytest.mark.parametrize("name", ["train.py", "train", "./train.py"])
def test_a_file_is_found_from_the_directory(tmp_path: Path, name: str) -> None:
    job = written(tmp_path / name)
    source = find_job(name, tmp_path)
    assert source.path == job.resolve()
    assert source.origin == f"the file {name}"


def test_an_absolute_path_is_taken_as_it_is(tmp_path: Path) -> None:
    job = written(tmp_path / "train.py")
    assert find_job(str(job), tmp_path / "elsewhere").path == job


def test_a_missing_file_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    written(tmp_path / "train.py")
    with pytest.raises(JobError, match=r"trian\.py: no such job file \(did you mean 'train\.py'"):
        find_job("trian.py", tmp_path)


def test_a_module_is_found_without_importing_the_packages_above_it(tmp_path: Path) -> None:
    written(tmp_path / "team" / "__init__.py", "raise RuntimeError('imported')")
    job = written(tmp_path / "team" / "jobs" / "train.py")
    source = find_job("team.jobs.train", tmp_path)
    assert source.path == job
    assert source.origin == "the module team.jobs.train"
    assert "team" not in sys.modules


def test_a_package_is_a_module_too(tmp_path: Path) -> None:
    job = written(tmp_path / "train" / "__init__.py")
    assert find_job("train", tmp_path).path == job


def test_an_installed_module_is_found(tmp_path: Path) -> None:
    source = find_job("spectrain.examples.digits", tmp_path)
    assert source.path == find_job(None, tmp_path).path


def test_a_module_on_the_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = written(tmp_path / "lib" / "lonely_train.py")
    monkeypatch.syspath_prepend(tmp_path / "lib")
    assert find_job("lonely_train", tmp_path).path == job


@pytest.mark.parametrize("name", ["no_such_package.train", "spectrain.nothing", "a-b", "sys"])
def test_what_is_neither_file_nor_module_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(JobError, match=f"'{name}' is neither a file in .* nor a Python module"):
        find_job(name, tmp_path)


# -- settings -----------------------------------------------------------------------------------


def test_settings_are_read_without_running_the_file(tmp_path: Path) -> None:
    job = written(tmp_path / "job.py", "import nothing_like_it\nsettings = {'epochs': 3}\n")
    assert read_settings(job) == {"epochs": 3}


def test_a_file_without_settings_has_none(tmp_path: Path) -> None:
    job = written(tmp_path / "job.py", "def f():\n    settings = {'epochs': 3}\n")
    assert read_settings(job) == {}


def test_settings_may_be_annotated_and_the_last_ones_hold(tmp_path: Path) -> None:
    text = "settings = {'epochs': 3}\nsettings: dict[str, int] = {'epochs': 4}\n"
    assert read_settings(written(tmp_path / "job.py", text)) == {"epochs": 4}


def test_settings_that_are_computed_are_refused_with_their_line(tmp_path: Path) -> None:
    job = written(tmp_path / "job.py", "\nsettings = {'epochs': 3 * x}\n")
    with pytest.raises(JobError, match=r"job\.py:2: settings must be a dictionary of literals"):
        read_settings(job)


def test_settings_that_are_no_dictionary_are_refused(tmp_path: Path) -> None:
    job = written(tmp_path / "job.py", "settings = ['epochs']\n")
    with pytest.raises(JobError, match=r"job\.py:1: settings must be a dictionary, not list"):
        read_settings(job)


def test_an_unknown_setting_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    job = written(tmp_path / "job.py", "settings = {'epoch': 3}\n")
    with pytest.raises(JobError, match=r"job\.py:1: .*'epoch'.*did you mean 'epochs'"):
        read_settings(job)


@pytest.mark.parametrize("name", ["job", "run_dir", "hyper"])
def test_what_is_about_the_run_is_no_setting_of_a_job(tmp_path: Path, name: str) -> None:
    job = written(tmp_path / "job.py", f"settings = {{{name!r}: 'x'}}\n")
    with pytest.raises(JobError, match="which is no setting"):
        read_settings(job)


def test_a_syntax_error_is_told_with_its_line(tmp_path: Path) -> None:
    job = written(tmp_path / "job.py", "x = 1\ndef f(:\n")
    with pytest.raises(JobError, match=r"job\.py:2: SyntaxError"):
        read_settings(job)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"gone\.py: cannot read the job file"):
        read_settings(tmp_path / "gone.py")


def test_a_name_far_from_all_others_suggests_nothing() -> None:
    assert did_you_mean("xyz", ["epochs", "seed"]) == ""
