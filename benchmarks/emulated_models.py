"""Models whose layers take time but compute nothing: VGG16 and a transformer, as on one GPU each.

A job file for ``network.py``, which reads the tables too. A layer sleeps for as long as a GPU would
compute, forward once and backward twice that, and puts out a tensor of the real size that nobody
has written to. It has one weight; how many the real layer has stands in the table.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

settings = {"stages": 4, "batch_size": 32, "epochs": 1_000}

CLASSES = 10


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the real model.

    Attributes:
        operations: of one sample's forward, in multiply-adds.
        parameters: numbers in each of its tensors, in the order of the forward.
        output: shape of what one sample becomes.
    """

    operations: float
    parameters: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A real model on a GPU of one kind.

    Attributes:
        layers: in order.
        samples_per_s: forward and backward of the whole model on one GPU.
        input: shape and type of one sample.
    """

    layers: tuple[Layer, ...]
    samples_per_s: float
    input: tuple[int, ...]
    dtype: torch.dtype

    def forward_s(self, samples: int) -> list[float]:
        """Return each layer's seconds; a backward takes twice as long."""
        whole_s = samples / self.samples_per_s / 3
        operations = sum(layer.operations for layer in self.layers)
        return [whole_s * layer.operations / operations for layer in self.layers]


def _convolution(channels_in: int, channels: int, side: int, *, pooled: bool = False) -> Layer:
    weights = 9 * channels_in * channels
    out = side // 2 if pooled else side
    return Layer(weights * side**2, (weights, channels), (channels, out, out))


def _linear(inputs: int, outputs: int) -> Layer:
    return Layer(inputs * outputs, (inputs * outputs, outputs), (outputs,))


def _vgg16() -> Model:
    """Images of 224 x 224, 138 M weights; pooling belongs to the convolution before it."""
    layers: list[Layer] = []
    channels_in, side = 3, 224
    for channels, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for index in range(count):
            pooled = index == count - 1
            layers.append(_convolution(channels_in, channels, side, pooled=pooled))
            channels_in = channels
        side //= 2
    layers += [_linear(512 * 7 * 7, 4096), _linear(4096, 4096), _linear(4096, 1000)]
    return Model(tuple(layers), samples_per_s=130, input=(3, 224, 224), dtype=torch.uint8)


def _transformer(
    blocks: int = 8, width: int = 512, length: int = 256, words: int = 30_000
) -> Model:
    """A classifier of texts: embedding, encoder blocks, two classes; 41 M weights."""
    square = width**2
    block = Layer(
        length * 12 * square + 2 * length**2 * width,
        (3 * square, 3 * width, square, width, 4 * square, 4 * width, 4 * square, width)
        + (width,) * 4,
        (length, width),
    )
    embedding = Layer(length * width, (words * width,), (length, width))
    layers = (embedding, *(block,) * blocks, _linear(width, 2))
    return Model(layers, samples_per_s=140, input=(length,), dtype=torch.int64)


MODELS = {"VGG16": _vgg16(), "transformer": _transformer()}


class _Busy(torch.autograd.Function):
    """Take time both ways; the second argument makes it part of a graph."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, seconds: float, shape: Any) -> Tensor:
        ctx.form = value.shape, seconds, value.is_floating_point()
        time.sleep(seconds)
        return weight.new_empty(len(value), *shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        shape, seconds, is_wanted = ctx.form
        time.sleep(2 * seconds)
        gradient = gradients[0].new_empty(shape) if is_wanted else None
        return gradient, gradients[0].new_zeros(1), None, None


class BusyLayer(nn.Module):
    """What stands for one ``Layer``."""

    def __init__(self, seconds: float, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.seconds, self.shape = seconds, shape
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, value: Tensor) -> Tensor:
        return _Busy.apply(value, self.weight, self.seconds, self.shape)


class SameSample(Dataset[tuple[Tensor, int]]):
    """A data set of one sample, many times."""

    def __init__(self, model: Model) -> None:
        self._sample = torch.zeros(model.input, dtype=model.dtype)

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, _: int) -> tuple[Tensor, int]:
        return self._sample, 0


def model(name: str, samples: int = 32) -> nn.Sequential:
    of = MODELS[name]
    times_s = of.forward_s(samples)
    layers = zip(times_s, of.layers, strict=True)
    return nn.Sequential(*(BusyLayer(seconds, layer.output) for seconds, layer in layers))


def datasets(name: str) -> tuple[SameSample, None]:
    return SameSample(MODELS[name]), None


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 0 whatever was in the memory of ``outputs``."""
    return (outputs.nan_to_num(0.0, 0.0, 0.0) * 0).sum() + 0 * targets.sum()


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)
