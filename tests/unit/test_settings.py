"""What one run was asked to do: every mistake is told, and all of them at once."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from spectrain.protocol.errors import SettingsError
from spectrain.protocol.methods import METHODS
from spectrain.protocol.schedule import Schedule
from spectrain.protocol.settings import Settings


def make(**changes: Any) -> Settings:
    return Settings(**{"job": "job.py", "run_dir": "/run", "stages": 2, **changes})


def least(method: str) -> int:
    """Return the fewest micro-batches that the method works with on two stages."""
    return METHODS[method].least_microbatches(2)


def problems(**changes: Any) -> list[str]:
    """Return the lines of what is wrong."""
    with pytest.raises(SettingsError) as raised:
        make(**changes)
    return str(raised.value).split("\n")


FULL = make(
    hyper={"lr": 0.1, "name": "x", "deep": True, "width": 3}, method="pipeoptim", microbatches=4,
    predictor="msnag", horizon="exact", predict_lr="scheduled", device="cuda", precision="bf16",
    batch_size=32, epochs=7, max_batches=9, evaluate=False, seed=5, partition=(3, 5), threads=2,
    snapshot_every=0, log_memory_bytes=0, max_restarts=0, start_timeout_s=1, wait_timeout_s=2.5,
    heartbeat_s=0.5, lease_s=1, grace_s=0.1,
)  # fmt: skip


def test_every_setting_but_three_has_a_default() -> None:
    assert make().to_dict() | {"job": "", "run_dir": "", "stages": 0} == {
        "job": "", "run_dir": "", "stages": 0, "hyper": {}, "method": "spectrain",
        "microbatches": 1, "predictor": "velocity", "horizon": "paper", "predict_lr": "current",
        "device": "cpu", "precision": "fp32", "batch_size": 64, "epochs": 1,
        "max_batches": None, "evaluate": True, "seed": 0, "partition": "auto", "threads": 1,
        "snapshot_every": None, "log_memory_bytes": 1 << 30, "max_restarts": 100,
        "start_timeout_s": 120, "wait_timeout_s": 120, "heartbeat_s": 1, "lease_s": 10,
        "grace_s": 10,
    }  # fmt: skip


@pytest.mark.parametrize("settings", [make(), FULL])
def test_settings_survive_json(settings: Settings) -> None:
    assert Settings.from_json(settings.to_json()) == settings
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


def test_the_full_example_changes_every_setting() -> None:
    needed = {"job", "run_dir", "stages"}
    plain = make()
    assert all(
        getattr(FULL, field.name) != getattr(plain, field.name)
        for field in fields(Settings)
        if field.name not in needed
    )


def test_settings_are_one_line_of_json() -> None:
    assert "\n" not in FULL.to_json()


def test_unknown_settings_are_all_named() -> None:
    with pytest.raises(SettingsError, match="unknown settings: colour, size"):
        Settings.from_dict({**make().to_dict(), "size": 3, "colour": "red"})


@pytest.mark.parametrize("name", ["stages", "microbatches", "batch_size", "epochs", "threads"])
def test_counts_are_at_least_one(name: str) -> None:
    assert f"{name} = 0: must be at least 1" in problems(**{name: 0})


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
@pytest.mark.parametrize("name", ["start_timeout_s", "wait_timeout_s", "heartbeat_s", "grace_s"])
def test_times_are_above_zero(name: str, value: float) -> None:
    assert f"{name} = {value}: must be above 0 seconds" in problems(**{name: value})


@pytest.mark.parametrize("name", ["snapshot_every", "log_memory_bytes", "max_restarts"])
def test_what_may_be_none_or_nothing_is_not_negative(name: str) -> None:
    assert problems(**{name: -1}) == [f"{name} = -1: must not be negative"]
    assert getattr(make(**{name: 0}), name) == 0


def test_a_limit_of_batches_is_at_least_one() -> None:
    assert problems(max_batches=0) == ["max_batches = 0: at least 1"]


def test_a_lease_outlasts_two_heartbeats() -> None:
    assert problems(heartbeat_s=1.0, lease_s=1.9) == [
        "lease_s = 1.9 must be at least twice heartbeat_s = 1.0"
    ]
    assert make(heartbeat_s=1.0, lease_s=2.0).lease_s == 2


@pytest.mark.parametrize(
    ("name", "rule"),
    [("device", "must be cpu or cuda"), ("precision", "must be fp32 or bf16"),
     ("method", f"must be {', '.join([*METHODS][:-1])} or sync"),
     ("predictor", "must be velocity, msnag or last-delta"),
     ("horizon", "must be paper or exact"), ("predict_lr", "must be current or scheduled"),
     ("partition", "must be auto, equal, or layer counts such as 8,10,10")],
)  # fmt: skip
def test_words_are_among_those_that_are_known(name: str, rule: str) -> None:
    assert problems(**{name: "odd"}) == [f"{name} = 'odd': {rule}"]


def test_micro_batches_need_a_method_that_splits_batches() -> None:
    (problem,) = problems(method="stash", microbatches=2)
    assert problem == (
        "microbatches = 2: stash updates after every mini-batch; methods that split it are "
        "spectrain, spectrain-damped, pipeoptim, xpipe, paci, 2bw, sync"
    )
    assert make(method="spectrain", microbatches=2).microbatches == 2


@pytest.mark.parametrize(("method", "least"), [("2bw", 3), ("paci", 2)])
def test_some_methods_need_several_micro_batches(method: str, least: int) -> None:
    assert problems(method=method, stages=4, microbatches=least - 1) == [
        f"microbatches = {least - 1}: {method} on 4 stages needs at least {least}"
    ]
    assert make(method=method, stages=4, microbatches=least).microbatches == least


@pytest.mark.parametrize("method", ["vanilla", "stash", "pipemare", "sync"])
def test_a_way_to_predict_is_for_methods_that_predict(method: str) -> None:
    assert problems(method=method, predictor="msnag") == [
        f"predictor = msnag: {method} does not predict in a way to choose"
    ]


def test_the_last_update_has_no_learning_rate_to_foresee() -> None:
    assert problems(predictor="last-delta", predict_lr="scheduled") == [
        "predict_lr = scheduled: last-delta takes the last update, and has no lr"
    ]


@pytest.mark.parametrize("counts", [(), (3,), (3, 5, 1), (8, 0), (3, "5"), (3, 5.0), (3, True)])
def test_layer_counts_are_one_for_each_stage(counts: tuple[Any, ...]) -> None:
    rule = "must give a layer count of at least 1 for each of the 2 stages"
    assert problems(partition=counts) == [f"partition = {list(counts)}: {rule}"]


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("batch_size", "16", "a whole number"),
        ("stages", 2.5, "a whole number"),
        ("epochs", True, "a whole number"),
        ("seed", None, "a whole number"),
        ("max_batches", 1.5, "a whole number"),
        ("snapshot_every", "auto", "a whole number"),
        ("lease_s", "10", "a number of seconds"),
        ("evaluate", 1, "True or False"),
        ("method", ["sync"], "text"),
        ("partition", 3, "auto, equal, or layer counts such as 8,10,10"),
    ],
)
def test_values_of_another_type_are_told_and_not_compared(
    name: str, value: object, rule: str
) -> None:
    assert problems(**{name: value}) == [f"{name} = {value!r}: must be {rule}"]


def test_all_mistakes_are_told_at_once() -> None:
    found = problems(epochs=0, method="odd", lease_s=1, partition=(1,))
    assert [line.split(" ")[0] for line in found] == ["epochs", "lease_s", "method", "partition"]
    assert len(problems(epochs="3", seed=None)) == 2


def test_the_method_decides_the_schedule() -> None:
    schedules = {name: make(method=name, microbatches=least(name)).schedule for name in METHODS}
    assert schedules.pop("sync") is Schedule.FLUSHED
    assert set(schedules.values()) == {Schedule.ASYNCHRONOUS}


@pytest.mark.parametrize(
    ("changes", "repairs"),
    [({}, True), ({"max_restarts": 0}, False), ({"snapshot_every": 0}, False)],
)
def test_workers_are_replaced_where_there_are_snapshots_and_restarts_left(
    changes: dict[str, int], *, repairs: bool
) -> None:
    assert make(**changes).repairs is repairs
