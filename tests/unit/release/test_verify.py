"""The result for each part of an image, and that an invalid image raises a VerifyError, whatever it contains."""

from __future__ import annotations

import hashlib
import io
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import pytest

from builder.common.errors import DiskError, FetchError, VerifyError
from builder.common.files import digest_of_bytes, short_digest
from builder.index.download import Fetcher
from builder.index.wheels import LockedWheel, Sdist, Wheel
from builder.layers import estargz, oci, splice, wheel
from builder.layers.blobs import MANIFEST_TYPE
from builder.layers.installed import Installed
from builder.layers.splice import Entry
from builder.plan.layer_order import LAYER_FORMAT, PlannedLayer
from builder.plan.plan import PlannedImage
from builder.release.attestations import Attestations
from builder.release.expected import PlannedDigests
from builder.release.image_sources import ImageSource, sources_in_registry
from builder.release.verify import OTHER_TOC, Finding, _compare
from builder.steps import verify
from tests.fakes.registry import MemoryRegistry
from tests.unit.layers import test_wheel
from tests.unit.layers.test_estargz import replace_toc
from tests.unit.layers.test_wheel import pack

TINY = pack({"tiny/a.py": b"tiny = 1\n"})
OTHER = pack({"other.py": b""}, name="other-2.0-py3-none-any.whl", info="other-2.0.dist-info")
SHA256, SECOND = "sha256:" + "5" * 64, "sha256:" + "6" * 64
PLANNED = PlannedDigests(image=cast("PlannedImage", SimpleNamespace(wheels=())), layers={})
ATTACHED = Finding(layer="attached", digest=SHA256, state="signed")
NO_RECORD = "neither locks/layers.json nor this store has a record of it"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sha256_of_number(number: int) -> bytes:
    """Bytes that cannot be compressed."""
    return hashlib.sha256(str(number).encode()).digest()


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer in manifest, configuration and history."""

    line: str
    digest: str = SHA256
    diff_id: str = SHA256
    toc: str = ""
    content: bytes = b"not read"


def of_wheels(*packed: test_wheel.Wheel, python: str = "3.11", prefetch: Sequence[str] = ()) -> Layer:
    """The layer that is built from these wheels."""
    place = wheel.environment(python)
    out = io.BytesIO()
    entries = wheel.layer_entries([each.open() for each in packed], place, lambda _: None)
    written = splice.write_layer(splice.prefetched_first(entries, prefetch), out)
    wheels = tuple(
        Wheel(component="x", name="x", version="1", file=each.name, size=1, sha256=sha256(each.content))
        for each in packed
    )
    planned = PlannedLayer(kind="wheels", name="x", component="x", inputs="", wheels=wheels, python=python)
    return Layer(
        line=oci.history_line(planned),
        digest=written.digest,
        diff_id=written.diff_id,
        toc=written.toc,
        content=out.getvalue(),
    )


def documents(*layers: Layer, history: Sequence[Any] | None = None) -> dict[str, Any]:
    """Manifest and configuration of an image."""
    lines = [{"created_by": layer.line} for layer in layers] if history is None else history
    return {
        "manifest": {
            "config": {"digest": SHA256, "size": 7},
            "layers": [
                {"digest": layer.digest, "size": 7, "annotations": {estargz.TOC_ANNOTATION: layer.toc}}
                for layer in layers
            ],
        },
        "configuration": {"rootfs": {"diff_ids": [layer.diff_id for layer in layers]}, "history": lines},
    }


@dataclass(frozen=True, kw_only=True)
class MemorySource(ImageSource):
    """An image in memory. `contents` are those of layers that are read; `missing` and `damaged` are layers."""

    config: bytes
    contents: Mapping[str, bytes] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    damaged: frozenset[str] = frozenset()

    def read_blob(self, digest: str) -> bytes:
        return self.config

    def has_blob(self, digest: str) -> bool:
        return digest not in self.missing

    def open_layer(self, digest: str, size: int, read: Callable[[int], None]) -> BinaryIO | None:
        read(size)
        return None if digest in self.damaged else self.open_unchecked(digest, size)

    def open_unchecked(self, digest: str, size: int) -> BinaryIO:
        return io.BytesIO(self.contents.get(digest, b"not read"))


def source(
    data: Mapping[str, Any],
    *,
    missing: Sequence[Layer] = (),
    damaged: Sequence[Layer] = (),
    contents: Mapping[str, bytes] = {},
) -> ImageSource:
    """An image in memory; its documents as JSON or bytes."""
    manifest, config = (
        content if isinstance(content, bytes) else json.dumps(content).encode() for content in data.values()
    )
    return MemorySource(
        manifest=manifest,
        config=config,
        contents=contents,
        missing=frozenset(layer.digest for layer in missing),
        damaged=frozenset(layer.digest for layer in damaged),
    )


def image(*layers: Layer) -> ImageSource:
    return source(documents(*layers), contents={layer.digest: layer.content for layer in layers})


class MemoryFetcher(Fetcher):
    """Has these wheels, and the addresses of the `named` indexes; `broken` are the errors for wheels, by SHA-256.

    `indexes` are those of fetched wheels, by file name.
    """

    def __init__(self, folder: Path, *packed: test_wheel.Wheel) -> None:
        self._folder = folder
        self.contents = {sha256(each.content): each.content for each in packed}
        self.broken: dict[str, Exception] = {}
        self.stopped, self.is_open = 0, True
        self.indexes: dict[str, str] = {}
        self.named: set[str] = set()
        self._lock = threading.Lock()

    def fetch(self, wheel: LockedWheel | Sdist) -> Path:
        self.indexes[wheel.file] = wheel.index
        if wheel.sha256 in self.broken:
            raise self.broken[wheel.sha256]
        with self._lock:
            if not self.is_open:
                raise FetchError("stopped")
            self.path(wheel).write_bytes(self.contents[wheel.sha256])
        return self.path(wheel)

    def has_index(self, name: str) -> bool:
        return name in self.named

    def stop(self) -> None:
        with self._lock:
            self.stopped += 1
            self.is_open = False


OF_TINY, OF_OTHER = sha256(TINY.content), sha256(OTHER.content)


@pytest.fixture(autouse=True)
def same_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The images are of no real plan; how their configurations are compared: test_expected.py."""
    monkeypatch.setattr("builder.release.expected.differences", lambda *_: [])


@pytest.fixture
def fetcher(tmp_path: Path) -> MemoryFetcher:
    return MemoryFetcher(tmp_path, TINY, OTHER)


def plan_of(indexes: Mapping[str, str]) -> PlannedDigests:
    """A plan without layers, of wheels with these SHA-256, each with the name of its index."""
    names = {OF_TINY: TINY.name, OF_OTHER: OTHER.name}
    wheels = [
        Wheel(component="x", name="x", version="1", file=names.get(each, "x"), size=1, sha256=each, index=index)
        for each, index in indexes.items()
    ]
    return PlannedDigests(image=cast("PlannedImage", SimpleNamespace(wheels=wheels)), layers={})


def findings_of(
    image: ImageSource, fetcher: MemoryFetcher, planned: PlannedDigests | None = None, *, fast: bool = False
) -> Iterator[Finding]:
    """By default with a plan where all wheels of the fetcher are from the default index."""
    planned = planned or plan_of(dict.fromkeys(fetcher.contents, ""))
    return verify.verify_image(image, planned, None, fetcher, fast=fast)


class Signed(Attestations):
    """A trusted signature of an image, and an SBOM with these indexes; nothing else is attached."""

    def __init__(self, indexes: Mapping[str, str]) -> None:
        object.__setattr__(self, "listed", indexes)

    def signatures(self) -> Iterator[Finding]:
        return iter(())

    def indexes(self) -> dict[str, str]:
        return dict(self.listed)  # type: ignore[attr-defined]

    def test_results(self) -> Finding:
        return ATTACHED

    def sbom(self, installed: Installed | None) -> Finding:
        return ATTACHED

    def provenance(self) -> Finding:
        return ATTACHED


def run(image: ImageSource, fetcher: MemoryFetcher, *, fast: bool = False) -> list[Finding]:
    """Findings for the layers. Checks that no wheel is left."""
    fetcher.is_open = True
    try:
        configuration, *findings = findings_of(image, fetcher, fast=fast)
        assert (configuration.layer, configuration.state) == ("configuration", "same")
        return findings
    finally:
        assert list(fetcher._folder.iterdir()) == []


def only(image: ImageSource, fetcher: MemoryFetcher) -> tuple[str, str]:
    """State and detail of the one layer."""
    [finding] = run(image, fetcher)
    return finding.state, finding.detail


# ---- findings


def test_a_rebuilt_layer_has_the_same_digest(fetcher: MemoryFetcher) -> None:
    """Wheels of both kinds of layers: for Python, and CUDA."""
    layers = [
        Layer(line="os"),
        of_wheels(TINY, OTHER),
        of_wheels(TINY, python=""),
        Layer(line="bytecode: x"),
        Layer(line=""),
    ]
    assert run(image(*layers), fetcher) == [
        Finding(layer="os", digest=SHA256, state="unknown", detail=NO_RECORD),
        Finding(layer="tiny_pkg, other", digest=layers[1].digest, state="derived"),
        Finding(layer="tiny_pkg", digest=layers[2].digest, state="derived"),
        Finding(layer="bytecode: x", digest=SHA256, state="unknown", detail=NO_RECORD),
        Finding(layer="", digest=SHA256, state="unknown", detail=NO_RECORD),
    ]
    assert fetcher.stopped == 1


def test_a_layer_of_wheels_with_different_files_for_one_path_is_rebuilt(fetcher: MemoryFetcher) -> None:
    names = [(f"x{number}-1-py3-none-any.whl", f"x{number}-1.dist-info") for number in range(2)]
    wheels = [pack({"tests/t.py": name.encode()}, name=name, info=info) for name, info in names]
    fetcher.contents = {sha256(each.content): each.content for each in wheels}
    assert only(image(of_wheels(*wheels)), fetcher) == ("derived", "")


def test_a_long_list_of_wheels_is_cut(fetcher: MemoryFetcher) -> None:
    wheels = [pack(name=f"x{number}-1-py3-none-any.whl", info=f"x{number}-1.dist-info") for number in range(8)]
    fetcher.contents = {sha256(each.content): each.content for each in wheels}
    [finding] = run(image(of_wheels(*wheels)), fetcher)
    assert (finding.layer, finding.state) == ("x0, x1, x2, x3, x4, x5 and 2 more", "derived")


def test_history_lines_without_a_layer_are_skipped(fetcher: MemoryFetcher) -> None:
    layer = of_wheels(TINY)
    history = [{"created_by": "ENV x", "empty_layer": True}, {"created_by": layer.line}]
    assert only(source(documents(layer, history=history)), fetcher) == ("derived", "")


@pytest.mark.parametrize("change", [{"digest": SHA256}, {"diff_id": SHA256}])
def test_another_digest(fetcher: MemoryFetcher, change: dict[str, Any]) -> None:
    layer = of_wheels(TINY)
    assert only(image(replace(layer, **change)), fetcher) == (
        "different",
        f"its wheels produce {short_digest(layer.digest)}",
    )


@pytest.mark.parametrize(
    ("known", "state", "detail"),
    [
        ({}, "known", ""),
        ({"how": "derived"}, "derived", ""),
        ({"diff_id": SECOND}, "different", "the configuration has another diff id for it"),
        ({"how": "built"}, "known", ""),
        ({"digest": SECOND, "how": "built"}, "unknown", "this store has 666666666666 instead"),
        ({"digest": SECOND}, "different", "expected 666666666666"),
        ({"toc": SECOND}, "different", OTHER_TOC),
        ({"toc": SECOND, "how": "derived"}, "different", OTHER_TOC),
        ({"digest": SECOND, "diff_id": SECOND}, "different", "expected 666666666666"),
        ({"digest": SECOND, "how": "derived"}, "different", "expected 666666666666"),
    ],
    ids=str,
)
def test_a_layer_without_wheels_is_looked_up(known: dict[str, Any], state: str, detail: str) -> None:
    layer = oci.Layer(digest=SHA256, diff_id=SHA256, size=7)
    how = known.pop("how", "known")
    record = oci.Layer(**{"digest": SHA256, "diff_id": SHA256, "size": 7, **known})
    assert _compare(layer, (record, how)) == (state, detail)


@pytest.mark.parametrize(("lines", "state"), [([], "same"), (["config.User: \x1b[1A"], "different")], ids=str)
def test_the_configuration_is_compared_with_the_plan(
    fetcher: MemoryFetcher, monkeypatch: pytest.MonkeyPatch, lines: list[str], state: str
) -> None:
    monkeypatch.setattr("builder.release.expected.differences", lambda *_: lines)
    finding = next(findings_of(image(Layer(line="os")), fetcher))
    assert (finding.layer, finding.state) == ("configuration", state)
    assert finding.detail == "".join(lines).replace("\x1b", "\ufffd")


@pytest.mark.parametrize("toc", ["", SECOND])
def test_a_rebuilt_layer_with_the_digest_of_another_table_of_contents(fetcher: MemoryFetcher, toc: str) -> None:
    assert only(image(replace(of_wheels(TINY), toc=toc)), fetcher) == ("different", OTHER_TOC)


def test_the_table_of_contents_of_a_layer_that_is_not_rebuilt_is_compared_with_its_files(
    fetcher: MemoryFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node with a snapshotter would mount other files than those that all other readers see."""
    out = io.BytesIO()
    written = splice.write_layer([Entry(path="run\x1b[1A", mode=0o644, content=b"x")], out)
    right = Layer(line="os", digest=written.digest, diff_id=written.diff_id, toc=written.toc)
    forged, toc = replace_toc(out.getvalue(), lambda entries: entries[0].update(mode=0o4755))
    wrong = replace(right, digest=f"sha256:{sha256(forged)}", toc=toc)
    contents = {right.digest: out.getvalue(), wrong.digest: forged}
    layers = [right, wrong, replace(right, toc=SECOND), replace(right, toc="")]
    detail = r"the table of contents has wrong data about 'run\x1b[1A'"
    other = "the table of contents does not match the digest in the manifest"

    checked = source(documents(*layers), contents=contents)
    assert [(finding.state, finding.detail) for finding in run(checked, fetcher)] == [
        ("unknown", NO_RECORD), ("different", detail), ("different", other), ("unknown", NO_RECORD),
    ]  # fmt: skip
    assert {finding.state for finding in run(checked, fetcher, fast=True)} == {"unknown"}

    # Also one that locks/layers.json lists: whoever wrote that file may have been wrong.
    known = oci.Layer(digest=wrong.digest, diff_id=wrong.diff_id, size=7, toc=wrong.toc)
    plan = replace(PLANNED, layers={0: (known, "known")})
    findings = list(findings_of(source(documents(wrong), contents=contents), fetcher, plan))
    assert (findings[1].state, findings[1].detail) == ("different", detail)


@pytest.mark.parametrize("annotations", [[], "x", None, {estargz.TOC_ANNOTATION: 5}, {estargz.TOC_ANNOTATION: "x"}])
def test_invalid_annotations(fetcher: MemoryFetcher, annotations: object) -> None:
    data = documents(of_wheels(TINY))
    data["manifest"]["layers"][0]["annotations"] = annotations
    assert "invalid manifest: layers.0.annotations" in refusal(source(data), fetcher)


def test_a_missing_blob(fetcher: MemoryFetcher) -> None:
    layers = [Layer(line="os", digest=SECOND), of_wheels(TINY), of_wheels(OTHER)]
    findings = run(source(documents(*layers), missing=layers[:2]), fetcher)
    assert [finding.state for finding in findings] == ["different", "different", "derived"]
    assert findings[1].detail == "its blob is missing"


@pytest.mark.parametrize("fast", [True, False])
def test_the_order_of_files_is_that_of_the_layer(fetcher: MemoryFetcher, fast: bool) -> None:
    """Which files are prefetched is not in the history: `--fast` refused such layers without a checkout."""
    ordered = image(of_wheels(TINY, prefetch=["opt/venv/lib/python*/site-packages/tiny/a.py"]))
    assert [finding.state for finding in run(ordered, fetcher, fast=fast)] == ["derived"]


def in_registry(layer: Layer) -> MemoryRegistry:
    """A registry with an image of this layer, whose tag is `1`."""
    data = documents(layer)
    config = json.dumps(data["configuration"]).encode()
    data["manifest"]["config"] = {"digest": digest_of_bytes(config), "size": len(config)}
    data["manifest"]["layers"][0]["size"] = len(layer.content)
    registry = MemoryRegistry()
    registry.contents |= {digest_of_bytes(config): config, layer.digest: layer.content}
    registry.put_manifest("1", json.dumps(data["manifest"]).encode(), MANIFEST_TYPE)
    registry.calls.clear()
    return registry


def test_fast_downloads_only_the_table_of_contents_of_a_layer(tmp_path: Path) -> None:
    large = pack({"tiny/a.py": b"".join(map(sha256_of_number, range(3000)))})
    layer = of_wheels(large, prefetch=["opt/venv/lib/python*/site-packages/tiny/a.py"])
    registry = in_registry(layer)
    [source] = sources_in_registry(registry, "1", tmp_path, "amd64")
    [finding] = run(source, MemoryFetcher(tmp_path, large), fast=True)
    assert finding.state == "derived"
    footer, table = (int(call.split()[1]) for call in registry.calls)
    assert footer == estargz.FOOTER
    assert table < 2000
    assert len(layer.content) > 90_000


def test_a_registry_that_cannot_send_the_end_of_a_layer(tmp_path: Path, fetcher: MemoryFetcher) -> None:
    registry = in_registry(of_wheels(TINY))
    del registry.contents[of_wheels(TINY).digest]
    registry.has.add(of_wheels(TINY).digest)
    [source] = sources_in_registry(registry, "1", tmp_path / "other", "amd64")
    assert run(source, fetcher, fast=True)[0] == Finding(
        layer="tiny_pkg", digest=of_wheels(TINY).digest, state="failed", detail="no such blob: run this without --fast"
    )


def test_every_blob_is_hashed_unless_fast(fetcher: MemoryFetcher) -> None:
    """A damaged blob in the store was never read."""
    layers = [Layer(line="os", digest=SECOND), of_wheels(TINY)]
    damaged = source(documents(*layers), damaged=layers[1:])
    findings = run(damaged, fetcher)
    assert [finding.state for finding in findings] == ["unknown", "different"]
    assert findings[1].detail == "its blob is damaged: the bytes do not match the digest"
    assert [finding.state for finding in run(damaged, fetcher, fast=True)] == ["unknown", "derived"]


@pytest.mark.parametrize(("old", "new"), [(b"PK\x05\x06", b"PK\x05\x07"), (b"tiny = 1\n", b"tiny = 2\n")])
def test_an_invalid_wheel(fetcher: MemoryFetcher, old: bytes, new: bytes) -> None:
    """No layer can have been built from it."""
    layer = of_wheels(good := pack({"tiny/a.py": b"tiny = 1\n"}, method=0))
    bad = good.content.replace(old, new)
    fetcher.contents[sha256(bad)] = bad
    line = layer.line.replace(sha256(good.content), sha256(bad))
    state, detail = only(image(replace(layer, line=line)), fetcher)
    assert state == "different"
    assert detail.startswith(f"{good.name}: ")


@pytest.mark.parametrize("error", [FetchError("tiny: no response"), FileNotFoundError("removed")], ids=str)
def test_a_failed_download_is_no_difference(fetcher: MemoryFetcher, error: Exception) -> None:
    fetcher.broken[sha256(TINY.content)] = error
    findings = run(image(of_wheels(TINY, OTHER), of_wheels(OTHER)), fetcher)
    assert [(finding.state, finding.detail) for finding in findings] == [("failed", str(error)), ("derived", "")]


def test_the_hint_of_a_failed_download_is_shown(fetcher: MemoryFetcher) -> None:
    """An index without its login: the hint has the variables to set."""
    fetcher.broken[OF_TINY] = FetchError("the index company returned 401", hint="Give a login: set A.")
    assert only(image(of_wheels(TINY)), fetcher) == ("failed", "the index company returned 401. Give a login: set A.")


def test_a_forged_table_of_contents_is_refused_if_its_wheels_cannot_be_downloaded(fetcher: MemoryFetcher) -> None:
    layer = of_wheels(TINY)
    forged, toc = replace_toc(layer.content, lambda entries: entries.pop(0))
    fetcher.broken[sha256(TINY.content)] = FetchError("tiny: no response")
    wrong = replace(layer, digest=f"sha256:{sha256(forged)}", toc=toc, content=forged)
    detail = "the table of contents has wrong data about 'opt/'"
    assert only(image(wrong), fetcher) == ("different", detail)


def test_an_unsupported_layer_format(fetcher: MemoryFetcher) -> None:
    layer = of_wheels(TINY)
    line = layer.line.replace(f"format={LAYER_FORMAT}", "format=99")
    detail = f"its layer format is 99, this builder's is {LAYER_FORMAT}: use the one that built it"
    assert only(image(replace(layer, line=line)), fetcher) == ("failed", detail)


def test_a_full_disk_is_no_finding(fetcher: MemoryFetcher) -> None:
    fetcher.broken[sha256(TINY.content)] = DiskError("full")
    with pytest.raises(DiskError):
        run(image(of_wheels(TINY)), fetcher)
    assert fetcher.stopped == 1


def test_downloads_end_when_no_more_findings_are_read(fetcher: MemoryFetcher) -> None:
    findings = findings_of(image(of_wheels(TINY), of_wheels(OTHER)), fetcher)
    assert [next(findings).state, next(findings).state] == ["same", "derived"]
    findings.close()  # type: ignore[attr-defined]
    assert fetcher.stopped == 1


# ---- named indexes


NO_ADDRESS = "not rebuilt without the address of the index company: add --index company=URL"
UNLISTED = f"not rebuilt: neither the plan nor a signed SBOM names the index of {OTHER.name}"


def test_wheels_are_fetched_from_the_indexes_that_the_sbom_names(fetcher: MemoryFetcher) -> None:
    fetcher.named = {"company"}
    signed = Signed({OF_TINY: "company", OF_OTHER: ""})
    findings = verify.verify_image(image(of_wheels(TINY, OTHER)), PLANNED, signed, fetcher)
    assert [finding.state for finding in findings] == ["same", "derived", *[ATTACHED.state] * 3]
    assert fetcher.indexes == {TINY.name: "company", OTHER.name: ""}


def test_wheels_are_fetched_from_the_indexes_of_the_plan(fetcher: MemoryFetcher) -> None:
    """Also if an SBOM names another one, or none."""
    fetcher.named = {"company"}
    plan = plan_of({OF_TINY: "company", OF_OTHER: "company"})
    findings = verify.verify_image(image(of_wheels(TINY, OTHER)), plan, Signed({OF_TINY: ""}), fetcher)
    assert [finding.state for finding in findings] == ["same", "derived", *[ATTACHED.state] * 3]
    assert fetcher.indexes == {TINY.name: "company", OTHER.name: "company"}


@pytest.mark.parametrize(
    ("indexes", "reason"),
    [({OF_TINY: "", OF_OTHER: "company"}, NO_ADDRESS), ({OF_TINY: ""}, UNLISTED)],
    ids=["no address", "not listed"],
)
@pytest.mark.parametrize("is_signed", [True, False])
def test_no_index_is_asked_for_the_wheels_of_another_one(
    fetcher: MemoryFetcher, indexes: dict[str, str], reason: str, is_signed: bool
) -> None:
    """The default index got the names of private packages."""
    layers = [of_wheels(TINY), of_wheels(OTHER), of_wheels(TINY, OTHER)]
    planned, signed = (PLANNED, Signed(indexes)) if is_signed else (plan_of(indexes), None)
    findings = list(verify.verify_image(image(*layers), planned, signed, fetcher))
    state = "signed" if is_signed else "unknown"
    assert [(finding.state, finding.detail) for finding in findings[1:4]] == [
        ("derived", ""), (state, reason), (state, reason),
    ]  # fmt: skip
    assert fetcher.indexes == {TINY.name: ""}


def test_a_forged_table_of_contents_is_refused_if_its_wheels_are_not_fetched(fetcher: MemoryFetcher) -> None:
    layer = of_wheels(OTHER)
    forged, toc = replace_toc(layer.content, lambda entries: entries.pop(0))
    wrong = replace(layer, digest=f"sha256:{sha256(forged)}", toc=toc, content=forged)
    _, finding, *_ = verify.verify_image(image(wrong), PLANNED, Signed({}), fetcher)
    assert (finding.state, finding.detail) == ("different", "the table of contents has wrong data about 'opt/'")


def test_nothing_is_downloaded_without_a_plan_and_a_signature(fetcher: MemoryFetcher) -> None:
    """An unknown author would choose the names that the index gets."""
    layer = of_wheels(TINY)
    [finding] = verify.verify_image(source(documents(layer), damaged=[layer]), None, None, fetcher)
    assert (finding.layer, finding.state) == ("configuration", "unknown")
    assert fetcher.indexes == {}


# ---- invalid images


def refusal(image: ImageSource, fetcher: MemoryFetcher) -> str:
    with pytest.raises(VerifyError) as raised:
        run(image, fetcher)
    message = str(raised.value)
    assert message.isprintable()
    assert len(message) < 300
    return message


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
def test_invalid_wheel_names(fetcher: MemoryFetcher, file: str) -> None:
    """They are rejected at once: parsing a name multiplies its tags."""
    began = time.process_time()
    line = f"wheels format=1 python=3.11: {file}@{SHA256}"
    assert "invalid wheel name in its history" in refusal(image(Layer(line=line)), fetcher)
    assert time.process_time() - began < 2


def test_an_invalid_line_about_wheels_is_refused(fetcher: MemoryFetcher) -> None:
    """Which lines are invalid: test_oci.py."""
    assert "its history cannot be read" in refusal(image(Layer(line=f"wheels {'x' * 100_000}\x1b[2J")), fetcher)


def test_terminal_control_characters_are_replaced(fetcher: MemoryFetcher) -> None:
    """A line could move the cursor up and overwrite a finding."""
    [finding] = run(image(Layer(line="os\x1b[1A\rsame\n\u202e")), fetcher)
    assert finding.layer == "os\ufffd[1A\ufffdsame\ufffd\ufffd"


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
def test_invalid_documents(fetcher: MemoryFetcher, what: str, content: bytes | dict[str, Any]) -> None:
    data = documents(of_wheels(TINY))
    data[what] = content if isinstance(content, bytes) else data[what] | content
    assert f"invalid {what}" in refusal(source(data), fetcher)


@pytest.mark.parametrize("size", [math.inf, 1.5, "1", -1, True, None])
def test_invalid_sizes(fetcher: MemoryFetcher, size: object) -> None:
    data = documents(of_wheels(TINY))
    data["manifest"]["layers"][0]["size"] = size
    assert "invalid manifest: layers.0.size" in refusal(source(data), fetcher)


@pytest.mark.parametrize("layers", [0, 2])
def test_counts_that_differ(fetcher: MemoryFetcher, layers: int) -> None:
    data = documents(of_wheels(TINY))
    data["manifest"]["layers"] *= layers
    assert f"{layers} in the manifest, 1 in the configuration, 1 in its history" in refusal(source(data), fetcher)
    assert "0 in its history" in refusal(source(documents(of_wheels(TINY), history=[])), fetcher)


@pytest.mark.parametrize(
    "digest", ["", "sha256:", "sha256:../../x", SHA256 + "0", SHA256.upper(), SHA256 + "\n", 5, None]
)
@pytest.mark.parametrize("what", ["config", "digest", "diff_id"])
def test_invalid_digests(fetcher: MemoryFetcher, what: str, digest: Any) -> None:
    layer = of_wheels(TINY)
    data = documents(layer if what == "config" else replace(layer, **{what: digest}))
    if what == "config":
        data |= {"manifest": data["manifest"] | {"config": {"digest": digest, "size": 7}}, "configuration": b"not read"}
    expected = "invalid configuration: rootfs.diff_ids.0" if what == "diff_id" else "invalid manifest: "
    assert refusal(source(data), fetcher).startswith(expected)
