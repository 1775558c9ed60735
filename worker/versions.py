"""Copies of a stage's weights that will be read again: kept ones, and older clean versions.

It copies and counts; which weights are kept, for whom and how long, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .reading import Key
from .segment import Segment

__all__ = ["Copy", "Versions"]

_OLDER = "version"


@dataclass(slots=True, eq=False)
class Copy:
    """Live weights as they were, one flat tensor per segment, and for how many keys."""

    tensors: list[Tensor]
    users: int = 0


class Versions:
    """Memory of the weights of one stage. Memory once taken is used again, never given back.

    Args:
        segments: of the stage.
        older: how many clean versions before the newest one may be asked for.

    Attributes:
        copies: of all weights, that memory was taken for so far.
    """

    def __init__(self, segments: Sequence[Segment], *, older: int) -> None:
        self.copies = older
        self._segments = segments
        self._depth = older
        self._kept: dict[Key, Copy] = {}
        self._spare: list[Copy] = []
        self._of_live: Copy | None = None  # equal to the live weights, if there is one
        self._older: dict[int, list[Tensor]] = {}

    # -- kept under a key -----------------------------------------------------------------------

    def keep(self, key: Key) -> None:
        """Keep the live weights under ``key``; equal ones in a row share one copy."""
        copy = self._of_live
        if copy is None:
            copy = self._spare.pop() if self._spare else self._new()
            for kept, segment in zip(copy.tensors, self._segments, strict=True):
                kept.copy_(segment.live)
            self._of_live = copy
        copy.users += 1
        self._kept[key] = copy

    def kept(self, key: Key) -> Copy:
        """Return what is kept under ``key``."""
        assert key in self._kept, f"nothing is kept for {key}, only for {list(self._kept)}"
        return self._kept[key]

    def live_changed(self, to: Copy | None = None) -> None:
        """Take note that live weights are others now: those of ``to``, if given."""
        self._of_live = to

    def drop(self, updates: int) -> None:
        """Drop what is kept for batches that are updated by now, the first ``updates``."""
        for key in [key for key in self._kept if key[0] < updates]:
            copy = self._kept.pop(key)
            copy.users -= 1
            if copy.users == 0:
                self._spare.append(copy)
                if copy is self._of_live:
                    self._of_live = None

    def _new(self) -> Copy:
        self.copies += 1
        return Copy([torch.empty_like(segment.live) for segment in self._segments])

    # -- older versions -------------------------------------------------------------------------

    def remember(self, version: int) -> None:
        """Copy the clean weights, which are those of ``version``: an update is about to come."""
        if not self._depth:
            return
        memory = self._older.pop(version - self._depth, None)
        if memory is None:
            memory = [torch.empty_like(segment.clean) for segment in self._segments]
        for older, segment in zip(memory, self._segments, strict=True):
            older.copy_(segment.clean)
        self._older[version] = memory

    def older(self, version: int) -> list[Tensor]:
        """Return the clean weights of an older version, one flat tensor per segment."""
        assert version in self._older, f"version {version} is not among {list(self._older)}"
        return self._older[version]

    def state(self) -> dict[str, Tensor]:
        """Return the older versions by name: the real tensors. What is kept is not among them."""
        return {
            f"{_OLDER}.{version}.{index}": tensor
            for version, tensors in self._older.items()
            for index, tensor in enumerate(tensors)
        }

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what ``state`` returned once; other names in it are passed over."""
        self._older = {}
        for name, tensor in state.items():
            kind, _, place = name.partition(".")
            if kind == _OLDER:
                version, index = map(int, place.split("."))
                memory = self._older.setdefault(
                    version, [torch.empty_like(segment.clean) for segment in self._segments]
                )
                memory[index].copy_(tensor)
