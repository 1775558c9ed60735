"""Optimizers for job files that torch does not have; nothing here knows of pipelines."""

from __future__ import annotations

from .basis_rotation import BasisRotation

__all__ = ["BasisRotation"]
