"""Runs the user's job file and checks what it offers; every fault in it becomes a ``JobError``.

A job file is plain Python that needs no import of ours: ``docs/job-files.md``. Importing this
file imports no torch; building a model does, and by then the user's file has done so itself.
It must not know what a stage is: cutting the layers is the caller's part.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .errors import JobError, UserError
from .hyper import HyperValue, Parameters, convert, take
from .job_file import read_settings

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "Job",
    "TiedParameter",
    "load_job",
    "tied_parameters",
    "user_fault",
]

_PACKAGE = Path(__file__).resolve().parent.parent
_NOT_THE_USERS = tuple(
    str(folder)
    for folder in (
        *(_PACKAGE / name for name in ("protocol", "coordinator", "worker", "launch")),
        Path(sysconfig.get_path("stdlib")),
    )
)
_REQUIRED = {
    "model": "model(**hyper) -> nn.Sequential",
    "datasets": "datasets(**hyper) -> (train, test or None)",
    "loss": "loss(outputs, targets) -> scalar tensor",
    "optimizer": "optimizer(params, **hyper) -> torch.optim.Optimizer",
}
_OPTIONAL = {
    "metrics": "metrics(outputs, targets) -> dict[str, float]",
    "lr_schedule": "lr_schedule(update) -> factor",
    "collate": "collate(samples) -> (inputs, targets)",
}


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """One tensor that several layers own.

    Attributes:
        names: its names in ``model.state_dict()``, in order of the layers.
        layers: the index of the flattened layer of each name, ascending.
    """

    names: tuple[str, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a job file offers.

    Attributes:
        path: the file.
        loss: ``loss(outputs, targets)``, a scalar tensor: the mean over the samples.
        metrics: ``metrics(outputs, targets)``, numbers by name, each a mean over the samples.
        lr_schedule: ``lr_schedule(update)``, the factor on the learning rate of that update.
        collate: turns a list of samples into ``(inputs, targets)``; None: torch's own.
        settings: the job's defaults for the command's options.
    """

    path: Path
    model: Callable[..., Any]
    datasets: Callable[..., Any]
    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[..., Any]
    metrics: Callable[[Any, Any], Mapping[str, float]] | None
    lr_schedule: Callable[[int], float] | None
    collate: Callable[[list[Any]], Any] | None
    settings: Mapping[str, Any]

    def check_hyper(self, hyper: Mapping[str, HyperValue]) -> dict[str, HyperValue]:
        """Return ``hyper`` with its texts turned into the types of the parameters' defaults.

        Raises:
            JobError: a name that neither ``model`` nor ``datasets`` nor ``optimizer`` takes, a
                value of another type, or a parameter without default that is not set.
        """
        return convert(
            hyper,
            {
                "model": Parameters(self.model),
                "datasets": Parameters(self.datasets),
                "optimizer": Parameters(self.optimizer, skip=1),
            },
        )

    def build_model(self, seed: int, hyper: Mapping[str, HyperValue]) -> nn.Sequential:
        """Return the whole model as ``torch.manual_seed(seed); model(**hyper)`` makes it.

        Raises:
            JobError: the function fails, or its result is not a plain ``nn.Sequential`` with at
                least one layer.
        """
        import torch

        torch.manual_seed(seed)
        with self._users_code("model()"):
            model = self.model(**take(Parameters(self.model), hyper))
        if not _is_chain(model):
            raise JobError(
                f"{self.path}: model() returned {type(model).__name__}. It must return an "
                f"nn.Sequential without a forward of its own, because the pipeline is cut between "
                f"its layers; wrap what must stay together in one nn.Module each"
            )
        if len(model) == 0:
            raise JobError(f"{self.path}: model() returned an nn.Sequential without layers")
        return model

    @staticmethod
    def flatten(model: nn.Sequential) -> list[tuple[str, nn.Module]]:
        """Return the layers in order, nested ``nn.Sequential`` taken apart.

        The names are the model's own, so ``f"{name}.{parameter}"`` is a key of
        ``model.state_dict()``. An ``nn.Sequential`` with a forward of its own is one layer.
        """
        return list(_layers(model, ""))

    def build_datasets(self, seed: int, hyper: Mapping[str, HyperValue]) -> tuple[Any, Any]:
        """Return the training set and the test set or None.

        torch is seeded first, so that a random split is the same in every run with this seed.

        Raises:
            JobError: the function fails or does not return a pair.
        """
        import torch

        torch.manual_seed(seed)
        with self._users_code("datasets()"):
            pair = self.datasets(**take(Parameters(self.datasets), hyper))
        if not isinstance(pair, tuple) or len(pair) != 2:  # noqa: PLR2004
            raise JobError(
                f"{self.path}: datasets() returned {type(pair).__name__}, "
                f"not a pair (train, test); without a test set return (train, None)"
            )
        return pair

    def build_optimizer(
        self, params: Sequence[Any], hyper: Mapping[str, HyperValue]
    ) -> torch.optim.Optimizer:
        """Return the job's optimizer over ``params``: tensors, or parameter groups.

        Raises:
            JobError: the function fails or returns something else.
        """
        import torch

        with self._users_code("optimizer()"):
            optimizer = self.optimizer(params, **take(Parameters(self.optimizer, skip=1), hyper))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise JobError(
                f"{self.path}: optimizer() returned {type(optimizer).__name__}, "
                f"not a torch.optim.Optimizer"
            )
        return optimizer

    def _users_code(self, what: str) -> Any:
        return _users_code(self.path, what)


def load_job(path: Path) -> Job:
    """Run the job file and return what it offers.

    Its directory goes onto ``sys.path``, as when Python runs a file. The module's name is
    private, but keeps the package it lies in, so that its relative imports work.

    Raises:
        JobError: the file cannot be run, lacks a function, or has something else by that name.
    """
    path = Path(path).resolve()
    settings = read_settings(path)
    module = _import(path)
    for name, form in {**_REQUIRED, **_OPTIONAL}.items():
        value = getattr(module, name, None)
        if value is None and name in _REQUIRED:
            raise JobError(f"{path}: the job file has no {name}; it must define {form}")
        if value is not None and not callable(value):
            raise JobError(f"{path}: {name} is {type(value).__name__} {value!r}; it must be {form}")
    if getattr(module, "settings", {}) != settings:
        raise JobError(
            f"{path}: settings changes while the file runs. It is read without running the file, "
            f"so assign it once, at the top level, as a dictionary of literals"
        )
    functions = {name: getattr(module, name, None) for name in (*_REQUIRED, *_OPTIONAL)}
    return Job(path=path, settings=settings, **functions)  # pyright: ignore[reportArgumentType]


def tied_parameters(layers: Sequence[tuple[str, nn.Module]]) -> list[TiedParameter]:
    """Find parameters that several layers share, by identity.

    Args:
        layers: what ``Job.flatten`` returned.

    Returns:
        One entry per shared tensor. It can be trained only where all its layers are on one
        stage, for each worker would update a copy of its own.
    """
    owners: dict[int, list[tuple[int, str]]] = {}
    for index, (name, layer) in enumerate(layers):
        for own_name, parameter in layer.named_parameters(remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((index, f"{name}.{own_name}"))
    return [
        TiedParameter(tuple(name for _, name in found), tuple(index for index, _ in found))
        for found in owners.values()
        if len({index for index, _ in found}) > 1
    ]


def user_fault(error: BaseException) -> str:
    """Say where in the user's own code an exception arose, and what it was.

    Returns:
        ``file:line: Type: message`` with the deepest frame that is neither ours nor a library's;
        without the place where no frame is the user's.
    """
    what = traceback.format_exception_only(type(error), error)[-1].strip()
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {what}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", *_NOT_THE_USERS))
        and not {"site-packages", "dist-packages"} & set(Path(frame.filename).parts)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {what}" if frames else what


@contextmanager
def _users_code(path: Path, what: str) -> Generator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise JobError(f"{path}: {what} failed: {user_fault(error)}") from error


def _import(path: Path) -> ModuleType:
    root, package = path.parent, ""
    while (root / "__init__.py").is_file():
        root, package = root.parent, f"{root.name}.{package}"
    for place, index in ((path.parent, 0), (root, len(sys.path))):
        if str(place) not in sys.path:
            sys.path.insert(index, str(place))
    name = f"{package}_spectrain_job"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    with _users_code(path, "importing the job file"):
        spec.loader.exec_module(module)
    return module


def _is_chain(module: object) -> bool:
    from torch import nn

    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _layers(model: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    # named_children() leaves out a module that occurs a second time, such as one ReLU for all.
    for name, child in model._modules.items():  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        assert child is not None
        if _is_chain(child):
            yield from _layers(child, f"{prefix}{name}.")  # pyright: ignore[reportArgumentType]
        else:
            yield f"{prefix}{name}", child
