"""The build context: the right files, and the same bytes whatever the machine."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable

import pytest

from builder import context, plan, render
from builder.plan import PlannedImage
from builder.project import Project

CELL = "em-1.10-cu1210-py311-jupyter"


@pytest.fixture
def image(tiny: Project) -> PlannedImage:
    made = plan.make_locked(tiny, tiny.select([CELL, "qz-0.5-cu129-py311"]))
    render.write(tiny.root, render.render(tiny.root, tiny.matrix, made))
    return made.images[0]


def members(blob: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(blob)) as tar:
        return {member.name: member for member in tar.getmembers()}


def content(blob: bytes, name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(blob)) as tar:
        file = tar.extractfile(name)
        assert file is not None
        return file.read()


def test_contents(tiny: Project, image: PlannedImage) -> None:
    names = list(members(context.make(tiny.root, image, {})))
    assert names == sorted(names)
    wanted = {
        *plan.COMMON_INPUTS,
        *(f"images/{CELL}/{file.name}" for file in (tiny.root / "images" / CELL).iterdir()),
        *(
            file.relative_to(tiny.root).as_posix()
            for component in image.components
            for file in (tiny.root / "templates" / component).rglob("*")
            if file.is_file()
        ),
    }
    assert set(names) == wanted
    assert {"templates/python/compile.py", f"images/{CELL}/wheels-board.txt"} <= wanted


@pytest.mark.parametrize(
    "name",
    [
        "matrix.yaml",
        "templates/host/ca.crt",
        "templates/host/index.env",
        "templates/pytorch/x",
        "images/other/Dockerfile",
    ],
)
def test_other_files_stay_out(tiny: Project, image: PlannedImage, name: str) -> None:
    before = context.make(tiny.root, image, {})
    (tiny.root / name).parent.mkdir(parents=True, exist_ok=True)
    (tiny.root / name).write_text("other")
    assert name not in members(before)
    assert context.make(tiny.root, image, {}) == before


def touch(project: Project, image: PlannedImage) -> None:
    for path in context.paths(project.root, image):
        os.utime(path, (1, 1))


def chmod(project: Project, image: PlannedImage) -> None:
    """As under a umask of 077: only the owner's bits are left."""
    for path in context.paths(project.root, image):
        path.chmod(path.stat().st_mode & 0o700)


def cache(project: Project, image: PlannedImage) -> None:
    folder = project.root / "templates" / image.components[0] / "__pycache__"
    folder.mkdir()
    (folder / "x.pyc").write_bytes(b"x")


def render_again(project: Project, image: PlannedImage) -> None:
    """Folders in another order of creation."""
    folder = project.root / "images" / image.id
    texts = {path: path.read_text() for path in folder.iterdir()}
    for path in texts:
        path.unlink()
    for path in sorted(texts, reverse=True):
        path.write_text(texts[path])


@pytest.mark.parametrize("change", [touch, chmod, cache, render_again])
def test_the_same_bytes(tiny: Project, image: PlannedImage, change: Callable[[Project, PlannedImage], None]) -> None:
    before = context.make(tiny.root, image, {"templates/host/ca.crt": b"x"})
    change(tiny, image)
    assert context.make(tiny.root, image, {"templates/host/ca.crt": b"x"}) == before


def test_what_the_tar_says_of_its_files(tiny: Project, image: PlannedImage) -> None:
    found = members(context.make(tiny.root, image, {}))
    assert {(member.uid, member.gid, member.uname, member.gname, member.mtime) for member in found.values()} == {
        (0, 0, "", "", 0)
    }
    executable = {name for name, member in found.items() if member.mode == 0o755}
    assert executable == {name for name in found if os.access(tiny.root / name, os.X_OK)}
    assert {member.mode for member in found.values()} <= {0o755, 0o644}


def test_links_stay_links(tiny: Project, image: PlannedImage) -> None:
    """Docker copies them as they are: they point into the image, not into the checkout."""
    folder = tiny.root / "templates/base/files/usr/lib"
    folder.mkdir(parents=True)
    for name, target in (("it.so.1", "/opt/nowhere/it.so.1"), ("here", "../lib"), ("env", "/etc/hostname")):
        (folder / name).symlink_to(target)
    blob = context.make(tiny.root, image, {})
    found = {name.rpartition("/")[2]: one for name, one in members(blob).items() if "files/usr/lib/" in name}
    assert {name: (one.type, one.linkname, one.size) for name, one in found.items()} == {
        "it.so.1": (tarfile.SYMTYPE, "/opt/nowhere/it.so.1", 0),
        "here": (tarfile.SYMTYPE, "../lib", 0),
        "env": (tarfile.SYMTYPE, "/etc/hostname", 0),
    }
    assert {(one.mode, one.uid, one.mtime) for one in found.values()} == {(0o777, 0, 0)}
    assert context.make(tiny.root, image, {}) == blob


def test_lent_files(tiny: Project, image: PlannedImage) -> None:
    lent = {"templates/host/ca.crt": b"pem", "templates/host/env.sh": b"lent"}
    blob = context.make(tiny.root, image, lent)
    for name, text in lent.items():
        assert content(blob, name) == text
        assert members(blob)[name].mode == 0o644
    assert not (tiny.root / "templates/host/ca.crt").exists()
    assert set(members(blob)) == {*members(context.make(tiny.root, image, {})), *lent}
