"""Finds out in which of its usual layouts a user's copy of a data set lies, and says so if in none.

It knows no data set: which layouts there are, and how each is read, it is told.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ..protocol.errors import DataError

__all__ = ["Layout", "archive", "folder", "open_copy", "read_files"]

Data = TypeVar("Data")

_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Layout(Generic[Data]):
    """One of the ways in which copies of a data set lie on disk.

    Attributes:
        looks: what a user sees of it, in words.
        find: returns where under the user's path such a copy is, or None.
        read: reads what ``find`` has found.
    """

    looks: str
    find: Callable[[Path], Path | None]
    read: Callable[[Path], Data]


def open_copy(name: str, path: str | Path, layouts: Sequence[Layout[Data]]) -> Data:
    """Read the copy of a data set that lies at ``path``, in the first layout that fits.

    Args:
        name: the data set's, for messages.
        path: the user's, absolute or from the working directory; ``~`` is the home directory.
        layouts: in the order in which they are looked for.

    Raises:
        DataError: no path is given, nothing is there, or nothing in any of the layouts.
    """
    if not str(path).strip():
        raise DataError(
            f"no copy of {name} is named. Say which folder holds yours, in the jobs that come "
            f"with SpecTrain by --set data=FOLDER; nothing is downloaded. {_wanted(layouts)}"
        )
    place = Path(path).expanduser().absolute()
    for layout in layouts:
        if found := layout.find(place):
            return layout.read(found)
    raise DataError(
        f"{place} holds no copy of {name}. {_wanted(layouts)}. Found there: {_inventory(place)}. "
        f"Name the folder that holds your copy; nothing is downloaded"
    )


def folder(name: str, *marks: str) -> Callable[[Path], Path | None]:
    """Return a ``find`` for the folder ``name``, or another name if one of ``marks`` is in it."""

    def find(path: Path) -> Path | None:
        if (path / name).is_dir():
            return path / name
        return path if any((path / mark).exists() for mark in marks) else None

    return find


def archive(name: str) -> Callable[[Path], Path | None]:
    """Return a ``find`` for the archive ``name``, in the user's folder or named by the user."""

    def find(path: Path) -> Path | None:
        candidates = (path, path / name)
        return next((file for file in candidates if file.name == name and file.is_file()), None)

    return find


def read_files(place: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Return the contents of files by name, in the order of ``names``.

    Args:
        place: a folder, or a .tar.gz, of which nothing is unpacked to disk.
        names: without folders; in an archive any folder may hold them.

    Raises:
        DataError: a file is missing, or the archive is damaged.
    """
    if place.is_dir():
        found = {name: (place / name).read_bytes() for name in names if (place / name).is_file()}
    else:
        found = _members(place, names)
    if missing := [name for name in names if name not in found]:
        raise DataError(
            f"{place} lacks {', '.join(missing)}: the copy is not whole. Fetch or unpack it again"
        )
    return {name: found[name] for name in names}


def _members(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                name = Path(member.name).name
                content = tar.extractfile(member) if name in names else None
                if content is not None:
                    found[name] = content.read()
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise DataError(f"{path} is damaged: {error}. Fetch it again") from error
    return found


def _wanted(layouts: Sequence[Layout[Data]]) -> str:
    return f"It may lie there as {'; or '.join(layout.looks for layout in layouts)}"


def _inventory(place: Path) -> str:
    if not place.exists():
        return "nothing, there is no such folder"
    if not place.is_dir():
        return f"a file of {place.stat().st_size} bytes"
    names = sorted(entry.name + "/" * entry.is_dir() for entry in place.iterdir())
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more or "nothing, the folder is empty"
