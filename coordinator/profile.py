"""Counts what each layer costs in one forward: operations, bytes, parameters.

It counts and does not time. Times differ from run to run and machine to machine, would cut the
model differently each time, and the cut decides every layer's staleness and so the final weights.
Counts depend on the model and the sample alone. What a count is worth is ``partition.py``'s part.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..protocol.errors import JobError
from ..protocol.job import user_fault
from .partition import LayerCost

__all__ = ["measure_layers"]


def measure_layers(layers: Sequence[tuple[str, nn.Module]], sample_inputs: Any) -> list[LayerCost]:
    """Run one forward of each layer in turn, on CPU, and count.

    The layers run in the mode that they are in, on copies, one at a time: neither their buffers
    nor torch's random state change.

    Args:
        layers: names and modules in order, as ``Job.flatten`` returns them.
        sample_inputs: what the first layer is called with; a real mini-batch, because costs grow
            with it unevenly.

    Returns:
        One entry per layer: floating point operations of its matrix products, convolutions and
        attentions (other operations are counted by the bytes that they move); bytes of inputs,
        outputs and parameters; number of trainable parameters.

    Raises:
        JobError: a layer's forward fails on what the layer before it returned.
    """
    costs: list[LayerCost] = []
    value = sample_inputs
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for index, (name, layer) in enumerate(layers):
            counter = FlopCounterMode(display=False)
            try:
                with counter:
                    output = copy.deepcopy(layer)(value)
            except Exception as error:
                raise JobError(
                    f"layer {index} ({name}: {type(layer).__name__}) failed on inputs "
                    f"{_describe(value)}: {user_fault(error)}"
                ) from error
            parameters = list(layer.parameters())
            costs.append(
                LayerCost(
                    name=name,
                    flops=counter.get_total_flops(),
                    bytes_moved=sum(
                        tensor.nbytes
                        for tensor in (*_tensors(value), *_tensors(output), *parameters)
                    ),
                    parameters=sum(p.numel() for p in parameters if p.requires_grad),
                )
            )
            value = output
    return costs


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in cast("Sequence[Any]", value):
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(cast("dict[str, Any]", value).values()))


def _describe(value: Any) -> str:
    shapes = [f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in _tensors(value)]
    return ", ".join(shapes) or repr(value)
