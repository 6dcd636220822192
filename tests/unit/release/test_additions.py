"""What users may put on an image, and how a team's file says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.common.errors import BuilderError, UsageError
from builder.common.reference import ImageRef
from builder.release import additions
from builder.release.additions import Addition, new_addition, read_team_file

PARENT, TARGET = ImageRef.parse("registry.example.test/org/em:1"), ImageRef.parse("registry.example.test/team/vision:1")


def copy(folder: Path, *copies: str) -> Addition:
    return new_addition(PARENT, TARGET, [], copies=copies, folder=folder)


def test_files_and_folders_with_modes_for_the_group_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "conf/sub").mkdir(parents=True)
    (tmp_path / "conf/a.txt").write_text("a")
    (tmp_path / "conf/sub/run").write_text("#!/bin/sh\n")
    (tmp_path / "conf/sub/run").chmod(0o755)
    files = copy(tmp_path, "conf:/workspace/conf", "conf/a.txt:/opt/team/b.txt").files
    assert {path: (entry.mode, entry.content) for path, entry in files.items()} == {
        "workspace/conf/a.txt": (0o664, b"a"),
        "workspace/conf/sub/run": (0o775, b"#!/bin/sh\n"),
        "opt/team/b.txt": (0o664, b"a"),
    }


@pytest.mark.parametrize(
    "destination",
    [
        "/etc/passwd", "/usr/local/bin/start", "/opt/venv/bin/python", "/workspace", "/workspace/../etc/cron.d/x",
        "workspace/a", "/workspaces/a", "", "/opt/teams/a",
    ],
)  # fmt: skip
def test_destinations_that_are_refused(tmp_path: Path, destination: str) -> None:
    (tmp_path / "a").write_text("a")
    with pytest.raises(UsageError, match="is not SRC:DST with DST below /workspace"):
        copy(tmp_path, f"a:{destination}")


def test_sources_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        copy(tmp_path, "absent:/srv/a")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/link").symlink_to("/etc/shadow")
    with pytest.raises(UsageError, match="link is a link"):
        copy(tmp_path, "conf:/srv/a")


def test_all_copied_files_have_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their contents are in memory together."""
    monkeypatch.setattr(additions, "LARGEST_COPY", 10_000)
    (tmp_path / "conf").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "conf" / name).write_bytes(bytes(4000))
    copies = [f"conf/{name}:/srv/{name}" for name in ("a", "b")]
    assert sum(entry.size for entry in copy(tmp_path, *copies).files.values()) == 8000
    with pytest.raises(UsageError) as caught:
        copy(tmp_path, *copies, "conf/c:/srv/c")
    assert str(caught.value).endswith("/conf/c, the copied files have 12 kB, more than 10 kB")
    with pytest.raises(UsageError, match="/conf/c, the copied files have 12 kB"):
        copy(tmp_path, "conf:/srv/conf")


def test_variables() -> None:
    added = new_addition(PARENT, TARGET, [], env=["A=b=c", "EMPTY="])
    assert added.env == {"A": "b=c", "EMPTY": ""}
    assert added.request == {"requirements": [], "env": {"A": "b=c", "EMPTY": ""}}


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("A", "invalid variable"), ("1A=b", "invalid variable"), ("A=b\nc", "invalid variable"),
        ("PATH=/tmp", "every image sets PATH"), ("PIP_CONSTRAINT=", "every image sets PIP_CONSTRAINT"),
    ],
)  # fmt: skip
def test_variables_that_are_refused(variable: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        new_addition(PARENT, TARGET, [], env=[variable])


def test_debian_packages_and_services() -> None:
    services = ["api=uvicorn app:app --port=80", "x=a"]
    added = new_addition(PARENT, TARGET, [], apt=["tmux", "libsndfile1", "tmux"], services=services)
    assert added.apt == ("libsndfile1", "tmux")
    assert added.services == {"api": "uvicorn app:app --port=80", "x": "a"}
    assert added.request["apt"] == ["libsndfile1", "tmux"]
    assert added.request["services"] == added.services


@pytest.mark.parametrize("name", ["", "a", "-s", "a;b", "A", "tmux=3", "../x", "tmux\n", "tmux-", "tmux."])
def test_names_that_are_not_of_debian_packages(name: str) -> None:
    with pytest.raises(UsageError, match="is not the name of a Debian package"):
        new_addition(PARENT, TARGET, [], apt=[name])


@pytest.mark.parametrize("service", ["api", "api=", "api= ", "../x=y", "a/b=y", "Api=y", "api=a\nb", "api=PORT=1 app"])
def test_services_that_are_refused(service: str) -> None:
    with pytest.raises(UsageError, match="invalid service"):
        new_addition(PARENT, TARGET, [], services=[service])


@pytest.mark.parametrize("command", ["cd /srv && app", "a; b", "app > log", "app &", "a | b", "$(app)"])
def test_a_service_is_one_command(command: str) -> None:
    """The shell would run the first one alone."""
    with pytest.raises(UsageError, match="service api is more than one command"):
        new_addition(PARENT, TARGET, [], services=[f"api={command}"])
    assert new_addition(PARENT, TARGET, [], services=[f"api=bash -c '{command}'"]).services


@pytest.mark.parametrize("target", ["registry.example.test/a", f"registry.example.test/a@sha256:{'1' * 64}"])
def test_the_image_needs_a_tag(target: str) -> None:
    with pytest.raises(UsageError, match="is no tag"):
        new_addition(PARENT, ImageRef.parse(target), ["einops"])


# ---- a team's file

TEAM = """\
images:
  - image: registry.example.test/team/vision:1
    parent: registry.example.test/org/em:1
    packages: [einops]
    requirements: [vision.txt]
    apt: [tmux]
    env: {TEAM: vision}
    services: {api: uvicorn app}
    copy: ["vision.txt:/srv/vision.txt"]
  - {image: "registry.example.test/team/audio:1", parent: "registry.example.test/org/em:1", packages: [torchcodec]}
"""


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "vision.txt").write_text("tqdm\n")
    (tmp_path / "team.yaml").write_text(TEAM)
    first, second = read_team_file(tmp_path / "team.yaml")
    assert (first.parent, first.target) == (PARENT, TARGET)
    assert [each.text for each in first.requested] == ["einops", "tqdm"]
    assert (first.apt, first.services) == (("tmux",), {"api": "uvicorn app"})
    assert (first.env, list(first.files)) == ({"TEAM": "vision"}, ["srv/vision.txt"])
    assert [each.text for each in second.requested] == ["torchcodec"]


def test_a_project_of_a_team(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('project = {name = "a", requires-python = ">=3.11", dependencies = ["b"]}')
    (tmp_path / "vision.txt").write_text("")
    (tmp_path / "team.yaml").write_text(TEAM.replace("[vision.txt]", "[pyproject.toml]"))
    first, second = read_team_file(tmp_path / "team.yaml")
    assert [each.text for each in first.requested] == ["einops", "b"]
    assert ([each.text for each in first.constraints], second.constraints) == (["python >=3.11"], [])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("packages: [einops]", "package: [einops]", "team.yaml:4:5: images.0.package: unknown key"),
        ("packages: [einops]", "packages: einops", "images.0.packages"),
        ("packages: [einops]", "packages: [-e .]", "team.yaml:2:5: the option -e is not supported"),
        ("org/em:1\n    packages", "org/em:1:2\n    packages", "team.yaml:2:5: '1:2' is not a tag"),
        ("team/audio:1", "team/vision:1", "two images registry.example.test/team/vision:1"),
        ("[vision.txt]", "[absent.txt]", "no such file"),
        (TEAM, "images: []\n", "images"),
        (TEAM, "- a\n", "team.yaml"),
    ],
)
def test_a_file_that_is_refused_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    (tmp_path / "vision.txt").write_text("tqdm\n")
    assert old in TEAM
    (tmp_path / "team.yaml").write_text(TEAM.replace(old, new))
    with pytest.raises(BuilderError) as caught:
        read_team_file(tmp_path / "team.yaml")
    assert message in str(caught.value)
