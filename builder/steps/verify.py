"""Verifies an image of the store or of a registry: its signature, configuration, layers and attachments.

Works without a checkout too: parts that cannot be compared on this machine are accepted if a trusted signer signed the
image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from builder.build.layer_lookup import LayerLookup
from builder.common.console import Meter, View
from builder.common.errors import StaleError, UsageError
from builder.common.reference import ImageRef
from builder.engine.run import Run
from builder.evidence.signing import Trust
from builder.host import Host
from builder.index.download import Fetcher
from builder.layers import stored_images
from builder.layers.installed import Installed
from builder.layers.known_layers import KnownLayers
from builder.layers.store import Store
from builder.matrix import tags
from builder.matrix.project import Project
from builder.matrix.schema import Trusted
from builder.matrix.tags import ADDED_LABEL
from builder.plan import plan
from builder.registry.client import Repository
from builder.release import added_images, expected, image_sources, verify
from builder.release.attestations import Attestations
from builder.release.expected import PlannedDigests
from builder.release.image_sources import ImageSource, RegistrySource, StoredSource
from builder.release.parent import Parent
from builder.release.verify import Finding


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """`arch` is for an image of several architectures in a registry. `fast` hashes no blobs.

    `signers` are the trusted signers; without any, those of matrix.yaml are. `indexes` are addresses of package
    indexes, by name.
    """

    arch: str
    fast: bool = False
    signers: Sequence[Trusted] = ()
    indexes: Mapping[str, str] = field(default_factory=dict)


def verify_named(
    reference: ImageRef, options: VerifyOptions, project: Project | None, host: Host, store: Store, view: View
) -> list[tuple[ImageSource, Iterator[Finding]]]:
    """The images that a name means, each with its findings, which are made as they are read.

    Without a checkout, `project` is None. Raises UsageError if there is no such image.
    """
    if options.signers and not reference.registry:
        raise UsageError(
            f"{reference} has no registry, and images of the store are not signed",
            hint="Name the registry, e.g. docker.io/org/pt-cuda:2.9.",
        )
    sources = find_images(reference, options.arch, project, host, store)

    # Without signers and without a checkout, nobody is trusted.
    trust = Trust(signers=options.signers, root=Path.cwd())
    if project and not options.signers:
        trust = Trust.of(project)
    # Signatures are for a tag or a digest; a reference without either means `latest`.
    tagged = reference if reference.tag or reference.digest else replace(reference, tag=reference.target)

    # Private packages come from the indexes of matrix.yaml and of the command line, by their names.
    settings = host.index
    for index, url in options.indexes.items():
        settings = settings.with_index(index, url, "")

    named = []
    for source in sources:
        # The image is compared with the plan of this checkout for the same cell.
        planned, built = None, None
        if project and (planned := planned_digests(project, store, source.lowest_cell)):
            built = LayerLookup.of(Run(checkout=project, host=host, store=store, view=view)).built_wheel
        attestations = None
        if isinstance(source, RegistrySource) and trust.signers:
            attestations = Attestations(source=source, reference=tagged, trust=trust)
        registries = None if attestations else {reference.registry, *([project.matrix.registry] if project else [])}
        findings = verify_image(
            source,
            planned,
            attestations,
            Fetcher(settings, store.downloads, progress=Meter(view, "wheels", "fetched", 0).add, built=built),
            find_parent=partial(added_images.find_parent, source.image, registries, host, store, Repository),
            fast=options.fast,
            read=Meter(view, "blobs", "hashed", 0).add,
        )
        named.append((source, findings))
    return named


def verify_image(
    source: ImageSource,
    planned: PlannedDigests | None,
    attestations: Attestations | None,
    fetcher: Fetcher,
    *,
    find_parent: Callable[[], tuple[ImageRef, Parent | str]] | None = None,
    fast: bool = False,
    read: Callable[[int], None] = lambda _: None,
) -> Iterator[Finding]:
    """The findings for an image. `planned` is None without a plan, `attestations` without trusted signers.

    Of an image that `builder add` made, `planned` is the lowest of its parents, and `find_parent` reads its parent.
    Raises VerifyError for an invalid image, RegistryError, SigningError.
    """
    # The signature comes first. Without a trusted one, nothing else is read: an unknown author would choose what this
    # machine downloads.
    indexes: Mapping[str, str] = {}
    if attestations:
        for signature in attestations.signatures():
            yield signature
            if signature.state != "signed":
                return
        indexes = attestations.indexes()
    is_signed = attestations is not None

    # The configuration sets the user and the command. Without a plan and a signature it is a failure, and the rest is
    # not read, for the same reason. One that `builder add` made is derived from that of its parent.
    if ADDED_LABEL in source.image.labels and find_parent:
        (name, parent), trusted = find_parent(), ""
        if isinstance(parent, str) or not planned or expected.differences(planned, parent.image, parent.config):
            planned = None
        else:
            trusted = "as planned in this checkout"
        if attestations and not isinstance(parent, str) and isinstance(parent.source, RegistrySource):
            of_parent = replace(attestations, source=parent.source, reference=name)
            [*_, signature] = of_parent.signatures()
            if signature.state == "signed":
                trusted, indexes = f"signed {signature.detail}", {**of_parent.indexes(), **indexes}
        yield from added_images.check_configuration(source, name, parent, trusted=trusted, is_signed=is_signed)
    else:
        yield verify.check_configuration(source, planned, is_signed=is_signed)
    wheels = verify.wheels_with_index(source.image, planned, indexes)
    if planned is None and not is_signed:
        return

    # Layers of wheels are rebuilt, the others looked up. The SBOM must list the packages that their files record.
    installed = Installed() if attestations and not fast else None
    yield from verify.check_layers(
        source, planned, wheels, fetcher, installed, is_signed=is_signed, fast=fast, read=read
    )

    if attestations:
        yield attestations.test_results()
        yield attestations.sbom(installed)
        yield attestations.provenance()


def find_images(
    reference: ImageRef,
    arch: str,
    project: Project | None,
    host: Host,
    store: Store,
    new_repository: Callable[..., Repository] = Repository,
) -> Sequence[ImageSource]:
    """The images that a reference names: in its registry, see `sources_in_registry`, or one in the store.

    In the store, it is a name, a cell or a tag. Raises UsageError if the store has no such image.
    """
    if reference.registry:
        repository = new_repository(reference, host=host, write=False)
        return image_sources.sources_in_registry(repository, reference.target, store.root / "tmp", arch)
    stored = store.images()
    local_names = tags.local_names(project.matrix, project.cells) if project else {}
    if matches := stored_images.match_names(stored, str(reference), local_names):
        return [StoredSource(manifest=store.read(stored[matches[0]].digest), store=store)]
    raise UsageError(
        f"the store {store.root} has no image {str(reference)!r}",
        hint=f"Images in the store: {', '.join(stored) or 'none'}. For an image in a registry, use REGISTRY/NAME:TAG.",
    )


def planned_digests(project: Project, store: Store, cell: str) -> PlannedDigests | None:
    """The digests of the image that the plan has for a cell; None if it has no such cell, or its locks are stale."""
    try:
        planned = plan.make_plan(project, [each for each in project.cells if each.id == cell]).images
    except (UsageError, StaleError):
        return None
    return expected.of_plan(project, KnownLayers(project.root), planned[0], store) if planned else None
