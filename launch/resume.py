"""Reads what an earlier launch left in its run directory, so that this one can go on from there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..protocol.errors import SettingsError, UserError
from ..protocol.settings import Settings

__all__ = ["resumed_run"]

_MAY_CHANGE = frozenset(
    (
        "epochs", "max_batches", "max_restarts", "snapshot_every", "log_memory_bytes",
        "start_timeout_s", "wait_timeout_s", "lease_s", "grace_s",
    )
)  # fmt: skip
"""Settings that do not change what a trained batch does to the weights."""


def resumed_run(run_dir: Path, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the settings of the run to go on with, and its id.

    Args:
        run_dir: of the earlier launch.
        given: options of this launch, by name of the setting; None: not given.

    Raises:
        UserError: there is no run, or nothing of it is left to do.
        SettingsError: an option would make another run of it.
    """
    try:
        settings = Settings.from_json((run_dir / "settings.json").read_text())
        run_id = str(json.loads((run_dir / "run.json").read_text())["run_id"])
    except OSError as error:
        raise UserError(
            f"--resume {run_dir}: {error.filename} cannot be read ({error.strerror}); name the "
            "run directory of an earlier launch"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"--resume {run_dir}: its settings.json or run.json is not that of a run ({error!r}); "
            "name the run directory of an earlier launch"
        ) from error
    changes = {
        name: value
        for name, value in given.items()
        if value is not None and value != getattr(settings, name)
    }
    fixed = sorted(name for name in changes if name not in _MAY_CHANGE)
    if fixed:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in fixed)
        raise SettingsError(
            f"--resume keeps the settings of {run_dir}; {options} would make another run of it. "
            "Leave that out, or begin a new run"
        )
    finished = run_dir / "summary.json"
    if not changes and finished.exists() and not json.loads(finished.read_text())["stopped_early"]:
        raise UserError(
            f"--resume {run_dir}: that run is done; with --epochs it can be made longer"
        )  # fmt: skip
    return {**settings.to_dict(), **changes, "run_dir": str(run_dir.resolve())}, run_id
