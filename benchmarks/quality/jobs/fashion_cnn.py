"""Fashion-MNIST, its first 10,000 training images, with a convolutional network and batch norm."""

import perceptron
import torch
from fashion_images import read_split
from torch import nn
from torch.utils.data import TensorDataset

settings = {"epochs": 3, "batch_size": 64, "stages": 8}


def model(width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        block(1, width),
        block(width, width, stride=2),
        block(width, 2 * width),
        block(2 * width, 2 * width),
        block(2 * width, 2 * width, stride=2),
        block(2 * width, 4 * width),
        block(4 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def datasets() -> tuple[TensorDataset, TensorDataset]:
    return read_split("train", 10_000), read_split("t10k", 10_000)


loss = nn.functional.cross_entropy
metrics = perceptron.accuracy


def optimizer(params: list[nn.Parameter], lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)
