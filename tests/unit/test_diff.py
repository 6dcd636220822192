"""What changed between two images or revisions: packages, bytes, what stays; and the command that shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from builder import diff, digest, lock, oci
from builder.cli import asking
from builder.cli.context import Context
from builder.diff import Side
from builder.errors import BuilderError, LockError, UsageError, VerifyError
from builder.host import Host
from builder.layers import PlannedLayer
from builder.lock import Lock, Wheel
from builder.store import CONFIG_TYPE, MANIFEST_TYPE, Store
from tests.unit.fakes import MemoryConsole, Programs
from tests.unit.tiny_locks import wheel

CELL = "em-1.10-cu1210-py311"
OTHER = "em-1.10-cu1210-py39"
CUDA = wheel("cuda", "nvidia-sums", "12.1", 2_000_000)
EMBER = wheel("ember", "ember", "1.10.0", 900_000)
PLAIN = wheel("python", "pip", "25.0", 1000)


def locked(*wheels: Wheel, cell: str = CELL) -> Lock:
    return Lock(cell=cell, inputs="", requirements={}, wheels=wheels)


def side(*wheels: Wheel, cell: str = CELL) -> Side:
    return diff.of_lock(locked(*wheels, cell=cell))


def layer(*wheels: Wheel, python: str = "3.11", kind: str = "wheels") -> str:
    """Its line in the history."""
    planned = PlannedLayer(
        kind="wheels" if wheels else "os", name=kind, component="x", inputs="", wheels=wheels, python=python
    )
    return oci.describe(planned)


def blobs(*layers: tuple[str, int]) -> tuple[bytes, bytes]:
    """Manifest and configuration of an image of these layers, as line of history and bytes."""
    config = json.dumps({"history": [{"created_by": line} for line, _ in layers]}).encode()
    listed = [{"digest": digest.of_data([line, size]), "size": size} for line, size in layers]
    manifest = {"config": {"digest": digest.of_bytes(config), "size": len(config)}, "layers": listed}
    return json.dumps(manifest).encode(), config


def image(*layers: tuple[str, int], known: Sequence[Lock] = ()) -> Side:
    return diff.of_image("example/image:1", *blobs(*layers), diff.sizes(known))


# ---- by package


def test_the_kinds_of_change_and_their_order() -> None:
    """The largest difference first, whichever way it goes."""
    newer = wheel("ember", "ember", "1.11.0", 950_000)
    other_file = wheel("python", "pip", "25.0", 2500, tag="cp311-cp311-any")
    other_bytes = replace(CUDA, sha256="5" * 64, size=CUDA.size - 7)
    gone, come = wheel("python", "gone", "1", 70_000), wheel("python", "come", "2", 40_000)
    same = wheel("python", "same", "3", 10**9)
    found = diff.compare(side(CUDA, EMBER, PLAIN, gone, same), side(other_bytes, newer, other_file, come, same))
    assert [(change.name, change.kind, change.difference, str(change)) for change in found.changes] == [
        ("gone", "removed", -70_000, "1 -> none"),
        ("ember", "changed", 50_000, "1.10.0 -> 1.11.0"),
        ("come", "added", 40_000, "none -> 2"),
        ("pip", "other file", 1500, "25.0 (other file)"),
        ("nvidia-sums", "other bytes", -7, "12.1 (other bytes)"),
    ]
    assert found.unchanged == 1
    assert (found.unit, found.stays.count, found.stays.bytes) == ("wheels", 1, 10**9)
    assert (found.fetched.count, found.gone.count) == (4, 4)
    assert not found.is_empty


def test_the_same_lock_twice() -> None:
    found = diff.compare(side(CUDA, EMBER), side(CUDA, EMBER))
    assert found.is_empty
    assert (found.stays.count, found.stays.bytes) == (2, CUDA.size + EMBER.size)


def test_only_cuda_wheels_stay_for_another_python() -> None:
    """The same wheel installed for another Python is another layer, though no package changed."""
    found = diff.compare(side(CUDA, PLAIN), side(CUDA, PLAIN, cell=OTHER))
    assert found.changes == ()
    assert (found.stays.bytes, found.fetched.bytes) == (CUDA.size, PLAIN.size)
    assert not found.is_empty


WHEELS = st.lists(
    st.builds(
        wheel,
        st.sampled_from(["cuda", "ember"]),
        st.sampled_from(["a", "b", "c", "d"]),
        st.sampled_from(["1", "2"]),
        st.integers(0, 10**9),
    ),
    unique_by=lambda one: one.name,
)


@given(WHEELS, WHEELS)
def test_the_other_way_round(old: list[Wheel], new: list[Wheel]) -> None:
    there, back = diff.compare(side(*old), side(*new)), diff.compare(side(*new), side(*old))
    assert {change.name: change.difference for change in there.changes} == {
        change.name: -change.difference for change in back.changes if change.difference is not None
    }
    assert (there.fetched.count, there.gone.count) == (back.gone.count, back.fetched.count)
    assert there.stays.count + there.fetched.count == len(new)
    assert there.unchanged == back.unchanged
    assert sum(change.difference or 0 for change in there.changes) == sum(
        one.size for one in new if not any(one.sha256 == other.sha256 for other in old)
    ) - sum(one.size for one in old if not any(one.sha256 == other.sha256 for other in new))


# ---- images


def test_an_image_names_its_packages() -> None:
    made = image((layer(CUDA, python=""), 2_100_000), (layer(EMBER, PLAIN), 910_000), (layer(kind="os"), 50))
    assert made.bytes == 2_100_000 + 910_000 + 50
    found = {
        name: (package.version, package.sha256, package.python, package.size) for name, package in made.packages.items()
    }
    assert found == {  # a layer of one wheel tells its size
        "nvidia-sums": ("12.1", CUDA.sha256, "", 2_100_000),
        "ember": ("1.10.0", EMBER.sha256, "py311", None),
        "pip": ("25.0", PLAIN.sha256, "py311", None),
    }


def test_sizes_that_locks_know() -> None:
    made = image((layer(EMBER, PLAIN), 910_000), known=[locked(EMBER)])
    assert {name: package.size for name, package in made.packages.items()} == {"ember": EMBER.size, "pip": None}


def test_layers_of_images_are_compared_by_digest() -> None:
    old = image((layer(CUDA, python=""), 2_100_000), (layer(kind="os"), 50))
    new = image((layer(CUDA, python=""), 2_100_000), (layer(kind="os"), 60), (layer(EMBER, PLAIN), 910_000))
    found = diff.compare(old, new)
    assert (found.unit, found.stays.count, found.stays.bytes) == ("layers", 1, 2_100_000)
    assert (found.fetched.bytes, found.gone.bytes) == (910_060, 50)
    assert [(change.name, change.difference) for change in found.changes] == [("ember", None), ("pip", None)]


def test_a_change_of_the_operating_system_alone_is_a_change() -> None:
    found = diff.compare(image((layer(kind="os"), 50)), image((layer(kind="os"), 60)))
    assert found.changes == ()
    assert not found.is_empty


def test_an_image_and_a_lock_are_compared_by_wheels() -> None:
    found = diff.compare(image((layer(EMBER, PLAIN), 910_000)), side(EMBER, CUDA))
    assert (found.unit, found.stays.bytes, found.fetched.bytes) == ("wheels", EMBER.size, CUDA.size)
    assert (found.gone.count, found.gone.unknown) == (1, 1)


GOOD, CONFIG = blobs((layer(EMBER), 5))
BAD: dict[str, tuple[bytes, bytes, str]] = {
    "no JSON": (b"\x1b[2J", CONFIG, "its manifest is not that of an image"),
    "an index": (b'{"manifests": []}', CONFIG, "its manifest is not that of an image for one platform: config"),
    "a digest that is a path": (GOOD.replace(b"sha256:", b"../..//", 1), CONFIG, r"config\.digest"),
    "a negative size": (GOOD.replace(b'"size": 5', b'"size": -5'), CONFIG, r"layers\.0\.size"),
    "no history": (GOOD, b"{}", "its configuration is not that of an image for one platform: history"),
    "a short history": (GOOD, b'{"history": []}', "1 layers and 0 lines of history"),
    "odd wheels": (GOOD, b'{"history": [{"created_by": "wheels \\u001b[2J"}]}', "in no way that is known"),
}


@pytest.mark.parametrize("case", BAD)
def test_images_that_do_not_hold_together(case: str) -> None:
    """What they say reaches no terminal."""
    manifest, config, words = BAD[case]
    with pytest.raises(VerifyError, match=words) as caught:
        diff.of_image("example/image:1", manifest, config, {})
    assert str(caught.value).startswith("example/image:1: ")
    assert "\x1b" not in str(caught.value)


# ---- revisions


def test_all_cells_of_two_revisions() -> None:
    newer = wheel("ember", "ember", "1.11.0", 950_000)
    old = {"a": locked(EMBER, cell="a"), "b": locked(EMBER, cell="b"), "c": locked(CUDA, cell="c")}
    new = {"a": locked(EMBER, cell="a"), "b": locked(newer, cell="b"), "d": locked(CUDA, cell="d")}
    found = diff.compare_all("v1", old, "v2", new)
    assert list(found.changed) == ["b"]
    assert ([one.label for one in found.added], [one.label for one in found.removed]) == (["d"], ["c"])
    assert found.unchanged == 1


def test_what_an_upgrade_changes() -> None:
    """Cells with the same changes are told of once; those without any are not."""
    newer, come = wheel("ember", "ember", "1.11.0", 950_000), wheel("python", "come", "2", 1)
    old: dict[str, Lock | None] = {
        "a": locked(EMBER, PLAIN, cell="a"),
        "b": locked(EMBER, cell="b"),
        "c": locked(CUDA, cell="c"),
        "d": None,
    }
    new = [
        locked(newer, come, cell="a"),
        locked(newer, cell="b"),
        locked(CUDA, cell="c"),
        locked(CUDA, EMBER, cell="d"),
        locked(newer, cell="e"),
    ]
    assert diff.upgrades({**old, "e": locked(EMBER, cell="e")}, new) == [
        "d: new, 2 packages, 2.9 MB",
        "a:",
        "  come none -> 2",
        "  ember 1.10.0 -> 1.11.0",
        "  pip 25.0 -> none",
        "b, e:",
        "  ember 1.10.0 -> 1.11.0",
    ]
    assert diff.upgrades(old, [locked(CUDA, cell="c")]) == []


# ---- the command


@dataclass
class Desk:
    """A checkout with git revisions, as revision -> cell -> text of its lock."""

    root: Path
    revisions: dict[str, dict[str, str]] = field(default_factory=dict)

    def git(self, command: list[str]) -> tuple[int, str, str]:
        assert command[:3] == ["git", "-C", str(self.root)]
        verb, *rest = command[3:]
        if verb == "rev-parse":
            name = rest[-1].removesuffix("^{commit}")
            return (0, f"{name}\n", "") if name in self.revisions else (1, "", "")
        if verb == "ls-tree":
            return 0, "".join(f"locks/{cell}.json\0" for cell in self.revisions[rest[-2]]) + "locks/uv.txt\0", ""
        assert verb == "show"
        revision, _, path = rest[0].partition(":./locks/")
        return 0, self.revisions[revision][path.removesuffix(".json")], ""

    def has(self, *locks: Lock) -> None:
        for one in locks:
            lock.path(self.root, one.cell).write_text(lock.dump(one))

    def commit(self, name: str, *locks: Lock) -> None:
        self.revisions[name] = {one.cell: lock.dump(one) for one in locks}

    def store(self, name: str, *layers: tuple[str, int]) -> None:
        store = Store(self.root / "store")
        store.prepare()
        manifest, config = blobs(*layers)
        store.put(config, CONFIG_TYPE)
        store.name(name, store.put(manifest, MANIFEST_TYPE))

    def diff(self, *arguments: str) -> str:
        console = MemoryConsole()
        context = Context(root=self.root, store_root=self.root / "store", out=console)
        done = CliRunner().invoke(asking.diff_command, arguments, obj=context, standalone_mode=False)
        if done.exception:
            raise done.exception
        return console.text + done.stdout

    def data(self, *arguments: str) -> Mapping[str, Any]:
        found: dict[str, Any] = json.loads(self.diff(*arguments, "--format", "json"))
        return found

    def refusal(self, *arguments: str) -> BuilderError:
        with pytest.raises(BuilderError) as caught:
            self.diff(*arguments)
        return caught.value


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    made = Desk(tmp_path)
    (tmp_path / "locks").mkdir()
    (tmp_path / "matrix.yaml").write_text((Path(__file__).parent / "tiny/matrix.yaml").read_text())
    monkeypatch.setattr("subprocess.run", Programs(made.git))
    monkeypatch.setattr("builder.host.read", Host)
    newer = wheel("ember", "ember", "1.11.0", 950_000)
    made.commit("old", locked(CUDA, EMBER), locked(PLAIN, cell=OTHER))
    made.commit("new", locked(CUDA, newer), locked(PLAIN, cell=OTHER))
    made.has(locked(CUDA, newer, PLAIN))
    return made


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_two_revisions(desk: Desk) -> None:
    shown = rows(desk.diff("old", "new"))
    assert shown[0] == [CELL]
    assert ["ember", "1.10.0", "1.11.0", "900", "kB", "950", "kB", "+50", "kB"] in shown
    assert " ".join(shown[-1]) == "old -> new: cells: 1 changed, 1 as before"


def test_a_revision_and_the_working_tree(desk: Desk) -> None:
    shown = rows(desk.diff("new"))
    assert ["pip", "-", "25.0", "-", "1", "kB", "+1", "kB"] in shown
    assert ["removed:", f"{OTHER},", "1", "packages,", "1", "kB"] in shown
    assert " ".join(shown[-1]) == "new -> working tree: cells: 1 changed, 1 removed"


def test_nothing_changed(desk: Desk) -> None:
    assert desk.diff("old", "old") == "old -> old: cells: 2 as before\n"
    assert "packages: 2 -> 2, 2 the same" in desk.diff(f"old:{CELL}", f"old:{CELL}")


@pytest.mark.parametrize("words", [(f"old:{CELL}", CELL), ("old", CELL), (f"old:{CELL}",)], ids=str)
def test_one_cell(desk: Desk, words: tuple[str, ...]) -> None:
    """A revision without a cell stands for its part of the cell that the other side names."""
    shown = desk.diff(*words)
    assert shown.startswith(f"{CELL} (old) -> {CELL} (working tree)\n")
    assert [row[0] for row in rows(shown)[2:4]] == ["ember", "pip"]
    assert "packages: 2 -> 3, 1 the same; wheels: 2.9 MB -> 3.0 MB (+51 kB)" in shown
    assert "wheels that stay: 1 (2.0 MB); to be fetched: 2 (951 kB); no longer used: 1 (900 kB)" in shown


def test_two_images_of_the_store(desk: Desk) -> None:
    cuda = (layer(CUDA, python=""), 2_100_000)
    desk.store("team/x:1", cuda, (layer(EMBER, PLAIN), 910_000))
    desk.store("team/x:2", cuda, (layer(PLAIN), 1100))
    shown = desk.diff("team/x:1", "team/x:2")
    assert ["ember", "1.10.0", "-", "?", "-", "?"] in rows(shown)  # no lock has it
    assert "packages: 3 -> 2, 2 the same; layers: 3.0 MB -> 2.1 MB (-909 kB)" in shown
    assert "layers that stay: 1 (2.1 MB); to be fetched: 1 (1 kB); no longer used: 1 (910 kB)" in shown


def test_an_image_and_a_cell(desk: Desk) -> None:
    desk.store("team/x:1", (layer(CUDA, PLAIN, python=""), 2_100_000))
    found = desk.data("team/x:1", CELL)
    assert [(one["name"], one["change"]) for one in found["packages"]] == [("ember", "added")]
    assert (found["old"]["of"], found["new"]["of"], found["unit"]) == ("layers", "wheels", "wheels")


def test_json_of_revisions(desk: Desk) -> None:
    found = desk.data("old", "new")
    assert (found["unchanged"], list(found["cells"])) == (1, [CELL])
    (change,) = found["cells"][CELL]["packages"]
    assert (change["name"], change["old"]["version"], change["new"]["size"], change["bytes"]) == (
        "ember", "1.10.0", 950_000, 50_000,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nothing",), "'nothing' is no git revision, and only one can be compared"),
        ((CELL,), "is no git revision, and only one can be compared"),
        (("old", "nothing"), "'nothing' is no cell, no git revision and no image: the store "),
        ((f"nothing:{CELL}",), "git knows no revision 'nothing'"),
        (("old", "em-1.10-cu1210-py312"), f"old has no lock of em-1.10-cu1210-py312; did you mean '{CELL}'?"),
        ((f"old:{OTHER}", OTHER), f"working tree has no lock of {OTHER}; did you mean '{CELL}'?"),
        (("old", "team/x:1"), "old has many cells, and an image is compared with one"),
        (("--", "--output=x", "old"), "'--output=x' is no cell, no git revision and no image"),
    ],
    ids=str,
)
def test_sides_that_are_not_there(desk: Desk, words: tuple[str, ...], told: str) -> None:
    desk.store("team/x:1", (layer(PLAIN), 5))
    found = desk.refusal(*words)
    assert isinstance(found, UsageError)
    assert told in str(found)


def test_a_lock_that_this_builder_cannot_read(desk: Desk) -> None:
    desk.revisions["old"][CELL] = desk.revisions["old"][CELL].replace('"format": 1', '"format": 9')
    found = desk.refusal("old", "new")
    assert isinstance(found, LockError)
    assert f"old:locks/{CELL}.json is no lock that this builder reads" in str(found)


def test_without_git(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images can still be compared."""

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr("subprocess.run", missing)
    desk.store("team/x:1", (layer(PLAIN), 5))
    assert "1 the same" in desk.diff("team/x:1", "team/x:1")
    assert "'old' is no git revision" in str(desk.refusal("old"))
