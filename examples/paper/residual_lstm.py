"""The residual LSTM (arXiv 1701.03360) on IMDb's movie reviews.

Ten layers of 1,024 cells and 512 outputs, as in that paper on speech; a word vector takes the place
of a frame of sound. The mean over a review's words goes into a linear layer for the two classes.
Shapes: ``[B, T]`` tokens go in, ``[B, 2]`` logits come out.
"""

import torch
from torch import Tensor, nn
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


class ResidualLSTM(nn.Module):
    """One layer with input x, output h and cells c, the latter two of the word before.

    ::

        i  = sigmoid(W_xi x + W_hi h + w_ci * c + b_i)
        f  = sigmoid(W_xf x + W_hf h + w_cf * c + b_f)
        c' = f * c + i * tanh(W_xc x + W_hc h + b_c)
        o  = sigmoid(W_xo x + W_ho h + W_co c' + b_o)
        h' = o * (W_p tanh(c') + x)

    The x at the end is the shortcut: the output gate governs it too, and it stays out of c. Output
    and forget gates begin nearly open, or ten layers would dim their input a thousandfold.
    """

    def __init__(self, width: int, cells: int) -> None:
        super().__init__()
        self.sizes = [cells, cells, cells, width]  # i, f, what goes into c, o
        self.from_input = nn.Linear(width, sum(self.sizes))
        self.from_output = nn.Linear(width, sum(self.sizes), bias=False)
        self.input_peephole = nn.Parameter(torch.zeros(cells))
        self.forget_peephole = nn.Parameter(torch.zeros(cells))
        self.output_peephole = nn.Linear(cells, width, bias=False)
        self.project = nn.Linear(cells, width, bias=False)
        for bias in self.from_input.bias.detach().split(self.sizes)[1::2]:
            bias.fill_(2.0)

    def forward(self, words: Words) -> Words:
        vectors, is_padding = words
        steps = self.from_input(vectors).unbind(1)
        h = vectors.new_zeros(len(vectors), self.sizes[-1])
        c = vectors.new_zeros(len(vectors), self.sizes[0])
        outputs: list[Tensor] = []
        for x, step in zip(vectors.unbind(1), steps, strict=True):
            i, f, new, o = (step + self.from_output(h)).split(self.sizes, 1)
            i = torch.sigmoid(i + self.input_peephole * c)
            f = torch.sigmoid(f + self.forget_peephole * c)
            c = f * c + i * torch.tanh(new)
            o = torch.sigmoid(o + self.output_peephole(c))
            h = o * (self.project(torch.tanh(c)) + x)
            outputs.append(h)
        return torch.stack(outputs, 1), is_padding


def model(
    vocabulary: int = 10_000, width: int = 512, cells: int = 1024, depth: int = 10
) -> nn.Sequential:
    return nn.Sequential(
        WordVectors(vocabulary, width),
        *(ResidualLSTM(width, cells) for _ in range(depth)),
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
