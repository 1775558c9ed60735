"""The job's loss and metrics, checked. Only the last stage has one; it knows no layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..protocol.errors import JobError, NonFiniteError
from .boundary import Value, map_tensors
from .precision import cast_floats

__all__ = ["Objective", "Score"]


@dataclass(frozen=True, slots=True)
class Score:
    """How well some samples did.

    Attributes:
        loss: mean over the samples.
        metrics: the job's, each a mean over the samples.
    """

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class Objective:
    """Turns outputs and targets into a loss to differentiate and numbers to report."""

    def __init__(
        self,
        loss: Callable[[Any, Any], object],
        metrics: Callable[[Any, Any], Mapping[str, float]] | None = None,
    ) -> None:
        """Take the job's functions; both get outputs in fp32 at least, and targets."""
        self._loss = loss
        self._metrics = metrics

    def __call__(self, outputs: Value, targets: Value, *, where: str) -> tuple[Tensor, Score]:
        """Return the loss as a scalar with its graph, and its value with the metrics.

        Args:
            outputs: the last layer's.
            targets: of the same samples.
            where: op and stage, for the error, such as "at F12 on stage 3".

        Raises:
            JobError: the loss is not one number.
            NonFiniteError: it is NaN or infinite.
        """
        outputs = _upcast(outputs)
        loss = self._loss(outputs, targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise JobError(
                f"loss(outputs, targets) returned {found}: it must return one number as a tensor, "
                "the mean over the samples"
            )
        value = float(loss.detach())
        if not math.isfinite(value):
            raise NonFiniteError(f"the loss is {value} {where}")
        return loss.reshape(()), Score(value, self._measure(outputs, targets))

    def _measure(self, outputs: Value, targets: Value) -> dict[str, float]:
        if self._metrics is None:
            return {}
        with torch.no_grad():
            detached = map_tensors(outputs, Tensor.detach)
            measured = self._metrics(detached, targets)
        return {name: float(value) for name, value in measured.items()}


def _upcast(outputs: Value) -> Value:
    def upcast(tensor: Tensor) -> Tensor:
        return cast_floats(tensor, torch.float32) if tensor.dtype == torch.bfloat16 else tensor

    value = map_tensors(outputs, upcast)
    assert value is not None
    return value
