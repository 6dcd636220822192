"""Packages are put on an image from registry to registry, by the real uv, without an engine and without a checkout.

Requests that are refused, labels and layers: tests/unit/steps/test_add.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from builder.common.reference import ImageRef
from builder.common.tasks import RetryPolicy
from builder.index.host import Host
from builder.layers import oci
from builder.layers.oci import LAYER_TYPE, MANIFEST_TYPE, Descriptor
from builder.lock.python_builds import uv_program
from builder.registry import transfer
from builder.registry.client import Repository
from tests.fakes.registry import MemoryRegistry
from tests.integration.builder_process import BuilderProcess
from tests.integration.checkout import OURS, Running, until
from tests.integration.index import Index
from tests.integration.registry import Fault, Proxy, Server, Trouble
from tests.integration.wheels import Distribution, wheel
from tests.unit.release.parents import ParentImage, plain, project

POLICY = RetryPolicy(connect_s=5, read_s=20, retries=1, first_delay_s=0.05)


@dataclass
class Team:
    """A folder of a team: no checkout. The index does not have ember, the framework of the parent."""

    folder: Path
    proxy: Proxy
    index: Index
    _outputs: Iterator[int] = field(default_factory=count)

    def push_parent(self, *, ember: str = "1.9") -> str:
        """Makes the parent anew, and moves its tag; returns its digest."""
        memory = MemoryRegistry()
        image = ParentImage(memory)
        image.layers[0] = image.wheels(project("ember", version=ember), project("tinylib"))
        image.layers[2] = "files", image.layer(plain({"etc/pip/constraints.txt": f"ember=={ember}\n".encode()}))
        digest = image.push("1")
        content = memory.contents[digest]
        files: dict[Descriptor, Path | None] = {}
        for blob in oci.read_blobs(content):
            path = self.folder / blob.removeprefix("sha256:")
            path.write_bytes(memory.contents[blob])
            files[Descriptor(media_type=LAYER_TYPE, digest=blob, size=path.stat().st_size)] = path
        repository = self.repository("org/em")
        transfer.send_blobs(repository, files)
        return repository.put_manifest("1", content, MANIFEST_TYPE)

    def repository(self, name: str) -> Repository:
        reference = ImageRef(registry=self.proxy.address, repository=name)
        return Repository(reference, host=Host(), write=True, policy=POLICY)

    def start(self, *arguments: str, command: str = "add") -> Running:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        environ = inherited | {
            "UV_DEFAULT_INDEX": self.index.url, "PIP_INDEX_URL": self.index.url,
            "GPU_IMAGES_STORE": str(self.folder / "store"), "DOCKER_CONFIG": str(self.folder / "docker"),
            "DOCKER_HOST": "unix:///nonexistent", "COSIGN_PASSWORD": "",
        }  # fmt: skip
        output = self.folder / f"output-{next(self._outputs)}.txt"
        return Running(BuilderProcess([command, *arguments], environ, output, self.folder), output, _has_no_traceback)

    def add(self, *arguments: str, code: int = 0, command: str = "add") -> str:
        return self.start(*arguments, command=command).ends(code, within_s=120)

    def verify(self, *arguments: str, code: int = 0) -> str:
        return self.add(*arguments, code=code, command="verify")

    @property
    def parent(self) -> str:
        return f"{self.proxy.address}/org/em:1"

    def target(self, name: str) -> str:
        return f"{self.proxy.address}/team/{name}:1"

    def config(self, name: str) -> dict[str, Any]:
        repository = self.repository(f"team/{name}")
        manifest = repository.manifest("1")
        assert manifest
        config: dict[str, Any] = json.loads(repository.read_blob(json.loads(manifest.content)["config"]["digest"]))
        return config


def _has_no_traceback(output: str) -> None:
    assert "Traceback" not in output, output


@pytest.fixture(scope="module")
def _registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with Server(folder=tmp_path_factory.mktemp("registry")).serving() as server, Proxy(server).serving() as proxy:
        yield proxy


@pytest.fixture
def team(_registry: Proxy, tmp_path: Path) -> Iterator[Team]:
    with Index().serving() as index:
        index.publish(
            wheel("einops", "0.8", {"einops/__init__.py": b""}),
            wheel("plugin", "1", {"plugin.py": b""}, requires=["ember>=1.5", "einops"]),
            wheel("newest", "1", {"newest.py": b""}, requires=["ember>=2"]),
            wheel("mover", "1", {"mover.py": b""}, requires=["tinylib<1.9"]),
            wheel("tinylib", "1.8", {"tinylib/new.py": b""}),
            Distribution(project="tinylib", file=(tiny := project("tinylib")).name, content=tiny.content),
            Distribution(project="big", file=(big := _big()).file, content=big.content),
        )
        team = Team(tmp_path, _registry, index)
        team.push_parent()
        yield team
        _registry.heal()


def _big() -> Distribution:
    return wheel("big", "1", {"big/data.bin": os.urandom(3_000_000)})


def test_from_registry_to_registry(team: Team) -> None:
    """The metadata of the framework comes from the image: the index does not have it."""
    team.proxy.heal()
    output = team.add(team.parent, "plugin", "-t", team.target("vision"))
    assert "2 new, 0 moved, 2 kept, ember 1.9 unchanged" in output
    assert team.proxy.count("POST", "mount=") >= 3, "the layers of the parent are mounted"
    assert team.proxy.got["PUT"] < 20_000
    assert team.config("vision")["history"][-1]["created_by"].count(".whl@sha256:") == 2
    assert not list((team.folder / "store/downloads").iterdir())

    again = team.add(team.parent, "plugin", "-t", team.target("vision"))
    assert output.partition("@")[2][:71] == again.partition("@")[2][:71], "the same bytes"


def test_a_conflict_names_the_package_of_the_parent(team: Team) -> None:
    output = team.add(team.parent, "newest", "-t", team.target("conflict"), code=4)
    assert "newest depend on ember>=2 and ember==1.9" in output
    assert team.repository("team/conflict").digest_of("1") is None
    output = team.add(team.parent, "ember==2", "-t", team.target("conflict"), code=4)
    assert "ember==2 and ember==1.9" in output


def test_a_package_of_the_parent_moves_and_stays_moved(team: Team, keys: Path) -> None:
    """Of an image, of one that is made from it, and of its next release; `verify` reads the new version."""
    sign = ("--sign", f"{keys}/ours.key")
    output = team.add(team.parent, "mover", "-t", team.target("moved"), *sign)
    assert "resolve  tinylib 1.9 -> 1.8\nresolve  1 new, 1 moved, 1 kept, ember 1.9 unchanged" in output
    assert "parent" in team.verify(team.target("moved"), "--key", f"{keys}/ours.pub")
    output = team.add(team.target("moved"), "tinylib", "einops", "-t", team.target("above"))
    assert "resolve  tinylib 1.8\n" in output
    assert "1 new, 0 moved, 3 kept" in output
    team.push_parent(ember="1.10")
    output = team.add("--refresh", team.target("moved"), *sign)
    assert "ember 1.9 -> 1.10" in output
    assert "1 new, 1 moved, 1 kept" in output
    output = team.add(team.parent, "mover", "--keep", "-t", team.target("kept"), code=4)
    assert "only tinylib==1.9 is available" in output


def test_the_project_of_a_team(team: Team) -> None:
    """The line of docs/team-images.md, for a project whose uv.lock has another version of the framework."""
    team.index.publish(wheel("ember", "1.8", {"ember.py": b""}))
    (team.folder / "pyproject.toml").write_text(
        '[project]\nname = "vision"\nversion = "0"\nrequires-python = ">=3.9"\n'
        'dependencies = ["Plugin>=1", "einops; python_version >= \'3.10\'"]\n[dependency-groups]\ndev = ["big"]\n'
    )
    options = ["--no-config", "--python", sys.executable, "--default-index", team.index.url]
    cache = {**os.environ, "UV_CACHE_DIR": f"{team.folder}/cache"}
    export = ["export", "--no-dev", "--no-emit-project", "--prune", "ember", "-o", "requirements.txt"]
    for arguments in (["lock"], export):
        command = [uv_program(), *arguments, *options]
        subprocess.run(command, cwd=team.folder, env=cache, check=True, capture_output=True, timeout=60)
    team.index.publish(wheel("einops", "0.9", {"einops/__init__.py": b""}))
    output = team.add(team.parent, "-r", "requirements.txt", "-t", team.target("project"))
    assert "2 new, 0 moved, 2 kept, ember 1.9 unchanged" in output
    record = json.loads(team.config("project")["config"]["Labels"]["io.github.gpu-images.added"])
    assert all("--hash=sha256:" in text for text in record["requirements"])


def test_a_killed_push_leaves_no_tag(team: Team) -> None:
    name = "killed"
    team.proxy.heal()
    team.proxy.troubles.append(Trouble(fault=Fault.STALLS, method="PUT", path=f"team/{name}/blobs/uploads/"))
    run = team.start(team.parent, "big", "-t", team.target(name))
    until(lambda: team.proxy.count("PUT", f"team/{name}/blobs"), "the upload", seconds=60)
    run.process.kill()
    run.process.wait(30)
    team.proxy.heal()
    assert team.repository(f"team/{name}").digest_of("1") is None
    team.add(team.parent, "big", "-t", team.target(name))
    assert team.repository(f"team/{name}").digest_of("1")


def test_all_images_of_a_file_or_none(team: Team) -> None:
    lines = [
        f"  - {{image: '{team.target(name)}', parent: '{team.parent}', packages: [{package}]}}\n"
        for name, package in (("one", "einops"), ("two", "big"))
    ]
    (team.folder / "team.yaml").write_text("images:\n" + "".join(lines))
    team.proxy.troubles.append(Trouble(fault=Fault.STATUS_507, method="PUT", path="team/two/blobs", times=99))
    team.add("-f", "team.yaml", code=14)
    assert team.repository("team/one").digest_of("1") is None
    team.proxy.heal()
    team.add("-f", "team.yaml")
    assert all(team.repository(f"team/{name}").digest_of("1") for name in ("one", "two"))


def test_a_signed_image_is_a_trusted_parent_under_its_tag(team: Team, keys: Path) -> None:
    team.add(team.parent, "einops", "-t", team.target("signed"), "--sign", f"{keys}/ours.key")
    output = team.add(team.target("signed"), "plugin", "-t", team.target("child"), "--key", f"{keys}/ours.pub")
    assert "signature checked" in output
    refused = team.target("refused")
    output = team.add(team.target("signed"), "plugin", "-t", refused, "--key", f"{keys}/theirs.pub", code=15)
    assert "no trusted signer signed it" in output
    # Who may only move tags must not offer an old image as another one.
    repository = team.repository("team/signed")
    manifest = repository.manifest("1")
    assert manifest
    repository.put_manifest("2", manifest.content, manifest.media_type)
    moved = team.target("signed").removesuffix("1") + "2"
    output = team.add(moved, "plugin", "-t", refused, "--key", f"{keys}/ours.pub", code=15)
    assert "signed for 1, not for 2" in output
    assert team.repository("team/refused").digest_of("1") is None
