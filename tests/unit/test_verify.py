"""What becomes of each layer of an image, and that no image, whatever it says, ends in anything but our errors."""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from builder import digest, oci, splice, verify, wheel
from builder.errors import DiskError, FetchError, VerifyError
from builder.fetch import Fetcher
from builder.layers import PlannedLayer
from builder.lock import Wheel
from builder.verify import Finding
from tests.unit import test_wheel
from tests.unit.test_wheel import pack

TINY = pack({"tiny/a.py": b"tiny = 1\n"})
OTHER = pack({"other.py": b""}, name="other-2.0-py3-none-any.whl", info="other-2.0.dist-info")
SHA256 = "sha256:" + "5" * 64


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Layer:
    """As manifest, configuration and history have it."""

    line: str
    digest: str = SHA256
    diff_id: str = SHA256


def of_wheels(*packed: test_wheel.Wheel, python: str = "3.11") -> Layer:
    """The layer that these wheels come to."""
    place = wheel.environment(python) if python else wheel.CUDA
    written = splice.write(wheel.layer_entries([one.open() for one in packed], place), io.BytesIO())
    wheels = tuple(
        Wheel(component="x", name="x", version="1", file=one.name, size=1, sha256=sha256(one.content)) for one in packed
    )
    planned = PlannedLayer(kind="wheels", name="x", component="x", inputs="", wheels=wheels, python=python)
    return Layer(line=oci.describe(planned), digest=written.digest, diff_id=written.diff_id)


@dataclass
class FakeSource:
    """Blobs in memory. All layers are there but those in `missing`."""

    told: Any
    config: bytes
    missing: set[str] = field(default_factory=set)

    def manifest(self) -> bytes:
        return self.told if isinstance(self.told, bytes) else json.dumps(self.told).encode()

    def read_blob(self, digest: str) -> bytes:
        return self.config

    def has_blob(self, digest: str) -> bool:
        return digest not in self.missing


def image(*layers: Layer, history: Sequence[Any] | None = None, missing: Sequence[Layer] = ()) -> FakeSource:
    lines = [{"created_by": layer.line} for layer in layers] if history is None else history
    config = {"rootfs": {"diff_ids": [layer.diff_id for layer in layers]}, "history": lines}
    manifest = {"config": {"digest": SHA256}, "layers": [{"digest": layer.digest} for layer in layers]}
    return FakeSource(manifest, json.dumps(config).encode(), {layer.digest for layer in missing})


class FakeFetcher(Fetcher):
    """Has these wheels; `broken` are those that it raises something for, by SHA-256."""

    def __init__(self, folder: Path, *packed: test_wheel.Wheel) -> None:
        self._folder = folder
        self.contents = {sha256(one.content): one.content for one in packed}
        self.broken: dict[str, Exception] = {}
        self.stopped = 0

    def fetch(self, wheel: Wheel) -> Path:
        if wheel.sha256 in self.broken:
            raise self.broken[wheel.sha256]
        self.path(wheel).write_bytes(self.contents[wheel.sha256])
        return self.path(wheel)

    def stop(self) -> None:
        self.stopped += 1


@pytest.fixture
def fetcher(tmp_path: Path) -> FakeFetcher:
    return FakeFetcher(tmp_path, TINY, OTHER)


def run(source: FakeSource, fetcher: FakeFetcher) -> list[Finding]:
    """All findings; afterwards nothing is fetched any more, and no wheel is left."""
    try:
        return list(verify.verify(source, fetcher))
    finally:
        assert list(fetcher._folder.iterdir()) == []


def only(source: FakeSource, fetcher: FakeFetcher) -> tuple[str, str]:
    """State and detail of the one layer of wheels."""
    [finding] = run(source, fetcher)
    return finding.state, finding.detail


# ---- what is found


def test_what_its_wheels_give_is_the_same(fetcher: FakeFetcher) -> None:
    """Each wheel in both places that there are."""
    layers = [
        Layer(line="os"),
        of_wheels(TINY, OTHER),
        of_wheels(TINY, python=""),
        Layer(line="bytecode: x"),
        Layer(line=""),
    ]
    assert run(image(*layers), fetcher) == [
        Finding(layer="os", digest=SHA256, state="not derived"),
        Finding(layer="tiny_pkg, other", digest=layers[1].digest, state="same"),
        Finding(layer="tiny_pkg", digest=layers[2].digest, state="same"),
        Finding(layer="bytecode: x", digest=SHA256, state="not derived"),
        Finding(layer="", digest=SHA256, state="not derived"),
    ]
    assert fetcher.stopped == 1


def test_many_wheels_are_not_all_named(fetcher: FakeFetcher) -> None:
    wheels = [pack(name=f"x{number}-1-py3-none-any.whl", info=f"x{number}-1.dist-info") for number in range(8)]
    fetcher.contents = {sha256(one.content): one.content for one in wheels}
    [finding] = run(image(of_wheels(*wheels)), fetcher)
    assert (finding.layer, finding.state) == ("x0, x1, x2, x3, x4, x5 and 2 more", "same")


def test_lines_of_the_history_that_are_no_layer(fetcher: FakeFetcher) -> None:
    layer = of_wheels(TINY)
    history = [{"created_by": "ENV x", "empty_layer": True}, {"created_by": layer.line}]
    assert only(image(layer, history=history), fetcher) == ("same", "")


@pytest.mark.parametrize("what", ["digest", "diff_id"])
def test_another_digest(fetcher: FakeFetcher, what: str) -> None:
    layer = of_wheels(TINY)
    state, detail = only(image(replace(layer, **{what: SHA256})), fetcher)
    assert (state, detail) == ("different", f"its wheels give {digest.short(layer.digest)}")


def test_wheels_of_another_order_or_python(fetcher: FakeFetcher) -> None:
    layer = of_wheels(TINY, OTHER)
    for line in (of_wheels(OTHER, TINY).line, layer.line.replace("3.11", "3.12"), layer.line.replace("3.11", "none")):
        assert only(image(replace(layer, line=line)), fetcher)[0] == "different"


def test_a_blob_that_is_not_there(fetcher: FakeFetcher) -> None:
    layers = [Layer(line="os", digest="sha256:" + "6" * 64), of_wheels(TINY), of_wheels(OTHER)]
    found = run(image(*layers, missing=layers[:2]), fetcher)
    assert [finding.state for finding in found] == ["different", "different", "same"]
    assert found[1].detail == "its blob is not there"


@pytest.mark.parametrize(("old", "new"), [(b"PK\x05\x06", b"PK\x05\x07"), (b"tiny = 1\n", b"tiny = 2\n")])
def test_a_faulty_wheel(fetcher: FakeFetcher, old: bytes, new: bytes) -> None:
    """Which nobody can have made a layer of."""
    layer = of_wheels(good := pack({"tiny/a.py": b"tiny = 1\n"}, method=0))
    bad = good.content.replace(old, new)
    fetcher.contents[sha256(bad)] = bad
    line = layer.line.replace(sha256(good.content), sha256(bad))
    state, detail = only(image(replace(layer, line=line)), fetcher)
    assert state == "different"
    assert detail.startswith(f"{good.name}: ")


@pytest.mark.parametrize("error", [FetchError("tiny: the index is silent"), FileNotFoundError("dropped")], ids=str)
def test_what_could_not_be_compared_is_not_called_different(fetcher: FakeFetcher, error: Exception) -> None:
    fetcher.broken[sha256(TINY.content)] = error
    found = run(image(of_wheels(TINY, OTHER), of_wheels(OTHER)), fetcher)
    assert [(finding.state, finding.detail) for finding in found] == [("failed", str(error)), ("same", "")]


def test_another_format_of_layers(fetcher: FakeFetcher) -> None:
    layer = of_wheels(TINY)
    line = layer.line.replace(f"format={splice.FORMAT}", "format=99")
    state, detail = only(image(replace(layer, line=line)), fetcher)
    assert (state, detail) == ("failed", f"layer format 99; this builder writes {splice.FORMAT}")


def test_a_full_disk_is_no_finding(fetcher: FakeFetcher) -> None:
    fetcher.broken[sha256(TINY.content)] = DiskError("full")
    with pytest.raises(DiskError):
        run(image(of_wheels(TINY)), fetcher)
    assert fetcher.stopped == 1


def test_who_wants_no_more_findings_ends_the_downloads(fetcher: FakeFetcher) -> None:
    findings = verify.verify(image(of_wheels(TINY), of_wheels(OTHER)), fetcher)
    assert next(findings).state == "same"
    findings.close()  # type: ignore[attr-defined]
    assert fetcher.stopped == 1


# ---- images that mean ill, or are none


def refusal(source: FakeSource, fetcher: FakeFetcher) -> str:
    with pytest.raises(VerifyError) as raised:
        run(source, fetcher)
    told = str(raised.value)
    assert told.isprintable()
    assert len(told) < 300
    return told


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
def test_names_that_no_wheel_has(fetcher: FakeFetcher, file: str) -> None:
    """And at once: tags are multiplied when a name is parsed."""
    began = time.process_time()
    line = f"wheels format=1 python=3.11: {file}@{SHA256}"
    assert "which is no wheel's name" in refusal(image(Layer(line=line)), fetcher)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "line",
    [
        "wheels ",
        "wheels format=1 python=3.11: ",
        "wheels format=x python=3.11: a-1-py3-none-any.whl@sha256:0",
        f"wheels format={'1' * 5000} python=3.11: {TINY.name}@{SHA256}",
        f"wheels format=1 python=3.11/../..: {TINY.name}@{SHA256}",
        f"wheels format=1 python=3.11: {TINY.name}@{SHA256} ",
        f"wheels format=1 python=3.11: ../{TINY.name}@{SHA256}",
        f"wheels format=1 python=3.11: {TINY.name}@{SHA256}\n",
        f"wheels format=1 python=3.11: {TINY.name}@{SHA256}\x1b[2J",
        "wheels " + "x" * 100_000,
    ],
    ids=lambda line: line[:40],
)
def test_lines_about_wheels_that_cannot_be_read(fetcher: FakeFetcher, line: str) -> None:
    assert "its history cannot be read" in refusal(image(Layer(line=line)), fetcher)


def test_what_a_terminal_would_act_on_is_not_said(fetcher: FakeFetcher) -> None:
    """As a line that goes up and writes `same` over what was found; and what cannot be written at all."""
    [finding] = run(image(Layer(line="os\x1b[1A\rsame\n\ud800\u202e")), fetcher)
    assert finding.layer == "os\ufffd[1A\ufffdsame\ufffd\ufffd\ufffd"


DEEP = b"[" * 100_000


@pytest.mark.parametrize("what", ["manifest", "configuration"])
@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff", b'{"a":' + DEEP, DEEP, b"[]", b"null", b'"text"', b"1" * 5000],
    ids=lambda data: data[:9],
)
def test_what_is_no_json_object(fetcher: FakeFetcher, what: str, data: bytes) -> None:
    source = image(of_wheels(TINY))
    if what == "manifest":
        source.told = data
    else:
        source.config = data
    assert f"its {what}" in refusal(source, fetcher)


@pytest.mark.parametrize("what", ["manifest", "configuration"])
@pytest.mark.parametrize(
    "changes",
    [
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
    ids=str,
)
def test_what_lacks_something(fetcher: FakeFetcher, what: str, changes: Mapping[str, Any]) -> None:
    source = image(of_wheels(TINY))
    if what == "manifest":
        source.told |= changes
    else:
        source.config = json.dumps(json.loads(source.config) | changes).encode()
    assert "its manifest or configuration lacks" in refusal(source, fetcher)


@pytest.mark.parametrize("layers", [0, 2])
def test_counts_that_differ(fetcher: FakeFetcher, layers: int) -> None:
    source = image(of_wheels(TINY))
    source.told["layers"] *= layers
    assert f"it has {layers} layers, 1 diff ids and 1 lines of history" in refusal(source, fetcher)
    assert "0 lines of history" in refusal(image(of_wheels(TINY), history=[]), fetcher)


@pytest.mark.parametrize(
    "digest", ["", "sha256:", "sha256:../../x", SHA256 + "0", SHA256.upper(), SHA256 + "\n", 5, None]
)
@pytest.mark.parametrize("what", ["config", "digest", "diff_id"])
def test_what_is_named_by_no_digest(fetcher: FakeFetcher, what: str, digest: Any) -> None:
    layer = of_wheels(TINY)
    source = image(layer if what == "config" else replace(layer, **{what: digest}))
    if what == "config":
        source.told["config"] = {"digest": digest}
        source.config = b"which is not read"
    assert "no SHA-256" in refusal(source, fetcher)
