"""Which images run on which GPU and driver, and why others do not. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from builder.common.errors import UsageError
from builder.matrix.cells import Cell
from builder.matrix.facts import Build, Facts
from builder.matrix.schema import CPU, Matrix
from builder.matrix.tags import ARCHITECTURES_LABEL, BUILT_FOR_LABEL, CUDA_LABEL, DRIVER_LABEL, LABEL

_CAPABILITY = re.compile(r"(?:(?:sm|compute)_)?([1-9][0-9]?)\.?([0-9])")
_ARCHITECTURE = re.compile(r"(sm|compute)_([1-9][0-9]?)([0-9])([af]?)")
_DRIVER = re.compile(r"[0-9]{3}(\.[0-9]{1,4}){0,2}")
_CUDA = re.compile(rf"[0-9]{{1,2}}(\.[0-9]{{1,4}}){{1,2}}|{CPU}")
_FRAMEWORK = re.compile(r"[a-z][a-z0-9]{0,23}")
# Words in the names that drivers report that do not identify the chip: "NVIDIA A100-SXM4-80GB",
# "NVIDIA H100 80GB HBM3", "NVIDIA GeForce GTX 1080 with Max-Q Design".
_NOT_CHIP = re.compile(
    r"nvidia|geforce|tesla|gpu|laptop|with|max|q|design|pcie|sxm[0-9]?|nvl|fhhl|dgxs|active|hbm[0-9]e?|[0-9]+gb?|"
    r"generation|workstation|server|edition"
)
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
    """What an image needs; a field is empty if unknown.

    `cuda` is a version or `cpu`; `driver` the oldest for that CUDA; `compiled` the CUDA that the framework was compiled
    with; `framework` its name in the matrix.
    """

    cuda: str
    driver: str = ""
    architectures: tuple[str, ...] = ()
    compiled: str = ""
    framework: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`runs` is None if unknown. `reasons` are single lines: why it does not run or why that is unknown, else notes."""

    runs: bool | None
    reasons: tuple[str, ...] = ()


def needs_of_build(cuda: str, build: Build | None, facts: Facts, framework: str = "") -> ImageNeeds:
    """The needs of an image for `cuda` (a version or `cpu`) with this build of its framework."""
    if cuda == CPU:
        return ImageNeeds(cuda=CPU, framework=framework)
    return ImageNeeds(
        cuda=cuda,
        driver=facts.driver(cuda),
        architectures=tuple(build.architectures) if build else (),
        compiled=build.cuda if build else "",
        framework=framework,
    )


def needs_of_cell(matrix: Matrix, cell: Cell, facts: Facts) -> ImageNeeds:
    """What the image of a cell needs."""
    build = facts.build(matrix.frameworks[cell.framework].package, cell.release, cell.cuda)
    return needs_of_build(cell.cuda, build, facts, cell.framework)


def needs_of_labels(labels: Mapping[str, str]) -> ImageNeeds:
    """The needs of an image by its labels alone. Values of an unexpected form are ignored."""

    def value(label: str, form: re.Pattern[str]) -> str:
        text = labels.get(label, "")
        return text if form.fullmatch(text) else ""

    return ImageNeeds(
        cuda=value(CUDA_LABEL, _CUDA),
        driver=value(DRIVER_LABEL, _DRIVER),
        architectures=tuple(filter(_ARCHITECTURE.fullmatch, labels.get(ARCHITECTURES_LABEL, "").split())),
        compiled=value(BUILT_FOR_LABEL, _CUDA),
        framework=value(f"{LABEL}.framework", _FRAMEWORK),
    )


def find_gpu(text: str, facts: Facts) -> Device:
    """A GPU by a name as people or drivers write it, or by its compute capability: 12.0, sm_120."""
    if match := _CAPABILITY.fullmatch(text.strip().lower()):
        capability = ".".join(match.groups())
        return Device(name=capability, capability=capability)
    names = {_chip(name): name for group in facts.gpus.values() for name in group.names + group.arm}
    chip = _chip(text)
    name = names.get(chip) or names.get(f"rtx{chip}")
    if name is None:
        similar = [names[key] for key in difflib.get_close_matches(chip, names, n=5, cutoff=0.5)]
        raise UsageError(
            f"unknown GPU {text!r}" + (f"; similar: {', '.join(similar)}" if similar else ""),
            hint="Or use its compute capability, e.g. 12.0: `nvidia-smi --query-gpu=compute_cap --format=csv`.",
        )
    return Device(name=name, capability=facts.capability(name))


def judge(gpu: Device, driver: str, image: ImageNeeds, facts: Facts) -> Verdict:
    """Whether the image runs on that GPU with that driver; without a driver, which one it needs.

    A short driver version such as 570 means the newest of its branch. Raises UsageError for an invalid version.
    """
    if driver and not _DRIVER.fullmatch(driver):
        raise UsageError(f"invalid driver version {driver!r}: use e.g. 570.124.06", hint="`nvidia-smi` shows it.")
    if not image.cuda:
        return Verdict(runs=None, reasons=("its labels name no CUDA version",))
    if _has_arm_host(gpu, facts):
        return Verdict(runs=False, reasons=(f"{gpu.description} exists only with an ARM CPU; the image is for x86_64",))
    if image.cuda == CPU:
        return Verdict(runs=True, reasons=("a CPU image needs no GPU",))
    code = _code(gpu, image)
    oldest, because = max(_drivers(gpu, image, facts, code), key=lambda item: _numbers(item[0]), default=("", ""))
    if faults := [*_code_faults(gpu, image, code), *_driver_faults(gpu, driver, oldest, because, facts)]:
        return Verdict(runs=False, reasons=tuple(faults))
    if unknown := tuple(_unknown(gpu, image, facts, code)):
        return Verdict(runs=None, reasons=unknown)
    notes = []
    if code == "ptx":
        notes.append("PTX but no machine code for this GPU: the first start compiles it, which takes minutes")
    if oldest and not driver:
        notes.append(f"needs driver {oldest} or newer")
    return Verdict(runs=True, reasons=(*notes, *facts.caveats_of(image.framework, image.cuda, gpu.capability)))


def _has_arm_host(gpu: Device, facts: Facts) -> bool:
    """By name if other GPUs of its compute capability exist with other CPUs."""
    group = facts.gpus.get(gpu.capability)
    return group is not None and (not group.names or _chip(gpu.name) in map(_chip, group.arm))


_Code = Literal["machine", "ptx", "none", "unknown"]


def _code(gpu: Device, image: ImageNeeds) -> _Code:
    """The kind of code that the framework has for a GPU.

    Machine code runs on its own compute capability and later ones of its major; with an `a`, on its own only. PTX runs
    on any later one, unless it is for one architecture or family.
    """
    if not image.architectures or not gpu.capability:
        return "unknown"
    mine = _numbers(gpu.capability)
    code: _Code = "none"
    for kind, major, minor, suffix in _parsed(image.architectures):
        its = [major, minor]
        if kind == "sm" and (mine == its if suffix == "a" else major == mine[0] and mine >= its):
            return "machine"
        if kind == "compute" and not suffix and mine >= its:
            code = "ptx"
    return code


def _parsed(architectures: tuple[str, ...]) -> Iterator[tuple[str, int, int, str]]:
    for text in architectures:
        if match := _ARCHITECTURE.fullmatch(text):
            kind, major, minor, suffix = match.groups()
            yield kind, int(major), int(minor), suffix


def _drivers(gpu: Device, image: ImageNeeds, facts: Facts, code: _Code) -> Iterator[tuple[str, str]]:
    """The oldest drivers that image and GPU need, each with what needs it."""
    if oldest := image.driver or facts.driver(image.cuda):
        yield oldest, f"CUDA {image.cuda}"
    if oldest := facts.first_driver(gpu.capability):
        yield oldest, gpu.description + (f" ({gpu.capability})" if gpu.name != gpu.capability else "")
    if code == "ptx" and (oldest := facts.toolkit_driver(_compiler(image))):
        yield oldest, f"its PTX (CUDA {_compiler(image)})"


def _compiler(image: ImageNeeds) -> str:
    """The CUDA that made the image's PTX."""
    return image.compiled or image.cuda


def _code_faults(gpu: Device, image: ImageNeeds, code: _Code) -> Iterator[str]:
    if code == "none":
        name = f" ({gpu.name})" if gpu.name != gpu.capability else ""
        yield (
            f"neither machine code nor PTX for compute capability {gpu.capability}{name}: "
            f"only {' '.join(image.architectures)}"
        )


def _driver_faults(gpu: Device, driver: str, oldest: str, because: str, facts: Facts) -> Iterator[str]:
    if not driver:
        return
    given = _numbers(driver)
    if oldest and given < _numbers(oldest)[: len(given)]:
        yield f"driver {driver} is too old: {because} needs {oldest} or newer"
    if (last := facts.last_branch(gpu.capability)) and given[0] > int(last):
        yield f"driver {driver} is too new: {last} is the last branch that supports {gpu.description}"


def _unknown(gpu: Device, image: ImageNeeds, facts: Facts, code: _Code) -> Iterator[str]:
    if not image.driver and not facts.driver(image.cuda):
        yield f"the oldest driver for CUDA {image.cuda} is unknown"
    if gpu.capability and gpu.capability not in facts.gpus:
        yield f"the drivers that support compute capability {gpu.capability} are unknown"
    if not image.architectures:
        yield "the GPUs that its framework was compiled for are unknown"
    elif not gpu.capability:
        yield f"the compute capability of {gpu.name} is unknown"
    if code != "ptx":
        return
    if (first := facts.first_cuda(gpu.capability)) and _numbers(image.cuda) < _numbers(first):
        yield (
            f"CUDA {image.cuda} is older than {gpu.description} (supported since CUDA {first}): "
            "whether its libraries run there is unknown"
        )
    if not facts.toolkit_driver(_compiler(image)):
        yield f"the driver that its PTX (CUDA {_compiler(image)}) needs is unknown"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _chip(name: str) -> str:
    """The part of a GPU's name that identifies its chip."""
    words = re.findall(r"[a-z0-9]+", _MIG.sub("", name.lower()))
    return "".join(word for word in words if not _NOT_CHIP.fullmatch(word))
