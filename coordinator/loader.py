"""Reads the batches of one data set in order, from any batch on; faults name the sample.

Which samples make a batch is the caller's part (``feed.py``). Everything that arises in the user's
data set or collate function becomes a ``JobError``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..protocol.errors import JobError
from ..protocol.job import user_fault

__all__ = ["Loader", "Value", "derived_seed", "length"]

Value: TypeAlias = "Tensor | tuple[Tensor | None, ...] | dict[str, Tensor | None]"
"""What can be fed: a tensor, or a flat tuple or dictionary of tensors and None."""


def derived_seed(*words: object) -> int:
    """Return a seed in [0, 2^63) that depends on all ``words`` and on nothing else."""
    text = "/".join(map(str, words))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def length(dataset: Any, name: str) -> int:
    """Return the number of samples of the ``name`` set.

    Raises:
        JobError: the set is empty, or is not map-style.
    """
    is_map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not is_map_style or isinstance(dataset, IterableDataset):
        raise JobError(
            f"the {name} set is a {type(dataset).__name__}, which is not map-style: it needs "
            f"__len__ and __getitem__, because every run reshuffles and any batch may be read again"
        )
    if len(dataset) == 0:
        raise JobError(f"the {name} set is empty: datasets() must return at least one sample in it")
    return len(dataset)


class Loader:
    """A stream of batches that can start anywhere, each batch the same wherever it started."""

    def __init__(
        self,
        dataset: Any,
        *,
        name: str,
        batches: int,
        ids_of: Callable[[int], list[int]],
        collate: Callable[[list[Any]], Any],
        seed: int,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            dataset: map-style.
            name: "training" or "test", for messages.
            batches: how many there are.
            ids_of: batch → positions of its samples in the data set.
            collate: list of samples → ``(inputs, targets)``.
            seed: with the batch it seeds torch's generator while the batch is read, so that a
                data set that augments its samples at random does so repeatably.
        """
        self._dataset = _Named(dataset, name)
        self._name = name
        self._batches = batches
        self._ids_of = ids_of
        self._collate = collate
        self._seed = seed
        self._stream: Iterator[Any] = iter(())
        self._next = -1

    def load(self, batch: int) -> tuple[Value, Value]:
        """Return the inputs and targets of one batch; the next in order is the cheapest.

        Raises:
            JobError: reading a sample or collating fails, or the result is not
                ``(inputs, targets)`` of tensors.
        """
        assert 0 <= batch < self._batches, (batch, self._batches)
        if batch != self._next:
            self._stream = self._stream_from(batch)
        self._next = -1  # a stream that failed is not gone on with
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(
                derived_seed("draws", self._name, self._seed, batch)
            )
            try:
                collated = next(self._stream)
            except JobError:
                raise
            except Exception as error:
                raise JobError(
                    f"collating the samples {self._ids_of(batch)} of the {self._name} set failed: "
                    f"{user_fault(error)}"
                ) from error
        self._next = batch + 1
        return _pair(collated, self._name)

    def _stream_from(self, batch: int) -> Iterator[Any]:
        loader = DataLoader(
            self._dataset,
            batch_sampler=map(self._ids_of, range(batch, self._batches)),
            collate_fn=self._collate,
            generator=torch.Generator(),  # not the global one: it would lose a draw per start
        )
        return iter(loader)


class _Named(Dataset[Any]):
    """A data set whose faults say which sample they are about."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset = dataset
        self._name = name

    def __getitem__(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            raise self._fault(f"sample {index}", error) from error

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Read a whole batch; the data set's own way of doing so, where it has one, is faster."""
        fetch = getattr(self._dataset, "__getitems__", None)
        if fetch is None:
            return [self[index] for index in indices]
        try:
            return fetch(indices)
        except Exception as error:
            raise self._fault(f"samples {indices}", error) from error

    def _fault(self, which: str, error: Exception) -> JobError:
        return JobError(f"reading {which} of the {self._name} set failed: {user_fault(error)}")


def _pair(collated: Any, name: str) -> tuple[Value, Value]:
    if not isinstance(collated, (tuple, list)) or len(collated) != 2:  # noqa: PLR2004
        count = f" of {len(collated)}" if isinstance(collated, (tuple, list)) else ""
        raise JobError(
            f"a collated batch of the {name} set is a {type(collated).__name__}{count}; it must be "
            f"(inputs, targets). Several inputs belong together: ((tokens, mask), targets)"
        )
    inputs, targets = cast("tuple[Any, Any]", collated)
    return _value(inputs, f"the inputs of the {name} set"), _value(
        targets, f"the targets of the {name} set"
    )


def _value(value: Any, what: str) -> Value:
    if isinstance(value, Tensor):
        return value
    items: list[Any] = []
    result: Any = None
    if isinstance(value, (tuple, list)):
        result = tuple(cast("tuple[Any, ...]", value))
        items = list(result)
    elif isinstance(value, Mapping):
        result = dict(cast("Mapping[str, Any]", value))
        items = list(result.values())
    if not items or any(item is not None and not isinstance(item, Tensor) for item in items):
        found = ", ".join(type(item).__name__ for item in items)
        raise JobError(
            f"{what}, collated, are a {type(value).__name__}{f' of {found}' if found else ''}; "
            f"they must be a tensor, or a flat tuple or dictionary of tensors and None. "
            f"A collate function in the job file can make them so"
        )
    return result
