"""The layers of one stage: forward, backward, evaluate, and what is in flight between them.

It reads whatever weights are live and keeps no history of them; it knows no streams, no optimizer
and no order of ops. A value comes in as leaves of this stage's own graph (see ``boundary``).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..protocol.schedule import Kind, Op
from .boundary import Value, check_value, gradients_of, map_tensors, tensors_of
from .objective import Objective, Score
from .precision import cast_floats
from .randomness import layer_seed, seed_generators
from .weights import Layers

__all__ = ["Stage"]


@dataclass(slots=True)
class _InFlight:
    """A micro-batch between its forward and its backward."""

    inputs: Value
    outputs: Value  # with their graph; on the last stage the loss, from ``score`` on


class Stage:
    """A contiguous range of a model's layers at work.

    Attributes:
        index: k, from 0 at the input side.
        stages: N.
    """

    def __init__(
        self,
        layers: Layers,
        *,
        index: int,
        stages: int,
        first_layer: int = 0,
        seed: int = 0,
        objective: Objective | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Make a stage of ``layers``.

        Args:
            layers: full names and modules, on ``device``, in the mode they are to be trained in.
            index: k, ``0 <= index < stages``.
            stages: N.
            first_layer: index of the first of ``layers`` in the whole model.
            seed: the run's; random draws in the layers come from it.
            objective: loss and metrics, on the last stage only.
            device: where the layers are.
            dtype: what stage 0 casts floating inputs to.
        """
        self.index = index
        self.stages = stages
        self._layers = tuple(layers)
        self._first_layer = first_layer
        self._seed = seed
        self._objective = objective
        self._device = torch.device(device)
        self._dtype = dtype
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        assert (objective is not None) == self.is_last, "the last stage has the loss"

    @property
    def is_first(self) -> bool:
        """Whether inputs come from the feed."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether targets come from the feed, and gradients start here."""
        return self.index == self.stages - 1

    @property
    def layers(self) -> Layers:
        """Full names and modules, in order."""
        return self._layers

    @property
    def in_flight(self) -> int:
        """Micro-batches that wait for their backward."""
        return len(self._in_flight)

    def buffers(self) -> dict[str, Tensor]:
        """Return all buffers under their full names: the real ones, shared ones more than once."""
        return {
            f"{path}.{name}": buffer
            for path, module in self._modules().items()
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        }

    def rebind_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Replace buffers by copies of ``values``, keeping those shared that are.

        Not in place: a graph remembers which version of a running mean it has seen, and the
        backward would refuse another.

        Args:
            values: by full name, as ``buffers`` returned them.
        """
        modules = self._modules()
        old = self.buffers()
        copies: dict[int, Tensor] = {}
        for name, value in values.items():
            path, _, key = name.rpartition(".")
            same = id(old.get(name, value))
            if same not in copies:
                copies[same] = value.to(self._device, copy=True)
            setattr(modules[path], key, copies[same])

    def forward(self, op: Op, value: Value) -> Value:
        """Run the layers and keep the graph for the backward of the same micro-batch.

        Args:
            op: a forward.
            value: what the previous stage sent, or the inputs.

        Returns:
            The last layer's output, with its graph.

        Raises:
            JobError: the output may not cross a stage boundary.
        """
        inputs = self._enter(value)
        outputs = self._run(op, _writable(inputs))
        self._in_flight[op.batch, op.micro] = _InFlight(inputs, outputs)
        return outputs

    def backward(self, op: Op, gradients: Value | None) -> Value | None:
        """Add this micro-batch's gradients to the live parameters and drop its graph.

        Args:
            op: a backward.
            gradients: of what ``forward`` returned, same form; None parts get none. On the last
                stage None: its loss is where gradients start.

        Returns:
            Gradients of what ``forward`` was given, same form, None where none is needed.
        """
        batch = self._in_flight.pop((op.batch, op.micro))
        if self.is_last:
            gradients = torch.ones_like(tensors_of(batch.outputs)[0])  # d loss / d loss
        roots, seeds = _differentiable(batch.outputs, gradients)
        if roots:
            try:
                torch.autograd.backward(roots, seeds)
            except Exception as error:
                self._explain(error, op, "the backward pass", batch.inputs)
                raise
        return None if self.is_first else gradients_of(batch.inputs)

    def evaluate(self, op: Op, value: Value) -> Value:
        """Run the layers in evaluation mode; nothing of the training state is touched."""
        with _evaluation_mode([layer for _, layer in self._layers]), torch.no_grad():
            return self._run(op, self._enter(value))

    def score(self, op: Op, outputs: Value, targets: Value, share: float = 1.0) -> Score:
        """Compute loss and metrics on the last stage; after a forward, gradients start here.

        Args:
            op: the forward or evaluation that made ``outputs``.
            outputs: what it returned.
            targets: the feed's, for the same samples.
            share: of its mini-batch that this micro-batch is, above 0, at most 1. Its gradients
                are scaled by it, so that their sum over micro-batches is that of the mean loss.

        Raises:
            JobError: the loss is not one number.
            NonFiniteError: it is NaN or infinite.
        """
        assert self._objective is not None, f"stage {self.index} is not the last"
        targets = self._on_device(targets)
        trains = op.kind is Kind.FORWARD
        try:
            with torch.set_grad_enabled(trains):
                where = f"at {op} on stage {self.index}"
                loss, score = self._objective(outputs, targets, where=where)
        except Exception as error:
            self._explain(error, op, "the loss or metrics", outputs)
            raise
        if trains:
            self._in_flight[op.batch, op.micro].outputs = loss if share == 1 else loss * share
        return score

    def _modules(self) -> dict[str, nn.Module]:
        return {
            f"{name}.{inner}" if inner else name: module
            for name, layer in self._layers
            for inner, module in layer.named_modules()
        }

    def _enter(self, value: Value) -> Value:
        if not self.is_first:
            return value
        value = self._on_device(value)
        cast = map_tensors(value, lambda tensor: cast_floats(tensor, self._dtype))
        assert cast is not None
        return cast

    def _on_device(self, value: Value) -> Value:
        moved = map_tensors(value, lambda tensor: tensor.to(self._device, non_blocking=True))
        assert moved is not None
        return moved

    def _run(self, op: Op, value: Value) -> Value:
        name = ""
        for index, (name, layer) in enumerate(self._layers, start=self._first_layer):
            seed_generators(layer_seed(self._seed, index, op), self._device)
            try:
                value = layer(value)
            except Exception as error:
                self._explain(error, op, f"layer {name}", value)
                raise
        return check_value(value, f"layer {name}")

    def _explain(self, error: Exception, op: Op, where: str, value: object) -> None:
        """Add a note to what the user's code raised; type and traceback stay theirs."""
        note = f"in {where} of stage {self.index} at {op}, given {_shapes(value)}"
        # What add_note() does, which Python 3.10 lacks.
        error.__dict__.setdefault("__notes__", []).append(note)


class _Door(torch.autograd.Function):
    """Identity from a leaf to an alias that layers may change in place, which a leaf forbids."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, alias: Tensor) -> Tensor:  # noqa: ARG004  # only autograd needs the leaf
        ctx.mark_dirty(alias)
        return alias

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # noqa: ARG004  # torch's signature
        return grad_outputs[0], None


def _writable(inputs: Value) -> Value:
    """Return ``inputs`` such that a first layer like ``ReLU(inplace=True)`` works."""

    def open_door(leaf: Tensor) -> Tensor:
        return cast("Tensor", _Door.apply(leaf, leaf.detach())) if leaf.requires_grad else leaf

    value = map_tensors(inputs, open_door)
    assert value is not None
    return value


def _differentiable(outputs: Value, gradients: Value | None) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs that have a graph and got a gradient, and these gradients."""
    pairs = [
        (output, gradient)
        for output, gradient in zip(_parts(outputs), _parts(gradients), strict=True)
        if output is not None and output.requires_grad and gradient is not None
    ]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def _parts(value: Value | None) -> Sequence[Tensor | None]:
    if value is None or isinstance(value, Tensor):
        return [value]
    return list(value.values()) if isinstance(value, dict) else value


def _shapes(value: object) -> str:
    """Describe what a layer was given, for an error; the layer may have returned anything."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_shapes, cast('tuple[object, ...]', value)))})"
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return "{" + ", ".join(f"{key!r}: {_shapes(part)}" for key, part in items) + "}"
    return type(value).__name__


@contextmanager
def _evaluation_mode(layers: Sequence[nn.Module]) -> Generator[None]:
    """Put layers in evaluation mode, then each module back in the mode it was in."""
    modes = [(module, module.training) for layer in layers for module in layer.modules()]
    for layer in layers:
        layer.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
