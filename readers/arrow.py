"""Reads data sets that Hugging Face's ``save_to_disk`` wrote; their package is not needed.

The files are Arrow streams. pyarrow is an optional dependency, imported when the first is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..protocol.errors import DataError

__all__ = ["column", "find_arrow", "read_split"]

Columns = dict[str, list[Any]]


def find_arrow(path: Path) -> Path | None:
    """Return ``path`` if it is the folder of a ``DatasetDict``."""
    return path if (path / "dataset_dict.json").is_file() else None


def read_split(place: Path, split: str) -> Columns:
    """Return all columns of one split, by name, as Python values.

    Args:
        place: the folder with ``dataset_dict.json``.
        split: such as "train".

    Raises:
        DataError: pyarrow is missing, a file is missing, or one is damaged.
    """
    try:
        import pyarrow as pa
    except ModuleNotFoundError as error:
        raise DataError(
            f"{place} is in Hugging Face's Arrow format, which needs pyarrow and, for pictures, "
            f"Pillow: pip install pyarrow pillow"
        ) from error
    columns: Columns = {}
    file = place / split / "state.json"
    try:
        shards = [shard["filename"] for shard in json.loads(file.read_bytes())["_data_files"]]
        for shard in shards:
            file = place / split / shard
            with pa.ipc.open_stream(file.read_bytes()) as reader:
                for name, values in reader.read_all().to_pydict().items():
                    columns.setdefault(name, []).extend(values)
    except FileNotFoundError as error:
        raise DataError(f"{file} is missing: the copy is not whole. Save it again") from error
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be read: {error}. Save it again") from error
    return columns


def column(columns: Columns, names: tuple[str, ...], where: str) -> list[Any]:
    """Return the first of ``names`` that there is.

    Raises:
        DataError: there is none.
    """
    for name in names:
        if name in columns:
            return columns[name]
    raise DataError(
        f"{where} has no column {' or '.join(names)}, but {', '.join(columns) or 'none at all'}"
    )
