"""How many threads the kernels have, and how work is shared among them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from sidestep.engine import threads
from sidestep.engine.threads import run_in_parallel, thread_budget


def parts_of(total: int, *, at_least: int = 1, multiple_of: int = 1) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    run_in_parallel(lambda *part: seen.append(part), total, at_least=at_least, multiple_of=multiple_of)
    return sorted(seen)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("total", [0, 1, 2, 7, 100, 1000, 1024, 5000])
def test_parts_make_up_the_whole(count: int, total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTEP_THREADS", str(count))
    for at_least, multiple_of in ((1, 1), (10, 1), (1, 64), (100, 16)):
        parts = parts_of(total, at_least=at_least, multiple_of=multiple_of)
        assert [end for _, end in parts[:-1]] == [begin for begin, _ in parts[1:]]
        assert (parts[0][0], parts[-1][1]) == (0, total) if total else not parts
        assert all((end - begin) % multiple_of == 0 for begin, end in parts[:-1])
        assert len(parts) <= max(1, min(count, total // at_least))


def test_each_part_has_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTEP_THREADS", "3")
    meeting = threading.Barrier(3, timeout=60)  # which is passed only if all three run at a time
    run_in_parallel(lambda *_: meeting.wait(), 3, at_least=1, multiple_of=1)


@pytest.mark.parametrize("bad", [0, 2])
def test_an_error_in_any_part_is_raised_when_all_have_ended(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTEP_THREADS", "3")
    ended: list[int] = []

    def work(begin: int, _: int) -> None:
        ended.append(begin)
        if begin == bad:
            raise ValueError(f"part {begin}")

    with pytest.raises(ValueError, match=f"part {bad}"):
        run_in_parallel(work, 3, at_least=1, multiple_of=1)
    assert sorted(ended) == [0, 1, 2]
    run_in_parallel(work, 0, at_least=1, multiple_of=1)


def test_without_threads_to_be_had_the_work_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the main thread has ended, and another trains on."""
    monkeypatch.setenv("SIDESTEP_THREADS", "3")
    ended = ThreadPoolExecutor(1)
    ended.shutdown()
    monkeypatch.setattr(threads, "_pool", lambda *_: ended)
    seen: list[int] = []
    run_in_parallel(lambda begin, _: seen.append(begin), 3, at_least=1, multiple_of=1)
    assert sorted(seen) == [0, 1, 2]


def test_ctrl_c_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTEP_THREADS", "2")
    release, ended = threading.Event(), threading.Event()
    wait, calls = threads.wait, []

    def interrupted(futures: Any) -> Any:
        calls.append(futures)
        if len(calls) == 1:
            release.set()
            raise KeyboardInterrupt
        return wait(futures)

    def work(begin: int, _: int) -> None:
        if begin:
            release.wait(60)
            ended.set()

    monkeypatch.setattr(threads, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_in_parallel(work, 2, at_least=1, multiple_of=1)
    assert ended.is_set()


def test_the_budget_is_the_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIDESTEP_THREADS", raising=False)
    monkeypatch.setattr(threads, "cores", lambda: 8)
    for processes, count in (("", 8), ("1", 8), ("2", 4), ("3", 2), ("16", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        for omp in ("1", "4"):
            monkeypatch.setenv("OMP_NUM_THREADS", omp)
            assert thread_budget() == count
    for chosen, count in (("5", 5), ("0", 1), ("some", 1), ("\u00b2", 1)):
        monkeypatch.setenv("SIDESTEP_THREADS", chosen)
        assert thread_budget() == count


def test_torchs_number_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("SIDESTEP_THREADS", "3")
    seen: list[int] = []
    run_in_parallel(lambda *_: seen.append(torch.get_num_threads()), 3, at_least=1, multiple_of=1)
    assert torch.get_num_threads() == before
    assert len(seen) == 3


def test_a_quota_bounds_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_quotas", lambda: [1])
    assert threads.cores() == 1
    monkeypatch.setattr(threads, "_quotas", lambda: [10**6])
    assert 1 <= threads.cores() < 10**6
