"""Handwritten digits (scikit-learn's 8x8 images) with an eight-layer perceptron."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

settings = {"epochs": 30, "batch_size": 64, "stages": 4}


def model(width: int = 128, depth: int = 8) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth - 1):
        layers += [linear(width if layers else 64, width), nn.ReLU()]
    return nn.Sequential(*layers, linear(width, 10, scale=0.1))


def linear(inputs: int, outputs: int, scale: float = 1.0) -> nn.Linear:
    """He's initial weights: eight layers of torch's own would let the signal fade away."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=scale * (2 / inputs) ** 0.5)
    nn.init.zeros_(layer.bias)
    return layer


def datasets(test_samples: int = 360) -> tuple[TensorDataset, TensorDataset]:
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32) / 16
    labels = torch.tensor(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:test_samples], order[test_samples:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


loss = nn.functional.cross_entropy


def optimizer(
    params: list[nn.Parameter], lr: float = 0.01, momentum: float = 0.9
) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=momentum)


def metrics(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    return {"accuracy": (outputs.argmax(1) == targets).float().mean().item()}
