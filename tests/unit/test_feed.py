"""The feed is a pure function of (job, seed, batch), whoever asks and in whatever order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from spectrain.coordinator.feed import Feed, order
from spectrain.coordinator.loader import Value
from spectrain.protocol.errors import JobError
from spectrain.protocol.schedule import Op

torch.set_num_threads(1)


class Counted(Dataset[tuple[Tensor, int]]):
    """Sample i is ``(tensor([i]), -i)``; it keeps what it was asked for."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.asked.append(index)
        return torch.tensor([index]), -index


def make(train: Any = None, test: Any = None, **options: Any) -> Feed:
    defaults: dict[str, Any] = {"batch_size": 4, "seed": 0}
    return Feed(Counted(10) if train is None else train, test, **{**defaults, **options})


def op(text: str) -> Op:
    return Op.parse(text)


def ids_in(value: Value) -> list[int]:
    assert isinstance(value, Tensor)
    return value.flatten().tolist()


# -- how much work there is ---------------------------------------------------------------------


def test_the_last_small_batch_counts() -> None:
    work = make(epochs=3).work
    assert (work.train_batches, work.epoch_batches) == (9, 3)


def test_the_run_may_be_cut_short_but_not_prolonged() -> None:
    assert make(epochs=3, max_batches=4).work.train_batches == 4
    assert make(epochs=1, max_batches=4).work.train_batches == 3


def test_a_test_set_makes_evaluation_batches() -> None:
    assert make().work.evaluation_batches == 0
    assert make(test=Counted(5)).work.evaluation_batches == 2


def test_a_batch_has_no_more_microbatches_than_samples() -> None:
    work = make(microbatches=3).work
    assert (work.microbatches, work.last_microbatches) == (3, 2)
    assert make(microbatches=9).work.microbatches == 4
    assert make(Counted(2), microbatches=9).work.microbatches == 2


# -- which samples ------------------------------------------------------------------------------


def test_the_order_is_that_of_seed_and_epoch() -> None:
    assert order(1, 2, 50).tolist() == order(1, 2, 50).tolist()
    assert order(1, 2, 50).tolist() != order(1, 3, 50).tolist()
    assert order(1, 2, 50).tolist() != order(2, 2, 50).tolist()
    assert order(1, 2, 50).tolist() != order(2, 1, 50).tolist()


def test_the_order_stays_what_it_was_in_earlier_releases() -> None:
    assert order(0, 0, 10).tolist() == [9, 3, 8, 5, 2, 7, 6, 0, 4, 1]


def test_batches_hold_the_epochs_order_in_pieces() -> None:
    feed = make(epochs=2)
    second_epoch = order(0, 1, 10).tolist()
    ids = [feed.sample_ids(op(text)) for text in ("F3", "F4", "F5")]
    assert ids == [second_epoch[:4], second_epoch[4:8], second_epoch[8:]]


def test_evaluation_goes_through_the_test_set_in_order_each_round() -> None:
    feed = make(test=Counted(5), epochs=2)
    for round_ in (0, 1):
        assert feed.sample_ids(Op.parse(f"E{round_}.0")) == [0, 1, 2, 3]
        assert feed.sample_ids(Op.parse(f"E{round_}.1")) == [4]


def test_microbatches_are_pieces_whose_sizes_differ_by_at_most_one() -> None:
    feed, whole = make(microbatches=3), make()
    pieces = [feed.sample_ids(op(text)) for text in ("F0.0", "F0.1", "F0.2")]
    assert [len(piece) for piece in pieces] == [2, 1, 1]
    assert [*pieces[0], *pieces[1], *pieces[2]] == whole.sample_ids(op("F0"))


# -- their tensors ------------------------------------------------------------------------------


def test_a_batch_holds_its_samples_and_says_how_many() -> None:
    feed = make()
    batch = feed.batch(op("F2"))
    assert ids_in(batch.inputs) == feed.sample_ids(op("F2"))
    assert ids_in(batch.targets) == [-index for index in feed.sample_ids(op("F2"))]
    assert (batch.samples, batch.batch_samples) == (2, 2)


def test_an_evaluation_batch_holds_test_samples() -> None:
    batch = make(test=Counted(5)).batch(op("E0.1"))
    assert ids_in(batch.inputs) == [4]
    assert (batch.samples, batch.batch_samples) == (1, 1)


def test_a_microbatch_holds_its_piece() -> None:
    feed = make(microbatches=3)
    for text in ("F0.0", "F0.1", "F0.2", "F2.1"):
        batch = feed.batch(op(text))
        assert ids_in(batch.inputs) == feed.sample_ids(op(text))
        assert ids_in(batch.targets) == [-index for index in feed.sample_ids(op(text))]
    first = feed.batch(op("F0.0"))
    assert (first.samples, first.batch_samples) == (2, 4)


def test_the_digest_tells_sample_ids_apart() -> None:
    feed = make(microbatches=2)
    digests = [feed.batch(op(text)).ids_digest for text in ("F0", "F0.1", "F1", "F1.1")]
    assert len(set(digests)) == 4
    assert feed.part("inputs", op("F0")).ids_digest == digests[0]
    assert feed.part("targets", op("F0")).ids_digest == digests[0]


def test_parts_are_the_halves_of_the_batch() -> None:
    feed = make()
    batch = feed.batch(op("F0"))
    inputs, targets = feed.part("inputs", op("F0")), feed.part("targets", op("F0"))
    assert inputs.value is batch.inputs
    assert targets.value is batch.targets
    assert (inputs.samples, inputs.batch_samples) == (4, 4)


def test_a_batch_is_the_same_from_wherever_the_loading_starts() -> None:
    texts = [f"F{batch}" for batch in (5, 0, 1, 4, 1)]
    jumping, streaming = make(epochs=2), make(epochs=2)
    jumped = {text: ids_in(jumping.batch(op(text)).inputs) for text in texts}
    streamed = {f"F{b}": ids_in(streaming.batch(op(f"F{b}")).inputs) for b in range(6)}
    assert all(jumped[text] == streamed[text] for text in texts)


class Noisy(Counted):
    """Draws from torch's generator, as random augmentation does."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(3), index


def test_random_augmentation_is_that_of_seed_and_batch() -> None:
    streamed = [make(Noisy(10)).batch(op(f"F{batch}")).inputs for batch in range(3)]
    feed = make(Noisy(10))
    torch.manual_seed(5)
    again = [feed.batch(op(f"F{batch}")).inputs for batch in (2, 1)]
    other = make(Noisy(10), seed=1).batch(op("F1")).inputs
    assert torch.equal(_tensor(streamed[2]), _tensor(again[0]))
    assert torch.equal(_tensor(streamed[1]), _tensor(again[1]))
    assert not torch.equal(_tensor(streamed[1]), _tensor(other))
    assert not torch.equal(_tensor(streamed[0]), _tensor(streamed[1]))


def _tensor(value: Value) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def test_loading_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    make(Noisy(10)).batch(op("F0"))
    assert torch.equal(torch.get_rng_state(), before)


# -- what is kept -------------------------------------------------------------------------------


def test_each_sample_is_read_once_though_both_ends_ask_at_different_times() -> None:
    train = Counted(10)
    feed = make(train, microbatches=2)
    ops = [f"F{batch}.{micro}" for batch in range(3) for micro in range(2)]
    for text in ops:
        feed.part("inputs", op(text))
    for text in ops:
        feed.part("targets", op(text))
    assert sorted(train.asked) == list(range(10))


def test_nothing_is_read_before_it_is_asked_for() -> None:
    train = Counted(10)
    feed = make(train)
    assert train.asked == []
    feed.batch(op("F0"))
    assert sorted(train.asked) == sorted(feed.sample_ids(op("F0")))


def test_what_both_ends_have_had_is_let_go_and_read_again_on_request() -> None:
    train = Counted(10)
    feed = make(train)
    first = ids_in(feed.part("inputs", op("F0")).value)
    feed.part("targets", op("F0"))
    assert ids_in(feed.part("inputs", op("F0")).value) == first
    assert len(train.asked) == 8


def test_no_more_than_the_allowed_batches_are_kept() -> None:
    train = Counted(40)
    feed = make(train, kept_batches=2)
    for batch in range(4):
        feed.part("inputs", op(f"F{batch}"))
    read = len(train.asked)
    feed.part("targets", op("F3"))
    feed.part("targets", op("F2"))
    assert len(train.asked) == read
    feed.part("targets", op("F0"))
    assert len(train.asked) == read + 4


def test_a_data_set_that_reads_whole_batches_is_asked_for_whole_batches() -> None:
    class Whole(Counted):
        def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
            self.asked.append(len(indices))
            return [(torch.tensor([index]), -index) for index in indices]

    train = Whole(10)
    assert len(ids_in(make(train).batch(op("F0")).inputs)) == 4
    assert train.asked == [4]


# -- forms of values ----------------------------------------------------------------------------


def collated(inputs: Any, targets: Any = None) -> Feed:
    return make(
        collate=lambda _: (inputs, torch.zeros(4) if targets is None else targets),
        microbatches=2,
        max_batches=1,
    )


def test_several_inputs_are_a_tuple() -> None:
    train = [((torch.tensor([i]), torch.tensor([i > 4])), i) for i in range(10)]
    inputs = make(train).batch(op("F0")).inputs
    assert isinstance(inputs, tuple)
    assert [item is not None and item.dtype for item in inputs] == [torch.int64, torch.bool]


def test_named_inputs_are_a_dictionary() -> None:
    train = [({"tokens": torch.tensor([i])}, i) for i in range(10)]
    inputs = make(train).batch(op("F0")).inputs
    assert isinstance(inputs, dict)
    assert list(inputs) == ["tokens"]


def test_tuples_and_dictionaries_are_split_item_by_item_and_none_stays() -> None:
    pair = collated((torch.arange(4), None), {"y": torch.arange(8).view(4, 2), "w": None})
    second = pair.batch(op("F0.1"))
    assert isinstance(second.inputs, tuple)
    assert second.inputs[1] is None
    assert ids_in(second.inputs[0]) == [2, 3]  # pyright: ignore[reportArgumentType]
    assert isinstance(second.targets, dict)
    assert second.targets["w"] is None
    assert ids_in(second.targets["y"]) == [4, 5, 6, 7]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("tensor", [torch.tensor(3.0), torch.zeros(5, 5)])
def test_a_tensor_without_a_row_per_sample_cannot_be_split(tensor: Tensor) -> None:
    with pytest.raises(JobError, match=r"shape \[.*\] cannot be split into 2 micro.* 4 sam"):
        collated((torch.zeros(4), tensor)).batch(op("F0"))


def test_a_mask_of_any_shape_passes_whole_without_microbatches() -> None:
    mask = torch.ones(7, 7, dtype=torch.bool)
    feed = make(collate=lambda samples: ((torch.zeros(len(samples)), mask), torch.zeros(1)))
    inputs = feed.batch(op("F0")).inputs
    assert isinstance(inputs, tuple)
    assert inputs[1] is mask


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (torch.zeros(4), "a Tensor;"),
        ((torch.zeros(4),) * 3, "a tuple of 3"),
        ({"x": 1}, "a dict;"),
    ],
)
def test_a_collated_batch_that_is_no_pair_is_refused(result: Any, found: str) -> None:
    with pytest.raises(JobError, match=rf"is {found}.*must be \(inputs, targets\)"):
        make(collate=lambda _: result).batch(op("F0"))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("text", "are a str;"),
        ((), "are a tuple;"),
        (["a", "b"], "are a list of str, str"),
        ({"deep": {"x": torch.zeros(4)}}, "are a dict of dict"),
    ],
)
def test_inputs_that_are_no_flat_tensors_are_refused(value: Any, found: str) -> None:
    with pytest.raises(JobError, match=f"the inputs of the training set, collated, {found}"):
        collated(value).batch(op("F0"))


def test_targets_are_held_to_the_same_rule() -> None:
    feed = make(test=Counted(1), collate=lambda _: (torch.zeros(1), ("a",)))
    with pytest.raises(JobError, match="the targets of the test set, collated, are a tuple of str"):
        feed.batch(op("E0.0"))


# -- the user's faults --------------------------------------------------------------------------


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("dataset", [3, iter([1]), Endless()])
def test_a_data_set_that_is_not_map_style_is_refused(dataset: Any) -> None:
    with pytest.raises(JobError, match=r"training set is a .*, which is not map-style"):
        make(dataset)


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(JobError, match="the training set is empty"):
        make([])
    with pytest.raises(JobError, match="the test set is empty"):
        make(test=TensorDataset(torch.zeros(0, 1)))


class Torn(Counted):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 7:
            raise OSError("disk gone")
        return super().__getitem__(index)


def test_a_sample_that_cannot_be_read_is_named() -> None:
    feed = make(Torn(10), batch_size=10)
    with pytest.raises(JobError, match=r"sample 7 of the training set failed: .*disk gone"):
        feed.batch(op("F0"))


def test_after_a_fault_the_same_batch_is_tried_again() -> None:
    train = Torn(10)
    feed = make(train, batch_size=10)
    with pytest.raises(JobError):
        feed.batch(op("F0"))
    train.__class__ = Counted
    assert feed.batch(op("F0")).samples == 10


def test_a_whole_batch_that_cannot_be_read_is_named() -> None:
    class TornWhole(Counted):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            raise OSError("disk gone")

    with pytest.raises(JobError, match=r"samples \[0, 1\] of the test set failed: .*disk gone"):
        make(test=TornWhole(2)).batch(op("E0.0"))


def test_samples_that_do_not_collate_are_named() -> None:
    ragged = [(torch.zeros(size), 0) for size in (1, 2)]
    with pytest.raises(JobError, match=r"collating the samples \[[01], [01]\] of the training set"):
        make(ragged).batch(op("F0"))
