"""What users may put on an image, and how a team's file says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.common.errors import BuilderError, UsageError
from builder.common.reference import ImageRef
from builder.release.additions import Addition, AdditionRequest, read_requested, read_team_file, read_variables

PARENT, TARGET = ImageRef.parse("registry.example.test/org/em:1"), ImageRef.parse("registry.example.test/team/vision:1")


def test_variables() -> None:
    assert read_variables(["A=b=c", "EMPTY="]) == {"A": "b=c", "EMPTY": ""}
    with pytest.raises(UsageError, match="invalid variable 'A'"):
        read_variables(["A"])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("1A", "b", "invalid variable"), ("", "b", "invalid variable"), ("A", "b\nc", "invalid variable"),
        ("A\n", "b", "invalid variable"), ("PATH", "/tmp", "every image sets PATH"),
        ("PIP_CONSTRAINT", "", "every image sets PIP_CONSTRAINT"),
    ],
)  # fmt: skip
def test_variables_that_are_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        AdditionRequest(env={name: value})


def test_a_request_reads_what_it_writes() -> None:
    text = f"einops>=0.7 --hash=sha256:{'1' * 64}"
    request = AdditionRequest(requirements=read_requested([text], [], "test"), env={"A": "b"}, index="own", keep=True)
    data = request.model_dump()
    assert data == {"requirements": (text,), "env": {"A": "b"}, "index": "own", "keep": True}
    assert AdditionRequest.model_validate(data) == request


@pytest.mark.parametrize(
    ("target", "env", "message"),
    [
        ("registry.example.test/a", {"A": "b"}, "is no tag"),
        (f"registry.example.test/a@sha256:{'1' * 64}", {"A": "b"}, "is no tag"),
        (str(PARENT), {"A": "b"}, "is the parent itself"),
        (str(TARGET), {}, "nothing to add"),
    ],
)
def test_an_addition_that_is_none(target: str, env: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Addition(parent=PARENT, target=ImageRef.parse(target), request=AdditionRequest(env=env))


# ---- a team's file

TEAM = """\
images:
  - image: registry.example.test/team/vision:1
    parent: registry.example.test/org/em:1
    packages: [einops]
    requirements: [vision.txt]
    env: {TEAM: vision}
    index: wheels
    keep: true
  - image: registry.example.test/team/audio:1
    parent: registry.example.test/org/em:1
    packages: [torchcodec]
    index: own
"""


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "vision.txt").write_text("tqdm\n")
    (tmp_path / "team.yaml").write_text(TEAM)
    (tmp_path / "wheels").mkdir()
    first, second = read_team_file(tmp_path / "team.yaml")
    assert (first.parent, first.target) == (PARENT, TARGET)
    assert [each.text for each in first.request.requirements] == ["einops", "tqdm"]
    assert first.request.env == {"TEAM": "vision"}
    assert (first.request.index, first.request.keep) == (f"{tmp_path}/wheels", True)
    assert (second.request.index, second.request.keep) == ("own", False), "an index of matrix.yaml"
    assert [each.text for each in second.request.requirements] == ["torchcodec"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("packages: [einops]", "apt: [tmux]", "team.yaml:4:5: images.0.apt: unknown key"),
        ("[vision.txt]", "[pyproject.toml]", "pyproject.toml is not a file of requirements as for pip"),
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
