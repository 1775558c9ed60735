"""The final weights: collecting parts, the file, the digest."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from spectrain.coordinator.export import WeightsCollector, weights_sha256, write_model
from spectrain.protocol.errors import ProtocolError
from spectrain.protocol.messages import TensorSpec, WeightsPart


def part_of(name: str, tensor: Tensor, *, incarnation: int = 0) -> tuple[WeightsPart, bytes]:
    spec = TensorSpec(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
    payload = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return WeightsPart(stage=1, incarnation=incarnation, name=name, spec=spec), payload


# -- collecting ---------------------------------------------------------------------------------


def test_parts_in_any_order_make_the_whole_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    state = model.state_dict()
    collector = WeightsCollector(state)
    for name in reversed(state):
        collector.add(*part_of(name, state[name]))
    assert collector.missing == []
    again = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    again.load_state_dict(collector.tensors)
    assert all(torch.equal(again.state_dict()[name], state[name]) for name in state)


def test_what_has_not_come_is_missing_by_name() -> None:
    collector = WeightsCollector(["b", "c", "a"])
    collector.add(*part_of("b", torch.ones(2)))
    assert collector.missing == ["a", "c"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_tensors_arrive_bit_for_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    collector = WeightsCollector(["w"])
    collector.add(*part_of("w", tensor))
    assert collector.tensors["w"].dtype == dtype
    assert torch.equal(collector.tensors["w"], tensor)


@pytest.mark.parametrize("tensor", [torch.tensor(True), torch.zeros(0, 3), torch.tensor(2.5)])
def test_scalars_and_empty_tensors_arrive(tensor: Tensor) -> None:
    part, _ = part_of("w", torch.zeros(1))
    spec = TensorSpec(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
    whole = WeightsPart(stage=part.stage, incarnation=0, name="w", spec=spec)
    collector = WeightsCollector(["w"])
    collector.add(whole, tensor.numpy().tobytes())
    assert torch.equal(collector.tensors["w"], tensor)
    assert collector.tensors["w"].shape == tensor.shape


def test_the_collected_tensor_does_not_lean_on_the_frame() -> None:
    part, payload = part_of("w", torch.ones(2))
    frame = bytearray(payload)
    collector = WeightsCollector(["w"])
    collector.add(part, memoryview(frame))
    frame[:] = bytes(len(frame))
    assert collector.tensors["w"].tolist() == [1.0, 1.0]


def test_a_name_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ProtocolError, match="'x', which is not a name of this model"):
        WeightsCollector(["w"]).add(*part_of("x", torch.ones(2)))


def test_a_name_sent_twice_by_one_worker_is_refused() -> None:
    collector = WeightsCollector(["w"])
    collector.add(*part_of("w", torch.ones(2)))
    with pytest.raises(ProtocolError, match="incarnation 0 has sent already"):
        collector.add(*part_of("w", torch.ones(2)))


def test_the_parts_of_a_restarted_worker_replace_the_old_ones() -> None:
    collector = WeightsCollector(["w"])
    collector.add(*part_of("w", torch.ones(2)))
    collector.add(*part_of("w", torch.zeros(2), incarnation=1))
    assert collector.tensors["w"].tolist() == [0.0, 0.0]
    with pytest.raises(ProtocolError, match="incarnation 1 has sent already"):
        collector.add(*part_of("w", torch.ones(2), incarnation=0))


def test_a_payload_of_another_size_is_refused() -> None:
    part, payload = part_of("w", torch.ones(2, 3))
    with pytest.raises(ProtocolError, match=r"20 bytes; float32 of shape \(2, 3\) takes 24"):
        WeightsCollector(["w"]).add(part, payload[:-4])


def test_an_unknown_type_is_refused() -> None:
    spec = TensorSpec(dtype="load", shape=(2,))
    part = WeightsPart(stage=0, incarnation=0, name="w", spec=spec)
    with pytest.raises(ProtocolError, match="unknown type 'load'"):
        WeightsCollector(["w"]).add(part, bytes(8))


# -- the file -----------------------------------------------------------------------------------


def test_the_file_holds_tensors_and_where_they_come_from(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"0.weight": torch.arange(6.0).reshape(2, 3).T, "0.count": torch.tensor(5)}
    write_model(path, tensors, {"method": "spectrain", "seed": "7"})
    loaded = load_file(path)
    assert loaded["0.weight"].tolist() == tensors["0.weight"].tolist()
    assert loaded["0.count"].dtype == torch.int64
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "method": "spectrain", "seed": "7"}


def test_the_file_is_replaced_as_a_whole_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_model(path, {"w": torch.zeros(2)}, {})
    write_model(path, {"w": torch.ones(2)}, {})
    assert load_file(path)["w"].tolist() == [1.0, 1.0]
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_model(path, {"w": torch.zeros(2)}, {})
    shared = torch.ones(4)
    with pytest.raises(RuntimeError, match="share memory"):
        write_model(path, {"w": shared, "v": shared}, {})
    assert load_file(path)["w"].tolist() == [0.0, 0.0]


# -- the digest ---------------------------------------------------------------------------------


def test_the_digest_is_what_its_description_says() -> None:
    tensors = {"b": torch.tensor([[1.5, -2.0]]), "a": torch.tensor(3)}
    expected = hashlib.sha256(b"a" + struct.pack("<q", 3) + b"b" + struct.pack("<2f", 1.5, -2.0))
    assert weights_sha256(tensors) == expected.hexdigest()


def test_the_digest_does_not_depend_on_order_layout_or_float_width() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    digest = weights_sha256({"a": weight, "b": torch.ones(1)})
    assert weights_sha256({"b": torch.ones(1), "a": weight}) == digest
    assert weights_sha256({"a": weight.T.contiguous().T, "b": torch.ones(1)}) == digest
    assert weights_sha256({"a": weight.double(), "b": torch.ones(1).bfloat16()}) == digest


def test_the_digest_sees_one_bit_and_one_letter() -> None:
    digest = weights_sha256({"a": torch.tensor([1.0])})
    nudged = torch.nextafter(torch.tensor([1.0]), torch.tensor([2.0]))
    assert weights_sha256({"a": nudged}) != digest
    assert weights_sha256({"A": torch.tensor([1.0])}) != digest


def test_booleans_and_complex_numbers_have_a_form_too() -> None:
    tensors = {"mask": torch.tensor([True, False]), "wave": torch.tensor([1 + 2j]).conj()}
    expected = b"mask" + struct.pack("<2q", 1, 0) + b"wave" + struct.pack("<2f", 1.0, -2.0)
    assert weights_sha256(tensors) == hashlib.sha256(expected).hexdigest()


def test_weights_that_still_need_gradients_have_a_digest() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert weights_sha256({"w": parameter}) == weights_sha256({"w": torch.ones(2)})
