"""What ``spectrain simulate`` does: settles what to run, then lets one process train all stages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from ..protocol.job_file import find_job
from .options import check, local_place, make_settings, parse_hyper, parse_partition, stages_for

__all__ = ["simulate"]

_ELSEWHERE = ("job", "partition", "assignments")  # all other options are settings


def simulate(**options: Any) -> int:
    """Train on standard output, one JSON object per line; return the exit code.

    Raises:
        UserError: the job or an option cannot be used.
    """
    given = {name: value for name, value in options.items() if name not in _ELSEWHERE}
    given["partition"] = parse_partition(options["partition"])
    job = find_job(options["job"], Path.cwd())
    values = make_settings(job, given, parse_hyper(options["assignments"]), None)
    stages = values.get("stages")
    settings = check(
        {**values, "device": "cpu"}, stages_for(stages, [local_place("cpu", stages, 0)])
    )
    done = subprocess.run(
        [sys.executable, "-m", "spectrain.simulator"],
        input=settings.to_json(),
        text=True,
        check=False,
    )
    return done.returncode
