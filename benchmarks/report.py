"""Runs the benchmarks and puts what they print, and plots, into docs/performance.md.

    python benchmarks/report.py [--only NAME ...] [--plots-only]

The document keeps its own words; what stands between the two marks of a benchmark is replaced. The
results are kept in ``build/bench`` too, so that one benchmark can be run again.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from machine import machine
from marks import between_marks

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "build" / "bench"
DOCUMENT = HERE.parent / "docs" / "performance.md"
PLOTS = HERE.parent / "docs" / "plots"

COMMANDS = {
    "emulated": ("peers/emulated.py",),
    "compute": ("peers/compute.py",),
    "network": ("network.py",),
    "prediction": ("prediction.py",),
    "overhead": ("overhead.py",),
    "coordinator": ("coordinator_load.py",),
    "memory": ("memory.py",),
    "links": ("links.py",),
}
"""What is run for each section, below this directory."""


def run(name: str) -> str:
    """Run one benchmark alone on the machine; return what it printed and how long it took."""
    print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
    script, *options = COMMANDS[name]
    started = time.monotonic()
    argv = [sys.executable, str(HERE / script), *options, "--json", str(RESULTS / f"{name}.json")]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        return f"It failed with exit code {done.returncode}."
    command = " ".join(["python", f"benchmarks/{script}", *options])
    seconds = time.monotonic() - started
    return f"`{command}` ({time.strftime('%F')}, {seconds:.0f} s)\n\n{done.stdout.strip()}"


# -- plots --------------------------------------------------------------------------------------


def plot_emulated(axes: Any, records: list[dict[str, Any]]) -> None:
    """Median share of the ideal against the number of stages, at 1 MB."""
    shares: dict[str, dict[int, list[float]]] = {}
    for record in records:
        if record["megabytes"] == 1:
            by_stages = shares.setdefault(record["system"], {})
            by_stages.setdefault(record["stages"], []).append(record["efficiency"])
    for system, by_stages in shares.items():
        medians = [statistics.median(values) for values in by_stages.values()]
        axes.plot(list(by_stages), medians, marker="o", label=system)
    axes.set(xlabel="stages", ylabel="share of the ideal", ylim=(0, 1.05), xscale="log")
    axes.set_xticks([2, 4, 8, 16], ["2", "4", "8", "16"])
    axes.minorticks_off()


def plot_network(axes: Any, measured: dict[str, Any]) -> None:
    """Samples per second against the rate of the links."""
    for row_name, style in (("pipeline", "o-"), ("data parallel", "s--")):
        for model in dict.fromkeys(row["model"] for row in measured["rows"]):
            rows = [row for row in measured["rows"] if row["model"] == model]
            rates = [row["Gbit/s"] for row in rows]
            paces = [row[f"{row_name}, samples/s"] for row in rows]
            axes.plot(rates, paces, style, label=f"{model}, {row_name}")
    axes.set(xlabel="Gbit/s", ylabel="samples/s", xscale="log", yscale="log")


def plot_links(axes: Any, measured: dict[str, Any]) -> None:
    """Median rate one way against the size of a parcel."""
    sizes_bytes = list(map(int, measured))
    for carrier in measured[str(sizes_bytes[0])]:
        times_s = [
            statistics.median(turn["time_s"] for turn in measured[str(size)][carrier]["one way"])
            for size in sizes_bytes
        ]
        rates = [size / time_s / 1e9 for size, time_s in zip(sizes_bytes, times_s, strict=True)]
        axes.plot(sizes_bytes, rates, marker="o", label=carrier)
    axes.set(xlabel="bytes", ylabel="GB/s", xscale="log", yscale="log")


PLOTTERS: dict[str, Callable[[Any, Any], None]] = {
    "emulated": plot_emulated,
    "network": plot_network,
    "links": plot_links,
}


def plot(name: str) -> None:
    """Draw the plot of one benchmark from its results."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "spectrain"  # the same picture gives the same file
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    PLOTTERS[name](axes, json.loads((RESULTS / f"{name}.json").read_text()))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    PLOTS.mkdir(exist_ok=True)
    figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None})


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(COMMANDS)))
@click.option("--plots-only", is_flag=True, help="From the results of an earlier run.")
def main(only: tuple[str, ...], *, plots_only: bool) -> None:
    """Run, then write the document."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    names = only or tuple(COMMANDS)
    text = between_marks(DOCUMENT.read_text(), "machine", machine())
    for name in names:
        if not plots_only:
            text = between_marks(text, name, run(name))
            DOCUMENT.write_text(text)
        if name in PLOTTERS:
            plot(name)


if __name__ == "__main__":
    main()
