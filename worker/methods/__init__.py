"""Staleness methods: what a stage's layers read in a forward and in a backward.

A method chooses weights and nothing else: no streams, no process groups, no order of ops. One
small file each; what may be known of them without torch stands in ``protocol.methods``.
"""

from __future__ import annotations

from collections.abc import Mapping

from .base import Method, Place
from .damped import SpecTrainDamped, SpecTrainV2Damped, StashDamped
from .nesterov import Nesterov
from .paci import Paci
from .pipemare import PipeMare
from .pipeoptim import PipeOptim
from .spectrain import SpecTrain
from .spectrain_v2 import SpecTrainV2
from .stash import Stash
from .sync import Sync
from .uniform_delay import DoubleBuffered, VerticalSync
from .vanilla import Vanilla
from .xpipe import XPipe

__all__ = ["METHODS", "Method", "Place"]

METHODS: Mapping[str, type[Method]] = {
    "spectrain": SpecTrain,
    "spectrain-damped": SpecTrainDamped,
    "spectrain-v2": SpecTrainV2,
    "spectrain-v2-damped": SpecTrainV2Damped,
    "pipeoptim": PipeOptim,
    "xpipe": XPipe,
    "vanilla": Vanilla,
    "paci": Paci,
    "stash": Stash,
    "stash-damped": StashDamped,
    "vertical-sync": VerticalSync,
    "2bw": DoubleBuffered,
    "nesterov": Nesterov,
    "pipemare": PipeMare,
    "sync": Sync,
}
"""Every method, by its name in ``protocol.methods.METHODS``."""
