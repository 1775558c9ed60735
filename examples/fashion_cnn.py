"""Fashion-MNIST, all 70,000 images, with a convolutional network and batch norm."""

import gzip
import math
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

settings = {"epochs": 5, "batch_size": 64, "stages": 4}

DEBIAN_ROOT = "/usr/share/datasets/fashion-mnist"
MEAN, STD = 0.286, 0.353  # of the training pixels, scaled to 0..1


def model(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        block(1, width, stride=1),
        block(width, width, stride=2),
        block(width, 2 * width, stride=1),
        block(2 * width, 2 * width, stride=2),
        block(2 * width, 4 * width, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def datasets(root: str = DEBIAN_ROOT) -> tuple[TensorDataset, TensorDataset]:
    return read_split(Path(root), "train"), read_split(Path(root), "t10k")


def read_split(root: Path, split: str) -> TensorDataset:
    images = read_idx(root / f"{split}-images-idx3-ubyte.gz")
    labels = read_idx(root / f"{split}-labels-idx1-ubyte.gz")
    pixels = images.unsqueeze(1).float() / 255
    return TensorDataset((pixels - MEAN) / STD, labels.long())


def read_idx(path: Path) -> torch.Tensor:
    """Read an IDX file of unsigned bytes: 0, 0, 8, number of dimensions, sizes, values."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing: install Fashion-MNIST with `apt-get install "
            f"dataset-fashion-mnist`, or say where it is with --set root=FOLDER"
        )
    content = gzip.decompress(path.read_bytes())
    dimensions = content[3]
    header = 4 + 4 * dimensions
    sizes = [int.from_bytes(content[at : at + 4], "big") for at in range(4, header, 4)]
    if content[:3] != b"\0\0\x08" or len(content) != header + math.prod(sizes):
        raise ValueError(f"{path} is not an IDX file of unsigned bytes")
    return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8).view(sizes)


loss = nn.functional.cross_entropy


def optimizer(
    params: list[nn.Parameter], lr: float = 0.01, momentum: float = 0.9
) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=momentum)


def metrics(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    return {"accuracy": (outputs.argmax(1) == targets).float().mean().item()}
