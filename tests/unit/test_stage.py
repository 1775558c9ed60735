"""One stage's layers at work: forward, backward, evaluate, random draws, explained errors."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from pipelines import assert_same_bits
from torch import Tensor, nn

from spectrain.protocol.errors import JobError, NonFiniteError
from spectrain.protocol.schedule import Op
from spectrain.worker.objective import Objective
from spectrain.worker.randomness import layer_seed
from spectrain.worker.stage import Stage

F0, F1, B0, B1, E00 = (Op.parse(text) for text in ("F0", "F1", "B0", "B1", "E0.0"))


class Call(nn.Module):
    """A layer that is any function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


def make(*layers: nn.Module, index: int = 1, stages: int = 3, **options: Any) -> Stage:
    named = [(str(number), layer) for number, layer in enumerate(layers)]
    return Stage(named, index=index, stages=stages, **options)


def make_last(*layers: nn.Module, loss: Any = nn.functional.mse_loss, metrics: Any = None,
              stages: int = 3, **options: Any) -> Stage:  # fmt: skip
    objective = Objective(loss, metrics)
    return make(*layers, index=stages - 1, stages=stages, objective=objective, **options)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


# -- forward and backward -----------------------------------------------------------------------


def test_backward_gives_the_gradients_that_autograd_gives() -> None:
    layer, inputs, gradient = nn.Linear(3, 2), leaf(4, 3), torch.randn(4, 2)
    layer(inputs).backward(gradient)
    expected = [inputs.grad, layer.weight.grad, layer.bias.grad]
    layer.zero_grad()
    stage = make(layer)
    received = inputs.detach().requires_grad_()
    stage.forward(F0, received)
    found = [stage.backward(B0, gradient), layer.weight.grad, layer.bias.grad]
    for left, right in zip(found, expected, strict=True):
        assert isinstance(left, Tensor)
        assert isinstance(right, Tensor)
        assert torch.equal(left, right)


def test_batches_in_flight_keep_apart() -> None:
    stage = make(Call(lambda x: x * x))
    stage.forward(F0, torch.tensor([2.0], requires_grad=True))
    stage.forward(F1, torch.tensor([5.0], requires_grad=True))
    assert stage.in_flight == 2
    assert [stage.backward(op, torch.ones(1)) for op in (B0, B1)] == [4, 10]
    assert stage.in_flight == 0


def test_micro_batches_in_flight_keep_apart() -> None:
    stage = make(Call(lambda x: x * x))
    for micro in range(3):
        value = torch.tensor([float(micro)], requires_grad=True)
        stage.forward(Op.parse(f"F0.{micro}"), value)
    found = [stage.backward(Op.parse(f"B0.{micro}"), torch.ones(1)) for micro in range(3)]
    assert found == [0, 2, 4]


def test_stage_0_has_no_gradient_to_send() -> None:
    stage = make(nn.Linear(2, 2), index=0)
    stage.forward(F0, torch.ones(1, 2))
    assert stage.backward(B0, torch.ones(1, 2)) is None


def test_a_dict_with_an_integer_mask_and_none_crosses() -> None:
    def layer(value: dict[str, Any]) -> dict[str, Any]:
        return {"x": value["x"] * value["mask"], "mask": value["mask"], "extra": value["extra"]}

    stage = make(Call(layer))
    mask = torch.tensor([0, 1, 1])
    outputs = stage.forward(F0, {"x": leaf(3), "mask": mask, "extra": None})
    assert isinstance(outputs, dict)
    assert outputs["mask"] is mask
    gradients = stage.backward(B0, {"x": torch.full((3,), 2.0), "mask": None, "extra": None})
    assert isinstance(gradients, dict)
    assert gradients["mask"] is gradients["extra"] is None
    assert gradients["x"] is not None
    assert gradients["x"].tolist() == [0, 2, 2]


def test_an_input_that_is_passed_on_twice_gets_the_sum() -> None:
    stage = make(Call(lambda x: (x, 3 * x)))
    stage.forward(F0, leaf(2))
    gradient = stage.backward(B0, (torch.ones(2), torch.ones(2)))
    assert isinstance(gradient, Tensor)
    assert gradient.tolist() == [4, 4]


def test_an_output_without_gradient_gets_none() -> None:
    stage = make(Call(lambda x: (x * 2, x.detach(), x * 5)))
    stage.forward(F0, leaf(2))
    gradient = stage.backward(B0, (torch.ones(2), None, None))
    assert isinstance(gradient, Tensor)
    assert gradient.tolist() == [2, 2]


def test_an_input_that_nothing_depends_on_gets_no_gradient() -> None:
    stage = make(Call(lambda pair: pair[0] * 2))
    stage.forward(F0, (leaf(2), leaf(2)))
    gradients = stage.backward(B0, torch.ones(2))
    assert isinstance(gradients, tuple)
    assert gradients[0] is not None
    assert gradients[1] is None


def test_a_floating_input_that_needs_no_gradient_gets_none() -> None:
    stage = make(nn.Linear(2, 2))
    stage.forward(F0, torch.ones(1, 2))
    assert stage.backward(B0, torch.ones(1, 2)) is None


def test_a_stage_that_needs_no_gradient_at_all_passes_its_backward() -> None:
    stage = make(nn.Linear(2, 2).requires_grad_(False), index=0)
    outputs = stage.forward(F0, torch.ones(1, 2))
    assert isinstance(outputs, Tensor)
    assert not outputs.requires_grad
    assert stage.backward(B0, None) is None
    assert stage.in_flight == 0


@pytest.mark.parametrize("index", [0, 1])
def test_a_first_layer_may_work_in_place(index: int) -> None:
    stage = make(nn.ReLU(inplace=True), Call(lambda x: x * 3), index=index)
    received = torch.tensor([-1.0, 2.0], requires_grad=index > 0)
    outputs = stage.forward(F0, received)
    assert isinstance(outputs, Tensor)
    assert outputs.tolist() == [0, 6]
    if index:
        gradient = stage.backward(B0, torch.ones(2))
        assert isinstance(gradient, Tensor)
        assert gradient.tolist() == [0, 3]


def test_a_backward_reads_the_weights_that_are_live_by_then() -> None:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data = torch.full((1, 1), 2.0)
    stage = make(layer)
    stage.forward(F0, leaf(1, 1))
    layer.weight.data.fill_(7)
    gradient = stage.backward(B0, torch.ones(1, 1))
    assert isinstance(gradient, Tensor)
    assert gradient.item() == 7


def test_a_batch_leaves_no_garbage() -> None:
    stage = make(nn.Linear(2, 2))
    gc.disable()
    try:
        outputs = stage.forward(F0, leaf(1, 2))
        graph = weakref.ref(outputs)
        del outputs
        stage.backward(B0, torch.ones(1, 2))
        assert graph() is None
    finally:
        gc.enable()


# -- loss ---------------------------------------------------------------------------------------


def test_the_last_stage_starts_gradients_at_its_loss() -> None:
    stage = make_last(Call(lambda x: x * 3), loss=lambda y, t: (y - t).sum())
    outputs = stage.forward(F0, leaf(2))
    score = stage.score(F0, outputs, torch.zeros(2))
    assert isinstance(outputs, Tensor)
    assert score.loss == outputs.sum().item()
    gradient = stage.backward(B0, None)
    assert isinstance(gradient, Tensor)
    assert gradient.tolist() == [3, 3]


def test_a_share_scales_gradients_and_not_the_reported_loss() -> None:
    stage = make_last(Call(lambda x: x * 4), loss=lambda y, _: y.sum())
    outputs = stage.forward(F0, torch.ones(1, requires_grad=True))
    assert stage.score(F0, outputs, torch.zeros(1), share=0.25).loss == 4
    assert stage.backward(B0, None) == 1


def test_metrics_see_detached_outputs() -> None:
    seen: list[Tensor] = []

    def metrics(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        seen.append(outputs)
        return {"sum": outputs.sum(), "count": len(targets)}

    stage = make_last(Call(lambda x: x * 2), loss=lambda y, _: y.sum(), metrics=metrics)
    outputs = stage.forward(F0, torch.ones(3, requires_grad=True))
    assert stage.score(F0, outputs, torch.zeros(3)).metrics == {"sum": 6, "count": 3}
    assert not seen[0].requires_grad


def test_a_stage_alone_takes_inputs_and_gives_loss() -> None:
    layer = nn.Linear(2, 1)
    stage = make_last(layer, stages=1)
    outputs = stage.forward(F0, torch.ones(4, 2))
    stage.score(F0, outputs, torch.zeros(4, 1))
    assert stage.backward(B0, None) is None
    assert layer.weight.grad is not None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_names_stage_op_and_value(value: float) -> None:
    stage = make_last(Call(lambda x: x), loss=lambda y, _: y.sum() * value)
    outputs = stage.forward(F1, torch.ones(1, requires_grad=True))
    with pytest.raises(NonFiniteError, match=f"loss is {value} at F1 on stage 2"):
        stage.score(F1, outputs, torch.zeros(1))


@pytest.mark.parametrize(
    ("returned", "named"),
    [(torch.ones(2), r"shape \[2\]"), (3.5, "float"), (None, "NoneType")],
)
def test_a_loss_that_is_not_one_tensor_is_refused(returned: Any, named: str) -> None:
    stage = make_last(Call(lambda x: x), loss=lambda *_: returned)
    with pytest.raises(JobError, match=f"{named}: it must return one number"):
        stage.score(F0, stage.forward(F0, leaf(2)), torch.zeros(2))


def test_a_loss_of_shape_1_is_one_number() -> None:
    stage = make_last(Call(lambda x: x), loss=lambda y, _: y * 2)
    stage.score(F0, stage.forward(F0, leaf(1)), torch.zeros(1))
    assert stage.backward(B0, None) == 2


# -- evaluation ---------------------------------------------------------------------------------


def whole(stage: Stage) -> nn.Sequential:
    return nn.Sequential(*(layer for _, layer in stage.layers))


def noisy_stage() -> Stage:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    return make_last(*layers, stages=1)


def test_evaluation_is_repeatable_and_tracks_nothing() -> None:
    stage, inputs = noisy_stage(), torch.randn(8, 4)
    before = {k: v.clone() for k, v in whole(stage).state_dict().items()}
    first, second = (stage.evaluate(E00, inputs) for _ in range(2))
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert stage.in_flight == 0
    assert_same_bits(whole(stage).state_dict(), before)


def test_a_score_of_an_evaluation_leaves_no_graph() -> None:
    stage = noisy_stage()
    outputs = stage.evaluate(E00, torch.randn(8, 4))
    assert stage.score(E00, outputs, torch.zeros(8, 2)).loss > 0
    assert stage.in_flight == 0


def test_training_goes_on_after_an_evaluation_as_without_it() -> None:
    inputs = [torch.randn(8, 4) for _ in range(3)]
    results: list[Any] = []
    for evaluates in (False, True):
        stage = noisy_stage()
        for batch, value in enumerate(inputs):
            outputs = stage.forward(Op.parse(f"F{batch}"), value)
            stage.score(Op.parse(f"F{batch}"), outputs, torch.zeros(8, 2))
            if evaluates:
                stage.evaluate(E00, torch.randn(5, 4))
            stage.backward(Op.parse(f"B{batch}"), None)
        model = whole(stage)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((model.state_dict(), gradients))
    for left, right in zip(*results, strict=True):
        assert_same_bits(left, right)


def test_evaluation_leaves_each_module_in_its_own_mode() -> None:
    layers = (nn.Dropout(), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)))
    layers[1][1].eval()
    stage = make(*layers)
    stage.evaluate(E00, torch.randn(3, 2))
    modes = [module.training for layer in layers for module in layer.modules()]
    assert modes == [True, True, True, False]


def test_modes_come_back_after_a_failed_evaluation() -> None:
    dropout = nn.Dropout()
    stage = make(dropout, nn.Linear(2, 2))
    with pytest.raises(RuntimeError):
        stage.evaluate(E00, torch.randn(3, 5))
    assert dropout.training


# -- random numbers -----------------------------------------------------------------------------


def draws(stage: Stage, op: Op) -> Tensor:
    outputs = stage.forward(op, torch.ones(200))
    assert isinstance(outputs, Tensor)
    return outputs


def test_draws_do_not_depend_on_what_ran_before() -> None:
    first = draws(make(nn.Dropout()), F1)
    stage = make(nn.Dropout())
    torch.rand(17)
    draws(stage, F0)
    assert torch.equal(draws(stage, F1), first)


def test_draws_do_not_depend_on_the_cut() -> None:
    whole = draws(make(nn.Dropout(), nn.Dropout(), index=0), F0)
    front = make(nn.Dropout(), index=0, first_layer=0)
    back = make(nn.Dropout(), index=1, first_layer=1)
    assert torch.equal(back.forward(F0, draws(front, F0)), whole)


@pytest.mark.parametrize("other", ["F1", "F0.1", "seed", "layer"])
def test_draws_differ_by_batch_micro_batch_seed_and_layer(other: str) -> None:
    options = {"seed": {"seed": 1}, "layer": {"first_layer": 1}}.get(other, {})
    op = Op.parse(other) if other.startswith("F") else F0
    assert not torch.equal(draws(make(nn.Dropout(), **options), op), draws(make(nn.Dropout()), F0))


def test_layer_seeds_are_known_and_apart() -> None:
    assert layer_seed(0, 0, F0) == layer_seed(0, 0, F0)
    seeds = {
        layer_seed(seed, layer, Op(op.kind, batch, micro))
        for seed in range(3) for layer in range(3) for batch in range(3) for micro in range(3)
        for op in (F0, E00)
    }  # fmt: skip
    assert len(seeds) == 3**4 * 2
    assert all(0 <= seed < 2**64 for seed in seeds)


# -- types --------------------------------------------------------------------------------------


def test_bf16_casts_floating_inputs_of_stage_0_only() -> None:
    seen: list[Any] = []
    layer = Call(lambda value: seen.append(value) or value)
    ids, floats = torch.arange(3), torch.ones(3)
    make(layer, index=0, dtype=torch.bfloat16).forward(F0, (ids, floats, None))
    make(layer, index=1, dtype=torch.bfloat16).forward(F0, (ids, floats, None))
    assert [[part.dtype for part in value[:2]] for value in seen] == [
        [torch.int64, torch.bfloat16],
        [torch.int64, torch.float32],
    ]


def test_bf16_outputs_reach_the_loss_as_fp32() -> None:
    seen: list[torch.dtype] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(outputs.dtype)
        return outputs.sum()

    stage = make_last(nn.Linear(2, 2, dtype=torch.bfloat16), loss=loss)
    inputs = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    stage.score(F0, stage.forward(F0, inputs), torch.zeros(1))
    gradient = stage.backward(B0, None)
    assert isinstance(gradient, Tensor)
    assert (seen, gradient.dtype) == ([torch.float32], torch.bfloat16)


# -- errors -------------------------------------------------------------------------------------


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


def test_an_error_in_a_layer_keeps_its_type_and_says_where() -> None:
    def fail(value: Any) -> Any:
        raise ZeroDivisionError("the user's own words")

    stage = make(nn.Linear(2, 3), Call(fail))
    with pytest.raises(ZeroDivisionError, match="the user's own words") as failed:
        stage.forward(F1, leaf(4, 2))
    assert notes(failed.value) == "in layer 1 of stage 1 at F1, given float32 [4, 3]"
    assert failed.traceback[-1].name == "fail"


def test_an_error_in_a_layer_shows_the_shapes_of_all_parts() -> None:
    stage = make(Call(lambda value: value + 1))
    with pytest.raises(TypeError) as failed:
        stage.forward(F0, (torch.ones(2), None, torch.ones(3, dtype=torch.bool)))
    assert "given (float32 [2], NoneType, bool [3])" in notes(failed.value)
    with pytest.raises(TypeError) as failed:
        stage.forward(F0, {"ids": torch.arange(4)})
    assert "given {'ids': int64 [4]}" in notes(failed.value)


def test_an_error_in_a_backward_says_where() -> None:
    def layer(value: Tensor) -> Tensor:
        squared = value.exp()
        squared.add_(1)  # autograd needed it
        return squared

    stage = make(Call(layer))
    stage.forward(F0, leaf(2))
    with pytest.raises(RuntimeError, match="inplace") as failed:
        stage.backward(B0, torch.ones(2))
    assert "in the backward pass of stage 1 at B0" in notes(failed.value)


def test_an_error_in_the_loss_says_where() -> None:
    stage = make_last(Call(lambda x: x))
    outputs = stage.forward(F0, leaf(2))
    with pytest.raises((RuntimeError, AttributeError)) as failed:
        stage.score(F0, outputs, (torch.zeros(2),))
    assert "in the loss or metrics of stage 2 at F0, given float32 [2]" in notes(failed.value)


def test_an_output_that_cannot_cross_is_the_jobs_mistake() -> None:
    with pytest.raises(JobError, match="layer 0 returned a list"):
        make(Call(lambda x: [x])).forward(F0, leaf(2))


def test_only_the_last_stage_scores() -> None:
    with pytest.raises(AssertionError, match="not the last"):
        make(Call(lambda x: x)).score(F0, torch.ones(1), torch.ones(1))


def test_a_last_stage_without_loss_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="has the loss"):
        make(Call(lambda x: x), index=2)
