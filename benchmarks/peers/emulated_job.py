"""The job file of ``emulated.py``: stages that sleep where a GPU would work."""

from __future__ import annotations

import torch
from device import emulated, score
from torch import Tensor, nn
from turns import note_updates, wait_for_turns
from work import Samples, sgd

settings = {"batch_size": 32, "epochs": 1_000, "stages": 4}


def model(
    devices: int = 4,
    forward_ms: float = 10.0,
    backward_ms: float = 20.0,
    megabytes: float = 1.0,
) -> nn.Sequential:
    work = emulated(devices, forward_ms=forward_ms, backward_ms=backward_ms, megabytes=megabytes)
    return wait_for_turns(nn.Sequential(*work.build_parts()))


def datasets(devices: int = 4) -> tuple[Samples, None]:
    work = emulated(devices, forward_ms=0, backward_ms=0, megabytes=0)
    return work.build_samples(), None


def collate(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


loss = score


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return note_updates(sgd(params))
