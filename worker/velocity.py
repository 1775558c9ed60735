"""Where the next updates will move the weights, read from optimizer state.

Prediction must use exactly the vector that the update multiplies by the learning rate. It is in
the optimizer's state; ``param.grad`` is gone by the time it is needed. Nothing here changes a
weight or a value of the state: the state only moves into flat memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..protocol.errors import JobError
from .segment import Formula, Segment

__all__ = ["Velocity"]


class Velocity:
    """Extrapolates every segment by the velocity of the optimizer's last step.

    State tensors (``momentum_buffer``, ``exp_avg``, ``exp_avg_sq``) are re-homed: each becomes a
    view of a flat buffer laid out like its segment. All of torch's variants (loop, foreach,
    fused) update state in place, so the flat buffer stays true without further copies;
    ``load_state_dict`` brings new tensors, which move in before the next prediction.
    """

    def __init__(self, optimizer: Optimizer, segments: Sequence[Segment]) -> None:
        """Check that ``optimizer`` can be predicted.

        Raises:
            JobError: its next update cannot be read from its state.
        """
        rule = _rule_of(optimizer)
        self._homes = {id(segment): _Home(optimizer, segment, rule) for segment in segments}
        optimizer.register_step_post_hook(self._outdate)
        optimizer.register_load_state_dict_post_hook(self._outdate)

    def extrapolate(self, segment: Segment, lrs: Sequence[float]) -> None:
        """Make live values ``clean - sum(lrs) * v``, where the last update was ``-lr * v``.

        Decoupled weight decay is left out: it is no part of v. Before the first update there is
        no velocity, and live values become the clean ones.

        Args:
            segment: one of those given at the start.
            lrs: learning rates of the updates to look ahead, at least one.
        """
        self._homes[id(segment)].extrapolate(lrs)

    def _outdate(self, *_: object) -> None:
        for home in self._homes.values():
            home.outdated = True


class _Home:
    """Flat state of one segment."""

    def __init__(self, optimizer: Optimizer, segment: Segment, rule: _Rule) -> None:
        self._optimizer = optimizer
        self._segment = segment
        self._rule = rule
        self._flat: dict[str, Tensor] = {}
        self._views: dict[str, list[Tensor]] = {}
        self._updates = 0.0
        self.outdated = True

    def extrapolate(self, lrs: Sequence[float]) -> None:
        if self.outdated:
            self._updates = self._read()
            self.outdated = False
        segment, rule = self._segment, self._rule
        if not self._updates:
            segment.restore()
            return
        formula = rule.formula(segment.group, self._updates, math.fsum(lrs))
        segment.rewrite(formula, *(self._flat[key] for key in rule.keys), whole=len(rule.keys) == 1)

    def _read(self) -> float:
        """Move new state in; return how many updates it has seen."""
        states = [self._optimizer.state.get(param) for param in self._segment.params]
        known = next((state for state in states if state), None)
        if known is None:
            return 0.0
        for key in self._rule.keys:
            self._move_in(key, states)
        # A tensor, on the device when the optimizer is fused: read once per update.
        return float(known.get("step", 1))

    def _move_in(self, key: str, states: Sequence[dict[str, Any] | None]) -> None:
        if key not in self._flat:
            self._flat[key] = torch.zeros_like(self._segment.clean)
            self._views[key] = self._segment.views(self._flat[key])
        for state, view in zip(states, self._views[key], strict=True):
            # A parameter that never had a gradient has no state; its velocity stays zero.
            value = state.get(key) if state else None
            if state is not None and value is not None and value is not view:
                state[key] = view.copy_(value)


class _Rule(Protocol):
    """How one family of optimizers makes its velocity."""

    keys: tuple[str, ...]

    def refusal(self, group: Mapping[str, Any]) -> str | None:
        """Return what in ``group`` cannot be predicted, or None."""
        ...

    def formula(self, group: Mapping[str, Any], updates: float, distance: float) -> Formula:
        """Return what makes ``clean - distance * v`` of clean weights and the state of ``keys``."""
        ...


class _Momentum:
    """SGD: ``v = momentum * v + (1 - dampening) * g``, the buffer itself. g includes L2 decay."""

    keys: tuple[str, ...] = ("momentum_buffer",)

    def refusal(self, group: Mapping[str, Any]) -> str | None:
        if group["momentum"] == 0:
            return "momentum = 0"
        return next((f"{name} = True" for name in ("nesterov", "maximize") if group[name]), None)

    def formula(self, group: Mapping[str, Any], updates: float, distance: float) -> Formula:
        del group, updates

        def ahead(live: Tensor, clean: Tensor, velocity: Tensor) -> None:
            torch.add(clean, velocity, alpha=-distance, out=live)

        return ahead


class _AdaptiveMoments:
    """Adam, AdamW: ``v = m^ / (sqrt(v^) + eps)`` with both bias corrections of the last update.

    The corrections of the second moment go into eps and the factor, so that three passes do. All
    parameters of a group are taken to have had equally many updates.
    """

    keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def refusal(self, group: Mapping[str, Any]) -> str | None:
        return next((f"{name} = True" for name in ("amsgrad", "maximize") if group[name]), None)

    def formula(self, group: Mapping[str, Any], updates: float, distance: float) -> Formula:
        beta1, beta2 = map(float, group["betas"])
        root = math.sqrt(1 - beta2**updates)
        eps, factor = float(group["eps"]) * root, -distance * root / (1 - beta1**updates)

        def ahead(live: Tensor, clean: Tensor, mean: Tensor, square: Tensor) -> None:
            torch.sqrt(square, out=live)
            live.add_(eps)
            torch.addcdiv(clean, mean, live, value=factor, out=live)

        return ahead


_RULES: Mapping[type[Optimizer], _Rule] = {
    SGD: _Momentum(),
    Adam: _AdaptiveMoments(),
    AdamW: _AdaptiveMoments(),
}
"""By exact type: a subclass may step in any way it likes."""


def _rule_of(optimizer: Optimizer) -> _Rule:
    name = type(optimizer).__name__
    rule = _RULES.get(type(optimizer))
    found = name
    if rule is not None:
        refusals = (rule.refusal(group) for group in optimizer.param_groups)
        refusal = next((text for text in refusals if text), None)
        if refusal is None:
            return rule
        found = f"{name} with {refusal}"
    raise JobError(
        f"optimizer(...) returned {found}, whose next update cannot be predicted. Method spectrain "
        "predicts torch's SGD with momentum (not nesterov), Adam and AdamW (not amsgrad), none of "
        "them with maximize. Use one of these, or --method vanilla or sync."
    )
