"""VGG16 (arXiv 1409.1556, configuration D) on CIFAR-10, without batch norm, as it was published.

Adapted to 32x32: the five poolings leave one position instead of 7x7, so the first of the three
linear layers takes 512 numbers instead of 25,088. There are 10 classes. Convolutions get He's
initial weights, linear layers the small ones of the paper.
"""

import torch
from torch import nn

from spectrain.examples.paper.recipe import accuracy, he_normal, polynomial_decay
from spectrain.readers import Images, read_cifar10

settings = {"epochs": 100, "batch_size": 128, "stages": 4}

CONVOLUTIONS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def model(width: int = 4096, dropout: float = 0.5) -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for block in CONVOLUTIONS:
        for outputs in block:
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU()]
            channels = outputs
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    for inputs in (channels, width):
        layers += [linear(inputs, width), nn.ReLU(), nn.Dropout(dropout)]
    return he_normal(nn.Sequential(*layers, linear(width, 10)))


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=0.01)
    nn.init.zeros_(layer.bias)
    return layer


def datasets(data: str = "") -> tuple[Images, Images]:
    return read_cifar10(data, augment=True)


loss = nn.functional.cross_entropy
metrics = accuracy
lr_schedule = polynomial_decay(settings, samples=50_000)


def optimizer(
    params: list[nn.Parameter], lr: float = 0.02, momentum: float = 0.9, weight_decay: float = 5e-4
) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay)
