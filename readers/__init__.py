"""Readers of the user's own copies of public data sets; they download nothing."""

from __future__ import annotations

from .cifar10 import Images, read_cifar10
from .imdb import read_imdb

__all__ = ["Images", "read_cifar10", "read_imdb"]
