"""An engine that gives containers GPUs only as CDI devices, with a specification that mounts a device file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.common.errors import EngineError
from builder.engine.client import GPU_HOOK, Engine
from tests.integration import daemon as daemons
from tests.integration.checkout import Checkout, without
from tests.integration.conftest import NewCheckout

# In place of GPUs; two device files that can be told apart.
SPECIFICATION = """\
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits: {deviceNodes: [{path: /dev/nvidia0, hostPath: /dev/zero}]}
- name: "1"
  containerEdits: {deviceNodes: [{path: /dev/nvidia1, hostPath: /dev/full}]}
- name: all
  containerEdits:
    deviceNodes: [{path: /dev/nvidia0, hostPath: /dev/zero}, {path: /dev/nvidia1, hostPath: /dev/full}]
containerEdits:
  env: [NVIDIA_VISIBLE_DEVICES=void]
"""


@pytest.fixture(scope="module")
def there(new_checkout: NewCheckout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    """A checkout that uses that engine, which has the base image."""
    checkout = new_checkout(tmp_path_factory.mktemp("there"))
    base = checkout.base_image()
    folder = tmp_path_factory.mktemp("cdi")
    (folder / "nvidia.yaml").write_text(SPECIFICATION, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", without(tmp_path_factory.mktemp("bin"), GPU_HOOK))  # on a machine with `--gpus` too
        with daemons.engine(base, features=("cdi",), cdi=folder) as daemon:
            checkout.engine = daemon.host
            if "@" in base:
                checkout.docker("pull", "--quiet", base)
            checkout.docker("tag", base, "base:cdi")
            yield checkout


@pytest.fixture
def engine(there: Checkout, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("DOCKER_HOST", there.engine)
    engine = Engine.connect()
    yield engine
    engine.sweep(str(there.root))


def devices(there: Checkout, *options: str) -> list[str]:
    output = there.docker("run", "--rm", "--network", "none", *options, "base:cdi", "ls", "/dev")
    return re.findall("nvidia.*", output)


def test_doctor_prints_the_option_that_works(there: Checkout) -> None:
    output = there.builder("doctor", PATH=os.environ["PATH"])
    [option] = re.findall(r"gpu in containers +docker run (\S+ \S+)", output)
    assert devices(there, *option.split()) == ["nvidia0", "nvidia1"]
    for other in ("--gpus=all", "--runtime=nvidia"):
        with pytest.raises(AssertionError, match=r"could not select device driver|unknown or invalid runtime"):
            devices(there, other)


def test_containers_of_tests_get_the_gpus_that_they_ask_for(there: Checkout, engine: Engine) -> None:
    assert engine.info().cdi_gpus == {"0", "1", "all"}
    for names, expected in (
        (("all",), ["nvidia0", "nvidia1"]),
        (("1",), ["nvidia1"]),
        (("0", "1"), ["nvidia0", "nvidia1"]),
    ):
        gpus = engine.info().gpu_options(names)
        container = engine.start(
            "base:cdi", checkout=str(there.root), command=["ls", "/dev"], network_mode="none", **gpus
        )
        container.wait()
        assert re.findall("nvidia.*", container.logs().decode()) == expected


def test_a_gpu_that_the_engine_does_not_have(there: Checkout, engine: Engine) -> None:
    gpus = engine.info().gpu_options(("7",))
    with pytest.raises(EngineError, match=r"nvidia\.com/gpu=7"):
        engine.start("base:cdi", checkout=str(there.root), command=["ls"], network_mode="none", **gpus)


def test_without_the_feature_the_engine_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A specification alone is not enough: builder would request GPUs that the engine refuses."""
    monkeypatch.setenv("PATH", without(tmp_path, GPU_HOOK))
    (tmp_path / "nvidia.yaml").write_text(SPECIFICATION, encoding="utf-8")
    with daemons.engine(cdi=tmp_path) as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.host)
        info = Engine.connect().info()
        assert (info.gpu_option, info.cdi_gpus) == ("", frozenset())
