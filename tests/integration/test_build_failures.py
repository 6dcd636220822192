"""Builds that fail: which package and why, the end of the step's output, and where the whole log is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.checkout import EXTRA, METHODS, PLAIN, Checkout
from tests.integration.conftest import NewCheckout
from tests.integration.index import Fault, Index

OS = "the log of the operating system"


def fails(checkout: Checkout, code: int, *, method: str = "assemble", log: str = "") -> str:
    """A build that fails for a reason that is the image's; everything it said. `log` is that of a step that failed."""
    told = checkout.builder("images", PLAIN, "--method", method, code=code)
    assert f"{PLAIN}: failed" in told
    assert "  -> " in told, "there is no hint"
    if log:
        path = checkout.os_log() if log == OS else checkout.root / f".builder/logs/{log}.log"
        assert str(path.relative_to(checkout.root)) in told
        assert "  | " in told, "the end of the failing step's output is not shown"
        assert path.stat().st_size > 0
        assert checkout.index.address not in path.read_text(encoding="utf-8")
    assert checkout.tags() == {}
    assert checkout.image_ids() == set()
    assert checkout.working_images() == []
    assert checkout.stored() == {}
    return told


@pytest.fixture(scope="module")
def project(new_checkout: NewCheckout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout that is never built to the end."""
    made = new_checkout(tmp_path_factory.mktemp("unbuilt"))
    made.lock_and_render()
    return made


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault.FILE_HAS_OTHER_BYTES, "other bytes than the lock says"),
        (Fault.FILE_404, "404"),
        (Fault.PAGE_404, "does not list it"),
    ],
)
def test_a_fault_of_the_index_names_the_wheel(project: Checkout, index: Index, fault: Fault, words: str) -> None:
    index.faults["tinyframe"] = fault
    told = fails(project, 13)
    assert f"tinyframe-{project.release}-py3-none-any.whl" in told
    assert words in told


@pytest.mark.parametrize(
    ("fault", "words"), [(Fault.FILE_HAS_OTHER_BYTES, "Hash mismatch"), (Fault.FILE_404, "404"), (Fault.PAGE_404, "")]
)
def test_by_dockerfile_it_names_the_package(project: Checkout, index: Index, fault: Fault, words: str) -> None:
    index.faults["tinyframe"] = fault
    told = fails(project, 7, method="dockerfile", log=PLAIN)
    for word in ("tinyframe", "install tiny wheels", words):
        assert word in told


def test_an_index_with_a_password_does_not_enter_a_build(project: Checkout, index: Index) -> None:
    url = index.url.replace("://", "://someone:a-secret@")
    told = project.builder("images", "--method", "dockerfile", code=2, UV_DEFAULT_INDEX=url)
    assert "user name or password" in told
    assert "a-secret" not in told
    assert project.image_ids() == set()


def test_a_password_is_used_for_fetching_and_kept_nowhere(checkout: Checkout, index: Index) -> None:
    """An image that is assembled needs no index in any container."""
    checkout.lock_and_render()
    store = checkout.take_store(like=checkout.store)
    told = checkout.builder("build", PLAIN, UV_DEFAULT_INDEX=index.url.replace("://", "://someone:a-secret@"))
    assert "a-secret" not in told
    assert len(checkout.image_ids()) == 1
    files = [path for top in (store, checkout.root / ".builder") for path in top.rglob("*") if path.is_file()]
    assert store / "index.json" in files
    assert [path for path in files if b"a-secret" in path.read_bytes()] == []


@pytest.mark.parametrize("method", METHODS)
def test_a_certificate_bundle_that_is_not_there_is_named(project: Checkout, tmp_path: Path, method: str) -> None:
    missing = str(tmp_path / "no-bundle.pem")
    assert missing in project.builder("images", "--method", method, code=2, SSL_CERT_FILE=missing)


@pytest.mark.parametrize(("method", "code"), [("assemble", 13), ("dockerfile", 7)])
def test_one_image_that_fails_does_not_stop_the_other(checkout: Checkout, index: Index, method: str, code: int) -> None:
    checkout.lock_and_render()
    index.faults["tinyextra"] = Fault.FILE_404
    told = checkout.builder("images", "--method", method, code=code)
    assert f"{EXTRA}: failed" in told
    assert "tinyextra" in told
    assert set(checkout.tags()) == set(checkout.references())

    index.heal()
    assert "1 images built, tested and tagged, 1 images up to date" in checkout.builder("images", "--method", method)
    assert set(checkout.tags()) == {*checkout.references(), *checkout.references("-extra")}


@pytest.mark.parametrize(("method", "log"), [("assemble", OS), ("dockerfile", PLAIN)])
def test_a_debian_package_that_does_not_exist_is_named(checkout: Checkout, method: str, log: str) -> None:
    checkout.edit("matrix.yaml", "apt: [ca-certificates, tini]", "apt: [ca-certificates, no-such-package, tini]")
    checkout.lock_and_render()
    assert "no-such-package" in fails(checkout, 7, method=method, log=log)
