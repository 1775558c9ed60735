"""Clean and live weights of one stage. Knows neither schedule nor method nor streams.

The optimizer owns the *clean* weights. Layers read the *live* ones, which are what the last
``read`` made of the clean ones: whoever lets layers run says first what they are to read. It
is always computed from the clean weights and never undone, neither by arithmetic (``a - x + x``
is not ``a`` in floating point) nor by a copy that nobody would read.

Live parameters are the model's own ``nn.Parameter`` objects with their data moved into flat
memory. Writing to that memory does not count as an in-place change of the parameter, so a
backward reads whatever is there by then: the newest weights, predicted ones, or those that its
forward read, copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..protocol.errors import JobError
from .precision import cast_buffers, live_dtypes
from .predictor import PredictorBuilder
from .reading import Ahead, Kept, Key, Reading, Version
from .segment import Segment
from .velocity import Velocity
from .versions import Copy, Versions

__all__ = ["Layers", "Weights"]

Layers: TypeAlias = Sequence[tuple[str, nn.Module]]
"""Layers in order, each with its full name in the model."""


class Weights:
    """The parameters of one stage's layers, clean and live, and their optimizer.

    Frozen parameters (``requires_grad`` False) and those that the optimizer was not given never
    change. A stage without any trainable parameter works like any other.

    Attributes:
        optimizer: the job's, over the clean parameters.
    """

    def __init__(
        self,
        layers: Layers,
        build_optimizer: Callable[[list[nn.Parameter]], Optimizer],
        *,
        lr_schedule: Callable[[int], float] | None = None,
        live_dtype: torch.dtype = torch.float32,
        predicts: bool = False,
        keeps: bool = False,
        older: int = 0,
        predictor: PredictorBuilder = Velocity,
        foresees_lr: bool = False,
    ) -> None:
        """Take the weights of ``layers`` over.

        Args:
            layers: the stage's, on their device.
            build_optimizer: gets clean parameters, fp32, in the order of the layers.
            lr_schedule: from the number of an update, counted from 0, to a factor on the lr that
                each group was built with.
            live_dtype: what layers compute in, fp32 or bf16. Clean weights and optimizer state
                are fp32 in any case.
            predicts: whether weights will be read that are not there yet.
            keeps: whether weights will be kept and read again. Without ``predicts``, ``keeps``
                and ``older``, and in fp32, clean and live weights share memory.
            older: how many clean versions before the newest one will be read.
            predictor: makes what looks ahead, if ``predicts``.
            foresees_lr: whether looking ahead goes by the learning rates that ``lr_schedule`` has
                for the updates to come, or takes the next one's for all of them.

        Raises:
            JobError: a trainable parameter is not fp32, or ``predicts`` and the optimizer's next
                update cannot be told.
        """
        self._layers = tuple(layers)
        self._lr_schedule = lr_schedule
        self._foresees_lr = foresees_lr
        self._lr_factors: list[float] = []  # of the coming updates, as far as they were asked for
        self._version = 0
        # What live weights are: so many updates ahead, or a version, or a copy. None: out of date.
        self._shown: int | Version | Copy | None = 0
        self._trainable = _clean_copies(self._layers)
        # An optimizer may not be empty, and the learning rate is of interest in any case.
        params = list(self._trainable.values()) or [nn.Parameter(torch.zeros(0))]
        self.optimizer = build_optimizer(params)
        self._base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        shared = not (predicts or keeps or older)
        self._segments, self._clean = self._lay_out(live_dtype, shared=shared)
        self._predictor = predictor(self.optimizer, self._segments) if predicts else None
        self._versions = Versions(self._segments, older=older) if keeps or older else None
        self._set_lr()

    def _lay_out(
        self, live_dtype: torch.dtype, *, shared: bool
    ) -> tuple[list[Segment], dict[Tensor, Tensor]]:
        """Build the segments; return them and, for each live parameter, its clean values."""
        modules = [layer for _, layer in self._layers]
        dtypes = live_dtypes(modules, live_dtype)
        cast_buffers(modules, live_dtype)
        live_of = {clean: live for live, clean in self._trainable.items()}
        segments: list[Segment] = []
        self._group_of: list[int] = []  # of each segment, its place among the optimizer's
        clean_of: dict[Tensor, Tensor] = {}
        for place, group in enumerate(self.optimizer.param_groups):
            members = [param for param in group["params"] if param in live_of]
            for dtype in dict.fromkeys(dtypes[live_of[param]] for param in members):
                params = [param for param in members if dtypes[live_of[param]] == dtype]
                segment = Segment(group, params, live_dtype=dtype, shared=shared)
                segments.append(segment)
                self._group_of.append(place)
                for param, view in zip(params, segment.views(segment.live), strict=True):
                    live_of[param].data = view
                    clean_of[live_of[param]] = param
        for param, dtype in dtypes.items():
            if param not in clean_of:
                clean_of[param] = param.detach()
                param.data = param.detach().to(dtype)
        return segments, clean_of

    @property
    def version(self) -> int:
        """Updates that these weights have seen."""
        return self._version

    @property
    def lr(self) -> float:
        """Learning rate that the next update will use, of the first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def copies(self) -> int:
        """How many copies of the weights there was memory for at most: clean, live and others."""
        apart = any(segment.live is not segment.clean for segment in self._segments)
        held = 0 if self._versions is None else self._versions.copies
        return 1 + apart + held + (0 if self._predictor is None else self._predictor.copies)

    def read(self, reading: Reading) -> None:
        """Make live weights those that a method has chosen."""
        if isinstance(reading, Ahead):
            self.predict(reading.updates)
            if reading.keep is not None:
                self._memory.keep(reading.keep)
        elif isinstance(reading, Kept):
            copy = self._memory.kept(reading.key)
            if copy is not self._shown:
                self._copy_in(copy.tensors)
                self._show(copy)
        elif reading.number == self._version:
            self.predict(0)
        elif reading != self._shown:
            self._copy_in(self._memory.older(reading.number))
            self._show(reading)

    def predict(self, horizon: int) -> None:
        """Make live weights those expected ``horizon`` updates from now.

        Args:
            horizon: s; 0 makes live weights equal to the clean ones, below 0 looks back.
        """
        if horizon == self._shown:
            return
        for index, segment in enumerate(self._segments):
            if horizon == 0:
                segment.restore()
            else:
                assert self._predictor is not None, "these weights were built without prediction"
                self._predictor.extrapolate(segment, horizon, self._lrs(index, horizon))
        self._show(horizon)

    def _lrs(self, index: int, updates: int) -> list[float]:
        """Return the learning rates of the coming ``updates`` updates of a segment."""
        group = self._segments[index].group
        if not self._foresees_lr or self._lr_schedule is None:
            return [float(group["lr"])] * updates
        factors = self._lr_factors
        while len(factors) < updates:
            factors.append(float(self._lr_schedule(self._version + len(factors))))
        base = self._base_lrs[self._group_of[index]]
        return [base * factor for factor in factors[:updates]]

    @property
    def _memory(self) -> Versions:
        assert self._versions is not None, "these weights were built to be read newest only"
        return self._versions

    def _copy_in(self, values: Sequence[Tensor]) -> None:
        for segment, tensor in zip(self._segments, values, strict=True):
            segment.live.copy_(tensor)

    def _show(self, shown: int | Version | Copy | None) -> None:
        """Take note of what live weights are from now on."""
        self._shown = shown
        if self._versions is not None:
            self._versions.live_changed(shown if isinstance(shown, Copy) else None)

    def collect_gradients(self) -> None:
        """Take over what a backward left at the live parameters; it adds up until ``step``.

        In fp32 clean and live parameters share the gradient. From bf16 it is cast and summed in
        fp32: a sum in bf16 would drop what is small beside it.
        """
        for live, clean in self._trainable.items():
            if live.dtype == clean.dtype:
                clean.grad = live.grad
            elif live.grad is not None:
                gradient = live.grad.to(clean.dtype)
                clean.grad = gradient if clean.grad is None else clean.grad.add_(gradient)
                live.grad = None

    def step(self) -> None:
        """Do one update of the clean weights with the collected gradients, then drop these.

        Live weights are out of date until the next ``read``. What was kept for the mini-batch of
        this update is dropped.
        """
        if self._versions is not None:
            self._versions.remember(self._version)
        if self._predictor is not None:
            self._predictor.before_step()
        self.optimizer.step()
        for live, clean in self._trainable.items():
            live.grad = clean.grad = None
        self._version += 1
        self._shown = None
        if self._predictor is not None:
            self._predictor.after_step()
        if self._versions is not None:
            self._versions.drop(self._version)
        self._set_lr()

    @property
    def clean(self) -> list[Tensor]:
        """Clean weights, one flat tensor per segment: the real ones, not copies."""
        return [segment.clean for segment in self._segments]

    @property
    def live(self) -> list[Tensor]:
        """Live weights, one flat tensor per segment: the real ones, not copies."""
        return [segment.live for segment in self._segments]

    def memory(self) -> dict[str, Tensor]:
        """Return what else the next updates depend on, by name: the real tensors, not copies.

        Weights kept under a key are not among it: whoever brings forwards in flight back shows
        what these read, and so they are kept again.
        """
        state = {} if self._versions is None else self._versions.state()
        return state if self._predictor is None else {**state, **self._predictor.state()}

    def resume(
        self,
        version: int,
        clean: Sequence[Tensor],
        optimizer_state: dict[str, Any],
        memory: Mapping[str, Tensor],
    ) -> None:
        """Go on from the state after an earlier update, of these weights or of a former self.

        Args:
            version: updates that the state has seen.
            clean: what ``clean`` had then.
            optimizer_state: what ``optimizer.state_dict()`` was then; its tensors are taken over.
            memory: what ``memory()`` was then.
        """
        self._version = version
        self._lr_factors = []
        self.optimizer.load_state_dict(optimizer_state)
        groups = {
            id(param): group for group in self.optimizer.param_groups for param in group["params"]
        }
        for segment, values in zip(self._segments, clean, strict=True):
            segment.group = groups[id(segment.params[0])]  # loading made new ones
            segment.clean.copy_(values)
        if self._versions is not None:
            self._versions.resume(memory)
        if self._predictor is not None:
            self._predictor.resume(memory)
        self._show(None)

    def show(self, live: Sequence[Tensor], keep: Key | None = None) -> None:
        """Make live weights what ``live`` had once; ``resume`` has to follow.

        Where clean and live weights share memory the clean ones are overwritten too.

        Args:
            live: what ``live`` had when a forward read it.
            keep: the key that they were kept under then; None: they were not.
        """
        self._copy_in(live)
        self._show(None)
        if keep is not None:
            self._memory.keep(keep)

    def clean_state(self) -> dict[str, Tensor]:
        """Return clean parameters and buffers under the keys of the model's ``state_dict``.

        These are the real tensors, not copies: the next update changes them. Buffers are fp32
        where bf16 is only what they are computed with.
        """
        state: dict[str, Tensor] = {}
        for name, layer in self._layers:
            for key, value in layer.state_dict(keep_vars=True).items():
                if isinstance(value, Tensor):  # a module's own "extra state" may be anything
                    clean = self._clean.get(value, value).detach()
                    lowered = clean.dtype == torch.bfloat16
                    state[f"{name}.{key}"] = clean.float() if lowered else clean
        return state

    def _set_lr(self) -> None:
        self._lr_factors = []
        if self._lr_schedule is None:
            return
        factor = float(self._lr_schedule(self._version))
        for group, base in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base * factor


def _clean_copies(layers: Layers) -> dict[nn.Parameter, nn.Parameter]:
    """Return a clean parameter for each trainable live one, tied ones once."""
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for name, layer in layers:
        for key, live in layer.named_parameters():
            if not live.requires_grad:
                continue
            if live.dtype != torch.float32:
                raise JobError(
                    f"parameter {name}.{key} is {live.dtype}: clean weights are float32. Build the "
                    "model in float32 and choose what it computes in with --precision."
                )
            copies[live] = nn.Parameter(live.detach().clone())
    return copies
