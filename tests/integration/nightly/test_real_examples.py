"""examples/: the Compose files with the images that they name, if this machine has them, and what they compute."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_examples import EXAMPLES, compose_is_installed, composed  # noqa: F401

FEATURES = 32
REGISTRY = "registry.example.com/"


def of_services(changes: Mapping[str, object]) -> str:
    """Changes of services. Their ports replace those of the file, which may be in use on this machine."""
    return json.dumps({"services": changes}).replace('"ports": ', '"ports": !override ')


def ask(url: str, content: object) -> tuple[int, Any]:
    """The status and the content of the answer to a POST with JSON."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(content).encode()), timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def local_image(file: str) -> str:
    """The image of a Compose file on this machine. Without one, skips the test."""
    text = (EXAMPLES / file).read_text(encoding="utf-8")
    image = text.partition(f"image: {REGISTRY}")[2].split()[0]
    if subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=False).returncode:
        pytest.skip(f"no image {image} on this machine: make images")
    return image


@pytest.mark.usefixtures("compose_is_installed")
def test_onnxruntime_answers_with_what_a_trained_model_predicts(tmp_path: Path) -> None:
    image = local_image("compose-onnx.yaml")
    changes = of_services({"export": {"image": image}, "serve": {"image": image, "ports": ["127.0.0.1::8000"]}})
    with composed("compose-onnx.yaml", changes, tmp_path) as project:
        project("up", "--detach", "--wait")
        url = project.published("serve", 8000) + "/v1/models/example:predict"
        one = [float(number) for number in range(FEATURES)]
        status, content = ask(url, {"instances": [one, [0.0] * FEATURES, one]})
        assert status == 200
        first, second, third = content["predictions"]
        assert len(first) == 10
        assert first == pytest.approx(third, rel=1e-5)
        assert first != pytest.approx(second, rel=1e-1)
        status, content = ask(url, {"instances": [one[:2]]})
        assert (status, "Got: 2 Expected: 32" in content["error"]) == (400, True)
        assert ask(url, {"inputs": []})[0] == 400
        assert ask(url.removesuffix(":predict"), {"instances": [one]})[0] == 404
        request = urllib.request.Request(url, b"{}", {"Content-Length": str(2**30)})
        with pytest.raises(urllib.error.HTTPError, match="413"):
            urllib.request.urlopen(request, timeout=10)


@pytest.mark.usefixtures("compose_is_installed")
def test_the_saved_model_has_the_signature_that_tensorflow_serving_calls(tmp_path: Path) -> None:
    image = local_image("compose-tensorflow-serving.yaml")
    show = "saved_model_cli show --dir /models/example/1 --tag_set serve --signature_def serving_default"
    changes = of_services({"export": {"image": image}, "serve": {"image": image, "command": show, "ports": []}})
    with composed("compose-tensorflow-serving.yaml", changes, tmp_path) as project:
        project("run", "--rm", "export")
        shown = project("run", "--rm", "--no-deps", "serve")
        assert re.search(r"inputs\['features'\].*?shape: \(-1, 32\)", shown, re.DOTALL)
        assert re.search(r"outputs\['scores'\].*?shape: \(-1, 10\)", shown, re.DOTALL)


@pytest.mark.usefixtures("compose_is_installed")
def test_two_workers_with_a_parameter_server_learn_and_continue(tmp_path: Path) -> None:
    image = local_image("compose-parameter-server.yaml")
    changes = of_services({name: {"image": image} for name in ("chief", "ps", "worker-0", "worker-1")})
    with composed("compose-parameter-server.yaml", changes, tmp_path) as project:
        start = ("up", "--exit-code-from", "chief", "--timeout", "2")
        project(*start)
        lines = re.findall(r"epoch (\d): loss ([\d.]+) accuracy ([\d.]+), (\d+) steps", project("logs", "chief"))
        assert [(epoch, steps) for epoch, *_, steps in lines] == [(str(e), str(128 * e)) for e in range(1, 6)]
        assert float(lines[4][1]) < 0.6 * float(lines[0][1])
        assert float(lines[4][2]) > 0.75
        project(*start)
        assert "resuming from checkpoints/parameter_server/ckpt-5: after 640 steps" in project("logs", "chief")
