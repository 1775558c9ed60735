"""Batches as raw bytes, and the form by which a worker puts them together again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spectrain.coordinator.frames import frame_of, spec_of, to_frames
from spectrain.protocol.errors import JobError
from spectrain.protocol.messages import Boundary, TensorSpec
from spectrain.worker.boundary import assemble

X = torch.arange(6, dtype=torch.float32).reshape(2, 3)
MASK = torch.tensor([True, False])


def back(boundary: Boundary, frames: list[memoryview]) -> object:
    """Do what the worker does."""
    specs = [spec for spec in boundary.tensors if spec is not None]
    tensors = [
        torch.frombuffer(bytearray(frame), dtype=getattr(torch, spec.dtype)).reshape(spec.shape)
        for spec, frame in zip(specs, frames, strict=True)
    ]
    return assemble(boundary, iter(tensors))


def test_a_tensor_becomes_one_frame() -> None:
    boundary, frames = to_frames(X, "inputs")
    assert boundary == Boundary(form="tensor", tensors=(TensorSpec(dtype="float32", shape=(2, 3)),))
    assert [bytes(frame) for frame in frames] == [X.numpy().tobytes()]


def test_a_tuple_or_list_keeps_its_order_and_its_gaps() -> None:
    for value in ((X, None, MASK), [X, None, MASK]):
        boundary, frames = to_frames(value, "inputs")
        assert (boundary.form, len(frames)) == ("tuple", 2)
        assert [spec and spec.dtype for spec in boundary.tensors] == ["float32", None, "bool"]


def test_a_dict_keeps_its_keys_in_order() -> None:
    boundary, frames = to_frames({"mask": MASK, "none": None, "x": X}, "inputs")
    assert (boundary.form, boundary.keys, len(frames)) == ("dict", ("mask", "none", "x"), 2)


def test_what_was_made_into_frames_comes_back() -> None:
    value = {"x": X, "nothing": None, "mask": MASK}
    found = back(*to_frames(value, "inputs"))
    assert isinstance(found, dict)
    assert list(found) == list(value)
    assert found["nothing"] is None
    assert torch.equal(found["x"], X)
    assert torch.equal(found["mask"], MASK)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
def test_every_type_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    value = torch.tensor([[0, 1], [1, 3]]).to(dtype)
    found = back(*to_frames(value, "targets"))
    assert isinstance(found, Tensor)
    assert found.dtype == dtype
    assert torch.equal(found, value)


def test_bytes_are_in_row_major_order_whatever_the_strides() -> None:
    assert bytes(frame_of(X.t())) == X.t().contiguous().numpy().tobytes()


def test_a_contiguous_tensor_is_not_copied() -> None:
    own = X.clone()
    frame = frame_of(own)
    own[0, 0] = 99
    assert bytes(frame) == own.numpy().tobytes()


@pytest.mark.parametrize("shape", [(), (0, 7)])
def test_scalars_and_empty_tensors_keep_their_shape(shape: tuple[int, ...]) -> None:
    value = torch.zeros(shape)
    assert spec_of(value).shape == shape
    assert len(frame_of(value)) == value.numel() * 4


def test_data_needs_no_gradient_even_if_it_says_so() -> None:
    value = X.clone().requires_grad_()
    assert not spec_of(value).needs_grad
    assert bytes(frame_of(value)) == X.numpy().tobytes()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (3, "int"),
        (None, "NoneType"),
        ("text", "str"),
        ((X, [X]), "list"),
        ({"x": {"y": X}}, "dict"),
    ],
)
def test_anything_else_is_refused_with_its_part_and_type(value: object, kind: str) -> None:
    with pytest.raises(JobError, match=f"the targets of a batch hold a {kind}: .*`collate`"):
        to_frames(value, "targets")
