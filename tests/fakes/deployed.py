"""Images and requests for the tests of deploy, and how Compose and Kubernetes expand variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from builder.common.reference import ImageRef
from builder.deploy.request import Image, Request

REFERENCE = ImageRef.parse("registry.example.test/org/pt-cuda:2.9")
LABELS = {
    "gpu-images.framework": "pytorch",
    "gpu-images.cuda": "12.8",
    "gpu-images.components": "base python cuda pytorch board jupyter",
}
SERVICES = {"": {}, "jupyter": {"jupyter": 8888}, "ssh": {"ssh": 22}, "full": {"jupyter": 8888, "ssh": 22}}
# Each text has something that YAML or a shell would run, expand or misread unless it is quoted.
HOSTILE = (
    "$HOME", "${HOME:?}", "$(JOB_COMPLETION_INDEX)", "$$(x)", "$$", "`id`", "a'b", 'a"b', "a\\b", "a\nb: c", "- x",
    "{a: b}", "[x]", "&x", "*x", "!!python/object:os.system", "# x", "x #y", "a: b", "1e-3", "0o14", "010", "1_000",
    "0x10", "12:30:00", "2026-01-01", "yes", "NO", "null", "~", "y", "", " x ", "--", "%x", "@x", "{{ image }}",
    "{% raw %}", "é漢", "|", ">-", "?",
)  # fmt: skip


def image_of(
    variant: str = "", *, framework: str = "pytorch", cpu: bool = False, reference: ImageRef = REFERENCE
) -> Image:
    return Image(reference=reference, framework=framework, is_cpu=cpu, services=SERVICES[variant])


def request_of(**changes: Any) -> Request:
    return Request(**{"name": "train", "gpus": 1, **changes})


def of_kind(text: str, kind: str) -> dict[str, Any]:
    """The only object of a kind."""
    (document,) = [document for document in yaml.safe_load_all(text) if document["kind"] == kind]
    assert isinstance(document, dict)
    return document


def pod(text: str, kind: str) -> dict[str, Any]:
    spec = of_kind(text, kind)["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """An argument or a value after expansion by Kubernetes. Source: API reference, Container, `args`."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)", lambda match: "$" if match[0] == "$$" else variables.get(match[1], match[0]), text
    )


def interpolated(text: str) -> str:
    """A text after interpolation by Compose; it must not refer to a variable."""
    assert not re.search(r"(?<!\$)(?:\$\$)*\$(?!\$)", text), f"{text!r} refers to a variable"
    return text.replace("$$", "$")
