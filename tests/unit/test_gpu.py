"""GPUs: none is a normal state."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from builder import gpu
from builder.gpu import Gpu


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

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        if (self.names or [])[handle] == "GB10":
            raise self.NVMLError
        return SimpleNamespace(total=80)

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
        (["H", b"A"], "570.1", (Gpu(name="H", capability="12.0", memory=80), Gpu(name="A", capability="", memory=80))),
        (["GB10"], "570.1", (Gpu(name="GB10", capability="12.0", memory=0),)),
    ],
    ids=["no driver", "no GPU", "two", "no memory of its own"],
)
def test_read(
    monkeypatch: pytest.MonkeyPatch, names: list[str | bytes] | None, driver: str, gpus: tuple[Gpu, ...]
) -> None:
    library = Library(names)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert gpu.read() == (driver, gpus)
    assert gpu.count() == len(gpus)
    assert not library.is_open
