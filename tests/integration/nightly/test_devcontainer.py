"""The dev container CLI with examples/devcontainer.json and the tiny image: its user gets the ids of the host's."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from builder.index import host
from tests.integration import programs
from tests.integration.checkout import ROOT, Checkout, docker
from tests.integration.index import Index
from tests.integration.wheels import wheel

pytestmark = pytest.mark.skipif(not host.is_debian(), reason="only on Debian, whose npm is installed here")

CLI = "@devcontainers/cli@0.89.0"  # needs Node 20
SOCKET = Path("/var/run/docker.sock")
TIMEOUT_S = 300
IMAGE = '"registry.example.com/org/pt-cuda:2.15-devel"'
SHM = '["--shm-size=8g"]'


@dataclass(frozen=True)
class DevContainer:
    """The dev container of a folder, used by the user who owns the folder."""

    cli: Path
    folder: Path
    user: int

    def devcontainer(self, *arguments: str) -> str:
        """The output of the CLI, run as the folder's owner, who may use Docker's socket."""
        command, *words = arguments
        done = subprocess.run(
            [str(self.cli), command, "--workspace-folder", str(self.folder), *words],
            env={**os.environ, "HOME": str(self.folder)}, cwd=self.folder, user=self.user, group=self.user,
            extra_groups=[SOCKET.stat().st_gid], capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def execute(self, command: str) -> str:
        return self.devcontainer("exec", "sh", "-ec", command).strip()


@pytest.fixture(scope="module")
def cli() -> Iterator[Path]:
    """The program, in a folder that every user can read."""
    programs.install("npm")
    with TemporaryDirectory(prefix="devcontainers-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        npm = ["npm", "install", "--no-save", "--no-package-lock", "--ignore-scripts", "--prefix", name, CLI]
        subprocess.run(npm, cwd=folder, capture_output=True, timeout=TIMEOUT_S, check=True)
        yield folder / "node_modules/.bin/devcontainer"


@contextmanager
def named(user: int) -> Iterator[None]:
    """Gives a user of this machine a name, without which the CLI fails."""
    try:
        pwd.getpwuid(user)
    except KeyError:
        name = f"devcontainer-{os.getpid()}"
        subprocess.run(["useradd", "--uid", str(user), "--no-create-home", name], capture_output=True, check=True)
        try:
            yield
        finally:
            # By force: processes of containers may have the same id.
            subprocess.run(["userdel", "--force", name], capture_output=True, check=True)
    else:
        yield


@pytest.fixture
def start(cli: Path, released_once: Checkout) -> Iterator[Callable[[int], DevContainer]]:
    """A function that starts a dev container in a new folder of a user; all are removed at the end."""
    with TemporaryDirectory(prefix="devcontainer-") as name:
        top = Path(name)
        top.chmod(0o755)

        def start_as(user: int) -> DevContainer:
            example = (ROOT / "examples/devcontainer.json").read_text(encoding="utf-8")
            assert example.count(IMAGE) == example.count(SHM) == 1
            # The index of the tests listens on this machine's loopback.
            image = json.dumps(released_once.references()[0])
            example = example.replace(IMAGE, image).replace(SHM, '["--network=host"]')
            folder = top / f"of-{user}"
            (folder / ".devcontainer").mkdir(parents=True)
            (folder / ".devcontainer/devcontainer.json").write_text(example, encoding="utf-8")
            for path in (folder, folder / ".devcontainer"):
                os.chown(path, user, user)
            container = DevContainer(cli, folder, user)
            result = json.loads(container.devcontainer("up").splitlines()[-1])
            assert result["remoteUser"] == "user"
            return container

        yield start_as
        for folder in top.iterdir():
            # By the label that the CLI sets: an `up` that fails does not print the id of its container.
            label = f"label=devcontainer.local_folder={folder}"
            for container in docker("ps", "-aq", "--filter", label).split():
                image = docker("inspect", "--format", "{{.Config.Image}}", container)
                docker("rm", "--force", "--volumes", container)
                if image.startswith("vsc-"):  # what the CLI made of the image
                    docker("image", "rm", "--force", image)


@pytest.mark.parametrize("user", [1000, 1234, 0])
def test_the_user_of_a_dev_container_can_install(start: Callable[[int], DevContainer], index: Index, user: int) -> None:
    """The CLI took the user out of group 0, and gave group root the gid of the host's user."""
    index.publish(*(wheel(f"dev-by-{name}", "1.0", {f"dev_by_{name}.py": b""}) for name in ("pip", "uv")))
    with named(user):
        check(start(user), index, user)


def check(container: DevContainer, index: Index, user: int) -> None:
    uid = str(user or 1000)  # the CLI changes nothing for root
    assert container.execute("id -un; id -u; id -g; getent group root | cut -d : -f 1-3").split() == [
        "user", uid, uid, "root:x:0",
    ]  # fmt: skip
    assert "0" in container.execute("id -G").split()
    assert container.execute("echo $HOME; touch ~/mine && stat -c %u ~/mine").split() == ["/home/user", uid]
    if user:
        container.execute("touch mine")
        assert (container.folder / "mine").stat().st_uid == user
    options = f"--no-cache-dir --disable-pip-version-check --index-url {index.url}"
    container.execute(f"pip install {options} dev-by-pip uv")
    container.execute(f"python -m uv pip install --no-cache --default-index {index.url} dev-by-uv")
    modules = "dev_by_pip, dev_by_uv, tinyframe"
    assert container.execute(f"python -c 'import {modules}; print(dev_by_pip.__file__)'").startswith("/opt/venv/")
    container.execute("check-services")
