"""GPUs: none is a normal state; each is lent to one image at a time."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from builder import gpu
from builder.engine import Engine
from builder.gpu import NEEDED, Gpu, Pool

GB = 10**9


class Library:
    """Stands in for pynvml."""

    class NVMLError(Exception):
        pass

    def __init__(self, names: list[str | bytes] | None) -> None:
        self.names = names
        self.is_open = False

    def nvmlInit(self) -> None:  # noqa: N802  pynvml's name, as those below
        if self.names is None:
            raise self.NVMLError
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.names or ())

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:  # noqa: N802
        return (self.names or [])[handle]

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:  # noqa: N802
        return f"GPU-{handle}".encode()

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        if (self.names or [])[handle] == "GB10":
            raise self.NVMLError
        return SimpleNamespace(total=80, free=70)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        if (self.names or [])[handle] == b"A":
            raise self.NVMLError
        return 12, 0

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"570.1"


@pytest.mark.parametrize(
    ("names", "driver", "gpus"),
    [
        (None, "", ()),
        ([], "570.1", ()),
        (
            ["H", b"A"],
            "570.1",
            (
                Gpu(name="H", capability="12.0", memory=80, free=70, index=0, uuid="GPU-0"),
                Gpu(name="A", capability="", memory=80, free=70, index=1, uuid="GPU-1"),
            ),
        ),
        (["GB10"], "570.1", (Gpu(name="GB10", capability="12.0", memory=0, index=0, uuid="GPU-0"),)),
    ],
    ids=["no driver", "no GPU", "two", "no memory of its own"],
)
def test_read(
    monkeypatch: pytest.MonkeyPatch, names: list[str | bytes] | None, driver: str, gpus: tuple[Gpu, ...]
) -> None:
    library = Library(names)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert gpu.read() == (driver, gpus)
    assert len(gpu.read()[1]) == len(gpus)
    assert not library.is_open


class Machine:
    """GPUs with so many bytes free."""

    def __init__(self, *free: int, driver: str = "570.1") -> None:
        self.driver = driver
        self.free = list(free)

    def __call__(self) -> tuple[str, tuple[Gpu, ...]]:
        gpus = tuple(
            Gpu(name=f"H{index}", capability="9.0", memory=80 * GB, free=free, index=index)
            for index, free in enumerate(self.free)
        )
        return self.driver, gpus


def pool(machine: Machine, images: int = 1) -> Pool:
    return Pool(images, ask=machine, poll=0.001)


def numbers(gpus: tuple[Gpu, ...]) -> list[int]:
    return [one.index for one in gpus]


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (Machine(driver=""), "no NVIDIA driver answers on this machine"),
        (Machine(), "driver 570.1 has no GPU"),
        (Machine(NEEDED - 1, 0), "no GPU has 8 GB free: H0 has 8.0 GB free, H1 has 0.0 GB free"),
        (Machine(0, NEEDED), ""),
    ],
    ids=["no driver", "no GPU", "all busy", "one with room"],
)
def test_why_not(machine: Machine, reason: str) -> None:
    one = pool(machine)
    assert one.why_not() == reason
    with one.lease() as gpus:
        assert bool(gpus) is not bool(reason)


def test_a_gpu_that_does_not_tell_its_memory_is_tried() -> None:
    assert Gpu(name="GB10", memory=0).has_room


def test_an_image_alone_gets_every_gpu_with_room_the_emptiest_first() -> None:
    with pool(Machine(20 * GB, 1 * GB, 80 * GB)).lease() as gpus:
        assert numbers(gpus) == [2, 0]


def test_images_at_once_share_the_gpus() -> None:
    machine = Machine(*[80 * GB] * 5)
    lent = pool(machine, images=2)
    with lent.lease() as first, lent.lease() as second:
        assert (len(first), len(second)) == (2, 2)
        assert not set(numbers(first)) & set(numbers(second))


def test_more_images_than_gpus_wait_and_none_shares_a_gpu() -> None:
    lent = pool(Machine(80 * GB, 80 * GB), images=8)
    at_work: set[int] = set()
    seen: list[int] = []
    lock = threading.Lock()

    def test_one() -> None:
        with lent.lease() as gpus:
            [number] = numbers(gpus)
            with lock:
                assert number not in at_work
                at_work.add(number)
                seen.append(number)
            threading.Event().wait(0.002)
            with lock:
                at_work.remove(number)

    threads = [threading.Thread(target=test_one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(seen) == 8
    assert set(seen) == {0, 1}


def test_a_gpu_comes_back_after_a_failure() -> None:
    lent = pool(Machine(80 * GB))
    with pytest.raises(ZeroDivisionError), lent.lease():
        raise ZeroDivisionError
    with lent.lease() as gpus:
        assert numbers(gpus) == [0]


def test_a_gpu_that_this_run_uses_is_not_called_busy() -> None:
    machine = Machine(80 * GB)
    lent = pool(machine, images=2)
    with lent.lease():
        machine.free = [0]
        assert lent.why_not() == ""


def test_memory_that_comes_back_late_is_waited_for() -> None:
    machine = Machine(80 * GB)
    asked: list[int] = []

    def ask() -> tuple[str, tuple[Gpu, ...]]:
        asked.append(0)
        machine.free = [0] if len(asked) in (2, 3, 4) else [80 * GB]
        return machine()

    lent = Pool(1, ask=ask, poll=0.001)
    with lent.lease():
        pass
    with lent.lease() as gpus:
        assert numbers(gpus) == [0]
    assert len(asked) == 5


def test_a_gpu_that_stays_busy_is_given_up() -> None:
    machine = Machine(80 * GB)
    lent = pool(machine)
    with lent.lease():
        machine.free = [0]
    with lent.lease() as gpus:
        assert gpus == ()


def test_only_what_fits_is_lent() -> None:
    with pool(Machine(80 * GB, 80 * GB)).lease(fits=lambda one: one.index == 1) as gpus:
        assert numbers(gpus) == [1]


def test_who_is_stopped_waits_no_longer() -> None:
    lent = pool(Machine(80 * GB), images=2)
    with lent.lease(), lent.lease(stopped=lambda: True) as gpus:
        assert gpus == ()


@pytest.mark.parametrize(
    ("gpus", "wanted"),
    [
        ((), None),
        (False, None),
        (True, {"Count": -1, "DeviceIDs": []}),
        (["GPU-1", "GPU-3"], {"Count": 0, "DeviceIDs": ["GPU-1", "GPU-3"]}),
    ],
    ids=["none", "not", "all", "two"],
)
def test_a_container_gets_the_gpus_that_were_lent_and_no_other(gpus: Any, wanted: dict[str, Any] | None) -> None:
    asked: dict[str, Any] = {}
    client: Any = SimpleNamespace(containers=SimpleNamespace(run=lambda *_, **options: asked.update(options)))
    Engine(client).start("sha256:1", checkout="/checkout", gpus=gpus)
    if wanted is None:
        assert asked["device_requests"] is None
    else:
        [request] = asked["device_requests"]
        assert {key: request[key] for key in wanted} == wanted
        assert request["Capabilities"] == [["gpu"]]
