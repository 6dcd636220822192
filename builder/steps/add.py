"""Puts packages on images without building them: reads the parent, resolves, makes the new layers, and pushes.

From registry to registry, only the new layers are sent. Needs no engine and no checkout.
"""

from __future__ import annotations

import fcntl
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from builder.build import added_layers
from builder.build.added_layers import CONFLICT
from builder.common.console import Meter, View
from builder.common.errors import (
    BuildError,
    EngineError,
    ImageTestError,
    LockError,
    RefusedError,
    UnreachableError,
    UsageError,
    VerifyError,
)
from builder.common.files import short_digest
from builder.common.reference import ImageRef
from builder.common.text import counted, listed, size
from builder.engine.client import Engine
from builder.engine.load import Loader
from builder.engine.run import Run
from builder.evidence import reports, sbom_and_provenance
from builder.evidence.results import OWN, Evidence, Report, coverage_of
from builder.evidence.signing import Signer, Trust
from builder.host import Apt
from builder.index.download import Fetcher
from builder.index.local_index import serve_index
from builder.index.releases import Index
from builder.index.wheels import LockedWheel, is_cuda_wheel
from builder.layers import oci, wheel
from builder.layers.blobs import Descriptor
from builder.layers.oci import Image, Layer, Manifest
from builder.layers.store import Store
from builder.lock import checks, requirements, uv
from builder.lock.diff import package_changes
from builder.lock.uv import Target, Uv
from builder.matrix import facts, tags
from builder.matrix.tags import CUDA_LABEL, PARENT_LABEL
from builder.plan import layer_order
from builder.registry import transfer
from builder.registry.client import Repository
from builder.registry.transfer import Sent
from builder.release.additions import Addition
from builder.release.attestations import Attestations
from builder.release.image_sources import ALL, RegistrySource, find_images
from builder.release.parent import Parent, read_parent

SHOWN = 8  # packages in a line
IMPORT_S = 600  # all imports; the first one of a framework takes seconds
PIP_CHECK = "pip check"
# Imports the top-level modules of each package, or the packages in a namespace. Tests of a wheel need other packages.
IMPORTS = """
import importlib, importlib.metadata, sys
out, sys.stdout = sys.stdout, sys.stderr  # some packages greet
for name in sys.argv[1:]:
    paths = [path.parts for path in importlib.metadata.files(name) or () if not path.parts[0].endswith("-info")]
    packages = [path[:-1] for path in paths if path[-1] == "__init__.py" and all(map(str.isidentifier, path[:-1]))]
    depth = min(map(len, packages), default=0)
    modules = {".".join(parts) for parts in packages if len(parts) == depth}
    files = [path[0].partition(".")[0] for path in paths if len(path) == 1 and path[0].endswith((".py", ".so"))]
    modules |= set(filter(str.isidentifier, files))
    for module in sorted(modules - {"tests", "test", "docs", "examples"}):
        importlib.import_module(module)
        print(module, file=out)
"""


@dataclass(frozen=True, kw_only=True)
class AddedImage:
    """An image with additions for one architecture: its new wheels and layers, and the results of its tests."""

    parent: Parent
    wheels: Sequence[LockedWheel]
    layers: Sequence[Layer]
    image: Image
    results: Sequence[Evidence] = ()


@dataclass(frozen=True, kw_only=True)
class Added:
    """The images of an addition, one for each architecture, and the digest that its tag names, if it was set."""

    addition: Addition
    images: Sequence[AddedImage]
    digest: str = ""
    sent: Sent | None = None


def add(
    run: Run,
    additions: Sequence[Addition],
    show: Callable[[str, str], None],
    *,
    arch: str = ALL,
    dry_run: bool = False,
    engine: Engine | None = None,
    trust: Trust | None = None,
    signer: Signer | None = None,
    program: Uv | None = None,
    new_fetcher: Callable[..., Fetcher] = Fetcher,
) -> list[Added]:
    """Makes the images, and sets their tags when all are complete.

    `arch` is the architecture of a parent for several, or ALL. `show` gets the name of each step and its result. With
    `dry_run`, only resolves. With an `engine`, imports the packages in a container first; it gets the images whose tag
    has no registry. A signer of `trust`, if it has any, must have signed each parent. `program` chooses versions.
    Leaves out a repeated addition whose parent is the same.
    """
    signer = signer and replace(signer, trust=trust)
    # apt takes 0.5 s, and no archive of Debian is used here.
    run = replace(run, host=replace(run.host, archives=Apt()))
    host, store, view = run.host, run.store, run.view
    catalogue, meter = Index(host.index), Meter(view, "wheels", "fetched", 0)
    program = program or Uv(host, subprocess.run, catalogue, serve_index)
    fetcher = new_fetcher(host.index, store.downloads, progress=meter.add, warn=view.say_once, catalogue=catalogue)
    assembled: list[Added] = []
    for addition in additions:
        if addition.target.name == addition.parent.name and addition.target.target == addition.parent.target:
            raise UsageError(f"{addition.target} is the parent itself", hint="Choose another tag or repository.")
        if not (any(addition.request.values()) or addition.earlier):
            raise UsageError(f"{addition.target}: nothing to add", hint="Name packages, or a file of them with -r.")
        # Whoever can push the tag of an earlier image wrote its request: its signer counts as that of the parent does.
        for each_earlier in addition.earlier.values():
            check_signature(addition.target, each_earlier, trust)
        parents = find_parents(run, addition.parent, arch)
        parents = _same_architectures(addition, parents, view)
        before = {arch: each.image.labels.get(PARENT_LABEL) for arch, each in addition.earlier.items()}
        if before == {parent.arch: parent.image.manifest.digest for parent in parents}:
            show("parent", f"{addition.parent} is still the same: {addition.target} is up to date")
            continue
        made: list[AddedImage] = []
        for parent in parents:
            digest = short_digest(parent.image.manifest.digest)
            show(
                "parent",
                f"{addition.parent}  {parent.arch}  {digest}  {check_signature(addition.parent, parent, trust)}",
            )

            # What the parent has stays, byte for byte. The rest of the solution is new.
            solution = resolve(program, parent, addition)
            wheels = [wheel for name, wheel in sorted(solution.items()) if name not in parent.packages]
            kept = f", {parent.framework} unchanged" if parent.framework else ""
            changes = listed(_changes(addition.earlier.get(parent.arch), parent, wheels), SHOWN)
            show("resolve", f"{len(wheels)} new, {len(parent.packages)} kept{kept}{': ' if changes else ''}{changes}")
            if dry_run:
                made.append(AddedImage(parent=parent, wheels=wheels, layers=(), image=parent.image))
                continue

            # Layers by the rule of all images. The store may have them from an earlier run.
            layers = added_layers.make_layers(store, fetcher, parent, wheels, view.say_once)
            if (count := len(parent.image.layers) + len(layers)) > layer_order.MOST:
                raise BuildError(f"{addition.target} would have {count} layers; the limit is {layer_order.MOST}")

            # Nothing may replace a file of the parent, such as one of the framework or the launcher.
            for warning in added_layers.check_paths(str(addition.target), parent, layers):
                view.say(warning)
            image = added_layers.write_image(store, parent, addition, wheels, layers)
            stacked = [each.layer for each in layers]
            made.append(AddedImage(parent=parent, wheels=wheels, layers=stacked, image=image))
            sizes = sum(each.layer.size for each in layers)
            show("layers", f"{len(layers)} new ({size(sizes)}), {len(parent.image.layers)} of the parent (0 B)")
        assembled.append(Added(addition=addition, images=made))
    if dry_run:
        return assembled

    # What this machine can run is tried before anything is pushed.
    if engine:
        with _alone(engine, store):
            assembled = [try_images(engine, store, view, show, added) for added in assembled]

    # All images are complete in their registries, and signed, before the first tag is set.
    pushed: list[tuple[Added, Repository, Manifest]] = []
    for added in (each for each in assembled if each.addition.target.registry):
        target = added.addition.target
        repository = Repository(target, host=host, write=True)
        sents = [push_image(repository, store, view, added.addition, each) for each in added.images]
        for each in (each for each in added.images if each.results):
            reports.attach_evidence(repository, each.image.manifest.descriptor, each.results, signer)
        manifest = added.images[0].image.manifest
        if any(isinstance(each.parent.source, RegistrySource) and each.parent.source.index for each in added.images):
            platforms = {str(each.parent.arch): each.image.manifest.descriptor for each in added.images}
            manifest = Manifest.of(oci.platform_index(platforms), oci.INDEX_TYPE)
            repository.put_manifest(manifest.digest, manifest.content, manifest.media_type)
        present, is_dated = repository.digest_of(target.tag), tags.is_stamp(target.tag.rpartition("-")[2])
        if is_dated and present not in (None, manifest.digest):
            raise RefusedError(f"{target} exists already: a tag with a date never moves", hint="Choose another tag.")
        if signer:
            sign(signer, repository, added, manifest)
        sent = Sent(**{name: sum(getattr(each, name) for each in sents) for name in ("sent", "mounted", "present")})
        pushed.append((replace(added, digest=manifest.digest, sent=sent), repository, manifest))
    for added, repository, manifest in pushed:
        repository.put_manifest(added.addition.target.target, manifest.content, manifest.media_type)
        show("pushed", f"{added.addition.target}@{manifest.digest}  {added.sent}")
    done = [added for added, _, _ in pushed]
    if engine:
        info = engine.info()
        for added in (each for each in assembled if not each.addition.target.registry):
            for each in (each for each in added.images if each.parent.arch == info.arch):
                engine.tag(each.image.image_id(info.store), added.addition.target)
                store.name(str(added.addition.target), each.image.manifest.descriptor)
                show("loaded", f"{added.addition.target}  {each.image.manifest.digest}")
                done.append(replace(added, digest=each.image.manifest.digest))
    return done


@contextmanager
def _alone(engine: Engine, store: Store) -> Iterator[None]:
    """Holds the right to run containers for a store, and removes those that a killed builder left."""
    with store.locked(fcntl.LOCK_EX, "engine.lock"):
        engine.sweep(str(store.root))
        yield


def find_parents(run: Run, reference: ImageRef, arch: str) -> list[Parent]:
    """The images with a name, in a registry or in the store, as parents: one for each architecture."""
    return [read_parent(source) for source in find_images(run, reference, arch)]


def _same_architectures(addition: Addition, parents: Sequence[Parent], view: View) -> list[Parent]:
    """The parents for the architectures of the earlier images, or all. Raises VerifyError if one is missing."""
    if not addition.earlier:
        return list(parents)
    present = {parent.arch for parent in parents}
    if missing := sorted(addition.earlier.keys() - present):
        raise VerifyError(f"{addition.parent} has no image for {', '.join(missing)}, which {addition.target} has")
    if new := sorted(present - addition.earlier.keys()):
        view.say(f"{addition.target} is not for {', '.join(new)}, which {addition.parent} has now")
    return [parent for parent in parents if parent.arch in addition.earlier]


def check_signature(reference: ImageRef, image: Parent, trust: Trust | None) -> str:
    """What signers state about an image: its tests, if it was released. Raises VerifyError without a signature."""
    if not (trust and trust.signers):
        return "signature not checked"
    if not isinstance(image.source, RegistrySource):
        raise UsageError(f"{reference} has no registry, and images of the store are not signed")
    tagged = reference if reference.digest else replace(reference, tag=reference.target)
    attestations = Attestations(source=image.source, reference=tagged, trust=trust)
    for finding in attestations.signatures():
        if finding.state != "signed":
            raise VerifyError(f"{reference}: {finding.detail}", hint="Do not use it until you know who built it.")
    return f"signature checked, tests: {attestations.test_results().detail}"


def resolve(program: Uv, parent: Parent, addition: Addition) -> dict[str, LockedWheel]:
    """The wheels that the requested packages need, those of the parent too, by name. Raises LockError."""
    target = Target(
        name=str(addition.target),
        python=parent.python,
        arch=parent.arch,
        glibc=parent.glibc,
        sources=dict.fromkeys(parent.packages, False),
        conflict=CONFLICT,
    )
    if not addition.requested:
        return {}
    packages, constraints = [each.text for each in addition.requested], list(parent.constraints)
    try:
        if earlier := addition.earlier.get(parent.arch):
            preferred = {name: wheel.version for name, wheel in earlier.packages.items()}
            chosen, _ = program.compile(target, packages, constraints, preferred, parent.built)
            constraints = [*constraints, *uv.pinned(uv.parse_versions(chosen))]
        pylock, _ = program.compile(target, packages, constraints, None, parent.built)
        found = program.wheels(target, pylock, parent.built)
    except UnreachableError:
        raise
    except LockError as error:
        words = set(str(error).replace("==", " ").split())
        named = [f"{name} {wheel.version}" for name, wheel in parent.packages.items() if name in words]
        about = f"The parent has {listed(named, 5)}. " if named else ""
        raise LockError(str(error), hint=f"{about}{error.hint}") from error
    unknown = {name: listing for name, listing in found.items() if not listing[0].size and name not in parent.packages}
    sizes = program.sizes(target, unknown) if unknown else {}
    wheels = {name: replace(wheel, size=sizes.get(name, wheel.size)) for name, (wheel, _) in found.items()}
    new = {name: each for name, each in wheels.items() if name not in parent.packages}
    requirements.check_hashes(addition.requested, new)
    check_cuda(addition, parent, wheels)
    return wheels


def check_cuda(addition: Addition, parent: Parent, wheels: Mapping[str, LockedWheel]) -> None:
    """Raises RefusedError for CUDA libraries that do not fit those of the parent, and for known conflicts."""
    label = re.match(r"[0-9]+", parent.image.labels.get(CUDA_LABEL, ""))
    expected = int(label[0]) if label else 0  # the CPU
    new = [each for name, each in wheels.items() if name not in parent.packages and is_cuda_wheel(each.file)]
    others = sorted({name for major, name in checks.cuda_majors(new, expected).items() if major != expected})
    if others := others if expected else [each.name for each in new]:
        fits = f"CUDA {expected}" if expected else "the CPU"
        raise RefusedError(
            f"{addition.target}: not for {fits}, as the parent is: {listed(others, SHOWN)}",
            hint=f"Find the package that requires it, or choose a parent that fits. {CONFLICT}",
        )
    before = {name: each.version for name, each in parent.packages.items()}
    after = before | {name: each.version for name, each in wheels.items()}
    known = facts.load_facts()
    if conflicts := [each for each in known.violations(after) if each not in known.violations(before)]:
        raise RefusedError(f"{addition.target}: {'; '.join(conflicts)}", hint=CONFLICT)


def push_image(repository: Repository, store: Store, view: View, addition: Addition, added: AddedImage) -> Sent:
    """Pushes an image by digest. The registry mounts the layers of a parent that it has; others pass this machine."""
    source, image = added.parent.source, added.image
    files: dict[Descriptor, Path | None] = {image.config: store.path(image.config.digest)}
    for layer in image.layers:
        files[layer.descriptor] = store.path(layer.digest) if store.has(layer.digest, layer.size) else None
    fetch = partial(transfer.fetch_blob, source.repository, store) if isinstance(source, RegistrySource) else None
    mounts = [addition.parent.repository] if addition.parent.registry == addition.target.registry else []
    progress = Meter(view, "push", "sent", 0).add
    return transfer.push_image(repository, image.manifest, files, fetch=fetch, mount_from=mounts, progress=progress)


def try_images(engine: Engine, store: Store, view: View, show: Callable[[str, str], None], added: Added) -> Added:
    """Loads the images that this machine can run, and tests them. Returns all images, with the results.

    Those without a registry stay in the engine. Raises EngineError if there are only other ones.
    """
    target, images = added.addition.target, []
    others = [each.parent.arch for each in added.images if each.parent.arch != engine.info().arch]
    if len(others) == len(added.images):
        raise EngineError(
            f"{target}: this machine cannot try images for {', '.join(others)}",
            hint="Push it without --test, to a tag with a registry, or run this on such a machine.",
        )
    if others:
        view.say(f"{target}: not tried on this machine: {', '.join(others)}")
    for each in added.images:
        if each.parent.arch in others:
            images.append(each)
            continue
        if isinstance(source := each.parent.source, RegistrySource):
            blobs = [layer.descriptor for layer in each.parent.image.layers]
            transfer.fetch_blobs(source.repository, store, blobs, Meter(view, "parent", "downloaded", 0).add)
        is_kept = bool(engine.image(each.image.image_id(engine.info().store)))
        loader = Loader(engine, store, str(store.root), view)
        image_id = loader.load(each.image, Meter(view, "image", "loaded", 0).add)
        try:
            modules = try_packages(engine, store, added.addition, each, image_id)
            show("tests", f"{counted(len(modules), 'module')} imported, {PIP_CHECK} passed ({each.parent.arch})")
            is_kept = is_kept or not target.registry
        finally:
            if not is_kept:
                engine.remove_image(image_id)
        images.append(replace(each, results=[_evidence(engine, each.image, modules)]))
    return replace(added, images=images)


def try_packages(engine: Engine, store: Store, addition: Addition, added: AddedImage, image_id: str) -> list[str]:
    """Imports the requested packages of a loaded image in a container, and runs `pip check`. Returns the modules.

    Raises ImageTestError for a module that cannot be imported, and for requirements that are not met.
    """
    # A requirement with a marker for another system is not installed.
    installed = {*added.parent.packages, *(each.name for each in added.wheels)}
    names = [each.name for each in addition.requested if each.name in installed]
    python, pip_options = f"/{wheel.ENVIRONMENT}/bin/python", {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with engine.running(image_id, checkout=str(store.root)) as container:
        imports = container.run([python, "-c", IMPORTS, *names], {}, IMPORT_S)
        check = container.run([python, "-m", *PIP_CHECK.split()], pip_options, IMPORT_S)
    for problem, done in (("a package cannot be imported", imports), (f"{PIP_CHECK} failed", check)):
        if done.returncode:
            lines = "\n".join([done.stdout, done.stderr]).strip().splitlines()[-SHOWN:]
            raise ImageTestError(f"{addition.target}: {problem}\n" + "\n".join(lines), hint="Nothing was pushed.")
    return [each for each in imports.stdout.split() if all(map(str.isidentifier, each.split(".")))]


def _evidence(engine: Engine, image: Image, modules: Sequence[str]) -> Evidence:
    info, is_cpu = engine.info(), image.labels.get(CUDA_LABEL) == "cpu"
    return Evidence(
        image=image.manifest.digest,
        cell="",
        plan="",
        suite={},
        kind="image",
        passed=(*(f"import {each}" for each in modules), PIP_CHECK),
        failed=(),
        no_gpu="the image is for the CPU" if is_cpu else "`builder add` runs no GPU tests",
        machine={"engine": info.version, "kernel": platform.release(), **({"engine_id": info.id} if info.id else {})},
        finished=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def sign(signer: Signer, repository: Repository, added: Added, manifest: Manifest) -> None:
    """Attaches SBOM and provenance to each image, which names its parent by digest, then signs images and index."""
    # Without the values of variables: a public transparency log may show it.
    public = added.addition.request | {"env": sorted(added.addition.env)}
    for each in added.images:
        parent, name = each.parent, added.addition.parent.name
        kept = parent.packages.values()
        tested = reports.test_result(coverage_of(Report(evidence=result, signer=OWN) for result in each.results))
        signer.attest(
            repository,
            each.image.manifest.digest,
            {
                sbom_and_provenance.SBOM: sbom_and_provenance.sbom_of_additions(
                    repository.name, each.image, kept, each.wheels, parent.debian
                ),
                sbom_and_provenance.PROVENANCE: sbom_and_provenance.provenance_of_additions(
                    public, name, parent.image.manifest.digest, each.wheels
                ),
                **({reports.TEST_RESULT: tested} if tested else {}),
            },
        )
    # Sign last: once an image has a statement of cosign 3, cosign 3 ignores the signatures of cosign 2.
    target = added.addition.target
    for digest in dict.fromkeys([*(each.image.manifest.digest for each in added.images), manifest.digest]):
        notes = {"cell": "", "image": target.repository.rpartition("/")[2], "tag": target.tag}
        if tags.is_stamp(target.tag.rpartition("-")[2]):  # see `_is_for` of builder.release.attestations
            notes["release"] = target.tag
        signer.sign_manifest(repository, digest, notes)


def _changes(earlier: Parent | None, parent: Parent, wheels: Iterable[LockedWheel]) -> list[str]:
    """The new packages; or of an addition that is repeated, those of the whole image that differ from before."""
    if not earlier:
        return [f"{wheel.name} {wheel.version}" for wheel in wheels]
    return package_changes(earlier.packages.values(), [*parent.packages.values(), *wheels])
