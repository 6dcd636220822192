"""Which layers an image is stacked from: their order, what two images share, and what moves when something changes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder import layers
from builder.errors import MatrixError
from builder.layers import LARGE, MOST, Parts, PlannedLayer
from builder.lock import Wheel

COMPONENTS = ("base", "python", "cuda", "ember", "board", "jupyter")


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


def parts(*wheels: Wheel, python: str = "3.11", system: str = "sha256:os", files: str = "sha256:files") -> Parts:
    return Parts(
        framework="ember",
        components=COMPONENTS,
        python=python,
        wheels=wheels,
        os=system,
        files=files,
        compiler="sha256:compiler",
    )


def stack(one: Parts, *others: Parts) -> tuple[PlannedLayer, ...]:
    """Layers of the first image, among others."""
    images = {f"image{number}": image for number, image in enumerate([one, *others])}
    return layers.arrange(images)["image0"]


def names(stacked: Sequence[PlannedLayer]) -> list[list[str]]:
    """Names of the wheels in each layer of wheels."""
    return [[one.name for one in layer.wheels] for layer in stacked if layer.kind == "wheels"]


BLAS, FFT = wheel("cuda", "nvidia-blas", LARGE), wheel("cuda", "nvidia-fft")
EMBER, KIT = wheel("ember", "ember", LARGE), wheel("ember", "emberkit")
PIP, BOARD, NOTEBOOK = wheel("python", "pip"), wheel("board", "board"), wheel("jupyter", "notebook")


def test_cuda_then_framework_then_os_then_variant_then_files() -> None:
    stacked = stack(parts(NOTEBOOK, PIP, EMBER, BOARD, BLAS))
    assert [(layer.kind, layer.name, layer.component) for layer in stacked] == [
        ("wheels", "nvidia-blas", "cuda"),
        ("wheels", "ember", "ember"),
        ("files", "ember bytecode", "ember"),
        ("os", "os", "base"),
        ("wheels", "python", "python"),
        ("files", "python bytecode", "python"),
        ("wheels", "board", "board"),
        ("files", "board bytecode", "board"),
        ("wheels", "jupyter", "jupyter"),
        ("files", "jupyter bytecode", "jupyter"),
        ("files", "files", "base"),
    ]


def test_an_image_without_wheels_has_an_os_and_files() -> None:
    assert [layer.name for layer in stack(parts())] == ["os", "files"]


def test_what_belongs_to_no_python_says_so() -> None:
    stacked = stack(parts(BLAS, EMBER))
    assert [layer.python for layer in stacked] == ["", "3.11", "3.11", "3.11", "3.11"]


@pytest.mark.parametrize(("size", "alone"), [(LARGE, True), (LARGE - 1, False)])
def test_a_large_wheel_has_a_layer_of_its_own(size: int, alone: bool) -> None:
    stacked = stack(parts(KIT, wheel("ember", "amber", size), wheel("ember", "zember")))
    small = ["emberkit", "zember"]
    assert names(stacked) == ([["amber"], small] if alone else [["amber", *small]])
    # One layer of bytecode for all of them.
    assert [layer.name for layer in stacked if layer.compiled] == ["ember bytecode"]


def test_small_wheels_are_grouped_by_the_images_that_use_them() -> None:
    one, two = wheel("ember", "one"), wheel("ember", "two")
    assert names(stack(parts(KIT, one, two), parts(KIT, one), parts(KIT))) == [["emberkit"], ["one"], ["two"]]
    assert names(stack(parts(KIT, one, two), parts(KIT, one, two))) == [["emberkit", "one", "two"]]


def test_layers_that_more_images_use_lie_lower() -> None:
    """Though `amber` comes first by name and is large."""
    amber = wheel("cuda", "amber", LARGE)
    assert names(stack(parts(amber, FFT), parts(FFT))) == [["nvidia-fft"], ["amber"]]
    assert names(stack(parts(amber, FFT), parts(amber))) == [["amber"], ["nvidia-fft"]]


def test_groups_that_as_many_images_use_lie_in_the_order_of_these_images() -> None:
    """Not in that of a set, which differs from one run of Python to the next."""
    groups = [("a", *others) for others in combinations("bcdefghij", 4)][::5]
    wheels = {group: wheel("cuda", f"{100 - number}") for number, group in enumerate(groups)}
    images = {name: parts(*(one for group, one in wheels.items() if name in group)) for name in "abcdefghij"}
    [*stacked, _, _] = layers.arrange(images)["a"]
    assert [layer.wheels for layer in stacked] == [(wheels[group],) for group in groups]


def test_of_those_the_large_before_the_small() -> None:
    zeta = wheel("cuda", "zeta", LARGE)
    assert names(stack(parts(FFT, zeta, BLAS))) == [["nvidia-blas"], ["zeta"], ["nvidia-fft"]]


def test_cuda_is_one_layer_on_two_pythons() -> None:
    old, new = parts(BLAS, FFT, PIP, python="3.11"), parts(BLAS, FFT, PIP, python="3.13")
    first, second = stack(old, new), stack(new, old)
    assert [layer.inputs for layer in first[:2]] == [layer.inputs for layer in second[:2]]
    assert first[:2] == second[:2]


def test_what_is_installed_for_a_python_is_another_layer_on_another() -> None:
    old, new = parts(EMBER, python="3.11"), parts(EMBER, python="3.13")
    for one, other in zip(stack(old, new)[:2], stack(new, old)[:2], strict=True):
        assert one.name == other.name
        assert one.inputs != other.inputs


def test_images_on_two_pythons_do_not_count_as_users_of_one_layer() -> None:
    """`emberkit` is in two images, for two Pythons, so no image shares it with another; `one` is shared."""
    one = wheel("ember", "one")
    image = parts(KIT, one)
    assert names(stack(image, parts(KIT, python="3.13"), parts(one))) == [["one"], ["emberkit"]]


def test_a_wheel_is_cudas_by_its_component_not_by_its_name() -> None:
    [layer] = [layer for layer in stack(parts(wheel("python", "nvidia-ml-py"))) if layer.kind == "wheels"]
    assert (layer.component, layer.python) == ("python", "3.11")


def test_inputs_of_wheels_are_their_bytes_in_order() -> None:
    [layer] = [layer for layer in stack(parts(FFT, BLAS)) if layer.name == "cuda"]
    assert layer.inputs == layers.wheels_key("", [FFT.sha256])
    assert layers.wheels_key("", ["a", "b"]) != layers.wheels_key("", ["b", "a"])
    assert layers.wheels_key("3.11", ["a"]) != layers.wheels_key("", ["a"])
    assert stack(parts(replace(FFT, sha256="0" * 64)))[0].inputs != layer.inputs


def test_another_format_of_layers_gives_other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = stack(parts(FFT, KIT))
    monkeypatch.setattr("builder.splice.FORMAT", 0)
    after = stack(parts(FFT, KIT))
    moved = [one.name for one, other in zip(before, after, strict=True) if one.inputs != other.inputs]
    assert moved == ["cuda", "ember", "ember bytecode"]


def test_bytecode_names_the_layers_that_it_is_of() -> None:
    large, small, bytecode, *_ = stack(parts(EMBER, KIT))
    assert bytecode.compiled == (large.inputs, small.inputs)
    assert (bytecode.kind, bytecode.wheels) == ("files", ())


@pytest.mark.parametrize(
    "change",
    [{"compiler": "sha256:other"}, {"python": "3.13"}, {"wheels": (EMBER,)}, {"wheels": (EMBER, wheel("ember", "x"))}],
)
def test_bytecode_is_made_again_when_one_of_its_inputs_changes(change: dict[str, object]) -> None:
    before = parts(EMBER, KIT)
    after: Parts = replace(before, **change)  # type: ignore[arg-type]
    [one], [other] = ([layer for layer in stack(image) if layer.compiled] for image in (before, after))
    assert one.inputs != other.inputs


def test_bytes_of_a_layer_are_those_of_its_wheels() -> None:
    assert [layer.bytes for layer in stack(parts(BLAS, KIT, EMBER))] == [LARGE, LARGE, 1000, 0, 0, 0]


def test_an_image_of_too_many_layers_is_refused() -> None:
    """Of the stack two are the os layer and the files."""
    large = [wheel("cuda", f"w{number}", LARGE) for number in range(MOST - 1)]
    assert len(stack(parts(*large[1:]))) == MOST == 125
    with pytest.raises(MatrixError, match=r"^many would have 126 layers; Docker can stack 125$"):
        layers.arrange({"few": parts(), "many": parts(*large)})


# ---- properties

POOL = [
    wheel(component, f"{component}{number}", LARGE if number == 0 else 1000, version)
    for component in ("cuda", "ember", "python", "board", "jupyter")
    for number in range(4)
    for version in ("1", "2")
]


@st.composite
def some_wheels(draw: st.DrawFn) -> tuple[Wheel, ...]:
    """Each project once."""
    chosen = draw(st.lists(st.sampled_from(POOL), unique_by=lambda one: one.name, max_size=10))
    return tuple(chosen)


some_parts = st.builds(
    parts,
    python=st.sampled_from(["3.11", "3.13"]),
    system=st.sampled_from(["sha256:a", "sha256:b"]),
)
some_images = st.lists(
    st.builds(lambda image, wheels: replace(image, wheels=wheels), some_parts, some_wheels()), min_size=1, max_size=6
).map(lambda images: {f"image{number}": image for number, image in enumerate(images)})


@given(some_images)
def test_every_wheel_is_in_one_layer_and_every_layer_there_once(images: dict[str, Parts]) -> None:
    for image_id, stacked in layers.arrange(images).items():
        found = Counter(one.sha256 for layer in stacked for one in layer.wheels)
        assert found == Counter(one.sha256 for one in images[image_id].wheels)
        assert len({layer.inputs for layer in stacked}) == len(stacked)
        assert [layer.kind for layer in stacked].count("os") == 1


@given(some_images)
def test_of_all_layers_one_with_the_same_inputs_is_the_same_layer(images: dict[str, Parts]) -> None:
    """The store keeps one blob for one `inputs`, whichever image it was made for."""
    found: dict[str, PlannedLayer] = {}
    for layer in chain.from_iterable(layers.arrange(images).values()):
        known = found.setdefault(layer.inputs, layer)
        assert [one.sha256 for one in known.wheels] == [one.sha256 for one in layer.wheels]
        assert (known.kind, known.compiled) == (layer.kind, layer.compiled)
        if layer.kind == "wheels":
            assert known.python == layer.python


@given(some_images, st.randoms(use_true_random=False))
def test_the_order_in_which_things_are_told_is_nothing(images: dict[str, Parts], random: Random) -> None:
    def shuffled(image: Parts) -> Parts:
        return replace(image, wheels=tuple(random.sample(image.wheels, len(image.wheels))))

    ids = random.sample(list(images), len(images))
    assert layers.arrange({image_id: shuffled(images[image_id]) for image_id in ids}) == layers.arrange(images)


def cuda(stacked: Sequence[PlannedLayer]) -> list[PlannedLayer]:
    return [layer for layer in stacked if layer.component == "cuda"]


@given(some_images, some_wheels(), some_parts, some_parts)
def test_images_with_the_same_cuda_wheels_begin_alike(
    images: dict[str, Parts], wheels: tuple[Wheel, ...], one: Parts, other: Parts
) -> None:
    """Whatever their Python, and whatever other images there are."""
    libraries = tuple(one for one in wheels if one.component == "cuda")
    pair = {"one": replace(one, wheels=wheels), "other": replace(other, wheels=libraries)}
    stacks = layers.arrange({**images, **pair})
    assert cuda(stacks["one"]) == cuda(stacks["other"])
    assert list(stacks["one"][: len(cuda(stacks["one"]))]) == cuda(stacks["one"]), "CUDA lies lowest"


@given(some_images, some_parts, st.integers(0, 8))
def test_an_image_that_shares_nothing_changes_no_other(images: dict[str, Parts], new: Parts, count: int) -> None:
    strange = tuple(wheel(("cuda", "ember", "board")[number % 3], f"strange{number}") for number in range(count))
    before = layers.arrange(images)
    after = layers.arrange({**images, "zz": replace(new, wheels=strange), "aa": new})
    assert {image_id: after[image_id] for image_id in images} == before


def users(stacked: Mapping[str, Sequence[PlannedLayer]], layer: PlannedLayer) -> int:
    return sum(layer in other for other in stacked.values())


@given(some_images)
def test_within_a_component_layers_are_used_by_fewer_and_fewer(images: dict[str, Parts]) -> None:
    """Counted over the same component of the images: that is what lies in one place of their stacks."""
    stacks = layers.arrange(images)
    for stacked in stacks.values():
        for component in ("cuda", "ember", "board"):
            counts = [
                users(stacks, layer) for layer in stacked if layer.kind == "wheels" and layer.component == component
            ]
            assert counts == sorted(counts, reverse=True)
