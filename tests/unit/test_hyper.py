"""Text from ``--set`` becomes values of the type that the functions' defaults have."""

from __future__ import annotations

from typing import Any

import pytest

from spectrain.protocol.errors import JobError
from spectrain.protocol.hyper import HyperValue, Parameters, convert, take


def model(width: int = 64, dropout: float = 0.0, norm: bool = True) -> None: ...  # noqa: FBT001, FBT002


def datasets(root: str = "data", limit: int | None = None) -> None: ...


def optimizer(params: Any, lr: float = 0.1) -> None: ...


FUNCTIONS = {
    "model": Parameters(model),
    "datasets": Parameters(datasets),
    "optimizer": Parameters(optimizer, skip=1),
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("width", "32", 32),
        ("dropout", "0.5", 0.5),
        ("dropout", "1", 1.0),
        ("lr", "1e-3", 0.001),
        ("norm", "false", False),
        ("norm", "Yes", True),
        ("norm", "0", False),
        ("root", "12", "12"),
        ("limit", "12", 12),
        ("limit", "0.5", 0.5),
        ("limit", "True", True),
        ("limit", "half", "half"),
        ("limit", "[1, 2]", "[1, 2]"),
        ("limit", "'12'", "'12'"),
    ],
)
def test_text_becomes_a_value_of_the_defaults_type_and_stays_so(
    name: str, text: str, value: HyperValue
) -> None:
    once = convert({name: text}, FUNCTIONS)
    assert once == {name: value}
    assert type(once[name]) is type(value)
    assert convert(once, FUNCTIONS) == once


def test_a_whole_number_serves_where_a_float_is_the_default() -> None:
    converted = convert({"lr": 1}, FUNCTIONS)
    assert type(converted["lr"]) is float


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("width", "wide", "int"),
        ("width", "1.5", "int"),
        ("width", 1.5, "int"),
        ("width", True, "int"),
        ("lr", True, "float"),
        ("dropout", "much", "float"),
        ("norm", "maybe", "bool"),
        ("norm", 1, "bool"),
        ("root", 12, "str"),
    ],
)
def test_a_value_of_another_type_is_refused_with_both(
    name: str, value: HyperValue, kind: str
) -> None:
    with pytest.raises(JobError, match=f"--set {name}={value}: must be of type {kind}"):
        convert({name: value}, FUNCTIONS)


def test_a_default_of_another_type_cannot_be_set_from_text() -> None:
    def sized(sizes: tuple[int, ...] = (1, 2)) -> None: ...

    with pytest.raises(JobError, match=r"--set sizes=3: must be of type tuple"):
        convert({"sizes": "3"}, {"model": Parameters(sized)})


@pytest.mark.parametrize("annotation", [float, "float"])
def test_an_annotation_goes_before_a_default(annotation: Any) -> None:
    def momentum(momentum: Any = 0) -> None: ...

    momentum.__annotations__["momentum"] = annotation
    assert convert({"momentum": "0.9"}, {"optimizer": Parameters(momentum)}) == {"momentum": 0.9}


def test_an_unknown_name_is_refused_with_the_nearest_and_the_known_ones() -> None:
    with pytest.raises(JobError) as caught:
        convert({"widht": "3"}, FUNCTIONS)
    text = str(caught.value)
    assert "did you mean 'width'?" in text
    assert "width=64, dropout=0.0, norm=True, root='data', limit=None, lr=0.1" in text


def test_the_optimizers_first_parameter_cannot_be_set() -> None:
    with pytest.raises(JobError, match="no function of the job has a parameter 'params'"):
        convert({"params": "3"}, FUNCTIONS)


def test_functions_without_parameters_say_so() -> None:
    with pytest.raises(JobError, match="the functions have no parameters"):
        convert({"lr": "3"}, {"model": Parameters(lambda: None)})


def test_a_parameter_without_default_must_be_set() -> None:
    def sized(width: Any) -> None: ...

    functions = {"model": Parameters(sized)}
    assert convert({"width": "3"}, functions) == {"width": 3}
    with pytest.raises(JobError, match=r"model\(\) needs a value for 'width'.*--set width=VALUE"):
        convert({}, functions)


def test_the_listing_shows_a_name_without_default_alone() -> None:
    def sized(width: Any, depth: int = 3) -> None: ...

    with pytest.raises(JobError, match="Known: width, depth=3"):
        convert({"x": 1, "width": 2}, {"model": Parameters(sized)})


def test_a_function_with_keyword_arguments_takes_every_name() -> None:
    parameters = Parameters(lambda **hyper: hyper)
    assert convert({"anything": "3"}, {"model": parameters}) == {"anything": 3}
    assert take(parameters, {"anything": 3}) == {"anything": 3}


def test_a_function_is_given_only_what_it_takes() -> None:
    assert take(FUNCTIONS["model"], {"width": 3, "lr": 0.1}) == {"width": 3}


def test_a_name_of_several_functions_has_the_type_of_the_first_default() -> None:
    functions = {
        "model": Parameters(lambda size=1: size),
        "datasets": Parameters(lambda size="": size),
    }
    assert convert({"size": "3"}, functions) == {"size": 3}
