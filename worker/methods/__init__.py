"""Staleness methods: what a stage's layers read in a forward and in a backward.

A method chooses weights and nothing else: no streams, no process groups, no order of ops. One
small file each; their names and schedules stand in ``protocol.settings.METHODS``.
"""

from __future__ import annotations

from collections.abc import Mapping

from .base import Method
from .spectrain import SpecTrain
from .sync import Sync
from .vanilla import Vanilla

__all__ = ["METHODS", "Method"]

METHODS: Mapping[str, type[Method]] = {
    "spectrain": SpecTrain,
    "vanilla": Vanilla,
    "sync": Sync,
}
"""Every method, by its name in ``protocol.settings.METHODS``."""
