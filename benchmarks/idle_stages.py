"""A job whose stages sleep and hand on next to nothing, and note when each update ended."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).with_name("peers")))
from device import emulated, score
from turns import note_updates
from work import Samples, sgd

settings = {"batch_size": 32, "epochs": 1_000_000, "partition": "equal"}

KIBIBYTES = 4


def idle(stages: int) -> nn.Sequential:
    """Return stages that sleep 10 and 20 ms and hand on 4 KiB."""
    work = emulated(stages, forward_ms=10, backward_ms=20, megabytes=KIBIBYTES / 1024)
    return nn.Sequential(*work.build_parts())


def model(devices: int = 4) -> nn.Sequential:
    return idle(devices)


def datasets() -> tuple[Samples, None]:
    return emulated(1, forward_ms=0, backward_ms=0, megabytes=0).build_samples(), None


def collate(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


loss = score


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return note_updates(sgd(params))
