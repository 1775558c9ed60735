"""torch's DistributedDataParallel over gloo: each process has the model and part of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from measure import Place
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from work import Work, sgd


def train(place: Place, work: Work) -> Iterator[None]:
    """Train, and yield after each batch."""
    place.join()
    model = DistributedDataParallel(nn.Sequential(*work.parts()), gradient_as_bucket_view=True)
    optimizer = sgd(list(model.parameters()))
    batch = work.batches()
    for number in count():
        inputs, targets = (part.chunk(place.processes)[place.rank] for part in batch(number))
        optimizer.zero_grad()
        work.loss(model(inputs), targets).backward()
        optimizer.step()
        yield
