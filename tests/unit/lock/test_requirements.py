"""Requirements of users: names of packages and hashes; everything else is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.common.errors import BuilderError, LockError, UsageError
from builder.index.wheels import LockedWheel
from builder.lock import requirements
from builder.lock.requirements import Requested, parse_requirement, read_requirements

ONE, TWO = "1" * 64, "2" * 64


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
    assert [str(each) for each in listed] == [
        f"Einops==0.8.2 --hash=sha256:{ONE} --hash=sha256:{TWO}",
        'tqdm[notebook]>=4 ; python_version > "3.8"',
        "polars",
    ]
    assert [each.name for each in listed] == ["einops", "tqdm", "polars"]
    assert [parse_requirement(str(each), "label") for each in listed] == listed, "as the image records them"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-e .", "the option -e is not supported"),
        ("-r other.txt", "the option -r is not supported"),
        ("-c bounds.txt", "the option -c is not supported"),
        ("--index-url https://example.test/simple", "the option --index-url is not supported"),
        ("--extra-index-url=https://example.test", "the option --extra-index-url is not supported"),
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


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BuilderError, match="no such file"):
        read_requirements(tmp_path / "absent.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UsageError, match="is not a text file"):
        read_requirements(tmp_path / "binary.txt")


def test_with_hashes_every_wheel_must_have_one() -> None:
    """As with pip, also the wheels that others need."""
    requirements.check_hashes([Requested(text="a")], {"a": wheel("a", ONE)})
    requested = [Requested(text="A", hashes=frozenset([ONE]))]
    requirements.check_hashes(requested, {"a": wheel("a", ONE)})
    with pytest.raises(LockError, match="does not have one of its hashes"):
        requirements.check_hashes(requested, {"a": wheel("a", TWO)})
    with pytest.raises(LockError, match="has no hash in the requirements"):
        requirements.check_hashes(requested, {"a": wheel("a", ONE), "b": wheel("b", TWO)})
