"""The job file of ``compute.py``: a model of ``work.py``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from turns import note_updates, wait_for_turns
from work import WORKS, Samples, row_loss, sgd

settings = {"epochs": 1_000, "stages": 2}


def model(work: str = "mlp") -> nn.Sequential:
    return wait_for_turns(nn.Sequential(*WORKS[work].build_parts()))


def datasets(work: str = "mlp") -> tuple[Samples, None]:
    return WORKS[work].build_samples(), None


def collate(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


loss = row_loss


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return note_updates(sgd(params))
