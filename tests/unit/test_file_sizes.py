"""Files stay small enough to be read in one sitting."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "protocol",
    "coordinator",
    "worker",
    "launch",
    "optimizers",
    "readers",
    "simulator",
    "examples",
    "benchmarks",
)
MOST_LINES = 400
LONGER = {"messages.py"}  # the whole contract of the control plane, to be read in one place


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_has_more_lines_than_the_hard_stop(folder: str) -> None:
    lines = {path: len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")}
    too_long = {path.name: count for path, count in lines.items() if count > MOST_LINES}
    assert too_long.keys() <= LONGER, too_long
