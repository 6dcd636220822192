"""The Python of the image: its version, and exactly the locked packages, compiled and importable; pip and uv."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import docker
import pytest
from docker.models.containers import Container
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from testinfra.host import Host


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

# Image tests use no package index. This writes a wheel with a module and a script to /tmp/wheels for each argument
# `NAME VERSION REQUIREMENT...`.
WRITE_WHEELS = """
import os, sys, zipfile

def write_wheel(name, version, *requirements):
    module = {"nvidia-ml-py": "pynvml"}.get(name, name.replace("-", "_"))
    stem = name.replace("-", "_") + "-" + version
    info = stem + ".dist-info/"
    files = {
        module + ".py": f"version = {version!r}\\ndef main(): print(version)\\n",
        info + "METADATA": f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n"
                           + "".join(f"Requires-Dist: {text}\\n" for text in requirements),
        info + "WHEEL": "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        info + "entry_points.txt": f"[console_scripts]\\n{name}-version = {module}:main\\n",
    }
    files[info + "RECORD"] = "".join(f"{path},,\\n" for path in (*files, info + "RECORD"))
    with zipfile.ZipFile(f"/tmp/wheels/{stem}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)

os.makedirs("/tmp/wheels", exist_ok=True)
for argument in sys.argv[1:]:
    write_wheel(*argument.split())
"""
PIP = "pip install --quiet --no-index --disable-pip-version-check --find-links /tmp/wheels"
UV = "uv pip install --offline --no-index --find-links /tmp/wheels"
REMOVE = {PIP: "pip uninstall -y", UV: "uv pip uninstall"}


class Session:
    """A shell in a container with some wheels to install; one of them has the name of the framework."""

    def __init__(self, shell: Any, subject: Any) -> None:
        self.run, self.fails = shell.run, shell.fails
        self.installers = [PIP, UV] if "uv" in subject.wheels else [PIP]
        self.framework = Requirement(subject.data["requirements"][subject.cell["framework"]][0]).name
        self.module = {"tensorflow-cpu": "tensorflow"}.get(self.framework, self.framework)
        wheels = ("harmless 1.0", "harmless 2.0.1", "nvidia-ml-py 999.0", f"{self.framework} 999.0")
        self.run(["python", "-c", WRITE_WHEELS, *wheels, f"dependent 1.0 {self.framework} nvidia-ml-py"])

    def python(self, code: str, python: str = "python") -> str:
        return str(self.run([python, "-W", "ignore", "-c", code]))

    def version(self, name: str) -> str:
        return self.python(f"import importlib.metadata as m; print(m.version({name!r}))")


@pytest.fixture
def session(shell: Callable[..., Any], subject: Any) -> Session:
    """As another user than the image's own, who has more permissions."""
    return Session(shell(user="1234:0"), subject)


WHERE = "import importlib.util as u; print(u.find_spec({!r}).origin)"


@pytest.mark.thorough
@pytest.mark.parametrize("user", ["1000:0", "1234:0"])
def test_any_version_of_any_package_is_installed(shell: Callable[..., Any], subject: Any, user: str) -> None:
    session = Session(shell(user=user), subject)
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
def test_a_package_of_the_image_is_not_installed_again(session: Session) -> None:
    """A package that needs the framework uses that of the image."""
    for install in session.installers:
        session.run(f"{install} dependent")
        assert session.python(WHERE.format(session.module)).startswith("/opt/venv/lib/")
        session.run(f"{REMOVE[install]} dependent")


@pytest.mark.thorough
def test_another_framework_version_is_refused_with_both_versions(session: Session, subject: Any) -> None:
    for install in session.installers:
        message = session.fails(f"{install} {session.framework}==999.0".replace("--quiet ", ""))
        assert "999.0" in message
        assert subject.wheels[session.framework] in message
        # In docs/workstation.md.
        assert install == UV or f"{session.framework}!=0+to.override.unset.PIP_CONSTRAINT,==" in message
    # Once: it removes gigabytes of the framework.
    session.run(f"PIP_CONSTRAINT= UV_CONSTRAINT= {install} --no-deps {session.framework}==999.0")
    assert session.version(session.framework) == "999.0"


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


# Its backend does not exist: the requirements are installed before it is called.
PROJECT = """
[build-system]
requires = ["{}"]
build-backend = "none"
"""


@pytest.mark.thorough
def test_packages_are_built_with_the_framework_of_the_image(session: Session, subject: Any) -> None:
    """A project that needs torch to build was built with the newest one."""
    session.run(f"mkdir /tmp/project; echo '{PROJECT.format(session.framework)}' >/tmp/project/pyproject.toml")
    for install in session.installers:
        assert subject.wheels[session.framework] in session.fails(f"{install} /tmp/project")
        # As for flash-attn. pip refuses this option together with build constraints, whatever the project.
        message = session.fails(f"{install} --no-build-isolation /tmp/project")
        assert "none" in message, "the backend is called"
        assert "cannot be used with" not in message


# ---- the commands in the documents

# docs/workstation.md; tests/unit/test_repository.py compares them.
DOCUMENTED = [
    "docker exec C pip install requests==2.31.0",
    "docker exec C uv pip install -r requirements.txt",
    "python -m venv .venv",
    "python -m venv --system-site-packages .venv",
]
OFFLINE = {
    "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/tmp/wheels", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "UV_OFFLINE": "1", "UV_NO_INDEX": "1", "UV_FIND_LINKS": "/tmp/wheels",
}  # fmt: skip


@pytest.fixture
def workspace(once: Callable[..., Any], new_volume: Callable[[], str], owner: int) -> dict[str, Any]:
    """A volume that only its owner can write, like a folder of the host; returns how to mount it."""
    mounted = {new_volume(): {"bind": "/workspace", "mode": "rw"}}
    prepare = "echo harmless==1.0 >/workspace/requirements.txt; chmod 755 /workspace; chown -R $0:$0 /workspace"
    assert once(["sh", "-c", prepare, str(owner)], user="root", volumes=mounted)[0] == 0
    return mounted


# Only images with Jupyter have requests, which pip must install over: two of these users install in every image.
@pytest.mark.parametrize(
    ("user", "owner"),
    [
        ("1000:0", 1000),
        ("123456:123456", 1234),
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
    session.fails([".venv/bin/python", "-c", f"import {session.module}"])
    # The constraints apply there too, and only they. The pip of an old Debian prints no reason.
    command = f".venv/bin/{PIP} --no-deps {session.framework}==999.0"
    session.fails(command)
    session.run(f"PIP_CONSTRAINT= {command}")
    if UV in session.installers:
        session.run(f"cd /tmp && uv venv --quiet other && . other/bin/activate && {UV} harmless")
        assert session.run("/tmp/other/bin/harmless-version") == "2.0.1"


@pytest.mark.thorough
@pytest.mark.parametrize("owner", [1234])
def test_an_environment_with_the_image(shell: Callable[..., Any], subject: Any, workspace: dict[str, Any]) -> None:
    """--system-site-packages: with the framework, and with the user's own packages."""
    session = Session(shell(user="1234:0", volumes=workspace), subject)
    session.run(f"{PIP} harmless==1.0")
    session.run(DOCUMENTED[3])
    python = ".venv/bin/python"
    assert session.python(WHERE.format(session.module), python).startswith("/opt/venv/lib/")
    assert session.python("import harmless; print(harmless.version)", python) == "1.0"
    # Before Python 3.12, venv installs an older setuptools than PyTorch 2.14 requires, and this test has no index.
    session.run(". .venv/bin/activate && pip uninstall --quiet --yes setuptools")
    session.run(f". .venv/bin/activate && {PIP} harmless==2.0.1 dependent")
    assert session.run(".venv/bin/harmless-version") == "2.0.1"
    assert session.run("harmless-version") == "1.0"
    assert session.python(WHERE.format(session.module), python).startswith("/opt/venv/lib/")
    session.python(f"import {session.module}", python)


# Making an environment takes 3 s of the processor: the tests above are of two other users, with a command each.
@pytest.mark.thorough
@pytest.mark.parametrize("owner", [0])
def test_root_makes_an_environment(shell: Callable[..., Any], subject: Any, workspace: dict[str, Any]) -> None:
    session = Session(shell(user="0:0", volumes=workspace, environment=OFFLINE), subject)
    session.run(DOCUMENTED[2])
    assert session.run(".venv/bin/pip --version").split()[3].startswith("/workspace/.venv/")
    session.fails([".venv/bin/python", "-c", f"import {session.module}"])


# ---- projects with a uv.lock

RESEARCH = """
[project]
name = "research"
version = "1"
requires-python = ">=3.9"
dependencies = ["{framework}", "numpy", "harmless", "first", "second"]
optional-dependencies.plots = ["optional"]

[dependency-groups]
checks = ["grouped"]
"""


class Research(Session):
    """A session in a project with the framework, numpy and three other packages. `pinned` is what the image keeps."""

    def __init__(self, shell: Any, subject: Any) -> None:
        super().__init__(shell, subject)
        text = self.run("cat /etc/pip/constraints.txt")
        self.pinned = dict(re.findall(r"^([\w.-]+)==([^,+\s]+)", text, re.MULTILINE))
        others = [f"{name} {version}" for name, version in self.pinned.items() if name != self.framework]
        # With a local version, as those of PyTorch's own index have.
        framework = f"{self.framework} {self.pinned[self.framework]}+other " + " ".join(o.split()[0] for o in others)
        numpy = f"numpy {subject.wheels['numpy']}"
        names = ("first", "second", "optional", "grouped")
        self.run(["python", "-c", WRITE_WHEELS, framework, numpy, *others, *(f"{name} 1.0" for name in names)])
        text = RESEARCH.format(framework=self.framework)
        self.run(f"mkdir /tmp/project && echo '{text}' >/tmp/project/pyproject.toml")

    def project(self, command: str) -> str:
        return str(self.run(f"cd /tmp/project && {command}"))

    def installed(self) -> dict[str, str]:
        listed = json.loads(self.run("uv pip list --format json 2>/dev/null"))
        return {entry["name"]: entry["version"] for entry in listed}


@pytest.mark.thorough
def test_uv_sync_keeps_the_framework(shell: Callable[..., Any], subject: Any) -> None:
    if "uv" not in subject.wheels:
        assert "pip install uv" in shell().fails("uv-sync")
        return
    session = Research(shell(user="1234:0", environment=OFFLINE), subject)
    before, framework = session.installed(), session.python(WHERE.format(session.module))

    # The newest framework is refused, before anything is written. The printed advice works.
    message = session.fails("cd /tmp/project && uv-sync")
    assert f"the project needs {session.framework} 999.0, the image has {before[session.framework]}" in message
    assert session.run("ls /tmp/project") == "pyproject.toml"
    session.project(message.strip().splitlines()[-1].partition(": ")[2])

    # What the image has cannot be downloaded.
    for name in (*session.pinned, "numpy"):
        session.run(f"rm /tmp/wheels/{name.replace('-', '_')}-*")
    session.project("uv-sync --locked --exact")
    assert session.installed() == before | {"harmless": "2.0.1", "first": "1.0", "second": "1.0"}
    assert session.python(WHERE.format(session.module)) == framework
    session.project("uv-sync -q --group checks --extra plots")
    assert session.installed().items() >= {"optional": "1.0", "grouped": "1.0"}.items()

    # Options about the output, which uv-sync also passes for its check.
    for options in ("-q", "-qq", "-v", "--verbose", "--dry-run"):
        session.project(f"uv-sync {options}")
    for options in ("--output-format json", "--output-format=json -v"):
        assert "sync" in json.loads(session.project(f"uv-sync {options} 2>/dev/null"))

    # A Python that the project names does not replace the environment.
    session.project("echo 3.7 >.python-version && uv-sync")
    assert session.installed().items() >= before.items()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"user": "4321:4321"},
        {"read_only": True, "tmpfs": {"/tmp": "exec", "/run": "", "/home/user": "exec,mode=1777"}},
    ],
    ids=["another user and group", "read-only"],
)
def test_uv_sync_advises_an_environment_of_their_own(
    shell: Callable[..., Any], subject: Any, options: dict[str, Any]
) -> None:
    if "uv" not in subject.wheels:
        assert "pip install uv" in shell(**options).fails("uv-sync")
        return
    session = Research(shell(environment=OFFLINE, **options), subject)
    session.project(f"uv lock -P {session.framework}=={session.pinned[session.framework]}")
    message = session.fails("cd /tmp/project && uv-sync").strip()
    assert message.startswith("uv-sync: cannot write to /opt/venv. ")
    assert "\n" not in message
    session.project(message.rpartition(": ")[2])
    python = "/tmp/project/.venv/bin/python"
    assert session.python(WHERE.format(session.module), python).startswith("/opt/venv/lib/")
    assert session.python(WHERE.format("harmless"), python).startswith("/tmp/project/.venv/")


def test_uv_sync_has_a_help(host: Host) -> None:
    assert host.check_output("uv-sync --help").startswith("uv-sync [OPTION]...: ")
