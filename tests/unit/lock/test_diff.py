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

from builder.cli import diff as diff_command
from builder.cli.context import Context
from builder.common.errors import BuilderError, FileError, MatrixError, UsageError, VerifyError
from builder.common.files import digest_of_bytes, digest_of_data
from builder.debian import os_lock
from builder.debian.os_lock import OsLock, OsRequest
from builder.host import Host
from builder.index.wheels import LockedWheel, Wheel
from builder.layers import oci
from builder.layers.blobs import CONFIG_TYPE, MANIFEST_TYPE
from builder.layers.store import Store
from builder.lock import diff, lockfile
from builder.lock.diff import ImageContents
from builder.lock.lockfile import Basis, CellLock, Lock, LockedComponent
from builder.matrix.project import Project
from builder.plan.layer_order import PlannedLayer
from builder.steps.diff import contents_of_image
from tests.fakes.engine import MemoryConsole, Programs
from tests.fakes.locks import wheel
from tests.paths import UNIT
from tests.unit.release.test_verify import MemorySource

CELL = "em-1.10-cu1210-py311"  # of the plain variant, so also the id of its group
OTHER = "em-1.10-cu1210-py39"
MATRIX = (UNIT / "tiny/matrix.yaml").read_text()
CUDA = wheel("cuda", "nvidia-sums", "12.1", 2_000_000, tag="py3-none-manylinux_2_28_x86_64")
EMBER = wheel("ember", "ember", "1.10.0", 900_000)
PLAIN = wheel("python", "pip", "25.0", 1000)


def locked(*wheels: Wheel, cell: str = CELL) -> CellLock:
    return CellLock(cell=cell, requirements={}, wheels=wheels)


def group_lock(*wheels: Wheel, group: str = CELL, components: Sequence[str] = ("python", "ember")) -> Lock:
    """A group's lock that has these components. CUDA's wheels are among those that ember needs."""
    owners = {wheel.name: "ember" if wheel.component == "cuda" else wheel.component for wheel in wheels}
    assert set(owners.values()) <= set(components)
    parts = {
        component: LockedComponent(
            requirements=[], wheels=sorted(name for name, owner in owners.items() if owner == component)
        )
        for component in components
    }
    entries = [
        LockedWheel(name=wheel.name, version=wheel.version, file=wheel.file, size=wheel.size, sha256=wheel.sha256)
        for wheel in sorted(wheels, key=lambda wheel: wheel.name)
    ]
    basis = Basis(cuda="", toolkit="", python="", platform="x86_64", glibc="", constraints=[])
    return Lock(group=group, basis=basis, components=parts, wheels=tuple(entries))


def os_locked(request: OsRequest, versions: Mapping[str, str]) -> OsLock:
    packages = [
        os_lock.DebianPackage(name=name, version=version, architecture="amd64", size=1, sha256="0" * 64)
        for name, version in sorted(versions.items())
    ]
    return OsLock(debian=request.debian, time="20261122T210000Z", requested=request.packages, packages=tuple(packages))


def side(*wheels: Wheel, cell: str = CELL) -> ImageContents:
    return diff.contents_of_lock(locked(*wheels, cell=cell))


def layer(*wheels: Wheel, python: str = "3.11", kind: str = "wheels") -> str:
    """Its line in the history."""
    planned = PlannedLayer(
        kind="wheels" if wheels else "os", name=kind, component="x", inputs="", wheels=wheels, python=python
    )
    return oci.history_line(planned)


def blobs(*layers: tuple[str, int]) -> tuple[bytes, bytes]:
    """Manifest and configuration of an image of these layers, as line of history and bytes."""
    history = [{"created_by": line} for line, _ in layers]
    diff_ids = [digest_of_data([line]) for line, _ in layers]
    config = json.dumps({"rootfs": {"diff_ids": diff_ids}, "history": history}).encode()
    entries = [{"digest": digest_of_data([line, size]), "size": size} for line, size in layers]
    manifest = {"config": {"digest": digest_of_bytes(config), "size": len(config)}, "layers": entries}
    return json.dumps(manifest).encode(), config


def image(*layers: tuple[str, int], known: Sequence[CellLock] = ()) -> ImageContents:
    manifest, config = blobs(*layers)
    source = MemorySource(manifest=manifest, config=config)
    return contents_of_image("example/image:1", source, diff.sizes(map(diff.contents_of_lock, known)))


# ---- by package


def test_the_kinds_of_change_and_their_order() -> None:
    """The largest difference first, whichever way it goes."""
    newer = wheel("ember", "ember", "1.11.0", 950_000)
    other_file = wheel("python", "pip", "25.0", 2500, tag="cp311-cp311-any")
    other_bytes = replace(CUDA, sha256="5" * 64, size=CUDA.size - 7)
    gone, come = wheel("python", "gone", "1", 70_000), wheel("python", "come", "2", 40_000)
    same = wheel("python", "same", "3", 10**9)
    result = diff.compare(side(CUDA, EMBER, PLAIN, gone, same), side(other_bytes, newer, other_file, come, same))
    assert [(change.name, change.kind, change.difference, str(change)) for change in result.changes] == [
        ("gone", "removed", -70_000, "1 -> none"),
        ("ember", "changed", 50_000, "1.10.0 -> 1.11.0"),
        ("come", "added", 40_000, "none -> 2"),
        ("pip", "other file", 1500, "25.0 (other file)"),
        ("nvidia-sums", "other bytes", -7, "12.1 (other bytes)"),
    ]
    assert result.unchanged == 1
    assert (result.unit, result.stays.count, result.stays.bytes) == ("wheels", 1, 10**9)
    assert (result.fetched.count, result.gone.count) == (4, 4)
    assert not result.is_empty


def test_only_cuda_wheels_stay_for_another_python() -> None:
    """The same wheel installed for another Python is another layer, though no package changed."""
    result = diff.compare(side(CUDA, PLAIN), side(CUDA, PLAIN, cell=OTHER))
    assert result.changes == ()
    assert (result.stays.bytes, result.fetched.bytes) == (CUDA.size, PLAIN.size)
    assert not result.is_empty


WHEELS = st.lists(
    st.builds(
        wheel,
        st.sampled_from(["cuda", "ember"]),
        st.sampled_from(["a", "b", "c", "d"]),
        st.sampled_from(["1", "2"]),
        st.integers(0, 10**9),
    ),
    unique_by=lambda wheel: wheel.name,
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
        wheel.size for wheel in new if not any(wheel.sha256 == other.sha256 for other in old)
    ) - sum(wheel.size for wheel in old if not any(wheel.sha256 == other.sha256 for other in new))


# ---- images


def test_an_image_names_its_packages() -> None:
    image_side = image((layer(CUDA, python=""), 2_100_000), (layer(EMBER, PLAIN), 910_000), (layer(kind="os"), 50))
    assert image_side.bytes == 2_100_000 + 910_000 + 50
    packages = {
        name: (package.version, package.sha256, package.python, package.size)
        for name, package in image_side.packages.items()
    }
    assert packages == {  # a layer of one wheel tells its size
        "nvidia-sums": ("12.1", CUDA.sha256, "", 2_100_000),
        "ember": ("1.10.0", EMBER.sha256, "py311", None),
        "pip": ("25.0", PLAIN.sha256, "py311", None),
    }


def test_layers_of_images_are_compared_by_digest() -> None:
    old = image((layer(CUDA, python=""), 2_100_000), (layer(kind="os"), 50))
    new = image((layer(CUDA, python=""), 2_100_000), (layer(kind="os"), 60), (layer(EMBER, PLAIN), 910_000))
    result = diff.compare(old, new)
    assert (result.unit, result.stays.count, result.stays.bytes) == ("layers", 1, 2_100_000)
    assert (result.fetched.bytes, result.gone.bytes) == (910_060, 50)
    assert [(change.name, change.difference) for change in result.changes] == [("ember", None), ("pip", None)]


def test_a_change_of_the_operating_system_alone_is_a_change() -> None:
    result = diff.compare(image((layer(kind="os"), 50)), image((layer(kind="os"), 60)))
    assert result.changes == ()
    assert not result.is_empty


def test_an_image_and_a_lock_are_compared_by_wheels() -> None:
    result = diff.compare(image((layer(EMBER, PLAIN), 910_000)), side(EMBER, CUDA))
    assert (result.unit, result.stays.bytes, result.fetched.bytes) == ("wheels", EMBER.size, CUDA.size)
    assert (result.gone.count, result.gone.unknown) == (1, 1)


def test_an_image_that_does_not_hold_together_is_refused() -> None:
    """What it says reaches no terminal."""
    good, config = blobs((layer(EMBER), 5))
    odd = config.replace(b"wheels format", b"wheels \\u001b[2J")
    for manifest, blob, words in (
        (good.replace(b"sha256:", b"../..//", 1), config, r"config\.digest"),
        (good, odd, "invalid line about wheels"),
    ):
        with pytest.raises(VerifyError, match=f"^example/image:1: .*{words}") as caught:
            contents_of_image("example/image:1", MemorySource(manifest=manifest, config=blob), {})
        assert "\x1b" not in str(caught.value)


# ---- revisions


def test_all_cells_of_two_revisions() -> None:
    newer = wheel("ember", "ember", "1.11.0", 950_000)
    old = {"a": side(EMBER, cell="a"), "b": side(EMBER, cell="b"), "c": side(CUDA, cell="c")}
    new = {"a": side(EMBER, cell="a"), "b": side(newer, cell="b"), "d": side(CUDA, cell="d")}
    result = diff.compare_all("v1", old, "v2", new)
    assert list(result.changed) == ["b"]
    assert ([side.label for side in result.added], [side.label for side in result.removed]) == (["d"], ["c"])
    assert result.unchanged == 1


def test_what_an_upgrade_changes() -> None:
    """Groups with the same changes are listed together, those without changes not at all."""
    newer, come = wheel("ember", "ember", "1.11.0", 950_000), wheel("python", "come", "2", 1)
    old: dict[str, Lock | None] = {
        "a": group_lock(EMBER, PLAIN, group="a"),
        "b": group_lock(EMBER, group="b"),
        "c": group_lock(CUDA, group="c"),
        "d": None,
    }
    new = [
        group_lock(newer, come, group="a"),
        group_lock(newer, group="b"),
        group_lock(CUDA, group="c"),
        group_lock(CUDA, EMBER, group="d"),
        group_lock(newer, group="e"),
    ]
    assert diff.upgrades({**old, "e": group_lock(EMBER, group="e")}, new) == [
        "d: new, 2 packages, 2.9 MB",
        "a:",
        "  come none -> 2",
        "  ember 1.10.0 -> 1.11.0",
        "  pip 25.0 -> none",
        "b, e:",
        "  ember 1.10.0 -> 1.11.0",
    ]
    assert diff.upgrades(old, [group_lock(CUDA, group="c")]) == []


def test_an_upgrade_covers_all_wheels_of_a_group() -> None:
    """Those that only one variant needs too. A wheel that moves to another component has not changed."""
    board, newer = wheel("board", "board", "2.0", 10), wheel("board", "board", "2.1", 10)
    components = ("python", "ember", "board")
    old = group_lock(EMBER, PLAIN, board, components=components)
    moved = replace(PLAIN, component="board")
    assert diff.upgrades({CELL: old}, [group_lock(EMBER, moved, board, components=components)]) == []
    assert diff.upgrades({CELL: old}, [group_lock(EMBER, moved, newer, components=components)]) == [
        f"{CELL}:",
        "  board 2.0 -> 2.1",
    ]


# ---- the command


@dataclass
class DiffCommand:
    """A checkout with git revisions, as revision -> path -> text."""

    root: Path
    revisions: dict[str, dict[str, str]] = field(default_factory=dict)

    def git(self, command: list[str]) -> tuple[int, str, str]:
        assert command[:3] == ["git", "-C", str(self.root)]
        assert command[3] == "rev-parse"
        name = command[-1].removesuffix("^{commit}")
        return (0, f"{name}\n", "") if name in self.revisions else (1, "", "")

    def export(self, root: Path, revision: str, folder: Path) -> None:
        assert root == self.root
        for path, text in self.revisions[revision].items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text)

    def has(self, *locks: Lock) -> None:
        for lock in locks:
            lockfile.path(self.root, lock.group).write_text(lockfile.dump(lock))

    def commit(self, name: str, *locks: Lock, matrix: str = MATRIX) -> None:
        files = {f"locks/{lock.group}.json": lockfile.dump(lock) for lock in locks}
        others = {"locks/uv.txt": "", "locks/layers.json": "{}", "locks/os-newbird-12345678.json": "{}"}
        self.revisions[name] = {"matrix.yaml": matrix, **others, **files}

    def store(self, name: str, *layers: tuple[str, int]) -> None:
        store = Store(self.root / "store")
        store.prepare()
        manifest, config = blobs(*layers)
        store.put(config, CONFIG_TYPE)
        store.name(name, store.put(manifest, MANIFEST_TYPE))

    def diff(self, *arguments: str) -> str:
        console = MemoryConsole()
        context = Context(root=self.root, store_root=self.root / "store", out=console)
        context.host = Host()
        done = CliRunner().invoke(diff_command.diff_command, arguments, obj=context, standalone_mode=False)
        if done.exception:
            raise done.exception
        return console.text + done.stdout

    def data(self, *arguments: str) -> Mapping[str, Any]:
        data: dict[str, Any] = json.loads(self.diff(*arguments, "--format", "json"))
        return data

    def refusal(self, *arguments: str) -> BuilderError:
        with pytest.raises(BuilderError) as caught:
            self.diff(*arguments)
        return caught.value


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiffCommand:
    """The locks have no component of the other variants, so only the plain cells are locked."""
    desk = DiffCommand(tmp_path)
    (tmp_path / "locks").mkdir()
    (tmp_path / "matrix.yaml").write_text(MATRIX)
    monkeypatch.setattr("subprocess.run", Programs(desk.git))
    monkeypatch.setattr("builder.common.git.export", desk.export)
    newer = wheel("ember", "ember", "1.11.0", 950_000)
    desk.commit("old", group_lock(CUDA, EMBER), group_lock(PLAIN, group=OTHER))
    desk.commit("new", group_lock(CUDA, newer), group_lock(PLAIN, group=OTHER))
    desk.has(group_lock(CUDA, newer, PLAIN))
    return desk


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_two_revisions(desk: DiffCommand) -> None:
    shown = rows(desk.diff("old", "new"))
    assert shown[0] == [CELL]
    assert ["ember", "1.10.0", "1.11.0", "900", "kB", "950", "kB", "+50", "kB"] in shown
    assert " ".join(shown[-1]) == "old -> new: cells: 1 changed, 1 unchanged"


def test_a_revision_and_the_working_tree(desk: DiffCommand) -> None:
    shown = rows(desk.diff("new"))
    assert ["pip", "-", "25.0", "-", "1", "kB", "+1", "kB"] in shown
    assert ["removed:", f"{OTHER},", "1", "package,", "1", "kB"] in shown
    assert " ".join(shown[-1]) == "new -> working tree: cells: 1 changed, 1 removed"


@pytest.mark.parametrize("words", [(f"old:{CELL}", CELL), ("old", CELL), (f"old:{CELL}",)], ids=str)
def test_one_cell(desk: DiffCommand, words: tuple[str, ...]) -> None:
    """Of a revision without a cell, the cell that the other side names is compared."""
    shown = desk.diff(*words)
    assert shown.startswith(f"{CELL} (old) -> {CELL} (working tree)\n")
    assert [row[0] for row in rows(shown)[2:4]] == ["ember", "pip"]
    assert "packages: 2 -> 3, 1 unchanged; wheels: 2.9 MB -> 3.0 MB (+51 kB)" in shown
    assert "wheels kept: 1 (2.0 MB); to download: 2 (951 kB); no longer used: 1 (900 kB)" in shown


def test_two_images_of_the_store(desk: DiffCommand) -> None:
    cuda = (layer(CUDA, python=""), 2_100_000)
    desk.store("team/x:1", cuda, (layer(EMBER, PLAIN), 910_000))
    desk.store("team/x:2", cuda, (layer(PLAIN), 1100))
    shown = desk.diff("team/x:1", "team/x:2")
    assert ["ember", "1.10.0", "-", "?", "-", "?"] in rows(shown)  # no lock has it
    assert "packages: 3 -> 2, 2 unchanged; layers: 3.0 MB -> 2.1 MB (-909 kB)" in shown
    assert "layers kept: 1 (2.1 MB); to download: 1 (1 kB); no longer used: 1 (910 kB)" in shown


def test_an_image_and_a_cell(desk: DiffCommand) -> None:
    desk.store("team/x:1", (layer(CUDA, PLAIN, python=""), 2_100_000))
    data = desk.data("team/x:1", CELL)
    assert [(package["name"], package["change"]) for package in data["packages"]] == [("ember", "added")]
    assert (data["old"]["of"], data["new"]["of"], data["unit"]) == ("layers", "wheels", "wheels")


def test_debian_packages_of_two_revisions(desk: DiffCommand) -> None:
    """Once for all cells with the change. Wheels that did not change are not shown."""
    project = Project.find(desk.root)
    request = os_lock.request_of_cell(project.matrix, *project.select([CELL]))
    for revision, versions in (("old", {"openssl": "1", "zlib": "1"}), ("same", {"openssl": "2", "bash": "5"})):
        desk.commit(revision, group_lock(CUDA, EMBER), group_lock(PLAIN, group=OTHER))
        desk.revisions[revision][request.path] = os_lock.dump(
            os_locked(request, {**dict.fromkeys(request.packages, "1"), **versions})
        )
    shown = desk.diff("old", "same").splitlines()
    assert shown == [
        "Debian packages",
        "  bash (new) -> 5 (1 cell)",
        "  openssl 1 -> 2 (1 cell)",
        "  zlib 1 -> (removed) (1 cell)",
        "old -> same: cells: 1 changed, 1 unchanged",
    ]
    assert "  openssl 1 -> 2\n" in desk.diff(f"old:{CELL}", f"same:{CELL}")
    [change, *_] = desk.data("old", "same")["cells"][CELL]["debian"]
    assert change == {"name": "bash", "old": "", "new": "5"}
    desk.revisions["same"][request.path] = "{"
    assert f"same:{request.path}" in str(desk.refusal("old", "same"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing",), "'nothing' is not a git revision"),
        ((CELL,), ": only a revision is compared with the working tree"),
        (("old", "nothing"), "'nothing' is not a cell, a git revision"),
        ((f"nothing:{CELL}",), "no git revision 'nothing'"),
        (("old", "em-1.10-cu1210-py312"), f"old has no lock of em-1.10-cu1210-py312; did you mean '{CELL}'?"),
        ((f"old:{OTHER}", OTHER), f"working tree has no lock of {OTHER}; did you mean '{CELL}'?"),
        (("old", "team/x:1"), "old has several cells, but an image is compared with one cell"),
        (("--", "--output=x", "old"), "'--output=x' is not a cell, a git revision"),
    ],
    ids=str,
)
def test_sides_that_are_not_there(desk: DiffCommand, words: tuple[str, ...], message: str) -> None:
    desk.store("team/x:1", (layer(PLAIN), 5))
    error = desk.refusal(*words)
    assert isinstance(error, UsageError)
    assert message in str(error)


def test_a_lock_that_this_builder_cannot_read(desk: DiffCommand) -> None:
    path = f"locks/{CELL}.json"
    before = desk.revisions["old"][path]
    desk.revisions["old"][path] = before.replace('"format": 2', '"format": 9')
    assert desk.revisions["old"][path] != before
    error = desk.refusal("old", "new")
    assert isinstance(error, FileError)
    assert f"old:{path} has lock format 9; this builder reads format 2" in str(error)


def test_a_changed_component_changes_only_the_cells_that_have_it(desk: DiffCommand) -> None:
    board, newer = wheel("board", "board", "2.0", 10), wheel("board", "board", "2.1", 10)
    components = ("python", "ember", "board")
    desk.commit("old", group_lock(CUDA, EMBER, board, components=components))
    desk.commit("new", group_lock(CUDA, EMBER, newer, components=components))
    data = desk.data("old", "new")
    assert (list(data["cells"]), data["unchanged"]) == ([f"{CELL}-board"], 1)
    assert [change["name"] for change in data["cells"][f"{CELL}-board"]["packages"]] == ["board"]


def test_a_component_that_is_locked_later_adds_its_cells(desk: DiffCommand) -> None:
    board = wheel("board", "board", "2.0", 10)
    desk.commit("new", group_lock(CUDA, EMBER, board, components=("python", "ember", "board")))
    data = desk.data("old", "new")
    assert [side["name"] for side in data["added"]] == [f"{CELL}-board"]
    assert [side["name"] for side in data["removed"]] == [OTHER]
    assert (data["cells"], data["unchanged"]) == ({}, 1)


def test_a_revision_has_the_cells_of_its_own_matrix(desk: DiffCommand) -> None:
    """The same locks with another matrix.yaml belong to other cells."""
    locks = group_lock(CUDA, EMBER), group_lock(PLAIN, group=OTHER)
    fewer = MATRIX.replace('"em-1.10-cu129-py39*"', '"em-1.10-cu1210-py39*"')
    more = MATRIX.replace("variants:\n", "variants:\n  bare: []\n")
    assert len({MATRIX, fewer, more}) == 3
    desk.commit("fewer", *locks, matrix=fewer)
    desk.commit("more", *locks, matrix=more)
    assert [side["name"] for side in desk.data("old", "fewer")["removed"]] == [OTHER]
    assert [side["name"] for side in desk.data("old", "more")["added"]] == [f"{OTHER}-bare", f"{CELL}-bare"]
    assert "packages: 2 -> 2, 2 unchanged" in desk.diff(f"more:{CELL}-bare", f"old:{CELL}")


def test_a_revision_with_a_matrix_that_cannot_be_read(desk: DiffCommand) -> None:
    desk.commit("wrong", group_lock(EMBER), matrix=MATRIX.replace("namespace: team", "namespaces: team"))
    error = desk.refusal("wrong", "new")
    assert isinstance(error, MatrixError)
    assert "wrong:matrix.yaml:3:1: namespaces: unknown key" in str(error)


def test_a_revision_without_a_matrix(desk: DiffCommand) -> None:
    del desk.revisions["old"]["matrix.yaml"]
    error = desk.refusal("old", "new")
    assert isinstance(error, MatrixError)
    assert "old:matrix.yaml: No such file" in str(error)


def test_without_git(desk: DiffCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images can still be compared."""

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr("subprocess.run", missing)
    desk.store("team/x:1", (layer(PLAIN), 5))
    assert "1 unchanged" in desk.diff("team/x:1", "team/x:1")
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert "'old' is not a git revision (git is not installed: apt-get install git)" in str(desk.refusal("old"))
