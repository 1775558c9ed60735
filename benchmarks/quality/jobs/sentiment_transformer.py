"""Whether a sentence of a film review praises or blames, by a small transformer."""

import perceptron
import sentences
import torch
from movie_snippets import read_snippets
from torch import nn
from torch.utils.data import TensorDataset

settings = {"epochs": 2, "batch_size": 64, "stages": 8}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, sentence: sentences.Sentence) -> sentences.Sentence:
        hidden, is_word = sentence
        hidden = hidden + self.attend(self.attention_norm(hidden), is_word)
        return hidden + self.mlp(hidden), is_word

    def attend(self, x: torch.Tensor, is_word: torch.Tensor) -> torch.Tensor:
        by_head = self.query_key_value(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = is_word[:, None, None, :]
        mixed = nn.functional.scaled_dot_product_attention(*by_head, attn_mask=mask)
        return self.project(mixed.transpose(1, 2).flatten(2))


def model(width: int = 64, depth: int = 6, heads: int = 4) -> nn.Sequential:
    blocks = [Block(width, heads) for _ in range(depth)]
    return nn.Sequential(sentences.Embedding(width), *blocks, sentences.Classifier(width))


def datasets() -> tuple[TensorDataset, TensorDataset]:
    return read_snippets()


loss = nn.functional.cross_entropy
metrics = perceptron.accuracy


def optimizer(
    params: list[nn.Parameter], lr: float = 5e-4, rule: str = "adamw"
) -> torch.optim.Optimizer:
    return sentences.optimizer(params, lr, rule)
