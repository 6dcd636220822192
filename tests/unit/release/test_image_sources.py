"""An invalid image raises a VerifyError, whatever it contains."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import pytest

from builder.common.errors import VerifyError
from builder.layers import estargz
from builder.release.image_sources import ImageSource
from tests.unit.release.parents import of_wheels, project

SHA256 = "sha256:" + "5" * 64
LINE, _ = of_wheels(project("tiny"))


def documents(line: str = LINE, history: Sequence[Any] | None = None) -> dict[str, Any]:
    """Manifest and configuration of an image with one layer."""
    return {
        "manifest": {"config": {"digest": SHA256, "size": 7}, "layers": [{"digest": SHA256, "size": 7}]},
        "configuration": {
            "rootfs": {"diff_ids": [SHA256]},
            "history": [{"created_by": line}] if history is None else history,
        },
    }


@dataclass(frozen=True, kw_only=True)
class MemorySource(ImageSource):
    """An image in memory."""

    config: bytes

    def read_blob(self, digest: str) -> bytes:
        return self.config

    def open_unchecked(self, digest: str, size: int) -> BinaryIO:
        raise NotImplementedError


def source(data: Mapping[str, Any]) -> ImageSource:
    """An image in memory; its documents as JSON or bytes."""
    manifest, config = (
        content if isinstance(content, bytes) else json.dumps(content).encode() for content in data.values()
    )
    return MemorySource(manifest=manifest, config=config)


def refusal(image: ImageSource) -> str:
    with pytest.raises(VerifyError) as raised:
        _ = image.wheels
    message = str(raised.value)
    assert message.isprintable()
    assert len(message) < 300
    return message


def test_the_wheels_of_an_image() -> None:
    [wheel] = source(documents()).wheels
    assert (wheel.name, wheel.version, wheel.file) == ("tiny", "1.9", "tiny-1.9-py3-none-any.whl")
    history = [{"created_by": "ENV x", "empty_layer": True}, {"created_by": LINE}]
    assert source(documents(history=history)).wheels == [wheel], "lines without a layer are skipped"


@pytest.mark.parametrize("annotations", [[], "x", None, {estargz.TOC_ANNOTATION: 5}, {estargz.TOC_ANNOTATION: "x"}])
def test_invalid_annotations(annotations: object) -> None:
    data = documents()
    data["manifest"]["layers"][0]["annotations"] = annotations
    assert "invalid manifest: layers.0.annotations" in refusal(source(data))


TAGS = ".".join(f"t{number}" for number in range(5000))


@pytest.mark.parametrize(
    "file",
    [
        "a" * 300 + "-1.0-py3-none-any.whl",
        "_-1.0-py3-none-any.whl",
        "..-1.0-py3-none-any.whl",
        "-1.0-py3-none-any.whl",
        "x-.whl",
        "x-one-py3-none-any.whl",
        "x-1.0-py3-none-any-and-more.whl",
        f"x-{'1' * 150}-py3-none-any.whl",
        f"x-1.0-{TAGS}-{TAGS}-{TAGS}.whl",
    ],
    ids=lambda file: file[:20],
)
def test_invalid_wheel_names(file: str) -> None:
    """They are rejected at once: parsing a name multiplies its tags."""
    began = time.process_time()
    line = f"wheels format=1 python=3.11: {file}@{SHA256}"
    assert "invalid wheel name in its history" in refusal(source(documents(line)))
    assert time.process_time() - began < 2


def test_an_invalid_line_about_wheels_is_refused() -> None:
    """Which lines are invalid: test_oci.py."""
    assert "its history cannot be read" in refusal(source(documents(f"wheels {'x' * 100_000}\x1b[2J")))


DEEP = b"[" * 100_000


@pytest.mark.parametrize("what", ["manifest", "configuration"])
@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"\xff", b'{"a":' + DEEP, DEEP, b"[]", b"null", b'"text"', b"1" * 5000),
        {"config": None, "rootfs": None},
        {"config": {}, "rootfs": {}},
        {"config": "x", "rootfs": "x"},
        {"config": [], "rootfs": []},
        {"layers": 5, "history": 5},
        {"layers": None, "history": None},
        {"layers": [{}], "history": ["x"]},
        {"layers": ["x"], "history": [None]},
        {"layers": [None], "rootfs": {"diff_ids": 5}},
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_documents(what: str, content: bytes | dict[str, Any]) -> None:
    data = documents()
    data[what] = content if isinstance(content, bytes) else data[what] | content
    assert f"invalid {what}" in refusal(source(data))


@pytest.mark.parametrize("size", [math.inf, 1.5, "1", -1, True, None])
def test_invalid_sizes(size: object) -> None:
    data = documents()
    data["manifest"]["layers"][0]["size"] = size
    assert "invalid manifest: layers.0.size" in refusal(source(data))


@pytest.mark.parametrize("layers", [0, 2])
def test_counts_that_differ(layers: int) -> None:
    data = documents()
    data["manifest"]["layers"] *= layers
    assert f"{layers} in the manifest, 1 in the configuration, 1 in its history" in refusal(source(data))
    assert "0 in its history" in refusal(source(documents(history=[])))


@pytest.mark.parametrize(
    "digest", ["", "sha256:", "sha256:../../x", SHA256 + "0", SHA256.upper(), SHA256 + "\n", 5, None]
)
@pytest.mark.parametrize("what", ["config", "digest", "diff_id"])
def test_invalid_digests(what: str, digest: Any) -> None:
    data = documents()
    if what == "diff_id":
        data["configuration"]["rootfs"]["diff_ids"] = [digest]
    elif what == "digest":
        data["manifest"]["layers"][0]["digest"] = digest
    else:
        data["manifest"]["config"]["digest"] = digest
    expected = "invalid configuration: rootfs.diff_ids.0" if what == "diff_id" else "invalid manifest: "
    assert refusal(source(data)).startswith(expected)
