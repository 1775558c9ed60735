"""What is committed, where it lies, and what is forgotten."""

from __future__ import annotations

import pytest

from spectrain.coordinator.catalogue import Catalogue, Transfer
from spectrain.protocol.messages import SnapshotFile


def snapshot(stage: int, update: int, host: int = 0, kind: str = "own") -> SnapshotFile:
    return SnapshotFile(
        stage=stage,
        update=update,
        digest=f"{stage}@{update}",
        path=f"/{kind}/{host}/{stage}@{update}",
    )


def write(catalogue: Catalogue, stage: int, update: int, host: int = 0) -> None:
    catalogue.written(snapshot(stage, update, host), host)


def replicate(catalogue: Catalogue, stage: int, update: int, host: int) -> None:
    catalogue.copied(snapshot(stage, update, host, "replica"), host)


def alone(*, stages: int = 2) -> Catalogue:
    """Return the catalogue of a run on one host."""
    return Catalogue(stages=stages, hosts=[0])


def committed_at(update: int, *, stages: int = 2) -> Catalogue:
    catalogue = alone(stages=stages)
    for stage in range(stages):
        write(catalogue, stage, update)
    assert catalogue.commit() == update
    return catalogue


# -- commit -------------------------------------------------------------------------------------


def test_a_run_begins_at_the_initial_state_which_lies_nowhere() -> None:
    catalogue = alone()
    assert (catalogue.committed, catalogue.digests) == (0, ())
    assert catalogue.restore(0, 0) is None
    assert catalogue.homeless() == ()
    assert catalogue.transfer_to(0, 0) is None


def test_a_round_is_committed_when_every_stage_has_written_it() -> None:
    catalogue = alone()
    write(catalogue, 0, 10)
    assert catalogue.commit() is None
    write(catalogue, 1, 10)
    assert catalogue.commit() == catalogue.committed == 10
    assert catalogue.digests == ("0@10", "1@10")
    assert catalogue.commit() is None


def test_the_largest_common_round_is_taken_not_the_smallest_of_the_newest() -> None:
    catalogue = alone()
    for stage, updates in enumerate([(10, 20, 30), (10, 20, 40)]):
        for update in updates:
            write(catalogue, stage, update)
    assert catalogue.commit() == 20


def test_with_a_second_host_a_round_needs_a_copy_there() -> None:
    catalogue = Catalogue(stages=1, hosts=[0, 1])
    write(catalogue, 0, 10)
    assert catalogue.commit() is None
    replicate(catalogue, 0, 10, host=1)
    assert catalogue.commit() == 10


def test_two_files_on_one_host_are_one_copy() -> None:
    catalogue = Catalogue(stages=1, hosts=[0, 1])
    write(catalogue, 0, 10)
    replicate(catalogue, 0, 10, host=0)
    assert catalogue.commit() is None


def test_a_copy_with_another_digest_does_not_count() -> None:
    catalogue = Catalogue(stages=1, hosts=[0, 1])
    write(catalogue, 0, 10)
    catalogue.copied(SnapshotFile(stage=0, update=10, digest="stale", path="/replica"), 1)
    assert catalogue.commit() is None


def test_a_copy_without_a_mark_does_not_count() -> None:
    catalogue = alone(stages=1)
    catalogue.copied(snapshot(0, 10), 0)
    assert catalogue.commit() is None


def test_what_comes_late_for_an_old_round_is_ignored() -> None:
    catalogue = committed_at(20)
    write(catalogue, 0, 10)
    write(catalogue, 1, 10)
    assert catalogue.commit() is None
    assert catalogue.committed == 20


# -- withdrawal ---------------------------------------------------------------------------------


def test_a_stage_that_restarts_loses_its_newer_marks_only() -> None:
    catalogue = committed_at(10)
    write(catalogue, 0, 20)
    write(catalogue, 1, 20)
    catalogue.withdraw(0)
    assert catalogue.commit() is None
    assert catalogue.restore(0, 0) is not None
    write(catalogue, 0, 20)
    assert catalogue.commit() == 20


def test_a_late_replica_of_a_withdrawn_snapshot_does_not_count() -> None:
    catalogue = Catalogue(stages=1, hosts=[0, 1])
    write(catalogue, 0, 10)
    catalogue.withdraw(0)
    for host in (0, 1):
        replicate(catalogue, 0, 10, host)
    assert catalogue.commit() is None


# -- transfers ----------------------------------------------------------------------------------


def test_a_written_snapshot_is_sent_to_the_next_host_once() -> None:
    catalogue = Catalogue(stages=2, hosts=[0, 1, 2])
    write(catalogue, 1, 10, host=2)
    write(catalogue, 0, 10, host=0)
    assert catalogue.transfers() == [
        Transfer(stage=0, update=10, digest="0@10", source=0, target=1),
        Transfer(stage=1, update=10, digest="1@10", source=2, target=0),
    ]
    assert catalogue.transfers() == []


def test_older_rounds_are_sent_first() -> None:
    catalogue = Catalogue(stages=1, hosts=[0, 1])
    write(catalogue, 0, 20)
    write(catalogue, 0, 10)
    assert [transfer.update for transfer in catalogue.transfers()] == [10, 20]


def test_one_host_has_nobody_to_send_to() -> None:
    catalogue = committed_at(10)
    write(catalogue, 0, 20)
    assert catalogue.transfers() == []


def test_a_copy_that_is_there_is_not_sent() -> None:
    catalogue = Catalogue(stages=1, hosts=[0, 1])
    write(catalogue, 0, 10)
    replicate(catalogue, 0, 10, host=1)
    assert catalogue.transfers() == []


def test_a_rewritten_snapshot_is_sent_again_after_a_withdrawal() -> None:
    catalogue = Catalogue(stages=1, hosts=[0, 1])
    write(catalogue, 0, 10)
    (first,) = catalogue.transfers()
    catalogue.withdraw(0)
    assert catalogue.transfers() == []
    write(catalogue, 0, 10)
    assert catalogue.transfers() == [first]


def test_after_the_loss_of_a_host_its_copies_are_made_anew_elsewhere() -> None:
    catalogue = Catalogue(stages=1, hosts=[0, 1, 2])
    write(catalogue, 0, 10)
    assert [t.target for t in catalogue.transfers()] == [1]
    replicate(catalogue, 0, 10, host=1)
    assert catalogue.commit() == 10
    catalogue.lose_host(0)
    (transfer,) = catalogue.transfers()
    assert (transfer.source, transfer.target) == (1, 2)


def test_a_stage_that_moves_gets_its_committed_snapshot_sent() -> None:
    catalogue = Catalogue(stages=1, hosts=[0, 1, 2])
    write(catalogue, 0, 10)
    replicate(catalogue, 0, 10, host=1)
    catalogue.commit()
    assert catalogue.transfer_to(0, 1) is None
    assert catalogue.transfer_to(0, 2) == Transfer(
        stage=0, update=10, digest="0@10", source=0, target=2
    )


# -- hosts --------------------------------------------------------------------------------------


def test_a_commit_outlives_one_lost_host() -> None:
    catalogue = Catalogue(stages=1, hosts=[0, 1])
    write(catalogue, 0, 10)
    replicate(catalogue, 0, 10, host=1)
    catalogue.commit()
    catalogue.lose_host(0)
    restore = catalogue.restore(0, 1)
    assert restore is not None
    assert restore.paths == ("/replica/1/0@10",)
    assert catalogue.homeless() == ()


def test_a_commit_stands_although_its_round_is_not_durable_any_more() -> None:
    catalogue = Catalogue(stages=1, hosts=[0, 1, 2])
    write(catalogue, 0, 10)
    replicate(catalogue, 0, 10, host=1)
    catalogue.commit()
    catalogue.lose_host(1)
    assert catalogue.commit() is None
    assert catalogue.committed == 10


def test_the_last_living_host_needs_no_second_copy() -> None:
    catalogue = Catalogue(stages=1, hosts=[0, 1])
    catalogue.lose_host(1)
    write(catalogue, 0, 10)
    assert catalogue.commit() == 10


def test_the_word_of_a_lost_host_does_not_count() -> None:
    catalogue = alone(stages=1)
    catalogue.lose_host(0)
    write(catalogue, 0, 10)
    assert catalogue.commit() is None


def test_a_stage_without_any_copy_of_its_snapshot_is_homeless_until_a_host_returns() -> None:
    catalogue = committed_at(10)
    catalogue.lose_host(0)
    assert catalogue.homeless() == (0, 1)
    catalogue.surveyed(0, [snapshot(0, 10), snapshot(1, 10)], [])
    assert catalogue.homeless() == ()


def test_what_a_host_does_not_find_any_more_is_gone() -> None:
    catalogue = committed_at(10)
    catalogue.checkpointed([snapshot(1, 10, kind="disk")], 0)
    catalogue.surveyed(0, [snapshot(0, 10)], [])
    assert catalogue.homeless() == (1,)


def test_what_a_host_held_does_not_count_once_its_agent_is_gone() -> None:
    catalogue = Catalogue(stages=1, hosts=[0, 1])
    write(catalogue, 0, 10)
    replicate(catalogue, 0, 10, host=1)
    catalogue.doubt(1)
    assert catalogue.commit() is None  # two copies are needed still: the host may come back
    catalogue.surveyed(1, [snapshot(0, 10, 1, "replica")], [])
    assert catalogue.commit() == 10


def test_a_copy_that_a_host_has_lost_is_asked_for_again() -> None:
    catalogue = Catalogue(stages=1, hosts=[0, 1])
    write(catalogue, 0, 10)
    assert len(catalogue.transfers()) == 1
    assert catalogue.transfers() == []
    catalogue.surveyed(1, [], [])
    assert len(catalogue.transfers()) == 1


def test_a_survey_does_not_undo_what_was_written_while_it_was_made() -> None:
    catalogue = committed_at(10, stages=1)
    write(catalogue, 0, 20)
    catalogue.surveyed(0, [snapshot(0, 10)], [])
    assert catalogue.commit() == 20


# -- restore ------------------------------------------------------------------------------------


def test_shared_memory_of_the_same_host_is_tried_before_disk() -> None:
    catalogue = Catalogue(stages=1, hosts=[0, 1])
    catalogue.checkpointed([snapshot(0, 10, kind="disk")], 0)
    write(catalogue, 0, 10)
    replicate(catalogue, 0, 10, host=0)
    replicate(catalogue, 0, 10, host=1)
    catalogue.commit()
    restore = catalogue.restore(0, 0)
    assert restore is not None
    assert (restore.update, restore.digest) == (10, "0@10")
    assert restore.paths == ("/own/0/0@10", "/replica/0/0@10", "/disk/0/0@10")


def test_one_file_on_a_shared_disk_is_tried_once() -> None:
    catalogue = committed_at(10, stages=1)
    for host in (0, 1):
        catalogue.checkpointed([snapshot(0, 10, kind="disk")], host)
    restore = catalogue.restore(0, 5)
    assert restore is not None
    assert restore.paths == ("/disk/0/0@10",)


# -- checkpoints --------------------------------------------------------------------------------


def test_a_checkpoint_counts_when_every_stage_is_on_disk() -> None:
    catalogue = alone()
    catalogue.checkpointed([snapshot(0, 10), snapshot(1, 10), snapshot(0, 20)], 0)
    assert catalogue.newest_checkpoint() == 10


def test_falling_back_begins_anew_from_disk() -> None:
    catalogue = committed_at(10)
    catalogue.checkpointed([snapshot(stage, 10, kind="disk") for stage in (0, 1)], 0)
    for stage in (0, 1):
        write(catalogue, stage, 20)
    assert catalogue.commit() == 20
    catalogue.checkpointed([snapshot(0, 20, kind="disk")], 0)
    catalogue.lose_host(1)
    assert catalogue.fall_back() == catalogue.committed == 10
    restore = catalogue.restore(1, 0)
    assert restore is not None
    assert (restore.update, restore.paths) == (10, ("/disk/0/1@10",))
    for stage in (0, 1):
        write(catalogue, stage, 20)
    assert catalogue.commit() == 20


def test_without_a_whole_checkpoint_the_run_falls_back_to_its_beginning() -> None:
    catalogue = committed_at(10)
    assert catalogue.fall_back() == 0
    assert catalogue.restore(0, 0) is None
    assert catalogue.digests == ()


def test_a_resumed_run_begins_with_what_its_hosts_find_on_disk() -> None:
    catalogue = Catalogue(stages=2, hosts=[0, 1])
    catalogue.surveyed(0, [], [snapshot(0, 30)])
    catalogue.surveyed(1, [], [snapshot(1, 30, host=1)])
    assert catalogue.fall_back() == 30
    assert catalogue.digests == ("0@30", "1@30")


def test_what_a_worker_could_not_read_is_not_offered_again() -> None:
    catalogue = committed_at(10)
    catalogue.checkpointed([snapshot(1, 10, kind="disk")], 0)
    catalogue.distrust(1, 0)
    restore = catalogue.restore(1, 0)
    assert restore is not None
    assert restore.paths == ()
    assert catalogue.homeless() == (1,)


def test_another_hosts_copy_is_still_trusted() -> None:
    catalogue = Catalogue(stages=1, hosts=[0, 1])
    write(catalogue, 0, 10)
    replicate(catalogue, 0, 10, host=1)
    assert catalogue.commit() == 10
    catalogue.distrust(0, 0)
    assert catalogue.homeless() == ()
    transfer = catalogue.transfer_to(0, 0)
    assert transfer is not None
    assert transfer.source == 1


def test_the_initial_state_lies_nowhere_and_cannot_be_distrusted() -> None:
    catalogue = alone()
    catalogue.distrust(0, 0)
    assert catalogue.homeless() == ()


# -- the commit file ----------------------------------------------------------------------------


def test_a_new_coordinator_knows_the_commit_and_learns_the_places() -> None:
    text = committed_at(10).to_json()
    catalogue = Catalogue.from_json(text, stages=2)
    assert (catalogue.committed, catalogue.digests) == (10, ("0@10", "1@10"))
    catalogue.surveyed(0, [snapshot(0, 10), snapshot(1, 10), snapshot(1, 20)], [])
    assert catalogue.homeless() == ()
    assert catalogue.commit() is None, "files of unknown incarnations are no marks"


def test_the_initial_state_survives_the_commit_file() -> None:
    assert Catalogue.from_json(alone().to_json(), stages=2).committed == 0


def test_the_commit_file_of_another_run_is_refused() -> None:
    with pytest.raises(ValueError, match="2 digests for update 10, but the run has 3 stages"):
        Catalogue.from_json(committed_at(10).to_json(), stages=3)
