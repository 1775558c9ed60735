"""A job file is run as Python would run it, and every fault in it is told as the user's own."""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spectrain.protocol.errors import JobError, SettingsError
from spectrain.protocol.job import Job, TiedParameter, load_job, tied_parameters, user_fault

torch.set_num_threads(1)

MINIMAL = """
import torch
from torch import nn

def model(width=4):
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1))

def datasets(limit=3):
    return [(torch.zeros(2), torch.zeros(1))] * limit, None

loss = nn.functional.mse_loss

def optimizer(params, lr=0.1):
    return torch.optim.SGD(params, lr=lr)
"""


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text), encoding="utf-8")
    return path


def minimal(directory: Path, more: str = "") -> Job:
    return load_job(written(directory / "job.py", MINIMAL + dedent(more)))


# -- loading ------------------------------------------------------------------------------------


def test_a_minimal_job_offers_its_functions_and_nothing_optional(tmp_path: Path) -> None:
    job = minimal(tmp_path)
    assert job.path == tmp_path / "job.py"
    assert job.loss is nn.functional.mse_loss
    assert (job.metrics, job.lr_schedule, job.collate, job.settings) == (None, None, None, {})


def test_the_optional_parts_are_taken_where_they_are(tmp_path: Path) -> None:
    job = minimal(
        tmp_path,
        """
        settings = {"epochs": 3}
        def metrics(outputs, targets): return {"one": 1.0}
        def lr_schedule(update): return 0.5
        def collate(samples): return samples
        """,
    )
    assert job.settings == {"epochs": 3}
    assert job.metrics is not None
    assert job.metrics(torch.zeros(1), torch.zeros(1)) == {"one": 1.0}
    assert job.lr_schedule is not None
    assert job.lr_schedule(7) == 0.5
    assert job.collate is not None
    assert job.collate([1]) == [1]


@pytest.mark.parametrize("name", ["model", "datasets", "loss", "optimizer"])
def test_a_missing_function_is_named_with_its_form(tmp_path: Path, name: str) -> None:
    with pytest.raises(JobError, match=rf"has no {name}; it must define {name}\("):
        minimal(tmp_path, f"del {name}")


@pytest.mark.parametrize("name", ["model", "metrics"])
def test_something_else_by_a_functions_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(JobError, match=rf"{name} is int 3; it must be {name}\("):
        minimal(tmp_path, f"{name} = 3")


def test_settings_that_change_while_the_file_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="settings changes while the file runs"):
        minimal(tmp_path, "settings = {}\nsettings['epochs'] = 3\n")


def test_modules_beside_the_file_can_be_imported(tmp_path: Path) -> None:
    written(tmp_path / "beside_the_job.py", "factor = 3")
    job = minimal(tmp_path, "import beside_the_job\nlr_schedule = lambda u: beside_the_job.factor")
    assert job.lr_schedule is not None
    assert job.lr_schedule(0) == 3


def test_the_directory_comes_first_and_only_once(tmp_path: Path) -> None:
    minimal(tmp_path)
    minimal(tmp_path)
    assert sys.path[0] == str(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1


def test_relative_imports_of_a_job_in_a_package_work(tmp_path: Path) -> None:
    written(tmp_path / "team_of_job" / "__init__.py", "")
    written(tmp_path / "team_of_job" / "parts" / "__init__.py", "from .numbers import factor")
    written(tmp_path / "team_of_job" / "parts" / "numbers.py", "factor = 3")
    job = minimal(
        tmp_path / "team_of_job",
        "from .parts import factor\ndef lr_schedule(update): return factor",
    )
    assert job.lr_schedule is not None
    assert job.lr_schedule(0) == 3


def test_a_dataclass_with_postponed_annotations_works(tmp_path: Path) -> None:
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    shape = "@dataclass\nclass Shape:\n    width: int = 3\n"
    schedule = "def lr_schedule(update): return Shape().width\n"
    job = load_job(written(tmp_path / "job.py", head + MINIMAL + shape + schedule))
    assert job.lr_schedule is not None
    assert job.lr_schedule(0) == 3


# -- the user's faults --------------------------------------------------------------------------


def test_a_fault_while_the_file_runs_is_told_with_its_line(tmp_path: Path) -> None:
    path = written(tmp_path / "job.py", "x = 1\ny = x / 0\n")
    with pytest.raises(JobError) as caught:
        load_job(path)
    assert str(caught.value) == (
        f"{path}: importing the job file failed: {path}:2: ZeroDivisionError: division by zero"
    )


def test_a_fault_in_an_imported_module_of_the_user_is_told_there(tmp_path: Path) -> None:
    helper = written(tmp_path / "broken_helper.py", "\n\nraise KeyError('k')\n")
    with pytest.raises(JobError, match=rf"{helper}:3: KeyError: 'k'"):
        minimal(tmp_path, "import broken_helper")


def test_a_syntax_error_in_an_imported_module_is_told_there(tmp_path: Path) -> None:
    helper = written(tmp_path / "crooked_helper.py", "\ndef f(:\n")
    with pytest.raises(JobError, match=rf"{helper}:2: SyntaxError: invalid syntax"):
        minimal(tmp_path, "import crooked_helper")


def test_a_fault_inside_a_library_is_told_at_the_users_call(tmp_path: Path) -> None:
    path = written(tmp_path / "job.py", "import torch\nx = torch.nn.Linear(2, 'a')\n")
    with pytest.raises(JobError, match=rf"{path}:2: TypeError"):
        load_job(path)


def test_a_fault_without_a_frame_of_the_user_is_told_without_a_place() -> None:
    assert user_fault(ValueError("v")) == "ValueError: v"


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("model", lambda job: job.build_model(0, {})),
        ("datasets", lambda job: job.build_datasets(0, {})),
        ("optimizer", lambda job: job.build_optimizer([], {})),
    ],
)
def test_a_fault_in_a_function_is_told_with_its_line(tmp_path: Path, name: str, build: Any) -> None:
    job = minimal(tmp_path, f"def {name}(*args): raise OSError('no such disk')")
    with pytest.raises(JobError, match=rf"{name}\(\) failed: .*job\.py:\d+: OSError: no such disk"):
        build(job)


def test_an_error_of_ours_inside_a_function_is_left_as_it_is(tmp_path: Path) -> None:
    job = minimal(
        tmp_path,
        """
        from spectrain.protocol.errors import SettingsError
        def model(): raise SettingsError("as it is")
        """,
    )
    with pytest.raises(SettingsError, match=r"^as it is$"):
        job.build_model(0, {})


# -- building -----------------------------------------------------------------------------------


def test_hyper_parameters_reach_the_functions_that_take_them(tmp_path: Path) -> None:
    job = minimal(tmp_path)
    hyper = job.check_hyper({"width": "8", "limit": "5", "lr": "1"})
    assert hyper == {"width": 8, "limit": 5, "lr": 1.0}
    model = job.build_model(0, hyper)
    assert isinstance(model[0], nn.Linear)
    assert model[0].out_features == 8
    train, test = job.build_datasets(0, hyper)
    assert (len(train), test) == (5, None)
    optimizer = job.build_optimizer(list(model.parameters()), hyper)
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_an_unknown_hyper_parameter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"'widht'.*did you mean 'width'.*lr=0\.1"):
        minimal(tmp_path).check_hyper({"widht": "8"})


def test_a_class_may_be_the_optimizer(tmp_path: Path) -> None:
    job = minimal(tmp_path, "optimizer = torch.optim.SGD")
    hyper = job.check_hyper({"lr": "0.5", "momentum": "0.9"})
    group = job.build_optimizer([nn.Parameter(torch.zeros(1))], hyper).param_groups[0]
    assert (group["lr"], group["momentum"]) == (0.5, 0.9)


def test_the_weights_are_those_of_the_seed(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)).state_dict()
    torch.manual_seed(99)
    built = minimal(tmp_path).build_model(3, {}).state_dict()
    assert list(built) == list(expected)
    assert all(torch.equal(built[name], expected[name]) for name in expected)


def test_a_random_split_is_that_of_the_seed(tmp_path: Path) -> None:
    job = minimal(tmp_path, "def datasets(): return torch.randperm(100).tolist(), None")
    train, _ = job.build_datasets(1, {})
    assert train == job.build_datasets(1, {})[0]
    assert train != job.build_datasets(2, {})[0]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("nn.Linear(2, 1)", "Linear"),
        ("None", "NoneType"),
        ("type('Own', (nn.Sequential,), {'forward': lambda self, x: x})()", "Own"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(tmp_path: Path, body: str, found: str) -> None:
    job = minimal(tmp_path, f"def model(): return {body}")
    with pytest.raises(JobError, match=rf"model\(\) returned {found}\. It must return an nn\.Seq"):
        job.build_model(0, {})


def test_a_model_without_layers_is_refused(tmp_path: Path) -> None:
    job = minimal(tmp_path, "def model(): return nn.Sequential()")
    with pytest.raises(JobError, match="without layers"):
        job.build_model(0, {})


@pytest.mark.parametrize("body", ["[1, 2]", "([1],)"])
def test_datasets_that_are_no_pair_are_refused(tmp_path: Path, body: str) -> None:
    job = minimal(tmp_path, f"def datasets(): return {body}")
    with pytest.raises(JobError, match=r"not a pair \(train, test\)"):
        job.build_datasets(0, {})


def test_an_optimizer_that_is_none_is_refused(tmp_path: Path) -> None:
    job = minimal(tmp_path, "def optimizer(params): return None")
    with pytest.raises(JobError, match=r"returned NoneType, not a torch\.optim\.Optimizer"):
        job.build_optimizer([], {})


# -- layers -------------------------------------------------------------------------------------


class Doubling(nn.Sequential):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * super().forward(value)


class Named(nn.Sequential):
    """A subclass that only has a name is still a chain."""


def test_nested_chains_are_flattened_under_the_models_own_names() -> None:
    model = nn.Sequential(
        OrderedDict(
            stem=nn.Linear(2, 2),
            body=nn.Sequential(nn.ReLU(), Named(nn.Linear(2, 2))),
            twice=Doubling(nn.Linear(2, 2)),
        )
    )
    layers = Job.flatten(model)
    assert [name for name, _ in layers] == ["stem", "body.0", "body.1.0", "twice"]
    keys = [f"{name}.{key}" for name, layer in layers for key in layer.state_dict()]
    assert keys == list(model.state_dict())


def test_flattened_layers_in_turn_are_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1)))
    value = expected = torch.ones(4, 2)
    for _, layer in Job.flatten(model):
        value = layer(value)
    assert torch.equal(value, model(expected))


def test_a_module_that_occurs_twice_is_two_layers() -> None:
    relu = nn.ReLU()
    layers = Job.flatten(nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu))
    assert [name for name, _ in layers] == ["0", "1", "2", "3"]
    assert layers[1][1] is layers[3][1]


def test_tied_parameters_are_found_with_names_and_layers() -> None:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    last.weight = first.weight
    layers = Job.flatten(nn.Sequential(first, nn.ReLU(), last))
    assert tied_parameters(layers) == [TiedParameter(("0.weight", "2.weight"), (0, 2))]


def test_parameters_tied_within_one_layer_are_no_concern() -> None:
    inner = nn.Linear(2, 2)
    layers = Job.flatten(nn.Sequential(Doubling(inner, inner), nn.Linear(2, 2)))
    assert tied_parameters(layers) == []
