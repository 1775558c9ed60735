"""Small job files that tests write for the runs they start."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ENDLESS", "MLP", "NOISY", "write_job"]

MLP = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def model(width: int = 16):
    layers = [nn.Linear(8, width), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 3))

def datasets(samples: int = 100):
    x = torch.randn(samples, 8)
    y = (x[:, :3]).argmax(1)
    return TensorDataset(x, y), TensorDataset(x[:30], y[:30])

loss = nn.functional.cross_entropy

def metrics(outputs, targets):
    return {"accuracy": (outputs.argmax(1) == targets).float().mean().item()}

def optimizer(params, lr: float = 0.05):
    return torch.optim.SGD(params, lr=lr, momentum=0.9)

settings = {"batch_size": 16, "epochs": 3}
"""
"""100 samples in batches of 16: seven batches an epoch, the last one of four."""

ENDLESS = (
    MLP
    + """
settings = {"batch_size": 4, "epochs": 1000000}
"""
)
"""The same, with more epochs than any test waits for."""

NOISY = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def model(width: int = 16):
    layers = []
    for index in range(4):
        layers += [
            nn.Linear(width if index else 8, width), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Dropout(0.2),
        ]
    return nn.Sequential(*layers, nn.Linear(width, 3))

def datasets(samples: int = 104):
    x = torch.randn(samples, 8)
    y = (x[:, :3]).argmax(1)
    return TensorDataset(x, y), TensorDataset(x[:30], y[:30])

loss = nn.functional.cross_entropy

def metrics(outputs, targets):
    return {"accuracy": (outputs.argmax(1) == targets).float().mean().item()}

def optimizer(params, adamw: bool = False):
    if adamw:
        return torch.optim.AdamW(params, lr=0.003)
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)

settings = {"batch_size": 16, "epochs": 10}
"""
"""Batch norm and dropout: state in buffers, and random draws that a replay must repeat.

Ten epochs of seven batches; the last batch of an epoch has eight samples.
"""


def write_job(folder: Path, text: str = MLP, name: str = "job.py") -> Path:
    """Write a job file and return its path."""
    path = folder / name
    path.write_text(text)
    return path
