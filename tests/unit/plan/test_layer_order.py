"""The layers of an image: their order, which ones two images share, and which ones a change affects."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.index.wheels import Wheel
from builder.matrix.cells import Cell
from builder.plan import layer_order
from builder.plan.layer_order import LARGE, PlannedLayer

FOUNDATION = ("base", "python", "cuda", "ember")


def wheel(component: str, name: str, size: int = 1000, version: str = "1") -> Wheel:
    file = f"{name}-{version}-py3-none-any.whl"
    return Wheel(
        component=component,
        name=name,
        version=version,
        file=file,
        size=size,
        sha256=hashlib.sha256(file.encode()).hexdigest(),
    )


def library(name: str, size: int = 1000, component: str = "cuda") -> Wheel:
    """A CUDA wheel."""
    file = f"{name.replace('-', '_')}-1-py3-none-manylinux_2_28_x86_64.whl"
    return replace(wheel(component, name, size), file=file)


@dataclass(frozen=True)
class Parts:
    """What an image consists of."""

    wheels: tuple[Wheel, ...]
    python: str = "3.11"
    system: str = "sha256:os"
    compiler: str = "sha256:compiler"


def parts(*wheels: Wheel, **others: str) -> Parts:
    return Parts(wheels, **others)


CELL = Cell(framework="ember", short="em", line="1.9", release="1.9.1", cuda="12.9", python="3.11", variant="lab")


def stack(image: Parts, prefetch: Mapping[str, Sequence[str]] = {}) -> tuple[PlannedLayer, ...]:
    cell = replace(CELL, python=image.python)
    lowest = layer_order.lowest_layers(cell, FOUNDATION, image.wheels, image.compiler, prefetch)
    upper = layer_order.upper_layers(cell, lowest, image.wheels, image.compiler, prefetch)
    os = PlannedLayer(kind="os", name="os", component="base", inputs=image.system, python=cell.python, debian=7)
    return (*lowest, os, *upper)


def names(stacked: Sequence[PlannedLayer]) -> list[list[str]]:
    """Names of the wheels in each layer of wheels."""
    return [[wheel.name for wheel in layer.wheels] for layer in stacked if layer.kind == "wheels"]


BLAS, FFT = library("nvidia-blas", LARGE), library("nvidia-fft")
EMBER, KIT = wheel("ember", "ember", LARGE), wheel("ember", "emberkit")
PIP, BOARD, NOTEBOOK = wheel("python", "pip"), wheel("board", "board"), wheel("jupyter", "notebook")


def test_cuda_then_framework_then_os_then_variant() -> None:
    """The wheels of all cells of a group are below the operating system, those of the variant above it."""
    stacked = stack(parts(NOTEBOOK, PIP, EMBER, BOARD, BLAS, FFT))
    assert [(layer.kind, layer.name, [wheel.name for wheel in layer.wheels]) for layer in stacked] == [
        ("wheels", "nvidia-blas", ["nvidia-blas"]),
        ("wheels", "cuda", ["nvidia-fft"]),
        ("wheels", "ember", ["ember"]),
        ("wheels", "ember", ["pip"]),
        ("bytecode", "ember bytecode", []),
        ("os", "os", []),
        ("wheels", "lab", ["board", "notebook"]),
        ("bytecode", "lab bytecode", []),
    ]


def test_cuda_of_a_variant_is_above_the_operating_system() -> None:
    compiler, runtime = library("nvidia-cuda-nvcc", LARGE, "board"), library("nvidia-extra", LARGE, "jupyter")
    stacked = stack(parts(BLAS, compiler, runtime, BOARD))
    assert [(layer.name, layer.python) for layer in stacked] == [
        ("nvidia-blas", ""),
        ("os", "3.11"),
        ("nvidia-extra", ""),
        ("lab", ""),
        ("lab", "3.11"),
        ("lab bytecode", "3.11"),
    ]


@pytest.mark.parametrize(("size", "alone"), [(LARGE, True), (LARGE - 1, False)])
def test_a_large_wheel_has_a_layer_of_its_own(size: int, alone: bool) -> None:
    stacked = stack(parts(KIT, wheel("ember", "amber", size), wheel("ember", "zember")))
    small = ["emberkit", "zember"]
    assert names(stacked) == ([["amber"], small] if alone else [["amber", *small]])
    # One layer of bytecode for all of them.
    assert [layer.name for layer in stacked if layer.compiled] == ["ember bytecode"]


def test_the_order_of_cuda_follows_from_the_wheels_alone() -> None:
    """By name, but those that not every framework needs are last, so that two frameworks share a longer chain."""
    libraries = [library(f"nvidia-{name}", LARGE) for name in ("cusparselt-cu12", "nccl-cu12", "blas", "nvshmem-cu12")]
    assert names(stack(parts(*libraries))) == [
        ["nvidia-blas"],
        ["nvidia-nccl-cu12"],
        ["nvidia-cusparselt-cu12"],
        ["nvidia-nvshmem-cu12"],
    ]


def test_parts_of_the_compiler_are_with_the_small_wheels() -> None:
    libraries = [library(name, LARGE) for name in ("nvidia-cuda-nvcc-cu12", "nvidia-nvvm", "nvidia-blas")]
    assert names(stack(parts(*libraries, FFT))) == [
        ["nvidia-blas"],
        ["nvidia-cuda-nvcc-cu12", "nvidia-fft", "nvidia-nvvm"],
    ]


def test_a_wheel_is_of_cuda_by_its_platform_not_by_its_name() -> None:
    [layer] = [layer for layer in stack(parts(wheel("python", "nvidia-ml-py"))) if layer.kind == "wheels"]
    assert (layer.component, layer.python) == ("ember", "3.11")


def test_inputs_of_wheels_are_their_bytes_in_order() -> None:
    [layer] = [layer for layer in stack(parts(FFT, BLAS)) if layer.name == "cuda"]
    assert layer.inputs == layer_order.wheels_key("", [FFT])
    assert layer_order.wheels_key("", [FFT, BLAS]) != layer_order.wheels_key("", [BLAS, FFT])
    assert layer_order.wheels_key("3.11", [FFT]) != layer_order.wheels_key("", [FFT])
    assert stack(parts(replace(FFT, sha256="0" * 64)))[0].inputs != layer.inputs


@pytest.mark.parametrize("edited", [{"size": 1}, {"file": "other-1-py3-none-any.whl"}], ids=str)
def test_a_lock_with_a_wrong_size_or_name_does_not_match_the_cache(edited: dict[str, Any]) -> None:
    assert layer_order.wheels_key("", [replace(FFT, **edited)]) != layer_order.wheels_key("", [FFT])


def test_a_list_of_files_to_prefetch_changes_layers_of_its_component_only() -> None:
    image = parts(EMBER, KIT, FFT, wheel("lab", "notes"))
    before, after = stack(image), stack(image, {"ember": ("a",), "unused": ("b",)})
    moved = [new.name for old, new in zip(before, after, strict=True) if old.inputs != new.inputs]
    assert moved == ["ember", "ember bytecode"], "not the large wheel, the CUDA libraries and the variant"
    assert [layer.name for layer in after if layer.prefetch == ("a",)] == moved


def test_another_format_of_layers_gives_other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = stack(parts(FFT, KIT))
    monkeypatch.setattr("builder.plan.layer_order.LAYER_FORMAT", 0)
    after = stack(parts(FFT, KIT))
    moved = [old.name for old, new in zip(before, after, strict=True) if old.inputs != new.inputs]
    assert moved == ["cuda", "ember", "ember bytecode"]


@pytest.mark.parametrize(
    "change",
    [{"compiler": "sha256:other"}, {"python": "3.13"}, {"wheels": (EMBER,)}, {"wheels": (EMBER, wheel("ember", "x"))}],
)
def test_bytecode_is_compiled_again_when_an_input_changes(change: dict[str, object]) -> None:
    before = parts(EMBER, KIT)
    after: Parts = replace(before, **change)  # type: ignore[arg-type]
    [old], [new] = ([layer for layer in stack(image) if layer.compiled] for image in (before, after))
    assert old.inputs != new.inputs
    assert old.compiled == tuple(layer.inputs for layer in stack(before) if layer.kind == "wheels")


def test_bytes_of_a_layer_are_those_of_its_wheels_or_debian_packages() -> None:
    """The size of the operating system was left out: 126 MB of PyTorch's image."""
    assert [layer.bytes for layer in stack(parts(BLAS, KIT, EMBER))] == [LARGE, LARGE, 1000, 0, 7]


# ---- properties

POOL = [
    (library if component == "cuda" else wheel)(name=f"{component}{number}", size=size, component=component)
    for component in ("cuda", "ember", "python", "board", "jupyter")
    for number, size in enumerate((LARGE, 1000, 1000, 1000))
]
some_wheels = st.lists(st.sampled_from(POOL), unique_by=lambda wheel: wheel.name, max_size=12).map(tuple)
some_parts = st.builds(
    lambda wheels, python, system: parts(*wheels, python=python, system=system),
    wheels=some_wheels,
    python=st.sampled_from(["3.11", "3.13"]),
    system=st.sampled_from(["sha256:a", "sha256:b"]),
)


@given(some_parts)
def test_every_wheel_is_in_one_layer_and_layers_are_unique(image: Parts) -> None:
    stacked = stack(image)
    in_layers = Counter(wheel.sha256 for layer in stacked for wheel in layer.wheels)
    assert in_layers == Counter(wheel.sha256 for wheel in image.wheels)
    assert len({layer.inputs for layer in stacked}) == len(stacked)
    assert [layer.kind for layer in stacked].count("os") == 1


@given(some_parts, some_parts)
def test_layers_with_the_same_inputs_are_the_same(image: Parts, other: Parts) -> None:
    """The store has one blob for each `inputs`, whichever image it was built for."""
    known = {layer.inputs: layer for layer in stack(image)}
    for layer in stack(other):
        same = known.get(layer.inputs, layer)
        assert [wheel.sha256 for wheel in same.wheels] == [wheel.sha256 for wheel in layer.wheels]
        assert (same.kind, same.compiled) == (layer.kind, layer.compiled)
        if layer.kind == "wheels":
            assert same.python == layer.python


@given(some_parts, st.randoms(use_true_random=False))
def test_the_order_of_wheels_in_a_lock_does_not_matter(image: Parts, random: Random) -> None:
    shuffled = replace(image, wheels=tuple(random.sample(image.wheels, len(image.wheels))))
    assert stack(shuffled) == stack(image)


@given(some_parts, some_parts)
def test_images_with_the_same_cuda_wheels_share_their_lowest_layers(image: Parts, other: Parts) -> None:
    """Whatever their Python, framework and variant."""
    cuda = tuple(wheel for wheel in image.wheels if wheel.is_cuda)
    same = replace(other, wheels=(*cuda, *(wheel for wheel in other.wheels if not wheel.is_cuda)))
    lowest = [layer for layer in stack(image) if layer.kind == "wheels" and not layer.python]
    assert list(stack(same)[: len(lowest)]) == lowest
