"""Layers of plain files: their contents, which component overrides which, and what they must not change."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from builder.common.errors import BuildError
from builder.layers import files, wheel
from builder.layers.splice import Entry
from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.plan import PlannedImage

CELL = "em-1.10-cu1210-py311-jupyter"
PLACE = wheel.environment("3.11")
SITE = "opt/venv/lib/python3.11/site-packages"


@pytest.fixture
def image(tiny: Project) -> PlannedImage:
    [planned] = plan.make_locked(tiny, tiny.select([CELL])).images
    return replace(planned, file_components=("base", "jupyter"))


def put(project: Project, component: str, name: str, content: str = "x", mode: int = 0o644) -> Path:
    path = project.root / f"templates/{component}/files/{name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(mode)
    return path


def entries(project: Project, image: PlannedImage, folders: tuple[str, ...] = ()) -> list[Entry]:
    return list(files.entries(files.read(project.root, image, PLACE), folders))


def by_path(project: Project, image: PlannedImage) -> dict[str, Entry]:
    return {entry.path: entry for entry in entries(project, image)}


def test_files_of_all_components(tiny: Project, image: PlannedImage) -> None:
    files_by_path = by_path(tiny, image)
    for component in image.file_components:
        top = tiny.root / f"templates/{component}/files"
        for path in top.rglob("*"):
            entry = files_by_path[path.relative_to(top).as_posix()]
            assert entry.content == (path.read_bytes() if path.is_file() else None)
            assert not entry.link


def test_sorted_with_each_folder_before_its_contents(tiny: Project, image: PlannedImage) -> None:
    put(tiny, "base", "z/y/x")
    put(tiny, "jupyter", "a")
    all_entries = entries(tiny, image)
    paths = [entry.path for entry in all_entries]
    plain = [entry.path for entry in all_entries if entry.content is not None or entry.link]
    assert plain == sorted(plain)
    assert len(set(paths)) == len(paths)
    for number, path in enumerate(paths):
        parent = path.rpartition("/")[0]
        assert not parent or parent in paths[:number], path
    folders = [entry for entry in all_entries if entry.content is None and not entry.link]
    assert {entry.path for entry in folders} >= {"z", "z/y"}
    assert {entry.mode for entry in folders} == {0o755}


@pytest.mark.parametrize(
    ("mode", "expected"), [(0o644, 0o644), (0o600, 0o644), (0o755, 0o755), (0o700, 0o755), (0o664, 0o644)]
)
def test_only_the_executable_bit_of_a_mode_counts(tiny: Project, image: PlannedImage, mode: int, expected: int) -> None:
    """The other bits depend on the umask during checkout."""
    put(tiny, "base", "usr/local/bin/it", mode=mode)
    assert by_path(tiny, image)["usr/local/bin/it"].mode == expected


def test_links_are_kept_whatever_their_target(tiny: Project, image: PlannedImage) -> None:
    path = put(tiny, "base", "usr/lib/it.so.1")
    path.unlink()
    path.symlink_to("/opt/nvidia/nvidia/it/lib/it.so.1")
    (path.parent / "folder").symlink_to("../share")
    links = by_path(tiny, image)
    assert links["usr/lib/it.so.1"] == Entry(
        path="usr/lib/it.so.1", mode=0o777, link="/opt/nvidia/nvidia/it/lib/it.so.1"
    )
    assert links["usr/lib/folder"] == Entry(path="usr/lib/folder", mode=0o777, link="../share")
    assert links["usr/lib"].mode == 0o755


@pytest.mark.parametrize("later", ["link", "file"])
def test_a_later_component_overrides_a_link_or_file(tiny: Project, image: PlannedImage, later: str) -> None:
    link = put(tiny, "jupyter" if later == "link" else "base", "etc/same")
    link.unlink()
    link.symlink_to("other")
    put(tiny, "base" if later == "link" else "jupyter", "etc/same", "text")
    entry = by_path(tiny, image)["etc/same"]
    assert (entry.link, entry.content) == (("other", None) if later == "link" else ("", b"text"))


def test_a_component_without_files_of_its_own_adds_none(tiny: Project, image: PlannedImage) -> None:
    none = replace(image, file_components=(), wheels=())
    assert [entry.path for entry in entries(tiny, none)] == ["etc", "etc/pip", "etc/pip/constraints.txt"]


def test_cuda_is_linked_and_on_the_path(tiny: Project, image: PlannedImage) -> None:
    files_by_path = by_path(tiny, image)
    assert files_by_path[f"{SITE}/nvidia"] == Entry(path=f"{SITE}/nvidia", mode=0o777, link="/opt/nvidia/nvidia")
    assert files_by_path[f"{SITE}/nvidia.pth"].content == b"/opt/nvidia\n"
    assert files_by_path[f"{SITE}/nvidia.pth"].mode == 0o644


def test_without_cuda_wheels_there_is_no_link(tiny: Project, image: PlannedImage) -> None:
    plain = replace(image, wheels=tuple(wheel for wheel in image.wheels if wheel.component != "cuda"))
    paths = by_path(tiny, plain)
    assert paths
    assert not [path for path in paths if path.startswith(("opt/", PLACE.site))]


@pytest.mark.parametrize("folder", ["workspace", "var/tmp", "home/user/.config"])
def test_a_file_in_a_folder_with_its_own_owner_or_mode_is_refused(
    tiny: Project, image: PlannedImage, folder: str
) -> None:
    """The layer would replace the folder with one that is 0755 root:root."""
    put(tiny, "base", f"{folder}/deep/it")
    pattern = re.escape(folder)
    message = f"file for /{pattern}/deep/it, but folder /{pattern} of the system is not 0755 root:root$"
    with pytest.raises(BuildError, match=message):
        entries(tiny, image, folders=(folder, "tmp"))
    assert entries(tiny, image, folders=("tmp", f"{folder}/other", f"{folder}-2"))


def test_a_file_below_a_link_of_another_component_is_refused(tiny: Project, image: PlannedImage) -> None:
    link = tiny.root / "templates/base/files/srv/data"
    link.parent.mkdir(parents=True)
    link.symlink_to("/elsewhere")
    put(tiny, "jupyter", "srv/data/file")
    with pytest.raises(BuildError, match="a file for /srv/data/file, but /srv/data is a link"):
        files.read(tiny.root, image, PLACE)
