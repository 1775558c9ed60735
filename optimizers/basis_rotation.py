"""Adam in the eigenbasis of each matrix's gradients, which a delay of the gradients harms less.

After "basis rotation" (arXiv 2602.03515) for asynchronous pipelines, its variant with second
moments on both sides. Written from second-hand notes; where these are silent it does as Adam does.
It knows nothing of pipelines and imports nothing of this package.

Shapes: a weight and its gradient G ``[R, C]``, the left basis U ``[R, R]``, the right V ``[C, C]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["BasisRotation"]


class BasisRotation(Optimizer):
    """Adam whose second moment is that of ``U' G V``, for matrices; plain Adam for all else.

    With ``M`` the mean of gradients, and a prime for the transpose::

        S <- beta2 * S + (1 - beta2) * (U' G V)**2
        W <- W - lr * U (U' M V / sqrt(S + eps)) V'

    both moments corrected for their beginning. U and V follow the eigenvectors of the means of
    ``G G'`` and ``G' G`` by one step of power iteration every ``refresh_every`` updates.

    Args:
        params: tensors or groups, as for any optimizer.
        lr: learning rate, at least 0.
        betas: of the mean and of the squares, each in [0, 1). The second is that of the means of
            ``G G'`` and ``G' G`` too.
        eps: added to squares under the root, above 0.
        weight_decay: decoupled, per update ``lr * weight_decay`` of a weight; at least 0.
        refresh_every: updates from one step of the bases to the next, at least 1.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        refresh_every: int = 10,
    ) -> None:
        if lr < 0 or eps <= 0 or weight_decay < 0 or refresh_every < 1:
            raise ValueError(
                f"lr = {lr} and weight_decay = {weight_decay} must be at least 0, eps = {eps} "
                f"above 0, refresh_every = {refresh_every} at least 1"
            )
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas = {betas}: both must be at least 0 and below 1")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "refresh_every": refresh_every,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do one update of all parameters that have a gradient.

        Args:
            closure: computes the loss and the gradients anew; None: they are there.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    _update(param, param.grad, self.state[param], group)
        return loss


def _update(param: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Move ``param`` and ``state`` on by one update."""
    if not state:
        _begin(param, state)
    state["step"] += 1
    beta1, beta2 = group["betas"]
    state["mean"].lerp_(gradient, 1 - beta1)
    rotates = "left" in state
    if rotates:
        state["left"].lerp_(gradient @ gradient.T, 1 - beta2)
        state["right"].lerp_(gradient.T @ gradient, 1 - beta2)
        if state["step"] % group["refresh_every"] == 1 or group["refresh_every"] == 1:
            state["left_basis"] = _follow(state["left"], state["left_basis"])
            state["right_basis"] = _follow(state["right"], state["right_basis"])
    mean = state["mean"]
    if rotates:
        left, right = state["left_basis"], state["right_basis"]
        gradient, mean = left.T @ gradient @ right, left.T @ mean @ right
    state["square"].lerp_(gradient.square(), 1 - beta2)
    square = state["square"] / (1 - beta2 ** state["step"])
    direction = mean / (1 - beta1 ** state["step"]) / (square + group["eps"]).sqrt()
    if rotates:
        direction = state["left_basis"] @ direction @ state["right_basis"].T
    param.mul_(1 - group["lr"] * group["weight_decay"])
    param.add_(direction, alpha=-group["lr"])


def _begin(param: Tensor, state: dict[str, Any]) -> None:
    state["step"] = 0
    state["mean"] = torch.zeros_like(param)
    state["square"] = torch.zeros_like(param)
    if param.ndim == 2:  # noqa: PLR2004  a matrix
        for side, size in zip(("left", "right"), param.shape, strict=True):
            state[side] = param.new_zeros(size, size)
            state[f"{side}_basis"] = torch.eye(size, dtype=param.dtype, device=param.device)


def _follow(moment: Tensor, basis: Tensor) -> Tensor:
    """Return ``basis`` after one step of orthogonal power iteration on ``moment``.

    In the layout that a saved state comes back in: products round differently in another.
    """
    return torch.linalg.qr(moment @ basis).Q.contiguous()
