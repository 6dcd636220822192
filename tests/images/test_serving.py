"""What `serve` does before it starts an engine: no start without a GPU, nor of a port that anyone can use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import nvml
from tests.images.containers import wait_until

Once = Callable[..., tuple[int, str, str]]
SERVE = ["serve", "/workspace/none"]
# The engine's own program, which `serve` executes.
PROGRAMS = {"VLLM": "/opt/venv/bin/vllm", "SGLANG": "/usr/local/lib/sglang-serve"}


@pytest.fixture(scope="module")
def with_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of docker-py for a container that sees a GPU, as NVML says; no program can compute on it."""
    library = nvml.build(tmp_path_factory.mktemp("nvml"))
    state = nvml.state("580.159.04", nvml.Card("NVIDIA H100 80GB HBM3", "9.0"), cuda=13000)
    return {
        "volumes": {str(library): {"bind": nvml.IN_CONTAINER, "mode": "ro"}},
        "environment": {nvml.VARIABLE: state},
        "shm_size": "1g",
    }


@pytest.fixture(scope="module")
def prefix(subject: Any) -> str:
    return "VLLM" if subject.cell["variant"] == "vllm" else "SGLANG"


def with_variables(options: dict[str, Any], **variables: str) -> dict[str, Any]:
    return {**options, "environment": {**options["environment"], **variables}}


def test_without_a_gpu_it_ends_with_a_line(once: Once) -> None:
    status, out, err = once(SERVE, environment={"START_QUIET": "1"})
    assert (status, out) == (69, "")
    assert len(err.splitlines()) == 1
    assert "needs a GPU, but no GPU: CPU only. For GPUs: `docker run --gpus all`" in err


def test_a_port_without_a_key_is_refused(once: Once, with_gpu: dict[str, Any], prefix: str, tmp_path: Path) -> None:
    empty = once(SERVE, **with_variables(with_gpu, **{f"{prefix}_API_KEY": " "}))
    assert empty[0] == 78
    assert f"error: {prefix}_API_KEY is empty, so anyone could use the server" in empty[2]
    file = tmp_path / "engine.yaml"
    file.write_text("api_key: shown\n")
    with_file = {**with_gpu, "volumes": {**with_gpu["volumes"], str(file): {"bind": "/run/engine.yaml", "mode": "ro"}}}
    for words in (["--api-key=shown"], ["--config", "/run/engine.yaml"]):
        option = once([*SERVE, *words], **with_file)
        assert option[0] == 78
        assert "error: --api-key: not with `serve`" in option[2]
        assert "shown" not in option[2].rpartition("error: ")[2]


# What the engine would be started with: its program is replaced by one that prints it.
ECHO = """#!/usr/bin/python3 -IS
import json, os, sys
print(json.dumps([sys.argv[1:], {k: v for k, v in os.environ.items() if "KEY" in k or "RUST" in k}]))
"""


@pytest.fixture
def started(once: Once, with_gpu: dict[str, Any], prefix: str, tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """A function that returns the API key that the engine gets, and the log."""
    echo = tmp_path / "engine"
    echo.write_text(ECHO)
    echo.chmod(0o755)
    (tmp_path / "key").write_text("of-a-file\n")
    volumes = {
        str(echo): {"bind": PROGRAMS[prefix], "mode": "ro"},
        str(tmp_path / "key"): {"bind": "/run/key", "mode": "ro"},
    }

    def start(**variables: str) -> tuple[str, str]:
        options = with_variables(with_gpu, **variables)
        status, out, err = once(SERVE, **{**options, "volumes": {**options["volumes"], **volumes}})
        assert status == 0, err
        arguments, environ = json.loads(out)
        assert SERVE[1] in arguments
        key = environ.pop(f"{prefix}_API_KEY", "")
        # An engine warns about variables that it does not know, and its server in Rust does not check the key.
        assert environ == {}
        assert not key or key not in str(arguments)
        return key, err

    return start


def test_the_key(started: Callable[..., tuple[str, str]], prefix: str) -> None:
    """One of the user's is not in the log; a random one is, as there is no other place to learn it."""
    name = f"{prefix}_API_KEY"
    rust = {"VLLM": "VLLM_USE_RUST_FRONTEND", "SGLANG": "SGLANG_RUST_SERVER"}[prefix]
    key, log = started(**{name: "mine", rust: "1"})
    assert [key, "mine" in log] == ["mine", False]
    assert started(**{f"{name}_FILE": "/run/key"})[0] == "of-a-file"
    key, log = started()
    assert len(key) == 48
    assert f"API key of the server: {key}" in log
    assert started(**{f"{prefix}_ALLOW_NO_KEY": "1"})[0] == ""


# Ends by itself a moment after SIGTERM, as an engine does that first answers its open requests.
DRAIN = """#!/usr/bin/python3 -IS
import signal, sys, time
def drain(*_):
    time.sleep(0.5)
    sys.exit("drained")
signal.signal(signal.SIGTERM, drain)
print("serving", flush=True)
time.sleep(60)
"""


def test_docker_stop_lets_the_engine_end(
    start: Callable[..., Any], with_gpu: dict[str, Any], prefix: str, tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    engine.write_text(DRAIN)
    engine.chmod(0o755)
    volume = {str(engine): {"bind": PROGRAMS[prefix], "mode": "ro"}}
    container = start(SERVE, **{**with_gpu, "volumes": {**with_gpu["volumes"], **volume}})
    wait_until(lambda: b"serving" in container.logs(), seconds=20, what="the engine")
    container.stop(timeout=20)
    assert container.wait()["StatusCode"] == 1
    assert "drained" in container.logs().decode()
