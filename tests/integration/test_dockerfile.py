"""Images from Dockerfiles: the files and the configuration of assembled ones, failures, interrupts, logins.

All builds with Dockerfiles are in this file, which one process runs: BuildKit then keeps the operating system.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping

import pytest

from builder.layers.estargz import RESERVED
from builder.plan import settings
from tests.integration.checkout import EXTRA, PLAIN, Checkout, docker
from tests.integration.company import CPU_EXTRA, Company
from tests.integration.conftest import NewCheckout
from tests.integration.index import Fault, Index
from tests.integration.test_interrupted import leftovers
from tests.integration.tree import differences, inspect, tree

METHOD = ("--method", "dockerfile")
SUFFIXES = pytest.mark.parametrize("suffix", ["", "-extra"], ids=["plain", "extra"])
# BuildKit's layers have no table of contents: only those of the builder are eStargz.
MAY_DIFFER = set(RESERVED)
LINK = "opt/venv/lib/python/site-packages/tinyframe/libcudart.so.12"  # COPY changes the modes of the folders above it


# ---- the same image, whoever builds it


@pytest.fixture(scope="module")
def both(new_checkout: NewCheckout, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[str, str]]:
    """By suffix, the ids of an assembled image and of one from the same Dockerfile.

    The plain one is built by `docker build` without the builder (templates/host/README.md), the extra one with it.
    With other settings than the builder's, BuildKit would install the operating system again: 35 s of processor time.
    """
    checkout = new_checkout(tmp_path_factory.mktemp("both"))
    link = checkout.root / "templates/tiny/files" / LINK
    link.parent.mkdir(parents=True)
    link.symlink_to("../nvidia/cuda_runtime/lib/libcudart.so.12")
    (checkout.root / "templates/host/README.md").unlink()  # the builder leaves it out: BuildKit would see a difference
    checkout.lock_and_render()
    checkout.builder("build")
    assembled = {_label(image, "io.github.gpu-images.variant"): image for image in checkout.image_ids()}
    checkout.builder("build", EXTRA, *METHOD)
    [extra] = checkout.image_ids() - set(assembled.values())
    plain = checkout.plain_docker_build(pools=checkout.pools())
    return {
        "": (assembled["plain"], docker("image", "inspect", "--format", "{{.Id}}", plain)),
        "-extra": (assembled["extra"], extra),
    }


def _label(image: str, name: str) -> str:
    return docker("image", "inspect", "--format", f'{{{{index .Config.Labels "{name}"}}}}', image)


@SUFFIXES
def test_every_path_is_the_same(both: Mapping[str, tuple[str, str]], suffix: str) -> None:
    assembled, built = map(tree, both[suffix])
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
def test_the_configuration_is_the_same(both: Mapping[str, tuple[str, str]], suffix: str) -> None:
    assembled, built = map(inspect, both[suffix])
    assert assembled["Entrypoint"]
    if suffix:
        assert {"TINY_EMPTY=", 'TINY_FLAGS=--list=a,b --home=$HOME ${HOME} #"x" \\$PATH \\'} <= {*assembled["Env"]}
    else:  # the builder sets some labels while it builds
        set_later = {name: assembled["Labels"].pop(name, "") for name in settings.built_labels("", "")}
        assert set_later["io.github.gpu-images.plan"].startswith("sha256:")
    assert assembled["Labels"]
    assert assembled == built


@SUFFIXES
def test_it_runs(both: Mapping[str, tuple[str, str]], suffix: str) -> None:
    one, other = (docker("run", "--rm", image, "tinyframe") for image in both[suffix])
    assert one == other != ""


def test_locked_packages_come_from_the_archives_of_apt(checkout: Checkout) -> None:
    """In a `docker build` without the setting `pools`. A whole image: nightly/test_uv_python.py.

    The small packages are those of all archives, and of source packages whose folder begins with `lib`.
    """
    checkout.lock_and_render()
    [path] = (checkout.root / "locks").glob("os-*.json")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith('  {"name"')]
    small = [line for line in lines if json.loads(line.rstrip(","))["size"] < 100_000]
    path.write_text("".join(f"{line}\n" for line in small), encoding="utf-8")
    for name, content in checkout.host_files().items():
        (checkout.root / name).write_bytes(content)
    mounts = {
        "templates/host": "/mnt/host",
        "templates/steps": "/mnt/steps",
        f"locks/{path.name}": "/mnt/packages.json",
    }
    options = [f"--volume={checkout.root / source}:{target}:ro" for source, target in mounts.items()]
    fetch = ". /mnt/host/env.sh && sh /mnt/steps/packages.sh fetch /mnt/packages.json /tmp/debs && ls /tmp/debs"
    image = checkout.base_image()
    listed = docker("run", "--rm", "--network=host", *options, image, "sh", "-euc", fetch)
    assert {f"{json.loads(line.rstrip(','))['sha256']}.deb" for line in small} <= set(listed.split())
    assert not (checkout.root / "templates/host/pools").exists()


# ---- failures


def test_one_image_that_fails_shows_what_uv_says_and_does_not_stop_the_other(
    fresh_extra: Checkout, index: Index
) -> None:
    checkout = fresh_extra
    checkout.lock_and_render()
    index.faults["tinyextra"] = Fault.FILE_HAS_OTHER_BYTES
    output = checkout.builder("images", *METHOD, code=7)
    assert f"{EXTRA}: failed" in output
    assert "  | " in output, "the end of the failing step's output is not shown"
    assert "tinyextra" in output
    assert "Hash mismatch" in output
    assert f"-> Full log: .builder/logs/{EXTRA}.log" in output
    assert index.address not in (checkout.root / f".builder/logs/{EXTRA}.log").read_text(encoding="utf-8")
    assert set(checkout.tags()) == set(checkout.references())
    assert checkout.image_ids() == set(checkout.tags().values())
    assert checkout.working_images() == []

    index.heal()
    assert "2 images: 1 built, 1 tested, 1 tagged, 1 up to date" in checkout.builder("images", *METHOD)
    assert set(checkout.tags()) == {*checkout.references(), *checkout.references("-extra")}


def test_interrupted_builds(fresh: Checkout, index: Index) -> None:
    fresh.lock_and_render()
    for number in (signal.SIGKILL, signal.SIGINT):
        index.faults["tinyframe"] = Fault.FILE_STALLS
        with fresh.running("images", PLAIN, *METHOD) as run:
            run.reaches(index.stalled.is_set, seconds=180)
            run.stops(number)
        index.heal()
        assert fresh.image_ids() == set()
    fresh.builder("images", PLAIN, *METHOD)
    assert set(fresh.tags()) == set(fresh.references())
    assert leftovers(fresh) == []


def test_the_login_of_an_index_is_a_secret(company: Company) -> None:
    checkout = company.checkout
    checkout.lock_and_render(CPU_EXTRA)
    company.start = len(company.public.answered)
    output = checkout.builder("build", *METHOD, CPU_EXTRA)
    assert company.asked_in_public() == []
    assert company.storage.authorized == []
    places = {"output": output.encode()}
    places |= {str(path): path.read_bytes() for path in checkout.root.rglob("*") if path.is_file()}
    (image,) = checkout.image_ids()
    places["history"] = docker("history", "--no-trunc", image).encode()
    assert [place for place, content in places.items() if company.has_password(content)] == []
    assert b"127.0.0.1" not in places["history"]
