"""The build context: the right files, and the same bytes on every machine."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable

import pytest

from builder.build.dockerfile import context, context_files
from builder.matrix.project import Project
from builder.plan import plan, render
from builder.plan.plan import PlannedImage

GROUP = "em-1.10-cu1210-py311"
CELL = f"{GROUP}-jupyter"


@pytest.fixture
def image(tiny: Project) -> PlannedImage:
    """Rendered with the other images of its group and with an image of another group."""
    planned = plan.make_locked(tiny, tiny.select([f"{GROUP}*", "qz-0.5-cu129-py311"]))
    render.write(tiny.root, render.render(tiny.root, tiny.matrix, planned))
    return next(image for image in planned.images if image.id == CELL)


def members(tar_bytes: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(tar_bytes)) as tar:
        return {member.name: member for member in tar.getmembers()}


def content(tar_bytes: bytes, name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(tar_bytes)) as tar:
        file = tar.extractfile(name)
        assert file is not None
        return file.read()


def test_contents(tiny: Project, image: PlannedImage) -> None:
    names = list(members(context(tiny.root, image, {})))
    assert names == sorted(names)
    lists = ("cuda.txt", "wheels-python.txt", "wheels-ember.txt", "wheels-board.txt", "wheels-jupyter.txt")
    rendered = {f"images/{GROUP}/{name}" for name in ("jupyter.Dockerfile", "constraints.txt", *lists)}
    templates = {
        file.relative_to(tiny.root).as_posix()
        for component in image.components
        for file in (tiny.root / "templates" / component).rglob("*")
        if file.is_file()
    }
    assert set(names) == {*plan.COMMON_INPUTS, image.system.path, *rendered, *templates}
    steps = {path.relative_to(tiny.root).as_posix() for path in (tiny.root / "templates/steps").iterdir()}
    assert steps <= set(names)


def test_files_of_other_variants_are_left_out(tiny: Project, image: PlannedImage) -> None:
    """The folder of the group has the Dockerfiles of all variants, and a list for each component of any of them."""
    [plain] = plan.make_locked(tiny, tiny.select([GROUP])).images
    names = {name for name in members(context(tiny.root, plain, {})) if name.startswith("images/")}
    rendered = {f"images/{GROUP}/{path.name}" for path in (tiny.root / "images" / GROUP).iterdir()}
    left_out = ("jupyter.Dockerfile", "board.Dockerfile", "wheels-board.txt", "wheels-jupyter.txt")
    assert names == rendered - {f"images/{GROUP}/{name}" for name in left_out}


@pytest.mark.parametrize(
    "name",
    [
        "matrix.yaml", "templates/host/ca.crt", "templates/host/index.env", "templates/pytorch/x",
        "images/other/plain.Dockerfile", f"images/{GROUP}/other.Dockerfile", f"images/{GROUP}/wheels-other.txt",
    ],
)  # fmt: skip
def test_other_files_are_left_out(tiny: Project, image: PlannedImage, name: str) -> None:
    before = context(tiny.root, image, {})
    (tiny.root / name).parent.mkdir(parents=True, exist_ok=True)
    (tiny.root / name).write_text("other")
    assert name not in members(before)
    assert context(tiny.root, image, {}) == before


def touch(project: Project, image: PlannedImage) -> None:
    for path in context_files(project.root, image):
        os.utime(path, (1, 1))


def chmod(project: Project, image: PlannedImage) -> None:
    """As under a umask of 077: only the owner's bits are left."""
    for path in context_files(project.root, image):
        path.chmod(path.stat().st_mode & 0o700)


def cache(project: Project, image: PlannedImage) -> None:
    folder = project.root / "templates" / image.components[0] / "__pycache__"
    folder.mkdir()
    (folder / "x.pyc").write_bytes(b"x")


def render_again(project: Project, image: PlannedImage) -> None:
    """Creates the files in another order."""
    folder = project.root / image.folder
    texts = {path: path.read_text() for path in folder.iterdir()}
    for path in texts:
        path.unlink()
    for path in sorted(texts, reverse=True):
        path.write_text(texts[path])


@pytest.mark.parametrize("change", [touch, chmod, cache, render_again])
def test_the_same_files_give_the_same_bytes(
    tiny: Project, image: PlannedImage, change: Callable[[Project, PlannedImage], None]
) -> None:
    before = context(tiny.root, image, {"templates/host/ca.crt": b"x"})
    change(tiny, image)
    assert context(tiny.root, image, {"templates/host/ca.crt": b"x"}) == before


def test_owners_times_and_modes_are_constant(tiny: Project, image: PlannedImage) -> None:
    tar = members(context(tiny.root, image, {}))
    assert {(member.uid, member.gid, member.uname, member.gname, member.mtime) for member in tar.values()} == {
        (0, 0, "", "", 0)
    }
    executable = {name for name, member in tar.items() if member.mode == 0o755}
    assert executable == {name for name in tar if os.access(tiny.root / name, os.X_OK)}
    assert {member.mode for member in tar.values()} <= {0o755, 0o644}


def test_links_are_not_followed(tiny: Project, image: PlannedImage) -> None:
    """Docker copies them as links: their targets are paths of the image, not of the checkout."""
    folder = tiny.root / "templates/base/files/usr/lib"
    folder.mkdir(parents=True)
    links = {"it.so.1": "/opt/nowhere/it.so.1", "here": "../lib", "env": "/etc/hostname"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    tar = context(tiny.root, image, {})
    libraries = {name.rpartition("/")[2]: member for name, member in members(tar).items() if "files/usr/lib/" in name}
    assert {name: (member.type, member.linkname, member.size) for name, member in libraries.items()} == {
        name: (tarfile.SYMTYPE, target, 0) for name, target in links.items()
    }
    assert {(member.mode, member.uid, member.mtime) for member in libraries.values()} == {(0o777, 0, 0)}
    assert context(tiny.root, image, {}) == tar


def test_files_of_the_build_host_replace_those_of_the_checkout(tiny: Project, image: PlannedImage) -> None:
    host_files = {"templates/host/ca.crt": b"pem", "templates/host/env.sh": b"from the host"}
    tar = context(tiny.root, image, host_files)
    for name, text in host_files.items():
        assert content(tar, name) == text
        assert members(tar)[name].mode == 0o644
    assert not (tiny.root / "templates/host/ca.crt").exists()
    assert set(members(tar)) == {*members(context(tiny.root, image, {})), *host_files}
