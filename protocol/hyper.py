"""Hyper-parameters: which function takes which, and text from ``--set`` as values. Pure.

A hyper-parameter is a parameter of one of the job's functions; its annotation or else its default
says its type. Nothing here runs the job's functions.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from .errors import JobError
from .job_file import did_you_mean

__all__ = ["HyperValue", "Parameters", "convert", "take"]

HyperValue: TypeAlias = bool | int | float | str
"""What ``--set`` can pass to a job's function."""

_EMPTY = inspect.Parameter.empty
_KINDS: dict[str, type[HyperValue]] = {"bool": bool, "int": int, "float": float, "str": str}
_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


class Parameters:
    """The parameters of one function that can be given by name.

    Attributes:
        defaults: by name; ``inspect.Parameter.empty`` where there is none.
        kinds: by name, the type its values must have; None where nothing says so.
        takes_any: whether the function has ``**kwargs`` and so takes every name.
    """

    def __init__(self, function: Callable[..., Any], *, skip: int = 0) -> None:
        """Look at ``function``'s signature without its first ``skip`` positional parameters."""
        parameters = list(inspect.signature(function).parameters.values())[skip:]
        named = [
            parameter
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        self.defaults = {parameter.name: parameter.default for parameter in named}
        self.kinds = {parameter.name: _kind(parameter) for parameter in named}
        self.takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def take(parameters: Parameters, hyper: Mapping[str, HyperValue]) -> dict[str, HyperValue]:
    """Return the part of ``hyper`` that a function takes."""
    return {
        name: value
        for name, value in hyper.items()
        if parameters.takes_any or name in parameters.defaults
    }


def convert(
    hyper: Mapping[str, HyperValue], functions: Mapping[str, Parameters]
) -> dict[str, HyperValue]:
    """Check names and turn text into values; values that fit already are left alone.

    Args:
        hyper: by parameter name; text where it comes from ``--set``.
        functions: the parameters of the job's functions, by the function's name.

    Returns:
        The same names with values of the type of the parameter: bool, int, float or str. Where
        neither an annotation nor a default says one, text that is a Python number or boolean
        becomes one. Converting twice is converting once.

    Raises:
        JobError: a name that no function takes, a text that is no value of its type, or a
            parameter without default that is not set.
    """
    known: dict[str, Any] = {}
    kinds: dict[str, type | None] = {}
    for parameters in functions.values():
        for name, default in parameters.defaults.items():
            known.setdefault(name, default)
            kinds.setdefault(name, parameters.kinds[name])
    takes_any = any(parameters.takes_any for parameters in functions.values())
    for name in hyper:
        if name not in known and not takes_any:
            raise JobError(
                f"--set {name}: no function of the job has a parameter {name!r}"
                f"{did_you_mean(name, known)}. Known: {_listing(known)}"
            )
    for function, parameters in functions.items():
        for name, default in parameters.defaults.items():
            if default is _EMPTY and name not in hyper:
                raise JobError(
                    f"{function}() needs a value for {name!r}, which has no default: "
                    f"pass --set {name}=VALUE or give it a default"
                )
    return {name: _value(name, value, kinds.get(name)) for name, value in hyper.items()}


def _kind(parameter: inspect.Parameter) -> type | None:
    """Prefer a plain annotation to the default: torch's ``momentum: float = 0`` is no int."""
    annotation = getattr(parameter.annotation, "__name__", parameter.annotation)
    if annotation in _KINDS:
        return _KINDS[annotation]
    no_hint = parameter.default is None or parameter.default is _EMPTY
    return None if no_hint else type(parameter.default)


def _value(name: str, value: HyperValue, kind: type | None) -> HyperValue:
    if kind is None:
        return _guess(value) if isinstance(value, str) else value
    if type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(value, str) and kind in (bool, int, float):
        try:
            return _BOOLEANS[value.lower()] if kind is bool else kind(value)
        except (KeyError, ValueError):
            pass  # the same refusal as for any other value that does not fit
    raise JobError(f"--set {name}={value}: must be of type {kind.__name__}, as the parameter is")


def _guess(text: str) -> HyperValue:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    # A quoted string stays as it is: to unquote it would make a second conversion differ.
    return value if isinstance(value, (bool, int, float)) else text


def _listing(known: Mapping[str, Any]) -> str:
    if not known:
        return "none, the functions have no parameters"
    return ", ".join(
        name if default is _EMPTY else f"{name}={default!r}" for name, default in known.items()
    )
