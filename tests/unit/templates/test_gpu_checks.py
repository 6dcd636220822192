"""The arithmetic of the GPU checks, without a GPU: wrong results must fail."""

from __future__ import annotations

import io
import json
import math
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from builder.matrix.project import Project
from tests.gpu import conftest, run
from tests.gpu.checks import common, nvml
from tests.gpu.checks.common import Failed, Figure, NotApplicable, at_least, at_most, between, equal, judge, note
from tests.gpu.checks.nvml import Gpu, System
from tests.paths import ROOT

NAN = math.nan
H100 = Gpu(index=0, name="NVIDIA H100", uuid="GPU-a1", capability="9.0", memory=85 * 10**9, free=80 * 10**9)
T4 = Gpu(index=1, name="Tesla T4", uuid="GPU-b2", capability="7.5", memory=16 * 10**9, free=15 * 10**9)
BOTH = System(driver="570.86.10", cuda="12.8", gpus=(H100, T4), visible=(H100, T4))


class Array:
    """The operations of an array that a comparison uses."""

    def __init__(self, *values: float) -> None:
        self.values = values
        self.shape = (len(values),)

    def __sub__(self, other: Array) -> Array:
        return Array(*(left - right for left, right in zip(self.values, other.values, strict=True)))

    def __mul__(self, other: Array) -> Array:
        return Array(*(left * right for left, right in zip(self.values, other.values, strict=True)))

    def sum(self) -> float:
        return math.fsum(self.values)


@pytest.mark.parametrize(
    ("values", "error"),
    [((3, 4), 0), ((3, 4.5), 0.1), ((-3, -4), 2), ((0, 0), 1), ((4, 3), math.sqrt(2) / 5)],
    ids=["equal", "nearly equal", "wrong sign", "all zero", "swapped"],
)
def test_relative_error(values: Sequence[float], error: float) -> None:
    assert common.relative_error(Array(*values), Array(3, 4)) == pytest.approx(error)


def test_a_relative_error_that_is_not_a_number_fails() -> None:
    assert judge([at_most("error", common.relative_error(Array(NAN, 4), Array(3, 4)), 1e-5)]).state == "failed"


@pytest.mark.parametrize(
    ("result", "expected", "reason"),
    [(Array(3, 4, 5), Array(3, 4), "shape"), (Array(0), Array(0), "zero"), (Array(0), Array(NAN), "zero")],
)
def test_arrays_that_cannot_be_compared(result: Array, expected: Array, reason: str) -> None:
    with pytest.raises(Failed, match=reason):
        common.relative_error(result, expected)


@pytest.mark.parametrize(
    ("figures", "state"),
    [
        ([at_most("a", 1, 1)], "passed"),
        ([at_most("a", 1.01, 1)], "failed"),
        ([at_least("a", 1, 1)], "passed"),
        ([at_least("a", 0.99, 1)], "failed"),
        ([between("a", 3e-4, 5e-5, 2e-3)], "passed"),
        ([between("a", 4e-7, 5e-5, 2e-3)], "failed"),
        ([between("a", 3e-3, 5e-5, 2e-3)], "failed"),
        ([equal("a", 2, 2)], "passed"),
        ([equal("a", 1, 2)], "failed"),
        ([at_most("a", NAN, 1)], "failed"),
        ([at_least("a", NAN, 1)], "failed"),
        ([equal("a", NAN, 1)], "failed"),
        ([at_most("a", math.inf, 1)], "failed"),
        ([at_most("a", 0, 1), at_most("b", 2, 1)], "failed"),
        ([], "failed"),
        ([note("a", 1)], "failed"),
        ([note("a", 1), at_most("b", 0, 1)], "passed"),
    ],
    ids=str,
)
def test_judge(figures: list[Figure], state: str) -> None:
    outcome = judge(figures)
    assert outcome.state == state
    assert bool(outcome.detail) is (state == "failed")
    assert json.loads(json.dumps(outcome.as_data(), allow_nan=False))["state"] == state


DEVICES: list[dict[str, Any]] = [
    {"name": "NVIDIA H100", "capability": "9.0", "memory": 84 * 10**9},
    {"name": "Tesla T4", "capability": "7.5"},
]


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        (DEVICES, ""),
        ([], "GPUs 0 (must be = 2)"),
        (DEVICES[:1], "GPUs 1 (must be = 2)"),
        ([*DEVICES, DEVICES[0]], "GPUs 3 (must be = 2)"),
        (DEVICES[::-1], "GPU 0: name is NVIDIA H100 in NVML, Tesla T4 in the framework"),
        ([DEVICES[0] | {"capability": "8.0"}, DEVICES[1]], "GPU 0: capability is 9.0 in NVML, 8.0 in the framework"),
        ([DEVICES[0] | {"memory": 40 * 10**9}, DEVICES[1]], "memory of GPU 0 / NVML's 0.471 (must be"),
    ],
    ids=["equal", "none", "one too few", "one too many", "another order", "another capability", "another memory"],
)
def test_devices_of_nvml_and_of_the_framework(devices: list[dict[str, Any]], reason: str) -> None:
    try:
        detail = judge(common.same_devices(devices, BOTH)).detail
    except Failed as failure:
        detail = str(failure)
    assert reason in detail
    assert bool(detail) is bool(reason)


def test_slices_of_a_gpu_cannot_be_compared() -> None:
    gpu = Gpu(index=0, name="H", uuid="", capability="", memory=1, free=1, mig=True)
    with pytest.raises(NotApplicable, match="MIG"):
        common.same_devices(DEVICES, System(gpus=(gpu,), visible=(gpu,)))


@pytest.mark.parametrize(
    ("selected", "names"),
    [
        (None, ["NVIDIA H100", "Tesla T4"]),
        ("0,1", ["NVIDIA H100", "Tesla T4"]),
        ("1", ["Tesla T4"]),
        ("1, 0", ["Tesla T4", "NVIDIA H100"]),
        ("GPU-b", ["Tesla T4"]),
        ("GPU-", []),
        ("0,7,1", ["NVIDIA H100"]),
        ("-1", []),
        ("", []),
        ("MIG-1", []),
    ],
)
def test_gpus_visible_by_cuda_visible_devices(selected: str | None, names: list[str]) -> None:
    assert [gpu.name for gpu in nvml.visible(BOTH.gpus, selected)] == names


def test_loaded_libraries(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    line = "7f00-7f01 r-xp 00000000 00:1f 42 {}\n"
    cudnn = "/opt/venv/lib/python/site-packages/nvidia/cudnn/lib"
    paths = [f"{cudnn}/libcudnn_cnn.so.9", f"{cudnn}/libcudnn.so.9", "[heap]", "/lib/libc.so.6"]
    maps.write_text("".join(line.format(path) for path in [*paths, *paths]))
    assert common.loaded("libcudnn_cnn", maps) == ["libcudnn_cnn.so.9"]
    assert common.loaded("libcublas", maps) == []


def test_every_framework_of_the_matrix_has_gpu_tests() -> None:
    """`--gpu require` fails without."""
    frameworks = Project(ROOT).matrix.frameworks
    assert set(frameworks) <= set(run.PACKAGES)
    assert [name for name in frameworks if not (ROOT / f"tests/gpu/test_{name}.py").is_file()] == []


def test_all_files_of_the_checks_are_copied_into_the_image() -> None:
    with tarfile.open(fileobj=io.BytesIO(conftest.archive())) as tar:
        names = {name.removeprefix("gpu-tests/") for name in tar.getnames()}
    assert names == {"run.py", *(f"checks/{path.name}" for path in (ROOT / "tests/gpu/checks").glob("*.py"))}


def test_a_framework_that_cannot_be_imported_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> None:
        raise OSError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(Failed, match=r"`import torch` failed: OSError: libcudnn\.so\.9: cannot open"):
        common.load("torch")
