"""The shipped examples are complete jobs: they load, learn, and know nothing of us."""

from __future__ import annotations

import ast
import gzip
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spectrain.examples
from spectrain.coordinator.feed import Feed
from spectrain.protocol.errors import JobError
from spectrain.protocol.job import Job, load_job
from spectrain.protocol.schedule import Kind, Op

torch.set_num_threads(1)

FOLDER = Path(spectrain.examples.__file__).parent
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.name != "__init__.py")
SMALL_TEXT = {"text": __file__, "width": 32, "depth": 2, "context": 16, "lr": 0.01}


def trained(
    job: Job, hyper: dict[str, Any], batches: int
) -> tuple[nn.Sequential, Feed, list[float]]:
    """Train in one process, as plain PyTorch would."""
    model = job.build_model(0, hyper)
    train, test = job.build_datasets(0, hyper)
    feed = Feed(train, test, batch_size=32, seed=0, epochs=10_000, max_batches=batches)
    optimizer = job.build_optimizer(list(model.parameters()), hyper)
    losses: list[float] = []
    for batch in range(batches):
        data = feed.batch(Op(Kind.FORWARD, batch))
        feed.part("inputs", Op(Kind.FORWARD, batch))
        feed.part("targets", Op(Kind.FORWARD, batch))
        optimizer.zero_grad()
        loss = job.loss(model(data.inputs), data.targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, feed, losses


def metrics_of(job: Job, model: nn.Sequential, feed: Feed) -> dict[str, float]:
    assert job.metrics is not None
    sums: dict[str, float] = {}
    samples = 0
    model.eval()
    with torch.no_grad():
        for index in range(feed.work.evaluation_batches):
            data = feed.batch(Op(Kind.EVALUATE, 0, index))
            samples += data.samples
            for name, value in job.metrics(model(data.inputs), data.targets).items():
                sums[name] = sums.get(name, 0.0) + value * data.samples
    return {name: value / samples for name, value in sums.items()}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_imports_nothing_of_ours(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        assert not any(name.startswith("spectrain") for name in names)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_enough_layers_for_its_stages(path: Path) -> None:
    job = load_job(path)
    assert len(job.flatten(job.build_model(0, {}))) >= job.settings["stages"]


def test_the_examples_are_the_documented_ones() -> None:
    assert [path.stem for path in EXAMPLES] == ["char_lm", "digits", "fashion_cnn"]


# -- digits -------------------------------------------------------------------------------------


def test_digits_are_all_there_once_and_scaled_to_one() -> None:
    train, test = load_job(FOLDER / "digits.py").build_datasets(0, {})
    assert (len(train), len(test)) == (1437, 360)
    images = torch.cat([train.tensors[0], test.tensors[0]])
    assert images.shape == (1797, 64)
    assert (images.min().item(), images.max().item()) == (0.0, 1.0)
    assert len(images.unique(dim=0)) == 1797


def test_digits_have_eight_linear_layers() -> None:
    job = load_job(FOLDER / "digits.py")
    layers = [layer for _, layer in job.flatten(job.build_model(0, {}))]
    assert sum(isinstance(layer, nn.Linear) for layer in layers) == 8


def test_digits_are_learnt() -> None:
    job = load_job(FOLDER / "digits.py")
    model, feed, _ = trained(job, {"width": 64}, batches=150)
    assert metrics_of(job, model, feed)["accuracy"] > 0.8


# -- fashion ------------------------------------------------------------------------------------


def idx(values: Tensor) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.dim()]) + sizes + bytes(values.flatten().tolist())


@pytest.fixture
def fashion_root(tmp_path: Path) -> Path:
    """A set in the real one's form: 64 images, each as bright as its class."""
    labels = torch.arange(64) % 10
    images = (labels * 25).to(torch.uint8).view(-1, 1, 1).expand(64, 28, 28)
    for split in ("train", "t10k"):
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            path = tmp_path / f"{split}-{name}-ubyte.gz"
            path.write_bytes(gzip.compress(idx(values)))
    return tmp_path


def test_fashion_is_read_from_idx_files(fashion_root: Path) -> None:
    train, test = load_job(FOLDER / "fashion_cnn.py").build_datasets(0, {"root": str(fashion_root)})
    assert (len(train), len(test)) == (64, 64)
    image, label = train[13]
    assert image.shape == (1, 28, 28)
    assert label.item() == 3
    assert image.unique().item() == pytest.approx((75 / 255 - 0.286) / 0.353)


def test_fashion_learns(fashion_root: Path) -> None:
    job = load_job(FOLDER / "fashion_cnn.py")
    _, _, losses = trained(job, {"root": str(fashion_root), "width": 4, "lr": 0.05}, batches=30)
    assert losses[-1] < losses[0] / 2


def test_fashion_has_batch_norm() -> None:
    model = load_job(FOLDER / "fashion_cnn.py").build_model(0, {})
    assert any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())


def test_a_missing_fashion_set_says_how_to_install_it(tmp_path: Path) -> None:
    job = load_job(FOLDER / "fashion_cnn.py")
    with pytest.raises(JobError, match="apt-get install dataset-fashion-mnist"):
        job.build_datasets(0, {"root": str(tmp_path)})


@pytest.mark.parametrize("content", [b"\0\0\x0d\x01\0\0\0\x02ab", b"\0\0\x08\x01\0\0\0\x02abc"])
def test_a_file_of_another_form_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
    job = load_job(FOLDER / "fashion_cnn.py")
    with pytest.raises(JobError, match="is not an IDX file of unsigned bytes"):
        job.build_datasets(0, {"root": str(tmp_path)})


# -- char_lm ------------------------------------------------------------------------------------


def test_the_language_model_sees_no_byte_that_comes_later() -> None:
    model = load_job(FOLDER / "char_lm.py").build_model(0, SMALL_TEXT)
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 9:] += 1
    before, after = model(tokens), model(changed % 256)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_the_targets_are_the_text_one_byte_later() -> None:
    job = load_job(FOLDER / "char_lm.py")
    train, test = job.build_datasets(0, SMALL_TEXT)
    content = list(Path(__file__).read_bytes())
    assert len(train) > len(test) > 0
    tokens, targets = train[2]
    assert tokens.tolist() == content[32:48]
    assert targets.tolist() == content[33:49]
    assert train[len(train) - 1][1].shape == (16,)


def test_the_default_text_is_pythons_own_sources() -> None:
    train, test = load_job(FOLDER / "char_lm.py").build_datasets(0, {"text_bytes": 20_000})
    assert len(train) * 128 == pytest.approx(19_000, abs=129)
    assert len(test) * 128 == pytest.approx(1_000, abs=129)
    text = b"".join(bytes(train[index][0].tolist()) for index in range(len(train)))
    assert b"\ndef " in text


def test_the_language_model_learns_and_counts_in_bits_per_byte() -> None:
    job = load_job(FOLDER / "char_lm.py")
    model, feed, losses = trained(job, SMALL_TEXT, batches=60)
    assert losses[0] > 5
    assert metrics_of(job, model, feed)["bits_per_byte"] < 6
