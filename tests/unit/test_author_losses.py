"""Losses of the authors' own code on the same work, and what makes ours differ from them.

``golden/author_losses.json`` holds the losses of 24 mini-batches that the public code of PipeDream
(weight stashing), SpecTrain (vanilla, version 1, version 2) and PipeOptim gave on 4 stages with SGD
and momentum 0.9. Where it does not do what its paper says, a method here does as the code does:
then the losses are the same, so nothing else can be the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from pipelines import ListFeed, Pair, make_job, sgd, train
from torch import Tensor, nn
from torch.optim import Optimizer

from spectrain.protocol.methods import METHODS as SPECS
from spectrain.worker.methods import METHODS, Method
from spectrain.worker.methods.stash import Stash
from spectrain.worker.reading import Reading, ahead
from spectrain.worker.segment import Segment

LOSSES = json.loads((Path(__file__).parents[1] / "golden" / "author_losses.json").read_text())
STAGES, WIDTH, SEED = 4, 256, 7
MOMENTUM = 0.9


def model() -> nn.Sequential:
    layers: list[nn.Module] = []
    for index in range(1 + STAGES):
        torch.manual_seed(SEED + index)
        layers += [nn.Linear(WIDTH if index else 64, WIDTH), nn.ReLU()]
        if index:
            nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")
            nn.init.zeros_(layers[-2].bias)
    torch.manual_seed(SEED + 999)
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def batches() -> list[Pair]:
    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(SEED))
    pairs: list[Pair] = []
    for step in range(24):
        generator = torch.Generator().manual_seed(SEED * 1000003 + step)
        inputs = torch.randn(64, 64, generator=generator)
        pairs.append((inputs, (inputs @ teacher).argmax(1)))
    return pairs


@cache
def losses(method: str) -> list[float]:
    optimizer = sgd(lr=0.02, momentum=MOMENTUM)
    job = make_job(model, loss=nn.functional.cross_entropy, optimizer=optimizer)
    return [batch.loss for batch in train(job, ListFeed(batches()), [4, 2, 2, 3], method).batches]


@pytest.mark.parametrize(
    ("method", "code"), [("sync", "plain"), ("vanilla", "vanilla"), ("stash", "stash")]
)
def test_methods_that_predict_nothing_have_the_losses_of_the_authors_code(
    method: str, code: str
) -> None:
    assert losses(method) == pytest.approx(LOSSES[code], abs=1e-4)


@pytest.mark.parametrize(
    ("method", "code"),
    [("spectrain", "spectrain v1"), ("spectrain-v2", "spectrain v2"), ("pipeoptim", "pipeoptim")],
)
def test_methods_that_predict_by_the_paper_have_others(method: str, code: str) -> None:
    assert losses(method) != pytest.approx(LOSSES[code], abs=1e-3)


BACKWARD = 1000
"""Added to s where the gradient of the last update has been set to zero by then."""


class LeftoverGradient:
    """Predicts with one momentum step more, whose gradient is what the last update left behind."""

    copies = 0

    def __init__(self, optimizer: Optimizer, segments: Sequence[Segment]) -> None:
        self._optimizer = optimizer
        self._segments = segments
        self._gradients: dict[nn.Parameter, Tensor] = {}

    def extrapolate(self, segment: Segment, updates: int, lrs: Sequence[float]) -> None:
        views = (segment.views(segment.live), segment.views(segment.clean))
        for live, clean, param in zip(*views, segment.params, strict=True):
            live.copy_(clean)
            if param in self._gradients:
                step = MOMENTUM * self._optimizer.state[param]["momentum_buffer"]
                step += 0 if updates >= BACKWARD else self._gradients[param]
                live.sub_(step, alpha=lrs[0] * (updates % BACKWARD))

    def before_step(self) -> None:
        for segment in self._segments:
            self._gradients.update({param: param.grad.clone() for param in segment.params})

    def after_step(self) -> None: ...

    def state(self) -> dict[str, Tensor]:
        return {}

    def resume(self, state: Mapping[str, Tensor]) -> None: ...


class CodedV1(Method):
    """Besides that vector, s is that of the full pipeline also while it fills."""

    predicts = True
    predictor = LeftoverGradient

    def forward(self, *_: object) -> Reading:
        return ahead(self.place.delay + self.place.stage // 2)

    def backward(self, *_: object) -> Reading:
        later = self.place.stage // 2
        return ahead(BACKWARD + later if later else 0)


class CodedV2(Stash):
    """The weights themselves are moved ahead: N - k updates instead of one, never taken back."""

    def lr_factor(self, _: int) -> float:
        return float(self.place.stages - self.place.stage)


class CodedPipeOptim(Method):
    """Looks one update further than the paper says, with that vector."""

    predicts = True
    predictor = LeftoverGradient

    def forward(self, *_: object) -> Reading:
        return ahead(self.place.delay + 1)


@pytest.mark.parametrize(
    ("method", "code"),
    [(CodedV1, "spectrain v1"), (CodedV2, "spectrain v2"), (CodedPipeOptim, "pipeoptim")],
)
def test_they_differ_by_what_the_authors_code_does_otherwise(
    method: type[Method], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, f"coded {code}", method)
    monkeypatch.setitem(SPECS, f"coded {code}", SPECS["spectrain"])
    assert losses(f"coded {code}") == pytest.approx(LOSSES[code], abs=1e-4)
