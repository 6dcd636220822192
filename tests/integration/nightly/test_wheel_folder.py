"""An index that is a folder of wheels in the repository: locked, assembled, and built by its Dockerfile."""

from __future__ import annotations

import json
import re

import pytest

from tests.integration import wheels
from tests.integration.checkout import EXTRA, SHORT, Checkout, docker
from tests.integration.conftest import NewCheckout
from tests.integration.wheels import Distribution

GROUP = EXTRA.removesuffix("-extra")


def put(checkout: Checkout, text: str) -> Distribution:
    """Puts the package of the component `extra` into the folder."""
    wheel = wheels.wheel("tinyextra", checkout.release, {"tinyextra/__init__.py": f"VERSION = {text!r}\n".encode()})
    (checkout.root / "wheels" / wheel.file).write_bytes(wheel.content)
    return wheel


@pytest.fixture
def checkout(new_checkout: NewCheckout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    checkout = new_checkout(tmp_path_factory.mktemp("folder"))
    checkout.write_tests(SHORT)
    checkout.take_store(like=checkout.store)
    (checkout.root / "wheels").mkdir()
    checkout.edit("matrix.yaml", "debian:\n", "indexes: {own: wheels/}\ndebian:\n")
    checkout.edit("matrix.yaml", "packages: [tinyextra", "index: own, packages: [tinyextra")
    return checkout


def test_a_wheel_of_a_folder_is_locked_and_installed(checkout: Checkout) -> None:
    wheel = put(checkout, "from the folder")
    requests = len(checkout.index.answered)
    checkout.builder("lock", EXTRA)
    checkout.builder("render", EXTRA)
    lock = json.loads((checkout.root / f"locks/{GROUP}.json").read_text())
    [locked] = [each for each in lock["wheels"] if each["name"] == "tinyextra"]
    assert (locked["sha256"], locked["size"], locked["index"]) == (wheel.sha256, len(wheel.content), "own")

    put(checkout, "changed")
    output = checkout.builder("build", EXTRA, code=13)
    assert re.search(r"SHA-256 mismatch: .* is listed by the index own", " ".join(output.split()))

    put(checkout, "from the folder")
    for method in ("assemble", "dockerfile"):
        before = checkout.image_ids()
        checkout.builder("build", "--method", method, EXTRA)
        (image,) = checkout.image_ids() - before
        program = "import tinyextra; print(tinyextra.VERSION)"
        assert docker("run", "--rm", image, "python", "-c", program) == "from the folder"
    paths = [answer.path for answer in checkout.index.answered[requests:]]
    assert paths
    assert not [path for path in paths if "tinyextra" in path]
