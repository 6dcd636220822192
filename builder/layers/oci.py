"""OCI documents: writes and reads an image's configuration and manifest, and the index of a store. Pure.

Source: OCI image specification, "Image Configuration", "Image Manifest" and "Image Index". `Healthcheck` is a
field of Docker alone; other readers ignore it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, AliasPath, BaseModel, ConfigDict, Field, ValidationError

from builder.common.errors import VerifyError
from builder.common.files import SHA256_HEX, digest_of_bytes
from builder.common.validation import message_of
from builder.index.wheels import STRICT
from builder.layers import estargz
from builder.matrix.schema import AMD64
from builder.plan.layer_order import LAYER_FORMAT, PlannedLayer
from builder.plan.settings import Settings

LAYOUT = '{"imageLayoutVersion":"1.0.0"}'
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"
PLAIN_LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
NAME = "org.opencontainers.image.ref.name"  # annotation by which skopeo finds an image: oci:<store>:<name>
CONTAINERD = "containerd"
_OF_SYSTEMS = ("created", "taken", "folders")
_SECOND = 1_000_000_000  # Docker counts nanoseconds
_WHEEL = re.compile(r"([A-Za-z0-9_.+!-]+\.whl)@sha256:([0-9a-f]{64})", re.ASCII)
_HISTORY = re.compile(r"wheels format=([0-9]+) python=([0-9.]+|none): (.+)", re.ASCII)
Digest = Annotated[str, Field(pattern=f"^sha256:{SHA256_HEX}$")]
OptionalDigest = Annotated[str, Field(pattern=f"^(sha256:{SHA256_HEX})?$")]
TIME = "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$"  # RFC 3339, in UTC and seconds


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("expected one line of printable characters")
    return value


Printable = Annotated[str, AfterValidator(_printable)]  # printed to a terminal, which interprets control characters
Size = Annotated[int, Field(ge=0, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """A blob, as manifests name it. Source: OCI image specification, "OCI Content Descriptors"."""

    media_type: str
    digest: str
    size: int

    @classmethod
    def of(cls, content: bytes, media_type: str) -> Descriptor:
        return cls(media_type=media_type, digest=digest_of_bytes(content), size=len(content))

    def as_data(self) -> dict[str, Any]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer, in every room: `digest` and `size` in bytes of its blob, `diff_id` and `unpacked` of the tar in it.

    `unpacked` is 0 if it is unknown. `toc` is the digest of its table of contents (eStargz), empty without one. Only an
    operating system has the last three: `created` is the time of its newest package, `taken` are the paths below /opt
    that are not folders, `folders` the folders that are not 0755 root:root. The fields are checked only where a layer
    is read, with a TypeAdapter.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    digest: Digest
    diff_id: Digest
    size: Size
    unpacked: Size = 0
    toc: OptionalDigest = ""
    created: Annotated[str, Field(pattern=f"^$|{TIME}")] = ""
    taken: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()

    def as_record(self) -> dict[str, Any]:
        """The fields that the store and locks/layers.json record: all of an operating system, else the first five."""
        return {name: value for name, value in vars(self).items() if self.created or name not in _OF_SYSTEMS}

    @property
    def descriptor(self) -> Descriptor:
        return Descriptor(media_type=LAYER_TYPE, digest=self.digest, size=self.size)

    @property
    def plain(self) -> Descriptor:
        """The tar itself, as a blob; the blob as it is if the size of its tar is unknown."""
        if not self.unpacked:
            return self.descriptor
        return Descriptor(media_type=PLAIN_LAYER_TYPE, digest=self.diff_id, size=self.unpacked)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A manifest or an index as it is stored, with its digest."""

    digest: str
    media_type: str
    content: bytes = field(repr=False)

    @classmethod
    def of(cls, content: bytes, media_type: str = MANIFEST_TYPE) -> Manifest:
        return cls(digest=digest_of_bytes(content), media_type=media_type, content=content)

    @property
    def descriptor(self) -> Descriptor:
        return Descriptor(media_type=self.media_type, digest=self.digest, size=len(self.content))


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image for one platform; layers lowest first. `history` has a `history_line` for each layer."""

    config: Descriptor
    manifest: Manifest
    layers: tuple[Layer, ...]
    history: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    def image_id(self, kind: str) -> str:
        """The id that an engine with this kind of store gives the image."""
        return self.manifest.digest if kind == CONTAINERD else self.config.digest


@dataclass(frozen=True, kw_only=True)
class LayerWheels:
    """The wheels of a layer by its history: their file names and SHA-256; `python` is empty for CUDA wheels."""

    format: int
    python: str
    wheels: tuple[tuple[str, str], ...]


# ---- writing


def config(
    settings: Settings, layers: Sequence[Layer], history: Sequence[str], *, created: str, labels: Mapping[str, str]
) -> bytes:
    """The configuration as JSON. `created` is in RFC 3339; `labels` come after the labels of the settings."""
    inner: dict[str, Any] = {
        "User": settings.user,
        "Env": [f"{name}={value}" for name, value in settings.env.items()],
        "Entrypoint": list(settings.entrypoint),
        "Cmd": list(settings.command),
        "WorkingDir": settings.workdir,
        "Labels": {**settings.labels, **labels},
    }
    if settings.ports:
        inner["ExposedPorts"] = {f"{port}/tcp": {} for port in settings.ports}
    if health := settings.health:
        inner["Healthcheck"] = {
            "Test": ["CMD", *health.command],
            "Interval": health.interval * _SECOND,
            "Timeout": health.timeout * _SECOND,
            "StartPeriod": health.start_period * _SECOND,
            "StartInterval": health.start_interval * _SECOND,
            "Retries": health.retries,
        }
    return _json(
        {
            "architecture": settings.arch,
            "os": "linux",
            "created": created,
            "config": inner,
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
            "history": [{"created": created, "created_by": line} for line in history],
        }
    )


def derived_config(
    parent: bytes, added: Sequence[Layer], history: Sequence[str], *,
    env: Mapping[str, str], labels: Mapping[str, str],
) -> bytes:  # fmt: skip
    """The configuration of an image that adds layers and variables to another one.

    `parent` is a configuration that `read_image` has accepted; `history` has a line for each added layer, `labels` are
    all of the new image.
    """
    data = json.loads(parent)
    inner = data["config"]
    variables = {**dict(text.partition("=")[::2] for text in inner.get("Env") or ()), **env}
    inner |= {"Env": [f"{name}={value}" for name, value in variables.items()], "Labels": dict(labels)}
    data["rootfs"]["diff_ids"] += [layer.diff_id for layer in added]
    data["history"] += [{"created": data.get("created", ""), "created_by": line} for line in history]
    return _json(data)


def bare_config(layers: Sequence[Layer], labels: Mapping[str, str], arch: str = AMD64) -> bytes:
    """The configuration of a temporary image."""
    return _json(
        {
            "architecture": arch,
            "os": "linux",
            "config": {"Labels": dict(labels)},
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        }
    )


def manifest(config_blob: Descriptor, layers: Sequence[Layer], *, is_plain: bool = False) -> bytes:
    """The manifest as JSON; `is_plain`: with the layers' tars, which are not compressed."""
    return _json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": {**config_blob.as_data(), "mediaType": CONFIG_TYPE},
            "layers": [layer.plain.as_data() if is_plain else _layer_data(layer) for layer in layers],
        }
    )


def _layer_data(layer: Layer) -> dict[str, Any]:
    """A layer in a manifest. Snapshotters mount only layers with the digest of their TOC."""
    if not layer.toc:
        return layer.descriptor.as_data()
    annotations = {estargz.TOC_ANNOTATION: layer.toc, estargz.SIZE_ANNOTATION: str(layer.unpacked)}
    return {**layer.descriptor.as_data(), "annotations": annotations}


def layout_index(images: Mapping[str, Descriptor]) -> str:
    """The index of a store as JSON, from the manifests of images by name."""
    entries = [{**images[name].as_data(), "annotations": {NAME: name}} for name in sorted(images)]
    return json.dumps({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries}, indent=1) + "\n"


def platform_index(images: Mapping[str, Descriptor]) -> bytes:
    """The index of an image for several architectures as JSON, from its manifests by architecture (`amd64`)."""
    entries = [{**images[arch].as_data(), "platform": {"architecture": arch, "os": "linux"}} for arch in sorted(images)]
    return _json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries})


def history_line(layer: PlannedLayer) -> str:
    """A layer's line in the history. For wheels it has their SHA-256, so that anyone can rebuild the layer."""
    if layer.kind == "bytecode":  # as earlier builders wrote it: the history is part of an image's digest
        return f"files: {layer.name}"
    if layer.kind != "wheels":
        return layer.name if layer.kind == layer.name else f"{layer.kind}: {layer.name}"
    wheels = " ".join(f"{wheel.file}@sha256:{wheel.sha256}" for wheel in layer.wheels)
    return f"wheels format={LAYER_FORMAT} python={layer.python or 'none'}: {wheels}"


def _json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=True).encode()


# ---- reading

_Model = TypeVar("_Model", bound=BaseModel)


class Listed(BaseModel, frozen=True):
    """The configuration in a manifest, or a manifest in an index."""

    media_type: str = Field("", alias="mediaType", max_length=200)
    digest: Digest
    size: Size
    artifact_type: str = Field("", alias="artifactType")
    annotations: dict[str, str] | None = None
    os: Printable = Field("", validation_alias=AliasPath("platform", "os"))
    architecture: Printable = Field("", validation_alias=AliasPath("platform", "architecture"))


class ListedLayer(Listed, frozen=True):
    """A layer of an image, or a file of an artifact. `toc` and `unpacked` are as in `Layer`."""

    annotations: dict[str, str] = {}
    toc: OptionalDigest = Field("", validation_alias=AliasPath("annotations", estargz.TOC_ANNOTATION))
    unpacked: Annotated[int, Field(ge=0)] = Field(0, validation_alias=AliasPath("annotations", estargz.SIZE_ANNOTATION))


class ManifestDocument(BaseModel, frozen=True):
    """The manifest of an image or of an artifact; `subject` is the image that an artifact is attached to."""

    config: Listed
    layers: tuple[ListedLayer, ...]
    artifact_type: str = Field("", alias="artifactType")
    annotations: dict[str, str] | None = None
    subject: Listed | None = None


class IndexDocument(BaseModel, frozen=True):
    """The index of a store, of an image for several architectures, or of what is attached to an image."""

    manifests: tuple[Listed, ...]


class _LabelsOfConfig(BaseModel, frozen=True):
    architecture: Printable
    labels: dict[str, Any] | None = Field(None, validation_alias=AliasPath("config", "Labels"))


class _Line(BaseModel, frozen=True):
    created_by: str = ""
    empty_layer: bool = False


class _ConfigDocument(BaseModel, frozen=True):
    diff_ids: tuple[Digest, ...] = Field(validation_alias=AliasPath("rootfs", "diff_ids"))
    history: tuple[_Line, ...] = ()
    labels: dict[str, str] | None = Field(None, validation_alias=AliasPath("config", "Labels"))


def read_image(content: bytes, read_blob: Callable[[str], bytes]) -> Image:
    """The image of a manifest. `read_blob` returns the configuration by its digest.

    Raises VerifyError for a manifest or configuration that is not one of an image for one platform, or if the two do
    not match; and what `read_blob` raises.
    """
    blobs = parse_document(ManifestDocument, content, "manifest")
    config = parse_document(_ConfigDocument, read_blob(blobs.config.digest), "configuration")
    diff_ids, lines = config.diff_ids, [line.created_by for line in config.history if not line.empty_layer]
    if not len(blobs.layers) == len(diff_ids) == len(lines):
        raise VerifyError(
            f"numbers of layers differ: {len(blobs.layers)} in the manifest, {len(diff_ids)} in the configuration, "
            f"{len(lines)} in its history"
        )
    return Image(
        config=Descriptor(media_type=CONFIG_TYPE, digest=blobs.config.digest, size=blobs.config.size),
        manifest=Manifest.of(content),
        layers=tuple(
            Layer(digest=blob.digest, size=blob.size, diff_id=diff_id, unpacked=blob.unpacked, toc=blob.toc)
            for blob, diff_id in zip(blobs.layers, diff_ids, strict=True)
        ),
        history=tuple(lines),
        labels=config.labels or {},
    )


def read_labels(content: bytes, read_blob: Callable[[str], bytes]) -> tuple[str, dict[str, str]]:
    """The architecture and the labels of the image of a manifest, even if the rest of its configuration is invalid.

    Raises as `read_image`.
    """
    config = read_blob(parse_document(ManifestDocument, content, "manifest").config.digest)
    values = parse_document(_LabelsOfConfig, config, "configuration")
    labels = {name: value for name, value in (values.labels or {}).items() if isinstance(value, str)}
    return values.architecture, labels


def read_platforms(content: bytes) -> dict[str, str]:
    """Architecture -> digest of each manifest for Linux in the index of an image. Raises VerifyError.

    Empty for an index of something else, such as attachments. Of two for one architecture, the first counts.
    """
    manifests = parse_document(IndexDocument, content, "index").manifests
    return {entry.architecture: entry.digest for entry in reversed(manifests) if entry.os == "linux"}


EMPTY, EMPTY_TYPE = b"{}", "application/vnd.oci.empty.v1+json"  # the configuration of an artifact


def artifact(
    kind: str, files: Sequence[Descriptor], notes: Mapping[str, str] = {}, subject: Descriptor | None = None
) -> bytes:
    """The manifest of an artifact of the type `kind`: files, annotations, and the image that it belongs to.

    Source: OCI image specification 1.1, "Guidelines for Artifact Usage".
    """
    data: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": kind,
        "config": Descriptor.of(EMPTY, EMPTY_TYPE).as_data(),
        "layers": [file.as_data() for file in files],
        "annotations": dict(notes),
    }
    if subject:
        data["subject"] = subject.as_data()
    return json.dumps(data, separators=(",", ":"), sort_keys=True).encode()


def read_blobs(content: bytes) -> dict[str, int]:
    """Digest -> size of the configuration and the layers of a manifest, the configuration first. Raises VerifyError."""
    blobs = parse_document(ManifestDocument, content, "manifest")
    return {blob.digest: blob.size for blob in (blobs.config, *blobs.layers)}


def read_index(content: bytes) -> dict[str, Descriptor]:
    """Name -> manifest of each image in the index of a store. Raises VerifyError."""
    images = {}
    for entry in parse_document(IndexDocument, content, "index").manifests:
        name = (entry.annotations or {}).get(NAME)
        if name is None or not entry.media_type:
            raise VerifyError(f"invalid index: {entry.digest} has no name or no media type", hint=_HINT)
        images[name] = Descriptor(media_type=entry.media_type, digest=entry.digest, size=entry.size)
    return images


_HINT = "Use an image for one platform that this builder made."


def parse_document(model: type[_Model], content: bytes, what: str, hint: str = _HINT) -> _Model:
    """A JSON document of a registry or a store. Raises VerifyError, which shows nothing of its text."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:  # its input may hold anything: not shown
        first = error.errors(include_url=False, include_input=False)[0]
        path = ascii(".".join(map(str, first["loc"]))[:100])[1:-1]
        fault = message_of(first).lower()
        raise VerifyError(f"invalid {what}: {path + ': ' if path else ''}{fault}", hint=hint) from error


def parse_history(line: str) -> LayerWheels | None:
    """The wheels in a `history_line`; None if its layer is not of wheels. Raises ValueError for an invalid line."""
    if not line.startswith("wheels "):
        return None
    match = _HISTORY.fullmatch(line)
    wheels = [_WHEEL.fullmatch(word) for word in match[3].split(" ")] if match else []
    if not match or not all(wheels):
        raise ValueError(f"not a line about wheels: {line[:200]}")
    python = "" if match[2] == "none" else match[2]
    return LayerWheels(format=int(match[1]), python=python, wheels=tuple((word[1], word[2]) for word in wheels if word))
