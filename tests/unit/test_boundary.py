from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from spectrain.protocol.errors import JobError, ProtocolError
from spectrain.protocol.messages import Boundary, TensorSpec
from spectrain.protocol.schedule import Op
from spectrain.worker.boundary import (
    MAX_PARCEL_BYTES,
    Parcel,
    allocate,
    assemble,
    check_value,
    copied,
    describe,
    gradients_of,
    map_tensors,
    payload_bytes,
    settled,
    tensors_of,
)

CPU = torch.device("cpu")
F0, B0 = Op.parse("F0"), Op.parse("B0")


def spec(dtype: str, *shape: int, needs_grad: bool = False) -> TensorSpec:
    return TensorSpec(dtype=dtype, shape=shape, needs_grad=needs_grad)


VALUES = {
    "tensor": torch.randn(2, 3),
    "scalar": torch.tensor(1.5),
    "empty": torch.empty(0, 4),
    "tuple": (torch.arange(3), None, torch.tensor([True, False])),
    "empty tuple": (),
    "dict": {"mask": None, "hidden": torch.randn(2, 2).bfloat16()},
    "complex": torch.randn(3, dtype=torch.complex64),
}


def equal(one: object, other: object) -> bool:
    return describe(one) == describe(other) and all(
        torch.equal(a, b) for a, b in zip(tensors_of(one), tensors_of(other), strict=True)
    )


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_is_put_together_again_from_its_form_and_its_tensors(value: object) -> None:
    assert equal(assemble(describe(value), tensors_of(value)), value)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_the_form_alone_allocates_room_of_the_same_kind(value: object) -> None:
    room = allocate(describe(value), CPU)
    assert [(t.dtype, t.shape) for t in room] == [(t.dtype, t.shape) for t in tensors_of(value)]
    assert payload_bytes(describe(value)) == sum(t.nbytes for t in room)


def test_the_form_names_dtypes_shapes_keys_and_who_needs_a_gradient() -> None:
    value = {"x": torch.zeros(2, 3, requires_grad=True), "mask": torch.zeros(2).bool(), "no": None}
    assert describe(value) == Boundary(
        form="dict",
        keys=("x", "mask", "no"),
        tensors=(spec("float32", 2, 3, needs_grad=True), spec("bool", 2), None),
    )


def test_an_assembled_tensor_is_a_leaf_that_needs_a_gradient_as_it_did() -> None:
    boundary = Boundary(
        form="tuple", tensors=(spec("float32", 2, needs_grad=True), spec("float32", 2))
    )
    first, second = assemble(boundary, allocate(boundary, CPU))
    assert first.is_leaf
    assert first.requires_grad
    assert not second.requires_grad


def test_room_is_fresh_each_time() -> None:
    boundary = describe(torch.zeros(4))
    assert allocate(boundary, CPU)[0].data_ptr() != allocate(boundary, CPU)[0].data_ptr()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([torch.zeros(1)], "layer 'a' returned a list: a stage boundary carries"),
        ((torch.zeros(1), 3), r"returned at \[1\] a int"),
        ({"a": {"b": torch.zeros(1)}}, r"returned at \['a'\] a dict"),
        ({1: torch.zeros(1)}, "dict with key 1"),
        (None, "returned a NoneType"),
        ("text", "returned a str"),
        (torch.zeros(2, 2).to_sparse(), "sparse_coo tensor: only dense"),
        ((torch.zeros(2, device="meta"),), r"at \[0\] a meta tensor"),
    ],
)
def test_an_impossible_value_is_the_jobs_mistake(value: object, text: str) -> None:
    with pytest.raises(JobError, match=text):
        check_value(value, "layer 'a'")


def test_a_quantized_tensor_is_the_jobs_mistake(recwarn: pytest.WarningsRecorder) -> None:
    value = torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)
    with pytest.raises(JobError, match="quantized tensor"):
        check_value(value, "layer 'a'")


def test_describing_an_impossible_value_is_the_jobs_mistake() -> None:
    with pytest.raises(JobError, match="returned a list"):
        describe([torch.zeros(1)])


@pytest.mark.parametrize(
    "bad", [spec("float31", 2), spec("nn", 2), spec("float32", -1)], ids=["dtype", "other", "shape"]
)
def test_an_announcement_of_an_impossible_tensor_is_refused(bad: TensorSpec) -> None:
    with pytest.raises(ProtocolError, match="no such tensor"):
        allocate(Boundary(form="tensor", tensors=(bad,)), CPU)


def test_an_announcement_beyond_the_limit_is_refused_before_any_memory_is_taken() -> None:
    huge = Boundary(form="tensor", tensors=(spec("float64", MAX_PARCEL_BYTES // 8 + 1),))
    with pytest.raises(ProtocolError, match="at most"):
        allocate(huge, CPU)


@pytest.mark.parametrize(
    "boundary",
    [
        Boundary(form="list", tensors=()),
        Boundary(form="tensor", tensors=()),
        Boundary(form="dict", keys=("a",), tensors=(None, None)),
    ],
    ids=["form", "count", "keys"],
)
def test_a_form_that_contradicts_itself_is_refused(boundary: Boundary) -> None:
    with pytest.raises(ProtocolError, match="tensors and keys"):
        assemble(boundary, [])


def test_a_gradient_has_the_form_of_its_value_and_none_where_there_is_none() -> None:
    x = torch.ones(2, requires_grad=True)
    unused = torch.ones(2, requires_grad=True)
    value = {"x": x, "unused": unused, "mask": torch.ones(2).bool(), "none": None}
    (3 * x).sum().backward()
    gradients = gradients_of(value)
    assert list(gradients) == ["x", "unused", "mask", "none"]
    assert gradients["x"].tolist() == [3, 3]
    assert gradients["unused"] is gradients["mask"] is gradients["none"] is None


def test_the_gradient_of_a_lone_tensor_without_one_is_none_and_travels() -> None:
    assert gradients_of(torch.ones(2)) is None
    boundary = describe(None)
    assert tensors_of(None) == []
    assert assemble(boundary, []) is None


def test_only_a_gradient_may_be_nothing() -> None:
    Parcel(B0, None, 1, 1)
    with pytest.raises(AssertionError, match="F0 has no value"):
        Parcel(F0, None, 1, 1)


def test_mapping_keeps_form_and_nones() -> None:
    doubled = map_tensors((torch.ones(1), None), lambda tensor: 2 * tensor)
    assert equal(doubled, (torch.full((1,), 2.0), None))


def test_a_settled_parameter_does_not_change_with_the_next_update() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    buffer = torch.zeros(2)
    fresh = weight * 1
    parcel = settled(Parcel(F0, (weight, weight[0], buffer, fresh), 1, 1))
    with torch.no_grad():
        weight.fill_(7)
        buffer.fill_(7)
    assert all(not tensor.any() for tensor in tensors_of(parcel.value))


def test_settling_does_not_copy_the_results_of_ops_nor_gradients() -> None:
    x = torch.zeros(2, requires_grad=True)
    result = x * 2
    assert settled(Parcel(F0, result, 1, 1)).value.data_ptr() == result.data_ptr()
    gradient = torch.zeros(2)
    assert settled(Parcel(B0, gradient, 1, 1)).value.data_ptr() == gradient.data_ptr()
    assert settled(Parcel(B0, None, 1, 1)).value is None


@pytest.mark.parametrize("travel", [settled, copied])
def test_a_travelling_value_is_contiguous_and_cut_from_its_graph(
    travel: Callable[[Parcel], Parcel],
) -> None:
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    value = (
        (x * 1).to(memory_format=torch.channels_last),
        x.transpose(0, 1),
        torch.randn(3, dtype=torch.complex64).conj(),
    )
    parcel = travel(Parcel(F0, value, 2, 4))
    assert equal(parcel.value, value)
    assert (parcel.op, parcel.samples, parcel.batch_samples) == (F0, 2, 4)
    for tensor in tensors_of(parcel.value):
        assert tensor.is_leaf
        assert tensor.is_contiguous()
        assert not tensor.is_conj()
