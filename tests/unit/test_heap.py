from __future__ import annotations

import subprocess
import sys

import pytest

from spectrain.worker import heap

STEPS = """
import resource, threading
from spectrain.worker.heap import keep_freed_memory

keep_freed_memory()
import torch  # which may start threads

torch.set_num_threads(1)

def pages_got():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    kept = []
    def receive():
        for _ in range(4):
            kept.append(torch.ones({size_bytes}, dtype=torch.uint8))
    thread = threading.Thread(target=receive)
    thread.start()
    thread.join()

for _ in range(6):
    step()
before = pages_got()
step(), step()
print(pages_got() - before)
"""


@pytest.mark.parametrize("size_bytes", [1 << 20, 8 << 20, (32 << 20) - 4096])
def test_what_one_thread_allocates_and_another_frees_is_used_again(size_bytes: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STEPS.format(size_bytes=size_bytes)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 50  # of thousands that two steps use


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_user_has_told_the_c_library_stands(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    class Library:
        mallopt = staticmethod(lambda *_: pytest.fail("overruled"))

    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: Library())
    monkeypatch.setenv(name, "1")
    heap.keep_freed_memory()


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: object())
    heap.keep_freed_memory()
