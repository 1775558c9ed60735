"""Staleness methods: what a stage's layers read in a forward and in a backward.

A method chooses weights and nothing else: no streams, no process groups, no order of ops. One
small file each; their names and schedules stand in ``protocol.settings.METHODS``.
"""

from __future__ import annotations

from .base import Method
from .spectrain import SpecTrain
from .sync import Sync
from .vanilla import Vanilla

__all__ = ["Method", "method_named"]

_METHODS: tuple[Method, ...] = (SpecTrain(), Vanilla(), Sync())


def method_named(name: str) -> Method:
    """Return the method that ``METHODS`` has under ``name``.

    Raises:
        KeyError: there is none; settings have been checked for that long before.
    """
    return {method.name: method for method in _METHODS}[name]
