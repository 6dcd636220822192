"""Which images run on which GPU and driver, and why others do not. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from builder import settings
from builder.errors import UsageError
from builder.facts import Build, Facts
from builder.matrix import CPU

_CAPABILITY = re.compile(r"(?:(?:sm|compute)_)?([1-9][0-9]?)\.?([0-9])")
_ARCHITECTURE = re.compile(r"(sm|compute)_([1-9][0-9]?)([0-9])([af]?)")
_DRIVER = re.compile(r"[0-9]{3}(\.[0-9]{1,4}){0,2}")
_CUDA = re.compile(rf"[0-9]{{1,2}}(\.[0-9]{{1,4}}){{1,2}}|{CPU}")
_FRAMEWORK = re.compile(r"[a-z][a-z0-9]{0,23}")
# Parts of names that drivers report and that say nothing of the chip: "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3",
# "NVIDIA GeForce GTX 1080 with Max-Q Design".
_NO_CHIP = re.compile(
    r"nvidia|geforce|tesla|gpu|laptop|with|max|q|design|pcie|sxm[0-9]?|nvl|fhhl|dgxs|active|hbm[0-9]e?|[0-9]+gb?|"
    r"generation|workstation|server|edition"
)
_MIG = re.compile(r"\bmig [0-9]+g\..*")  # a part of a GPU: "NVIDIA H100 80GB HBM3 MIG 1g.10gb"


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU as one speaks of it; `capability` as 12.0, empty where nobody knows it.

    The compute capability is also the `name` where nothing else is known of the GPU.
    """

    name: str
    capability: str = ""

    @property
    def spoken(self) -> str:
        """The name in a sentence."""
        return f"compute capability {self.name}" if self.name == self.capability else self.name


@dataclass(frozen=True, kw_only=True)
class ImageNeeds:
    """What an image says of itself, each empty where it does not say.

    `cuda` is a version or `cpu`; `driver` the oldest for that CUDA; `compiled` the CUDA that made the framework's code.
    `framework` as the matrix names it.
    """

    cuda: str
    driver: str = ""
    architectures: tuple[str, ...] = ()
    compiled: str = ""
    framework: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`runs` is None where it is not known. `reasons` are single lines: those against it, else what is to be known."""

    runs: bool | None
    reasons: tuple[str, ...] = ()


def needs_of_build(cuda: str, build: Build | None, facts: Facts, framework: str = "") -> ImageNeeds:
    """What an image of CUDA `cuda`, or `cpu`, with this build of its framework will need."""
    if cuda == CPU:
        return ImageNeeds(cuda=CPU, framework=framework)
    return ImageNeeds(
        cuda=cuda,
        driver=facts.driver(cuda),
        architectures=tuple(build.architectures) if build else (),
        compiled=build.cuda if build else "",
        framework=framework,
    )


def needs_of_labels(labels: Mapping[str, str]) -> ImageNeeds:
    """The same from an image's labels alone."""

    def said(label: str, form: re.Pattern[str]) -> str:
        """Labels of foreign images may hold anything."""
        value = labels.get(label, "")
        return value if form.fullmatch(value) else ""

    return ImageNeeds(
        cuda=said(settings.CUDA_LABEL, _CUDA),
        driver=said(settings.DRIVER_LABEL, _DRIVER),
        architectures=tuple(filter(_ARCHITECTURE.fullmatch, labels.get(settings.ARCHITECTURES_LABEL, "").split())),
        compiled=said(settings.BUILT_FOR_LABEL, _CUDA),
        framework=said(f"{settings.LABEL}.framework", _FRAMEWORK),
    )


def find_gpu(text: str, facts: Facts) -> Device:
    """A GPU by a name as people or drivers write it, or by its compute capability: 12.0, sm_120."""
    if match := _CAPABILITY.fullmatch(text.strip().lower()):
        capability = ".".join(match.groups())
        return Device(name=capability, capability=capability)
    names = {_key(name): name for group in facts.gpus.values() for name in group.names + group.arm}
    key = _key(text)
    name = names.get(key) or names.get(f"rtx{key}")
    if name is None:
        near = [names[one] for one in difflib.get_close_matches(key, names, n=5, cutoff=0.5)]
        raise UsageError(
            f"no GPU is known by the name {text!r}" + (f"; near: {', '.join(near)}" if near else ""),
            hint="Its compute capability will do, such as 12.0: `nvidia-smi --query-gpu=compute_cap --format=csv`.",
        )
    return Device(name=name, capability=facts.capability(name))


def judge(gpu: Device, driver: str, image: ImageNeeds, facts: Facts) -> Verdict:
    """Whether the image runs on that GPU with that driver; without a driver, which one it takes.

    A driver that is given short, such as 570, stands for the newest of its branch. A UsageError if it is no version.
    """
    if driver and not _DRIVER.fullmatch(driver):
        raise UsageError(f"{driver!r} is no driver version", hint="It looks like 570.124.06; `nvidia-smi` shows it.")
    if not image.cuda:
        return Verdict(runs=None, reasons=("it does not say which CUDA it has",))
    if _has_arm_host(gpu, facts):
        return Verdict(runs=False, reasons=(f"{gpu.spoken} comes only with an ARM CPU, and the image is for x86_64",))
    if image.cuda == CPU:
        return Verdict(runs=True, reasons=("it is made for the CPU and needs no GPU",))
    against, unknown, notes = [], [], []
    wanted = list(_drivers(gpu, image, facts))
    if not image.driver and not facts.driver(image.cuda):
        unknown.append(f"the oldest driver for CUDA {image.cuda} is not known")
    if gpu.capability and gpu.capability not in facts.gpus:
        unknown.append(f"which drivers know GPUs of compute capability {gpu.capability} is not known")
    if not image.architectures:
        unknown.append("which GPUs its framework was compiled for is not known")
    elif not gpu.capability:
        unknown.append(f"the compute capability of {gpu.name} is not known")
    elif not _has_machine_code(gpu.capability, image.architectures):
        if _has_ptx(gpu.capability, image.architectures):
            compiled = image.compiled or image.cuda
            text = f"its PTX, made by CUDA {compiled},"
            if (first := facts.first_cuda(gpu.capability)) and _numbers(image.cuda) < _numbers(first):
                unknown.append(
                    f"CUDA {image.cuda} is older than {gpu.spoken}, which came with {first}: "
                    "whether its libraries run there is not known"
                )
            if oldest := facts.toolkit_driver(compiled):
                wanted.append((oldest, text))
            else:
                unknown.append(f"{text} takes a driver that is not known")
            notes.append("it has PTX and no machine code for this GPU: the first start compiles, which takes minutes")
        else:
            named = f" ({gpu.name})" if gpu.name != gpu.capability else ""
            against.append(
                f"it has neither machine code nor PTX for compute capability {gpu.capability}{named}: "
                f"only {' '.join(image.architectures)}"
            )
    if driver:
        against += [
            f"driver {driver} is too old: {why} takes {oldest} or newer"
            for oldest, why in wanted
            if _is_older(driver, oldest)
        ]
        if (last := facts.last_branch(gpu.capability)) and int(driver.split(".", maxsplit=1)[0]) > int(last):
            against.append(f"driver {driver} is too new: {last} is the last branch that knows {gpu.spoken}")
    elif wanted:
        notes.append(f"it takes driver {max((oldest for oldest, _ in wanted), key=_numbers)} or newer")
    if against:
        return Verdict(runs=False, reasons=tuple(against))
    if unknown:
        return Verdict(runs=None, reasons=tuple(unknown))
    if gpu.capability:
        notes += facts.caveats_of(image.framework, image.cuda, gpu.capability)
    return Verdict(runs=True, reasons=tuple(notes))


def _has_arm_host(gpu: Device, facts: Facts) -> bool:
    """By its name where others of its compute capability come with other CPUs."""
    group = facts.gpus.get(gpu.capability)
    return group is not None and (not group.names or _key(gpu.name) in map(_key, group.arm))


def _drivers(gpu: Device, image: ImageNeeds, facts: Facts) -> Iterator[tuple[str, str]]:
    """Oldest drivers that the image and the GPU take, each with what takes it."""
    if oldest := image.driver or facts.driver(image.cuda):
        yield oldest, f"CUDA {image.cuda}"
    if oldest := facts.first_driver(gpu.capability):
        yield oldest, gpu.spoken + (f" ({gpu.capability})" if gpu.name != gpu.capability else "")


def _has_machine_code(capability: str, architectures: tuple[str, ...]) -> bool:
    """Machine code runs on its own compute capability and later ones of its major; with an `a`, on its own only."""
    gpu = _numbers(capability)
    for kind, major, minor, suffix in _parsed(architectures):
        if kind == "sm" and (gpu == [major, minor] if suffix == "a" else gpu[0] == major and gpu[1] >= minor):
            return True
    return False


def _has_ptx(capability: str, architectures: tuple[str, ...]) -> bool:
    """PTX runs on any later compute capability, unless it is of one architecture or family."""
    return any(
        kind == "compute" and not suffix and _numbers(capability) >= [major, minor]
        for kind, major, minor, suffix in _parsed(architectures)
    )


def _parsed(architectures: tuple[str, ...]) -> Iterator[tuple[str, int, int, str]]:
    for text in architectures:
        if match := _ARCHITECTURE.fullmatch(text):
            kind, major, minor, suffix = match.groups()
            yield kind, int(major), int(minor), suffix


def _is_older(driver: str, oldest: str) -> bool:
    given = _numbers(driver)
    return given < _numbers(oldest)[: len(given)]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _key(name: str) -> str:
    """What of a GPU's name says which chip it has."""
    return "".join(
        word for word in re.findall(r"[a-z0-9]+", _MIG.sub("", name.lower())) if not _NO_CHIP.fullmatch(word)
    )
