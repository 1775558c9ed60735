"""What holds for every test: no leaks, one torch thread, markers by folder, skips with reasons."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from leaks import left_behind, take_snapshot
from waiting import wait_until

TESTS = Path(__file__).parent
FOLDER_MARKERS = ("integration", "cluster", "gpu")
TIMEOUT_OF_REAL_PROCESSES_S = 180
ENDING_TIME_S = 5.0

# The machine may be slow and shared: what an example costs in time proves nothing.
hypothesis.settings.register_profile("spectrain", deadline=None, print_blob=True)
hypothesis.settings.load_profile("spectrain")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its folder's marker and give real processes more time."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in FOLDER_MARKERS:
            item.add_marker(folder)
            item.add_marker(pytest.mark.timeout(TIMEOUT_OF_REAL_PROCESSES_S), append=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, saying why."""
    if item.get_closest_marker("cluster"):
        from cluster.namespaces import why_unavailable

        if reason := why_unavailable():
            pytest.skip(f"no hosts out of network namespaces: {reason}")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Keep torch from using all cores; tests that never import it do not pay for it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which a thread, process, descriptor or shared memory file stays."""
    before = take_snapshot()
    yield
    try:
        wait_until(
            lambda: not left_behind(before), what="everything to end", timeout_s=ENDING_TIME_S
        )
    except TimeoutError:
        leaks = "\n  ".join(left_behind(before))
        pytest.fail(f"{request.node.nodeid} left behind:\n  {leaks}", pytrace=False)
