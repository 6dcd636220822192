"""Builds that fail: which package and why, the end of the step's output, and where the whole log is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.checkout import EXTRA, PLAIN, Checkout
from tests.integration.conftest import NewCheckout
from tests.integration.index import Fault, Index


def fails(checkout: Checkout, cell: str) -> str:
    """A build that fails for a reason that is the image's; everything it said."""
    told = checkout.builder("images", cell, code=7)
    log = f".builder/logs/{cell}.log"
    assert log in told
    assert (checkout.root / log).stat().st_size > 0
    assert "  | " in told, "the end of the failing step's output is not shown"
    assert checkout.index.address not in (checkout.root / log).read_text(encoding="utf-8")
    assert checkout.tags() == {}
    assert checkout.image_ids() == set()
    return told


@pytest.fixture(scope="module")
def project(new_checkout: NewCheckout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout that is never built to the end."""
    made = new_checkout(tmp_path_factory.mktemp("unbuilt"))
    made.lock_and_render()
    return made


@pytest.mark.parametrize(
    ("fault", "words"),
    [(Fault.FILE_HAS_OTHER_BYTES, ["Hash mismatch"]), (Fault.FILE_404, ["404"]), (Fault.PAGE_404, [])],
)
def test_a_fault_of_the_index_names_the_package(
    project: Checkout, index: Index, fault: Fault, words: list[str]
) -> None:
    index.faults["tinyframe"] = fault
    told = fails(project, PLAIN)
    for word in (PLAIN, "tinyframe", "install tiny wheels", *words):
        assert word in told


def test_an_index_with_a_password_does_not_enter_a_build(project: Checkout, index: Index) -> None:
    told = project.builder("images", code=2, UV_DEFAULT_INDEX=index.url.replace("://", "://someone:a-secret@"))
    assert "user name or password" in told
    assert "a-secret" not in told
    assert project.image_ids() == set()


def test_a_certificate_bundle_that_is_not_there_is_named(project: Checkout, tmp_path: Path) -> None:
    missing = str(tmp_path / "no-bundle.pem")
    assert missing in project.builder("images", code=2, SSL_CERT_FILE=missing)


def test_one_image_that_fails_does_not_stop_the_other(checkout: Checkout, index: Index) -> None:
    checkout.lock_and_render()
    index.faults["tinyextra"] = Fault.FILE_TRUNCATED
    told = checkout.builder("images", code=7)
    assert f"{EXTRA}: failed" in told
    assert "tinyextra" in told
    assert set(checkout.tags()) == set(checkout.references())

    index.heal()
    assert "1 images built, tested and tagged, 1 images up to date" in checkout.builder("images")
    assert set(checkout.tags()) == {*checkout.references(), *checkout.references("-extra")}


def test_a_debian_package_that_does_not_exist_is_named(checkout: Checkout) -> None:
    checkout.edit("matrix.yaml", "apt: [ca-certificates, tini]", "apt: [ca-certificates, no-such-package, tini]")
    checkout.lock_and_render()
    assert "no-such-package" in fails(checkout, PLAIN)
