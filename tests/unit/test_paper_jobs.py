"""The paper's six models go through the real loop at full size, on data of the real form."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from imitated_data import write_imdb, write_pickled
from torch import Tensor, nn

import spectrain.examples.paper
from spectrain.coordinator.plan import make_plan
from spectrain.examples.paper.recipe import MeanOfWords, polynomial_decay
from spectrain.examples.paper.residual_lstm import ResidualLSTM
from spectrain.protocol.errors import DataError
from spectrain.protocol.job import load_job
from spectrain.protocol.settings import Settings
from spectrain.worker.pipeline import run_in_one_process

FOLDER = Path(spectrain.examples.paper.__file__).parent
ROOT = FOLDER.parents[1]
SHARED = {"__init__", "recipe"}


class Paper(NamedTuple):
    write: Callable[[Path], Path]
    parameters: int
    of_texts: bool = False


JOBS = {
    # 14,714,688 in the convolutions, as published, and three linear layers
    "vgg16": Paper(write_pickled, 14_714_688 + 2_101_248 + 16_781_312 + 40_970),
    # 60,192,808 as published; 3x3 and not 7x7 at the start, 10 classes and not 1,000
    "resnet152": Paper(write_pickled, 60_192_808 - 64 * 3 * (49 - 9) - 990 * 2049),
    # 42,679,816 as published, with 1,000 classes
    "inception_v4": Paper(write_pickled, 42_679_816 - 990 * 1537),
    "snn": Paper(write_pickled, 1024 * 3073 + 30 * 1024 * 1025 + 10 * 1025),
    # 3,152,384 in each of the base model's encoder layers
    "transformer": Paper(write_imdb, 10_000 * 512 + 6 * 3_152_384 + 2 * 513, of_texts=True),
    "residual_lstm": Paper(write_imdb, 10_000 * 512 + 10 * 4_724_224 + 2 * 513, of_texts=True),
}
OF_TEXTS = [name for name, paper in JOBS.items() if paper.of_texts]


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.py"


@pytest.mark.parametrize("name", JOBS)
def test_a_model_at_full_size_trains_in_a_pipeline(tmp_path: Path, name: str) -> None:
    paper = JOBS[name]
    hyper: dict[str, Any] = {"data": str(paper.write(tmp_path / "copy"))}
    if paper.of_texts:
        hyper["length"] = 16
    job = load_job(path_of(name))
    settings = Settings(
        job=str(job.path),
        run_dir="runs",
        stages=job.settings["stages"],
        batch_size=2,
        max_batches=1,
        hyper=hyper,
    )
    plan = make_plan(settings)
    before = job.build_model(settings.seed, hyper)
    assert sum(parameter.numel() for parameter in before.parameters()) == paper.parameters
    outcome = run_in_one_process(job, settings, plan.feed, plan.layer_counts)
    assert len(plan.layer_counts) == 4
    (result,) = outcome.batches
    assert math.isfinite(result.loss)
    (evaluation,) = outcome.evaluations
    assert 0 <= evaluation.metrics["accuracy"] <= 1
    assert outcome.state.keys() == before.state_dict().keys()
    for key, parameter in before.named_parameters():
        assert outcome.state[key].isfinite().all(), key
        assert not torch.equal(outcome.state[key], parameter), key


@pytest.mark.parametrize("name", JOBS)
def test_without_data_a_job_names_the_option(name: str) -> None:
    job = load_job(path_of(name))
    with pytest.raises(DataError, match=r"--set data=FOLDER"):
        job.build_datasets(0, job.check_hyper({}))


def test_the_six_jobs_are_the_documented_ones() -> None:
    documented = (ROOT / "docs" / "job-files.md").read_text()
    assert {path.stem for path in FOLDER.glob("*.py")} - SHARED == set(JOBS)
    assert all(f"(../examples/paper/{name}.py)" in documented for name in JOBS)


# -- recipe -------------------------------------------------------------------------------------


def test_the_learning_rate_rises_for_an_epoch_and_falls_with_the_square_of_what_is_left() -> None:
    factor = polynomial_decay({"epochs": 4, "batch_size": 100}, samples=450)  # 5 updates an epoch
    assert [factor(update) for update in (0, 4)] == pytest.approx([0.2, 0.64])
    assert [factor(update) for update in (10, 15, 20, 21)] == [0.25, 0.0625, 0, 0]


@pytest.mark.parametrize("name", JOBS)
def test_every_job_lets_its_learning_rate_fall_over_its_own_epochs(name: str) -> None:
    job = load_job(path_of(name))
    samples = 25_000 if name in OF_TEXTS else 50_000
    updates = job.settings["epochs"] * math.ceil(samples / job.settings["batch_size"])
    assert job.lr_schedule is not None
    assert job.lr_schedule(updates - 1) == pytest.approx(updates**-2)
    assert job.lr_schedule(updates) == 0


# -- models -------------------------------------------------------------------------------------


def small(name: str, **hyper: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return load_job(path_of(name)).build_model(0, hyper).eval()


@pytest.mark.parametrize("name", OF_TEXTS)
def test_padding_does_not_change_what_a_review_says(name: str) -> None:
    model = small(name, vocabulary=50, width=16, depth=2)
    words = torch.randint(1, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    padded = nn.functional.pad(words, (0, 6))
    with torch.no_grad():
        torch.testing.assert_close(model(words), model(padded))
        assert not torch.allclose(model(words), model(words.flip(1)))  # order counts


def test_the_mean_is_over_words_that_are_there() -> None:
    vectors = torch.tensor([[[1.0], [3.0], [100.0]], [[5.0], [100.0], [100.0]]])
    is_padding = torch.tensor([[False, False, True], [False, True, True]])
    assert MeanOfWords()((vectors, is_padding)).tolist() == [[2.0], [5.0]]


def test_the_residual_lstm_lets_its_input_through_the_output_gate() -> None:
    layer = ResidualLSTM(width=4, cells=6)
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    nn.init.zeros_(layer.project.weight)
    nn.init.constant_(layer.from_input.bias[-4:], 50.0)  # opens the gate
    outputs, _ = layer((x, torch.zeros(2, 5, dtype=torch.bool)))
    torch.testing.assert_close(outputs, x)


def test_the_residual_lstm_is_an_lstm_where_the_shortcut_adds_nothing() -> None:
    torch.manual_seed(0)
    layer, plain = ResidualLSTM(width=4, cells=4), nn.LSTM(4, 4, batch_first=True)
    nn.init.eye_(layer.project.weight)
    nn.init.zeros_(layer.output_peephole.weight)
    order = [0, 1, 2, 3]  # i, f, what goes into c, o: torch's order too
    assert layer.sizes == [4] * len(order)
    with torch.no_grad():
        plain.weight_ih_l0.copy_(layer.from_input.weight)
        plain.weight_hh_l0.copy_(layer.from_output.weight)
        plain.bias_ih_l0.copy_(layer.from_input.bias)
        plain.bias_hh_l0.zero_()
        x = torch.randn(2, 1, 4)  # after one word the shortcut would be in h
        outputs, _ = layer((x, torch.zeros(2, 1, dtype=torch.bool)))
        gate = torch.sigmoid(layer.from_input(x)[..., -4:])
        torch.testing.assert_close(outputs - gate * x, plain(x)[0])


def test_the_self_normalising_network_keeps_mean_and_variance() -> None:
    hidden = small("snn")[:-1]
    with torch.no_grad():
        activations: Tensor = hidden(torch.randn(64, 3, 32, 32))
    assert abs(activations.mean().item()) < 0.1
    assert activations.var().item() == pytest.approx(1, abs=0.2)


def test_inception_takes_pictures_of_75_pixels_and_no_fewer() -> None:
    picture = torch.zeros(1, 3, 32, 32)
    with torch.no_grad():
        assert small("inception_v4", side=75)(picture).shape == (1, 10)
        with pytest.raises(RuntimeError, match=r"Output size is too small"):
            small("inception_v4", side=74)(picture)


def test_the_last_blocks_of_inception_see_three_by_three_positions() -> None:
    model = small("inception_v4")
    before_pooling = model[: [type(layer) for layer in model].index(nn.AdaptiveAvgPool2d)]
    with torch.no_grad():
        assert before_pooling(torch.zeros(1, 3, 32, 32)).shape == (1, 1536, 3, 3)
