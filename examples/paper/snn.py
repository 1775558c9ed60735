"""A self-normalising network (arXiv 1706.02515) on CIFAR-10: 32 linear layers, 1,024 units wide.

Scaled exponential units, LeCun's initial weights and alpha dropout keep mean and variance of the
activations where they are, so that so deep a network of linear layers learns without batch norm.
"""

import torch
from torch import nn

from spectrain.examples.paper.recipe import accuracy, polynomial_decay
from spectrain.readers import Images, read_cifar10

settings = {"epochs": 100, "batch_size": 128, "stages": 4}


def model(width: int = 1024, depth: int = 32, dropout: float = 0.05) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    inputs = 3 * 32 * 32
    for _ in range(depth - 1):
        layers += [lecun_normal(inputs, width), nn.SELU(), nn.AlphaDropout(dropout)]
        inputs = width
    return nn.Sequential(*layers, lecun_normal(inputs, 10))


def lecun_normal(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    nn.init.zeros_(layer.bias)
    return layer


def datasets(data: str = "") -> tuple[Images, Images]:
    return read_cifar10(data, augment=True)


loss = nn.functional.cross_entropy
metrics = accuracy
lr_schedule = polynomial_decay(settings, samples=50_000)


def optimizer(
    params: list[nn.Parameter], lr: float = 0.001, momentum: float = 0.9, weight_decay: float = 5e-4
) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay)
