"""Inception v4 (arXiv 1602.07261) on CIFAR-10.

Adapted to 32x32: the first layer enlarges the pictures, because the network's stem and its two
reductions divide them by 32 without padding. 75 pixels a side are the least that it takes, 299
those of the paper; with the 139 here the last blocks, whose filters are 3 wide, see 3x3 positions.
There are 10 classes.
"""

import torch
from torch import Tensor, nn

from spectrain.examples.paper.recipe import accuracy, he_normal, polynomial_decay
from spectrain.readers import Images, read_cifar10

settings = {"epochs": 50, "batch_size": 128, "stages": 4}


class Branches(nn.Module):
    """Several ways for one input, whose outputs are joined by channel."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def conv(inputs: int, outputs: int, kernel: tuple[int, int]) -> nn.Sequential:
    """Keep the size of the picture, rows and columns of ``kernel`` being odd."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    return normalised(nn.Conv2d(inputs, outputs, kernel, padding=padding, bias=False))


def unpadded(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Use 3x3 pixels of the picture only, which gets smaller."""
    return normalised(nn.Conv2d(inputs, outputs, 3, stride, bias=False))


def normalised(convolution: nn.Conv2d) -> nn.Sequential:
    norm = nn.BatchNorm2d(convolution.out_channels, eps=1e-3)
    return nn.Sequential(convolution, norm, nn.ReLU())


def chain(inputs: int, *steps: tuple[int, tuple[int, int]]) -> nn.Sequential:
    """Follow one ``conv`` by another, given outputs and kernel of each."""
    layers: list[nn.Module] = []
    for outputs, kernel in steps:
        layers.append(conv(inputs, outputs, kernel))
        inputs = outputs
    return nn.Sequential(*layers)


def pooled(inputs: int, outputs: int) -> nn.Sequential:
    pool = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
    return nn.Sequential(pool, conv(inputs, outputs, (1, 1)))


def halved() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2)


def stem() -> nn.Sequential:
    return nn.Sequential(
        unpadded(3, 32, stride=2),
        unpadded(32, 32),
        conv(32, 64, (3, 3)),
        Branches(halved(), unpadded(64, 96, stride=2)),
        Branches(
            nn.Sequential(conv(160, 64, (1, 1)), unpadded(64, 96)),
            nn.Sequential(
                chain(160, (64, (1, 1)), (64, (7, 1)), (64, (1, 7))),
                unpadded(64, 96),
            ),
        ),
        Branches(unpadded(192, 192, stride=2), halved()),
    )


def block_a() -> Branches:
    return Branches(
        pooled(384, 96),
        conv(384, 96, (1, 1)),
        chain(384, (64, (1, 1)), (96, (3, 3))),
        chain(384, (64, (1, 1)), (96, (3, 3)), (96, (3, 3))),
    )


def reduction_a() -> Branches:
    return Branches(
        halved(),
        unpadded(384, 384, stride=2),
        nn.Sequential(chain(384, (192, (1, 1)), (224, (3, 3))), unpadded(224, 256, stride=2)),
    )


def block_b() -> Branches:
    return Branches(
        pooled(1024, 128),
        conv(1024, 384, (1, 1)),
        chain(1024, (192, (1, 1)), (224, (1, 7)), (256, (7, 1))),
        chain(1024, (192, (1, 1)), (192, (1, 7)), (224, (7, 1)), (224, (1, 7)), (256, (7, 1))),
    )


def reduction_b() -> Branches:
    return Branches(
        halved(),
        nn.Sequential(conv(1024, 192, (1, 1)), unpadded(192, 192, stride=2)),
        nn.Sequential(
            chain(1024, (256, (1, 1)), (256, (1, 7)), (320, (7, 1))),
            unpadded(320, 320, stride=2),
        ),
    )


def block_c() -> Branches:
    return Branches(
        pooled(1536, 256),
        conv(1536, 256, (1, 1)),
        nn.Sequential(
            conv(1536, 384, (1, 1)),
            Branches(conv(384, 256, (1, 3)), conv(384, 256, (3, 1))),
        ),
        nn.Sequential(
            chain(1536, (384, (1, 1)), (448, (1, 3)), (512, (3, 1))),
            Branches(conv(512, 256, (1, 3)), conv(512, 256, (3, 1))),
        ),
    )


def model(side: int = 139, dropout: float = 0.2) -> nn.Sequential:
    return he_normal(
        nn.Sequential(
            nn.Upsample(size=(side, side), mode="bilinear"),
            stem(),
            *(block_a() for _ in range(4)),
            reduction_a(),
            *(block_b() for _ in range(7)),
            reduction_b(),
            *(block_c() for _ in range(3)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(1536, 10),
        )
    )


def datasets(data: str = "") -> tuple[Images, Images]:
    return read_cifar10(data, augment=True)


loss = nn.functional.cross_entropy
metrics = accuracy
lr_schedule = polynomial_decay(settings, samples=50_000)


def optimizer(
    params: list[nn.Parameter], lr: float = 0.005, momentum: float = 0.9, weight_decay: float = 5e-4
) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay)
