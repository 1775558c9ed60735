"""First and last layer of a network that reads sentences, for the jobs beside this file.

Between them a pair of tensors travels: hidden ``[B, T, width]``, and which of the ``[B, T]``
places have a word.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from movie_snippets import LENGTH, PADDING, VOCABULARY
from torch import nn

Sentence: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class Embedding(nn.Module):
    """Word numbers ``[B, T]`` to a ``Sentence``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, tokens: torch.Tensor) -> Sentence:
        return self.words(tokens) + self.positions[: tokens.shape[1]], tokens != PADDING


class Classifier(nn.Module):
    """The mean over the words, and two logits ``[B, 2]`` of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, 2)

    def forward(self, sentence: Sentence) -> torch.Tensor:
        hidden, is_word = sentence
        weights = is_word.unsqueeze(2).to(hidden.dtype)
        return self.linear((self.norm(hidden) * weights).sum(1) / weights.sum(1))


def optimizer(params: list[nn.Parameter], lr: float, rule: str) -> torch.optim.Optimizer:
    """Return AdamW or, for "nadam", NAdam with the settings of arXiv 2505.01099."""
    if rule == "nadam":
        return torch.optim.NAdam(
            params,
            lr=lr,
            betas=(0.99, 0.999),
            momentum_decay=0.004,
            weight_decay=0.01,
            decoupled_weight_decay=True,
        )
    return torch.optim.AdamW(params, lr=lr)
