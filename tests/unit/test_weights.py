"""Clean and live weights: what layers read, what the optimizer owns, what is exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipelines import adamw, assert_same_bits, mlp, sgd
from torch import Tensor, nn

from spectrain.protocol.errors import JobError
from spectrain.worker.segment import Segment
from spectrain.worker.weights import Layers, Weights


def layers_of(model: nn.Sequential) -> Layers:
    return list(model.named_children())


def make(model: nn.Sequential, optimizer: Any = None, **options: Any) -> Weights:
    return Weights(layers_of(model), optimizer or sgd(), **options)


def train_once(model: nn.Sequential, weights: Weights, *, scale: float = 1.0) -> None:
    width = next(model.parameters()).shape[1]
    dtype = next(model.parameters()).dtype
    weights.predict(0)
    model(torch.full((2, width), scale, dtype=dtype)).pow(2).sum().backward()
    weights.collect_gradients()
    weights.step()
    weights.predict(0)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_taking_weights_over_changes_no_bit() -> None:
    model = mlp()
    before = snapshot(model)
    weights = make(model, predicts=True)
    assert_same_bits(model.state_dict(), before)
    assert_same_bits(weights.clean_state(), before)


def test_parameters_start_where_allocations_would() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    weights = make(model, predicts=True)
    pointers = [p.data_ptr() for p in model.parameters()]
    pointers += [p.data_ptr() for p in weights.optimizer.param_groups[0]["params"]]
    assert all(pointer % 64 == 0 for pointer in pointers)


def test_clean_and_live_share_memory_without_prediction() -> None:
    model = mlp()
    weights = make(model)
    clean = weights.optimizer.param_groups[0]["params"]
    assert [p.data_ptr() for p in clean] == [p.data_ptr() for p in model.parameters()]


def test_clean_and_live_are_apart_with_prediction() -> None:
    model = mlp()
    clean = make(model, predicts=True).optimizer.param_groups[0]["params"]
    assert not {p.data_ptr() for p in clean} & {p.data_ptr() for p in model.parameters()}


def test_prediction_is_clean_minus_horizon_times_lr_times_velocity() -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    weights = make(model, sgd(lr=0.25, momentum=0.5), predicts=True)
    nn.init.ones_(next(model.parameters()))  # only live: a gradient that is easy to know
    train_once(model, weights)
    clean = weights.clean_state()["0.weight"].clone()
    weights.predict(3)
    assert torch.equal(model.get_parameter("0.weight"), clean - 3 * 0.25 * torch.full((1, 2), 8.0))
    assert torch.equal(weights.clean_state()["0.weight"], clean)


def test_each_group_is_predicted_with_its_own_lr() -> None:
    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": params[:1], "lr": 0.5}, {"params": params[1:], "lr": 0.125}]
        return torch.optim.SGD(groups, lr=1.0, momentum=0.5)

    model = nn.Sequential(nn.Linear(2, 1))
    weights = make(model, optimizer, predicts=True)
    train_once(model, weights)
    clean = {name: tensor.clone() for name, tensor in weights.clean_state().items()}
    weights.predict(1)
    buffers = [weights.optimizer.state[p]["momentum_buffer"] for p in _clean_params(weights)]
    assert torch.equal(model.get_parameter("0.weight"), clean["0.weight"] - 0.5 * buffers[0])
    assert torch.equal(model.get_parameter("0.bias"), clean["0.bias"] - 0.125 * buffers[1])


def _clean_params(weights: Weights) -> list[nn.Parameter]:
    return [param for group in weights.optimizer.param_groups for param in group["params"]]


def test_horizon_zero_leaves_clean_weights() -> None:
    model = mlp()
    weights = make(model, predicts=True)
    train_once(model, weights)
    weights.predict(0)
    assert_same_bits(model.state_dict(), weights.clean_state())


def test_prediction_before_the_first_update_is_the_identity() -> None:
    model = mlp()
    before = snapshot(model)
    weights = make(model, predicts=True)
    weights.predict(5)
    assert_same_bits(model.state_dict(), before)


def test_restore_brings_the_clean_bits_back() -> None:
    model = mlp()
    weights = make(model, predicts=True)
    train_once(model, weights)
    clean = snapshot(model)
    weights.predict(2)
    assert not torch.equal(model.get_parameter("0.weight"), clean["0.weight"])
    weights.predict(0)
    assert_same_bits(model.state_dict(), clean)


def test_a_second_prediction_starts_from_clean_weights() -> None:
    model, other = mlp(), mlp()
    other.load_state_dict(model.state_dict())
    weights, once = make(model, predicts=True), make(other, predicts=True)
    train_once(model, weights)
    train_once(other, once)
    weights.predict(7)
    weights.predict(2)
    once.predict(2)
    assert_same_bits(model.state_dict(), other.state_dict())


def test_predicting_without_having_said_so_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="without prediction"):
        make(mlp()).predict(1)


def test_a_negative_horizon_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="3 updates back"):
        make(mlp(), predicts=True).predict(-3)


def test_after_an_update_live_weights_wait_for_the_next_prediction() -> None:
    model = mlp()
    weights = make(model, predicts=True)
    train_once(model, weights)
    weights.predict(1)
    before = snapshot(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    weights.collect_gradients()
    weights.step()
    assert_same_bits(model.state_dict(), before)
    weights.predict(1)
    assert not torch.equal(model.get_parameter("0.weight"), before["0.weight"])


def test_what_is_shown_already_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    weights = make(model, predicts=True)
    train_once(model, weights)
    weights.predict(2)
    monkeypatch.setattr(Segment, "rewrite", None)
    monkeypatch.setattr(Segment, "restore", None)
    weights.predict(2)


def test_steps_equal_those_of_a_plain_optimizer_bitwise() -> None:
    model, plain = mlp(), mlp()
    plain.load_state_dict(model.state_dict())
    weights = make(model, adamw(), predicts=True)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(4):
        weights.predict(step)
        weights.predict(0)
        train_once(model, weights, scale=step)
        optimizer.zero_grad()
        plain(torch.full((2, 5), float(step))).pow(2).sum().backward()
        optimizer.step()
    assert weights.version == 4
    assert_same_bits(model.state_dict(), plain.state_dict())


def test_a_step_drops_gradients() -> None:
    model = mlp()
    weights = make(model, predicts=True)
    train_once(model, weights)
    assert all(p.grad is None for p in (*model.parameters(), *_clean_params(weights)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_micro_batches_add_up(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    weights = make(model, live_dtype=dtype)
    for gradient in (1.0, 0.5):
        (model(torch.ones(1, 2, dtype=dtype)) * gradient).sum().backward()
        weights.collect_gradients()
    assert torch.equal(_clean_params(weights)[0].grad, torch.full((1, 2), 1.5))


def test_bf16_gradients_are_summed_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    weights = make(model, live_dtype=torch.bfloat16)
    for gradient in (256.0, 0.5):  # 256.5 is no bf16 number
        (model(torch.ones(1, 1, dtype=torch.bfloat16)) * gradient).sum().backward()
        weights.collect_gradients()
    assert _clean_params(weights)[0].grad.item() == 256.5


def test_a_parameter_without_gradient_in_one_micro_batch_keeps_its_sum() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    weights = make(model, live_dtype=torch.bfloat16)
    model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    weights.collect_gradients()
    weights.collect_gradients()
    assert _clean_params(weights)[0].grad.item() == 1


def test_lr_schedule_multiplies_the_lr_of_the_coming_update() -> None:
    model = mlp()
    weights = make(model, sgd(lr=0.5), lr_schedule=lambda update: 1 / (update + 1))
    lrs = []
    for _ in range(3):
        lrs.append(weights.lr)
        train_once(model, weights)
    assert lrs == [0.5, 0.25, 0.5 / 3]


def test_frozen_parameters_never_change() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    before = snapshot(model)
    weights = make(model, predicts=True)
    train_once(model, weights)
    weights.predict(2)
    assert torch.equal(model.get_parameter("0.weight"), before["0.weight"])
    assert not torch.equal(model.get_parameter("2.weight"), before["2.weight"])
    assert len(_clean_params(weights)) == 6


def test_parameters_that_the_optimizer_was_not_given_never_change() -> None:
    model = mlp()
    before = snapshot(model)
    weights = make(model, lambda params: torch.optim.SGD(params[2:], lr=0.1))
    train_once(model, weights)
    assert torch.equal(weights.clean_state()["0.weight"], before["0.weight"])
    assert not torch.equal(weights.clean_state()["2.weight"], before["2.weight"])
    assert model.get_parameter("0.weight").grad is None


@pytest.mark.parametrize("predicts", [True, False])
def test_a_stage_without_trainable_parameters_works(*, predicts: bool) -> None:
    weights = make(nn.Sequential(nn.ReLU()), sgd(lr=0.25), predicts=predicts)
    weights.collect_gradients()
    weights.step()
    if predicts:
        weights.predict(2)
    assert (weights.version, weights.lr, weights.clean_state()) == (1, 0.25, {})


def test_tied_parameters_of_one_stage_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    weights = make(model, predicts=True)
    train_once(model, weights)
    state = weights.clean_state()
    assert model[0].weight is model[1].weight
    assert len(_clean_params(weights)) == 1
    assert state["0.weight"] is not None
    assert torch.equal(state["0.weight"], state["1.weight"])


def test_clean_state_has_the_keys_of_the_state_dict() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    assert make(model).clean_state().keys() == model.state_dict().keys()


def test_clean_state_shows_clean_weights_during_a_prediction() -> None:
    model = mlp()
    weights = make(model, predicts=True)
    train_once(model, weights)
    clean = snapshot(model)
    weights.predict(4)
    assert_same_bits(weights.clean_state(), clean)


def test_extra_state_that_is_no_tensor_is_left_out() -> None:
    class WithExtra(nn.Linear):
        def get_extra_state(self) -> str:
            return "not a tensor"

        def set_extra_state(self, state: str) -> None: ...

    assert set(make(nn.Sequential(WithExtra(1, 1))).clean_state()) == {"0.weight", "0.bias"}


def test_bf16_lives_over_fp32_clean_weights() -> None:
    model = mlp()
    before = snapshot(model)
    weights = make(model, live_dtype=torch.bfloat16, predicts=True)
    assert_same_bits(weights.clean_state(), before)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model[0].weight, before["0.weight"].bfloat16())


def test_a_small_bf16_update_is_not_lost() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model[0].weight)
    weights = make(model, sgd(lr=2**-12, momentum=0), live_dtype=torch.bfloat16)
    for _ in range(4):  # each is a quarter of what bf16 can tell from 1
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        weights.collect_gradients()
        weights.step()
    assert weights.clean_state()["0.weight"].item() == 1 - 4 * 2**-12


def test_a_bf16_prediction_is_computed_in_fp32_and_rounded_once() -> None:
    model = mlp(width=64)
    weights = make(model, live_dtype=torch.bfloat16, predicts=True)
    train_once(model, weights)
    weights.predict(3)
    for name, clean in weights.clean_state().items():
        param = dict(zip(weights.clean_state(), _clean_params(weights), strict=True))[name]
        velocity = weights.optimizer.state[param]["momentum_buffer"]
        expected = torch.add(clean, velocity, alpha=-3 * 0.1).bfloat16()
        assert torch.equal(model.get_parameter(name), expected)


def test_a_cast_in_chunks_equals_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spectrain.worker.segment._BLOCK", 24)
    param = nn.Parameter(torch.randn(100))
    segment = Segment({}, [param], live_dtype=torch.bfloat16, shared=False)
    direction = torch.randn(segment.clean.shape)
    segment.rewrite(lambda out, w, v: torch.add(w, v, alpha=-0.3, out=out), direction)
    expected = torch.add(segment.clean, direction, alpha=-0.3).bfloat16()
    assert torch.equal(segment.live, expected)


def test_predicting_into_shared_memory_is_our_mistake() -> None:
    segment = Segment({}, [nn.Parameter(torch.ones(3))], live_dtype=torch.float32, shared=True)
    with pytest.raises(AssertionError, match="overwrite"):
        segment.rewrite(torch.ones_like)


def test_batch_norm_stays_fp32_among_bf16_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    make(model, live_dtype=torch.bfloat16)
    outputs = model(torch.randn(8, 4, dtype=torch.bfloat16))
    assert {t.dtype for t in (model[1].weight, model[1].running_mean)} == {torch.float32}
    assert outputs.dtype == model[0].weight.dtype == torch.bfloat16


def test_a_mixed_stage_predicts_both_types() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    weights = make(model, live_dtype=torch.bfloat16, predicts=True)
    model(torch.randn(8, 4, dtype=torch.bfloat16)).pow(3).sum().backward()
    weights.collect_gradients()
    weights.step()
    weights.predict(0)
    clean = snapshot(model)
    weights.predict(10)
    assert not torch.equal(model[0].weight, clean["0.weight"])
    assert not torch.equal(model[1].bias, clean["1.bias"])
    weights.predict(0)
    assert_same_bits(model.state_dict(), clean)


def test_other_buffers_and_frozen_parameters_are_bf16_and_exported_as_fp32() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(3))
            self.register_buffer("index", torch.arange(3))
            self.scale = nn.Parameter(torch.full((3,), 1.001), requires_grad=False)

    model = nn.Sequential(Shift())
    state = make(model, live_dtype=torch.bfloat16).clean_state()
    assert model[0].shift.dtype == model[0].scale.dtype == torch.bfloat16
    assert state["0.index"].dtype == torch.int64
    assert torch.equal(state["0.shift"], torch.ones(3))
    assert torch.equal(state["0.scale"], torch.full((3,), 1.001))


def test_a_trainable_parameter_of_another_type_is_refused() -> None:
    with pytest.raises(JobError, match=r"parameter 0\.weight is torch\.float64.*--precision"):
        make(nn.Sequential(nn.Linear(2, 2).double()))


def test_a_frozen_parameter_of_another_type_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2).double().requires_grad_(False))
    make(model, live_dtype=torch.bfloat16)
    assert model[0].weight.dtype == torch.float64
