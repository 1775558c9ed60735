"""DeepSpeed's pipeline over gloo (its 1F1B), where DeepSpeed is installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain, count, repeat

from measure import Place
from torch import Tensor
from work import Work, sgd

is_installed = find_spec("deepspeed") is not None


def train(place: Place, work: Work, microbatches: int) -> Iterator[None]:
    """Train, and yield after each batch."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(place.rank))
    import deepspeed
    from deepspeed.pipe import PipelineModule

    place.join()
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    model = PipelineModule(
        layers=list(chain.from_iterable(work.parts())),
        num_stages=place.processes,
        loss_fn=work.loss,
        partition_method="parameters",
        activation_checkpoint_interval=0,
    )
    params = list(model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=sgd(params),
        model_parameters=params,
        config={
            "train_batch_size": work.batch_size,
            "train_micro_batch_size_per_gpu": work.batch_size // microbatches,
            "gradient_accumulation_steps": microbatches,
            "steps_per_print": 10**9,
        },
    )

    def pieces() -> Iterator[tuple[Tensor, Tensor]]:
        batch = work.batches()
        for number in count():
            yield from zip(*(part.chunk(microbatches) for part in batch(number)), strict=True)

    has_data = place.rank in (0, place.processes - 1)
    data = pieces() if has_data else repeat(None)
    while True:
        engine.train_batch(data_iter=data if has_data else None)
        yield
