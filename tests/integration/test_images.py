"""From matrix.yaml to tagged images; without changes, a second run does nothing."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest

from tests import nvml
from tests.integration.checkout import SHORT, Checkout
from tests.integration.conftest import NewCheckout
from tests.nvml import Card


@pytest.fixture(scope="module")
def built(new_checkout: NewCheckout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout with both images, built and tested with short image tests."""
    new = new_checkout(tmp_path_factory.mktemp("built"))
    new.write_tests(SHORT)
    new.lock_and_render()
    new.builder("images")
    return new


def times(checkout: Checkout, pattern: str) -> dict[str, int]:
    """The time of each log file."""
    return {path.name: path.stat().st_mtime_ns for path in (checkout.root / ".builder/logs").glob(pattern)}


def test_every_tag_of_every_cell_exists(built: Checkout) -> None:
    tags = built.tags()
    assert set(tags) == {*built.references(), *built.references("-extra")}
    assert len({tags[reference] for reference in built.references()}) == 1
    assert len({tags[reference] for reference in built.references("-extra")}) == 1
    assert built.image_ids() == set(tags.values())


def test_no_temporary_files_or_images_are_left(built: Checkout, seed: Path) -> None:
    """Of the images, and of the layers, which another checkout made."""
    for checkout in (built, dataclasses.replace(built, root=seed.parent / "checkout")):
        assert checkout.containers() == []
        assert checkout.working_images() == []
        assert list((checkout.root.parent / "tmp").iterdir()) == []
        assert checkout.processes() == {}


def test_a_second_run_does_nothing(built: Checkout) -> None:
    before = built.tags(), times(built, "*.log")
    assert "2 images: 2 up to date" in built.builder("images")
    assert (built.tags(), times(built, "*.log")) == before


def test_no_command_runs_on_a_gpu_in_use(built: Checkout, tmp_path: Path) -> None:
    state = nvml.state("570.86.10", Card("NVIDIA H100 80GB HBM3", used=20000), cuda=12080)
    variables = {"NVIDIA_VISIBLE_DEVICES": "all", "GPU_BUSY": "refuse", nvml.VARIABLE: state}
    options = [f"--env={name}={value}" for name, value in variables.items()]
    options.append(f"--volume={nvml.build(tmp_path)}:{nvml.IN_CONTAINER}:ro")
    command = ["docker", "run", "--rm", *options, built.references()[0], "echo", "started"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (75, ""), ended.stderr
    assert "GPU 0 (NVIDIA H100 80GB HBM3): 20971 MB used" in ended.stderr
