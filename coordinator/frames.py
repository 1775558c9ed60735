"""Batches as raw bytes for the data channel, and the form that tells the worker how to read them.

What a data set yields becomes one frame per tensor, without a copy where the tensor is contiguous.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ..protocol.errors import JobError
from ..protocol.messages import Boundary, TensorSpec

__all__ = ["frame_of", "spec_of", "to_frames"]


def to_frames(value: object, part: str) -> tuple[Boundary, list[memoryview]]:
    """Return the form of ``value`` and one frame per tensor.

    Args:
        value: a tensor, or a flat tuple, list or dict of tensors and Nones.
        part: "inputs" or "targets", for the error.

    Raises:
        JobError: ``value`` is anything else.
    """
    keys: tuple[str, ...] = ()
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value)
        form, keys, parts = "dict", tuple(items), tuple(items.values())
    elif isinstance(value, (tuple, list)):
        form, parts = "tuple", tuple(cast("tuple[Any, ...]", value))
    else:
        form, parts = "tensor", (value,)
    tensors: list[Tensor | None] = []
    for item in parts:
        if isinstance(item, Tensor) or (item is None and form != "tensor"):
            tensors.append(item)
        else:
            raise JobError(
                f"the {part} of a batch hold a {type(item).__name__}: they must be a tensor, or a "
                "flat tuple or dict of tensors and None; write a `collate` that makes them so"
            )
    boundary = Boundary(
        form=form,
        keys=keys,
        tensors=tuple(None if item is None else spec_of(item) for item in tensors),
    )
    return boundary, [frame_of(item) for item in tensors if item is not None]


def spec_of(tensor: Tensor) -> TensorSpec:
    """Return what a receiver must know of ``tensor``; data needs no gradient."""
    return TensorSpec(
        dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), needs_grad=False
    )


def frame_of(tensor: Tensor) -> memoryview:
    """Return the bytes of ``tensor`` in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
