"""What the layers may read in a pass: the words in which a method tells the weights. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

__all__ = ["NEWEST", "Ahead", "Kept", "Key", "Reading", "Version", "ahead"]

Key: TypeAlias = tuple[int, int]
"""Mini-batch and micro-batch. What is kept under it is dropped with the mini-batch's update."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """The newest weights, moved on by some updates.

    Attributes:
        updates: s; 0: the newest weights as they are; below 0: back, where the predictor can.
        keep: also keep what is read here under this key; None: do not.
    """

    updates: int
    keep: Key | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """The very weights, bit for bit, that were kept under a key."""

    key: Key


@dataclass(frozen=True, slots=True)
class Version:
    """The clean weights as they were after so many updates."""

    number: int


Reading: TypeAlias = Ahead | Kept | Version

NEWEST = Ahead(0)


@cache
def ahead(updates: int) -> Ahead:
    """Return ``Ahead(updates)``, the same object each time: methods ask twice a mini-batch."""
    return Ahead(updates) if updates else NEWEST
