"""`builder push` and `builder verify` with a real registry: a push sends only tested images and missing blobs."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from builder.common.reference import ImageRef
from builder.common.retry import RetryPolicy
from builder.index.host import Host
from builder.registry.client import Registry
from tests.integration import registry as registries
from tests.integration import stores
from tests.integration.checkout import BUILDER, EXTRA, PLAIN, Checkout, today
from tests.integration.registry import IMAGE, Fault, Proxy, Server, Trouble

FASTER = ("packages: [tinyextra", "env: {TINY_MODE: fast}, packages: [tinyextra")
EVER = 10**6


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """An empty registry."""
    registries.install()
    with Server(folder=tmp_path / "registry").serving() as running:
        yield running


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server).serving() as running:
        yield running


def push(checkout: Checkout, proxy: Proxy, *cells: str, code: int = 0) -> str:
    return checkout.builder("push", "--to", proxy.address, *cells, code=code)


def registry(checkout: Checkout, proxy: Proxy) -> Registry:
    """The repository of both images, for a reader."""
    reference = ImageRef(registry=f"127.0.0.1:{proxy.server.port}", repository=f"{checkout.namespace}/ty-cuda")
    return Registry(reference, host=Host(), write=True)


def stamped(checkout: Checkout, suffix: str = "", number: int = 0) -> str:
    """The tag of today's release."""
    stamp = today() + (f".{number}" if number else "")
    return f"{checkout.references(suffix)[0].rpartition(':')[2]}-{stamp}"


def tags(checkout: Checkout, proxy: Proxy) -> dict[str, str | None]:
    """Digests in the registry, by moving tag of both images."""
    names = [reference.rpartition(":")[2] for reference in (*checkout.references(), *checkout.references("-extra"))]
    there = registry(checkout, proxy)
    return {name: digest for name in names if (digest := there.digest_of(name))}


def expected_tags(checkout: Checkout) -> dict[str, str]:
    """Digests in the store, by tag."""
    digests = checkout.stored()
    return {
        reference.rpartition(":")[2]: digests[references[0]]
        for references in (checkout.references(), checkout.references("-extra"))
        for reference in references
    }


def manifests(checkout: Checkout, proxy: Proxy, suffix: str) -> int:
    """The sum of bytes of all sent manifests of one image."""
    size = stores.path(checkout.store, checkout.stored()[checkout.references(suffix)[0]]).stat().st_size
    return proxy.count("PUT", "/manifests/") * size


def sent(proxy: Proxy) -> int:
    return proxy.got["PATCH"] + proxy.got["PUT"]


def test_an_untested_image_is_not_sent(released: Checkout, proxy: Proxy) -> None:
    shutil.rmtree(released.root / ".builder/evidence")
    output = push(released, proxy, code=8)
    assert f"{PLAIN}: not tested" in output
    assert f"{EXTRA}: not tested" in output
    released.write_tests({"tiny": "def test_fails():\n    assert 1 == 2\n"})
    released.builder("images", PLAIN, code=8)
    assert f"{PLAIN}: tests failed" in push(released, proxy, PLAIN, code=8)
    released.write_tests({"tiny": "def test_passes():\n    pass\n"})
    assert f"{PLAIN}: test suite changed since it was tested: tests/images/test_tiny.py" in push(
        released, proxy, PLAIN, code=8
    )
    released.edit("matrix.yaml", *FASTER)
    released.builder("render")
    assert f"{EXTRA}: not built" in push(released, proxy, EXTRA, code=8)
    assert proxy.requests == []


def test_a_pulled_image_is_the_same_and_runs(released: Checkout, proxy: Proxy) -> None:
    ids = {suffix: released.tags()[released.references(suffix)[0]] for suffix in ("", "-extra")}
    assert "2 images in the registry" in push(released, proxy)
    assert tags(released, proxy) == expected_tags(released)
    released.docker("image", "rm", "-f", *ids.values())
    for suffix, image_id in ids.items():
        for reference in released.references(suffix):
            pulled = f"127.0.0.1:{proxy.server.port}/{reference}"
            released.docker("pull", "--quiet", pulled)
            assert released.docker("image", "inspect", "--format", "{{.Id}}", pulled) == image_id
        assert released.docker("run", "--rm", pulled, "tinyframe") == released.release


def test_a_second_variant_sends_only_its_own_bytes(released: Checkout, proxy: Proxy) -> None:
    plain, extra = (
        stores.blobs_of(released.store, released.stored()[released.references(suffix)[0]]) for suffix in ("", "-extra")
    )
    push(released, proxy, PLAIN)
    assert sent(proxy) == sum(list(plain.values())[1:]) + manifests(released, proxy, "")
    proxy.heal()
    push(released, proxy, EXTRA)
    own = {blob: size for blob, size in list(extra.items())[1:] if blob not in plain}
    assert 0 < sum(own.values()) < 100_000
    assert sent(proxy) == sum(own.values()) + manifests(released, proxy, "-extra")
    proxy.heal()
    assert "0 tags changed" in push(released, proxy)
    assert proxy.count("POST") == proxy.count("PATCH") == 0
    assert proxy.count("PUT", "/blobs/") == 0


def test_stamped_tags_stay_and_the_others_move_after_all_images_are_sent(released: Checkout, proxy: Proxy) -> None:
    """`1.0.0-cu128-py311` is the new image; with a stamp, it is the image of that day."""
    push(released, proxy)
    first = tags(released, proxy)
    there = registry(released, proxy)
    assert {there.digest_of(stamped(released, suffix)) for suffix in ("", "-extra")} == set(first.values())
    assert "0 tags changed" in push(released, proxy)
    assert there.digest_of(stamped(released, "", 1)) is None, "nothing is new"

    released.edit("matrix.yaml", *FASTER)
    released.edit("matrix.yaml", "tiny: {needs: [cuda]}", "tiny: {needs: [cuda], env: {TINY_MODE: fast}}")
    released.builder("render")
    released.builder("images")
    new = expected_tags(released)
    assert not set(new.values()) & set(first.values())

    extra = released.references("-extra")[0].rpartition(":")[2]
    config = stores.read(released.store, new[extra])["config"]["digest"]
    proxy.troubles.append(Trouble(fault=Fault.STATUS_401, method="HEAD", path=f"/blobs/{config}", times=EVER))
    output = push(released, proxy, code=14)
    assert "401 twice" in output
    plain = released.references()[0].rpartition(":")[2]
    assert f"tags changed before the failure:\n  127.0.0.1:{proxy.address.partition(':')[2]}" in output
    assert there.digest_of(stamped(released, "", 1)) == new[plain], "one image that fails stops the other"
    assert tags(released, proxy) == first

    proxy.heal()
    push(released, proxy)
    assert tags(released, proxy) == new
    for suffix, tag in (("", plain), ("-extra", extra)):
        assert there.digest_of(stamped(released, suffix)) == first[tag]
        assert there.digest_of(stamped(released, suffix, 1)) == new[tag]


def test_the_result_of_a_push_as_json(released: Checkout, proxy: Proxy) -> None:
    command = [str(BUILDER), "--root", str(released.root), "push", "--to", proxy.address, "--format", "json", PLAIN]
    result = subprocess.run(command, env=released.environ, capture_output=True, text=True, timeout=120, check=True)
    data = json.loads(result.stdout)
    [image] = data["images"]
    assert (image["cell"], image["digest"]) == (PLAIN, released.stored()[released.references()[0]])
    assert image["bytes"]["sent"] > 0
    assert {change["state"] for change in data["tags"]} == {"set"}
    assert data["tags"][0]["reference"].endswith(stamped(released))
    assert data["error"] is None


@pytest.mark.parametrize(
    ("path", "number", "code"),
    [
        ("/blobs/uploads/", signal.SIGINT, 130),
        ("/blobs/uploads/", signal.SIGKILL, -signal.SIGKILL),
        ("/manifests/", signal.SIGTERM, 143),
    ],
    ids=["a blob, INT", "a blob, KILL", "a manifest, TERM"],
)
def test_a_push_that_is_stopped(released: Checkout, proxy: Proxy, path: str, number: signal.Signals, code: int) -> None:
    before = stores.leftovers(released.store)
    proxy.troubles.append(Trouble(fault=Fault.STALLS, method="PUT", path=path, after=1, times=EVER))
    with released.running("push", "--to", proxy.address) as run:
        run.reaches(proxy.stalled.is_set)
        run.process.send_signal(number)
        run.ends(code, within_s=RetryPolicy().read_s / 2)  # it does not wait for the registry
    assert tags(released, proxy) == {}
    assert stores.leftovers(released.store) == before
    proxy.heal()
    push(released, proxy)
    assert tags(released, proxy) == expected_tags(released)


def states(output: str) -> list[tuple[str, str]]:
    """The rows of `verify`: state, and the part (configuration, os, files or names of wheels)."""
    rows = []
    for line in output.splitlines():
        if matched := re.fullmatch(r"(derived|known|same|unknown|different|failed) +[0-9a-f]{12}  (.*)", line):
            rows.append((matched[1], matched[2].split("  (")[0]))
    return rows


def test_verify_compares_all_parts_of_an_image_with_the_plan(released: Checkout, proxy: Proxy) -> None:
    push(released, proxy, EXTRA)
    reference = f"{proxy.address}/{released.references('-extra')[0]}"
    proxy.heal()
    output = released.builder("verify", reference)
    wheels = ("nvidia_cuda_runtime_cu12", "nvidia_ml_py, pip, tinyframe", "tinyextra")
    assert sorted(states(output)) == sorted(
        [
            ("same", "configuration"),
            *(("derived", name) for name in (*wheels, "files")),
            *(("known", name) for name in ("os", "files: tiny bytecode", "files: extra bytecode")),
        ]
    )
    assert "verified: 1 same, 4 derived, 3 known" in output
    assert proxy.count("GET", "/blobs/") == 7 + 1, "not every layer was downloaded and hashed, or more than that"
    assert stores.leftovers(released.store) == []
    proxy.heal()
    assert "blobs were not hashed" in released.builder("verify", "--fast", reference)
    assert proxy.count("GET", "/blobs/") == 1, "only the configuration is read"


def test_verify_on_a_machine_that_did_not_build_the_image(released: Checkout, proxy: Proxy, tmp_path: Path) -> None:
    """The layers of Debian and of bytecode are unknown there, which is an error unless it is accepted."""
    push(released, proxy, PLAIN)
    reference = f"{proxy.address}/{released.references()[0]}"
    store = str(tmp_path / "another")
    output = released.builder("--store", store, "verify", reference, code=15)
    assert {name for state, name in states(output) if state == "unknown"} == {"os", "files: tiny bytecode"}
    assert "2 of 6 parts cannot be checked on this machine" in output
    assert "--allow-unknown" in output
    assert "2 unknown" in released.builder("--store", store, "verify", "--allow-unknown", reference)


def test_verify_of_a_missing_image(released: Checkout, proxy: Proxy) -> None:
    missing = f"{proxy.address}/{released.namespace}/ty-cuda:no-such-tag"
    assert "has no no-such-tag" in released.builder("verify", missing, code=14)
    assert "has no image" in released.builder("verify", f"{released.namespace}/ty-cuda:no-such-tag", code=2)


def test_verify_finds_a_damaged_blob_in_the_store(released: Checkout) -> None:
    """`verify` did not read it, and reported the image as equal."""
    layers = dict(stores.layers(released.store, released.stored()[released.references()[0]]))
    stores.flip(released.store, layers["os"])
    output = released.builder("verify", PLAIN, code=15)
    assert ("different", "os") in states(output)
    assert "its blob is damaged" in output
    assert released.builder("verify", "--fast", PLAIN)


def forge(
    checkout: Checkout, there: Registry, tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]
) -> None:
    """Pushes an image as `forged`, with one change in manifest or configuration."""
    manifest = stores.read(checkout.store, checkout.stored()[checkout.references("-extra")[0]])
    config = stores.read(checkout.store, manifest["config"]["digest"])
    change(manifest, config)
    content = json.dumps(config, separators=(",", ":")).encode()
    (tmp_path / "config").write_bytes(content)
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    there.upload(digest, tmp_path / "config", len(content), lambda _: None)
    manifest["config"] |= {"digest": digest, "size": len(content)}
    there.put_manifest("forged", json.dumps(manifest, separators=(",", ":")).encode(), IMAGE)


@pytest.mark.parametrize("what", ["layer", "line", "added layer and user"])
def test_verify_finds_a_change(released: Checkout, proxy: Proxy, tmp_path: Path, what: str) -> None:
    """A layer of another wheel under the old line, a line of another wheel, and an added layer that runs as root.

    The last was "5 not derived", with exit code 0.
    """
    push(released, proxy, EXTRA)
    there = registry(released, proxy)
    content = gzip.compress(b"".join([tarfile.TarInfo("evil").tobuf(), bytes(1024)]))
    added = f"sha256:{hashlib.sha256(content).hexdigest()}"
    (tmp_path / "layer").write_bytes(content)
    there.upload(added, tmp_path / "layer", len(content), lambda _: None)

    def change(manifest: dict[str, Any], config: dict[str, Any]) -> None:
        lines = [line["created_by"] for line in config["history"]]
        index, other = (
            next(n for n, line in enumerate(lines) if f"{name}-" in line) for name in ("tinyframe", "tinyextra")
        )
        if what == "layer":
            manifest["layers"][index] = manifest["layers"][other]
            config["rootfs"]["diff_ids"][index] = config["rootfs"]["diff_ids"][other]
        elif what == "line":
            config["history"][index] = config["history"][other]
        else:
            layer = {"mediaType": manifest["layers"][0]["mediaType"], "digest": added, "size": len(content)}
            manifest["layers"].append(layer)
            config["rootfs"]["diff_ids"].append(f"sha256:{hashlib.sha256(gzip.decompress(content)).hexdigest()}")
            config["history"].append(config["history"][0] | {"created_by": "files: tiny bytecode"})
            config["config"]["User"] = "root"

    forge(released, there, tmp_path, change)
    image = f"{proxy.address}/{released.namespace}/ty-cuda:forged"
    for accept in ((), ("--allow-unknown",)):
        output = released.builder("verify", *accept, image, code=15)
        different = {name for state, name in states(output) if state == "different"}
        if what == "layer":
            assert different == {"nvidia_ml_py, pip, tinyframe"}
        elif what == "line":
            assert different == {"configuration", "tinyextra"}
            assert "history[" in output
        else:
            assert "configuration" in different
            assert "8 layers, expected 7" in output
        assert "parts are not as expected" in output


def test_new_debian_packages_move_only_the_operating_system(released: Checkout, proxy: Proxy) -> None:
    push(released, proxy)
    before = released.stored()
    # As after `builder lock --os`: another operating system, and nothing else.
    template = (released.root / "templates/os.j2").read_text(encoding="utf-8")
    patched = f"{template}RUN echo {released.release} > /etc/patched\n"
    (released.root / "templates/os.j2").write_text(patched, encoding="utf-8")
    released.builder("render")
    output = released.builder("images")
    assert "2 images built, tested and tagged" in output
    after = released.stored()
    own: dict[str, int] = {}
    for name, digest in after.items():
        assert digest != before[name]
        old, now = stores.layers(released.store, before[name]), stores.layers(released.store, digest)
        assert [line for line, _ in old] == [line for line, _ in now]
        changed = [(line, layer) for (line, layer), (_, other) in zip(now, old, strict=True) if layer != other]
        assert [line for line, _ in changed] == ["os"]
        config = stores.read(released.store, digest)["config"]["digest"]
        blobs = stores.blobs_of(released.store, digest)
        own |= {blob: blobs[blob] for blob in (changed[0][1], config)}
        assert released.docker("run", "--rm", name, "cat", "/etc/patched") == released.release

    proxy.heal()
    output = push(released, proxy)
    assert {registry(released, proxy).digest_of(stamped(released, suffix, 1)) for suffix in ("", "-extra")} == set(
        after.values()
    )
    size = {name: stores.path(released.store, digest).stat().st_size for name, digest in after.items()}
    puts = [request for request in proxy.requests if request.startswith("PUT") and "/manifests/" in request]
    assert len(own) == 3
    assert sent(proxy) == sum(own.values()) + sum(size.values()) * (len(puts) // 2)
