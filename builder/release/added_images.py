"""Verifies what `builder add` made: its configuration is derived again from its parent, which is read by its digest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from builder.common.errors import BuilderError, VerifyError
from builder.common.reference import ImageRef
from builder.common.text import one_line
from builder.host import Host
from builder.layers import oci
from builder.layers.blobs import CONFIG_TYPE, Descriptor
from builder.layers.oci import Image
from builder.layers.store import Store
from builder.matrix.tags import ADDED_LABEL, PARENT_LABEL
from builder.registry.client import Repository
from builder.release import expected
from builder.release.additions import BASE_NAME, derive_config
from builder.release.image_sources import ALL, ImageSource, StoredSource, sources_in_registry
from builder.release.parent import Parent, read_parent
from builder.release.verify import CONFIGURATION, Finding, State


def find_parent(
    image: Image,
    registries: Collection[str] | None,
    host: Host,
    store: Store,
    new_repository: Callable[..., Repository],
) -> tuple[ImageRef, Parent | str]:
    """The name of an image's parent, with the digest in its label, and the parent, or the reason that it is not read.

    Whoever made an image that no trusted signer signed chose that name: only `registries`, if given, are read. Raises
    VerifyError for labels that `builder add` does not write.
    """
    try:
        named, digest = ImageRef.parse(image.labels.get(BASE_NAME, "")), image.labels.get(PARENT_LABEL) or "none"
        reference = replace(named, tag="", digest=digest)
    except ValueError as error:
        raise VerifyError(f"the image has invalid labels of its parent: {error}") from error
    if reference.registry and registries is not None and reference.registry not in registries:
        return reference, "not read from another registry, as no trusted signer signed this image"
    try:
        source: ImageSource
        if reference.registry:
            repository = new_repository(reference, host=host, write=False)
            [source, *_] = sources_in_registry(repository, digest, store.root / "tmp", ALL)
        else:
            source = StoredSource(manifest=store.read(digest), store=store)
        return reference, read_parent(source)
    except BuilderError as error:
        return reference, f"not read: {one_line(str(error))}"


def check_configuration(
    source: ImageSource, reference: ImageRef, parent: Parent | str, *, trusted: str, is_signed: bool
) -> Iterator[Finding]:
    """Findings about the parent and the configuration. `reference` and `parent` are those of `find_parent`.

    `trusted` is the reason to trust the parent. Only a signed image has a configuration that is known.
    """
    image, config = source.image, source.read_blob(source.image.config.digest)
    state: State = "signed" if is_signed or trusted else "unknown"
    reason = trusted or (parent if isinstance(parent, str) else "no trusted signer signed it")
    named = ", only this image that names it" if is_signed and not trusted else ""
    yield Finding(layer="parent", digest=reference.digest, state=state, detail=f"{reference.name}: {reason}{named}")
    detail = "not compared with that of its parent"
    if not isinstance(parent, str):
        count, text = len(parent.image.layers), image.labels[ADDED_LABEL]
        layers = image.layers[count:]
        derived, _ = derive_config(parent, image.labels[BASE_NAME], text, layers, image.history[count:])
        # The lowest layers must be those of the parent.
        manifest = oci.manifest(Descriptor.of(config, CONFIG_TYPE), [*parent.image.layers, *layers])
        lines = expected.differing_values(derived, manifest, config, image)
        if lines:
            state, detail = "different", one_line("; ".join(lines))
        elif is_signed:
            state, detail = "same", ""
        else:  # anyone who can push could set variables and a command
            state, detail = "unknown", "derived from its parent, but no trusted signer signed the request"
    yield Finding(layer=CONFIGURATION, digest=image.config.digest, state=state, detail=detail)
