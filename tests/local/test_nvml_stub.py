"""Machines with other GPUs and drivers, simulated by a stand-in for NVIDIA's management library; see tests/nvml."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import nvml
from tests.nvml import Card
from tests.paths import ROOT

DRIVER = "570.86.10"
H100 = Card("NVIDIA H100 80GB HBM3", "9.0", 81559, 600)
T4 = Card("Tesla T4", "7.5", 15360, 300)
BUSY = Card("NVIDIA H100 80GB HBM3", "9.0", 81559, 80000)
# A `torch` with only its version and GPUs, so that every other check fails.
TORCH = """
from types import SimpleNamespace as Space
__version__ = "9.9"
version = Space(cuda="12.8")
GPUS = {gpus!r}
def properties(number):
    name, (major, minor), memory = GPUS[number]
    return Space(name=name, major=major, minor=minor, total_memory=memory)
cuda = Space(is_available=lambda: bool(GPUS), device_count=lambda: len(GPUS), get_device_properties=properties)
manual_seed = device = lambda *_: None
backends = Space(cuda=Space(matmul=Space()))
"""
# Notes each process that imports it. Its check `devices` passes, `matmul` calls `randn`, and others fail.
NOTED = """
from pathlib import Path
with Path(__file__).with_name("imports").open("a") as stream:
    print("import", file=stream)
float32 = None
def randn(*_):
    import os, time
    CODE
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@dataclass
class Result:
    status: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


class StubbedMachine:
    """Runs Python with a driver in a given state."""

    def __init__(self, library: Path, packages: Path) -> None:
        self.library = library
        self.packages = packages

    def python(self, state: str, *arguments: str, **extra: str) -> Result:
        base = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        environment = nvml.environment(self.library, state, {**base, "PYTHONPATH": f"{ROOT}:{self.packages}", **extra})
        result = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        return Result(result.returncode, result.stdout, result.stderr)

    def read(self, state: str) -> Any:
        """The driver and GPUs from `builder.compat.gpus`, and the leased ones."""
        code = (
            "import json; from dataclasses import asdict; from builder.compat import gpus as gpu\n"
            "driver, gpus = gpu.read_gpus()\n"
            "with gpu.Pool().lease(bool, lambda: False) as leased: indices = [each.index for each in leased]\n"
            "print(json.dumps([driver, [asdict(each) for each in gpus], gpu.Pool().why_not(), indices]))"
        )
        result = self.python(state, "-c", code)
        assert result.status == 0, result.err
        return result.data

    def checks(self, state: str, *arguments: str, **extra: str) -> Result:
        """Runs tests/gpu/run.py with the `torch` that the method `torch` wrote."""
        return self.python(state, str(ROOT / "tests/gpu/run.py"), *arguments, **extra)

    def torch(self, *gpus: tuple[str, tuple[int, int], int], code: str = "") -> None:
        (self.packages / "torch.py").write_text(code or TORCH.format(gpus=list(gpus)), encoding="utf-8")


@pytest.fixture
def machine(library: Path, tmp_path: Path) -> StubbedMachine:
    return StubbedMachine(library, tmp_path)


def properties(card: Card) -> tuple[str, tuple[int, int], int]:
    """A GPU with the values of CUDA, which has less memory than NVML."""
    major, minor = card.capability.split(".")
    return card.name, (int(major), int(minor)), int((card.total or 0) * 1.044e6)


def test_several_gpus_one_busy(machine: StubbedMachine) -> None:
    driver, gpus, why, leased = machine.read(nvml.state(DRIVER, BUSY, T4, H100))
    assert driver == DRIVER
    assert [(gpu["name"], gpu["capability"]) for gpu in gpus] == [
        (BUSY.name, "9.0"), ("Tesla T4", "7.5"), (H100.name, "9.0"),
    ]  # fmt: skip
    assert [(gpu["memory"] >> 20, gpu["free"] >> 20) for gpu in gpus] == [
        (81559, 1559),
        (15360, 15060),
        (81559, 80959),
    ]
    assert len({gpu["uuid"] for gpu in gpus}) == 3
    assert (why, leased) == ("", [2, 1])


@pytest.mark.parametrize(
    ("state", "driver", "why"),
    [
        (nvml.DRIVER_NOT_LOADED, "", "no NVIDIA driver on this machine"),
        (nvml.state(DRIVER), DRIVER, f"driver {DRIVER} has no GPU"),
    ],
)
def test_a_machine_without_a_gpu(machine: StubbedMachine, state: str, driver: str, why: str) -> None:
    assert machine.read(state) == [driver, [], why, []]


def test_gpus_of_unknown_capability_and_of_unknown_memory(machine: StubbedMachine) -> None:
    cards = Card("NVIDIA H100", "-", 81559, 600), Card("NVIDIA GB10", "12.1", None)
    _, gpus, why, leased = machine.read(nvml.state(DRIVER, *cards))
    assert [gpu["capability"] for gpu in gpus] == ["", "12.1"]
    assert (gpus[1]["memory"], gpus[1]["free"], why, leased) == (0, 0, "", [0, 1])


# tests/gpu/run.py


def test_checks_without_a_framework(machine: StubbedMachine) -> None:
    result = machine.checks(nvml.state(DRIVER, H100))
    assert (result.status, result.out) == (1, "")
    assert "none of torch, tensorflow, jax" in result.err


@pytest.mark.parametrize(
    ("state", "hidden", "why"),
    [
        (nvml.DRIVER_NOT_LOADED, None, "no GPU: NVML: Driver Not Loaded"),
        (nvml.state(DRIVER), None, "no GPU: NVML: the driver has no GPU"),
        (nvml.state(DRIVER, H100), "", "no GPU: CUDA_VISIBLE_DEVICES= hides every GPU"),
    ],
    ids=["no driver", "no GPU", "hidden"],
)
def test_without_a_gpu_every_check_fails(machine: StubbedMachine, state: str, hidden: str | None, why: str) -> None:
    machine.torch(properties(H100))  # torch would report a GPU
    extra = {} if hidden is None else {"CUDA_VISIBLE_DEVICES": hidden}
    result = machine.checks(state, "--json", "-", **extra)
    assert result.status == 1
    assert not result.data["passed"]
    assert {check["state"] for check in result.data["results"]} == {"failed"}
    assert {check["detail"] for check in result.data["results"]} == {why}
    assert why in result.err


def test_a_driver_that_is_too_old(machine: StubbedMachine) -> None:
    machine.torch()
    run = machine.checks(nvml.state("470.82.01", H100, cuda=11040), "--only", "matmul", "--json", "-")
    [result] = run.data["results"]
    assert (run.status, result["state"], result["driver"]) == (1, "failed", "470.82.01")
    assert "PyTorch 9.9 finds no GPU: it was built for CUDA 12.8; driver 470.82.01 runs CUDA 11.4" in result["detail"]


def test_nvml_and_the_framework_have_the_same_devices(machine: StubbedMachine, tmp_path: Path) -> None:
    machine.torch(properties(H100), properties(T4))
    path = tmp_path / "result.json"
    run = machine.checks(nvml.state(DRIVER, H100, T4), "--only", "devices", "--json", str(path))
    assert run.status == 0, run.out
    data = json.loads(path.read_text())
    [result] = data["results"]
    assert (data["passed"], result["state"], result["driver"]) == (True, "passed", DRIVER)
    assert result["device"] == f"0: {H100.name}, 1: Tesla T4"
    assert result["figures"][0] == {"name": "GPUs", "value": 2, "least": 2, "most": 2}
    assert re.search(r"^pytorch devices +passed ", run.out, re.MULTILINE)


def test_one_of_several_devices(machine: StubbedMachine) -> None:
    machine.torch(properties(T4))
    state = nvml.state(DRIVER, H100, T4)
    result = machine.checks(state, "--only", "devices", "--device", "1", "--json", "-")
    assert result.status == 0, result.err
    assert [gpu["name"] for gpu in result.data["devices"]] == ["Tesla T4"]
    missing = machine.checks(state, "--device", "2")
    assert missing.status == 2
    assert "no GPU 2: NVML has 2" in missing.err


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("os.abort()", "killed by SIGABRT"),
        ("time.sleep(600)", "not finished within 5 s"),
        ("raise RuntimeError('illegal memory access')", "illegal memory access"),
        ("os._exit(0)", "ended with status 0"),
    ],
)
def test_checks_share_a_process_until_one_fails(machine: StubbedMachine, code: str, why: str) -> None:
    """An error of CUDA stays until its process ends, and would fail every later check."""
    machine.torch(code=TORCH.format(gpus=[properties(H100)]) + NOTED.replace("CODE", code))
    names = ["devices", "matmul", "convolution", "memory"]
    only = [part for name in names for part in ("--only", name)]
    results = machine.checks(nvml.state(DRIVER, H100), *only, "--timeout", "5", "--json", "-").data["results"]
    assert [result["check"] for result in results] == names
    assert [result["state"] for result in results] == ["passed", "failed", "failed", "failed"]
    assert results[0]["version"] == "9.9"
    assert why in results[1]["detail"]
    assert "backends" in results[2]["detail"]
    # `devices` and `matmul`; `convolution`; `memory`.
    assert len((machine.packages / "imports").read_text().splitlines()) == 3


# ---- the launcher of the images

DESCRIBE = """
import json, sys
from templates.base.files.usr.local.lib.workstation import gpus
from templates.base.files.usr.local.lib.workstation.refusal import Refusal
image = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_REQUIRE_CUDA": "driver>=525.60.13"}
try:
    print(json.dumps(gpus.describe(gpus.read(), {**image, **dict(pair.split("=", 1) for pair in sys.argv[1:])})))
except Refusal as refusal:
    print(json.dumps([refusal.status, str(refusal)]))
"""


@pytest.mark.parametrize(
    ("state", "lines", "warning"),
    [
        (
            nvml.state(DRIVER, H100, T4, cuda=12080),
            [
                "GPU 0: NVIDIA H100 80GB HBM3, 80 GiB, driver 570.86.10, CUDA up to 12.8",
                "GPU 1: Tesla T4, 15 GiB, driver 570.86.10, CUDA up to 12.8",
            ],
            "",
        ),
        (
            nvml.state("470.82.01", T4, cuda=11040),
            ["GPU 0: Tesla T4, 15 GiB, driver 470.82.01, CUDA up to 11.4"],
            "driver 470.82.01 is too old for the CUDA of this image, which needs 525.60.13 or newer",
        ),
        (nvml.state(DRIVER, cuda=12080), [], "Driver 570.86.10 has no GPU"),
        (nvml.DRIVER_NOT_LOADED, [], "NVML failed: Driver Not Loaded"),
    ],
)
def test_the_launcher_describes_the_driver(machine: StubbedMachine, state: str, lines: list[str], warning: str) -> None:
    output, warnings = machine.python(state, "-c", DESCRIBE).data
    assert output == lines
    assert [warning in line for line in warnings] == ([True] if warning else [])
    required = machine.python(state, "-c", DESCRIBE, "GPU_REQUIRED=1").data
    assert required[0] == (69 if warning else lines)


def test_the_launcher_reads_what_others_use(machine: StubbedMachine) -> None:
    """Not what the driver reserves, and nothing of a GPU in slices."""
    cards = [
        Card(used=600, reserved=551),
        Card(used=20551, reserved=551),
        Card(used=2, processes=3),
        Card(used=70000, processes=3, mig=1),
        Card(total=None),
    ]
    code = """
import json
from templates.base.files.usr.local.lib.workstation import gpus
print(json.dumps([[gpu.used >> 20, gpu.processes] for gpu in gpus.read().gpus]))
"""
    result = machine.python(nvml.state(DRIVER, *cards, cuda=12080), "-c", code)
    assert result.data == [[49, 0], [20000, 0], [2, 3], [0, 0], [0, 0]]


def test_the_launcher_does_not_stay_a_client_of_the_gpus(machine: StubbedMachine) -> None:
    code = """
import ctypes
from templates.base.files.usr.local.lib.workstation import gpus
gpus.read()
print(ctypes.CDLL("libnvidia-ml.so.1").nvmlDeviceGetCount_v2(ctypes.byref(ctypes.c_uint())))
"""
    nvml_error_uninitialized = 1
    assert machine.python(nvml.state(DRIVER, H100, cuda=12080), "-c", code).data == nvml_error_uninitialized
