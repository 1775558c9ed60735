"""One process trains the whole model; side by side with others like it, it is a twin.

Twins share the machine and nothing else: no pipeline of as many processes can do more.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from measure import Place
from torch import nn
from work import Work, sgd


def train(_: Place, work: Work) -> Iterator[None]:
    """Train, and yield after each batch."""
    model = nn.Sequential(*work.parts())
    optimizer = sgd(list(model.parameters()))
    batch = work.batches()
    for number in count():
        inputs, targets = batch(number)
        optimizer.zero_grad()
        work.loss(model(inputs), targets).backward()
        optimizer.step()
        yield
