"""The seeded work that the authors' public code was run on, its losses, and the same work here.

A perceptron with one hidden layer on each stage learns what a random linear map says of random
inputs; SGD with momentum 0.9, one epoch of 300 mini-batches of 64. ``author_curves.json`` has the
losses, to five digits, that were had on a CPU from

* a plain PyTorch loop: ``sync``;
* PipeDream's code, ``msr-fiddle/pipedream``: ``stash``;
* SpecTrain's code, ``ntueclab/SpecTrain-PyTorch``: ``vanilla``, ``spectrain`` (its version 1) and
  ``spectrain-v2``;
* PipeOptim's code, ``guanleics/PipeOptim``: ``pipeoptim``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from author_methods import AS_CODED
from torch import Tensor, nn

from spectrain.protocol.errors import NonFiniteError
from spectrain.protocol.job import Job
from spectrain.protocol.schedule import Op, Work
from spectrain.protocol.settings import Settings
from spectrain.worker.methods import METHODS
from spectrain.worker.pipeline import run_in_one_process

__all__ = ["BATCHES", "Case", "author_losses", "losses"]

CURVES = Path(__file__).with_name("author_curves.json")
INPUTS, WIDTH, CLASSES, BATCH_SIZE, BATCHES = 64, 256, 10, 64, 300
SEED = 7


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """What one curve is of."""

    stages: int
    lr: float
    method: str


def author_losses() -> dict[Case, list[float]]:
    """Return the curves of the authors' code; NaN from where one diverged."""
    return {
        Case(line["stages"], line["lr"], line["method"]): [
            math.nan if loss is None else loss for loss in line["losses"]
        ]
        for line in json.loads(CURVES.read_text())
    }


def losses(
    case: Case, *, batches: int = BATCHES, as_coded: bool = False, rounding: int = 0
) -> list[float]:
    """Train here, all stages in this process.

    Args:
        case: what to train.
        batches: how many mini-batches of it, at most 300.
        as_coded: whether the method does as its authors' code, where that departs from the paper.
        rounding: if not 0, the seed by which each initial weight is the next larger or smaller
            float: what that changes is what rounding can change.

    Returns:
        The loss of each mini-batch; NaN from where it is not finite.
    """
    stages = case.stages
    job = Job(
        path=CURVES,
        model=lambda: model(stages, rounding),
        datasets=lambda: (None, None),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=case.lr, momentum=0.9),
        metrics=None,
        lr_schedule=None,
        collate=None,
        settings={},
    )
    settings = Settings(job=str(CURVES), run_dir="", stages=stages, method=case.method)
    curve: list[float] = []
    with patch.dict(METHODS, AS_CODED if as_coded else {}):
        try:
            run_in_one_process(
                job,
                settings,
                Feed(batches),
                [4] + [2] * (stages - 2) + [3],
                on_batch=lambda batch: curve.append(batch.loss),
            )
        except NonFiniteError:
            curve += [math.nan] * (batches - len(curve))
    return curve


def model(stages: int, rounding: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index in range(1 + stages):
        torch.manual_seed(SEED + index)
        linear = nn.Linear(WIDTH if index else INPUTS, WIDTH)
        if index:
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
            nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    torch.manual_seed(SEED + 999)
    whole = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
    if rounding:
        round_otherwise(whole, torch.Generator().manual_seed(rounding))
    return whole


@torch.no_grad()
def round_otherwise(layers: nn.Module, generator: torch.Generator) -> None:
    for weight in layers.parameters():
        up = torch.rand(weight.shape, generator=generator) < 0.5
        weight.copy_(torch.nextafter(weight, torch.where(up, math.inf, -math.inf)))


@cache
def mini_batch(step: int) -> Mapping[str, Tensor]:
    teacher = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(SEED))
    generator = torch.Generator().manual_seed(SEED * 1000003 + step)
    inputs = torch.randn(BATCH_SIZE, INPUTS, generator=generator)
    return {"inputs": inputs, "targets": (inputs @ teacher).argmax(1)}


@dataclass(frozen=True, slots=True)
class Fed:
    value: Tensor
    samples: int = BATCH_SIZE
    batch_samples: int = BATCH_SIZE


@dataclass(frozen=True, slots=True)
class Feed:
    """The mini-batches in their order, once and without evaluation."""

    batches: int

    @property
    def work(self) -> Work:
        return Work(
            train_batches=self.batches,
            epoch_batches=self.batches,
            evaluation_batches=0,
            microbatches=1,
            last_microbatches=1,
        )

    def part(self, part: str, op: Op) -> Fed:
        return Fed(mini_batch(op.batch)[part])
