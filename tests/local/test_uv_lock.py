"""The uv.lock of a project, read by the real uv: versions and hashes of what is on an index; all else is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from builder.common.errors import UsageError
from builder.lock.request_files import read_request

ONE, TWO = "1" * 64, "2" * 64
PROJECT = """\
[project]
name = "Vision.X"
version = "0"
requires-python = ">=3.11"
dependencies = ["einops>=0.7", "polars<2; sys_platform == 'linux'"]
"""
LOCK = f"""\
version = 1
requires-python = ">=3.11"

[[package]]
name = "einops"
version = "0.8.2"
source = {{ registry = "https://index.example.test/simple" }}
wheels = [
    {{ url = "https://files.example.test/einops-0.8.2-py3-none-any.whl", hash = "sha256:{ONE}", size = 1 }},
]

[[package]]
name = "polars"
version = "1.9"
source = {{ registry = "https://index.example.test/simple" }}
wheels = [
    {{ url = "https://files.example.test/polars-1.9-cp311-cp311-manylinux_2_17_x86_64.whl", hash = "sha256:{TWO}" }},
]

[[package]]
name = "pytest"
version = "9"
source = {{ git = "https://git.example.test/pytest.git?rev=1#{"a" * 40}" }}

[[package]]
name = "vision-x"
version = "0"
source = {{ virtual = "." }}
dependencies = [
    {{ name = "einops" }},
    {{ name = "polars", marker = "sys_platform == 'linux'" }},
]

[package.dev-dependencies]
dev = [
    {{ name = "pytest" }},
]
"""


def read(folder: Path, text: str, lock: str = "") -> tuple[list[str], list[str]]:
    (folder / "pyproject.toml").write_text(text)
    if lock:
        (folder / "uv.lock").write_text(lock)
    requested, constraints = read_request(folder / "pyproject.toml")
    return [str(each) for each in requested], [str(each) for each in constraints]


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read_request(path)
    assert str(caught.value).startswith(str(path.parent)), "the place"
    return f"{caught.value} -> {caught.value.hint}"


def test_the_versions_and_hashes_of_uv_lock(tmp_path: Path) -> None:
    """Those of all that `dependencies` need, and of no group."""
    _, constraints = read(tmp_path, PROJECT, LOCK)
    assert constraints == [
        "python >=3.11",
        f"einops==0.8.2 --hash=sha256:{ONE}",
        f"polars==1.9 ; sys_platform == 'linux' --hash=sha256:{TWO}",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (LOCK, "#" * 50_000_000, "uv.lock: uv cannot read it"),
        ("version = 1", "version = 9", "uv.lock: uv cannot read it"),
        ('version = "0.8.2"', "version = 1", "expected a string -> Run `uv lock`."),
        ('name = "einops"', 'name = "e\\u001b\\n"', "uv.lock: uv cannot read it"),
        (
            "0.8.2",
            "0.6",
            "has no version for 'einops>=0.7' of pyproject.toml -> Run `uv lock`.",
        ),
        ('    { name = "einops" },\n', "", "has no version for 'einops>=0.7'"),
        ('{ name = "einops" }', '{ name = "einops" },\n    { name = "pytest" }', "pytest is at an address -> Publish"),
    ],
)
def test_a_uv_lock_that_is_refused_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in LOCK
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "uv.lock").write_text(LOCK.replace(old, new))
    assert message in refusal(tmp_path / "pyproject.toml")


@pytest.mark.parametrize(
    ("source", "lock", "is_accepted"),
    [
        ("{ index = 'torch' }", LOCK, True),
        (
            "[{ index = 'a', marker = \"os_name == 'posix'\" }, { index = 'b', marker = \"os_name == 'nt'\" }]",
            LOCK,
            True,
        ),
        ("{ index = 'torch' }", "", False),
        ("{ index = 'torch' }", re.sub(r", hash = \"[^\"]*\"", "", LOCK), False),
        ("{ url = 'https://example.test/einops-1-py3-none-any.whl' }", LOCK, False),
        ("{ workspace = true }", LOCK, False),
    ],
)
def test_a_package_of_another_index_needs_hashes(tmp_path: Path, source: str, lock: str, is_accepted: bool) -> None:
    """The index of this machine could have another package of its name."""
    text = f"{PROJECT}[tool.uv.sources]\neinops = {source}\n"
    if is_accepted:
        assert f"einops==0.8.2 --hash=sha256:{ONE}" in read(tmp_path, text, lock)[1]
        return
    with pytest.raises(UsageError, match=r"tool\.uv\.sources has a source of 'einops'"):
        read(tmp_path, text, lock)
