"""Tells what one host has to offer: ``python -m spectrain.launch.probe``, one JSON line in and out.

Reports and judges nothing; ``preflight.py`` compares. It imports neither torch nor the job, and
leaves no trace on the host.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from .. import __version__
from ..protocol.errors import JobError
from ..protocol.job_file import find_job
from ..protocol.messages import Versions

__all__ = [
    "MISSING",
    "HostFacts",
    "ProbeRequest",
    "gather",
    "job_digest",
    "package_digest",
    "versions",
    "visible_gpus",
]

MISSING = "missing"
"""Stands for the version or digest of what is not there."""

_PACKAGE = Path(__file__).resolve().parent.parent
_SUBPACKAGES = (
    "coordinator",
    "examples",
    "launch",
    "optimizers",
    "protocol",
    "readers",
    "simulator",
    "worker",
)
_NVIDIA_SMI_TIMEOUT_S = 15.0
_GPU = re.compile(r"GPU \d+: (.+) \(UUID: (\S+)\)")
_MIG = re.compile(r"\s+(MIG \S+) .*\(UUID: (\S+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """What the launcher asks of a host.

    Attributes:
        job: path of the job file, or a dotted module name.
        run_dir: where the run directory will be made.
        device: "cpu" or "cuda"; GPUs are only looked for with "cuda".
    """

    job: str
    run_dir: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What one host says of itself.

    Attributes:
        host: its own name for itself.
        executable: path of its Python interpreter.
        versions: what must agree between hosts; ``MISSING`` where something is not there.
        gpus: names of the visible GPUs in order; empty unless asked for "cuda".
        visible_devices: ``CUDA_VISIBLE_DEVICES`` there; None if unset.
        driver: version of the NVIDIA driver; empty without one.
        cores: CPU cores that this process may use.
        free_memory_bytes: memory that is available without swapping.
        run_dir_problem: why the run directory cannot be written; empty when it can.
        clock_s: its wall clock when it answered, seconds since 1970.
    """

    host: str
    executable: str
    versions: Versions
    gpus: tuple[str, ...]
    visible_devices: str | None
    driver: str
    cores: int
    free_memory_bytes: int
    run_dir_problem: str
    clock_s: float

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> HostFacts:
        """Read ``to_json``'s line."""
        values: dict[str, Any] = json.loads(line)
        values["versions"] = Versions(**values["versions"])
        values["gpus"] = tuple(values["gpus"])
        return cls(**values)


def gather(request: ProbeRequest) -> HostFacts:
    """Look at this host."""
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus: tuple[str, ...] = ()
    driver = ""
    if request.device == "cuda":
        gpus = visible_gpus(_nvidia_smi("-L"), visible_devices)
        drivers = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
        driver = drivers.partition("\n")[0].strip()
    return HostFacts(
        host=socket.gethostname(),
        executable=sys.executable,
        versions=versions(request.job),
        gpus=gpus,
        visible_devices=visible_devices,
        driver=driver,
        cores=_cores(),
        free_memory_bytes=psutil.virtual_memory().available,
        run_dir_problem=_run_dir_problem(Path(request.run_dir)),
        clock_s=time.time(),
    )


def versions(job: str) -> Versions:
    """Return what must be the same on all hosts of a run, without importing torch or the job."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = MISSING
    return Versions(
        package=__version__,
        package_digest=package_digest(),
        job_digest=job_digest(job),
        python=platform.python_version(),
        torch=torch,
    )


def package_digest(root: Path = _PACKAGE) -> str:
    """Return the SHA-256 over the package's own source files, by sorted relative path.

    Only what an installed package holds counts, so that a checkout and a wheel of the same
    sources agree.
    """
    files = [root / "__init__.py"]
    for name in _SUBPACKAGES:
        files += (root / name).rglob("*.py")
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda file: file.relative_to(root).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\n{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def job_digest(job: str) -> str:
    """Return the SHA-256 of the job file, ``MISSING`` where there is none."""
    try:
        return hashlib.sha256(find_job(job, Path.cwd()).path.read_bytes()).hexdigest()
    except (JobError, OSError):
        return MISSING


def visible_gpus(listing: str, visible_devices: str | None) -> tuple[str, ...]:
    """Return the names of the GPUs that CUDA would show, in its order.

    Args:
        listing: what ``nvidia-smi -L`` printed; empty without a driver.
        visible_devices: ``CUDA_VISIBLE_DEVICES``: numbers, or first letters of a UUID that fit
            only one device. As CUDA does, the list ends at the first entry that names nothing.
            None shows all.
    """
    lines = listing.splitlines()
    gpus = [(match[1], match[2]) for line in lines if (match := _GPU.match(line))]
    slices = [(match[1], match[2]) for line in lines if (match := _MIG.match(line))]
    if visible_devices is None:
        return tuple(name for name, _ in gpus)
    visible: list[str] = []
    for entry in visible_devices.split(","):
        wanted = entry.strip()
        if wanted.isdecimal():
            found = [name for name, _ in gpus[int(wanted) :][:1]]
        else:
            found = [name for name, uuid in gpus + slices if wanted and uuid.startswith(wanted)]
        if len(found) != 1:
            break
        visible += found
    return tuple(visible)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _nvidia_smi(*arguments: str) -> str:
    """Return what nvidia-smi prints; empty where it is missing or fails: then there are no GPUs."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        print(f"nvidia-smi: {error}", file=sys.stderr)  # noqa: T201  the launcher shows it
        return ""
    return done.stdout.decode("utf-8", "replace")


def _run_dir_problem(path: Path) -> str:
    """Say why ``path`` cannot be made or written, without making it."""
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return f"{existing} is not a directory"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} is not writable"
    return ""


def main() -> None:
    """Answer one request."""
    request: Mapping[str, Any] = json.loads(sys.stdin.readline())
    print(gather(ProbeRequest(**request)).to_json(), flush=True)  # noqa: T201  its whole job


if __name__ == "__main__":
    main()
