"""Finds the user's job file and reads its ``settings``; never runs it and never imports torch.

The launcher answers in well under a second because this is all it does with a job. What runs the
file is ``job.py``.
"""

from __future__ import annotations

import ast
import difflib
import os
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .errors import JobError
from .settings import Settings

__all__ = ["JobSource", "did_you_mean", "find_job", "imported_modules", "read_settings"]

_DEFAULT_NAME = "job.py"
_SHIPPED_EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "digits.py"
_NOT_FOR_JOBS = {"job", "run_dir", "hyper"}  # about this run, not about the job


@dataclass(frozen=True, slots=True)
class JobSource:
    """Where the job is, and in words how it was chosen."""

    path: Path
    origin: str


def find_job(job: str | None, cwd: Path) -> JobSource:
    """Find the job file that the user means.

    Args:
        job: a path (absolute or from ``cwd``), a dotted module name, or None for ``job.py`` in
            ``cwd`` and else the digits example that comes with the package.
        cwd: where relative names start; modules are looked for here before ``sys.path``.

    Returns:
        The absolute path of the file and one phrase that says which was taken.

    Raises:
        JobError: there is no such file or module.
    """
    if job is None:
        here = cwd / _DEFAULT_NAME
        if here.is_file():
            return JobSource(here.resolve(), f"{_DEFAULT_NAME} in {cwd}")
        return JobSource(
            _SHIPPED_EXAMPLE, f"the shipped digits example, as there is no {_DEFAULT_NAME} in {cwd}"
        )
    path = cwd / job
    if path.is_file():
        return JobSource(path.resolve(), f"the file {job}")
    if job.endswith(".py") or os.sep in job:
        beside = [file.name for file in path.parent.glob("*.py")]
        raise JobError(f"{path}: no such job file{did_you_mean(path.name, beside)}")
    module = _find_module(job, cwd)
    if module is None:
        raise JobError(
            f"{job!r} is neither a file in {cwd} nor a Python module that can be found from there; "
            f"name a file (train.py) or a module (package.train)"
        )
    return JobSource(module.resolve(), f"the module {job}")


def read_settings(path: Path) -> dict[str, Any]:
    """Read the file's ``settings = {...}`` without running it.

    Args:
        path: the job file.

    Returns:
        The literal dictionary, or an empty one where the file has none. Names are fields of
        ``Settings``; its values are checked when the run's settings are made.

    Raises:
        JobError: the file cannot be read or parsed, ``settings`` is not a dictionary of literals,
            or it has a name that no setting has; with file and line.
    """
    value = _settings_node(path)
    if value is None:
        return {}
    where = f"{path}:{value.lineno}"
    try:
        settings = ast.literal_eval(value)
    except ValueError as error:
        raise JobError(
            f"{where}: settings must be a dictionary of literals, such as "
            f'{{"epochs": 30}}, because it is read without running the file'
        ) from error
    if not isinstance(settings, dict):
        raise JobError(
            f"{where}: settings must be a dictionary, not {type(settings).__name__} {settings!r}"
        )
    known = sorted(set(Settings.__dataclass_fields__) - _NOT_FOR_JOBS)
    for name in settings:
        if name not in known:
            raise JobError(
                f"{where}: settings has {name!r}, which is no setting"
                f"{did_you_mean(str(name), known)}. Known: {', '.join(known)}. A value for the "
                f"job's own functions is the default of their parameter"
            )
    return settings


def imported_modules(path: Path) -> tuple[str, ...]:
    """Return the modules that the file imports by absolute name at its top level.

    The file is read, not run; one that cannot be read or parsed imports nothing.
    """
    try:
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ()
    names: list[str] = []
    for statement in tree.body:
        match statement:
            case ast.Import(names=aliases):
                names += [alias.name for alias in aliases]
            case ast.ImportFrom(module=str() as module, level=0):
                names.append(module)
            case _:
                pass
    return tuple(dict.fromkeys(names))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a bracket that suggests the nearest of ``known``, empty where none is near."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def _find_module(name: str, cwd: Path) -> Path | None:
    """Walk down by directories from the top-level package, so that no parent is imported."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    local = _source_in([cwd], parts)
    if local is not None:
        return local
    spec = find_spec(parts[0])  # a top-level name: this looks and imports nothing
    if spec is None:
        return None
    if len(parts) == 1:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    return _source_in(map(Path, spec.submodule_search_locations or ()), parts[1:])


def _source_in(places: Iterable[Path], parts: list[str]) -> Path | None:
    for place in places:
        base = place.joinpath(*parts)
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return file
    return None


def _settings_node(path: Path) -> ast.expr | None:
    """Return the value of the last assignment to ``settings`` at the top level."""
    try:
        with tokenize.open(path) as file:  # honours the file's own coding line
            tree = ast.parse(file.read(), str(path))
    except SyntaxError as error:
        raise JobError(f"{path}:{error.lineno}: {type(error).__name__}: {error.msg}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{path}: cannot read the job file: {error}") from error
    found = None
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="settings")], value=value):
                found = value
            case ast.AnnAssign(target=ast.Name(id="settings"), value=ast.expr() as value):
                found = value
            case _:
                pass
    return found
