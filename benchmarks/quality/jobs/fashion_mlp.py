"""Fashion-MNIST, all 70,000 images, with a deep perceptron that has no normalization."""

import perceptron
import torch
from fashion_images import read_split
from torch import nn
from torch.utils.data import TensorDataset

settings = {"epochs": 5, "batch_size": 64, "stages": 8}


def model(width: int = 100, depth: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), *perceptron.perceptron(784, width, depth, classes=10))


def datasets() -> tuple[TensorDataset, TensorDataset]:
    return read_split("train", 60_000), read_split("t10k", 10_000)


loss = nn.functional.cross_entropy
metrics = perceptron.accuracy


def optimizer(params: list[nn.Parameter], lr: float = 0.005) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)
