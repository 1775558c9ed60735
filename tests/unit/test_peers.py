"""The benchmark beside the peers: everybody trains the same model on the same batches."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from spectrain.coordinator.plan import make_plan, stage_rows
from spectrain.protocol.job import load_job
from spectrain.protocol.schedule import Kind, Op
from spectrain.protocol.settings import Settings

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
WORKS = ("mlp", "transformer")


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(PEERS)
    return importlib.import_module("work")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(PEERS)
    return importlib.import_module("device")


def settings(name: str, batch_size: int, stages: int = 2) -> Settings:
    return Settings(
        job=str(PEERS / "compute_job.py"), run_dir="", stages=stages, batch_size=batch_size,
        epochs=3, hyper={"work": name},
    )  # fmt: skip


@pytest.mark.parametrize("name", WORKS)
def test_the_job_file_has_the_model_of_the_peers(work: ModuleType, name: str) -> None:
    ours = load_job(PEERS / "compute_job.py").build_model(work.SEED, {"work": name})
    theirs = torch.nn.Sequential(*work.WORKS[name].parts())
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key


@pytest.mark.parametrize("name", WORKS)
def test_the_feed_gives_the_batches_of_the_peers(work: ModuleType, name: str) -> None:
    plan = make_plan(settings(name, work.WORKS[name].batch_size))
    batch = work.WORKS[name].batches()
    for number in (0, 1, plan.work.epoch_batches):  # the last begins the second epoch
        ours = plan.feed.batch(Op(Kind.FORWARD, number))
        inputs, targets = batch(number)
        assert torch.equal(ours.inputs, inputs)
        assert torch.equal(ours.targets, targets)


@pytest.mark.parametrize("name", WORKS)
def test_our_stages_have_the_weights_of_the_peers_stages(work: ModuleType, name: str) -> None:
    of = settings(name, work.WORKS[name].batch_size)
    ours = [row["parameters"] for row in stage_rows(make_plan(of), of)]
    stages = [work.WORKS[name].stage(index, 2) for index in range(2)]
    assert ours == [sum(param.numel() for param in stage.parameters()) for stage in stages]


def test_stages_put_together_are_the_whole_model(work: ModuleType) -> None:
    whole = torch.nn.Sequential(*work.WORKS["mlp"].parts())
    inputs, _ = work.WORKS["mlp"].batches()(0)
    value = inputs
    for index in range(4):
        value = work.WORKS["mlp"].stage(index, 4)(value)
    assert torch.equal(value, whole(inputs))


def test_devices_hand_on_memory_of_the_size_asked_for(device: ModuleType) -> None:
    work = device.emulated(2, forward_ms=0, backward_ms=0, megabytes=1)
    first, second = work.parts()
    inputs, targets = work.batches()(0)
    sent = first(inputs)
    received = sent.detach().requires_grad_()
    loss = work.loss(second(received), targets)
    loss.backward()
    sent.backward(received.grad)
    assert sent.nbytes == received.grad.nbytes == 2**20
    assert first.weight.grad == second.weight.grad == 1


def test_a_device_adds_no_copies(device: ModuleType) -> None:
    work = device.emulated(2, forward_ms=0, backward_ms=0, megabytes=1)
    received = torch.zeros(work.batch_size, 2**18 // work.batch_size, requires_grad=True)
    sent = work.parts()[1](received)
    gradient = torch.ones_like(sent)
    sent.backward(gradient)
    assert sent.data_ptr() == received.data_ptr()
    assert received.grad is not None
    assert received.grad.data_ptr() == gradient.data_ptr()


def test_devices_in_twice_as_many_parts_sleep_half_as_long_each(device: ModuleType) -> None:
    work = device.emulated(2, forward_ms=10, backward_ms=20, megabytes=1, parts=4)
    assert [part.forward_s for part in work.parts()] == [0.005] * 4
    assert [part.backward_s for part in work.parts()] == [0.01] * 4
    assert [part.is_first for part in work.parts()] == [True, False, False, False]
