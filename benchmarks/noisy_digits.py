"""The digits job with batch norm and dropout: state in buffers, and draws a replay must repeat.

A job file for ``chaos.py`` and ``recovery.py``. ``pause_s`` slows the pipeline down without
changing a number, so that ten minutes of it can be repeated quietly in one or two.
"""

import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

settings = {"epochs": 1_000_000, "batch_size": 64, "stages": 4}


class Pause(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return value


def model(width: int = 64, pause_s: float = 0.0) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index in range(7):
        layers += [nn.Linear(width if index else 64, width), nn.BatchNorm1d(width)]
        layers += [nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(width, 10), Pause(pause_s))


def datasets(test_samples: int = 360) -> tuple[TensorDataset, TensorDataset]:
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32) / 16
    labels = torch.tensor(digits)
    return (
        TensorDataset(images[test_samples:], labels[test_samples:]),
        TensorDataset(images[:test_samples], labels[:test_samples]),
    )


loss = nn.functional.cross_entropy


def optimizer(params: list[nn.Parameter], lr: float = 0.005) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def metrics(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    return {"accuracy": (outputs.argmax(1) == targets).float().mean().item()}
