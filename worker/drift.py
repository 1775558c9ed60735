"""Looking ahead or back along the way that the weights have really gone, whatever the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from .segment import Formula, Segment

__all__ = ["Drift", "LastDelta"]


class LastDelta:
    """The last update again: ``W + s * (W - W')`` with W' the weights before it.

    It asks nothing of the optimizer and knows no learning rate: a change of it is seen one update
    late. Under SGD with momentum and a constant learning rate it equals ``velocity`` to rounding.
    """

    copies = 1

    def __init__(self, optimizer: Optimizer, segments: Sequence[Segment]) -> None:
        del optimizer
        self._segments = segments
        self._previous = [segment.clean.clone() for segment in segments]
        self._index = {id(segment): index for index, segment in enumerate(segments)}

    def extrapolate(self, segment: Segment, updates: int, lrs: Sequence[float]) -> None:
        """Make live values ``clean + updates * (clean - previous)``."""
        del lrs
        segment.rewrite(_along(updates), self._previous[self._index[id(segment)]], whole=False)

    def before_step(self) -> None:
        """Remember the weights."""
        for previous, segment in zip(self._previous, self._segments, strict=True):
            previous.copy_(segment.clean)

    def after_step(self) -> None:
        """Do nothing: the new weights are where they are."""

    def state(self) -> dict[str, Tensor]:
        """Return the weights before the last update."""
        return {f"previous.{index}": tensor for index, tensor in enumerate(self._previous)}

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """Go on from ``state``."""
        _fill("previous", self._previous, state)


class Drift:
    """The averaged update: ``W + s * d`` with ``d = decay * d + (1 - decay) * (W - W')``.

    PipeMare (arXiv 1910.05124) looks back along it, s below 0.

    Args:
        optimizer: of the segments; any.
        segments: whose weights drift.
        decay: how much of d each update leaves, ``0 <= decay < 1``.
    """

    copies = 1

    def __init__(self, optimizer: Optimizer, segments: Sequence[Segment], *, decay: float) -> None:
        del optimizer
        self._segments = segments
        self._decay = decay
        self._drift = [torch.zeros_like(segment.clean) for segment in segments]
        self._previous: list[Tensor] = []
        self._index = {id(segment): index for index, segment in enumerate(segments)}

    def extrapolate(self, segment: Segment, updates: int, lrs: Sequence[float]) -> None:
        """Make live values ``clean + updates * drift``."""
        del lrs

        def along(live: Tensor, clean: Tensor, drift: Tensor) -> None:
            torch.add(clean, drift, alpha=updates, out=live)

        segment.rewrite(along, self._drift[self._index[id(segment)]])

    def before_step(self) -> None:
        """Remember the weights for as long as the update lasts."""
        self._previous = [segment.clean.clone() for segment in self._segments]

    def after_step(self) -> None:
        """Average the update in."""
        for drift, previous, segment in zip(
            self._drift, self._previous, self._segments, strict=True
        ):
            update = torch.sub(segment.clean, previous, out=previous)
            drift.lerp_(update, 1 - self._decay)
        self._previous = []

    def state(self) -> dict[str, Tensor]:
        """Return the average."""
        return {f"drift.{index}": tensor for index, tensor in enumerate(self._drift)}

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """Go on from ``state``."""
        _fill("drift", self._drift, state)


def _along(updates: int) -> Formula:
    def ahead(live: Tensor, clean: Tensor, previous: Tensor) -> None:
        torch.sub(clean, previous, out=live)
        torch.add(clean, live, alpha=updates, out=live)

    return ahead


def _fill(name: str, tensors: Sequence[Tensor], state: Mapping[str, Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        tensor.copy_(state[f"{name}.{index}"])
