"""A small causal transformer that predicts the next byte of a text.

The default text is the Python standard library's own sources; ``--set text=FILE`` takes another.
Shapes: ``[B, T]`` byte values go in, ``[B, T, 256]`` logits come out.
"""

import math
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

settings = {"epochs": 1, "batch_size": 16, "stages": 4}


class Embedding(nn.Module):
    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.bytes(tokens) + self.positions[: tokens.shape[1]]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.mlp(x)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        by_head = self.query_key_value(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*by_head, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))


def model(width: int = 128, depth: int = 4, heads: int = 4, context: int = 128) -> nn.Sequential:
    return nn.Sequential(
        Embedding(width, context),
        *(Block(width, heads) for _ in range(depth)),
        nn.LayerNorm(width),
        nn.Linear(width, 256),
    )


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pieces of ``context`` bytes, each with the same piece one byte later as its target."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = index * self.context, (index + 1) * self.context
        return self.text[start:end], self.text[start + 1 : end + 1]


def datasets(
    text: str = "", context: int = 128, text_bytes: int = 2_000_000
) -> tuple[Windows, Windows]:
    content = Path(text).read_bytes() if text else standard_library(text_bytes)
    tokens = torch.frombuffer(bytearray(content[:text_bytes]), dtype=torch.uint8).long()
    test = min(len(tokens) // 20, 500 * context)
    return Windows(tokens[:-test], context), Windows(tokens[-test:], context)


def standard_library(size: int) -> bytes:
    content = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        content += path.read_bytes()
        if len(content) >= size:
            break
    return bytes(content)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def optimizer(params: list[nn.Parameter], lr: float = 5e-4) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr)


def metrics(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    return {"bits_per_byte": loss(outputs, targets).item() / math.log(2)}
