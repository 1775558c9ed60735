from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spectrain.protocol.errors import JobError, ProtocolError
from spectrain.protocol.schedule import Op, Schedule, Work, stage_ops
from spectrain.worker.boundary import Parcel
from spectrain.worker.stream_log import LoggedParcel, StreamLog, digest_of, is_needed_after


def op(text: str) -> Op:
    return Op.parse(text)


def logged(text: str, number: int, floats: int = 2) -> LoggedParcel:
    return LoggedParcel.of(Parcel(op(text), torch.zeros(floats), 1, 1), number)


def log_of(*texts: str, epoch_batches: int = 2) -> StreamLog:
    log = StreamLog(epoch_batches)
    for text in texts:
        log.append(logged(text, log.next_number))
    return log


def numbers(log: StreamLog) -> list[int]:
    found: list[int] = []
    while (parcel := log.from_number(found[-1] + 1 if found else 0)) is not None:
        found.append(parcel.number)
    return found


# -- what a restored stage needs ----------------------------------------------------------------


@pytest.mark.parametrize("schedule", list(Schedule))
def test_needed_is_what_the_op_list_consumes_from_the_snapshot_on(schedule: Schedule) -> None:
    work = Work(
        train_batches=7, epoch_batches=3, evaluation_batches=2, microbatches=2, last_microbatches=1
    )
    ops = list(stage_ops(schedule, 1, 3, work))
    for update in range(work.train_batches + 1):
        start = ops.index(Op.parse(f"U{update - 1}")) + 1 if update else 0
        begun = [each for each in ops[:start] if str(each)[0] == "F"]
        done = {(each.batch, each.micro) for each in ops[:start] if str(each)[0] == "B"}
        in_flight = {each for each in begun if (each.batch, each.micro) not in done}
        needed = in_flight | {each for each in ops[start:] if str(each)[0] != "U"}
        parcels = {each for each in ops if str(each)[0] != "U"}
        found = {each for each in parcels if is_needed_after(each, update, work.epoch_batches)}
        assert found == needed, update


# -- parcels ------------------------------------------------------------------------------------


def test_a_parcel_is_logged_without_its_graph_and_with_its_form() -> None:
    hidden = torch.ones(3, 2, requires_grad=True) * 2
    parcel = LoggedParcel.of(Parcel(op("F5"), (hidden, None), 3, 9), 17)
    assert (parcel.number, parcel.op, parcel.samples, parcel.batch_samples) == (17, op("F5"), 3, 9)
    assert parcel.tensors[0].grad_fn is None
    assert parcel.boundary.tensors[0].needs_grad
    assert parcel.size_bytes == 3 * 2 * 4


def test_tensors_on_the_host_are_kept_by_reference() -> None:
    gradient = torch.ones(4)
    parcel = LoggedParcel.of(Parcel(op("B0"), gradient, 1, 1), 0)
    parcel.wait_complete()
    parcel.land()
    assert parcel.tensors[0].data_ptr() == gradient.data_ptr()


def test_what_cannot_cross_a_boundary_is_refused() -> None:
    with pytest.raises(JobError, match="a stage returned a list"):
        LoggedParcel.of(Parcel(op("F0"), [torch.zeros(1)], 1, 1), 0)


# -- digests ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.randn(4, 5).bfloat16(),
        torch.tensor([True, False]),
        torch.randn(2, dtype=torch.complex64),
        torch.randn(3, requires_grad=True),
        torch.arange(6).reshape(2, 3),
    ],
    ids=["scalar", "bfloat16", "bool", "complex", "leaf", "integers"],
)
def test_equal_bits_have_equal_digests_and_others_do_not(tensor: Tensor) -> None:
    digest = digest_of([tensor])
    assert digest == digest_of([tensor.detach().clone()])
    other = tensor.detach().clone()
    other.view(-1).view(torch.uint8)[0] ^= 1
    assert digest != digest_of([other])


def test_a_digest_is_over_all_tensors_in_order() -> None:
    one, two = torch.ones(2), torch.zeros(2)
    assert digest_of([one, two]) == digest_of([torch.tensor([1.0, 1, 0, 0])])
    assert digest_of([one, two]) != digest_of([two, one])
    assert digest_of([]) == digest_of([torch.empty(0, 7)])


def test_minus_zero_is_not_zero_and_a_nan_equals_itself() -> None:
    assert digest_of([torch.tensor([-0.0])]) != digest_of([torch.tensor([0.0])])
    assert digest_of([torch.tensor([torch.nan])]) == digest_of([torch.tensor([torch.nan])])


# -- the log ------------------------------------------------------------------------------------


def test_parcels_are_found_by_number_or_the_next_higher_one() -> None:
    log = log_of("F0", "F1", "F2")
    log.next_number = 9
    log.append(logged("F3", 9))
    assert [log.from_number(number).number for number in (0, 2, 3, 9)] == [0, 2, 9, 9]
    assert log.from_number(10) is None
    assert [log.count_from(number) for number in (0, 2, 3, 10)] == [4, 2, 1, 0]


def test_bytes_are_those_of_all_payloads_that_are_kept() -> None:
    log = StreamLog(2)
    log.append(logged("F0", 0, floats=10))
    log.append(logged("F1", 1, floats=5))
    assert (log.size_bytes, len(log)) == (60, 2)
    log.trim(1)
    assert (log.size_bytes, len(log)) == (20, 1)
    assert log.peak_bytes == 60


def test_trim_drops_what_no_restored_stage_asks_for() -> None:
    log = log_of("F0", "F1", "F2", "E0.0", "E0.1", "F3", "F4", "E1.0")
    log.trim(2)
    assert numbers(log) == [2, 3, 4, 5, 6, 7]  # F2 and the evaluation after U1
    assert log.first_number == 2
    log.trim(3)
    assert numbers(log) == [5, 6, 7]
    assert log.first_number == 3  # who needs F3 may well ask from the evaluation on
    log.trim(3)
    assert (numbers(log), log.first_number) == ([5, 6, 7], 3)


def test_a_parcel_whose_tensors_are_not_as_large_as_its_form_says_is_found() -> None:
    parcel = logged("F3", 3, floats=10)
    parcel.check_size()
    parcel.tensors = [parcel.tensors[0][1:]]
    with pytest.raises(ProtocolError, match="F3 has 36 bytes to send, and by its form 40"):
        parcel.check_size()


def test_a_parcel_that_is_made_again_leaves_the_next_number_alone() -> None:
    log = StreamLog(100)
    log.next_number = 12
    for number in (7, 10, 12):
        log.append(logged(f"F{number}", number))
    assert log.next_number == 13
    assert numbers(log) == [7, 10, 12]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_numbers_rise_and_do_not_run_ahead(number: int) -> None:
    log = log_of("F0", "F1")
    with pytest.raises(AssertionError, match=rf"F9 as parcel {number}, between 1 and 2"):
        log.append(logged("F9", number))


@pytest.mark.parametrize("place", [0, 4095, -4096, -1])
def test_of_a_large_tensor_the_first_and_the_last_bytes_count(place: int) -> None:
    large = torch.zeros(1 << 20, dtype=torch.uint8)
    before = digest_of([large])
    large[place] = 1
    assert digest_of([large]) != before


def test_of_a_large_tensor_what_differs_all_over_is_seen() -> None:
    large = torch.randn(1 << 18)
    assert digest_of([large]) != digest_of([large * (1 + 1e-6)])


def test_all_bytes_of_a_small_tensor_count() -> None:
    small = torch.zeros(1 << 16, dtype=torch.uint8)
    digests = {digest_of([small])}
    for place in range(0, 1 << 16, 997):
        changed = small.clone()
        changed[place] = 1
        digests.add(digest_of([changed]))
    assert len(digests) == 1 + len(range(0, 1 << 16, 997))
