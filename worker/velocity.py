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

    Args:
        optimizer: of the segments' parameters.
        segments: to extrapolate.
        fades: whether gradients to come are taken to be zero, so that the velocity becomes less by
            the momentum with each update ("msnag", as FTPipe does it), or to keep it as it is.

    Raises:
        JobError: the optimizer's next update cannot be read from its state.
    """

    copies = 0

    def __init__(
        self, optimizer: Optimizer, segments: Sequence[Segment], *, fades: bool = False
    ) -> None:
        rule = _rule_of(optimizer, fades=fades)
        self._homes = {id(segment): _Home(optimizer, segment, rule) for segment in segments}
        optimizer.register_step_post_hook(self._outdate)
        optimizer.register_load_state_dict_post_hook(self._outdate)

    def extrapolate(self, segment: Segment, updates: int, lrs: Sequence[float]) -> None:
        """Make live values ``clean - sum(lrs) * v``, where the last update was ``-lr * v``.

        Decoupled weight decay is left out: it is no part of v. Before the first update there is
        no velocity, and live values become the clean ones.

        Args:
            segment: one of those given at the start.
            updates: to look ahead, at least 1.
            lrs: their learning rates.
        """
        assert updates > 0, f"cannot look {-updates} updates back"
        self._homes[id(segment)].extrapolate(lrs)

    def before_step(self) -> None:
        """Do nothing: all that is needed is in the optimizer."""

    def after_step(self) -> None:
        """Do nothing: all that is needed is in the optimizer."""

    def state(self) -> dict[str, Tensor]:
        """Return nothing: all that is needed is in the optimizer."""
        return {}

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """Do nothing: all that is needed is in the optimizer."""
        del state

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
        formula = rule.formula(segment.group, self._updates, lrs)
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
    """How one family of optimizers moves its weights."""

    keys: tuple[str, ...]

    def refusal(self, group: Mapping[str, Any]) -> str | None:
        """Return what in ``group`` cannot be predicted, or None."""
        ...

    def formula(self, group: Mapping[str, Any], updates: float, lrs: Sequence[float]) -> Formula:
        """Return what makes predicted weights of clean ones and the state of ``keys``.

        Args:
            group: of the optimizer.
            updates: that the state has seen, at least 1.
            lrs: of the updates to look ahead.
        """
        ...


class _Momentum:
    """SGD: ``v = momentum * v + (1 - dampening) * g``, the buffer itself. g includes L2 decay."""

    keys: tuple[str, ...] = ("momentum_buffer",)

    def refusal(self, group: Mapping[str, Any]) -> str | None:
        if group["momentum"] == 0:
            return "momentum = 0"
        return next((f"{name} = True" for name in ("nesterov", "maximize") if group[name]), None)

    def formula(self, group: Mapping[str, Any], updates: float, lrs: Sequence[float]) -> Formula:
        del updates
        distance = self._distance(float(group["momentum"]), lrs)

        def ahead(live: Tensor, clean: Tensor, velocity: Tensor) -> None:
            torch.add(clean, velocity, alpha=-distance, out=live)

        return ahead

    def _distance(self, momentum: float, lrs: Sequence[float]) -> float:
        del momentum
        return math.fsum(lrs)


class _FadingMomentum(_Momentum):
    """SGD without further gradients: ``v`` is multiplied by the momentum before each update."""

    def _distance(self, momentum: float, lrs: Sequence[float]) -> float:
        return math.fsum(lr * momentum**j for j, lr in enumerate(lrs, start=1))


class _AdaptiveMoments:
    """Adam, AdamW: ``v = m^ / (sqrt(v^) + eps)`` with both bias corrections of the last update.

    The corrections of the second moment go into eps and the factor, so that three passes do. All
    parameters of a group are taken to have had equally many updates.
    """

    keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def refusal(self, group: Mapping[str, Any]) -> str | None:
        return next((f"{name} = True" for name in ("amsgrad", "maximize") if group[name]), None)

    def formula(self, group: Mapping[str, Any], updates: float, lrs: Sequence[float]) -> Formula:
        beta1, beta2 = map(float, group["betas"])
        root = math.sqrt(1 - beta2**updates)
        eps, factor = float(group["eps"]) * root, -math.fsum(lrs) * root / (1 - beta1**updates)

        def ahead(live: Tensor, clean: Tensor, mean: Tensor, square: Tensor) -> None:
            torch.sqrt(square, out=live)
            live.add_(eps)
            torch.addcdiv(clean, mean, live, value=factor, out=live)

        return ahead


class _FadingMoments(_AdaptiveMoments):
    """Adam, AdamW without further gradients: the mean fades, both corrections go on.

    The square is held, as in FTPipe: where it faded too, steps would grow again.
    """

    def formula(self, group: Mapping[str, Any], updates: float, lrs: Sequence[float]) -> Formula:
        beta1, beta2 = map(float, group["betas"])
        eps = float(group["eps"])
        steps: list[tuple[float, float]] = []
        for j, lr in enumerate(lrs, start=1):
            root = math.sqrt(1 - beta2 ** (updates + j))
            steps.append((eps * root, -lr * root * beta1**j / (1 - beta1 ** (updates + j))))

        def ahead(live: Tensor, clean: Tensor, mean: Tensor, square: Tensor) -> None:
            live.copy_(clean)
            root, divisor = square.sqrt(), torch.empty_like(square)
            for shift, factor in steps:
                live.addcdiv_(mean, torch.add(root, shift, out=divisor), value=factor)

        return ahead


_RULES: Mapping[type[Optimizer], _Rule] = {
    SGD: _Momentum(),
    Adam: _AdaptiveMoments(),
    AdamW: _AdaptiveMoments(),
}
"""By exact type: a subclass may step in any way it likes."""

_FADING_RULES: Mapping[type[Optimizer], _Rule] = {
    SGD: _FadingMomentum(),
    Adam: _FadingMoments(),
    AdamW: _FadingMoments(),
}


def _rule_of(optimizer: Optimizer, *, fades: bool) -> _Rule:
    name = type(optimizer).__name__
    rule = (_FADING_RULES if fades else _RULES).get(type(optimizer))
    found = name
    if rule is not None:
        refusals = (rule.refusal(group) for group in optimizer.param_groups)
        refusal = next((text for text in refusals if text), None)
        if refusal is None:
            return rule
        found = f"{name} with {refusal}"
    raise JobError(
        f"optimizer(...) returned {found}, whose next update cannot be predicted from its state: "
        "that can be done with torch's SGD with momentum (not nesterov), Adam and AdamW (not "
        "amsgrad), none of them with maximize. Use one of these, --predictor last-delta, or a "
        "method that does not predict, such as --method vanilla or sync."
    )
