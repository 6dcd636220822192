"""Debian packages and a service are put on an image: by the real apt and mmdebstrap, in a container of the result."""

from __future__ import annotations

import json

from tests.integration import stores
from tests.integration.checkout import Checkout


def test_packages_and_a_service(released: Checkout) -> None:
    parent, image = released.references()[0], f"{released.namespace}/vision:1"
    request = [parent, "--apt", "tmux", "--service", "web=python -m http.server 8123", "-t", image]
    output = released.builder("add", *request)
    assert "libutempter0" in output.partition("debian ")[2]
    digest = stores.images(released.store)[image]
    layers = stores.layers(released.store, digest)
    assert [line for line, _ in layers[-2:]] == ["apt: tmux", "files: copied"]
    assert layers[:-2] == stores.layers(released.store, stores.images(released.store)[parent])

    # dpkg knows the packages, their programs run, and nothing became setuid: libutempter0 has a setgid program.
    run = ["run", "--rm", "--entrypoint=sh", image, "-c"]
    assert released.docker(*run, "tmux -V && dpkg --audit").startswith("tmux 3.")
    assert released.docker(*run, "find /usr /etc -perm /6000 -type f; ls /usr/lib/*/utempter").strip() == "utempter"
    assert "drwxr-xr-x" in released.docker(*run, "ls -ld /etc/services.d/web")
    container = released.docker("run", "-d", image).strip()
    try:
        get = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8123').status)"
        retry = f'for i in 1 2 3 4 5 6 7 8 9; do python -c "{get}" 2>/dev/null && break; sleep 1; done'
        assert "200" in released.docker("exec", container, "sh", "-c", retry)
    finally:
        released.docker("rm", "-f", container)

    # The layer is the same when it is made again, also on the image itself.
    for record in (released.store / "layers").iterdir():
        if json.loads(record.read_text(encoding="utf-8")).get("digest") == layers[-2][1]:
            record.unlink()
    released.builder("add", *request)
    assert stores.images(released.store)[image] == digest
    output = released.builder("add", image, "--apt", "tree", "-t", f"{released.namespace}/vision:2")
    assert "1 new: tree" in output
    run[3] = f"{released.namespace}/vision:2"
    assert "tmux 3." in released.docker(*run, "tree --version && tmux -V")


def test_packages_that_do_not_exist(released: Checkout) -> None:
    output = released.builder("add", released.references()[0], "--apt", "no-such-package", "-t", "team/x:1", code=4)
    assert "Unable to locate package no-such-package" in output
