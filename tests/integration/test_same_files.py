"""Both methods give the same image: all files, and the configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from builder.layers.estargz import RESERVED
from tests.integration.checkout import Checkout
from tests.integration.conftest import NewCheckout
from tests.integration.tree import differences, inspect, tree

SUFFIXES = pytest.mark.parametrize("suffix", ["", "-extra"], ids=["plain", "extra"])
# BuildKit's layers have no table of contents: only those of the builder are eStargz.
MAY_DIFFER = set(RESERVED)
LINK = "opt/venv/lib/python/site-packages/tinyframe/libcudart.so.12"  # COPY changes the modes of the folders above it


@pytest.fixture(scope="module")
def both(new_checkout: NewCheckout, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, str]]:
    """Image ids of a checkout by method and suffix."""
    checkout = new_checkout(tmp_path_factory.mktemp("both"))
    link = checkout.root / "templates/tiny/files" / LINK
    link.parent.mkdir(parents=True)
    link.symlink_to("../nvidia/cuda_runtime/lib/libcudart.so.12")
    checkout.lock_and_render()
    checkout.builder("build")
    assembled = _ids(checkout)
    checkout.builder("build", "--method", "dockerfile")
    built = {suffix: (ids - {assembled[suffix]}).pop() for suffix, ids in _all_ids(checkout).items()}
    return {"assemble": assembled, "dockerfile": built}


def _all_ids(checkout: Checkout) -> dict[str, set[str]]:
    ids_by_suffix: dict[str, set[str]] = {"": set(), "-extra": set()}
    for image in checkout.image_ids():
        labels = json.loads(checkout.docker("image", "inspect", "--format", "{{json .Config.Labels}}", image))
        ids_by_suffix["-extra" if labels["gpu-images.variant"] == "extra" else ""].add(image)
    return ids_by_suffix


def _ids(checkout: Checkout) -> dict[str, str]:
    return {suffix: ids.pop() for suffix, ids in _all_ids(checkout).items() if len(ids) == 1}


@SUFFIXES
def test_every_path_is_the_same(both: Mapping[str, Mapping[str, str]], suffix: str) -> None:
    assembled, built = (tree(both[method][suffix]) for method in ("assemble", "dockerfile"))
    for path in (
        "opt/venv/bin/tinyframe",
        "opt/venv/lib/python/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12",
        "usr/bin/tini",
        LINK,
    ):
        assert path in assembled
    assert any(path.endswith("tinyframe/__pycache__/__init__.cpython-311.pyc") for path in assembled)
    assert ("opt/venv/lib/python/site-packages/tinyextra/__init__.py" in assembled) == bool(suffix)
    assert {path: text for path, text in differences(assembled, built).items() if path not in MAY_DIFFER} == {}


@SUFFIXES
def test_the_configuration_is_the_same(both: Mapping[str, Mapping[str, str]], suffix: str) -> None:
    assembled, built = (inspect(both[method][suffix]) for method in ("assemble", "dockerfile"))
    assert assembled["Entrypoint"]
    if suffix:
        assert {"TINY_EMPTY=", 'TINY_FLAGS=--list=a,b --home=$HOME ${HOME} #"x" \\$PATH \\'} <= {*assembled["Env"]}
    assert assembled["Labels"]
    assert assembled == built
