"""What a host says of itself."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import pytest

import spectrain
from spectrain.launch import probe
from spectrain.launch.probe import (
    MISSING,
    HostFacts,
    ProbeRequest,
    gather,
    job_digest,
    package_digest,
    versions,
    visible_gpus,
)

PACKAGE = Path(spectrain.__file__).parent

LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-11111111-aaaa)
  MIG 1g.18gb     Device  0: (UUID: MIG-33333333-cccc)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-12222222-bbbb)
GPU 2: Tesla T4 (UUID: GPU-44444444-dddd)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text("raise SystemExit('a job is only read')\n")
    return path


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a fake first on the path; a test that wants another answer rewrites it."""
    script = tmp_path / "bin" / "nvidia-smi"
    script.parent.mkdir()
    script.write_text(
        f"#!/bin/sh\nif [ $1 = -L ]; then cat <<'END'\n{LISTING}END\nelse echo 570.1; fi\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return script


def ask(job: Path, device: str = "cpu", run_dir: Path | None = None) -> HostFacts:
    return gather(ProbeRequest(job=str(job), run_dir=str(run_dir or job.parent), device=device))


# -- the program --------------------------------------------------------------------------------


def test_the_program_answers_one_request_with_one_line(job: Path) -> None:
    request = ProbeRequest(job=str(job), run_dir=str(job.parent / "runs" / "a"), device="cpu")
    before_s = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "spectrain.launch.probe"],
        input=json.dumps(asdict(request)) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    facts = HostFacts.from_json(done.stdout)
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    assert facts.executable == sys.executable
    assert facts.versions == versions(str(job))
    assert facts.run_dir_problem == ""
    assert facts.free_memory_bytes > 0
    assert 1 <= facts.cores <= (os.cpu_count() or 1)
    assert before_s <= facts.clock_s <= time.time()
    assert not (job.parent / "runs").exists()


def test_neither_torch_nor_the_job_is_imported(job: Path) -> None:
    program = (
        "import sys; from spectrain.launch.probe import versions; "
        f"versions({str(job)!r}); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_facts_survive_the_way_through_json(job: Path, nvidia_smi: Path) -> None:
    facts = ask(job, "cuda")
    assert HostFacts.from_json(facts.to_json()) == facts


# -- versions and digests -----------------------------------------------------------------------


def test_versions_name_what_is_installed(job: Path) -> None:
    found = versions(str(job))
    assert found.package == spectrain.__version__
    assert found.python == platform.python_version()
    assert found.torch == metadata.version("torch")
    assert found.package_digest == package_digest(PACKAGE)
    assert found.job_digest == hashlib.sha256(job.read_bytes()).hexdigest()


def test_a_host_without_torch_says_so(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(probe, "version", missing)
    assert versions(str(job)).torch == MISSING


def test_a_missing_job_has_no_digest(tmp_path: Path) -> None:
    assert job_digest(str(tmp_path / "gone.py")) == MISSING
    assert job_digest("no.such.module") == MISSING


def test_a_job_may_be_a_module_that_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "jobs_of_ada"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "train.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    assert job_digest("jobs_of_ada.train") == hashlib.sha256(b"x = 1\n").hexdigest()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    root = tmp_path / "copy"
    for name in ("coordinator", "examples", "launch", "optimizers", "protocol", "worker"):
        (root / name).mkdir(parents=True)
        (root / name / "__init__.py").write_text(f"# {name}\n")
    (root / "__init__.py").write_text("# root\n")
    return root


def test_a_copy_of_the_package_has_the_same_digest(copy: Path, tmp_path: Path) -> None:
    shutil.copytree(copy, tmp_path / "elsewhere")
    assert package_digest(copy) == package_digest(tmp_path / "elsewhere")


def test_every_source_file_counts(copy: Path) -> None:
    digests = {package_digest(copy)}
    for path in sorted(copy.rglob("*.py")):
        path.write_text(path.read_text() + "# more\n")
        digests.add(package_digest(copy))
    (copy / "worker" / "methods").mkdir()
    (copy / "worker" / "methods" / "new.py").write_text("")
    digests.add(package_digest(copy))
    assert len(digests) == 9


def test_where_one_file_ends_and_the_next_begins_counts(copy: Path) -> None:
    first, second = copy / "launch" / "a.py", copy / "launch" / "b.py"
    first.write_text("xy")
    second.write_text("z")
    before = package_digest(copy)
    first.write_text("x")
    second.write_text("yz")
    assert package_digest(copy) != before


def test_what_a_wheel_does_not_hold_does_not_count(copy: Path) -> None:
    before = package_digest(copy)
    for name in ("tests/test_x.py", ".venv/x.py", "setup.py", "worker/notes.txt"):
        path = copy / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    assert package_digest(copy) == before


def test_the_digest_covers_all_packages_that_are_installed() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages - {"tests", "benchmarks"} == set(probe._SUBPACKAGES)


# -- GPUs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, ("NVIDIA H200", "NVIDIA A100-SXM4-40GB", "Tesla T4")),
        ("2,0", ("Tesla T4", "NVIDIA H200")),
        (" 1 ", ("NVIDIA A100-SXM4-40GB",)),
        ("GPU-12", ("NVIDIA A100-SXM4-40GB",)),
        ("MIG-33333333-cccc", ("MIG 1g.18gb",)),
        ("GPU-1", ()),  # fits two
        ("", ()),
        ("-1", ()),
        ("0,7,1", ("NVIDIA H200",)),
        ("0,-1,1", ("NVIDIA H200",)),
        ("none", ()),
    ],
)
def test_visible_gpus_follow_the_mask(mask: str | None, expected: tuple[str, ...]) -> None:
    assert visible_gpus(LISTING, mask) == expected


def test_without_a_driver_there_are_no_gpus() -> None:
    assert visible_gpus("", None) == ()
    assert visible_gpus("", "0") == ()


def test_gpus_and_driver_come_from_nvidia_smi(job: Path, nvidia_smi: Path) -> None:
    facts = ask(job, "cuda")
    assert facts.gpus == ("NVIDIA H200", "NVIDIA A100-SXM4-40GB", "Tesla T4")
    assert (facts.driver, facts.visible_devices) == ("570.1", None)


def test_the_mask_of_the_host_is_respected_and_told(
    job: Path, nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    facts = ask(job, "cuda")
    assert (facts.gpus, facts.visible_devices) == (("Tesla T4",), "2")


def test_a_cpu_run_does_not_ask_for_gpus(job: Path, nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\ntouch called\n")
    facts = ask(job, "cpu")
    assert (facts.gpus, facts.driver) == ((), "")


@pytest.mark.parametrize("script", [None, "#!/bin/sh\necho 'GPU 0: broken'\nexit 9\n"])
def test_a_failing_nvidia_smi_means_no_gpus_and_says_why(
    script: str | None,
    job: Path,
    nvidia_smi: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if script is None:
        nvidia_smi.unlink()
        monkeypatch.setenv("PATH", str(nvidia_smi.parent))
    else:
        nvidia_smi.write_text(script)
    facts = ask(job, "cuda")
    assert (facts.gpus, facts.driver) == ((), "")
    assert "nvidia-smi" in capsys.readouterr().err


# -- the rest -----------------------------------------------------------------------------------


def test_a_run_directory_below_a_file_cannot_be_made(job: Path) -> None:
    assert ask(job, run_dir=job / "runs").run_dir_problem == f"{job} is not a directory"


def test_a_run_directory_without_permission_cannot_be_made(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, mode: int) -> bool:
        assert mode == os.W_OK | os.X_OK
        return False

    monkeypatch.setattr(os, "access", refuse)
    expected = f"{job.parent} is not writable"
    assert ask(job, run_dir=job.parent / "a" / "b").run_dir_problem == expected


def test_cores_are_counted_where_affinity_is_unknown(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert ask(job).cores == os.cpu_count()
