"""Both methods give the same image: every path of it, and what its configuration says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.integration.checkout import Checkout, docker
from tests.integration.conftest import NewCheckout
from tests.integration.tree import differences, tree

SUFFIXES = pytest.mark.parametrize("suffix", ["", "-extra"], ids=["plain", "extra"])
# Paths that may differ. None: the one who adds to this says why.
MAY_DIFFER: set[str] = set()
# What says how or when an image was made, or where an engine put it.
OF_THE_MAKING = {"Id", "RepoTags", "RepoDigests", "Created", "Metadata", "RootFS", "Size", "GraphDriver", "Parent",
                 "Comment", "Container", "ContainerConfig", "DockerVersion", "Author", "VirtualSize"}  # fmt: skip


@pytest.fixture(scope="module")
def both(new_checkout: NewCheckout, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, str]]:
    """Method -> suffix -> image id, of one checkout."""
    made = new_checkout(tmp_path_factory.mktemp("both"))
    made.lock_and_render()
    made.builder("build")
    assembled = _ids(made)
    made.builder("build", "--method", "dockerfile")
    built = {suffix: (ids - {assembled[suffix]}).pop() for suffix, ids in _all_ids(made).items()}
    return {"assemble": assembled, "dockerfile": built}


def _all_ids(checkout: Checkout) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"": set(), "-extra": set()}
    for image in checkout.image_ids():
        labels = json.loads(checkout.docker("image", "inspect", "--format", "{{json .Config.Labels}}", image))
        found["-extra" if labels["gpu-images.variant"] == "extra" else ""].add(image)
    return found


def _ids(checkout: Checkout) -> dict[str, str]:
    return {suffix: ids.pop() for suffix, ids in _all_ids(checkout).items() if len(ids) == 1}


@SUFFIXES
def test_every_path_is_the_same(both: Mapping[str, Mapping[str, str]], suffix: str) -> None:
    assembled, built = (tree(both[method][suffix]) for method in ("assemble", "dockerfile"))
    for path in ("opt/venv/bin/tinyframe", "opt/nvidia/nvidia/cuda_runtime/lib/libcudart.so.12", "usr/bin/tini"):
        assert path in assembled
    assert any(path.endswith("tinyframe/__pycache__/__init__.cpython-311.pyc") for path in assembled)
    assert ("opt/venv/lib/python3.11/site-packages/tinyextra/__init__.py" in assembled) == bool(suffix)
    assert {path: what for path, what in differences(assembled, built).items() if path not in MAY_DIFFER} == {}


@SUFFIXES
def test_so_is_the_configuration(both: Mapping[str, Mapping[str, str]], suffix: str) -> None:
    assembled, built = (_configuration(both[method][suffix]) for method in ("assemble", "dockerfile"))
    assert assembled["Config"]["Entrypoint"]
    assert assembled == built


def _configuration(image: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(docker("image", "inspect", image))[0]
    kept = {name: value for name, value in found.items() if name not in OF_THE_MAKING}
    # Fields of containers that one engine shows of images too, empty as they are, and an obsolete one of BuildKit's.
    kept["Config"] = {name: value for name, value in found["Config"].items() if value and name != "ArgsEscaped"}
    return kept
