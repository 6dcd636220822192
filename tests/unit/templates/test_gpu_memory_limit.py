"""GPU_MEMORY_LIMIT: the limit is set when a framework is imported, and only then."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.paths import ROOT

HOOK = ROOT / "templates/base/files/usr/local/lib/gpu-memory-limit/sitecustomize.py"


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    monkeypatch.setenv("GPU_MEMORY_LIMIT", "8GB")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.util.spec_from_file_location("hook", HOOK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in ("torch", "tensorflow", "jaxlib"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("text", "expected"), [("8GB", 8 * 10**9), ("512 MiB", 2**29), ("1.5GiB", 3 * 2**29)])
def test_every_size_that_the_launcher_accepts(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch, text: str, expected: int
) -> None:
    monkeypatch.setenv("GPU_MEMORY_LIMIT", text)
    assert hook.limit() == expected


def test_the_limit_of_torch_is_set_when_cuda_starts(hook: ModuleType) -> None:
    waiting: list[Callable[[], None]] = []
    calls: list[tuple[float, int]] = []
    totals = [16 * 10**9, 4 * 10**9]
    torch = SimpleNamespace(
        version=SimpleNamespace(cuda="12.8"),
        cuda=SimpleNamespace(
            _lazy_call=waiting.append,
            current_device=lambda: 1,
            set_device=lambda index: calls.append((-1.0, index)),
            device_count=lambda: len(totals),
            get_device_properties=lambda index: SimpleNamespace(total_memory=totals[index]),
            set_per_process_memory_fraction=lambda fraction, index: calls.append((fraction, index)),
        ),
    )
    hook.limit_torch(torch)
    assert calls == []
    waiting[0]()
    assert calls == [(0.5, 0), (1.0, 1), (-1.0, 1)]  # last, the current GPU is restored


def test_tensorflow_has_a_logical_device_of_that_size(hook: ModuleType) -> None:
    calls: list[Any] = []
    config = SimpleNamespace(
        list_physical_devices=lambda kind: [kind + ":0", kind + ":1"],
        LogicalDeviceConfiguration=lambda memory_limit: memory_limit,
        set_logical_device_configuration=lambda gpu, sizes: calls.append((gpu, sizes)),
    )
    hook.limit_tensorflow(SimpleNamespace(config=config))
    assert calls == [("GPU:0", [7629]), ("GPU:1", [7629])]


def test_the_limit_is_set_once_after_the_import(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by looking for torch: transformers and others do so before they import it."""
    limited: list[int] = []
    monkeypatch.setitem(hook.AFTER, "torch", lambda module: limited.append(module.value))
    (tmp_path / "torch.py").write_text("value = 7\n")
    importlib.invalidate_caches()
    assert importlib.util.find_spec("torch") is not None
    assert limited == []
    assert importlib.import_module("torch").value == 7
    importlib.reload(sys.modules["torch"])
    assert limited == [7]


def test_other_modules_and_absent_frameworks_are_not_affected(hook: ModuleType) -> None:
    assert hook.Watch().find_spec("json", None) is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tensorflow")
