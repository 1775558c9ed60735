"""Synchronous training: the reference. The flushed schedule keeps weights from going stale.

Like vanilla it reads the newest weights. As every batch is updated before the next one enters,
these are the same in all its forwards and backwards.
"""

from __future__ import annotations

from .base import Method

__all__ = ["Sync"]


class Sync(Method):
    """Forward and backward read the newest weights; nothing is in flight across an update."""
