"""Machines that share a registry: what the tests of staging and releases do with them."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

from builder.registry.client import Repository
from tests.integration.checkout import Checkout
from tests.integration.registry import Proxy

UNTESTED_GPU = "--allow-untested-gpu"


def elsewhere(checkout: Checkout, folder: Path) -> Checkout:
    """Another machine with the same checkout: an empty store and no evidence."""
    shutil.copytree(checkout.root, folder / "checkout", symlinks=True, ignore=shutil.ignore_patterns(".builder"))
    environ = {**checkout.environ, "GPU_IMAGES_STORE": str(folder / "store")}
    return dataclasses.replace(checkout, root=folder / "checkout", environ=environ)


def stage(checkout: Checkout, *arguments: str) -> str:
    """Stages both images; returns the stamp."""
    output = checkout.builder("stage", *arguments, "--format", "github")
    match = re.search(r"^stamp=(\S+)$", output, re.MULTILINE)
    assert match, output
    return match[1]


def status(checkout: Checkout) -> dict[str, dict[str, Any]]:
    """The rows of `builder status`, by cell."""
    output = checkout.builder("status", "--format", "json")
    # A warning about cosign, on stderr, may come first.
    return {row["cell"]: row for row in json.loads(output[output.index("[\n") :])}


def public(checkout: Checkout, proxy: Proxy) -> Repository:
    return proxy.repository(f"{checkout.namespace}/ty-cuda")


def verified(output: str) -> dict[str, str]:
    """The state of each part in the output of `builder verify`, by the first word of its name."""
    return {line.split()[2]: line.split()[0] for line in output.splitlines() if line[:1].islower()}


def release(checkout: Checkout, *arguments: str, code: int = 0) -> str:
    return checkout.builder("release", *arguments, code=code)


def tags(checkout: Checkout, proxy: Proxy) -> dict[str, str | None]:
    """Digests by tag, of all tags for people."""
    there = public(checkout, proxy)
    return {tag: there.digest_of(tag) for tag in there.list_tags() if not tag.startswith("sha256-")}
