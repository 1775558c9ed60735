"""Prints what a run would do, and starts none of it but the one process that cuts the model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

from ..protocol.errors import JobError
from ..protocol.settings import Settings
from .supervisor import Place

__all__ = ["print_plan"]


def print_plan(settings: Settings, places: Sequence[Place], hosts_table: str, python: str) -> int:
    """Print hosts, stages, devices, layers, sizes and predicted staleness; return the exit code.

    Raises:
        JobError: the job cannot be loaded or cut.
    """
    done = subprocess.run(
        [python, "-m", "spectrain.coordinator.plan"],
        input=settings.to_json(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise JobError(done.stderr.strip())
    slots = [(place.host.name, device) for place in places for device in place.devices]
    if hosts_table:
        print(hosts_table, end="\n\n")  # noqa: T201
    print(f"{'host':16} {'device':8} {'stage':>5} {'parameters':>12} {'cost':>6}  "  # noqa: T201
          "staleness F/B  layers")  # fmt: skip
    rows = json.loads(done.stdout)
    for row, (host, device) in zip(rows, slots, strict=False):
        layers = row["layers"]
        span = layers[0] if len(layers) == 1 else f"{layers[0]} … {layers[-1]} ({len(layers)})"
        forward, backward = row["staleness"]["forward_max"], row["staleness"]["backward_max"]
        print(  # noqa: T201
            f"{host:16} {device:8} {row['stage']:5d} {row['parameters']:12,d} "
            f"{row['cost_share']:6.1%}  {forward:>9}/{backward:<3}  {span}"
        )
    for host, device in slots[len(rows) :]:
        print(f"{host:16} {device:8} spare")  # noqa: T201
    return 0
