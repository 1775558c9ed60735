"""How many updates apart snapshot rounds should be. Pure.

The Young/Daly rule: with an unhidden cost c for a snapshot and a mean time 1/λ between faults of
the whole run, the least time is lost when rounds are ``sqrt(2 c / λ)`` apart (J. W. Young, 1974;
J. T. Daly, 2006, first order).
"""

from __future__ import annotations

from math import ceil, sqrt

__all__ = ["choose_interval"]

FAULTS_PER_WORKER_S = 1 / (24 * 3600)
"""One fault a day and worker: pessimistic for a healthy cluster, right for a flaky one."""

LARGEST_SHARE = 0.01
"""Share of the training time that snapshots may cost at most, whatever the rule says."""

LEAST_INTERVAL_S = 1.0
LONGEST_INTERVAL_S = 60.0
"""Replay takes about as long as the interval, and logs grow with it."""


def choose_interval(
    *, capture_s: float, update_s: float, workers: int, most: int | None = None
) -> int:
    """Return the number of updates from one round to the next, at least 1.

    Args:
        capture_s: how long a snapshot stops a stage, at least 0.
        update_s: time from one update to the next, above 0.
        workers: of the run, at least 1.
        most: updates that the logs have room for; None: any number.
    """
    rule_s = sqrt(2 * capture_s / (FAULTS_PER_WORKER_S * workers))
    interval_s = max(rule_s, capture_s / LARGEST_SHARE, LEAST_INTERVAL_S)
    updates = ceil(min(interval_s, LONGEST_INTERVAL_S) / update_s)
    return max(1, updates if most is None else min(updates, most))
