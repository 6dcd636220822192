"""What users may put on an image, and how a team's file says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.common.errors import BuilderError, LockError, UsageError
from builder.common.reference import ImageRef
from builder.index.wheels import LockedWheel
from builder.release.additions import (
    Addition,
    AdditionRequest,
    Requested,
    check_hashes,
    parse_requirement,
    read_requested,
    read_requirements,
    read_team_file,
    read_variables,
)

PARENT, TARGET = ImageRef.parse("registry.example.test/org/em:1"), ImageRef.parse("registry.example.test/team/vision:1")
ONE, TWO = "1" * 64, "2" * 64


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


# ---- requirements


def read(tmp_path: Path, text: str) -> list[Requested]:
    path = tmp_path / "requirements.txt"
    path.write_text(text, encoding="utf-8")
    return read_requirements(path)


def wheel(name: str, sha256: str) -> LockedWheel:
    return LockedWheel(name=name, version="1", file=f"{name}-1-py3-none-any.whl", size=1, sha256=sha256)


def test_requirements_as_pip_writes_them(tmp_path: Path) -> None:
    text = (
        "# compiled\n\n"
        f"Einops==0.8.2 \\\n    --hash=sha256:{ONE} \\\n    --hash=sha256:{TWO}\n    # via -r requirements.in\n"
        'tqdm[notebook]>=4 ; python_version > "3.8"  # a comment -e\n'
        "polars\\\n"
    )
    listed = read(tmp_path, text)
    assert [str(requested) for requested in listed] == [
        f"Einops==0.8.2 --hash=sha256:{ONE} --hash=sha256:{TWO}",
        'tqdm[notebook]>=4 ; python_version > "3.8"',
        "polars",
    ]
    assert [requested.name for requested in listed] == ["einops", "tqdm", "polars"]
    assert [parse_requirement(str(requested), "label") for requested in listed] == listed, "as the image records them"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-e .", "the option -e is not supported"),
        ("-r other.txt", "the option -r is not supported"),
        ("-c bounds.txt", "the option -c is not supported"),
        ("--index-url https://example.test/simple", "the option --index-url is not supported"),
        ("einops --no-binary :all:", "the option --no-binary is not supported"),
        (f"einops --hash=sha512:{ONE}", "the option --hash is not supported"),
        ("git+https://example.test/e.git#egg=e", "is an address or a path"),
        (f"e @ https://example.test/e-1-py3-none-any.whl#sha256={ONE}", "is an address or a path"),
        ("./local", "is an address or a path"),
        ("e-1-py3-none-any.whl", "is an address or a path"),
        ("einops == == 1", "is not a requirement"),
        ("$(touch x)", "is not a requirement"),
    ],
)
def test_what_is_not_a_package_of_the_index_is_refused(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, f"tqdm\n\n{line}\n")
    assert str(caught.value).startswith(f"{tmp_path}/requirements.txt:3: ")
    assert message in str(caught.value)
    assert caught.value.hint


def test_a_continued_requirement_has_its_first_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"requirements\.txt:1: "):
        read(tmp_path, "einops \\\n --pre\n")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UsageError, match="is not a text file"):
        read_requirements(tmp_path / "binary.txt")


def test_with_hashes_every_wheel_must_have_one() -> None:
    """As with pip, also the wheels that others need."""
    check_hashes([Requested(text="a")], {"a": wheel("a", ONE)})
    requested = [Requested(text="A", hashes=frozenset([ONE]))]
    check_hashes(requested, {"a": wheel("a", ONE)})
    with pytest.raises(LockError, match="does not have one of its hashes"):
        check_hashes(requested, {"a": wheel("a", TWO)})
    with pytest.raises(LockError, match="has no hash in the requirements"):
        check_hashes(requested, {"a": wheel("a", ONE), "b": wheel("b", TWO)})


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
    assert [requested.text for requested in first.request.requirements] == ["einops", "tqdm"]
    assert first.request.env == {"TEAM": "vision"}
    assert (first.request.index, first.request.keep) == (f"{tmp_path}/wheels", True)
    assert (second.request.index, second.request.keep) == ("own", False), "an index of matrix.yaml"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("packages: [einops]", "apt: [tmux]", "team.yaml:4:5: images.0.apt: unknown key"),
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
