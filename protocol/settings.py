"""Everything one run was asked to do: one frozen record, checked once, the same in every process.

Where a value comes from (command line, environment, the job's own ``settings``) is settled by the
launcher before this record exists; nothing here reads files or the environment.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .errors import SettingsError
from .methods import METHODS, PREDICTORS, Horizon, PredictLr, refuse_microbatches
from .schedule import Schedule

__all__ = ["Device", "Precision", "Settings"]

Device = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run, resolved.

    Attributes:
        job: path of the job file, or a dotted module name; the same on every host.
        hyper: what ``--set`` passes to the job's functions, by parameter name.
        stages: how many parts the model is cut into, one worker each.
        method: a key of ``METHODS``.
        microbatches: micro-batches per mini-batch; the method says how many it can take.
        predictor: a key of ``PREDICTORS``, for methods that look ahead.
        horizon: how long a slot of the pipeline is taken to be, for methods that aim at a later
            moment than a batch's own update: as in the paper, or with backwards of twice a forward.
        predict_lr: whether looking ahead takes the coming update's learning rate for all updates,
            or goes by the job's schedule.
        device: what the stages compute on.
        precision: type of the live weights; the clean ones are always fp32.
        batch_size: samples per mini-batch.
        epochs: passes over the training set.
        max_batches: stop after so many mini-batches although epochs are left; None: do not.
        evaluate: whether the test set is run through at the end of each epoch.
        seed: initial weights, order of the samples and every random draw come from it.
        partition: "auto" balances measured layer costs, "equal" counts layers, or layer counts
            per stage.
        threads: intra-op threads of a worker on CPU. Sums of floats depend on it, so it is part
            of the run and not of the machine.
        run_dir: absolute path of the run directory on every host.
        snapshot_every: updates from one snapshot round to the next; 0: none; None: chosen from
            what snapshots and updates are measured to cost.
        log_memory_bytes: host memory a worker may use to remember what it sent, for each of its
            two outgoing streams; when it is full the worker waits for the next commit.
        max_restarts: how often one stage may be started again; 0 ends the run with the first
            worker that dies.
        start_timeout_s: from launch until every worker is ready.
        wait_timeout_s: how long a stage may wait for a neighbour before the run is given up.
        heartbeat_s: how often every process says that it lives.
        lease_s: how long a silent process is believed to live.
        grace_s: from asking a process to end until it is killed.
    """

    job: str
    run_dir: str
    stages: int
    hyper: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    method: str = "spectrain"
    microbatches: int = 1
    predictor: str = "velocity"
    horizon: Horizon = "paper"
    predict_lr: PredictLr = "current"
    device: Device = "cpu"
    precision: Precision = "fp32"
    batch_size: int = 64
    epochs: int = 1
    max_batches: int | None = None
    evaluate: bool = True
    seed: int = 0
    partition: str | tuple[int, ...] = "auto"
    threads: int = 1
    snapshot_every: int | None = None
    log_memory_bytes: int = 1 << 30
    max_restarts: int = 100
    start_timeout_s: float = 120.0
    wait_timeout_s: float = 120.0
    heartbeat_s: float = 1.0
    lease_s: float = 10.0
    grace_s: float = 10.0

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise SettingsError("\n".join(problems))

    @property
    def repairs(self) -> bool:
        """Whether workers that die are replaced; without snapshots nobody could be."""
        return self.max_restarts > 0 and self.snapshot_every != 0

    @property
    def schedule(self) -> Schedule:
        """The order of ops that the method runs under."""
        return METHODS[self.method].schedule

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        return asdict(self)

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """Build from ``to_dict``'s result, as it looks after JSON.

        Raises:
            SettingsError: a value is unknown or out of its range.
        """
        known = cls.__dataclass_fields__
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise SettingsError(f"unknown settings: {', '.join(unknown)}")
        partition = values.get("partition", "auto")
        if isinstance(partition, list):
            partition = tuple(partition)
        fields: dict[str, Any] = {**values, "partition": partition}
        return cls(**fields)

    @classmethod
    def from_json(cls, line: str) -> Settings:
        """Read ``to_json``'s line."""
        return cls.from_dict(json.loads(line))


_WHOLE = frozenset(
    (
        "stages", "microbatches", "batch_size", "epochs", "seed", "threads", "log_memory_bytes",
        "max_restarts",
    )
)  # fmt: skip
_WHOLE_OR_NONE = frozenset(("max_batches", "snapshot_every"))
_SECONDS = ("start_timeout_s", "wait_timeout_s", "heartbeat_s", "lease_s", "grace_s")
_CHOICES: Mapping[str, Collection[str]] = {
    "device": ("cpu", "cuda"),
    "precision": ("fp32", "bf16"),
    "method": METHODS,
    "predictor": PREDICTORS,
    "horizon": ("paper", "exact"),
    "predict_lr": ("current", "scheduled"),
}
_WORDS = ("job", "run_dir", *_CHOICES)


def _type_problems(settings: Settings) -> list[str]:
    """Tell of values of another type: a job's ``settings`` may hold any literal."""
    rules: dict[str, tuple[tuple[type, ...], str]] = {
        **dict.fromkeys(_WHOLE, ((int,), "a whole number")),
        **dict.fromkeys(_WHOLE_OR_NONE, ((int, type(None)), "a whole number")),
        **dict.fromkeys(_SECONDS, ((int, float), "a number of seconds")),
        **dict.fromkeys(_WORDS, ((str,), "text")),
        "evaluate": ((bool,), "True or False"),
        "partition": ((str, tuple), "auto, equal, or layer counts such as 8,10,10"),
    }
    problems: list[str] = []
    for name in Settings.__dataclass_fields__:
        types, rule = rules.get(name, ((object,), ""))
        value = getattr(settings, name)
        # Python takes True for a number; nobody who writes it means one.
        is_odd = isinstance(value, bool) and bool not in types and object not in types
        if is_odd or not isinstance(value, types):
            problems.append(f"{name} = {value!r}: must be {rule}")
    return problems


def _problems(settings: Settings) -> list[str]:
    problems = _type_problems(settings)
    if problems:
        return problems  # comparing such values would only raise

    def need(condition: bool, text: str) -> None:  # noqa: FBT001
        if not condition:
            problems.append(text)

    for name, least in (
        ("stages", 1), ("microbatches", 1), ("batch_size", 1), ("epochs", 1), ("threads", 1)
    ):  # fmt: skip
        value = getattr(settings, name)
        need(value >= least, f"{name} = {value}: must be at least {least}")
    for name in _SECONDS:
        value = getattr(settings, name)
        need(value > 0, f"{name} = {value}: must be above 0 seconds")
    for name in ("snapshot_every", "log_memory_bytes", "max_restarts"):
        value = getattr(settings, name)
        need(value is None or value >= 0, f"{name} = {value}: must not be negative")
    if settings.max_batches is not None:
        need(settings.max_batches >= 1, f"max_batches = {settings.max_batches}: at least 1")
    need(
        settings.lease_s >= 2 * settings.heartbeat_s,
        f"lease_s = {settings.lease_s} must be at least twice heartbeat_s = {settings.heartbeat_s}",
    )
    for name, words in _CHOICES.items():
        value = getattr(settings, name)
        *others, last = words
        need(value in words, f"{name} = {value!r}: must be {', '.join(others)} or {last}")
    if settings.method in METHODS and settings.stages >= 1:
        problems.extend(_method_problems(settings))
    problems.extend(_partition_problems(settings))
    return problems


def _method_problems(settings: Settings) -> list[str]:
    method, predictor = settings.method, settings.predictor
    problems: list[str] = []
    if settings.microbatches >= 1:
        refusal = refuse_microbatches(method, settings.stages, settings.microbatches)
        problems.extend([] if refusal is None else [refusal])
    is_known = predictor in PREDICTORS
    if is_known and predictor != "velocity" and predictor not in METHODS[method].predictors:
        problems.append(f"predictor = {predictor}: {method} does not predict in a way to choose")
    if predictor == "last-delta" and settings.predict_lr == "scheduled":
        problems.append("predict_lr = scheduled: last-delta takes the last update, and has no lr")
    return problems


def _partition_problems(settings: Settings) -> list[str]:
    partition = settings.partition
    if isinstance(partition, str):
        if partition in ("auto", "equal"):
            return []
        return [f"partition = {partition!r}: must be auto, equal, or layer counts such as 8,10,10"]
    are_counts = all(type(count) is int and count >= 1 for count in partition)
    if len(partition) != settings.stages or not are_counts:
        rule = f"must give a layer count of at least 1 for each of the {settings.stages} stages"
        return [f"partition = {list(partition)}: {rule}"]
    return []
