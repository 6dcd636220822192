"""The GPUs are leased to one image at a time. tests/local/test_nvml_stub.py reads GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from builder.compat import gpus
from builder.compat.gpus import NEEDED, Gpu, Pool

GB = 10**9


class GpuMachineProbe:
    """GPUs with these free bytes."""

    def __init__(self, *free: int, driver: str = "570.1") -> None:
        self.driver = driver
        self.free = list(free)

    def __call__(self) -> tuple[str, tuple[Gpu, ...]]:
        gpus = tuple(
            Gpu(name=f"H{index}", capability="9.0", memory=80 * GB, free=free, index=index)
            for index, free in enumerate(self.free)
        )
        return self.driver, gpus


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pool]:
    def pool(probe: Callable[[], tuple[str, tuple[Gpu, ...]]]) -> Pool:
        monkeypatch.setattr(gpus, "read_gpus", probe)
        monkeypatch.setattr(gpus, "GPU_POLL_S", 0.001)
        return Pool()

    return pool


def lease(pool: Pool) -> AbstractContextManager[tuple[Gpu, ...]]:
    """All GPUs fit, and nothing stops the test."""
    return pool.lease(lambda _: True, lambda: False)


def indexes(gpus: tuple[Gpu, ...]) -> list[int]:
    return [gpu.index for gpu in gpus]


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (GpuMachineProbe(driver=""), "no NVIDIA driver on this machine"),
        (GpuMachineProbe(), "driver 570.1 has no GPU"),
        (GpuMachineProbe(NEEDED - 1, 0), "no GPU has 8 GB free: H0 has 8.0 GB free, H1 has 0.0 GB free"),
        (GpuMachineProbe(0, NEEDED), ""),
    ],
    ids=["no driver", "no GPU", "all busy", "one with room"],
)
def test_why_not(pool: Callable[..., Pool], machine: GpuMachineProbe, reason: str) -> None:
    leases = pool(machine)
    assert leases.why_not() == reason
    with lease(leases) as leased:
        assert bool(leased) is not bool(reason)


def test_a_single_image_gets_every_gpu_with_room_most_free_memory_first(pool: Callable[..., Pool]) -> None:
    with lease(pool(GpuMachineProbe(20 * GB, 1 * GB, 80 * GB))) as leased:
        assert indexes(leased) == [2, 0]


def test_images_take_turns_and_each_gets_all_gpus(pool: Callable[..., Pool]) -> None:
    """The collectives need several GPUs."""
    leases = pool(GpuMachineProbe(80 * GB, 80 * GB))
    running: list[int] = []
    most: list[int] = []

    def test_one() -> None:
        with lease(leases) as leased:
            running.append(1)
            most.append(len(running))
            assert indexes(leased) == [0, 1]
            threading.Event().wait(0.002)
            running.pop()

    with ThreadPoolExecutor(8) as threads:
        for test in [threads.submit(test_one) for _ in range(8)]:
            test.result(20)
    assert most == [1] * 8


def test_a_gpu_is_returned_after_a_failure(pool: Callable[..., Pool]) -> None:
    leases = pool(GpuMachineProbe(80 * GB))
    with pytest.raises(ZeroDivisionError), lease(leases):
        raise ZeroDivisionError
    with lease(leases) as leased:
        assert indexes(leased) == [0]


def test_a_gpu_that_this_run_uses_is_not_reported_as_busy(pool: Callable[..., Pool]) -> None:
    machine = GpuMachineProbe(80 * GB)
    leases = pool(machine)
    with lease(leases):
        machine.free = [0]
        assert leases.why_not() == ""


def test_a_lease_waits_for_memory_that_is_freed_late(pool: Callable[..., Pool]) -> None:
    machine = GpuMachineProbe(80 * GB)
    probes = 0

    def probe() -> tuple[str, tuple[Gpu, ...]]:
        nonlocal probes
        probes += 1
        machine.free = [0] if probes in (2, 3, 4) else [80 * GB]
        return machine()

    leases = pool(probe)
    with lease(leases):
        pass
    with lease(leases) as leased:
        assert indexes(leased) == [0]
    assert probes == 5


def test_a_gpu_that_stays_busy_is_not_waited_for(pool: Callable[..., Pool]) -> None:
    machine = GpuMachineProbe(80 * GB)
    leases = pool(machine)
    with lease(leases):
        machine.free = [0]
    with lease(leases) as leased:
        assert leased == ()


def test_only_gpus_that_fit_are_leased(pool: Callable[..., Pool]) -> None:
    with pool(GpuMachineProbe(80 * GB, 80 * GB)).lease(lambda gpu: gpu.index == 1, lambda: False) as leased:
        assert indexes(leased) == [1]


def test_a_stopped_test_does_not_wait(pool: Callable[..., Pool]) -> None:
    leases = pool(GpuMachineProbe(80 * GB))
    with lease(leases), leases.lease(lambda _: True, lambda: True) as leased:
        assert leased == ()
