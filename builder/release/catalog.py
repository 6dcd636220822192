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
from builder.common.text import size
from builder.compat import gpu_support
from builder.compat.gpu_support import Device
from builder.index.wheels import is_cuda_wheel
from builder.layers.known_layers import KnownLayers
from builder.matrix import facts
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.matrix.schema import ARM64, Matrix, Trusted, required_name
from builder.plan.plan import PlannedImage
from builder.release import status
from builder.release.staging import name_of
from builder.release.status import ImageState

LIBRARIES = ("nvidia-cudnn", "nvidia-nccl")  # parts of CUDA whose versions users ask for
_SIGNATURES = {
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
    """`state` and `gpu` are sentences."""

    state: str
    gpu: str
    runs: tuple[RecordedRun, ...]


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The changes of Python packages since another release; `text` is a sentence, also if they are unknown."""

    text: str
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CatalogImage:
    """One image. `pull` are the commands that pull it, by tag and by digest; `verify` those that check its signature.

    `pull` is empty unless the registry has exactly this image and, with signers in matrix.yaml, one of them signed it:
    `no_pull` is the reason. The full tag is the first of `tags`; `released`, `size`, `support` and `signature` are
    sentences. `digest` is empty if it is unknown. `bytes` are compressed, as pulled; with `is_estimate`, no build has
    recorded some layers, whose packages are counted instead. `driver` is the oldest for its CUDA; some GPUs need a
    newer one.
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
    pull: tuple[str, ...]
    no_pull: str
    packages: Mapping[str, str]
    python_packages: int
    debian_packages: int
    bytes: int
    is_estimate: bool
    size: str
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


def catalog_image(
    project: Project,
    state: ImageState,
    default: PlannedImage | None,
    known: KnownLayers,
    references: Sequence[ImageRef],
    stamped: str,
    changes: Changes,
    today: date,
) -> CatalogImage:
    """The entry of an image. `default` is the image of `default_cells`, None if it has no lock.

    The full tag is the first of `references`. `stamped` is a tag of one release that names the image, empty without.
    """
    planned, tagged, cell, full = state.planned, state.tagged, state.planned.cell, references[0]
    signers = {signer.name: signer for signer in project.matrix.evidence}
    released, signature = _released(project.matrix, state, full, stamped), _signature(project.matrix, state, full)
    no_pull = ""
    if not tagged.is_expected:
        no_pull = released
    elif signers and tagged.signature != status.YES:
        no_pull = f"signature: {signature}"
    # The shortest tag that was seen to name the image: aliases may name another one.
    names = () if no_pull else (f"{full.name}:{tagged.tags[-1]}", f"{full.name}@{tagged.digest}")
    bytes_to_pull, is_estimate, size_text = _size(planned, default, known)
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
        released=released,
        digest=tagged.digest if tagged.is_expected else "",
        pull=tuple(f"docker pull {name}" for name in names),
        no_pull=no_pull,
        packages=_main_packages(planned),
        python_packages=len(planned.wheels),
        debian_packages=len(planned.os_lock.packages),
        bytes=bytes_to_pull,
        is_estimate=is_estimate,
        size=size_text,
        driver="" if cell.is_cpu else facts.load_facts().driver(cell.cuda),
        gpus=() if cell.is_cpu else tuple(_gpus(project.matrix, cell)),
        tests=_tests(state),
        support=f"{end.sentence(today)}{f' ({end.after_support})' if end.after_support else ''}"
        if end
        else "no end of support is known",
        is_supported=not (end and end.is_over(today)),
        signature=signature,
        verify=_verify_commands(signers[tagged.signer], cell, full, *names) if names and signers else (),
        changes=changes,
    )


def _released(matrix: Matrix, state: ImageState, full: ImageRef, stamped: str) -> str:
    """A sentence about the release of an image."""
    tagged, not_built = state.tagged, matrix.python[state.planned.cell.python].not_built
    if tagged.is_expected:
        tag = f" as {stamped}" if stamped else ", under no known tag with a stamp"
        return f"released{tag}{tagged.released.removeprefix(status.YES)}"
    if not_built:
        return f"not built yet: {not_built}"
    if not full.registry:
        return "not published: matrix.yaml names no registry"
    if tagged.released == status.NONE:
        return "unknown: the registry was not looked up"
    if tagged.released == status.NO:
        return "not released yet"
    if tagged.released == status.INVALID:
        return f"not released: the tag {full.tag} names an invalid index"
    other = f" ({short_digest(tagged.digest)})" if tagged.digest else ""
    return f"not released: the tag {full.tag} names another image{other} than the one that is described here"


def _size(planned: PlannedImage, default: PlannedImage | None, known: KnownLayers) -> tuple[int, bool, str]:
    """The bytes to pull, whether they are an estimate, and a sentence about them."""
    layers = [(layer, known.get(layer.inputs)) for layer in planned.layers]
    sizes = [recorded.size if recorded else layer.bytes for layer, recorded in layers]
    is_estimate = not all(recorded or layer.kind == "files" for layer, recorded in layers)
    text = f"{'about ' if is_estimate else ''}{size(sum(sizes))} to pull"
    text += ", since some layers were not built yet" if is_estimate else ""
    if default and default.id == planned.id:
        cuda = "without CUDA" if planned.cell.is_cpu else f"for CUDA {planned.cell.cuda}"
        text += f"; it is the default image {cuda} on {planned.cell.arch}"
    elif default:
        # Docker identifies a layer by all layers below it: those above the first difference are pulled again.
        pairs = zip(planned.layers, default.layers, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0].inputs == pair[1].inputs, pairs))
        text += f"; {size(sum(sizes[:shared]))} of it in common with {default.id}"
    return sum(sizes), is_estimate, text


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
    coverage, text, is_looked_up = state.coverage, state.status.tested, state.tagged.released != status.NONE
    other = "" if state.tagged.is_expected else f", on {short_digest(state.tested)}, which is not known to be released"
    gpu = "unknown"
    if state.planned.cell.is_cpu:
        gpu = "needs none"
    elif coverage and coverage.gpu != "not run":
        gpu = f"{coverage.gpu_status}{other}"
    elif coverage and is_looked_up and not coverage.refused:  # else, other results may exist
        gpu = coverage.gpu_status
    # The texts of errors may name servers and paths: a public page must not have them.
    if coverage is None and text != status.NONE:
        text = "unknown: the results could not be read"
    elif not is_looked_up and not (coverage and coverage.reports):
        text = "unknown: this machine has no results that count, and no registry was looked up"
    elif coverage is None:
        text = "no results: the image is neither built here, nor staged, nor released as described here"
    elif text in coverage.refused:
        text = "no results of image tests that count"
    elif coverage.reports:
        text += other
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
    return RecordedTests(state=text, gpu=gpu, runs=tuple(runs))


def _signature(matrix: Matrix, state: ImageState, full: ImageRef) -> str:
    """A sentence about the signature of an image."""
    tagged = state.tagged
    if tagged.released == status.NO or not full.registry:
        return "nothing is published that could be signed"
    if tagged.released == status.NONE:
        return "not looked up"
    if not tagged.is_expected:
        return "the image that is described here is not published"
    if tagged.signer:
        is_key = tagged.signer in [signer.key for signer in matrix.evidence]
        place = f", a public key in {matrix.source}" if is_key and matrix.source else ""
        return f"signed by {tagged.signer}{place}"
    return _SIGNATURES.get(tagged.signature, "could not be checked")


def _verify_commands(signer: Trusted, cell: Cell, full: ImageRef, by_tag: str, by_digest: str) -> tuple[str, str]:
    """The commands of docs/verify.md that check the signature of an image."""
    key = ["--key", signer.key] if signer.key else ["--identity", signer.identity, "--issuer", signer.issuer]
    offline = ["--key", signer.key, "--insecure-ignore-tlog=true"]
    identity = [f"--certificate-identity={signer.identity}", f"--certificate-oidc-issuer={signer.issuer}"]
    notes = ["-a", f"cell={cell.id}", "-a", f"image={name_of(full)}", "-a", f"tag={full.tag}"]
    return (
        shlex.join(["builder", "verify", by_tag, "--arch", cell.arch, *key]),
        shlex.join(["cosign", "verify", *(offline if signer.key else identity), *notes, by_digest]),
    )
