"""Images and wishes for the tests of deploying, and what Compose and Kubernetes make of a text that they are given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from builder.deploy import Subject, Wish
from builder.reference import ImageRef

REFERENCE = ImageRef.parse("registry.example.test/org/pt-cuda:2.9")
SERVICES = {"": {}, "jupyter": {"jupyter": 8888}, "ssh": {"ssh": 22}, "full": {"jupyter": 8888, "ssh": 22}}
# Texts of a person, each with something that a careless writer of YAML or shell would run, replace or misread.
HOSTILE = (
    "$HOME", "${HOME:?}", "$(JOB_COMPLETION_INDEX)", "$$(x)", "$$", "`id`", "a'b", 'a"b', "a\\b", "a\nb: c", "- x",
    "{a: b}", "[x]", "&x", "*x", "!!python/object:os.system", "# x", "x #y", "a: b", "1e-3", "0o14", "010", "1_000",
    "0x10", "12:30:00", "2026-01-01", "yes", "NO", "null", "~", "y", "", " x ", "--", "%x", "@x", "{{ image }}",
    "{% raw %}", "é漢", "|", ">-", "?",
)  # fmt: skip


def subject(
    variant: str = "", *, framework: str = "pytorch", cpu: bool = False, reference: ImageRef = REFERENCE
) -> Subject:
    return Subject(reference=reference, framework=framework, is_cpu=cpu, services=SERVICES[variant])


def wish(**wanted: Any) -> Wish:
    return Wish(**{"name": "train", "gpus": 1, **wanted})


def of_kind(text: str, kind: str) -> dict[str, Any]:
    """The one object of a kind."""
    (found,) = [one for one in yaml.safe_load_all(text) if one["kind"] == kind]
    assert isinstance(found, dict)
    return found


def pod(text: str, kind: str) -> dict[str, Any]:
    found = of_kind(text, kind)["spec"]["template"]["spec"]
    assert isinstance(found, dict)
    return found


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """What Kubernetes makes of an argument or a value. Source: API reference, Container, `args`."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)", lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]), text
    )


def interpolated(text: str) -> str:
    """What Compose makes of a text in which no variable may be left."""
    assert not re.search(r"(?<!\$)(?:\$\$)*\$(?!\$)", text), f"{text!r} refers to a variable"
    return text.replace("$$", "$")
