"""PACI (arXiv 2606.07881): vanilla, but one update for several micro-batches.

With a of them to an update, at most ``ceil((N - 1 - k) / a)`` updates come between a forward and
its backward: none of its weights is kept, and yet staleness has a bound.
"""

from __future__ import annotations

from .base import Method

__all__ = ["Paci"]


class Paci(Method):
    """Forward and backward read the newest weights."""
