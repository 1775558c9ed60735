"""The encoder of the base Transformer (arXiv 1706.03762) on IMDb's movie reviews.

Six layers of width 512 with 8 heads, normalised after each sum as published. The mean over a
review's words goes into a linear layer for the two classes. Shapes: ``[B, T]`` tokens go in,
``[B, 2]`` logits come out.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from spectrain.examples.paper.recipe import (
    MeanOfWords,
    Words,
    WordVectors,
    accuracy,
    polynomial_decay,
)
from spectrain.readers import read_imdb

settings = {"epochs": 50, "batch_size": 256, "stages": 4}

HEADS = 8


class Positions(nn.Module):
    """Scales the word vectors and adds sines and cosines of their positions."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.width = width
        self.dropout = nn.Dropout(dropout)

    def forward(self, words: Words) -> Words:
        vectors, is_padding = words
        positions = torch.arange(vectors.shape[1], device=vectors.device).unsqueeze(1)
        exponents = torch.arange(0, self.width, 2, device=vectors.device) / self.width
        angles = positions / 10_000**exponents
        waves = torch.stack([angles.sin(), angles.cos()], 2).flatten(1).to(vectors.dtype)
        return self.dropout(vectors * self.width**0.5 + waves), is_padding


class Layer(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(
            width, HEADS, 4 * width, dropout, batch_first=True
        )

    def forward(self, words: Words) -> Words:
        vectors, is_padding = words
        return self.encoder(vectors, src_key_padding_mask=is_padding), is_padding


def model(
    vocabulary: int = 10_000, width: int = 512, depth: int = 6, dropout: float = 0.1
) -> nn.Sequential:
    embedding = WordVectors(vocabulary, width)
    nn.init.normal_(embedding.vectors.weight, std=width**-0.5)  # Positions makes up for it
    return nn.Sequential(
        embedding,
        Positions(width, dropout),
        *(Layer(width, dropout) for _ in range(depth)),
        MeanOfWords(),
        nn.Linear(width, 2),
    )


def datasets(
    data: str = "", vocabulary: int = 10_000, length: int = 200
) -> tuple[TensorDataset, TensorDataset]:
    return read_imdb(data, vocabulary=vocabulary, length=length)


loss = nn.functional.cross_entropy
metrics = accuracy
lr_schedule = polynomial_decay(settings, samples=25_000)


def optimizer(
    params: list[nn.Parameter], lr: float = 0.01, momentum: float = 0.9, weight_decay: float = 1e-4
) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay)
