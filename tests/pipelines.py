"""Small jobs, feeds and plain loops that tests of the worker share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.protocol.job import Job
from spectrain.protocol.methods import METHODS
from spectrain.protocol.schedule import Kind, Op, Work
from spectrain.protocol.settings import Settings
from spectrain.worker.build import Parts, build_stage
from spectrain.worker.loop import Loop
from spectrain.worker.pipeline import Outcome, connect, drive, run_in_one_process

Pair = tuple[Any, Any]


class Scale(nn.Module):
    """``w * x`` with a scalar w that begins at 1; remembers the w of each forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.forward_weights: list[float] = []
        self.backward_weights: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.forward_weights.append(self.weight.item())
        y = self.weight * x
        y.register_hook(lambda _: self.backward_weights.append(self.weight.item()))
        return y


def chain(layers: int) -> nn.Sequential:
    return nn.Sequential(*(Scale() for _ in range(layers)))


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.pow(2).sum() / 2


def sgd(lr: float = 0.1, momentum: float = 0.5, **options: Any) -> Callable[..., Any]:
    return lambda params: torch.optim.SGD(params, lr=lr, momentum=momentum, **options)


def adamw(lr: float = 0.01, **options: Any) -> Callable[..., Any]:
    return lambda params: torch.optim.AdamW(params, lr=lr, **options)


def nadam(params: list[nn.Parameter]) -> torch.optim.NAdam:
    return torch.optim.NAdam(params, lr=0.01)


def make_job(
    model: Callable[[], nn.Module],
    *,
    loss: Callable[[Any, Any], Any] = nn.functional.mse_loss,
    optimizer: Callable[..., Any] | None = None,
    metrics: Callable[[Any, Any], Mapping[str, float]] | None = None,
    lr_schedule: Callable[[int], float] | None = None,
) -> Job:
    return Job(
        path=Path("job.py"),
        model=model,
        datasets=lambda: (None, None),
        loss=loss,
        optimizer=optimizer or sgd(),
        metrics=metrics,
        lr_schedule=lr_schedule,
        collate=None,
        settings={},
    )


@dataclass(frozen=True)
class Fed:
    value: Any
    samples: int
    batch_samples: int


@dataclass(frozen=True)
class ListFeed:
    """Batches from a list; evaluation rounds all run through ``test``."""

    train: Sequence[Pair]
    test: Sequence[Pair] = ()
    epoch_batches: int | None = None
    microbatches: int = 1
    taken: list[str] = field(default_factory=list)

    @property
    def work(self) -> Work:
        return Work(
            train_batches=len(self.train),
            epoch_batches=self.epoch_batches or len(self.train),
            evaluation_batches=len(self.test),
            microbatches=self.microbatches,
            last_microbatches=self.microbatches,
        )

    def part(self, part: str, op: Op) -> Fed:
        self.taken.append(f"{op} {part}")
        if op.kind is Kind.EVALUATE:
            value = self.test[op.micro][part == "targets"]
            return Fed(value, _rows(value), _rows(value))
        whole = self.train[op.batch][part == "targets"]
        if self.microbatches == 1:
            return Fed(whole, _rows(whole), _rows(whole))
        piece = whole.tensor_split(self.microbatches)[op.micro]
        return Fed(piece, _rows(piece), _rows(whole))


def _rows(value: Any) -> int:
    if isinstance(value, dict):
        value = next(iter(value.values()))
    elif isinstance(value, tuple):
        value = value[0]
    return len(value) if value.ndim else 1


def least_microbatches(method: str, stages: int) -> int:
    """Return the fewest micro-batches that the method works with; 1 for most."""
    return METHODS[method].least_microbatches(stages)


def make_settings(stages: int, method: str = "spectrain", **options: Any) -> Settings:
    return Settings(job="job.py", run_dir="runs", stages=stages, method=method, **options)


def build_all(
    job: Job, layer_counts: Sequence[int], method: str = "spectrain", **options: Any
) -> list[Parts]:
    settings = make_settings(len(layer_counts), method, **options)
    return [build_stage(job, settings, layer_counts, k) for k in range(len(layer_counts))]


def join(
    parts: Sequence[Parts], feed: ListFeed, method: str = "spectrain", **options: Any
) -> list[Loop]:
    return connect(parts, feed, schedule=make_settings(len(parts), method, **options).schedule)


def train(
    job: Job, feed: ListFeed, layer_counts: Sequence[int], method: str = "spectrain", **options: Any
) -> Outcome:
    if feed.microbatches > 1:
        options["microbatches"] = feed.microbatches
    settings = make_settings(len(layer_counts), method, **options)
    return run_in_one_process(job, settings, feed, layer_counts)


def train_chain(
    layers: int,
    batches: int,
    method: str,
    optimizer: Callable[..., Any] | None = None,
    **options: Any,
) -> tuple[list[Scale], list[float]]:
    """Train a chain with one layer per stage on a constant 1; return layers and end weights."""
    job = make_job(lambda: chain(layers), loss=half_square, optimizer=optimizer)
    feed = ListFeed([(torch.ones(1), torch.zeros(1))] * batches)
    parts = build_all(job, [1] * layers, method, **options)
    drive(join(parts, feed, method))
    ends = [next(iter(part.weights.clean_state().values())).item() for part in parts]
    return [part.stage.layers[0][1] for part in parts], ends


def _split(inputs: Any, targets: Any, parts: int) -> list[Pair]:
    if parts == 1:
        return [(inputs, targets)]
    return list(zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True))


def train_plainly(
    job: Job, feed: ListFeed, *, seed: int = 0
) -> tuple[dict[str, Tensor], list[float]]:
    """Train as any PyTorch tutorial does; return the state and the losses."""
    model = job.build_model(seed, {})
    optimizer = job.optimizer(list(model.parameters()))
    losses: list[float] = []
    for inputs, targets in feed.train:
        optimizer.zero_grad()
        total = 0.0
        for piece, wanted in _split(inputs, targets, feed.microbatches):
            loss = job.loss(model(piece), wanted)
            share = _rows(piece) / _rows(inputs)
            (loss if share == 1 else loss * share).backward()
            total += loss.item() * share
        optimizer.step()
        losses.append(total)
    return model.state_dict(), losses


def mlp(width: int = 8, layers: int = 4) -> nn.Sequential:
    parts: list[nn.Module] = [nn.Linear(5, width), nn.ReLU()]
    for _ in range(layers - 2):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, 3))


def regression(batches: int, *, rows: int = 6, features: int = 5, outputs: int = 3) -> list[Pair]:
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(rows, features, generator=generator),
            torch.randn(rows, outputs, generator=generator),
        )
        for _ in range(batches)
    ]


def assert_same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
