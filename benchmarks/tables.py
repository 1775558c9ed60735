"""How a benchmark tells what it measured: a Markdown table on standard output, and a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["print_table", "write_json"]


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows that have the same columns; floats with three digits that count."""
    print("| " + " | ".join(rows[0]) + " |")
    print("|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(map(_cell, row.values())) + " |")


def write_json(path: Path | None, measured: Mapping[str, Any]) -> None:
    """Write what was measured, if anybody asked for it."""
    if path is not None:
        path.write_text(json.dumps(measured, indent=2) + "\n")


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
