"""Puts packages on images without building them: reads the parent, resolves, makes the new layers, and pushes.

From registry to registry, only the new layers are sent. Needs no engine and no checkout.
"""

from __future__ import annotations

import fcntl
import platform
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from builder.build import added_image
from builder.build.added_image import SHOWN, AddedImage
from builder.common.console import Meter
from builder.common.errors import (
    EngineError,
    ImageTestError,
    RefusedError,
    UsageError,
    VerifyError,
)
from builder.common.files import short_digest
from builder.common.reference import ImageRef
from builder.common.text import counted
from builder.engine.load import Loader
from builder.engine.run import Run
from builder.evidence import reports, sbom_and_provenance
from builder.evidence.results import OWN, Evidence, Proof, coverage_of
from builder.evidence.signing import Signer, Trust
from builder.index.download import Fetcher, wheels_of_index
from builder.index.host import Apt
from builder.index.wheels import LockedWheel
from builder.layers import oci, wheel
from builder.layers.oci import Descriptor, Manifest
from builder.lock.diff import package_changes
from builder.lock.uv import Uv
from builder.matrix import tags
from builder.matrix.tags import CUDA_LABEL, PARENT_LABEL
from builder.registry import transfer
from builder.registry.client import Repository
from builder.registry.transfer import Sent
from builder.release.additions import Addition
from builder.release.attestations import Attestations
from builder.release.image_sources import ALL, RegistrySource, find_images
from builder.release.parent import Parent, read_parent

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
class AddOptions:
    """`arch` is the architecture of a parent for several, or ALL. `test` tries the images before they are pushed.

    A signer of `trust`, if it has any, must have signed each parent. Without `signer`, nothing is signed.
    """

    arch: str = ALL
    dry_run: bool = False
    test: bool = False
    trust: Trust = field(default_factory=lambda: Trust(signers=(), root=Path()))
    signer: Signer | None = None


def add(run: Run, additions: Sequence[Addition], options: AddOptions) -> dict[ImageRef, str]:
    """Makes the images, and sets their tags when all are complete. Returns the digest that each tag names now.

    Leaves out a repeated addition whose parent is the same. An image without a registry stays in the engine, tested.
    The caller holds the store.
    """
    if not options.dry_run and (options.test or not all(addition.target.registry for addition in additions)):
        run.engine.check()  # before anything is downloaded
    # apt takes 0.5 s, and no archive of Debian is used here.
    host = replace(run.host, archives=Apt(), index=added_image.with_indexes(run.host.index, additions))
    run = replace(run, host=host)
    program, progress = Uv(host), Meter(run.view, "wheels", "downloaded", 0).add
    fetcher = Fetcher(wheels_of_index(program.catalogue), run.store.downloads, progress=progress)
    images = defaultdict[ImageRef, list[AddedImage]](list)  # by target, one for each architecture
    for addition in additions:
        for parent in read_parents(run, addition, options.arch):
            signature = check_signature(addition.parent, parent, options.trust)
            digest = short_digest(parent.image.manifest.digest)
            run.view.say(f"parent   {addition.parent}  {parent.arch}  {digest}  {signature}")

            # What the constraints of the parent name stays, byte for byte. Its other packages move if they must.
            wheels, lines = added_image.choose_wheels(program, host.index, parent, addition)
            for line in (*lines, *_changes(addition, parent, wheels)):
                run.view.say(f"resolve  {line}")
            if not options.dry_run:
                images[addition.target].append(added_image.make_image(run, fetcher, addition, parent, wheels))

    # What this machine can run is tried before anything is pushed.
    for target, group in images.items():
        if options.test or not target.registry:
            try_images(run, target, group)

    # All images are complete in their registries, and signed, before the first tag is set.
    signer = options.signer and replace(options.signer, trust=options.trust)
    for target, group in images.items():
        if target.registry:
            push(run, target, group, signer)
    return {target: set_tag(run, target, group) for target, group in images.items()}


def repeated_addition(run: Run, target: ImageRef, options: AddOptions) -> Addition:
    """The addition that made an image, to be put on what the tag of its parent names now.

    Raises VerifyError for an image that `add` did not make, or that no signer of `options` signed.
    """
    earlier = find_parents(run, target, options.arch)
    # Anyone who can push the tag of the image could have written its request.
    for image in earlier:
        check_signature(target, image, options.trust)
    return Addition.of_image(target, earlier)


def read_parents(run: Run, addition: Addition, arch: str) -> list[Parent]:
    """The images that an addition is put on, one for each architecture; none if it is on them already.

    A repeated addition is for the architectures that it had. Raises VerifyError if one is missing.
    """
    parents = find_parents(run, addition.parent, arch)
    if not addition.earlier:
        return parents
    now = {parent.arch: parent for parent in parents if parent.arch in addition.earlier}
    if new := sorted({parent.arch for parent in parents} - now.keys()):
        run.view.say(f"{addition.target} is not for {', '.join(new)}, which {addition.parent} has now")
    if missing := sorted(addition.earlier.keys() - now.keys()):
        raise VerifyError(f"{addition.parent} has no image for {', '.join(missing)}, which {addition.target} has")
    if all(
        image.image.labels.get(PARENT_LABEL) == now[arch].image.manifest.digest
        for arch, image in addition.earlier.items()
    ):
        run.view.say(f"parent   {addition.parent} is still the same: {addition.target} is up to date")
        return []
    return list(now.values())


def find_parents(run: Run, reference: ImageRef, arch: str) -> list[Parent]:
    """The images with a name, in a registry or in the store, as parents: one for each architecture.

    Raises UsageError if the name has only one image, and the image is for another architecture than `arch`.
    """
    parents = [read_parent(source) for source in find_images(run, reference, arch)]
    if arch not in (ALL, parents[0].arch):
        raise UsageError(f"{reference} is for {parents[0].arch}, not {arch}", hint="Leave out --arch.")
    return parents


def check_signature(reference: ImageRef, image: Parent, trust: Trust) -> str:
    """What signers state about an image: its tests, if it was released. Raises VerifyError without a signature."""
    if not trust.signers:
        return "signature not checked"
    if not isinstance(image.source, RegistrySource):
        raise UsageError(
            f"{reference} has no registry, and images of the store are not signed",
            hint="Name the registry, e.g. docker.io/org/pt-cuda:2.9. Without --key, and outside of a checkout with "
            "`evidence`, no signature is needed.",
        )
    attestations = Attestations(source=image.source, reference=reference, trust=trust)
    for finding in attestations.signatures():
        if finding.state != "signed":
            raise VerifyError(f"{reference}: {finding.detail}", hint="Do not use it until you know who built it.")
    return f"signature checked, tests: {attestations.test_results().detail}"


def _changes(addition: Addition, parent: Parent, wheels: Sequence[LockedWheel]) -> list[str]:
    """Describes what an addition changes: a line per package of the parent that moves, then the numbers of packages.

    For a repeated addition, there is a line per package that differs from the image that the earlier addition made.
    """
    before, old = addition.earlier.get(parent.arch, parent).packages, parent.packages
    after = {**old, **{wheel.name: wheel for wheel in wheels}}
    changes = package_changes(
        before.values(), [wheel for wheel in after.values() if addition.earlier or wheel.name in old]
    )
    new = len(after) - len(old)
    kept = f"{len(old) - len(wheels) + new} kept{f', {parent.framework} unchanged' if parent.framework else ''}"
    return [*changes, f"{new} new, {len(wheels) - new} moved, {kept}"]


def try_images(run: Run, target: ImageRef, images: Sequence[AddedImage]) -> None:
    """Loads the images that this machine can run, tests them, and sets their `evidence`.

    An image whose target has no registry stays in the engine. Raises EngineError if this machine can run no image.
    """
    here = run.engine.info().arch
    runnable = [image for image in images if image.parent.arch == here]
    others = ", ".join(image.parent.arch for image in images if image.parent.arch != here)
    if not runnable:
        raise EngineError(
            f"{target}: this machine cannot try images for {others}",
            hint="Push it without --test, to a tag with a registry, or run this on such a machine.",
        )
    if others:
        run.view.say(f"{target}: not tried on this machine: {others}")
    with run.store.locked(fcntl.LOCK_EX, "engine.lock"):
        run.engine.sweep(str(run.store.root))  # what a killed builder left
        for image in runnable:
            image.evidence = try_image(run, image)


def try_image(run: Run, added: AddedImage) -> Evidence:
    """Loads one image, and tests it. Removes it from the engine, unless it was there or is to stay."""
    engine, store = run.engine, run.store
    if isinstance(source := added.parent.source, RegistrySource):
        blobs = [layer.descriptor for layer in added.parent.image.layers]
        transfer.fetch_blobs(source.repository, store, blobs, Meter(run.view, "parent", "downloaded", 0).add)
    is_kept = bool(engine.image(added.image.image_id(engine.info().store)))
    loader = Loader(engine, store, str(store.root), run.view)
    image_id = loader.load(added.image, Meter(run.view, "image", "loaded", 0).add)
    try:
        modules = try_packages(run, added, image_id)
        is_kept = is_kept or not added.addition.target.registry
    finally:
        if not is_kept:
            engine.remove_image(image_id)
    run.view.say(f"tests    {counted(len(modules), 'module')} imported, {PIP_CHECK} passed ({added.parent.arch})")
    info, is_cpu = engine.info(), added.image.labels.get(CUDA_LABEL) == "cpu"
    return Evidence(
        image=added.image.manifest.digest,
        cell="",
        plan="",
        suite={},
        kind="image",
        passed=(*(f"import {module}" for module in modules), PIP_CHECK),
        failed=(),
        no_gpu="the image is for the CPU" if is_cpu else "`builder add` runs no GPU tests",
        machine={"engine": info.version, "kernel": platform.release(), **({"engine_id": info.id} if info.id else {})},
        finished=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def try_packages(run: Run, added: AddedImage, image_id: str) -> list[str]:
    """Imports the requested packages of a loaded image in a container, and runs `pip check`. Returns the modules.

    Raises ImageTestError for a module that cannot be imported, and for requirements that are not met.
    """
    # A requirement with a marker for another system is not installed.
    installed = {*added.parent.packages, *(package.name for package in added.wheels)}
    names = [package.name for package in added.addition.request.requirements if package.name in installed]
    python, pip_options = f"/{wheel.ENVIRONMENT}/bin/python", {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with run.engine.running(image_id, checkout=str(run.store.root)) as container:
        imports = container.run([python, "-c", IMPORTS, *names], {}, IMPORT_S)
        check = container.run([python, "-m", *PIP_CHECK.split()], pip_options, IMPORT_S)
    for problem, done in (("a package cannot be imported", imports), (f"{PIP_CHECK} failed", check)):
        if done.returncode:
            lines = "\n".join([done.stdout, done.stderr]).strip().splitlines()[-SHOWN:]
            message = f"{added.addition.target}: {problem}\n" + "\n".join(lines)
            raise ImageTestError(message, hint="Nothing was pushed.")
    return [module for module in imports.stdout.split() if all(map(str.isidentifier, module.split(".")))]


def named_manifest(images: Sequence[AddedImage]) -> Manifest:
    """What the tag names: the manifest of the image, or an image index if the tag of the parent names one."""
    if not any(isinstance(source := image.parent.source, RegistrySource) and source.index for image in images):
        return images[0].image.manifest
    platforms = {str(image.parent.arch): image.image.manifest.descriptor for image in images}
    return Manifest.of(oci.platform_index(platforms), oci.INDEX_TYPE)


def push(run: Run, target: ImageRef, images: Sequence[AddedImage], signer: Signer | None) -> None:
    """Pushes images by digest, with results and signatures, and sets their `sent`.

    Raises RefusedError for a tag that must not move.
    """
    repository = Repository(target, host=run.host, write=True)
    for image in images:
        image.sent = push_layers(run, repository, image)
        if image.evidence:
            reports.attach_evidence(repository, image.image.manifest.descriptor, [image.evidence], signer)
    manifest = named_manifest(images)
    if manifest.media_type == oci.INDEX_TYPE:
        repository.put_manifest(manifest.digest, manifest.content, manifest.media_type)
    is_dated = tags.is_stamp(target.tag.rpartition("-")[2])
    if is_dated and repository.digest_of(target.tag) not in (None, manifest.digest):
        raise RefusedError(f"{target} exists already: a tag with a date never moves", hint="Choose another tag.")
    if signer:
        # A tag with a date is a release, see `_is_for` of builder.release.attestations.
        release = {"release": target.tag} if is_dated else {}
        notes = {"cell": "", "image": target.repository.rpartition("/")[2], "tag": target.tag, **release}
        statements = {image.image.manifest.digest: statements_of(repository, image) for image in images}
        for signed in dict.fromkeys([*(image.image.manifest for image in images), manifest]):
            signer.sign_manifest(repository, signed.descriptor, notes, statements.get(signed.digest, {}))


def push_layers(run: Run, repository: Repository, added: AddedImage) -> Sent:
    """Pushes an image by digest. The registry mounts the layers of a parent that it has; others pass this machine."""
    source, image, store = added.parent.source, added.image, run.store
    files: dict[Descriptor, Path | None] = {image.config: store.path(image.config.digest)}
    for layer in image.layers:
        files[layer.descriptor] = store.path(layer.digest) if store.has(layer.digest, layer.size) else None
    fetch = partial(transfer.fetch_blob, source.repository, store) if isinstance(source, RegistrySource) else None
    parent, target = added.addition.parent, added.addition.target
    mounts = [parent.repository] if parent.registry == target.registry else []
    progress = Meter(run.view, "push", "sent", 0).add
    sent = transfer.send_blobs(repository, files, fetch=fetch, mount_from=mounts, progress=progress)
    repository.put_manifest(image.manifest.digest, image.manifest.content, image.manifest.media_type)
    return sent


def statements_of(repository: Repository, added: AddedImage) -> dict[str, bytes]:
    """SBOM, provenance and tests of an image, by kind. The provenance names the parent by digest."""
    # Without the values of variables, and the index, whose host or path may be private: a public transparency log may
    # show it.
    request, parent = added.addition.request, added.parent
    public = request.model_dump(exclude_defaults=True, exclude={"index"}) | {"env": sorted(request.env)}
    replaced = {wheel.name for wheel in added.wheels}
    kept = [wheel for name, wheel in parent.packages.items() if name not in replaced]
    tested = reports.test_result(coverage_of([Proof(evidence=added.evidence, signer=OWN)] if added.evidence else []))
    return {
        sbom_and_provenance.SBOM: sbom_and_provenance.sbom_of_additions(
            repository.name, added.image, kept, added.wheels, parent.debian
        ),
        sbom_and_provenance.PROVENANCE: sbom_and_provenance.provenance_of_additions(
            public, added.addition.parent.name, parent.image.manifest.digest, added.wheels
        ),
        **({reports.TEST_RESULT: tested} if tested else {}),
    }


def set_tag(run: Run, target: ImageRef, images: Sequence[AddedImage]) -> str:
    """Tags complete images: in the registry of the target, or, if it has none, in the engine and in the store.

    Returns the digest that the tag names.
    """
    if target.registry:
        manifest = named_manifest(images)
        Repository(target, host=run.host, write=True).put_manifest(target.tag, manifest.content, manifest.media_type)
        run.view.say(f"pushed   {target}@{manifest.digest}  {'; '.join(str(image.sent) for image in images)}")
        return manifest.digest
    info = run.engine.info()
    [image] = [added.image for added in images if added.parent.arch == info.arch]
    run.engine.tag(image.image_id(info.store), target)
    run.store.name(str(target), image.manifest.descriptor)
    run.view.say(f"loaded   {target}  {image.manifest.digest}")
    return image.manifest.digest
