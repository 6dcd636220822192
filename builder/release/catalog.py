"""The catalog of images: for each image the facts that a user asks for before pulling it. Pure.

A fact that is unknown is a sentence that says so: an empty field would look like "no".
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import takewhile

from builder.common.files import short_digest
from builder.common.reference import ImageRef
from builder.compat import gpu_support
from builder.compat.gpu_support import Device
from builder.index.wheels import is_cuda_wheel
from builder.layers.known_layers import KnownLayers
from builder.matrix import facts
from builder.matrix.cells import Cell, reason_not_built
from builder.matrix.project import Project
from builder.matrix.schema import ARM64, Matrix, Trusted, required_name
from builder.plan.plan import PlannedImage
from builder.release import status
from builder.release.staging import name_of
from builder.release.status import ImageState

LIBRARIES = ("nvidia-cudnn", "nvidia-nccl")  # parts of CUDA whose versions users ask for
_SIGNATURES = {
    status.NONE: "not looked up",
    status.NO: "not signed",
    status.LISTED: "has a signature that was not checked: matrix.yaml lists no trusted signers",
    status.UNTRUSTED: "signed, but by no signer that matrix.yaml lists: do not trust it",
}


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """GPUs with the same verdict of `builder explain --gpu`, by compute capability. `runs` is None if it is unknown."""

    gpus: Mapping[str, Sequence[str]]
    runs: bool | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """The newest results of the image tests, or of the GPU tests on one kind of GPU (`gpu`)."""

    gpu: str
    driver: str
    passed: int
    failed: int
    day: str
    is_emulated: bool


@dataclass(frozen=True, kw_only=True)
class RecordedTests:
    """`state` and `gpu` are sentences; `refused` are the reasons that other results do not count."""

    state: str
    gpu: str
    runs: tuple[RecordedRun, ...]
    refused: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The changes of Python packages since another release; `text` is a sentence, also if they are unknown."""

    text: str
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CatalogImage:
    """One image. `pull`, `pull_digest` and `verify` are commands, empty if there is nothing to pull.

    The full tag is the first of `tags`; `released`, `support` and `signature` are sentences. `bytes` are compressed, as
    pulled; a machine with the image `shared_with` has `shared_bytes` of them. With `is_estimate`, no build has recorded
    some layers, whose packages are counted instead. `driver` is the oldest for its CUDA; some GPUs need a newer one.
    """

    cell: str
    framework: str
    version: str
    cuda: str
    python: str
    variant: str
    arch: str
    debian: str
    components: tuple[str, ...]
    name: str
    tags: tuple[str, ...]
    released: str
    digest: str
    pull: str
    pull_digest: str
    packages: Mapping[str, str]
    python_packages: int
    debian_packages: int
    bytes: int
    is_estimate: bool
    shared_bytes: int
    shared_with: str
    driver: str
    gpus: tuple[Gpus, ...]
    tests: RecordedTests
    support: str
    is_supported: bool
    signature: str
    verify: tuple[str, ...]
    changes: Changes


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """`made` is the day. `places` says where releases and tests were looked up, as `on this machine`.

    `unlocked` are cells without a lock.
    """

    made: str
    places: str
    images: tuple[CatalogImage, ...]
    unlocked: tuple[str, ...]


def default_cells(project: Project) -> dict[tuple[str, str], Cell]:
    """The default cell for each CUDA and architecture: the first one in the set `default`, else the first plain one."""
    defaults = set(project.select(()))
    best = sorted(project.cells, key=lambda cell: (cell not in defaults, cell.variant != "plain"))
    return {(cell.cuda, cell.arch): cell for cell in reversed(best)}


def release_of(releases: Sequence[tuple[str, str]], digest: str) -> tuple[str, tuple[str, str]]:
    """The stamp of the release that published an image, and stamp and digest of the one before it; empty if unknown.

    `releases` are stamps and digests of a cell, the oldest first. An image that later releases publish again is of the
    first one.
    """
    others = [("", ""), *releases]
    changes = [release for before, release in zip(others, releases, strict=False) if before[1] != release[1]]
    for number, (stamp, released) in reversed(list(enumerate(changes))):
        if released == digest:
            return stamp, changes[number - 1] if number else ("", "")
    return "", ("", "")


def catalog_image(
    project: Project,
    state: ImageState,
    default: PlannedImage | None,
    known: KnownLayers,
    references: Sequence[ImageRef],
    stamp: str,
    changes: Changes,
    today: date,
) -> CatalogImage:
    """The entry of an image. `default` is the image of `default_cells`, None if it has no lock.

    The full tag is the first of `references`. `stamp` is the release of the image, empty if it is unknown.
    """
    planned, tagged, cell = state.planned, state.tagged, state.planned.cell
    full, shortest = references[0], references[-1]
    layers = [(layer.inputs, known.get(layer.inputs), layer) for layer in planned.layers]
    sizes = [recorded.size if recorded else layer.bytes for _, recorded, layer in layers]
    # Docker identifies a layer by all layers below it: those above the first difference are pulled again.
    pairs = zip(planned.layers, default.layers, strict=False) if default else ()
    shared = sum(1 for _ in takewhile(lambda pair: pair[0].inputs == pair[1].inputs, pairs))
    digest = tagged.digest if tagged.is_expected else ""
    pull = str(shortest) if full.registry and tagged.released != status.NO else ""
    end = planned.support[0] if planned.support else None
    return CatalogImage(
        cell=cell.id,
        framework=cell.framework,
        version=cell.release,
        cuda=cell.cuda,
        python=cell.python,
        variant=cell.variant,
        arch=cell.arch,
        debian=planned.debian,
        components=planned.components,
        name=full.name,
        tags=tuple(each.tag for each in references),
        released=_released(project.matrix, state, full, stamp),
        digest=digest,
        pull=pull and f"docker pull {pull}",
        pull_digest=digest and f"docker pull {full.name}@{digest}",
        packages=_main_packages(planned),
        python_packages=len(planned.wheels),
        debian_packages=len(planned.os_lock.packages),
        bytes=sum(sizes),
        is_estimate=not all(recorded or layer.kind == "files" for _, recorded, layer in layers),
        shared_bytes=sum(sizes[:shared]),
        shared_with=default.id if default and default.id != cell.id else "",
        driver="" if cell.is_cpu else facts.load_facts().driver(cell.cuda),
        gpus=() if cell.is_cpu else tuple(_gpus(project.matrix, cell)),
        tests=_tests(state),
        support=f"{end.sentence(today)}{f' ({end.after_support})' if end.after_support else ''}"
        if end
        else "no end of support is known",
        is_supported=not (end and end.is_over(today)),
        signature=_signature(state, full),
        verify=tuple(_verify_commands(project.matrix.evidence, state, full, pull)) if pull else (),
        changes=changes,
    )


def _released(matrix: Matrix, state: ImageState, full: ImageRef, stamp: str) -> str:
    """A sentence about the release of an image."""
    tagged, not_built = state.tagged, reason_not_built(matrix, state.planned.cell)
    if tagged.is_expected:
        notes = tagged.released.removeprefix(status.YES)
        return f"released{f' on {_day(stamp)} as {full.tag}-{stamp}' if stamp else ', on an unknown day'}{notes}"
    if not_built:
        return f"not built yet: {not_built[1]}"
    if not full.registry:
        return "not published: matrix.yaml names no registry"
    if tagged.released == status.NONE:
        return "unknown: the registry was not looked up"
    if tagged.released == status.NO:
        return "not released yet"
    other = f" ({short_digest(tagged.digest)})" if tagged.digest else ""
    return f"the tag names {tagged.released}{other}, not the image that is described here"


def _day(stamp: str) -> str:
    return f"{stamp[:4]}-{stamp[4:6]}-{stamp[6:8]}"


def _main_packages(planned: PlannedImage) -> dict[str, str]:
    """The versions of the packages that matrix.yaml names, those of the framework first, then of libraries of CUDA."""
    versions = {wheel.name: wheel.version for wheel in planned.wheels}
    cuda = {wheel.name for wheel in planned.wheels if is_cuda_wheel(wheel.file)}
    requested = sorted(planned.requirements.items(), key=lambda item: item[0] != planned.cell.framework)
    names = [name for _, texts in requested for text in texts if (name := required_name(text)) not in cuda]
    names += sorted(name for name in cuda if name.startswith(LIBRARIES))
    return {name: versions[name] for name in names if name in versions}


def _gpus(matrix: Matrix, cell: Cell) -> Iterator[Gpus]:
    """The GPUs that exist with the processor of a cell, by verdict."""
    known = facts.load_facts()
    needs = gpu_support.needs_of_cell(matrix, cell, known)
    groups: dict[tuple[bool | None, tuple[str, ...]], dict[str, Sequence[str]]] = {}
    for capability, group in known.gpus.items():
        if names := group.names + (group.arm if cell.arch == ARM64 else []):
            device = Device(name=names[0], capability=capability)
            verdict = gpu_support.judge(device, "", needs, known)
            reasons = verdict.reasons
            if verdict.runs is False:  # without a driver, there is only one reason; its text names the GPU
                reasons = (f"the framework was compiled for {' '.join(needs.architectures)} only",)
            groups.setdefault((verdict.runs, reasons), {})[capability] = names
    for runs, reasons in sorted(groups, key=lambda key: (key[0] is False, key[0] is None)):
        yield Gpus(gpus=groups[runs, reasons], runs=runs, reasons=reasons)


def _tests(state: ImageState) -> RecordedTests:
    """The newest test results of an image. They may be about one that is built or staged, and not released."""
    coverage, text = state.coverage, state.status.tested
    gpu = "needs none" if state.planned.cell.is_cpu else coverage.gpu_status if coverage else "not run"
    if text == status.NONE:
        text = "no results: the image is neither built here, nor staged, nor released as described here"
    elif coverage and coverage.reports and not state.tagged.is_expected:
        other = f", on {short_digest(state.tested)}, which is not known to be released"
        text += other
        gpu += other if coverage.gpu != "not run" else ""
    runs = [
        RecordedRun(
            gpu=each.gpu,
            driver=each.machine.get("driver", ""),
            passed=len(each.passed),
            failed=len(each.failed),
            day=each.finished[:10],
            is_emulated=each.is_emulated,
        )
        for each in (coverage.newest if coverage else ())
    ]
    return RecordedTests(state=text, gpu=gpu, runs=tuple(runs), refused=coverage.refused if coverage else ())


def _signature(state: ImageState, full: ImageRef) -> str:
    """A sentence about the signature of an image."""
    tagged = state.tagged
    if tagged.released == status.NO or not full.registry:
        return "nothing is published that could be signed"
    if tagged.released != status.NONE and not tagged.is_expected:
        return "the image that is described here is not published"
    if tagged.signer:
        return f"signed by {tagged.signer}"
    return _SIGNATURES.get(tagged.signature, tagged.signature)


def _verify_commands(signers: Sequence[Trusted], state: ImageState, full: ImageRef, pull: str) -> Iterator[str]:
    """The commands of docs/publish.md that check an image: by its signer, else by any that matrix.yaml lists."""
    cell, digest = state.planned.cell, state.tagged.digest if state.tagged.is_expected else ""
    chosen = [signer for signer in signers if signer.name == state.tagged.signer] or signers
    arch = ["--arch", cell.arch] if cell.arch == ARM64 else []
    for signer in chosen:
        key = ["--key", signer.key] if signer.key else ["--identity", signer.identity, "--issuer", signer.issuer]
        yield shlex.join(["builder", "verify", pull, *arch, *key])
        if digest:
            offline = ["--key", signer.key, "--insecure-ignore-tlog=true"]
            identity = [f"--certificate-identity={signer.identity}", f"--certificate-oidc-issuer={signer.issuer}"]
            notes = ["-a", f"cell={cell.id}", "-a", f"image={name_of(full)}", "-a", f"tag={full.tag}"]
            options = [*(offline if signer.key else identity), *notes]
            yield shlex.join(["cosign", "verify", *options, f"{full.name}@{digest}"])
