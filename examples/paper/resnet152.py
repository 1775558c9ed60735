"""ResNet-152 (arXiv 1512.03385) on CIFAR-10.

Adapted to 32x32: the first convolution is 3x3 with stride 1 instead of 7x7 with stride 2, and no
pooling follows it, so that the four groups of blocks see 32, 16, 8 and 4 pixels a side. As is
usual today, a block that halves the picture does so in its 3x3 convolution. There are 10 classes.
"""

import torch
from torch import Tensor, nn

from spectrain.examples.paper.recipe import accuracy, he_normal, polynomial_decay
from spectrain.readers import Images, read_cifar10

settings = {"epochs": 100, "batch_size": 128, "stages": 4}

GROUPS = ((64, 3), (128, 8), (256, 36), (512, 3))  # inner width and number of blocks
EXPANSION = 4


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.residual = nn.Sequential(
            *convolution(inputs, width, 1),
            nn.ReLU(),
            *convolution(width, width, 3, stride),
            nn.ReLU(),
            *convolution(width, outputs, 1),
        )
        self.shortcut = nn.Sequential()  # the identity
        if inputs != outputs:
            self.shortcut = nn.Sequential(*convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.residual(x) + self.shortcut(x))


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    padding = kernel // 2
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
    ]


def model() -> nn.Sequential:
    layers = [*convolution(3, 64, 3), nn.ReLU()]
    channels = 64
    for group, (width, blocks) in enumerate(GROUPS):
        for block in range(blocks):
            halves = group > 0 and block == 0
            layers.append(Bottleneck(channels, width, stride=2 if halves else 1))
            channels = EXPANSION * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return he_normal(nn.Sequential(*layers))


def datasets(data: str = "") -> tuple[Images, Images]:
    return read_cifar10(data, augment=True)


loss = nn.functional.cross_entropy
metrics = accuracy
lr_schedule = polynomial_decay(settings, samples=50_000)


def optimizer(
    params: list[nn.Parameter], lr: float = 0.005, momentum: float = 0.9, weight_decay: float = 0.01
) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay)
