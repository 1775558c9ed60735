"""Flat memory for the parameters of one optimizer group: layout only, no training logic.

A segment is two flat buffers of equal layout, one clean and one live. Anything elementwise over
all its parameters (restore, predict) is then one pass over contiguous memory instead of one call
per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Segment"]

_ALIGNMENT = 32
"""Elements. Parameters start where torch's own allocations would allow (64 bytes, also in bf16):
kernels choose their path, and with it their rounding, by alignment."""

_CHUNK = 1 << 20
"""Elements cast at a time. Without it a cast needs a temporary as large as the segment."""


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

    def predict(self, direction: Tensor, alpha: float) -> None:
        """Make live values ``clean + alpha * direction``, computed in fp32 in one pass.

        Args:
            direction: fp32, laid out like ``clean``.
            alpha: minus the number of updates to look ahead times the learning rate.
        """
        assert self.live is not self.clean, "prediction would overwrite the clean weights"
        if self.live.dtype == self.clean.dtype:
            torch.add(self.clean, direction, alpha=alpha, out=self.live)
            return
        chunks = (flat.split(_CHUNK) for flat in (self.clean, direction, self.live))
        for clean, step, live in zip(*chunks, strict=True):
            live.copy_(torch.add(clean, step, alpha=alpha))
