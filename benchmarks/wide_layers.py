"""A chain of wide linear layers, so that memory holds weights and little else.

A job file for ``memory.py``. Every stage has ``layers`` of them, ``layers * width ** 2`` weights.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

settings = {"stages": 4, "batch_size": 256, "partition": "equal", "epochs": 1_000_000}


def model(width: int = 2048, layers: int = 4, stages: int = 4) -> nn.Sequential:
    linears = [nn.Linear(width, width, bias=False) for _ in range(layers * stages)]
    return nn.Sequential(*(nn.Sequential(linear, nn.ReLU()) for linear in linears))


def datasets(width: int = 2048, samples: int = 512) -> tuple[TensorDataset, None]:
    inputs = torch.rand(samples, width, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, torch.zeros(samples, 1)), None


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, targets.expand_as(outputs))


def optimizer(params: list[nn.Parameter], kind: str = "sgd") -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(params, lr=1e-5)
    return torch.optim.SGD(params, lr=1e-4, momentum=0.9)
