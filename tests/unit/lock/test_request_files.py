"""A pyproject.toml with its uv.lock, and an environment.yml: names of packages; everything else is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from builder.common.errors import UsageError
from builder.lock.request_files import read_request

ONE, TWO, THREE = "1" * 64, "2" * 64, "3" * 64
PROJECT = """\
[project]
name = "Vision.X"
requires-python = ">=3.11"
dependencies = ["einops>=0.7", "Polars[GPU]<2", "six; python_version < '3.9'"]
optional-dependencies.dev = ["pytest"]
"""
# As uv 0.13 writes it, without times and most wheels.
LOCK = f"""\
version = 1
revision = 5
requires-python = ">=3.11"

[[package]]
name = "einops"
version = "0.8.2"
source = {{ registry = "https://index.example.test/simple" }}
sdist = {{ url = "https://files.example.test/einops-0.8.2.tar.gz", hash = "sha256:{THREE}", size = 1 }}
wheels = [
    {{ url = "https://files.example.test/einops-0.8.2-py3-none-any.whl", hash = "sha256:{ONE}", size = 1 }},
]

[[package]]
name = "polars"
version = "1.9"
source = {{ registry = "https://index.example.test/simple" }}
dependencies = [
    {{ name = "polars" }},
    {{ name = "numpy", version = "2.0", source = {{ registry = "x" }}, marker = "python_full_version < '3.12'" }},
]
wheels = [
    {{ url = "https://files.example.test/polars-1.9-cp311-cp311-manylinux_2_17_x86_64.whl", hash = "sha256:{ONE}" }},
    {{ url = "https://files.example.test/polars-1.9-cp311-cp311-manylinux_2_17_aarch64.whl", hash = "sha256:{TWO}" }},
    {{ url = "https://files.example.test/polars-1.9-cp311-cp311-musllinux_1_1_x86_64.whl", hash = "sha256:{THREE}" }},
    {{ url = "https://files.example.test/polars-1.9-cp311-cp311-win_amd64.whl", hash = "sha256:{THREE}" }},
    {{ url = "https://files.example.test/polars-1.9-cp311-cp311-manylinux_2_17_s390x.whl", hash = "sha256:{THREE}" }},
]

[package.optional-dependencies]
gpu = [
    {{ name = "cudf" }},
]

[[package]]
name = "cudf"
version = "25.2"
source = {{ registry = "https://index.example.test/simple" }}

[[package]]
name = "numpy"
version = "2.0"
source = {{ registry = "https://index.example.test/simple" }}
resolution-markers = [
    "python_full_version < '3.12' and sys_platform == 'linux'",
    "python_full_version < '3.12' and sys_platform != 'linux'",
]

[[package]]
name = "numpy"
version = "2.5"
source = {{ registry = "https://index.example.test/simple" }}
resolution-markers = [
    "python_full_version >= '3.12'",
]

[[package]]
name = "pytest"
version = "9"
source = {{ git = "https://example.test/pytest.git" }}

[[package]]
name = "vision-x"
version = "0"
source = {{ editable = "." }}
dependencies = [
    {{ name = "einops" }},
    {{ name = "polars", extra = ["gpu"] }},
]

[package.optional-dependencies]
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


def test_the_dependencies_of_a_project(tmp_path: Path) -> None:
    requested, constraints = read(tmp_path, PROJECT)
    assert requested == ["einops>=0.7", "Polars[GPU]<2", "six; python_version < '3.9'"]
    assert constraints == ["python >=3.11"]


def test_the_versions_and_hashes_of_uv_lock(tmp_path: Path) -> None:
    """Those of all that `dependencies` need, also by extras; the hashes of wheels for other systems are not."""
    _, constraints = read(tmp_path, PROJECT, LOCK)
    assert constraints == [
        "python >=3.11",
        "cudf==25.2",
        f"einops==0.8.2 --hash=sha256:{ONE}",
        "numpy==2.0 ; (python_full_version < '3.12' and sys_platform == 'linux')"
        " or (python_full_version < '3.12' and sys_platform != 'linux')",
        "numpy==2.5 ; (python_full_version >= '3.12')",
        f"polars==1.9 --hash=sha256:{ONE} --hash=sha256:{TWO}",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (PROJECT, "project = 1", "project.name: field required"),
        (PROJECT, "[project", "invalid TOML: Expected"),
        (PROJECT, "a = " + "[" * 100_000, "invalid TOML: maximum recursion depth"),
        (PROJECT, "a = " + "1" * 5000, "invalid TOML: Exceeds the limit"),
        ("dependencies =", 'dynamic = ["dependencies"] #', "project.dependencies is dynamic -> Only a build knows it"),
        ('"einops>=0.7"', "1", "project.dependencies.0: input should be a valid string"),
        ("einops>=0.7", "einops @ https://a:secret@example.test/e", "project.dependencies: einops is at an address"),
        ("einops>=0.7", "e\\u001b[31m", r"project.dependencies: 'e\x1b[31m' is not a requirement"),
        ("einops>=0.7", "e==" + "1" * 5000, "is not a requirement"),
        ("einops>=0.7", "e;" + "(" * 3000, "is not a requirement"),
        (">=3.11", "3.11", "project.requires-python: 'python 3.11' is not a requirement"),
        ("[project]", "[tool.uv]\nsources.b = [1]\n[project]", "tool.uv.sources.b"),
        (
            "[project]",
            "[tool.uv.sources]\nEinops.path='x'\nother.path='x'\n[project]",
            "a source of 'Einops' -> Publish",
        ),
    ],
)
def test_a_project_that_is_refused_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in PROJECT
    (tmp_path / "pyproject.toml").write_text(PROJECT.replace(old, new))
    assert message in refusal(tmp_path / "pyproject.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (LOCK, "#" * 50_000_000, "is larger than 8.0 MB"),
        (LOCK, "a = " + "{a = " * 3000, "invalid TOML"),
        (LOCK, "version = 2", "version: input should be 1"),
        (LOCK, "version = 1\npackage = 1", "package: input should be a valid list"),
        (LOCK, "version = 1", "uv.lock has no version for 'einops>=0.7' of pyproject.toml -> Run `uv lock`."),
        ('version = "0.8.2"', 'version = "0.6"', "has no version for 'einops>=0.7'"),
        ('version = "0.8.2"', "version = 1", "package.0.version: input should be a valid string"),
        ('version = "0.8.2"', "", "'einops': 'einops==' is not a requirement"),
        ('version = "0.8.2"', 'version = "0.8 --pre"', "'einops': the option --pre is not supported"),
        ('name = "einops"', 'name = "e\\u001b\\n"', r"'e\x1b\n': 'e\x1b\n==0.8.2' is not a requirement"),
        ("gpu = [", '"\\u001b" = 1\ngpu = [', r"package.1.optional-dependencies.\x1b: input should be"),
        ('25.2"\nsource = { registry', '25.2"\nsource = { url', "'cudf' is not from an index -> Publish its wheel"),
        ("python_full_version >= '3.12'", "((", "'numpy': 'numpy==2.5 ; ((()' is not a requirement"),
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
        ("[{ index = 'torch', marker = \"sys_platform == 'linux'\" }, { index = 'cpu' }]", LOCK, True),
        ("{ index = 'torch' }", "", False),
        ("{ index = 'torch' }", re.sub(r", hash = \"[^\"]*\"", "", LOCK), False),
        ("[{ index = 'torch' }, { url = 'https://example.test/e-1-py3-none-any.whl' }]", LOCK, False),
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


@pytest.mark.parametrize("name", ["environment.yml", "environment.yaml"])
def test_the_pip_list_of_an_environment(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(
        "name: vision\nchannels: [conda-forge]\n"
        "dependencies:\n  - python=3.11\n  - conda-forge::pip>=23\n  - pip:\n    - einops>=0.8\n    - tqdm\n"
    )
    requested, constraints = read_request(tmp_path / name)
    assert [(str(each), each.place) for each in requested] == [
        ("einops>=0.8", f"{tmp_path}/{name}:7:7"),
        ("tqdm", f"{tmp_path}/{name}:8:7"),
    ]
    assert [(str(each), each.place) for each in constraints] == [("python ==3.11.*", f"{tmp_path}/{name}:4:5")]


@pytest.mark.parametrize(
    ("entry", "constraint"),
    [
        ("python", []), ("pip", []), ("pip=24.0=pyhd", []),
        ("python 3.11", ["python ==3.11.*"]), ("python==3.11.*", ["python ==3.11.*"]),
        ("python=3.11.5=h955_0", ["python ==3.11.5.*"]), ("python = 3", ["python ==3.*"]),
        ("python >=3.10,<4", ["python >=3.10,<4"]), ("conda-forge::python>=3.10", ["python >=3.10"]),
    ],
)  # fmt: skip
def test_the_python_of_an_environment(tmp_path: Path, entry: str, constraint: list[str]) -> None:
    (tmp_path / "environment.yml").write_text(f"dependencies: ['{entry}']\n")
    assert [str(each) for each in read_request(tmp_path / "environment.yml")[1]] == constraint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dependencies: [numpy=1.26, python=3.11, 'a::torch>=2', pip, python-dateutil]",
         "packages of conda cannot be added: numpy=1.26, a::torch>=2, python-dateutil -> Write their names on PyPI"),
        ("dependencies:\n- pip:\n  - einops\n  - -r other.txt", "yml:4:5: the option -r is not supported"),
        ("dependencies: ['python>=x']", "yml:1:16: 'python >=x' is not a requirement"),
        ("dependencies: 1", "yml:1:15: `dependencies` is not a list of packages"),
        ("dependencies: [a, {pip: [1]}]", "yml:1:19: `dependencies` is not a list of packages"),
        ("dependencies: [{conda: [a]}]", "yml:1:16: `dependencies` is not a list of packages"),
        ("", "yml:1:1: `dependencies` is not a list of packages"),
        ("dependencies: [a\x1b]", "yml:1:17: character U+001B is not allowed"),
        ("[" * 5000, "nested more than 12 levels deep"),
    ],
)  # fmt: skip
def test_an_environment_that_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "environment.yml").write_text(text)
    assert message in refusal(tmp_path / "environment.yml")


@pytest.mark.parametrize("name", ["pylock.toml", "conda.yml", "env.yaml"])
def test_files_of_another_kind(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("einops\n")
    assert "files of this kind are not supported -> Name a pyproject.toml" in refusal(tmp_path / name)


def test_other_files_are_requirements(tmp_path: Path) -> None:
    (tmp_path / "vision.in").write_text("einops\n")
    assert [str(each) for each in read_request(tmp_path / "vision.in")[0]] == ["einops"]
