"""The models and batches that all systems train alike: plain PyTorch, in parts of equal cost.

N samples a batch, width W, sequence length T. A system takes as many parts to a stage as it likes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = ["WORKS", "Samples", "Work", "row_loss", "sgd"]

SAMPLES = 4096  # of a data set, gone through again and again
SEED = 0

Batch: TypeAlias = tuple[Tensor, Tensor]


class Samples(Dataset[Batch]):
    """A table in memory that gives a whole batch at once, as the peers index it too."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        return self.inputs[indices], self.targets[indices]


@dataclass(frozen=True)
class Work:
    """What is trained.

    Attributes:
        name: for tables.
        batch_size: N, samples of one update.
        build_parts: makes the model in parts of equal cost, in order; draws from torch's generator.
        build_samples: makes the data set.
        loss: outputs and targets to the mean over the samples.
    """

    name: str
    batch_size: int
    build_parts: Callable[[], list[nn.Module]]
    build_samples: Callable[[], Samples]
    loss: Callable[[Tensor, Tensor], Tensor]

    def parts(self) -> list[nn.Module]:
        """Return the whole model with its initial weights."""
        torch.manual_seed(SEED)
        return self.build_parts()

    def stage(self, index: int, stages: int) -> nn.Sequential:
        """Return one of so many equal stages."""
        parts = self.parts()
        each, rest = divmod(len(parts), stages)
        assert rest == 0, f"{len(parts)} parts in {stages} stages"
        return nn.Sequential(*parts[index * each : (index + 1) * each])

    def batches(self) -> Callable[[int], Batch]:
        """Return what gives batch 0, 1, ...: those that SpecTrain's feed makes of the data set."""
        from spectrain.coordinator.feed import order

        samples = self.build_samples()
        order_of = lru_cache(maxsize=1)(lambda epoch: order(SEED, epoch, len(samples)).tolist())
        epoch_batches = len(samples) // self.batch_size

        def batch(number: int) -> Batch:
            epoch, place = divmod(number, epoch_batches)
            start = place * self.batch_size
            return samples.__getitems__(order_of(epoch)[start : start + self.batch_size])

        return batch


def sgd(params: list[nn.Parameter], lr: float = 0.01) -> torch.optim.Optimizer:
    """The optimizer of every system; its momentum is what SpecTrain predicts with."""
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def row_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, the mean over all but the last dimension of ``outputs``."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


# -- an MLP: much weight for its work --------------------------------------------------------------


def mlp_parts(width: int = 1024, depth: int = 8) -> list[nn.Module]:
    """``[N, 64]`` to ``[N, 10]``; the thin first and last layers join the parts beside them."""
    parts: list[list[nn.Module]] = [[nn.Linear(width, width), nn.ReLU()] for _ in range(depth)]
    parts[0] = [nn.Linear(64, width), nn.ReLU(), *parts[0]]
    parts[-1].append(nn.Linear(width, 10))
    return [nn.Sequential(*part) for part in parts]


def classes() -> Samples:
    """Points in 64 dimensions, sorted into 10 classes by a random linear map."""
    generator = torch.Generator().manual_seed(SEED)
    teacher = torch.randn(64, 10, generator=generator)
    points = torch.randn(SAMPLES, 64, generator=generator)
    return Samples(points, (points @ teacher).argmax(1))


# -- a transformer: much work for its weight -------------------------------------------------------

CONTEXT, TOKENS = 64, 64


class Embedding(nn.Module):
    """Tokens ``[N, T]`` to ``[N, T, W]``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions


class Block(nn.Module):
    """Causal attention and a perceptron, ``[N, T, W]`` to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.project(self.attend(self.query_key_value(self.norm(x))))
        return x + self.perceptron(x)

    def attend(self, query_key_value: Tensor) -> Tensor:
        by_head = query_key_value.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*by_head, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


def transformer_parts(width: int = 256, depth: int = 4, heads: int = 4) -> list[nn.Module]:
    """``[N, T]`` to ``[N, T, 64]``."""
    parts: list[list[nn.Module]] = [[Block(width, heads)] for _ in range(depth)]
    parts[0].insert(0, Embedding(width))
    parts[-1] += [nn.LayerNorm(width), nn.Linear(width, TOKENS)]
    return [nn.Sequential(*part) for part in parts]


def sequences() -> Samples:
    """Each token follows from the one before it; every twentieth is noise."""
    generator = torch.Generator().manual_seed(SEED)
    text = torch.randint(0, TOKENS, (SAMPLES, CONTEXT + 1), generator=generator)
    noise = torch.rand(text.shape, generator=generator) < 0.05
    for place in range(CONTEXT):
        follows = (5 * text[:, place] + 3) % TOKENS
        text[:, place + 1] = torch.where(noise[:, place + 1], text[:, place + 1], follows)
    return Samples(text[:, :-1].contiguous(), text[:, 1:].contiguous())


WORKS = {
    "mlp": Work("mlp", 256, mlp_parts, classes, row_loss),
    "transformer": Work("transformer", 32, transformer_parts, sequences, row_loss),
}
