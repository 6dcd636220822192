"""Images with uv's build of Python, from a mirror on the loopback: locked, downloaded by its hash, built and tested.

The tests make an archive with the layout of uv's builds, of a Python of this machine that is not Debian's. A list of
downloads for uv has its hash.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from builder.index.host import Host
from builder.layers.estargz import RESERVED
from builder.lock.python_builds import PythonBuilds
from tests.integration.checkout import PLAIN, USER, Checkout
from tests.integration.conftest import NewCheckout
from tests.integration.index import Index
from tests.integration.tree import differences, tree
from tests.integration.wheels import Distribution

# Debian's libraries of a Python that is linked to them; uv's builds contain their own.
LIBRARIES = "libbz2-1.0, libffi8, liblzma5, libncursesw6, libreadline8, libsqlite3-0, libssl3"
LEFT_OUT = {"__pycache__", "site-packages", "test", "idlelib"}
LIST = "downloads.json"
# Beginning of the addresses of uv's list, which a mirror replaces.
REPLACED = "https://github.com/astral-sh/python-build-standalone/releases/download"
STANDARD_LIBRARY = """\
import importlib.util, json, sys
with open(importlib.util.cache_from_source(json.__file__), "rb") as file:
    print(sys.base_prefix, int.from_bytes(file.read(8)[4:], "little"))
"""


@dataclass(frozen=True)
class Build:
    """uv's build of a release: `archive` is on the mirror, in the folder of its date; `list` is a path."""

    key: str
    release: str
    archive: Distribution
    list: Path


def other_python() -> Path:
    """The folder of a Python 3.11 on the PATH that is not Debian's."""
    probe = "import sys; print(*sys.version_info[:2], sys.base_prefix)"
    for program in filter(None, map(shutil.which, ("python3.11", "python3"))):
        version, _, prefix = subprocess.check_output([program, "-c", probe], text=True).strip().rpartition(" ")
        if version == "3 11" and prefix != "/usr":
            return Path(prefix)
    pytest.skip("the PATH has no Python 3.11 but Debian's")


@pytest.fixture(scope="module")
def build(served: Index, tmp_path_factory: pytest.TempPathFactory) -> Build:
    prefix = other_python()
    program = prefix / "bin/python3.11"
    release = subprocess.check_output([program, "-c", "import sys; print(sys.version.split()[0])"], text=True).strip()
    key = f"cpython-{release}-linux-x86_64-gnu"
    listed = subprocess.check_output(
        [
            Path(sys.executable).parent / "uv", "python", "list", "--no-config", "--only-downloads", "--all-versions",
            "--show-urls", "--output-format", "json", key,
        ],
        env={name: value for name, value in os.environ.items() if not name.startswith("UV_")},
    )  # fmt: skip
    date, file = json.loads(listed)[0]["url"].split("/")[-2:]

    def keep(item: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if LEFT_OUT.intersection(item.name.split("/")) or item.name.endswith(".a") else item

    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz", compresslevel=1) as archive:
        libraries = [str(path.relative_to(prefix)) for path in prefix.glob("lib/libpython3.11.so.1.0")]
        for name in ("bin/python3", "bin/python", "include", "lib/python3.11", *libraries):
            archive.add(prefix / name, f"python/{name}", filter=keep)
        # The programs of uv's builds find their library beside them.
        old, new = f"{prefix}/lib\0".encode(), b"$ORIGIN/../lib\0"
        item = archive.gettarinfo(program, "python/bin/python3.11")
        archive.addfile(item, io.BytesIO(program.read_bytes().replace(old, new.ljust(len(old), b"\0"))))
    distribution = Distribution(project=date, file=file, content=content.getvalue())

    major, minor, patch = map(int, release.split("."))
    entry = {
        "name": "cpython", "major": major, "minor": minor, "patch": patch, "prerelease": "", "variant": None,
        "os": "linux", "arch": {"family": "x86_64", "variant": None}, "libc": "gnu",
        "url": f"{REPLACED}/{date}/{file}", "sha256": distribution.sha256,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("list") / LIST
    path.write_text(json.dumps({key: entry}), encoding="utf-8")
    served.publish(distribution, Distribution(project="list", file=LIST, content=path.read_bytes()))
    return Build(key=key, release=release, archive=distribution, list=path)


def with_uv(checkout: Checkout, build: Build) -> Checkout:
    """The checkout with uv's build instead of Debian's Python, locked and rendered."""
    checkout.environ["UV_PYTHON_DOWNLOADS_JSON_URL"] = str(build.list)
    checkout.environ["UV_PYTHON_INSTALL_MIRROR"] = f"http://{checkout.index.address}/files"
    checkout.edit(
        "matrix.yaml",
        "{debian: bookworm, apt: [python3]}",
        f"{{debian: bookworm, uv: {build.release}, apt: [{LIBRARIES}]}}",
    )
    checkout.lock_and_render()
    return checkout


@pytest.fixture(scope="module")
def made(new_checkout: NewCheckout, build: Build, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout whose image is built and passes all tests of `python`."""
    checkout = with_uv(new_checkout(tmp_path_factory.mktemp("uv")), build)
    checkout.write_tests({"base": USER})
    checkout.index.answered.clear()
    checkout.builder("images", PLAIN)
    return checkout


def test_the_lock_has_the_archive_by_its_hash_and_no_address(made: Checkout, build: Build) -> None:
    lock = json.loads((made.root / f"locks/python-{build.release}.json").read_text("utf-8"))
    assert lock == {
        "format": 1,
        "release": build.release,
        "file": build.archive.file.replace("%2B", "+"),
        "sha256": build.archive.sha256,
    }
    assert "up to date" in made.builder("lock", "--check")


def test_the_image_runs_this_python_with_its_bytecode(made: Checkout, build: Build) -> None:
    image = made.references()[0]
    output = made.docker("run", "--rm", image, "python", "-c", STANDARD_LIBRARY)
    assert output == f"/opt/python/{build.key} 1", "unchecked-hash bytecode (PEP 552)"
    assert made.docker("run", "--rm", image, "tinyframe") == made.release
    compiled = made.docker(
        "run", "--rm", image, "sh", "-c", "cd /opt/venv/lib/python3.11/site-packages; ls */__pycache__"
    )
    assert "tinyframe/__pycache__" in compiled


def test_the_archive_is_downloaded_once_and_kept_in_the_store(made: Checkout, build: Build) -> None:
    path = f"/files/{build.archive.project}/{build.archive.file}"
    assert made.index.answered.count(path) == 1
    blob = made.store / "blobs/sha256" / build.archive.sha256
    assert blob.read_bytes() == build.archive.content
    made.builder("gc")
    assert blob.exists()


def test_no_layer_and_no_history_has_the_address(made: Checkout) -> None:
    image = made.references()[0]
    assert made.index.address not in made.docker("history", "--no-trunc", image) + made.docker("inspect", image)
    search = f"! grep -rIlF {made.index.address} /opt /etc /usr/local /root /var/lib 2>/dev/null"
    made.docker("run", "--rm", "--user", "0", image, "sh", "-c", search)


@pytest.mark.parametrize("minor", ["3.10", "3.12", "3.14"])
def test_the_pinned_uv_has_the_hash_of_its_builds(minor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("UV_")]:
        monkeypatch.delenv(name)
    builds = PythonBuilds(Host())
    release = next(release for release in builds.addresses if release.startswith(f"{minor}."))
    lock = builds.lock(release, None)
    assert lock.file.startswith(f"cpython-{release}+")
    assert lock.sha256 != hashlib.sha256(b"").hexdigest()


def test_plain_docker_build_gives_the_same_files(made: Checkout, build: Build) -> None:
    """Its uv reads our list of downloads from the settings of the build host."""
    address = f"http://{made.index.address}/files/list/{LIST}"
    name = made.plain_docker_build(f"export UV_PYTHON_DOWNLOADS_JSON_URL={address}\n".encode())
    expected, actual = tree(made.references()[0]), tree(name)
    for reserved in RESERVED:
        del expected[reserved]
    assert f"opt/python/{build.key}/lib/python3.11/json/__pycache__/__init__.cpython-311.pyc" in expected
    assert differences(expected, actual) == {}
