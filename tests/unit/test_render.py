"""The words of a run: lines, live view, first-cause box, last lines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spectrain.launch.render import (
    BOX_WIDTH,
    LOG_TAIL_LINES,
    cause_box,
    duration,
    end_lines,
    live_lines,
    metrics_text,
    progress_line,
    table,
    waiting_line,
)
from spectrain.protocol.messages import Cause, RunEnded, StageView, View


def stage_view(stage: int, wait_share: float = 0.25) -> StageView:
    return StageView(
        stage=stage, host=f"node{stage}", pid=40 + stage, incarnation=0, state="training",
        version=8, last_batch=7, in_flight=2 - stage, wait_share=wait_share,
    )  # fmt: skip


TRAINING = View(
    state="training", batch=8, train_batches=20, epoch=1, epochs=5, loss=0.43215, lr=0.02,
    samples_per_s=1234.5, eta_s=75.4, stages=(stage_view(0), stage_view(1, 0.0)),
)  # fmt: skip


# -- parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (760.0, "12:40"), (11109.0, "3:05:09")],
)
def test_a_duration_reads_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_metrics_are_names_and_four_digits() -> None:
    assert metrics_text({"accuracy": 0.97222, "loss": 12.34567}) == "accuracy 0.9722  loss 12.35"


def test_a_metric_that_json_could_not_hold_is_nan() -> None:
    assert metrics_text({"loss": None}) == "loss nan"


def test_a_table_sets_numbers_right_and_words_left() -> None:
    lines = table(("stage", "host"), [(0, "a"), (12, "node12")])
    assert lines == ["stage  host", "    0  a", "   12  node12"]


def test_a_table_without_rows_is_its_titles() -> None:
    assert table(("stage", "host"), []) == ["stage  host"]


# -- progress -----------------------------------------------------------------------------------


def test_a_progress_line_holds_all_that_is_known() -> None:
    assert progress_line(TRAINING) == (
        "epoch 2/5  batch 8/20  loss 0.4321  lr 0.02  1,234 samples/s  ETA 1:15"
    )


def test_a_progress_line_leaves_out_what_is_not_known() -> None:
    view = View(state="training", batch=1, train_batches=20, epochs=5)
    assert progress_line(view) == "epoch 1/5  batch 1/20"


def test_before_the_first_batch_there_is_no_progress_line() -> None:
    assert progress_line(View(state="training", train_batches=20, epochs=5)) == ""


def test_a_slow_run_shows_tenths_of_samples() -> None:
    view = View(state="training", batch=1, train_batches=2, epochs=1, samples_per_s=0.52)
    assert progress_line(view).endswith("0.5 samples/s")


def test_a_waiting_line_names_who_is_missing_and_what_it_does() -> None:
    view = View(
        state="starting",
        waiting_for=("stage 1 (node1): importing torch",),
        stages=(stage_view(0), stage_view(1)),
    )
    assert waiting_line(view) == "waiting for 1 of 2: stage 1 (node1): importing torch"


def test_a_waiting_line_names_six_and_counts_the_rest() -> None:
    missing = tuple(f"host node{number}" for number in range(8))
    line = waiting_line(View(state="gathering", waiting_for=missing))
    assert line.startswith("waiting for 8: host node0; host node1;")
    assert line.endswith("host node5; and 2 more")


def test_when_nobody_is_missing_there_is_no_waiting_line() -> None:
    assert waiting_line(TRAINING) == ""


# -- live view ----------------------------------------------------------------------------------


def test_the_live_view_in_start_up_has_a_line_for_each_who_is_missing() -> None:
    view = View(state="starting", waiting_for=("stage 0: building", "stage 1: starting"))
    assert live_lines(view, 80) == [
        "starting",
        "waiting for stage 0: building",
        "waiting for stage 1: starting",
    ]


def test_the_live_view_in_training_has_a_line_per_stage() -> None:
    lines = live_lines(TRAINING, 60)
    assert lines[0] == progress_line(TRAINING)
    assert lines[2:] == [
        "stage  host   state     version  in flight  waits %  restarts",
        "    0  node0  training        8          2       25         0",
        "    1  node1  training        8          1        0         0",
    ]


@pytest.mark.parametrize("width", [20, 60, 300])
def test_the_bar_fits_and_shows_the_share_done(width: int) -> None:
    bar = live_lines(TRAINING, width)[1]
    assert len(bar) == min(width, BOX_WIDTH)
    assert bar.endswith(" 40%")
    inside = bar[1 : bar.index("]")]
    assert inside.count("#") == round(0.4 * len(inside))


def test_the_live_view_shows_the_newest_evaluation() -> None:
    view = View(state="training", batch=8, train_batches=20, epochs=5, metrics={"accuracy": 0.5})
    assert "test: accuracy 0.5" in live_lines(view, 60)


def test_the_live_view_before_the_first_batch_is_the_state() -> None:
    assert live_lines(View(state="training"), 60) == ["training"]


# -- first cause --------------------------------------------------------------------------------


def cause(**changes: Any) -> Cause:
    fields: dict[str, Any] = {
        "stage": 2, "host": "node2", "what": "ValueError", "message": "shapes differ",
        "op": "F17", **changes,
    }  # fmt: skip
    return Cause(**fields)


def test_the_box_names_stage_host_op_exception_and_message() -> None:
    lines = cause_box(cause()).splitlines()
    assert lines[0].startswith("+-- first cause --")
    assert lines[1:3] == ["| stage 2 on node2 (F17): ValueError", "|   shapes differ"]
    assert lines[-1] == "+" + "-" * (BOX_WIDTH - 1)


def test_the_box_explains_a_fault_in_full() -> None:
    box = cause_box(
        cause(
            traceback="Traceback:\n  File job.py\n",
            log_tail=("one", "two"),
            log_path="/run/logs/stage-2.log",
            advice="Lower it.",
            consequences=("stage 1 (node1): LinkError: gone",),
        )
    )
    assert box.splitlines()[3:-1] == [
        "|",
        "| Traceback:",
        "|   File job.py",
        "|",
        "| the end of its log:",
        "|   one",
        "|   two",
        "|",
        "| its whole log: /run/logs/stage-2.log",
        "|",
        "| what to do: Lower it.",
        "|",
        "| ended as a result:",
        "|   stage 1 (node1): LinkError: gone",
    ]


def test_the_box_shows_the_last_twenty_lines_of_the_log() -> None:
    box = cause_box(cause(log_tail=tuple(f"line {number}" for number in range(50))))
    shown = [line for line in box.splitlines() if "line " in line]
    assert len(shown) == LOG_TAIL_LINES == 20
    assert shown[-1] == "|   line 49"


def test_a_users_mistake_is_said_without_traceback_and_log() -> None:
    box = cause_box(cause(user_error=True, traceback="Traceback", log_tail=("noise",)))
    assert "Traceback" not in box
    assert "noise" not in box


def test_long_sentences_are_wrapped_to_the_box_and_lines_of_the_log_are_not() -> None:
    sentence, logged = "word " * 40, "x" * 200
    box = cause_box(cause(message=f"first\n\n{sentence}", advice=sentence, log_tail=(logged,)))
    lines = box.splitlines()
    assert lines[2:4] == ["|   first", "|"]
    assert [line for line in lines if len(line) > BOX_WIDTH] == [f"|   {logged}"]


def test_a_cause_that_is_no_stages_names_its_place() -> None:
    assert "| on node1: agent lost" in cause_box(
        cause(stage=None, host="node1", what="agent lost", op="")
    )


def test_a_cause_without_a_place_is_named_alone() -> None:
    box = cause_box(cause(stage=None, host="", what="start-up timed out", op=""))
    assert box.splitlines()[1] == "| start-up timed out"


def test_escape_sequences_in_a_log_cannot_steer_the_terminal() -> None:
    box = cause_box(cause(log_tail=("\x1b[31mred\x07\tend\r",)))
    assert not any(char in box for char in "\x1b\x07\r\t")
    assert "red" in box


# -- the end ------------------------------------------------------------------------------------


def summary(**changes: Any) -> str:
    fields: dict[str, Any] = {
        "updates": 690, "epochs": 30, "wall_s": 61.0, "samples_per_s": 2345.6,
        "final_metrics": {"accuracy": 0.9722, "loss": 0.1}, "final_metrics_of": "test",
        "slowest_stage": 1,
        "stages": [
            {"stage": 0, "idle": 0.4, "wait_feed": 0.38},
            {"stage": 1, "idle": 0.1, "wait_feed": 0.01},
        ],
        **changes,
    }  # fmt: skip
    return json.dumps(fields)


def test_the_end_says_what_came_out_and_where_it_lies() -> None:
    lines = end_lines(RunEnded(exit_code=0, state="done", summary_json=summary()), "/runs/one")
    assert lines == [
        "done: 690 updates, 30 epochs in 1:01, 2,346 samples/s",
        "test: accuracy 0.9722  loss 0.1",
        "slowest: stage 1, at work 90% of the time",
        "stage 0 waited 38% of the time for data",
        "results: /runs/one",
    ]


def test_one_stage_alone_is_not_called_the_slowest() -> None:
    text = summary(slowest_stage=0, stages=[{"stage": 0, "idle": 0.0, "wait_feed": 0.0}])
    lines = end_lines(RunEnded(exit_code=0, state="done", summary_json=text), "/runs/one")
    assert [line.split(":")[0] for line in lines] == ["done", "test", "results"]


def test_a_speed_that_is_not_known_is_left_out() -> None:
    text = summary(samples_per_s=None, wall_s=None)
    lines = end_lines(RunEnded(exit_code=75, state="stopped", summary_json=text), "/runs/one")
    assert lines[0] == "stopped: 690 updates, 30 epochs"
    assert lines[-1] == "what there is: /runs/one"


def test_a_failed_run_says_where_its_remains_lie() -> None:
    lines = end_lines(RunEnded(exit_code=137, state="failed"), "/runs/one")
    assert lines == ["failed (exit code 137)", "what there is: /runs/one"]
