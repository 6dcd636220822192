"""Each GPU is leased to one image at a time. tests/local/test_nvml_stub.py reads GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable

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
    def pool(probe: Callable[[], tuple[str, tuple[Gpu, ...]]], images: int = 1) -> Pool:
        monkeypatch.setattr(gpus, "read_gpus", probe)
        monkeypatch.setattr(gpus, "GPU_POLL_S", 0.001)
        return Pool(images)

    return pool


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
    with leases.lease() as leased:
        assert bool(leased) is not bool(reason)


def test_a_single_image_gets_every_gpu_with_room_most_free_memory_first(pool: Callable[..., Pool]) -> None:
    with pool(GpuMachineProbe(20 * GB, 1 * GB, 80 * GB)).lease() as leased:
        assert indexes(leased) == [2, 0]


@pytest.mark.parametrize(("number", "images"), [(5, 2), (8, 16)])
def test_concurrent_images_share_the_gpus(pool: Callable[..., Pool], number: int, images: int) -> None:
    """Two for each image, even if more images may be tested at a time: the collectives need several GPUs."""
    leases = pool(GpuMachineProbe(*[80 * GB] * number), images=images)
    with leases.lease() as first, leases.lease() as second:
        assert (len(first), len(second)) == (2, 2)
        assert not set(indexes(first)) & set(indexes(second))


def test_more_images_than_gpus_wait_and_none_shares_a_gpu(pool: Callable[..., Pool]) -> None:
    leases = pool(GpuMachineProbe(80 * GB, 80 * GB), images=8)
    in_use: set[int] = set()
    seen: list[int] = []
    lock = threading.Lock()

    def test_one() -> None:
        with leases.lease() as leased:
            with lock:
                assert not in_use & {*indexes(leased)}
                in_use.update(indexes(leased))
                seen.extend(indexes(leased))
            threading.Event().wait(0.002)
            with lock:
                in_use.difference_update(indexes(leased))

    threads = [threading.Thread(target=test_one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(seen) == 16
    assert set(seen) == {0, 1}


def test_a_gpu_is_returned_after_a_failure(pool: Callable[..., Pool]) -> None:
    leases = pool(GpuMachineProbe(80 * GB))
    with pytest.raises(ZeroDivisionError), leases.lease():
        raise ZeroDivisionError
    with leases.lease() as leased:
        assert indexes(leased) == [0]


def test_a_gpu_that_this_run_uses_is_not_reported_as_busy(pool: Callable[..., Pool]) -> None:
    machine = GpuMachineProbe(80 * GB)
    leases = pool(machine, images=2)
    with leases.lease():
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
    with leases.lease():
        pass
    with leases.lease() as leased:
        assert indexes(leased) == [0]
    assert probes == 5


def test_a_gpu_that_stays_busy_is_not_waited_for(pool: Callable[..., Pool]) -> None:
    machine = GpuMachineProbe(80 * GB)
    leases = pool(machine)
    with leases.lease():
        machine.free = [0]
    with leases.lease() as leased:
        assert leased == ()


def test_only_gpus_that_fit_are_leased(pool: Callable[..., Pool]) -> None:
    with pool(GpuMachineProbe(80 * GB, 80 * GB)).lease(fits=lambda gpu: gpu.index == 1) as leased:
        assert indexes(leased) == [1]


def test_a_stopped_test_does_not_wait(pool: Callable[..., Pool]) -> None:
    leases = pool(GpuMachineProbe(80 * GB), images=2)
    with leases.lease(), leases.lease(stopped=lambda: True) as leased:
        assert leased == ()
