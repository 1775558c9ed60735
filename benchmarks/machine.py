"""What something was measured on, in one sentence."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import psutil
import torch

__all__ = ["machine"]


def machine() -> str:
    """Return today's date, processor, memory, GPU and versions."""
    memory_gib = psutil.virtual_memory().total / 2**30
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    gpus = torch.cuda.device_count()
    gpu = f"{gpus} {torch.cuda.get_device_name()}" if gpus else "no GPU"
    return (
        f"{time.strftime('%F')}, {psutil.cpu_count()} cores of {model}, "
        f"{memory_gib:.0f} GiB of memory, {gpu}, "
        f"torch {torch.__version__}, Python {platform.python_version()}."
    )
