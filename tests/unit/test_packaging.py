"""An installed SpecTrain puts one package into site-packages, whole, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import spectrain

ROOT = Path(spectrain.__file__).parent
PACKAGES = (
    "protocol",
    "coordinator",
    "worker",
    "worker/methods",
    "launch",
    "optimizers",
    "readers",
    "simulator",
    "examples",
    "examples/paper",
)
OUTSIDE = ("tests", "benchmarks", "docs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names in the wheel that ``pip install .`` would unpack, built from a copy of the sources."""
    directory = tmp_path_factory.mktemp("packaging")
    sources = directory / "sources"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "runs", "data")
    shutil.copytree(ROOT, sources, ignore=left_out)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "--wheel-dir", directory, sources], check=True, capture_output=True, timeout=50
    )
    (path,) = directory.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def test_only_spectrain_and_its_metadata_reach_site_packages(wheel: list[str]) -> None:
    top = {name.split("/")[0] for name in wheel}
    assert top == {"spectrain", f"spectrain-{spectrain.__version__}.dist-info"}


def test_every_module_is_in_the_wheel(wheel: list[str]) -> None:
    modules = [
        ROOT / "__init__.py",
        *(p for package in PACKAGES for p in (ROOT / package).glob("*.py")),
    ]
    expected = {f"spectrain/{path.relative_to(ROOT)}" for path in modules}
    assert expected == {name for name in wheel if name.endswith(".py")}


def test_every_folder_of_modules_is_a_package_that_is_installed() -> None:
    folders = {
        path.parent.relative_to(ROOT).as_posix()
        for path in ROOT.glob("**/__init__.py")
        if not any(part.startswith(".") or part == "build" for part in path.relative_to(ROOT).parts)
    }
    assert folders == {".", *PACKAGES}


def test_what_is_for_developers_only_stays_out_of_the_wheel(wheel: list[str]) -> None:
    assert not [name for name in wheel if name.split("/")[1] in OUTSIDE]


def test_the_licence_travels_with_the_wheel(wheel: list[str]) -> None:
    assert f"spectrain-{spectrain.__version__}.dist-info/licenses/LICENSE" in wheel


def test_both_commands_are_installed(wheel: list[str]) -> None:
    assert f"spectrain-{spectrain.__version__}.dist-info/entry_points.txt" in wheel
    for command in ("spectrain", "spectrain-launch"):
        assert (Path(sys.executable).parent / command).is_file()


def test_a_stray_import_finds_none_of_our_sub_packages(tmp_path: Path) -> None:
    names = [package for package in PACKAGES if "/" not in package]
    script = "import importlib.util as u; print([u.find_spec(name) for name in {names}])"
    answer = subprocess.run(
        [sys.executable, "-c", script.format(names=names)],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert str(ROOT) not in answer.stdout
