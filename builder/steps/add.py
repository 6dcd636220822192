"""Puts packages on images without building them: reads the parent, resolves, makes the new layers, and pushes.

From registry to registry, only the new layers are sent. Needs no engine and no checkout.
"""

from __future__ import annotations

import fcntl
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from builder.build import added_layers, added_wheels
from builder.build.added_wheels import SHOWN
from builder.common.console import Meter
from builder.common.errors import (
    BuildError,
    EngineError,
    ImageTestError,
    RefusedError,
    UsageError,
    VerifyError,
)
from builder.common.files import short_digest
from builder.common.reference import ImageRef
from builder.common.text import counted, size
from builder.engine.client import Engine
from builder.engine.load import Loader
from builder.engine.run import Run
from builder.evidence import reports, sbom_and_provenance
from builder.evidence.results import OWN, Evidence, Proof, coverage_of
from builder.evidence.signing import Signer, Trust
from builder.index.download import Fetcher
from builder.index.host import Apt
from builder.index.wheels import LockedWheel
from builder.layers import oci, wheel
from builder.layers.oci import Descriptor, Image, Layer, Manifest
from builder.lock.diff import package_changes
from builder.lock.uv import Uv
from builder.matrix import tags
from builder.matrix.tags import CUDA_LABEL, PARENT_LABEL
from builder.plan import layer_order
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


@dataclass(frozen=True, kw_only=True)
class AddedImage:
    """An image with additions for one architecture: its new wheels and layers, and the results of its tests.

    After a dry run, `image` is the parent.
    """

    parent: Parent
    wheels: Sequence[LockedWheel]
    image: Image
    layers: Sequence[Layer] = ()
    results: Sequence[Evidence] = ()


@dataclass(frozen=True, kw_only=True)
class Added:
    """The images of an addition, one for each architecture, and the manifest that its tag names, if it is complete."""

    addition: Addition
    images: Sequence[AddedImage]
    manifest: Manifest | None = None
    sent: Sent | None = None

    @property
    def target(self) -> ImageRef:
        return self.addition.target

    @property
    def digest(self) -> str:
        return self.manifest.digest if self.manifest else ""


def add(run: Run, additions: Sequence[Addition], options: AddOptions) -> list[Added]:
    """Makes the images, and sets their tags when all are complete.

    Leaves out a repeated addition whose parent is the same. An image without a registry stays in the engine, tested.
    The caller holds the store.
    """
    # apt takes 0.5 s, and no archive of Debian is used here.
    run = replace(run, host=replace(run.host, archives=Apt()))
    if not options.dry_run and (options.test or not all(addition.target.registry for addition in additions)):
        run.engine.check()  # before anything is downloaded
    run = replace(run, host=replace(run.host, index=added_wheels.with_indexes(run.host.index, additions)))
    program, progress = Uv(run.host), Meter(run.view, "wheels", "downloaded", 0).add
    fetcher = Fetcher(run.host.index, run.store.downloads, progress=progress, catalogue=program.catalogue)
    additions_made: list[Added] = []
    for addition in additions:
        # Anyone who can push the tag of an earlier image could have written its request: check its signer, too.
        for earlier in addition.earlier.values():
            check_signature(addition.target, earlier, options.trust)
        images = []
        for parent in read_parents(run, addition, options.arch):
            signature = check_signature(addition.parent, parent, options.trust)
            digest = short_digest(parent.image.manifest.digest)
            _say(run, "parent", f"{addition.parent}  {parent.arch}  {digest}  {signature}")

            # What the constraints of the parent name stays, byte for byte. Its other packages move if they must.
            wheels, lines = added_wheels.choose_wheels(program, run.host.index, parent, addition)
            for line in (*lines, *_changes(addition, parent, wheels)):
                _say(run, "resolve", line)
            if options.dry_run:
                images.append(AddedImage(parent=parent, wheels=wheels, image=parent.image))
            else:
                images.append(make_image(run, fetcher, addition, parent, wheels))
        if images:
            additions_made.append(Added(addition=addition, images=images))
    if options.dry_run:
        return additions_made

    # What this machine can run is tried before anything is pushed.
    additions_made = [
        try_images(run, added) if options.test or not added.target.registry else added for added in additions_made
    ]

    # All images are complete in their registries, and signed, before the first tag is set.
    signer = options.signer and replace(options.signer, trust=options.trust)
    complete = [push(run, added, signer) if added.target.registry else added for added in additions_made]
    return [set_tag(run, added) for added in complete]


def _say(run: Run, step: str, result: str) -> None:
    run.view.say(f"{step:<8} {result}")


def read_parents(run: Run, addition: Addition, arch: str) -> list[Parent]:
    """The images that an addition is put on, one for each architecture; none if it is on them already.

    A repeated addition is for the architectures that it had. Raises VerifyError if one is missing.
    """
    parents = {parent.arch: parent for parent in find_parents(run, addition.parent, arch)}
    if not addition.earlier:
        return list(parents.values())
    if missing := sorted(addition.earlier.keys() - parents.keys()):
        raise VerifyError(f"{addition.parent} has no image for {', '.join(missing)}, which {addition.target} has")
    if new := sorted(parents.keys() - addition.earlier.keys()):
        run.view.say(f"{addition.target} is not for {', '.join(new)}, which {addition.parent} has now")
    parents = {arch: parents[arch] for arch in addition.earlier}
    before = {arch: image.image.labels.get(PARENT_LABEL) for arch, image in addition.earlier.items()}
    if before == {arch: parent.image.manifest.digest for arch, parent in parents.items()}:
        _say(run, "parent", f"{addition.parent} is still the same: {addition.target} is up to date")
        return []
    return list(parents.values())


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
    tagged = reference if reference.digest else replace(reference, tag=reference.target)
    attestations = Attestations(source=image.source, reference=tagged, trust=trust)
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


def make_image(
    run: Run, fetcher: Fetcher, addition: Addition, parent: Parent, wheels: Sequence[LockedWheel]
) -> AddedImage:
    """Makes the image in the store. Raises BuildError, FetchError, RefusedError."""
    # Layers by the rule of all images. The store may have them from an earlier run.
    layers = added_layers.make_layers(run, fetcher, parent, wheels)
    if (count := len(parent.image.layers) + len(layers)) > layer_order.MOST:
        raise BuildError(f"{addition.target} would have {count} layers; the limit is {layer_order.MOST}")

    # Nothing else may replace a file of the parent, such as one of the framework or the launcher.
    for warning in added_layers.check_added_paths(str(addition.target), parent, layers):
        run.view.say(warning)
    image = added_layers.write_added_image(run.store, parent, addition, wheels, layers)
    sizes = sum(layer.layer.size for layer in layers)
    _say(run, "layers", f"{len(layers)} new ({size(sizes)}), {len(parent.image.layers)} of the parent (0 B)")
    return AddedImage(parent=parent, wheels=wheels, image=image, layers=[layer.layer for layer in layers])


def try_images(run: Run, added: Added) -> Added:
    """Loads the images that this machine can run, and tests them. Returns all images, with the results.

    An image whose target has no registry stays in the engine. Raises EngineError if this machine can run no image.
    """
    info = run.engine.info()
    others = [image.parent.arch for image in added.images if image.parent.arch != info.arch]
    if len(others) == len(added.images):
        raise EngineError(
            f"{added.target}: this machine cannot try images for {', '.join(others)}",
            hint="Push it without --test, to a tag with a registry, or run this on such a machine.",
        )
    if others:
        run.view.say(f"{added.target}: not tried on this machine: {', '.join(others)}")
    with run.store.locked(fcntl.LOCK_EX, "engine.lock"):
        run.engine.sweep(str(run.store.root))  # what a killed builder left
        images = [
            image if image.parent.arch in others else try_image(run, added.addition, image) for image in added.images
        ]
    return replace(added, images=images)


def try_image(run: Run, addition: Addition, added: AddedImage) -> AddedImage:
    """Loads one image, and tests it. Removes it from the engine, unless it was there or is to stay."""
    engine, store = run.engine, run.store
    if isinstance(source := added.parent.source, RegistrySource):
        blobs = [layer.descriptor for layer in added.parent.image.layers]
        transfer.fetch_blobs(source.repository, store, blobs, Meter(run.view, "parent", "downloaded", 0).add)
    is_kept = bool(engine.image(added.image.image_id(engine.info().store)))
    loader = Loader(engine, store, str(store.root), run.view)
    image_id = loader.load(added.image, Meter(run.view, "image", "loaded", 0).add)
    try:
        modules = try_packages(run, addition, added, image_id)
        _say(run, "tests", f"{counted(len(modules), 'module')} imported, {PIP_CHECK} passed ({added.parent.arch})")
        is_kept = is_kept or not addition.target.registry
    finally:
        if not is_kept:
            engine.remove_image(image_id)
    return replace(added, results=[_evidence(engine, added.image, modules)])


def try_packages(run: Run, addition: Addition, added: AddedImage, image_id: str) -> list[str]:
    """Imports the requested packages of a loaded image in a container, and runs `pip check`. Returns the modules.

    Raises ImageTestError for a module that cannot be imported, and for requirements that are not met.
    """
    # A requirement with a marker for another system is not installed.
    installed = {*added.parent.packages, *(package.name for package in added.wheels)}
    names = [requirement.name for requirement in addition.request.requirements if requirement.name in installed]
    python, pip_options = f"/{wheel.ENVIRONMENT}/bin/python", {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with run.engine.running(image_id, checkout=str(run.store.root)) as container:
        imports = container.run([python, "-c", IMPORTS, *names], {}, IMPORT_S)
        check = container.run([python, "-m", *PIP_CHECK.split()], pip_options, IMPORT_S)
    for problem, done in (("a package cannot be imported", imports), (f"{PIP_CHECK} failed", check)):
        if done.returncode:
            lines = "\n".join([done.stdout, done.stderr]).strip().splitlines()[-SHOWN:]
            raise ImageTestError(f"{addition.target}: {problem}\n" + "\n".join(lines), hint="Nothing was pushed.")
    return [module for module in imports.stdout.split() if all(map(str.isidentifier, module.split(".")))]


def _evidence(engine: Engine, image: Image, modules: Sequence[str]) -> Evidence:
    info, is_cpu = engine.info(), image.labels.get(CUDA_LABEL) == "cpu"
    return Evidence(
        image=image.manifest.digest,
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


def push(run: Run, added: Added, signer: Signer | None) -> Added:
    """Pushes the images by digest, with results and signatures. Raises RefusedError for a tag that must not move."""
    target, repository = added.target, Repository(added.target, host=run.host, write=True)
    sent_counts = [push_added_image(run, repository, added.addition, image) for image in added.images]
    for image in (image for image in added.images if image.results):
        reports.attach_evidence(repository, image.image.manifest.descriptor, image.results, signer)
    manifest = added.images[0].image.manifest
    if any(isinstance(image.parent.source, RegistrySource) and image.parent.source.index for image in added.images):
        platforms = {str(image.parent.arch): image.image.manifest.descriptor for image in added.images}
        manifest = Manifest.of(oci.platform_index(platforms), oci.INDEX_TYPE)
        repository.put_manifest(manifest.digest, manifest.content, manifest.media_type)
    is_dated = tags.is_stamp(target.tag.rpartition("-")[2])
    if is_dated and repository.digest_of(target.tag) not in (None, manifest.digest):
        raise RefusedError(f"{target} exists already: a tag with a date never moves", hint="Choose another tag.")
    if signer:
        sign(signer, repository, added, manifest)
    sent = Sent(
        **{name: sum(getattr(counts, name) for counts in sent_counts) for name in ("sent", "mounted", "present")}
    )
    return replace(added, manifest=manifest, sent=sent)


def push_added_image(run: Run, repository: Repository, addition: Addition, added: AddedImage) -> Sent:
    """Pushes an image by digest. The registry mounts the layers of a parent that it has; others pass this machine."""
    source, image, store = added.parent.source, added.image, run.store
    files: dict[Descriptor, Path | None] = {image.config: store.path(image.config.digest)}
    for layer in image.layers:
        files[layer.descriptor] = store.path(layer.digest) if store.has(layer.digest, layer.size) else None
    fetch = partial(transfer.fetch_blob, source.repository, store) if isinstance(source, RegistrySource) else None
    mounts = [addition.parent.repository] if addition.parent.registry == addition.target.registry else []
    progress = Meter(run.view, "push", "sent", 0).add
    return transfer.send_image(repository, image.manifest, files, fetch=fetch, mount_from=mounts, progress=progress)


def sign(signer: Signer, repository: Repository, added: Added, manifest: Manifest) -> None:
    """Attaches SBOM and provenance to each image, which names its parent by digest, then signs images and index."""
    # Without the values of variables, and the index, whose host or path may be private: a public transparency log may
    # show it.
    request = added.addition.request
    public = request.model_dump(exclude_defaults=True, exclude={"index"}) | {"env": sorted(request.env)}
    target, statements = added.target, dict[str, dict[str, bytes]]()  # by image
    for image in added.images:
        parent, name = image.parent, added.addition.parent.name
        replaced = {wheel.name for wheel in image.wheels}
        kept = [wheel for name, wheel in parent.packages.items() if name not in replaced]
        tested = reports.test_result(coverage_of(Proof(evidence=result, signer=OWN) for result in image.results))
        statements[image.image.manifest.digest] = {
            sbom_and_provenance.SBOM: sbom_and_provenance.sbom_of_additions(
                repository.name, image.image, kept, image.wheels, parent.debian
            ),
            sbom_and_provenance.PROVENANCE: sbom_and_provenance.provenance_of_additions(
                public, name, parent.image.manifest.digest, image.wheels
            ),
            **({reports.TEST_RESULT: tested} if tested else {}),
        }
    for digest in dict.fromkeys([*statements, manifest.digest]):
        notes = {"cell": "", "image": target.repository.rpartition("/")[2], "tag": target.tag}
        if tags.is_stamp(target.tag.rpartition("-")[2]):  # see `_is_for` of builder.release.attestations
            notes["release"] = target.tag
        signer.sign_manifest(repository, digest, notes, statements.get(digest, {}))


def set_tag(run: Run, added: Added) -> Added:
    """Tags a complete image: in the registry of its target, or, if that has none, in the engine and in the store."""
    if added.manifest:
        repository = Repository(added.target, host=run.host, write=True)
        repository.put_manifest(added.target.tag, added.manifest.content, added.manifest.media_type)
        _say(run, "pushed", f"{added.target}@{added.digest}  {added.sent}")
        return added
    info = run.engine.info()
    [image] = [added_image.image for added_image in added.images if added_image.parent.arch == info.arch]
    run.engine.tag(image.image_id(info.store), added.target)
    run.store.name(str(added.target), image.manifest.descriptor)
    _say(run, "loaded", f"{added.target}  {image.manifest.digest}")
    return replace(added, manifest=image.manifest)
