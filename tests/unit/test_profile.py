"""Layer costs are counts of a model and a sample, and a failing layer is named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from spectrain.coordinator.partition import LayerCost
from spectrain.coordinator.profile import measure_layers
from spectrain.protocol.errors import JobError

torch.set_num_threads(1)


def test_a_linear_layer_costs_two_operations_per_weight_and_sample() -> None:
    (cost,) = measure_layers([("0", nn.Linear(8, 4))], torch.zeros(3, 8))
    assert cost == LayerCost(
        name="0",
        flops=2 * 3 * 8 * 4,
        bytes_moved=4 * (3 * 8 + 3 * 4 + 8 * 4 + 4),
        parameters=8 * 4 + 4,
    )


def test_each_layer_is_called_with_what_the_one_before_it_returned() -> None:
    layers = [("0", nn.Conv2d(1, 2, 3)), ("1", nn.Flatten()), ("2", nn.Linear(2 * 4 * 4, 5))]
    costs = measure_layers(layers, torch.zeros(2, 1, 6, 6))
    assert [cost.name for cost in costs] == ["0", "1", "2"]
    assert [cost.flops for cost in costs] == [2 * 2 * 2 * 4 * 4 * 9, 0, 2 * 2 * 32 * 5]


def test_a_layer_without_parameters_costs_the_bytes_it_moves() -> None:
    (cost,) = measure_layers([("relu", nn.ReLU())], torch.zeros(3, 8))
    assert (cost.flops, cost.bytes_moved, cost.parameters) == (0, 2 * 3 * 8 * 4, 0)


def test_frozen_parameters_move_bytes_but_are_not_trainable() -> None:
    layer = nn.Linear(8, 4).requires_grad_(False)
    (cost,) = measure_layers([("0", layer)], torch.zeros(3, 8))
    assert cost.parameters == 0
    assert cost.bytes_moved == 4 * (3 * 8 + 3 * 4 + 8 * 4 + 4)


class Masked(nn.Module):
    def forward(self, value: dict[str, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        tokens = value["tokens"]
        assert tokens is not None
        return tokens * 2, value["mask"]


def test_values_of_several_tensors_are_counted_and_none_is_nothing() -> None:
    sample = {"tokens": torch.zeros(4, 2), "mask": torch.ones(4, dtype=torch.bool), "bias": None}
    (cost,) = measure_layers([("0", Masked())], sample)
    assert cost.bytes_moved == 2 * (4 * 2 * 4 + 4)


def test_measuring_changes_neither_buffers_nor_mode_nor_the_random_state() -> None:
    norm = nn.BatchNorm1d(8)
    layers = [("0", norm), ("1", nn.Dropout(0.5))]
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    random_state = torch.get_rng_state()
    measure_layers(layers, torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert norm.training
    for name, tensor in norm.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_an_attention_layer_is_counted_as_it_trains_and_not_by_its_inference_kernel() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
    (cost,) = measure_layers([("0", layer)], torch.zeros(2, 3, 8))
    products = 2 * (2 * 3) * (8 * 24 + 8 * 8 + 8 * 16 + 16 * 8)
    assert cost.flops > products  # and the attention itself on top


def test_counts_are_the_same_every_time() -> None:
    layers = [("0", nn.Linear(8, 16)), ("1", nn.ReLU()), ("2", nn.Linear(16, 2))]
    sample = torch.zeros(5, 8)
    assert measure_layers(layers, sample) == measure_layers(layers, sample)


def test_a_layer_that_fails_is_named_with_its_index_and_the_shapes_it_got() -> None:
    layers = [("net.0", nn.Linear(8, 4)), ("net.1", nn.Linear(5, 2))]
    with pytest.raises(JobError) as caught:
        measure_layers(layers, torch.zeros(3, 8))
    text = str(caught.value)
    assert "layer 1 (net.1: Linear)" in text
    assert "[3, 4] float32" in text
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in text


class ReturnsText(nn.Module):
    def forward(self, _value: Tensor) -> str:
        return "not a tensor"


def test_a_value_without_tensors_is_shown_as_it_is() -> None:
    with pytest.raises(JobError, match=r"layer 1 .* failed on inputs 'not a tensor'"):
        measure_layers([("0", ReturnsText()), ("1", nn.ReLU())], torch.zeros(1))
