"""One rank of data parallelism whose layers take time but compute nothing, for ``network.py``.

It does what torch's DDP does: gradients in buckets of 25 MB in the reverse order of the layers,
each summed over all ranks by gloo as soon as the backward is past it, while the backward goes on.
The buckets are of real size and real memory. Gradients are not copied into them, nor does an
optimizer run: a GPU would do both without this machine's cores.

First line of standard input: settings as JSON. Each further line is a number of steps to make, and
is answered with their times in seconds.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from emulated_models import MODELS

BUCKET_BYTES = 25 << 20
FLOAT_BYTES = 4


def buckets_of(name: str, samples: int) -> tuple[float, list[tuple[float, torch.Tensor]]]:
    """Return the seconds of a forward and, for each bucket, those of the backward that fills it."""
    forward_s = MODELS[name].forward_s(samples)
    buckets: list[tuple[float, torch.Tensor]] = []
    seconds, numbers = 0.0, 0
    for layer, layer_s in zip(reversed(MODELS[name].layers), reversed(forward_s), strict=True):
        seconds += 2 * layer_s
        for parameter in reversed(layer.parameters):
            numbers += parameter
            if numbers * FLOAT_BYTES >= BUCKET_BYTES:
                buckets.append((seconds, torch.zeros(numbers).fill_(0.0)))
                seconds, numbers = 0.0, 0
    if numbers:
        buckets.append((seconds, torch.zeros(numbers).fill_(0.0)))
    return sum(forward_s), buckets


def main() -> None:
    """Make steps as told, until standard input ends."""
    settings = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=settings["meet_at"],
        rank=settings["rank"],
        world_size=settings["ranks"],
    )
    forward_s, buckets = buckets_of(settings["model"], settings["samples"])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        times_s: list[float] = []
        for _ in range(int(line)):
            started = time.monotonic()
            time.sleep(forward_s)
            sums: list[dist.Work | None] = []
            for backward_s, gradients in buckets:
                time.sleep(backward_s)
                sums.append(dist.all_reduce(gradients, async_op=True))
            for each in sums:
                assert each is not None
                each.wait()
            times_s.append(time.monotonic() - started)
        print(json.dumps(times_s), flush=True)


if __name__ == "__main__":
    main()
