"""A repository of a team's own, with the builder from a wheel: no file of this checkout is used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from builder.index import settings
from tests.integration import wheels
from tests.integration.index import Index
from tests.paths import ROOT

UV = Path(sys.executable).parent / "uv"
CELL = "ty-1.0-cpu-py311"
MATRIX = """\
extends: gpu-images
registry: ""
namespace: my-org
frameworks:
  tiny:
    short: ty
    image: ty-cuda
    cpu_image: ty-cpu
    package: tinyframe
    versions:
      "1.0": {release: 1.0.0, cuda: [cpu], python: ["3.11"]}
components:
  tiny: {needs: [cuda]}
  mine: {needs: [python], packages: [tinyextra]}
variants: {plain: , mine: [tools, mine]}
"""
TEST = """\
from tests.images.containers import runs


def test_greeting(host):
    assert host.file("/etc/greeting").is_file and runs
"""


def run(*command: str | Path, cwd: Path, environ: dict[str, str]) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command `builder`, from a wheel in an environment of Debian's Python."""
    folder = tmp_path_factory.mktemp("installed")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    build = ("build", "--wheel", "--no-build-isolation", "--offline", "--python", sys.executable, "--out-dir", folder)
    run(UV, *build, ROOT, cwd=folder, environ=environ)
    [wheel] = folder.glob("gpu_images-*.whl")
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    run(UV, "venv", "--python", python, folder / "venv", cwd=folder, environ=environ)
    index = settings.read_index_settings(os.environ, Path.home()).environment()
    in_venv = environ | index | {"VIRTUAL_ENV": str(folder / "venv")}
    run(UV, "pip", "install", f"{wheel}[images]", cwd=folder, environ=in_venv)
    return folder / "venv/bin/builder"


def test_a_clone_installs_the_builder_of_the_repository(builder: Path, environ: dict[str, str], tmp_path: Path) -> None:
    """Which was installed from a wheel that others do not have. A private key is in no commit."""
    own = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    run(builder, "init", "team", cwd=tmp_path, environ=own)
    (tmp_path / "team/keys").mkdir()
    for name in ("ci.key", "ci.pub"):
        (tmp_path / "team/keys" / name).touch()
    run("git", "init", "-q", cwd=tmp_path / "team", environ=own)
    run("git", "add", "-A", cwd=tmp_path / "team", environ=own)
    assert run("git", "ls-files", "keys", cwd=tmp_path / "team", environ=own) == "keys/ci.pub\n"
    run("git", "checkout-index", "-a", f"--prefix={tmp_path}/clone/", cwd=tmp_path / "team", environ=own)
    shutil.rmtree(tmp_path / "team")
    run(
        UV,
        "pip",
        "install",
        "--no-deps",
        "--target",
        "here",
        "-r",
        "requirements.txt",
        cwd=tmp_path / "clone",
        environ=own,
    )
    assert (tmp_path / "clone/here/builder/shipped/files.tar").is_file()


def test_from_init_to_the_plan(builder: Path, index: Index, environ: dict[str, str], tmp_path: Path) -> None:
    own = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    index.publish(wheels.framework("1.0.0", requires=()), wheels.extra("1.0.0"))
    run(builder, "init", "team", cwd=tmp_path, environ=own)
    team = tmp_path / "team"
    assert (team / "Makefile").is_file()
    (team / "matrix.yaml").write_text(MATRIX, encoding="utf-8")
    for name, text in {"templates/mine/files/etc/greeting": "hello\n", "tests/images/test_mine.py": TEST}.items():
        (team / name).parent.mkdir(parents=True)
        (team / name).write_text(text, encoding="utf-8")

    run(builder, "lock", cwd=team, environ=own)
    run(builder, "render", cwd=team, environ=own)
    run(builder, "render", "--check", cwd=team, environ=own)
    run(builder, "lock", "--check", cwd=team, environ=own)
    planned = json.loads(run(builder, "plan", "--format", "json", cwd=team, environ=own))

    images = {image["id"]: image for image in planned["images"]}
    assert list(images) == [CELL, f"{CELL}-mine"]
    assert images[f"{CELL}-mine"]["components"] == ["base", "python", "tiny", "tools", "mine"]
    text = (team / images[f"{CELL}-mine"]["dockerfile"]).read_text(encoding="utf-8")
    assert "templates/mine/files" in text
    assert "templates/base/files" in text
    here = builder.parent / "python"
    place = run(here, "-c", "import builder; print(builder.__file__)", cwd=team, environ=own)
    assert Path(place.strip()).is_relative_to(builder.parents[1])
