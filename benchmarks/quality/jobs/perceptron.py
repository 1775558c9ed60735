"""A multi-layer perceptron for the jobs beside it, with weights that let a deep one learn."""

from __future__ import annotations

import torch
from torch import nn


def perceptron(inputs: int, width: int, depth: int, classes: int) -> nn.Sequential:
    """Return ``depth`` linear layers with ReLU between them; He's initial weights, no bias yet."""
    layers: list[nn.Module] = []
    for index in range(depth - 1):
        layers += [linear(width if index else inputs, width), nn.ReLU()]
    return nn.Sequential(*layers, linear(width, classes))


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
    return layer


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Return the share of outputs ``[B, classes]`` that are right."""
    return {"accuracy": (outputs.argmax(1) == targets).float().mean().item()}
