"""Time of a prediction over the memory-bandwidth floor, and its share of an update.

    python benchmarks/prediction.py [--rounds 7] [--parameters-m 16] [--json PATH]

A prediction has to read the clean weights and the optimizer's state and to write the live ones.
The floor is these bytes over the bandwidth at which the same round copies a tensor of that size.
One thread, as a worker has by default.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from torch import nn

from spectrain.worker.weights import Weights

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.001),
}
STATE_TENSORS = {"SGD momentum": 1, "Adam": 2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Case:
    """One optimizer and type of live weights.

    Args:
        optimizer: a key of ``OPTIMIZERS``.
        precision: a key of ``DTYPES``.
        parameters: how many numbers the weights have.
    """

    def __init__(self, optimizer: str, precision: str, parameters: int) -> None:
        self.optimizer = optimizer
        self.precision = precision
        width = 1024
        layers = [nn.Linear(width, width, bias=False) for _ in range(parameters // width**2)]
        self._weights = Weights(
            [(str(index), layer) for index, layer in enumerate(layers)],
            OPTIMIZERS[optimizer],
            live_dtype=DTYPES[precision],
            predicts=True,
        )
        self._params = [parameter for layer in layers for parameter in layer.parameters()]
        numbers = sum(parameter.numel() for parameter in self._params)
        read_bytes = 4 * (1 + STATE_TENSORS[optimizer])
        self.moved_bytes = numbers * (read_bytes + DTYPES[precision].itemsize)
        self.predict_s: list[float] = []
        self.floor_s: list[float] = []
        self.update_s: list[float] = []

    def measure(self, bandwidth: float) -> None:
        """Do one round; ``bandwidth`` is in bytes per second."""
        for parameter in self._params:
            parameter.grad = torch.full_like(parameter, 1e-3)
        self._weights.collect_gradients()
        self.update_s.append(timed(self._weights.step))
        self._weights.predict(1)  # state moves to its place after the first update
        self.predict_s.append(timed(lambda: self._weights.predict(2)))
        self.floor_s.append(self.moved_bytes / bandwidth)

    def row(self) -> dict[str, float | str]:
        """Return what was measured; the first round only warmed up."""
        ratios = [
            time_s / floor for time_s, floor in zip(self.predict_s, self.floor_s, strict=True)
        ]
        predict_s = statistics.median(self.predict_s[1:])
        update_s = statistics.median(self.update_s[1:])
        return {
            "optimizer": self.optimizer,
            "live": self.precision,
            "predict_ms": 1e3 * predict_s,
            "floor_ms": 1e3 * statistics.median(self.floor_s[1:]),
            "over_floor": statistics.median(ratios[1:]),
            "lowest": min(ratios[1:]),
            "highest": max(ratios[1:]),
            "over_update": predict_s / update_s,
        }


def timed(work: Callable[[], object]) -> float:
    """Return how long ``work`` takes, in seconds."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def copy_bandwidth(source: torch.Tensor, target: torch.Tensor) -> float:
    """Return how fast bytes are read and written, both counted, in bytes per second."""
    times_s = [timed(lambda: target.copy_(source)) for _ in range(5)]
    return 2 * source.nbytes / statistics.median(times_s)


@click.command()
@click.option("--rounds", default=7, show_default=True)
@click.option("--parameters-m", default=16, show_default=True, help="Millions of weights.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the rows there.")
def main(rounds: int, parameters_m: int, json_path: Path | None) -> None:
    """Print the table as Markdown."""
    torch.set_num_threads(1)
    parameters = parameters_m << 20
    cases = [Case(opt, dtype, parameters) for opt in OPTIMIZERS for dtype in DTYPES]
    source, target = torch.ones(parameters), torch.ones(parameters)
    bandwidths: list[float] = []
    for _ in range(rounds + 1):
        for case in cases:
            bandwidths.append(copy_bandwidth(source, target))
            case.measure(bandwidths[-1])
    rows = [case.row() for case in cases]
    print(
        f"{parameters_m} M weights, copies at {statistics.median(bandwidths) / 1e9:.1f} GB/s "
        f"(read and written), medians of {rounds} rounds\n"
    )
    print("| optimizer | live | predict ms | floor ms | over floor (spread) | over update |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['optimizer']} | {row['live']} | {row['predict_ms']:.2f} "
            f"| {row['floor_ms']:.2f} | {row['over_floor']:.2f} "
            f"({row['lowest']:.2f} to {row['highest']:.2f}) | {row['over_update']:.2f} |"
        )
    if json_path:
        json_path.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
