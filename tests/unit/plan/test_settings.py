"""The configuration of an image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from builder.common.errors import MatrixError
from builder.matrix import cells, facts
from builder.matrix.project import Project
from builder.plan import settings
from builder.plan.settings import Health, Settings

Edit = Callable[[str, str], Project]
CELL = "em-1.10-cu1210-py311-jupyter"
PLAIN = "qz-0.5-cu129-py311"


def of(project: Project, cell_id: str = CELL) -> Settings:
    [cell] = project.select([cell_id])
    parts = {name: project.matrix.components[name] for name in cells.components(project.matrix, cell)}
    return settings.of_image(project.matrix, cell, parts)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("EMBER_HOME: /workspace", "PATH: /workspace", "components.ember.env.PATH: every image sets PATH"),
        ('"12.10": {', '"12.10": {env: {HOME: /root}, ', "cuda.12.10.env.HOME: every image sets HOME"),
    ],
)
def test_variables_that_every_image_sets(edit: Edit, old: str, new: str, message: str) -> None:
    """Programs of the image would not be found, or root would use the user's home folder."""
    with pytest.raises(MatrixError, match=message):
        of(edit(old, new))


def test_labels_link_a_package_to_its_repository(edit: Edit) -> None:
    source = "https://git.example.test/team/images"
    labels = of(edit("namespace: team\n", f"namespace: team\nsource: {source}\n")).labels
    assert labels["org.opencontainers.image.source"] == labels["org.opencontainers.image.url"] == source
    assert labels["org.opencontainers.image.documentation"] == f"{source}#readme"


@pytest.mark.parametrize(
    ("framework", "expected"),
    [
        ("Apache-2.0", "Apache-2.0 AND LicenseRef-NVIDIA-CUDA AND LicenseRef-Packages"),
        ('""', "LicenseRef-NVIDIA-CUDA AND LicenseRef-Packages"),
        ("mit or apache-2.0", "(MIT OR Apache-2.0) AND LicenseRef-NVIDIA-CUDA AND LicenseRef-Packages"),
    ],
)
def test_licenses_begin_with_that_of_the_framework(edit: Edit, framework: str, expected: str) -> None:
    labels = of(edit("short: qz\n", f"short: qz\n    license: {framework}\n"), PLAIN).labels
    assert labels["org.opencontainers.image.licenses"] == expected


def test_on_the_cpu_nothing_is_configured_for_gpus(on_cpu: Project) -> None:
    configured = of(on_cpu, "qz-0.5-cpu-py311")
    assert not [name for name in configured.env if name.startswith("NVIDIA_")]
    assert configured.labels["io.github.gpu-images.cuda"] == "cpu"
    assert not [
        label for label in configured.labels if "driver" in label or "gpu." in label or "framework.cuda" in label
    ]
    assert configured.labels["io.github.gpu-images.components"] == "base python quartz"
    assert configured.labels["org.opencontainers.image.licenses"] == "LicenseRef-Packages"


def known(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Replaces some facts."""
    changed = facts.load_facts().model_copy(update=changes)
    monkeypatch.setattr(facts, "load_facts", lambda: changed)


def test_a_cuda_with_an_unknown_driver(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bound is better than a wrong one."""
    known(monkeypatch, drivers={})
    configured = of(tiny)
    assert "NVIDIA_REQUIRE_CUDA" not in configured.env
    assert "io.github.gpu-images.driver" not in configured.labels
    assert configured.env["NVIDIA_VISIBLE_DEVICES"] == "all"


def test_the_variables_of_a_cuda_replace_those_of_every_cuda_image(edit: Edit) -> None:
    """A team keeps pods that request no GPU from all GPUs of their node: NVIDIA's runtime reads this variable."""
    configured = of(edit('"12.10": {', '"12.10": {env: {NVIDIA_VISIBLE_DEVICES: void}, '))
    assert configured.env["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert configured.env["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"


BOARD = "board: {needs: [python], packages: [board]"
TWO = f"{BOARD}, port: 6006, command: [start-board], healthcheck: [check-board]"


def test_the_last_command_and_health_check_win(edit: Edit) -> None:
    configured = of(edit(BOARD, TWO))
    assert configured.ports == (6006, 8888)
    assert configured.command == ("start-jupyter",)
    assert configured.health == Health(command=("check-jupyter",))
    swapped = of(edit("jupyter: [board, jupyter]", "jupyter: [jupyter, board]"))
    assert swapped.ports == (8888, 6006)
    assert swapped.command == ("start-board",)
    assert swapped.health == Health(command=("check-board",))


def test_the_variable_of_a_later_component_wins_in_the_earlier_place(edit: Edit) -> None:
    configured = of(edit(BOARD, f"{BOARD}, env: {{EMBER_HOME: /elsewhere, LANG: de_DE.UTF-8, BOARD: x}}"))
    assert list(configured.env)[-2:] == ["EMBER_HOME", "BOARD"]
    assert configured.env["EMBER_HOME"] == "/elsewhere"
    assert list(configured.env)[1] == "LANG"
