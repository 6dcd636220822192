"""A real browser, Debian's Chromium without a screen, and a running Jupyter image with PyTorch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from docker.models.containers import Container
from selenium import webdriver
from selenium.common.exceptions import NoSuchFrameException, NoSuchWindowException, StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from builder.engine.client import Engine
from tests import nvml
from tests.nvml import Card

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs/pictures"
START_S = 90
T = TypeVar("T")


@dataclass(frozen=True)
class Running:
    container: Container
    url: str
    token: str


def newest_image() -> str:
    """The id of the newest tagged PyTorch image with Jupyter."""
    known = Engine.connect().images("io.github.gpu-images.framework=pytorch")
    images = [
        image for image in known if image.tags and "jupyter" in image.labels["io.github.gpu-images.components"].split()
    ]
    assert images, "no Jupyter image of PyTorch is built: make images"
    return images[0].id


def jupyter(**options: Any) -> Iterator[Running]:
    """A container of the newest image."""
    container = Engine.connect().start(newest_image(), checkout=str(ROOT), ports=[8888], shm_size="1g", **options)
    try:
        token = wait(lambda: re.search(r"\?token=([0-9a-f]{48})", container.logs().decode()), "the address in the log")
        container.reload()
        port = container.attrs["NetworkSettings"]["Ports"]["8888/tcp"][0]["HostPort"]
        yield Running(container, f"http://127.0.0.1:{port}", token[1])
    finally:
        container.remove(force=True, v=True)


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    yield from jupyter()


@pytest.fixture
def with_gpus(tmp_path: Path) -> Iterator[Running]:
    """With a stand-in for NVIDIA's driver, which tells of two GPUs."""
    h100 = Card("NVIDIA H100 80GB HBM3", "9.0", 81559, 60000, 41)
    told = nvml.state("570.86.10", h100, Card("NVIDIA H100 80GB HBM3", "9.0", 81559, 12000, 87), cuda=12080)
    library = {str(nvml.build(tmp_path)): {"bind": nvml.IN_CONTAINER, "mode": "ro"}}
    yield from jupyter(volumes=library, environment={nvml.VARIABLE: told.replace("\n", "; ")})


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    """A new profile for each test: nobody is logged in."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (program and driver):
        command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "chromium", "chromium-driver"]
        subprocess.run(["apt-get", "update", "-q"], check=True, capture_output=True)
        subprocess.run(
            command, check=True, capture_output=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        )
        program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    options = Options()
    options.binary_location = str(program)
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1400,900",
        "--no-proxy-server", f"--user-data-dir={tmp_path}/profile",
    ):  # fmt: skip
        options.add_argument(argument)
    chrome = webdriver.Chrome(options=options, service=Service(str(driver)))
    try:
        yield chrome
    finally:
        chrome.quit()


def wait(probe: Callable[[], T | None], what: str, seconds: float = START_S) -> T:
    """The first result of `probe` that is not empty; fails naming `what`.

    A page that is still loading replaces elements and frames. One that was replaced while `probe` used it is not there
    yet.
    """
    deadline = time.monotonic() + seconds
    while not (result := _attempt(probe)):
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.3)
    return result


def _attempt(probe: Callable[[], T | None]) -> T | None:
    try:
        return probe()
    except (StaleElementReferenceException, NoSuchFrameException, NoSuchWindowException):
        return None
