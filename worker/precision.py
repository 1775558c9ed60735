"""Which tensors of a model are held in which floating-point type. Touches no optimizer.

fp32 changes nothing. bf16 holds parameters and buffers in bf16, as ``module.to(bfloat16)`` would,
with one exception: layers that keep running statistics stay in fp32. Such a layer takes bf16 inputs
and gives bf16 outputs all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from ..protocol.settings import Precision

__all__ = ["cast_buffers", "cast_floats", "dtype_of", "live_dtypes"]

_KEEP_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
"""A running mean in bf16 stands still once an update is below its 8 bits, and torch wants the
parameters of such a layer in the type of its statistics."""


def dtype_of(precision: Precision) -> torch.dtype:
    """Return the type that layers compute in."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def live_dtypes(layers: Iterable[nn.Module], dtype: torch.dtype) -> dict[nn.Parameter, torch.dtype]:
    """Return the type of every parameter's live values; parameters not in fp32 keep theirs."""
    return {
        param: dtype if param.dtype == torch.float32 and not keeps else param.dtype
        for module, keeps in _modules(layers)
        for param in module.parameters(recurse=False)
    }


def cast_buffers(layers: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Replace fp32 buffers by ones of ``dtype``, except running statistics."""
    for module, keeps in _modules(layers):
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.dtype == torch.float32 and not keeps:
                setattr(module, name, buffer.to(dtype))


def cast_floats(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor`` in ``dtype`` if it is real floating point, else as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _modules(layers: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, bool]]:
    for layer in layers:
        for module in layer.modules():
            yield module, isinstance(module, _KEEP_STATISTICS)
