"""An untested or failed image gets no tag; the other image does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.checkout import EXTRA, PLAIN, SHORT, TESTS, Checkout
from tests.integration.conftest import NewCheckout
from tests.integration.index import Index


@pytest.fixture(scope="module")
def project(new_checkout: NewCheckout, served: Index, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout with one image, built but not tested."""
    checkout = new_checkout(tmp_path_factory.mktemp("untested"))
    checkout.lock_and_render()
    checkout.builder("build", PLAIN)
    assert (checkout.tags(), len(checkout.image_ids())) == ({}, 1)
    return checkout


@pytest.fixture
def untested(project: Checkout) -> Iterator[Checkout]:
    """The checkout; checks that the test has not tagged the image."""
    project.write_tests({**TESTS, **SHORT})
    before = project.tags(), project.image_ids()
    yield project
    assert (project.tags(), project.image_ids()) == before


@pytest.mark.parametrize(
    "text",
    [
        "import pytest\n\npytest.skip('not today', allow_module_level=True)\n",
        "import pytest\n\n@pytest.mark.xfail(reason='known')\ndef test_expected_to_fail():\n    assert False\n",
        "import os\n\ndef test_killed():\n    os.kill(os.getpid(), 9)\n",
    ],
    ids=["file skipped", "expected to fail", "killed"],
)
def test_an_untested_component_fails(untested: Checkout, text: str) -> None:
    """Even if all other components pass. Other reasons: tests/unit/build/test_image_tests.py."""
    untested.write_tests({"tiny": text})
    output = untested.builder("images", PLAIN, code=8)
    assert PLAIN in output
    assert f".builder/logs/{PLAIN}.test.log" in output


THOROUGH = """\
import pytest


@pytest.mark.thorough
def test_thorough():
    pass


def test_quick():
    pass
"""


def test_thorough_tests_run_once(checkout: Checkout, seed: Path) -> None:
    """The larger image contains the smaller one, which runs them. Alone, it runs them itself."""
    checkout.lock_and_render()
    checkout.take_store(like=seed)
    checkout.write_tests({"tiny": THOROUGH})
    assert "2 images: 2 built, 2 tested, 2 tagged" in checkout.builder("images", "--jobs", "1")

    def passed() -> dict[str, set[str]]:
        """The tests that each cell passed."""
        files = (checkout.root / ".builder/evidence").glob("*.image.json")
        proofs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        return {proof["cell"]: set(proof["passed"]) for proof in proofs}

    thorough, quick = (f"tests/images/test_tiny.py::test_{name}" for name in ("thorough", "quick"))
    assert {thorough, quick} <= passed()[PLAIN]
    assert quick in passed()[EXTRA]
    assert thorough not in passed()[EXTRA]
    assert "2 images: 2 up to date" in checkout.builder("images")
    assert "lacks" not in checkout.builder("status", EXTRA, "--format", "json")

    assert "1 image: 1 tested" in checkout.builder("images", EXTRA)
    assert thorough in passed()[EXTRA]
    assert "2 images: 2 up to date" in checkout.builder("images"), "more tests than needed are no fault"
