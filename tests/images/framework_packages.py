"""What pip, uv and uv-sync do beside the framework of an image. The test files of the frameworks import these tests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.images.packages import DOCUMENTED, OFFLINE, PIP, REMOVE, UV, WHERE, WRITE_WHEELS, Session


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
    # The constraints apply there too, and only they. The pip of an old Debian prints no reason.
    command = f".venv/bin/{PIP} --no-deps {session.framework}==999.0"
    session.fails(command)
    session.run(f"PIP_CONSTRAINT= {command}")


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
