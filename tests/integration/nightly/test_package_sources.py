"""Packages that are built from source: sdists, one of them with an extension in C, a commit, a folder of the checkout.

The sdists come from an index with a login. They are built by a small backend, which is a wheel of that index too.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import secrets
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration import registry as registries
from tests.integration import stores, wheels
from tests.integration.checkout import SHORT, Checkout, committed, docker
from tests.integration.conftest import NewCheckout
from tests.integration.index import Index
from tests.integration.registry import Server
from tests.integration.wheels import Distribution

GROUP = "ty-1.0-cu128-py311"
NATIVE = f"{GROUP}-native"
REPOSITORY = "https://git.example.test/team/tinygit"
BACKEND = """\
import hashlib, json, os, pathlib, subprocess, sysconfig, time, urllib.request, zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    about = json.loads(pathlib.Path("about.json").read_text())
    if about.get("url"):
        urllib.request.urlopen(about["url"])
    if about.get("needs"):
        __import__(about["needs"])
    print("environment:", dict(os.environ))
    name, version, tag = about["name"], about["version"], "py3-none-any"
    files = {path.name: path.read_bytes() for path in pathlib.Path().glob("*.py")}
    for source in pathlib.Path().glob("*.c"):
        out, tag = source.stem + sysconfig.get_config_var("EXT_SUFFIX"), "cp311-cp311-linux_x86_64"
        include = sysconfig.get_path("include")
        subprocess.run(["gcc", "-shared", "-fPIC", "-g", f"-I{include}", source, "-o", out], check=True)
        files[out] = pathlib.Path(out).read_bytes()
    info = f"{name}-{version}.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n".encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\\nRoot-Is-Purelib: false\\nTag: {tag}\\n".encode()
    record = "".join(f"{path},,\\n" for path in reversed(files)) + f"{info}/RECORD,,\\n"
    files[f"{info}/RECORD"] = record.encode()
    file = f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(pathlib.Path(folder) / file, "w") as archive:
        for path, content in files.items():  # with the time of now
            archive.writestr(zipfile.ZipInfo(path, time.gmtime()[:6]), content)
    return file
"""
PYPROJECT = '[build-system]\nrequires = {}\nbuild-backend = "tinybackend"\n'
EXTENSION = """\
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tinynative", 0, -1, 0};
PyMODINIT_FUNC PyInit_tinynative(void) {
    PyObject *self = PyModule_Create(&module);
    PyModule_AddStringConstant(self, "COMPILER", "gcc " __VERSION__);
    return self;
}
"""
TEST = """\
def test_all_are_there(host):
    program = "import tinynative, tinypure, tinylocal, tinygit; print(tinynative.COMPILER)"
    assert host.check_output(f'python -c "{program}"').startswith("gcc ")
"""


def source(name: str, version: str, files: Mapping[str, str], **about: str) -> dict[str, str]:
    """The files of a package."""
    settings = {"name": name, "version": version, **about}
    requires = json.dumps(["tinybackend", *([about["needs"]] if "needs" in about else [])])
    return {"pyproject.toml": PYPROJECT.format(requires), "about.json": json.dumps(settings), **files}


def sdist(name: str, version: str, files: Mapping[str, str], **about: str) -> Distribution:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for path, text in source(name, version, files, **about).items():
            item = tarfile.TarInfo(f"{name}-{version}/{path}")
            item.size = len(text)
            tar.addfile(item, io.BytesIO(text.encode()))
    return Distribution(project=name, file=f"{name}-{version}.tar.gz", content=content.getvalue())


@dataclass
class Sources:
    """A checkout with packages from source, and the private index, whose `password` the builder has."""

    checkout: Checkout
    index: Index
    password: str

    def lock(self) -> dict[str, Any]:
        return dict(json.loads((self.checkout.root / f"locks/{GROUP}.json").read_text("utf-8")))

    def built(self) -> dict[str, str]:
        """SHA-256 by name, of the locked wheels from source."""
        return {wheel["name"]: wheel["sha256"] for wheel in self.lock()["wheels"] if "source" in wheel}


@pytest.fixture(scope="module")
def sources(new_checkout: NewCheckout, served: Index, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sources]:
    """All packages are locked."""
    served.heal()
    checkout = new_checkout(tmp_path_factory.mktemp("sources"))
    checkout.write_tests({**SHORT, "compiler": "", "native": TEST, "online": ""})
    checkout.take_store(like=checkout.store)
    with Index().serving() as private:
        private.login = ("__token__", secrets.token_hex(12))
        private.publish(
            wheels.wheel("tinybackend", "1.0", {"tinybackend.py": BACKEND.encode()}),
            sdist("tinypure", "1.0", {"tinypure.py": "NAME = 'an older release'"}),
            sdist("tinypure", "1.1", {"tinypure.py": "NAME = 'pure'"}),
            sdist("tinynative", "1.0", {"tinynative.c": EXTENSION}),
            sdist("tinyonline", "1.0", {}, url="http://files.example.test/data"),
        )
        checkout.environ["UV_INDEX_COMPANY_PASSWORD"] = private.login[1]
        folder = checkout.root / "packages/tinylocal"
        folder.mkdir(parents=True)
        for name, text in source("tinylocal", "1.0.dev1", {"tinylocal.py": "NAME = 'local'"}).items():
            (folder / name).write_text(text, encoding="utf-8")
        commit = committed(
            folder.parents[2] / "repository", source("tinygit", "2.0", {"tinygit.py": ""}, needs="tinylocal")
        )
        settings = folder.parents[2] / "gitconfig"
        settings.write_text(f'[url "file://{folder.parents[2]}/repository"]\n insteadOf = {REPOSITORY}\n')
        checkout.environ["GIT_CONFIG_GLOBAL"] = str(settings)
        checkout.edit("matrix.yaml", "debian:\n", f"indexes:\n  company: {private.url}\ndebian:\n")
        checkout.edit(
            "matrix.yaml",
            "variants:\n",
            "  compiler: {needs: [python], apt: [gcc, libc6-dev, libpython3.11-dev]}\n"
            "  native:\n"
            "    needs: [python]\n"
            "    packages: [tinybackend, tinygit, tinylocal, tinynative, tinypure]\n"
            "    index: company\n"
            "sources:\n"
            f"  tinygit: {{git: {REPOSITORY}, commit: {commit}}}\n"
            "  tinylocal: {folder: packages/tinylocal}\n"
            "  tinynative: {needs: [compiler]}\n"
            "  tinypure: {}\n"
            "variants:\n"
            "  compiler: [compiler]\n"
            "  native: [native]\n",
        )
        checkout.builder("lock")
        checkout.builder("render")
        yield Sources(checkout, private, private.login[1])


def test_the_lock_has_the_wheels_by_hash_and_their_sources(sources: Sources) -> None:
    checkout, lock = sources.checkout, sources.lock()
    built = {wheel["name"]: wheel for wheel in lock["wheels"] if "source" in wheel}
    sha256 = "[0-9a-f]{64}"
    assert re.fullmatch(rf"\./packages/tinylocal#sha256={sha256}", built["tinylocal"]["source"])
    assert re.fullmatch(rf"tinynative-1\.0\.tar\.gz#sha256={sha256}", built["tinynative"]["source"])
    assert re.fullmatch(rf"git\+{REPOSITORY}@[0-9a-f]{{40}}", built["tinygit"]["source"])
    assert built["tinynative"]["file"] == "tinynative-1.0-cp311-cp311-linux_x86_64.whl"
    assert (built["tinypure"]["version"], built["tinylocal"]["version"]) == ("1.1", "1.0.dev1")
    builds = {build["name"]: build for build in lock["builds"]}
    assert {name: build["cell"] for name, build in builds.items()} == {
        "tinygit": GROUP, "tinylocal": GROUP, "tinynative": f"{GROUP}-compiler", "tinypure": GROUP
    }  # fmt: skip
    assert [wheel["file"] for wheel in builds["tinypure"]["wheels"]] == ["tinybackend-1.0-py3-none-any.whl"]
    needed = [wheel for wheel in builds["tinygit"]["wheels"] if "source" in wheel]
    assert needed == [built["tinylocal"]], "its build imports the package from the folder"
    for name, wheel in built.items():
        assert stores.path(checkout.store, wheel["sha256"]).stat().st_size == wheel["size"], name
    assert "all locks unchanged" in checkout.builder("lock")
    assert "tinypure 1.1 is built from source: tinypure-1.1.tar.gz#sha256=" in checkout.builder("plan", NATIVE)
    # The wheels that exist only here survive `gc`, without an image that has them.
    checkout.builder("gc")
    assert all(stores.path(checkout.store, wheel["sha256"]).exists() for wheel in built.values())


def test_a_build_sees_no_login_and_nothing_of_this_machine(sources: Sources) -> None:
    logs = sorted((sources.checkout.root / ".builder/logs").glob("source-*.log"))
    assert len(logs) == 4
    for log in logs:
        text = log.read_text("utf-8")
        assert "environment:" in text
        assert not re.search(r"UV_INDEX|UV_DEFAULT_INDEX|PIP_INDEX_URL|DOCKER_HOST|SSL_CERT_FILE", text)
    everything = [path for path in sources.checkout.root.rglob("*") if path.is_file() and path.name != "matrix.yaml"]
    blobs = [stores.path(sources.checkout.store, sha256) for sha256 in sources.built().values()]
    for path in (*everything, *blobs):
        content = path.read_bytes()
        assert sources.password.encode() not in content, path
        if path.parent.name == "locks":
            assert sources.index.address.encode() not in content, path
    assert sources.checkout.containers() == []


def test_the_same_sources_give_the_same_wheels(sources: Sources) -> None:
    before = sources.built()
    output = sources.checkout.builder("lock", "--build", "tinynative", "--build", "tinypure", "--build", "tinygit")
    assert output.count("is the locked wheel") == 3
    assert sources.built() == before


def test_a_changed_folder_is_a_stale_lock(sources: Sources) -> None:
    checkout = sources.checkout
    module = checkout.root / "packages/tinylocal/tinylocal.py"
    module.write_text("NAME = 'other'", encoding="utf-8")
    try:
        output = checkout.builder("lock", "--check", code=5)
        assert f"locks/{GROUP}.json: tinylocal: the files of packages/tinylocal have changed" in output
    finally:
        module.write_text("NAME = 'local'", encoding="utf-8")
    assert "up to date" in checkout.builder("lock", "--check")


def test_a_build_that_needs_the_network_fails_and_changes_no_lock(sources: Sources) -> None:
    checkout = sources.checkout
    text, before = (checkout.root / "matrix.yaml").read_text("utf-8"), checkout.files("locks")
    checkout.edit(
        "matrix.yaml", "sources:\n", "  online: {packages: [tinyonline], index: company}\nsources:\n  tinyonline: {}\n"
    )
    checkout.edit("matrix.yaml", "  native: [native]\n", "  native: [native]\n  online: [online]\n")
    try:
        output = checkout.builder("lock", code=7)
        assert "tinyonline cannot be built" in output
        assert "A build has no network." in output
        assert checkout.files("locks") == before
    finally:
        (checkout.root / "matrix.yaml").write_text(text, encoding="utf-8")


def test_a_dockerfile_installs_the_wheels_without_an_index(sources: Sources) -> None:
    checkout = sources.checkout
    before, requests = checkout.image_ids(), len(sources.index.answered)
    checkout.builder("build", "--method", "dockerfile", NATIVE)
    (image,) = checkout.image_ids() - before
    program = (
        "import tinynative, tinypure; from importlib.metadata import files; print(tinynative.COMPILER[:3], "
        "tinypure.NAME, [path.name for path in files('tinypure') if path.suffix == '.json'])"
    )
    assert docker("run", "--rm", image, "python", "-c", program) == "gcc pure []", "uv notes nothing about its file"
    asked = {each.path.split("/")[2] for each in sources.index.answered[requests:]}
    assert asked == {"tinybackend"}


def test_another_machine_takes_the_wheels_from_the_registry(sources: Sources, keys: Path, tmp_path: Path) -> None:
    checkout = sources.checkout
    registries.install()
    with Server(folder=tmp_path / "registry").serving() as server:
        (checkout.root / "keys").mkdir()
        shutil.copy2(keys / "ours.pub", checkout.root / "keys/ours.pub")
        trusted = f'registry: ""\nstaging: {server.address}/staging\nevidence: [{{key: keys/ours.pub}}]'
        checkout.edit("matrix.yaml", 'registry: ""', trusted)
        checkout.builder("images", NATIVE)
        checkout.builder("stage", NATIVE, "--sign", f"{keys}/ours.key")
        checkout.builder("release", "--to", server.address, "--allow-untested-gpu", "--sign", f"{keys}/ours.key")

        away = dataclasses.replace(
            checkout, root=tmp_path, environ={**checkout.environ, "GPU_IMAGES_STORE": str(tmp_path / "store")}
        )
        reference = f"{server.address}/{checkout.references('-native')[0]}"
        away.builder("verify", reference, f"--key={keys}/ours.pub")

        checkout.take_store()
        requests = len(sources.index.answered)
        checkout.builder("build", NATIVE)
        asked = [each.path for each in sources.index.answered[requests:]]
        assert not [path for path in asked if "tinypure" in path or "tinynative" in path]
    for sha256 in sources.built().values():
        assert stores.path(checkout.store, sha256).exists()

    checkout.take_store()
    output = checkout.builder("build", NATIVE, code=13)
    assert "built from source, and neither the store nor a registry has it" in output
    assert "builder lock --build" in output
