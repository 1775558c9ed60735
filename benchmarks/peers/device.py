"""A stage whose worker has nothing to do while a GPU would compute: time passes, tensors are real.

A stage sleeps in forward and in backward, for a micro-batch its share of that. What it hands on
has the size of real activations and gradients, yet making it costs no CPU: a GPU's results are
not made by the CPU either.
"""

from __future__ import annotations

import ctypes
import time
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from work import Samples, Work

__all__ = ["Device", "emulated"]

BATCH_SIZE = 32
BYTES_PER_NUMBER = 4

_PR_SET_TIMERSLACK = 29
_libc = ctypes.CDLL(None)


def pause(seconds: float) -> None:
    """Sleep; by default Linux wakes a thread some 50 us late, here within a few."""
    _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    if seconds > 0:
        time.sleep(seconds)


@lru_cache
def made(rows: int, numbers: int) -> Tensor:
    """Return what a device has made: always the same memory, which nobody writes to."""
    return torch.ones(rows, numbers)


def handed_on(tensor: Tensor) -> Tensor:
    """Return another tensor in the same memory, which autograd does not take for a view."""
    return tensor.new_empty(0).set_(tensor.detach())


class Source(torch.autograd.Function):
    """From a weight to the first activations."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: int, numbers: int) -> Tensor:  # noqa: ARG004
        return handed_on(made(rows, numbers))

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:  # noqa: ARG004
        return torch.zeros(1), None, None


class Pass(torch.autograd.Function):
    """The same value; time passes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        pause(forward_s)
        return handed_on(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        pause(ctx.backward_s)
        return handed_on(gradients[0]), None, None


class Join(torch.autograd.Function):
    """The first value; both get a gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG004
        return handed_on(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ARG004
        return handed_on(gradients[0]), torch.ones(1)


class Score(torch.autograd.Function):
    """A loss of 0 whose gradient is there at once."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor) -> Tensor:
        ctx.shape = outputs.shape
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return handed_on(made(*ctx.shape))


class Device(nn.Module):
    """One stage.

    Half of the backward belongs to the gradient of the input and half to that of the weights, in
    two nodes of the graph, so that zero-bubble schedules can run them apart.

    Args:
        forward_s: of a whole batch.
        backward_s: of a whole batch.
        numbers: fp32 numbers per sample that it hands on.
        is_first: whether it makes its activations from the inputs; else it is given some.
    """

    def __init__(
        self, forward_s: float, backward_s: float, numbers: int, *, is_first: bool
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.forward_s = forward_s
        self.backward_s = backward_s
        self.numbers = numbers
        self.is_first = is_first

    def forward(self, value: Tensor) -> Tensor:
        share = len(value) / BATCH_SIZE
        half_s = self.backward_s * share / 2
        if self.is_first:
            value = Source.apply(self.weight, len(value), self.numbers)
        value = Pass.apply(value, self.forward_s * share, half_s)
        return Join.apply(value, Pass.apply(self.weight, 0.0, half_s))


def devices(
    parts: int, stages: int, forward_ms: float, backward_ms: float, megabytes: float
) -> list[nn.Module]:
    """Return a model for so many stages in more parts, if they are to be smaller."""
    numbers = round(megabytes * 2**20 / BYTES_PER_NUMBER / BATCH_SIZE)
    each = stages / parts / 1000
    return [
        Device(forward_ms * each, backward_ms * each, numbers, is_first=part == 0)
        for part in range(parts)
    ]


def nothing() -> Samples:
    """Inputs and targets that cost nothing to feed."""
    return Samples(torch.zeros(64 * BATCH_SIZE, 1), torch.zeros(64 * BATCH_SIZE))


def score(outputs: Tensor, targets: Tensor) -> Tensor:
    del targets
    return Score.apply(outputs)


def emulated(
    stages: int, *, forward_ms: float, backward_ms: float, megabytes: float, parts: int = 0
) -> Work:
    """Return the work of ``stages`` devices.

    Args:
        stages: N.
        forward_ms: of one batch on one device.
        backward_ms: of one batch on one device.
        megabytes: MiB that cross between two devices per batch, each way.
        parts: the model is in; 0: as many as devices.
    """
    build = partial(devices, parts or stages, stages, forward_ms, backward_ms, megabytes)
    return Work(f"{stages} stages, {megabytes:g} MB", BATCH_SIZE, build, nothing, score)
