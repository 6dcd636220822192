"""Images with NVIDIA's archives, from a mirror on the loopback: locked, downloaded by their hash, built both ways."""

from __future__ import annotations

import json

import pytest

from builder.layers.estargz import RESERVED
from tests.fakes.redist import list_text, locked, pack, path_of
from tests.integration import wheels
from tests.integration.checkout import EXTRA, USER, Checkout
from tests.integration.conftest import NewCheckout
from tests.integration.index import Index
from tests.integration.tree import differences, tree
from tests.integration.wheels import Distribution

RELEASE = "12.8.1"
COMPILER = '#!/bin/sh\ncat "${0%/*}/../include/cuda.h" "${0%/*}/../lib64/libcudart.so"\n'
ARCHIVES = {
    "cuda_nvcc": pack("cuda_nvcc", {"LICENSE": b"terms", "bin/nvcc": COMPILER.encode(), "nvvm/lib64/libnvvm.a": b"a"}),
    "cuda_cudart": pack(
        "cuda_cudart",
        {"LICENSE": b"terms", "include/cuda.h": b"header ", "lib/stubs/libcuda.so": b"stub", "lib/libx.so": "stubs"},
    ),
}


@pytest.fixture(scope="module")
def made(served: Index, new_checkout: NewCheckout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout with a component that has archives; its image is built."""
    content = list_text(ARCHIVES)
    served.publish(Distribution(project=f"redistrib_{RELEASE}.json", file="", content=content))
    for name, archive in ARCHIVES.items():
        project, _, file = path_of(name).partition("/")
        served.publish(Distribution(project=project, file=file, content=archive))
    served.publish(wheels.wheel("cuda-toolkit", RELEASE, {}))
    checkout = new_checkout(tmp_path_factory.mktemp("redist"))
    checkout.environ["NVIDIA_REDIST_MIRROR"] = f"http://{checkout.index.address}/files"
    checkout.edit("matrix.yaml", '  "12.8": {}', f'  "12.8": {{toolkit: {RELEASE}}}')
    archives = '{needs: [cuda], redist: {"12": [cuda_nvcc, cuda_cudart]}}'
    checkout.edit("matrix.yaml", "  extra: {needs", f"  compiler: {archives}\n  extra: {{needs")
    checkout.edit("matrix.yaml", "  extra: [extra]", "  extra: [extra, compiler]")
    checkout.lock_and_render()
    checkout.write_tests({"base": USER, "python": USER, "compiler": USER})
    checkout.index.answered.clear()
    checkout.builder("images", EXTRA)
    return checkout


def test_the_lock_has_the_archives_by_their_hash_and_no_address(made: Checkout) -> None:
    lock = json.loads((made.root / "locks/ty-1.0-cu128-py311.json").read_text("utf-8"))
    assert lock["archives"] == [vars(locked(name, content)) for name, content in ARCHIVES.items()]
    assert made.index.address not in json.dumps(lock)
    assert "up to date" in made.builder("lock", "--check")


def test_a_compiler_finds_its_headers_and_the_libraries_of_wheels(made: Checkout) -> None:
    output = made.docker("run", "--rm", made.references("-extra")[0], "sh", "-c", '"$CUDA_HOME/bin/nvcc"')
    assert output.startswith("header not a library ")
    nodes = tree(made.references("-extra")[0])
    assert nodes["opt/venv/lib/python/site-packages/nvidia/toolkit/licenses/cuda_cudart/LICENSE"].mode == 0o644
    assert nodes["opt/venv/lib/python/site-packages/nvidia/toolkit/bin/nvcc"].mode == 0o755


def test_archives_are_downloaded_once_and_kept_in_the_store(made: Checkout) -> None:
    paths = [f"/files/{path_of(name)}" for name in ARCHIVES]
    assert [each.path for each in made.index.answered if each.path in paths] == paths
    blobs = [made.store / "blobs/sha256" / locked(name, content).sha256 for name, content in ARCHIVES.items()]
    made.builder("gc")
    assert all(blob.exists() for blob in blobs)


def test_a_dockerfile_gives_the_same_files(made: Checkout) -> None:
    expected = tree(made.references("-extra")[0])
    before = made.image_ids()
    made.builder("build", EXTRA, "--method", "dockerfile")
    [image] = made.image_ids() - before
    actual = tree(image)
    for reserved in RESERVED:
        del expected[reserved]
    assert "opt/venv/lib/python/site-packages/nvidia/toolkit/lib/libcudart.so" in expected
    assert differences(expected, actual) == {}
    address = made.docker("history", "--no-trunc", image) + made.docker("inspect", image)
    assert made.index.address not in address
