"""Random numbers of a layer as a function of what it works on, not of what ran before."""

from __future__ import annotations

import hashlib
import struct

import torch

from ..protocol.schedule import Op

__all__ = ["layer_seed", "seed_generators"]


def layer_seed(seed: int, layer: int, op: Op) -> int:
    """Return the seed for one layer in one op: the same however the model is cut.

    A hash and not a sum: nearby arguments must not give nearby or equal streams.

    Args:
        seed: the run's.
        layer: index in the whole model.
        op: batch, micro-batch and kind all count.

    Returns:
        64 bits.
    """
    key = struct.pack("<qqqqc", seed, layer, op.batch, op.micro, op.kind.value.encode())
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the default generators that a layer on ``device`` may draw from.

    Not ``torch.manual_seed``: it visits every kind of device there could be, at a hundred times
    the cost, once per layer.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
