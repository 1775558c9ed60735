"""Flat memory for the parameters of one optimizer group: layout only, no training logic.

A segment is two flat buffers of equal layout, one clean and one live. Anything elementwise over
all its parameters (restore, predict) is then one pass over contiguous memory instead of one call
per tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["Formula", "Segment"]

_ALIGNMENT = 32
"""Elements. Parameters start where torch's own allocations would allow (64 bytes, also in bf16):
kernels choose their path, and with it their rounding, by alignment."""

_BLOCK = 1 << 17
"""Elements that are worked on at a time where a formula makes several passes over them."""

Formula: TypeAlias = Callable[..., object]
"""Fills its first tensor from the others."""


class Segment:
    """Clean and live values of the parameters of one optimizer group, each in one flat buffer.

    Both buffers hold the parameters in order, each padded to a multiple of ``_ALIGNMENT``
    elements; the padding is zero for ever.

    Attributes:
        group: the optimizer's own group; its hyper-parameters are read when they are needed.
        params: the clean parameters, fp32, now views of ``clean``.
        clean: what the optimizer owns.
        live: what layers read; the same memory as ``clean`` if it may be shared.
    """

    def __init__(
        self,
        group: dict[str, Any],
        params: Sequence[nn.Parameter],
        *,
        live_dtype: torch.dtype,
        shared: bool,
    ) -> None:
        """Move ``params`` into flat memory.

        Args:
            group: a group of the optimizer that owns ``params``.
            params: clean parameters, fp32, on one device; at least one.
            live_dtype: what layers compute in.
            shared: whether live values never differ from clean ones, so that one buffer will do;
                only possible when both have the same type.
        """
        self.group = group
        self.params = tuple(params)
        sizes = [-(-param.numel() // _ALIGNMENT) * _ALIGNMENT for param in params]
        self.clean = torch.zeros(sum(sizes), device=params[0].device)
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        for param, view in zip(params, self.views(self.clean), strict=True):
            view.copy_(param.detach())
            param.data = view
        shared = shared and live_dtype == self.clean.dtype
        self.live = self.clean if shared else self.clean.to(live_dtype, copy=True)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return one tensor per parameter, in its shape, as views of ``flat``."""
        return [
            flat[start : start + param.numel()].view(param.shape)
            for start, param in zip(self._starts, self.params, strict=True)
        ]

    def restore(self) -> None:
        """Make live values the clean ones: bit for bit in fp32, rounded to nearest in bf16."""
        if self.live is not self.clean:
            self.live.copy_(self.clean)

    def rewrite(self, formula: Formula, *sources: Tensor, whole: bool = True) -> None:
        """Make live values what ``formula`` makes of ``clean`` and ``sources``, elementwise.

        Args:
            formula: fills its first argument, fp32, from the others: blocks of ``clean`` and of
                each source. It may use what it fills as scratch space.
            sources: fp32, laid out like ``clean``.
            whole: whether one pass over memory is all it makes; else it is given blocks small
                enough to stay in a CPU's cache between its passes.
        """
        assert self.live is not self.clean, "prediction would overwrite the clean weights"
        rounds = self.live.dtype != self.clean.dtype
        if not rounds and (whole or self.live.is_cuda):
            formula(self.live, self.clean, *sources)
            return
        scratch_size = min(_BLOCK, self.clean.numel()) if rounds else 0
        scratch = torch.empty(scratch_size, device=self.clean.device)
        blocks = (flat.split(_BLOCK) for flat in (self.live, self.clean, *sources))
        for live, clean, *rest in zip(*blocks, strict=True):
            if rounds:
                ahead = scratch[: live.numel()]
                formula(ahead, clean, *rest)
                live.copy_(ahead)
            else:
                formula(live, clean, *rest)
