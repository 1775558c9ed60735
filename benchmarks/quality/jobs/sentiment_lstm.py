"""Whether a sentence of a film review praises or blames, by a deep residual LSTM."""

import perceptron
import sentences
import torch
from movie_snippets import read_snippets
from torch import nn
from torch.utils.data import TensorDataset

settings = {"epochs": 2, "batch_size": 64, "stages": 8}


class ResidualLSTM(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, sentence: sentences.Sentence) -> sentences.Sentence:
        hidden, is_word = sentence
        return hidden + self.lstm(self.norm(hidden))[0], is_word


def model(width: int = 64, depth: int = 6) -> nn.Sequential:
    layers = [ResidualLSTM(width) for _ in range(depth)]
    return nn.Sequential(sentences.Embedding(width), *layers, sentences.Classifier(width))


def datasets() -> tuple[TensorDataset, TensorDataset]:
    return read_snippets()


loss = nn.functional.cross_entropy
metrics = perceptron.accuracy


def optimizer(
    params: list[nn.Parameter], lr: float = 5e-4, rule: str = "adamw"
) -> torch.optim.Optimizer:
    return sentences.optimizer(params, lr, rule)
