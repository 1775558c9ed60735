"""Where files of snapshots lie, found quickly by what they are. It knows no rounds and no hosts.

With a thousand stages each of them tells of its snapshot, and each telling asks where others lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from ..protocol.messages import SnapshotFile

__all__ = ["HeldFiles", "Place"]

Place: TypeAlias = tuple[int, str]
"""Host index and path."""

_Content: TypeAlias = tuple[int, int, str]  # stage, update, digest


class HeldFiles:
    """Files by place, in the order in which they were heard of."""

    def __init__(self) -> None:
        self._files: dict[Place, SnapshotFile] = {}
        self._places: dict[_Content, dict[Place, None]] = {}

    def __iter__(self) -> Iterator[SnapshotFile]:
        return iter(self._files.values())

    def add(self, host: int, file: SnapshotFile) -> None:
        """Note a file, in place of what was there."""
        place = host, file.path
        known = self._files.get(place)
        if known == file:
            return
        if known is not None:
            del self._places[_content(known)][place]
        self._files[place] = file
        self._places.setdefault(_content(file), {})[place] = None

    def drop(self, condition: Callable[[int, SnapshotFile], bool]) -> None:
        """Forget each file for whose host and content the condition holds."""
        dropped = [place for place, file in self._files.items() if condition(place[0], file)]
        for place in dropped:
            content = _content(self._files.pop(place))
            del self._places[content][place]
            if not self._places[content]:
                del self._places[content]

    def places(self, stage: int, update: int, digest: str) -> list[Place]:
        """Return where this snapshot lies."""
        return list(self._places.get((stage, update, digest), ()))


def _content(file: SnapshotFile) -> _Content:
    return file.stage, file.update, file.digest
