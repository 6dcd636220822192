"""`builder push` and `builder verify` with a real registry: only what was tested, and only what is missing, is sent."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.host import Host
from builder.reference import ImageRef
from builder.registry import Registry
from tests.integration import registry as registries
from tests.integration import stores
from tests.integration.checkout import EXTRA, PLAIN, Checkout
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
    """As a reader of it sees the repository of both images."""
    reference = ImageRef(registry=f"127.0.0.1:{proxy.server.port}", repository=f"{checkout.namespace}/ty-cuda")
    return Registry(reference, host=Host(), write=True)


def tags(checkout: Checkout, proxy: Proxy) -> dict[str, str | None]:
    """Tag -> digest in the registry, of all tags that both images may have."""
    names = [one.rpartition(":")[2] for one in (*checkout.references(), *checkout.references("-extra"))]
    there = registry(checkout, proxy)
    return {name: found for name in names if (found := there.digest_of(name))}


def wanted(checkout: Checkout) -> dict[str, str]:
    """Tag -> digest in the store."""
    made = checkout.stored()
    return {
        one.rpartition(":")[2]: made[references[0]]
        for references in (checkout.references(), checkout.references("-extra"))
        for one in references
    }


def manifests(checkout: Checkout, proxy: Proxy, suffix: str) -> int:
    """Bytes of all manifests that were sent, of one image."""
    size = stores.path(checkout.store, checkout.stored()[checkout.references(suffix)[0]]).stat().st_size
    return proxy.count("PUT", "/manifests/") * size


def sent(proxy: Proxy) -> int:
    return proxy.got["PATCH"] + proxy.got["PUT"]


def test_what_was_not_tested_is_not_sent(released: Checkout, proxy: Proxy) -> None:
    shutil.rmtree(released.root / ".builder/evidence")
    told = push(released, proxy, code=8)
    assert f"{PLAIN}: not tested" in told
    assert f"{EXTRA}: not tested" in told
    released.write_tests({"tiny": "def test_fails():\n    assert 1 == 2\n"})
    released.builder("images", PLAIN, code=8)
    assert f"{PLAIN}: its tests failed" in push(released, proxy, PLAIN, code=8)
    released.write_tests({"tiny": "def test_passes():\n    pass\n"})
    assert f"{PLAIN}: tested by other tests" in push(released, proxy, PLAIN, code=8)
    released.edit("matrix.yaml", *FASTER)
    released.builder("render")
    assert f"{EXTRA}: not built" in push(released, proxy, EXTRA, code=8)
    assert proxy.requests == []


def test_pulled_by_its_tag_it_is_the_same_image_and_runs(released: Checkout, proxy: Proxy) -> None:
    ids = {suffix: released.tags()[released.references(suffix)[0]] for suffix in ("", "-extra")}
    assert "2 images published" in push(released, proxy)
    assert tags(released, proxy) == wanted(released)
    released.docker("image", "rm", "-f", *ids.values())
    for suffix, image_id in ids.items():
        for reference in released.references(suffix):
            pulled = f"127.0.0.1:{proxy.server.port}/{reference}"
            released.docker("pull", "--quiet", pulled)
            assert released.docker("image", "inspect", "--format", "{{.Id}}", pulled) == image_id
        assert released.docker("run", "--rm", pulled, "tinyframe") == released.release


def test_of_the_second_variant_only_its_own_bytes_are_sent(released: Checkout, proxy: Proxy) -> None:
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
    assert "published" in push(released, proxy)
    assert proxy.count("POST") == proxy.count("PATCH") == 0
    assert proxy.count("PUT", "/blobs/") == 0


def test_full_tags_stay_and_the_others_move_when_all_images_are_there(released: Checkout, proxy: Proxy) -> None:
    push(released, proxy)
    first = tags(released, proxy)
    full = [released.references(suffix)[0].rpartition(":")[2] for suffix in ("", "-extra")]
    released.edit("matrix.yaml", *FASTER)
    released.edit("matrix.yaml", "tiny: {needs: [cuda]}", "tiny: {needs: [cuda], env: {TINY_MODE: fast}}")
    released.builder("render")
    released.builder("images")
    new = wanted(released)
    assert not set(new.values()) & set(first.values())

    config = stores.read(released.store, new[full[1]])["config"]["digest"]
    proxy.troubles.append(Trouble(fault=Fault.STATUS_401, method="HEAD", path=f"/blobs/{config}", times=EVER))
    told = push(released, proxy, code=14)
    assert "401 twice" in told
    assert registry(released, proxy).manifest(new[full[0]]) is not None, "one image that fails stops the other"
    assert tags(released, proxy) == first

    proxy.heal()
    told = push(released, proxy)
    for tag in full:
        assert f"{tag} stays at {first[tag]}: a versioned tag is never moved" in told
    assert tags(released, proxy) == {tag: (first if tag in full else new)[tag] for tag in first}


@pytest.mark.parametrize(
    ("path", "number", "code"),
    [
        ("/blobs/uploads/", signal.SIGINT, 130),
        ("/blobs/uploads/", signal.SIGKILL, -signal.SIGKILL),
        ("/manifests/", signal.SIGTERM, 143),
    ],
    ids=["a blob, INT", "a blob, KILL", "a manifest, TERM"],
)
def test_stopped_while_it_pushes(
    released: Checkout, proxy: Proxy, path: str, number: signal.Signals, code: int
) -> None:
    before = stores.leftovers(released.store)
    proxy.troubles.append(Trouble(fault=Fault.STALLS, method="PUT", path=path, after=1, times=EVER))
    with released.running("push", "--to", proxy.address) as run:
        run.reaches(proxy.stalled.is_set)
        run.process.send_signal(number)
        run.ends(code)
    assert tags(released, proxy) == {}
    assert stores.leftovers(released.store) == before
    proxy.heal()
    push(released, proxy)
    assert tags(released, proxy) == wanted(released)


def test_verify_makes_every_layer_of_wheels_again(released: Checkout, proxy: Proxy) -> None:
    push(released, proxy, EXTRA)
    reference = f"{proxy.address}/{released.references('-extra')[0]}"
    told = released.builder("verify", reference)
    lines = {line.split()[-1]: line.split()[0] for line in told.splitlines() if line.startswith("same")}
    assert set(lines) == {"nvidia_cuda_runtime_cu12", "tinyframe", "pip", "tinyextra"}
    assert "4 layers of wheels are what the index gives" in told
    assert stores.leftovers(released.store) == []


@pytest.mark.parametrize("what", ["layer", "line"])
def test_verify_finds_what_is_not_what_its_history_says(
    released: Checkout, proxy: Proxy, tmp_path: Path, what: str
) -> None:
    """A layer of another wheel under the old line, and a line that names another wheel than the layer is of."""
    push(released, proxy, EXTRA)
    there = registry(released, proxy)
    manifest = stores.read(released.store, released.stored()[released.references("-extra")[0]])
    config = stores.read(released.store, manifest["config"]["digest"])
    lines = [one["created_by"] for one in config["history"]]
    ours, other = (next(n for n, line in enumerate(lines) if f"{name}-" in line) for name in ("tinyframe", "tinyextra"))
    if what == "layer":
        manifest["layers"][ours] = manifest["layers"][other]
        config["rootfs"]["diff_ids"][ours] = config["rootfs"]["diff_ids"][other]
    else:
        config["history"][ours] = config["history"][other]
    (tmp_path / "config").write_text(json.dumps(config), encoding="utf-8")
    content = (tmp_path / "config").read_bytes()
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    there.upload(digest, tmp_path / "config", len(content), lambda _: None)
    manifest["config"] |= {"digest": digest, "size": len(content)}
    there.put_manifest("forged", json.dumps(manifest).encode(), IMAGE)

    told = released.builder("verify", f"{proxy.address}/{released.namespace}/ty-cuda:forged", code=15)
    (line,) = [line for line in told.splitlines() if line.startswith("different")]
    assert ("tinyframe" if what == "layer" else "tinyextra") in line
    assert "1 of 9 layers are not what their history says" in told


def test_new_debian_packages_move_only_the_operating_system(released: Checkout, proxy: Proxy) -> None:
    push(released, proxy)
    before = released.stored()
    (record,) = stores.os_records(released.store)
    # What `rebase` would find if a package had changed: the same inputs, made into another layer.
    template = (released.root / "templates/os.j2").read_text(encoding="utf-8")
    patched = f"{template}RUN echo {released.release} > /etc/patched\n"
    (released.root / "templates/os.j2").write_text(patched, encoding="utf-8")
    released.builder("render")
    released.builder("build", PLAIN)
    (new,) = set(stores.os_records(released.store)) - {record}
    new.replace(record)
    (released.root / "templates/os.j2").write_text(template, encoding="utf-8")
    released.builder("render")

    told = released.builder("images")
    assert "2 images built, tested and tagged" in told
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
    told = push(released, proxy)
    assert told.count("stays at") == 2
    size = {name: stores.path(released.store, digest).stat().st_size for name, digest in after.items()}
    puts = [one for one in proxy.requests if one.startswith("PUT") and "/manifests/" in one]
    assert len(own) == 3
    assert sent(proxy) == sum(own.values()) + sum(size.values()) * (len(puts) // 2)
