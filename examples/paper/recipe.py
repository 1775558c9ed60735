"""What the six jobs share: how their learning rate falls, and the layers around a text."""

import math
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from spectrain.readers.imdb import PADDING

Words = tuple[Tensor, Tensor]
"""What passes between the layers of a text model: float ``[B, T, width]``, and bool ``[B, T]``
that is true where there is no word."""


def polynomial_decay(settings: Mapping[str, int], samples: int) -> Callable[[int], float]:
    """Return the schedule ``(1 - update / updates) ** 2`` over the epochs in ``settings``.

    In the first epoch it rises in proportion: the gradients of deep networks are wild at first, and
    no velocity is known yet to predict with.
    """
    epoch = math.ceil(samples / settings["batch_size"])
    updates = settings["epochs"] * epoch
    return lambda update: min(1.0, (update + 1) / epoch) * max(0.0, 1 - update / updates) ** 2


def accuracy(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    return {"accuracy": (outputs.argmax(1) == targets).float().mean().item()}


def he_normal(model: nn.Sequential) -> nn.Sequential:
    """Draw the convolutions' weights so that rectifiers keep variance (arXiv 1502.01852)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


class WordVectors(nn.Module):
    """Turns tokens, int64 ``[B, T]``, into vectors."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(vocabulary, width)

    def forward(self, tokens: Tensor) -> Words:
        return self.vectors(tokens), tokens == PADDING


class MeanOfWords(nn.Module):
    """Averages over the words there are, into ``[B, width]``."""

    def forward(self, words: Words) -> Tensor:
        vectors, is_padding = words
        present = (~is_padding).unsqueeze(2).to(vectors.dtype)
        return (vectors * present).sum(1) / present.sum(1)
