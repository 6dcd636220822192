"""What the errors of this room say, and what they advise. The other tests check only the type of an error."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from dataclasses import replace

import pytest

from builder.common.errors import BuilderError
from builder.common.files import digest_of_bytes
from builder.common.lock_text import KNOWN_LAYERS
from builder.layers import estargz, garbage, splice, stored_images, stored_layers
from builder.layers.estargz import TocEntry
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import LAYER_TYPE, MANIFEST_TYPE
from builder.layers.splice import Entry
from builder.layers.store import Store
from tests.unit.layers import test_known_layers as known
from tests.unit.layers.test_splice import stored
from tests.unit.layers.test_store import image
from tests.unit.layers.test_stored_layers import planned
from tests.unit.layers.test_wheel import layer, other, pack


def put(store: Store, content: bytes, written: bytes) -> str:
    """The digest of a blob that was damaged."""
    blob = store.put(content, LAYER_TYPE)
    store.path(blob.digest).write_bytes(written)
    return blob.digest


def in_use(store: Store) -> None:
    with Store(store.root).used():
        garbage.remove_garbage(store)


def on_full_disk(store: Store) -> None:
    with store.disk_errors():
        raise OSError(errno.ENOSPC, "No space left on device")


def incomplete(store: Store) -> None:
    for number in range(7):
        image(store, f"x{number}", b"layer")
    store.path(digest_of_bytes(b"layer")).unlink()
    garbage.find_garbage(store)


def without_index(store: Store) -> None:
    image(store, "x", b"layer")
    store.index.unlink()
    store.prepare()


def changed_layer(store: Store) -> None:
    layers = KnownLayers(store.root)
    layers.add(known.planned(), known.layer())
    layers.add(known.planned(), known.layer("2"))


def changed_system(store: Store) -> None:
    layers = KnownLayers(store.root)
    layers.add(known.OS, known.system())
    layers.add(known.OS, replace(known.system(), folders=()))


def known_file(store: Store, text: str) -> None:
    (store.root / "locks").mkdir()
    (store.root / KNOWN_LAYERS).write_text(text)
    KnownLayers(store.root)


def conflict(first: str, second: str, taken: str = "") -> None:
    layers = [
        (planned(name), [TocEntry(name=path, type="reg", size=number)])
        for number, (name, path) in enumerate((("one", first), ("two", second)))
    ]
    stored_layers.check_paths("image", layers, {taken})


def in_system_folder(_: Store) -> None:
    list(stored_layers.component_file_entries({"tmp/x": Entry(path="tmp/x", mode=0o644)}, ("tmp",)))


def write(*entries: Entry) -> None:
    splice.write_layer(entries, io.BytesIO())


REPAIR = "docs/troubleshooting.md"
DELETE = "Delete the store"
LOST = "sha256:" + "0" * 64
CASES: dict[str, tuple[Callable[[Store], object], str, str]] = {
    "no store": (lambda s: Store(s.root / "no").require(), "no store in {root}/no", "it creates the store"),
    "another folder": (lambda s: Store(s.root / "blobs").prepare(), "is neither empty nor an image", "a new folder"),
    "no index": (without_index, "{root}/index.json is missing, but the store has blobs", DELETE),
    "in use": (in_use, "the store {root} is in use by another builder", "Run this again when it has ended."),
    "full disk": (on_full_disk, "the disk of the store is full ({root})", "`builder gc`"),
    "incomplete": (
        incomplete,
        "nothing was freed, because images of the store are damaged\n"
        f"  x0: 1 blob missing or truncated: {digest_of_bytes(b'layer')}\n",
        "builder gc --forget NAME",
    ),
    "more incomplete": (incomplete, "\n  ... and 2 more", "Build them again"),
    "lost blob": (lambda s: s.read(LOST), f"blob {LOST} is missing from the store", REPAIR),
    "damaged blob": (lambda s: s.read(put(s, b"a", b"b")), " does not match its digest", REPAIR),
    "removed blob": (
        lambda s: s.remove_damaged([put(s, b"a", b"b")]),
        " did not match its digest and was removed",
        "Run the same command again",
    ),
    "no gzip": (lambda s: list(s.inflated(put(s, b"a", b"b"))), " is not valid gzip: ", REPAIR),
    "index": (
        lambda s: (s.index.write_text("{"), s.images()),
        "cannot read {root}/index.json: invalid index: ",
        DELETE,
    ),
    "manifest": (lambda s: stored_images.blobs(s, s.put(b"{}", MANIFEST_TYPE).digest), "invalid manifest", REPAIR),
    "other layer": (
        changed_layer,
        f"layer torch has digest {known.layer('2').digest}, but {KNOWN_LAYERS} records {known.layer().digest}",
        f"delete its line from {KNOWN_LAYERS}: {known.planned().inputs}",
    ),
    "other system": (changed_system, f"layer os has folders (), but {KNOWN_LAYERS} records ('tmp',)", ""),
    "old format": (
        lambda s: known_file(s, '{"format": 3}'),
        f"{KNOWN_LAYERS} has lock format 3; this builder reads format 4",
        "delete it: the next build writes it",
    ),
    "damaged file": (lambda s: known_file(s, '{"format": 4}'), f"{KNOWN_LAYERS} is damaged", "an intact version"),
    "two files": (lambda _: conflict("a", "a"), "image: one and two have different files for /a", "pin other versions"),
    "file of the system": (lambda _: conflict("b", "a", "a"), "image: /a is in the os layer and in two", ""),
    "file and folder": (
        lambda _: conflict("a/x", "a"),
        "image: /a is a folder in one and something else in two",
        "",
    ),
    "folder of the system": (
        in_system_folder,
        "templates/ has a file for /tmp/x, but folder /tmp of the system is not 0755 root:root",
        "",
    ),
    "lost layer": (
        lambda s: stored_layers.read_stored_toc(s, known.layer()),
        f"layer {known.layer().digest} disappeared from the store during the build",
        "Run the same command again",
    ),
    "no table of contents": (
        lambda _: estargz.read_toc(io.BytesIO(b"")),
        "the layer cannot be read: it has no table of contents (eStargz)",
        "",
    ),
    "reserved": (
        lambda _: write(Entry(path=estargz.TOC, mode=0o644, content=b"")),
        "/stargz.index.json is reserved by the layer format (eStargz)",
        "",
    ),
    "damaged entry": (
        lambda _: write(Entry(path="a", mode=0o644, content=replace(stored(b"a"), crc=1))),
        "some.whl: a/bad: content does not match the CRC-32 and size of its entry",
        "",
    ),
    "other content": (
        lambda _: write(Entry(path="a", mode=0o644, content=b"a", sha256="0" * 64)),
        "/a: content does not match the SHA-256 in RECORD",
        "",
    ),
    "path in a wheel": (lambda _: layer(pack({"../a": b""})), "-none-any.whl: invalid path '../a'", ""),
    "wheel twice": (
        lambda _: layer(pack({"a": b"1"}), other({"a": b"2"})),
        "tiny_pkg-1.0-py3-none-any.whl and other-2.0-py3-none-any.whl have different files for /opt/venv/lib/python/",
        "",
    ),
}


@pytest.mark.parametrize(("do", "message", "hint"), CASES.values(), ids=CASES.keys())
def test_messages(store: Store, do: Callable[[Store], object], message: str, hint: str) -> None:
    with pytest.raises((BuilderError, ValueError)) as raised:
        do(store)
    assert message.format(root=store.root) in str(raised.value)
    assert hint in getattr(raised.value, "hint", "")
