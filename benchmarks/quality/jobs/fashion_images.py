"""Fashion-MNIST as Debian packs it, in its own split, for the jobs beside this file."""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

ROOT = Path("/usr/share/datasets/fashion-mnist")
MEAN, STD = 0.286, 0.353  # of the training pixels, scaled to 0..1


def read_split(split: str, samples: int) -> TensorDataset:
    """Return the first ``samples`` images ``[1, 28, 28]`` of "train" or "t10k", and labels."""
    pixels = read_values(ROOT / f"{split}-images-idx3-ubyte.gz", header=16).view(-1, 1, 28, 28)
    labels = read_values(ROOT / f"{split}-labels-idx1-ubyte.gz", header=8)
    images = (pixels[:samples].float() / 255 - MEAN) / STD
    return TensorDataset(images, labels[:samples].long())


def read_values(path: Path, header: int) -> torch.Tensor:
    """Return the unsigned bytes that follow the header of an IDX file."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: apt-get install dataset-fashion-mnist")
    return torch.frombuffer(
        bytearray(gzip.decompress(path.read_bytes())[header:]), dtype=torch.uint8
    )
