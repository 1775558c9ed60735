"""Asynchronous training without any remedy: every op reads the newest weights there are.

A batch meets older weights in its forward than in its backward, and older ones the earlier the
stage. This is what the other methods are compared with.
"""

from __future__ import annotations

from .base import Method

__all__ = ["Vanilla"]


class Vanilla(Method):
    """Forward and backward read the newest weights."""
