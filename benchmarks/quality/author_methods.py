"""Methods as their authors' public code has them, where that departs from their papers.

They explain what the curves of that code look like; nobody should train with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from spectrain.worker.methods import Method
from spectrain.worker.methods.stash import Stash
from spectrain.worker.reading import Reading, ahead
from spectrain.worker.segment import Segment

__all__ = ["AS_CODED"]

NO_GRADIENT = 1000
"""Added to s where the gradient of the last update has been set to zero by then."""


class LeftoverGradient:
    """Predicts with one momentum step more, whose gradient is what the last update left behind."""

    copies = 0

    def __init__(self, optimizer: Optimizer, segments: Sequence[Segment]) -> None:
        self._optimizer = optimizer
        self._segments = segments
        self._gradients: dict[nn.Parameter, Tensor] = {}

    def extrapolate(self, segment: Segment, updates: int, lrs: Sequence[float]) -> None:
        momentum = self._optimizer.param_groups[0]["momentum"]
        views = (segment.views(segment.live), segment.views(segment.clean))
        for live, clean, param in zip(*views, segment.params, strict=True):
            live.copy_(clean)
            if param in self._gradients:
                step = momentum * self._optimizer.state[param]["momentum_buffer"]
                step += 0 if updates >= NO_GRADIENT else self._gradients[param]
                live.sub_(step, alpha=lrs[0] * (updates % NO_GRADIENT))

    def before_step(self) -> None:
        for segment in self._segments:
            self._gradients.update({param: param.grad.clone() for param in segment.params})

    def after_step(self) -> None: ...

    def state(self) -> dict[str, Tensor]:
        return {}

    def resume(self, state: Mapping[str, Tensor]) -> None: ...


class CodedSpecTrain(Method):
    """Looks as far as the paper says, with that vector; in a backward its gradient is zero."""

    predicts = True
    predictor = LeftoverGradient

    def forward(self, *_: object) -> Reading:
        return ahead(self.place.delay + self.place.stage // 2)

    def backward(self, *_: object) -> Reading:
        later = self.place.stage // 2
        return ahead(NO_GRADIENT + later if later else 0)


class CodedSpecTrainV2(Stash):
    """The weights themselves are moved ahead: N - k updates instead of one, never taken back."""

    def lr_factor(self, _: int) -> float:
        return float(self.place.stages - self.place.stage)


class CodedPipeOptim(Method):
    """Looks one update further than the paper says, with that vector."""

    predicts = True
    predictor = LeftoverGradient

    def forward(self, *_: object) -> Reading:
        return ahead(self.place.delay + 1)


AS_CODED: Mapping[str, type[Method]] = {
    "spectrain": CodedSpecTrain,
    "spectrain-v2": CodedSpecTrainV2,
    "pipeoptim": CodedPipeOptim,
}
"""By the name of the method that follows the paper."""
