"""Failing builds: the message has the package, the reason, and what to do."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration import wheels
from tests.integration.checkout import EXTRA, PLAIN, Checkout, docker
from tests.integration.index import Index


def test_a_password_is_used_for_downloads_and_stored_nowhere(fresh_extra: Checkout, index: Index) -> None:
    """The assemble method needs no index in a container."""
    checkout = fresh_extra
    checkout.lock_and_render()
    store = checkout.take_store(like=checkout.store)
    output = checkout.builder("build", EXTRA, UV_DEFAULT_INDEX=index.url.replace("://", "://someone:a-secret@"))
    assert "a-secret" not in output
    assert len(checkout.image_ids()) == 1
    files = [path for top in (store, checkout.root / ".builder") for path in top.rglob("*") if path.is_file()]
    assert store / "index.json" in files
    assert [path for path in files if b"a-secret" in path.read_bytes()] == []


def test_two_wheels_with_different_files_for_one_path(checkout: Checkout, index: Index) -> None:
    """The image has the file of the later one, and its bytecode. With a Dockerfile: test_dockerfile.py."""
    for name in ("tinyone", "tinytwo"):
        index.publish(wheels.wheel(name, "1.0", {"shared.py": f"NAME = '{name}'\n".encode(), f"{name}.py": b""}))
    checkout.edit("matrix.yaml", f"[tinyextra=={checkout.extra}]", "[tinyextra, tinyone, tinytwo]")
    checkout.lock_and_render()
    path = "/opt/venv/lib/python/site-packages/shared.py"
    output = checkout.builder("build", EXTRA)
    both = "tinyone-1.0-py3-none-any.whl and tinytwo-1.0-py3-none-any.whl"
    assert f"{both} have different files for {path}; the later wheel's are used" in output
    [image] = checkout.image_ids()
    program = "import shared; print(open(shared.__file__).read(), shared.NAME, open(shared.__cached__, 'rb').read())"
    shown = docker("run", "--rm", image, "python", "-c", program)  # the bytecode is not compared with its source
    assert ("tinyone" in shown, shown.count("tinytwo")) == (False, 3)


def test_a_debian_package_that_does_not_exist_is_not_locked(checkout: Checkout) -> None:
    checkout.edit("matrix.yaml", "libnss-extrausers, tini]", "libnss-extrausers, no-such-package, tini]")
    assert "Unable to locate package no-such-package" in checkout.builder("lock", code=18)
    checkout.edit("matrix.yaml", "no-such-package", "libgcc1")
    assert "libgcc1 is a virtual package" in checkout.builder("lock", code=4)


def edit_lock(checkout: Checkout, change: dict[str, str]) -> tuple[Path, str]:
    """Changes the package tini in the lock of the operating system; returns its path, and the text before."""
    checkout.lock_and_render()
    [path] = (checkout.root / "locks").glob("os-*.json")
    current = path.read_text(encoding="utf-8")
    [line] = [line for line in current.splitlines() if '"name": "tini"' in line]
    edited = json.dumps(json.loads(line.strip(" ,")) | change)
    path.write_text(current.replace(line.strip(" ,"), edited), encoding="utf-8")
    return path, current


def test_locked_packages_that_the_archives_do_not_have(checkout: Checkout) -> None:
    """As after an update of Debian."""
    path, current = edit_lock(checkout, {"version": "0.1-1", "sha256": "0" * 64})
    stale = path.read_text(encoding="utf-8")
    output = checkout.builder("build", PLAIN, "--locked", code=5)
    assert "tini 0.1-1 -> " in output
    assert "Run the same command with --no-locked" in output
    assert "wheels:" not in output, "nothing is downloaded"
    assert path.read_text(encoding="utf-8") == stale

    output = checkout.builder("build", PLAIN)
    assert f"{PLAIN}: done" in output or "built" in output
    assert "git commit -m 'Update Debian packages' locks" in output
    requested = '"requested"'  # what follows the time of the lock
    assert path.read_text(encoding="utf-8").partition(requested)[2] == current.partition(requested)[2]
