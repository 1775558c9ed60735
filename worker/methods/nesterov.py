"""Nesterov's method for asynchronous pipelines (arXiv 2505.01099): NAdam on stashed weights.

All that it adds to stashing is in the optimizer: NAdam with a high first beta, whose momentum
looks ahead of the weights and so makes up for the delay of their gradients.
"""

from __future__ import annotations

from .stash import Stash

__all__ = ["Nesterov"]


class Nesterov(Stash):
    """Forward reads the newest weights, backward the same ones again."""
