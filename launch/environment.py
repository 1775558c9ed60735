"""Decides which environment variables reach a host's processes, and what workers get on top. Pure.

Reads and changes no environment itself: mappings in, mappings out. Values are never quoted,
expanded or trimmed on the way: they arrive byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from ..protocol.errors import SettingsError

__all__ = ["ALLOWED", "collect", "describe_changes", "redact", "worker_environment"]

ALLOWED: tuple[str, ...] = (
    "CUDA_*", "GLOO_*", "HF_*", "LD_LIBRARY_PATH", "MLFLOW_*", "NCCL_*", "OMP_*", "PATH",
    "PYTHON*", "PYTORCH_*", "SPECTRAIN_*", "TORCH_*", "WANDB_*",
)  # fmt: skip
"""What every host gets of the launcher's environment without being asked."""

_OF_THE_HOST = {"CUDA_VISIBLE_DEVICES"}  # says which GPUs *this* host offers, not the others
_SECRET_ENDINGS = ("KEY", "TOKEN", "SECRET")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"(?:export\s+)?([^\s=]+)\s*=\s*(.*)", re.DOTALL)
_SINGLE_QUOTED = re.compile(r"'([^']*)'\s*(?:#.*)?")
_DOUBLE_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"\s*(?:#.*)?')
_TRAILING_COMMENT = re.compile(r"\s+#.*|\s+$")
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}


def collect(
    environ: Mapping[str, str],
    names: Iterable[str] = (),
    env_file_text: str = "",
    source: str = "--env-file",
) -> dict[str, str]:
    r"""Choose what the processes of every host get of the launcher's environment.

    Args:
        environ: the launcher's environment.
        names: what ``-x`` gave: ``NAME`` takes the launcher's value, ``NAME=value`` sets one.
        env_file_text: text of the environment file: ``NAME=value`` a line, perhaps after
            ``export``; ``#`` comments. Bare values end before `` #``; ``'...'`` is literal; in
            ``"..."`` a backslash makes ``\n``, ``\t``, ``\r`` or keeps the next character.
            Nothing is expanded.
        source: the file's name for error messages.

    Returns:
        Values by name. ``-x`` wins over the file, the file over the launcher's environment.

    Raises:
        SettingsError: all mistakes in ``names`` and in the file.
    """
    problems: list[str] = []
    collected = {name: value for name, value in environ.items() if _is_allowed(name)}
    collected.update(_parse_env_file(env_file_text, source, problems))
    for text in names:
        name, equals, value = text.partition("=")
        if not _NAME.fullmatch(name):
            problems.append(f"-x {text!r}: expected NAME or NAME=value; {_name_rule(name)}")
        elif equals:
            collected[name] = value
        elif name in environ:
            collected[name] = environ[name]
        else:
            problems.append(f"-x {name}: not set here; set it, or give -x {name}=value")
    if problems:
        raise SettingsError("\n".join(problems))
    return collected


def redact(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a log: values of secrets replaced by ``***``, sorted by name."""
    return {
        name: "***" if _is_secret(name) else value for name, value in sorted(environment.items())
    }


def worker_environment(
    base: Mapping[str, str],
    passed: Mapping[str, str],
    *,
    stage: int,
    stages: int,
    slot: int,
    workers_on_host: int,
    host_index: int,
    run_id: str,
    run_dir: str,
    coordinator: tuple[str, int] | None,
) -> dict[str, str]:
    """Return what to set for one worker on top of its host's environment.

    What the user passed or the host has is never overwritten, except by the variables that say
    which worker this is: those that torch's own launcher sets, and ours.

    Args:
        base: the environment that the worker has anyway.
        passed: what ``collect`` returned in the launcher.
        stage: the worker's stage, which is its rank.
        stages: stages of the run.
        slot: the worker's place on its host, from 0.
        workers_on_host: slots of this host.
        host_index: position of the host in the user's list.
        run_id: name of the run.
        run_dir: path of the run directory on this host.
        coordinator: address and port; None where the run opens no port.
    """
    values = dict(passed)
    theirs = {*base, *passed}
    defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if workers_on_host > 1:
        defaults["OMP_NUM_THREADS"] = "1"  # else each worker starts one thread per core
    values.update({name: value for name, value in defaults.items() if name not in theirs})
    values.update(
        RANK=str(stage),
        WORLD_SIZE=str(stages),
        LOCAL_RANK=str(slot),
        LOCAL_WORLD_SIZE=str(workers_on_host),
        NODE_RANK=str(host_index),
        GROUP_RANK=str(host_index),
        SPECTRAIN_RUN_ID=run_id,
        SPECTRAIN_RUN_DIR=run_dir,
        SPECTRAIN_STAGE=str(stage),
        SPECTRAIN_NUM_STAGES=str(stages),
    )
    if coordinator is not None:
        address, port = coordinator
        values.update(
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
            SPECTRAIN_COORDINATOR=f"[{address}]:{port}" if ":" in address else f"{address}:{port}",
        )
    return values


def describe_changes(
    base: Mapping[str, str], passed: Mapping[str, str], values: Mapping[str, str]
) -> tuple[str, ...]:
    """Return one line for the log per variable that was set unasked or replaced the user's.

    Args:
        base: as given to ``worker_environment``.
        passed: as given to ``worker_environment``.
        values: what it returned.
    """
    users = {**base, **passed}
    lines: list[str] = []
    for name, value in redact(values).items():
        if name not in users:
            lines.append(f"{name}={value} (was not set)")
        elif users[name] != values[name]:
            lines.append(f"{name}={value} (was {redact({name: users[name]})[name]})")
    return tuple(lines)


def _is_allowed(name: str) -> bool:
    return name not in _OF_THE_HOST and any(fnmatchcase(name, pattern) for pattern in ALLOWED)


def _is_secret(name: str) -> bool:
    upper = name.upper()
    return "PASSWORD" in upper or upper.rpartition("_")[2] in _SECRET_ENDINGS


def _name_rule(name: str) -> str:
    return f"the name {name!r} may only have letters, digits and _, and start with no digit"


def _parse_env_file(text: str, source: str, problems: list[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    lines = re.split(r"\r\n?|\n", text.removeprefix("\ufeff"))
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        assignment = _ASSIGNMENT.fullmatch(line)
        # The line is not repeated in these messages: it may hold a secret.
        if assignment is None:
            problems.append(f"{source}:{number}: expected NAME=value, perhaps after export")
            continue
        name, raw = assignment.groups()
        value = _parse_value(raw)
        if not _NAME.fullmatch(name):
            problems.append(f"{source}:{number}: {_name_rule(name)}")
        elif value is None:
            problems.append(
                f"{source}:{number}: the quotes around the value of {name} are not closed, or "
                'something follows them; inside "..." write \\" for a quote'
            )
        else:
            values[name] = value
    return values


def _parse_value(raw: str) -> str | None:
    """Read the right side of an assignment; None where its quotes are wrong."""
    if raw.startswith("'"):
        match = _SINGLE_QUOTED.fullmatch(raw)
        return match and match[1]
    if raw.startswith('"'):
        match = _DOUBLE_QUOTED.fullmatch(raw)
        return match and _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), match[1])
    return _TRAILING_COMMENT.sub("", raw)
