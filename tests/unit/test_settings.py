"""What an image's configuration says, from the matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from builder import cells, facts, settings
from builder.facts import Build
from builder.project import Project
from builder.settings import Health, Settings

Edit = Callable[[str, str], Project]
CELL = "em-1.10-cu1210-py311-jupyter"
PLAIN = "qz-0.5-cu129-py311"


def of(project: Project, cell_id: str = CELL) -> Settings:
    [cell] = project.select([cell_id])
    parts = {name: project.matrix.components[name] for name in cells.components(project.matrix, cell)}
    return settings.of_image(
        project.matrix, cell, parts, reference="r.example.test/t/i:1", lock="sha256:l", plan="sha256:p"
    )


def test_a_plain_image(tiny: Project) -> None:
    assert of(tiny, PLAIN) == Settings(
        env={
            "PATH": "/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/venv/user/bin",
            "LANG": "C.UTF-8",
            "PYTHONUSERBASE": "/opt/venv/user",
            "PIP_CONSTRAINT": "/etc/pip/constraints.txt",
            "UV_CONSTRAINT": "/etc/pip/constraints.txt",
            "NVIDIA_VISIBLE_DEVICES": "all",
            "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
            "NVIDIA_REQUIRE_CUDA": "driver>=525.60.13",
        },
        ports=(),
        command=("bash",),
        health=None,
        entrypoint=("/usr/bin/tini", "-g", "--", "/usr/local/bin/start"),
        user="1000:0",
        workdir="/workspace",
        labels={
            "org.opencontainers.image.title": PLAIN,
            "org.opencontainers.image.version": "0.5.3",
            "org.opencontainers.image.ref.name": "r.example.test/t/i:1",
            "gpu-images.cell": PLAIN,
            "gpu-images.framework": "quartz",
            "gpu-images.framework.version": "0.5.3",
            "gpu-images.cuda": "12.9",
            "gpu-images.driver": "525.60.13",
            "gpu-images.python": "3.11",
            "gpu-images.variant": "plain",
            "gpu-images.components": "base python cuda quartz",
            "gpu-images.lock": "sha256:l",
            "gpu-images.plan": "sha256:p",
        },
    )


def test_on_the_cpu_nothing_is_said_of_gpus(on_cpu: Project) -> None:
    made = of(on_cpu, "qz-0.5-cpu-py311")
    assert not [name for name in made.env if name.startswith("NVIDIA_")]
    assert made.labels["gpu-images.cuda"] == "cpu"
    assert not [label for label in made.labels if "driver" in label or "gpu." in label or "framework.cuda" in label]
    assert made.labels["gpu-images.components"] == "base python quartz"


def known(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Other facts than those of the file."""
    found = facts.load().model_copy(update=changes)
    monkeypatch.setattr(facts, "load", lambda: found)


def test_what_the_framework_was_compiled_for(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A label each, so that `explain` can answer without pulling; of the package whose wheel has the GPU code."""
    build = Build(cuda="12.8", architectures=["sm_80", "compute_90"], source="made up")
    known(monkeypatch, plugins={"ember": {"12": "ember-plugin"}}, builds={"ember-plugin": {"1.10.0": build}})
    labels = of(tiny).labels
    assert labels["gpu-images.framework.cuda"] == "12.8"
    assert labels["gpu-images.gpu.architectures"] == "sm_80 compute_90"
    assert labels["gpu-images.cuda"] == "12.10"
    assert "gpu-images.framework.cuda" not in of(tiny, PLAIN).labels


def test_a_cuda_whose_driver_nobody_knows(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bound is better than a wrong one."""
    known(monkeypatch, drivers={})
    made = of(tiny)
    assert "NVIDIA_REQUIRE_CUDA" not in made.env
    assert "gpu-images.driver" not in made.labels
    assert made.env["NVIDIA_VISIBLE_DEVICES"] == "all"


def test_what_components_add(tiny: Project) -> None:
    made = of(tiny)
    assert made.ports == (8888,)
    assert made.command == ("start-jupyter",)
    assert made.health == Health(command=("check-jupyter",))
    assert list(made.env)[-1] == "EMBER_HOME"
    assert made.env["NVIDIA_REQUIRE_CUDA"] == "driver>=525.60.13"
    assert made.labels["gpu-images.components"] == "base python cuda ember board jupyter"


BOARD = "board: {needs: [python], packages: [board]"
TWO = f"{BOARD}, port: 6006, command: [start-board], healthcheck: [check-board]"


def test_of_several_commands_and_checks_the_last_components_counts(edit: Edit) -> None:
    made = of(edit(BOARD, TWO))
    assert made.ports == (6006, 8888)
    assert made.command == ("start-jupyter",)
    assert made.health == Health(command=("check-jupyter",))
    turned = of(edit("jupyter: [board, jupyter]", "jupyter: [jupyter, board]"))
    assert turned.ports == (8888, 6006)
    assert turned.command == ("start-board",)
    assert turned.health == Health(command=("check-board",))


def test_a_variable_of_a_later_component_counts_and_keeps_its_place(edit: Edit) -> None:
    made = of(edit(BOARD, f"{BOARD}, env: {{EMBER_HOME: /elsewhere, LANG: de_DE.UTF-8, BOARD: x}}"))
    assert list(made.env)[-2:] == ["EMBER_HOME", "BOARD"]
    assert made.env["EMBER_HOME"] == "/elsewhere"
    assert list(made.env)[1] == "LANG"


@pytest.mark.parametrize("cell", [CELL, PLAIN])
def test_no_secret_and_no_day_is_in_it(tiny: Project, cell: str) -> None:
    """The same for everyone who has the same inputs."""
    again = Project(tiny.root)
    assert of(tiny, cell) == of(again, cell)
    assert str(tiny.root) not in repr(of(tiny, cell))
