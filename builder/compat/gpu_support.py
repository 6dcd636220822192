"""Decides which images run on a GPU with a driver, and gives the reasons that others do not. Pure."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

from builder.common.errors import RefusedError, UsageError
from builder.matrix.cells import Cell
from builder.matrix.facts import Facts
from builder.matrix.schema import AMD64, CPU, Arch, Matrix

_CAPABILITY = re.compile(r"(?:(?:sm|compute)_)?([1-9][0-9]?)\.?([0-9])")
_ARCHITECTURE = re.compile(r"(sm|compute)_([1-9][0-9]?)([0-9])([af]?)")
_DRIVER = re.compile(r"[0-9]{3}(\.[0-9]{1,4}){0,2}")
# Words in the names that drivers report that do not identify the chip: "NVIDIA A100-SXM4-80GB",
# "NVIDIA H100 80GB HBM3", "NVIDIA GeForce GTX 1080 with Max-Q Design".
_NOT_CHIP = re.compile(
    r"nvidia|geforce|tesla|gpu|laptop|with|max|q|design|pcie|sxm[0-9]?|nvl|fhhl|dgxs|active|hbm[0-9]e?|[0-9]+gb?|"
    r"generation|workstation|server|edition"
)
_AMD = re.compile(r"\b(amd|radeon|instinct|rx ?[0-9]{3,4}[a-z]*|mi ?[0-9]{2,3}[a-z]?)\b")
_MIG = re.compile(r"\bmig [0-9]+g\..*")  # a part of a GPU: "NVIDIA H100 80GB HBM3 MIG 1g.10gb"


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU; `capability` as 12.0, empty if unknown. `name` is the compute capability if nothing else is known."""

    name: str
    capability: str = ""

    @property
    def description(self) -> str:
        """The GPU in a sentence."""
        return f"compute capability {self.name}" if self.name == self.capability else self.name


@dataclass(frozen=True, kw_only=True)
class ImageNeeds:
    """The needs of an image; a field is empty if unknown.

    `cuda` is a version or `cpu`; `driver` the oldest for that CUDA; `compiled` the CUDA that the framework was compiled
    with; `framework` its name in the matrix; `arch` the architecture of the CPU.
    """

    cuda: str
    driver: str = ""
    architectures: tuple[str, ...] = ()
    compiled: str = ""
    framework: str = ""
    arch: Arch = AMD64


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result for an image on a GPU. `runs` is None if that is unknown.

    `reasons` are single lines: the reasons that it does not run or that this is unknown, else notes.
    """

    runs: bool | None
    reasons: tuple[str, ...] = ()


def needs_of_cell(matrix: Matrix, cell: Cell, facts: Facts) -> ImageNeeds:
    """The needs of the image of a cell."""
    if cell.is_cpu:
        return ImageNeeds(cuda=CPU, framework=cell.framework, arch=cell.arch)
    build = facts.build_of_cell(matrix, cell)
    return ImageNeeds(
        cuda=cell.cuda,
        driver=facts.driver(cell.cuda),
        architectures=tuple(build.architectures) if build else (),
        compiled=build.cuda if build else "",
        framework=cell.framework,
        arch=cell.arch,
    )


def find_gpu(text: str, facts: Facts) -> Device:
    """A GPU by a name as people or drivers write it, or by its compute capability: 12.0, sm_120.

    Raises RefusedError for a GPU of AMD, UsageError for an unknown one.
    """
    if match := _CAPABILITY.fullmatch(text.strip().lower()):
        capability = ".".join(match.groups())
        return Device(name=capability, capability=capability)
    if _AMD.search(text.lower()):
        raise RefusedError(f"{text}: GPUs of AMD are not supported: the images have NVIDIA's CUDA")
    devices = {
        _chip(name): Device(name=name, capability=capability)
        for capability, group in facts.gpus.items()
        for name in group.names + group.arm
    }
    chip = _chip(text)
    if device := devices.get(chip) or devices.get(f"rtx{chip}"):
        return device
    similar = [devices[key].name for key in difflib.get_close_matches(chip, devices, n=5, cutoff=0.5)]
    raise UsageError(
        f"unknown GPU {text!r}" + (f"; similar: {', '.join(similar)}" if similar else ""),
        hint="Or use its compute capability, e.g. 12.0: `nvidia-smi --query-gpu=compute_cap --format=csv`.",
    )


def judge(gpu: Device, driver: str, image: ImageNeeds, facts: Facts) -> Verdict:
    """The verdict on an image, a GPU and a driver; without a driver, it names the driver that the image needs.

    A short driver version such as 570 means the newest of its branch. Raises UsageError for an invalid version.
    """
    if driver and not _DRIVER.fullmatch(driver):
        raise UsageError(f"invalid driver version {driver!r}: use e.g. 570.124.06", hint="`nvidia-smi` shows it.")
    generation = facts.gpus.get(gpu.capability)
    # Some GPUs of a compute capability exist only with an ARM CPU: then the name decides.
    is_for_arm = generation and (not generation.names or _chip(gpu.name) in map(_chip, generation.arm))
    if is_for_arm and image.arch == AMD64:
        return Verdict(runs=False, reasons=(f"{gpu.description} exists only with an ARM CPU; the image is for x86_64",))
    if image.cuda == CPU:
        return Verdict(runs=True, reasons=("a CPU image needs no GPU",))

    code = _code(gpu, image)
    compiler = image.compiled or image.cuda  # the CUDA that made the PTX
    by_cuda, by_ptx = image.driver or facts.driver(image.cuda), facts.toolkit_driver(compiler) if code == "ptx" else ""
    named = gpu.description + (f" ({gpu.capability})" if gpu.name != gpu.capability else "")
    drivers = [
        (by_cuda, f"CUDA {image.cuda}"),
        (facts.toolkit_driver(generation.cuda) if generation else "", named),
        (by_ptx, f"its PTX (CUDA {compiler})"),
    ]
    oldest, because = max(filter(lambda item: item[0], drivers), key=lambda item: _numbers(item[0]), default=("", ""))

    faults = []
    if code == "none":
        name = f" ({gpu.name})" if gpu.name != gpu.capability else ""
        faults.append(
            f"neither machine code nor PTX for compute capability {gpu.capability}{name}: "
            f"only {' '.join(image.architectures)}"
        )
    if driver:
        given = _numbers(driver)
        if oldest and given < _numbers(oldest)[: len(given)]:
            faults.append(f"driver {driver} is too old: {because} needs {oldest} or newer")
        if generation and generation.last and given[0] > int(generation.last):
            faults.append(
                f"driver {driver} is too new: {generation.last} is the last branch that supports {gpu.description}"
            )
    if faults:
        return Verdict(runs=False, reasons=tuple(faults))

    unknown = []
    if not by_cuda:
        unknown.append(f"the oldest driver for CUDA {image.cuda} is unknown")
    if gpu.capability and not generation:
        unknown.append(f"the drivers that support compute capability {gpu.capability} are unknown")
    if not image.architectures:
        unknown.append("the GPUs that its framework was compiled for are unknown")
    elif not gpu.capability:
        unknown.append(f"the compute capability of {gpu.name} is unknown")
    if code == "ptx":
        if (first := facts.first_cuda(gpu.capability)) and _numbers(image.cuda) < _numbers(first):
            unknown.append(
                f"CUDA {image.cuda} is older than {gpu.description} (supported since CUDA {first}): "
                "whether its libraries run there is unknown"
            )
        if not by_ptx:
            unknown.append(f"the driver that its PTX (CUDA {compiler}) needs is unknown")
    if unknown:
        return Verdict(runs=None, reasons=tuple(unknown))

    notes = []
    if code == "ptx":
        notes.append("PTX but no machine code for this GPU: the first start compiles it, which takes minutes")
    if oldest and not driver:
        notes.append(f"needs driver {oldest} or newer")
    return Verdict(runs=True, reasons=(*notes, *facts.caveats_of(image.framework, image.cuda, gpu.capability)))


_Code = Literal["machine", "ptx", "none", "unknown"]


def _code(gpu: Device, image: ImageNeeds) -> _Code:
    """The kind of code that the framework has for a GPU.

    Machine code runs on its own compute capability and later ones of its major; with an `a`, on its own only. PTX runs
    on any later one, unless it is for one architecture or family.
    """
    if not image.architectures or not gpu.capability:
        return "unknown"
    capability = _numbers(gpu.capability)
    code: _Code = "none"
    for text in image.architectures:
        if not (match := _ARCHITECTURE.fullmatch(text)):
            continue
        kind, major, minor, suffix = match.groups()
        target = [int(major), int(minor)]
        if kind == "sm" and (
            capability == target if suffix == "a" else capability[0] == target[0] and capability >= target
        ):
            return "machine"
        if kind == "compute" and not suffix and capability >= target:
            code = "ptx"
    return code


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _chip(name: str) -> str:
    """The part of a GPU's name that identifies its chip."""
    words = re.findall(r"[a-z0-9]+", _MIG.sub("", name.lower()))
    return "".join(word for word in words if not _NOT_CHIP.fullmatch(word))
