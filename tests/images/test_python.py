"""The Python of the image: its version, and exactly the locked packages, compiled and importable; pip and uv."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import docker
import pytest
from docker.models.containers import Container
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from testinfra.host import Host

from tests.images.packages import DOCUMENTED, OFFLINE, PIP, REMOVE, UV, WRITE_WHEELS, Session


def test_version_is_that_of_the_cell(subject: Any, python: Callable[[str], Any]) -> None:
    result = python("import sys, json; print(json.dumps([sys.prefix, '%d.%d' % sys.version_info[:2]]))")
    assert result == ["/opt/venv", subject.cell["python"]]


def test_exactly_the_locked_packages_are_installed(subject: Any, python: Callable[[str], Any]) -> None:
    code = """
import importlib.metadata as metadata, json
print(json.dumps([(d.metadata["Name"], d.version) for d in metadata.distributions()]))
"""
    installed = [(canonicalize_name(name), version) for name, version in python(code)]
    assert sorted(installed) == sorted(subject.wheels.items())


def test_every_file_that_a_package_records_exists(python: Callable[[str], Any]) -> None:
    """NVIDIA's wheels too: cuda-pathfinder and others find libraries this way."""
    code = """
import importlib.metadata as metadata, json, os
files = [str(file.locate()) for d in metadata.distributions() for file in d.files or ()]
print(json.dumps([len(files), [path for path in files if not os.path.exists(path)]]))
"""
    count, missing = python(code)
    assert count > 100
    assert missing == []


def test_requirements_are_met(host: Host) -> None:
    result = host.run("python -m pip check --disable-pip-version-check")
    assert result.rc == 0, result.stdout


def test_every_requested_package_is_importable(subject: Any, python: Callable[[str], Any]) -> None:
    """Except CUDA's wheels, which have libraries but no modules, and metapackages, which are empty."""
    requested = [Requirement(text).name for texts in subject.data["requirements"].values() for text in texts]
    names = [name for name in requested if canonicalize_name(name) not in subject.data["cuda_wheels"]]
    # pip last: importing it loads Python's own distutils, with which setuptools does not work.
    names.sort(key=lambda name: name == "pip")
    code = f"""
import importlib, importlib.metadata as metadata, json
names = {names!r}
failed = dict()
for name in names:
    files = metadata.distribution(name).files or ()
    if files and all(file.parts[0].endswith(".dist-info") for file in files):
        continue
    tops = set()
    for file in files:
        if file.suffix in (".py", ".so"):
            tops.add(file.parts[0] if len(file.parts) > 1 else file.name.split(".")[0])
    public = sorted(m for m in tops if not m.startswith("_") and m.isidentifier())
    if not public:
        failed[name] = "has no module"
    for module in public:
        try:
            importlib.import_module(module)
        except Exception as error:
            failed[name] = module + ": " + repr(error)
print(json.dumps(failed))
"""
    assert names
    assert python(code) == {}


def test_modules_are_compiled_without_time_stamps(python: Callable[[str], Any]) -> None:
    """Flags 1 in a .pyc: hash-based and unchecked (PEP 552). Except files .pyc that a wheel contains, and tests."""
    code = """
import importlib.metadata as metadata, importlib.util, json, pathlib, sys
in_wheels = set()
for distribution in metadata.distributions():
    files = [file for file in distribution.files or () if file.suffix == ".pyc" and file.hash]
    in_wheels |= {str(pathlib.Path(distribution.locate_file(file)).resolve()) for file in files}
counts = dict(unchecked=0, other=[])
site = pathlib.Path("/opt/venv/lib/python/site-packages")
for source in site.rglob("*.py"):
    if source.relative_to(site).parts[0] == "nvidia":  # the same for every Python
        continue
    compiled = pathlib.Path(importlib.util.cache_from_source(str(source)))
    if str(compiled) in in_wheels:
        continue
    in_image = compiled.exists() and compiled.stat().st_uid == 0  # another test's import wrote the others
    if not set(("test", "tests")).isdisjoint(source.relative_to(site).parts[:-1]):
        assert not in_image, compiled
        continue
    if in_image:
        if compiled.read_bytes()[4:8] == bytes([1, 0, 0, 0]):
            counts["unchecked"] += 1
        else:
            counts["other"].append(str(source))
    else:
        try:
            compile(source.read_bytes(), str(source), "exec")
        except (SyntaxError, ValueError):
            continue
        counts["other"].append(str(source) + ": not compiled")
print(json.dumps(counts))
"""
    counts = python(code)
    assert counts["other"] == []
    assert counts["unchecked"] > 100


def test_pip_list_has_all_packages(host: Host, subject: Any) -> None:
    listed = json.loads(host.check_output("python -m pip list --format json --disable-pip-version-check"))
    assert {canonicalize_name(entry["name"]) for entry in listed} == set(subject.wheels)


# ---- packages that users install: in the environment of the image, and in their own


@pytest.mark.thorough
def test_any_version_of_any_package_is_installed(session: Session) -> None:
    assert session.python("import pynvml; print(pynvml.__file__)").startswith("/opt/venv/lib/")
    for install in session.installers:
        session.run(f"{install} harmless==1.0 nvidia-ml-py==999.0")
        assert session.python("import pynvml; print(pynvml.version)") == "999.0"
        assert session.version("nvidia-ml-py") == "999.0"
        assert session.run("harmless-version") == "1.0"
        session.run(f"{install} harmless==2.0.1")
        assert session.run("harmless-version") == "2.0.1"
        session.run(f"{REMOVE[install]} nvidia-ml-py")
        session.fails(["python", "-c", "import pynvml"])


@pytest.mark.thorough
def test_pip_install_user(session: Session) -> None:
    session.run(f"{PIP} --user harmless")
    assert session.run("harmless-version") == "2.0.1"


@pytest.mark.thorough
def test_a_user_outside_group_0_installs_into_the_home(shell: Callable[..., Any], subject: Any) -> None:
    session = Session(shell(user="1234:1234"), subject)
    session.run(f"{PIP} harmless")
    assert session.python("import harmless; print(harmless.__file__)").startswith("/home/user/.local/")
    assert session.run("harmless-version") == "2.0.1"
    assert session.run(["bash", "-lc", "harmless-version"]) == "2.0.1"
    # In docs/workstation.md: pip removes nothing outside its environment.
    assert "outside environment" in session.run("pip uninstall -y harmless")
    session.run("/usr/bin/python3 -m pip uninstall -y --break-system-packages harmless")
    session.fails(["python", "-c", "import harmless"])
    # Python's own rule: packages of the image precede those in the home.
    assert "sys.path precedence" in session.fails(f"{PIP} nvidia-ml-py==999.0")


@pytest.mark.thorough
def test_pip_works_with_a_read_only_root(shell: Callable[..., Any], subject: Any) -> None:
    session = Session(
        shell(read_only=True, tmpfs={"/tmp": "exec", "/run": "", "/home/user": "exec,mode=1777"}), subject
    )
    session.run(f"{PIP} harmless")
    assert session.python("import harmless; print(harmless.__file__)").startswith("/home/user/.local/")


@pytest.mark.thorough
def test_files_below_lib_can_be_installed(session: Session) -> None:
    """Like those in the wheels of oneAPI."""
    session.run("mkdir /opt/venv/lib/cmake && touch /opt/venv/lib/libown.so /opt/venv/lib/python/x")


# ---- derived images

# docs/workstation.md; tests/unit/test_repository.py compares them.
DERIVED = [
    "FROM org/pt-cuda:2.9-jupyter",
    "USER root",
    "RUN apt-get update && apt-get install -y --no-install-recommends ffmpeg && rm -rf /var/lib/apt/lists/*",
    "USER 1000:0",
    "RUN pip install --no-cache-dir torchcodec==0.9.1",
    "RUN uv pip install --no-cache albumentations",
]
# Makes stand-ins for these packages the only ones that apt, pip and uv can install.
WRITE_STAND_INS = r"""
set -eu
python /tmp/write_wheels.py "torchcodec 0.9.1" "albumentations 1.0"
mkdir -p /tmp/debs/ffmpeg/DEBIAN /tmp/debs/ffmpeg/usr/bin
cd /tmp/debs
printf '#!/bin/sh\necho stand-in\n' >ffmpeg/usr/bin/ffmpeg
chmod 0755 ffmpeg/usr/bin/ffmpeg
printf '%s\n' 'Package: ffmpeg' 'Version: 1' 'Architecture: all' 'Maintainer: t' 'Description: t' >ffmpeg/DEBIAN/control
dpkg-deb --build ffmpeg ffmpeg.deb
sum=$(sha256sum <ffmpeg.deb | cut -c1-64)
{
    cat ffmpeg/DEBIAN/control
    printf '%s\n' 'Filename: ./ffmpeg.deb' "Size: $(stat -c %s ffmpeg.deb)" "SHA256: $sum"
} >Packages
rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/*
echo 'deb [trusted=yes] file:/tmp/debs ./' >/etc/apt/sources.list
"""

# Options of `docker run` with which a derived image must have the packages that were installed when it was built.
RUN_OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "another user of group 0": {"user": "1234:0"},
    "another user and group": {"user": "1234:1234"},
    "read-only": {"read_only": True, "tmpfs": {"/tmp": "exec", "/run": ""}},
    "read-only, another user and group": {
        "read_only": True, "tmpfs": {"/tmp": "exec", "/run": "", "/home/user": "exec,mode=1777"}, "user": "1234:1234",
    },
    "as the Compose example": {
        "read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges"],
        "tmpfs": {"/tmp": "exec", "/run": "", "/home/user": "exec,mode=1777"},
    },
}  # fmt: skip


def build(docker_client: docker.DockerClient, subject: Any, lines: list[str], files: dict[str, str]) -> str:
    """Builds an image with lines of a Dockerfile and files; returns its id."""
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        for name, text in {"Dockerfile": "\n".join(lines), **files}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    context.seek(0)
    image, _ = docker_client.images.build(
        # Without the cache, which another process of these tests may be about to remove.
        fileobj=context, custom_context=True, network_mode="none", rm=True, forcerm=True, nocache=True,
        labels=subject.data["labels"],
    )  # fmt: skip
    return str(image.id)


def remove(docker_client: docker.DockerClient, subject: Any, image: str, parent: str) -> None:
    """Removes an image and its parents up to `parent`, which stays."""
    if subject.data["engine"] == "Podman":  # its version 4 ignores `noprune`; the next builder removes these images
        return
    while image not in ("", parent):
        # Also those that the engine made for each line: they kept the image under test from being removed.
        before = docker_client.images.get(image).attrs["Parent"]
        docker_client.images.remove(image, noprune=True)
        image = before


@pytest.fixture(scope="module")
def offline(docker_client: docker.DockerClient, subject: Any) -> Iterator[str]:
    """The image with stand-ins, which are all that apt, pip and uv can install."""
    lines = [
        f"FROM {subject.image_id.removeprefix('sha256:')}",
        "USER root",
        "COPY write_wheels.py write_stand_ins.sh /tmp/",
        "RUN sh /tmp/write_stand_ins.sh",
        "ENV " + " ".join(f"{name}={value}" for name, value in OFFLINE.items()),
        "USER 1000:0",
    ]
    files = {"write_wheels.py": WRITE_WHEELS, "write_stand_ins.sh": WRITE_STAND_INS}
    image = build(docker_client, subject, lines, files)
    yield image
    remove(docker_client, subject, image, subject.image_id)


@pytest.fixture
def derive(docker_client: docker.DockerClient, subject: Any, offline: str) -> Iterator[Callable[[list[str]], str]]:
    """A function that builds a derived image with lines of a Dockerfile; returns its id."""
    images: list[str] = []

    def build_derived(lines: list[str]) -> str:
        images.append(build(docker_client, subject, [f"FROM {offline.removeprefix('sha256:')}", *lines], {}))
        return images[-1]

    yield build_derived
    for image in images:
        remove(docker_client, subject, image, offline)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("lines", "packages"),
    [
        (DERIVED[1:], ["ffmpeg", "torchcodec", "albumentations"]),
        (DERIVED[5:], ["albumentations"]),
        ([*DERIVED[1:3], *DERIVED[4:], "USER 1000:0"], ["ffmpeg", "torchcodec", "albumentations"]),
    ],
    ids=["as documented", "without root", "all as root"],
)
def test_a_derived_image_has_its_packages_however_it_runs(
    start: Callable[..., Container], subject: Any, derive: Callable[[list[str]], str], lines: list[str],
    packages: list[str],
) -> None:  # fmt: skip
    image = derive(lines if "uv" in subject.wheels else [line.replace("uv pip", "pip") for line in lines])
    programs = {"ffmpeg": "stand-in", "torchcodec-version": "0.9.1", "albumentations-version": "1.0"}
    expected = {name: output for name, output in programs.items() if name.removesuffix("-version") in packages}
    # Options of `docker run` do not depend on who installed: the documented image is run with all of them.
    names = RUN_OPTIONS if lines == DERIVED[1:] else ["as it is", "read-only, another user and group"]
    for name in names:
        options = RUN_OPTIONS[name]
        container = start(["sh", "-c", " && ".join(expected)], image=image, **options)
        status = container.wait(timeout=60)["StatusCode"]
        output = container.logs(stdout=True, stderr=False).decode().split()
        assert (status, output) == (0, list(expected.values())), (name, container.logs().decode())
        container.remove(v=True)


# ---- the commands in the documents


# Only images with Jupyter have requests, which pip must install over: one of these users installs in every image.
@pytest.mark.parametrize(
    ("user", "owner"),
    [
        ("1000:0", 1000),
        pytest.param("123456:123456", 1234, marks=pytest.mark.thorough),
        pytest.param("1234:0", 1234, marks=pytest.mark.thorough),
        pytest.param("0:0", 0, marks=pytest.mark.thorough),
    ],
)
def test_the_commands_in_the_documents_work(
    shell: Callable[..., Any], subject: Any, workspace: dict[str, Any], user: str, owner: int
) -> None:
    container = shell(user=user, volumes=workspace, environment=OFFLINE)
    container.run(["python", "-c", WRITE_WHEELS, "requests 2.31.0", "harmless 1.0"])
    version = "python -c 'import importlib.metadata as m, sys; print(m.version(sys.argv[1]))' "
    with_pip, with_uv = (command.removeprefix("docker exec C ") for command in DOCUMENTED[:2])
    if user.startswith("123456"):  # users outside group 0 use pip, and do not replace packages of the image
        with_pip, with_uv = "true", with_uv.removeprefix("uv ")
    container.run(with_pip)
    assert with_pip == "true" or container.run(f"{version} requests") == "2.31.0"
    if "uv" in subject.wheels or not with_uv.startswith("uv "):
        container.run(with_uv)
        assert container.run(f"{version} harmless") == "1.0"


@pytest.mark.thorough
@pytest.mark.parametrize(("user", "owner"), [("123456:123456", 1234), ("1000:0", 0), ("1234:0", 1000)])
def test_a_workspace_of_another_user_is_not_writable(
    shell: Callable[..., Any], workspace: dict[str, Any], user: str
) -> None:
    container = shell(user=user, volumes=workspace)
    for command in DOCUMENTED[2:]:
        assert "Permission denied" in container.fails(command)


@pytest.mark.thorough
@pytest.mark.parametrize("owner", [1000])
def test_an_environment_without_the_image(shell: Callable[..., Any], subject: Any, workspace: dict[str, Any]) -> None:
    session = Session(shell(user="1000:0", volumes=workspace), subject)
    session.run(DOCUMENTED[2])
    assert session.run(".venv/bin/pip --version").split()[3].startswith("/workspace/.venv/")
    session.run(f". .venv/bin/activate && {PIP} harmless && test $(command -v pip) = /workspace/.venv/bin/pip")
    assert session.python("import harmless; print(harmless.__file__)", ".venv/bin/python").startswith(
        "/workspace/.venv/"
    )
    session.fails(["python", "-c", "import harmless"])
    session.fails([".venv/bin/python", "-c", "import pynvml"])
    if UV in session.installers:
        session.run(f"cd /tmp && uv venv --quiet other && . other/bin/activate && {UV} harmless")
        assert session.run("/tmp/other/bin/harmless-version") == "2.0.1"


# Making an environment takes 3 s of the processor, so other users make theirs in other tests.
@pytest.mark.thorough
@pytest.mark.parametrize("owner", [0])
def test_root_makes_an_environment(shell: Callable[..., Any], subject: Any, workspace: dict[str, Any]) -> None:
    session = Session(shell(user="0:0", volumes=workspace, environment=OFFLINE), subject)
    session.run(DOCUMENTED[2])
    assert session.run(".venv/bin/pip --version").split()[3].startswith("/workspace/.venv/")
    session.fails([".venv/bin/python", "-c", "import pynvml"])


def test_uv_sync_has_a_help(host: Host) -> None:
    assert host.check_output("uv-sync --help").startswith("uv-sync [OPTION]...: ")
