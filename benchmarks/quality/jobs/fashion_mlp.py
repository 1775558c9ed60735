"""Fashion-MNIST, its first 20,000 training images, with a deep perceptron, not normalized."""

import perceptron
import torch
from fashion_images import read_split
from torch import nn
from torch.utils.data import TensorDataset

settings = {"epochs": 4, "batch_size": 64, "stages": 8}


def model(width: int = 100, depth: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), *perceptron.perceptron(784, width, depth, classes=10))


def datasets() -> tuple[TensorDataset, TensorDataset]:
    return read_split("train", 20_000), read_split("t10k", 10_000)


loss = nn.functional.cross_entropy
metrics = perceptron.accuracy


def optimizer(params: list[nn.Parameter], lr: float = 0.005) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)
