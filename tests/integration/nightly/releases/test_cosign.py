"""Releases signed by the newest cosign that Debian has, also after releases signed by cosign 2."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration import programs
from tests.integration.checkout import EXTRA, PLAIN, Checkout
from tests.integration.registry import Proxy
from tests.integration.releases.machines import UNTESTED_GPU, elsewhere, public, release, stage, status, verified


@pytest.fixture(scope="session")
def cosign_3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of cosign 3, for PATH."""
    folder = programs.unpack_from("forky", "cosign", tmp_path_factory.mktemp("cosign"))
    # Debian's cosign does not print its version: check for an option of cosign 3.
    assert "--use-signing-config" in subprocess.check_output([folder / "cosign", "sign", "--help"], text=True)
    return folder


def signatures(checkout: Checkout, proxy: Proxy) -> dict[str, Any]:
    return {cell: row["signature"] for cell, row in status(checkout).items()}


def verify(checkout: Checkout, proxy: Proxy, keys: Path, tag: str, *arguments: str, code: int = 0) -> str:
    image = f"{proxy.address}/{checkout.references('-extra')[0].rpartition(':')[0]}:{tag}"
    return checkout.builder("verify", image, "--key", str(keys / "ours.pub"), *arguments, code=code)


def test_cosign_3_can_release_after_cosign_2(
    ours: Checkout, proxy: Proxy, keys: Path, cosign_3: Path, tmp_path: Path
) -> None:
    sign = ("--sign", str(keys / "ours.key"))
    newer = dataclasses.replace(ours, environ={**ours.environ, "PATH": f"{cosign_3}:{os.environ['PATH']}"})
    full = ours.references("-extra")[0].rpartition(":")[2]
    first = stage(ours, PLAIN, *sign)
    release(ours, first, UNTESTED_GPU, *sign)
    assert signatures(newer, proxy) == {PLAIN: "yes", EXTRA: "-"}
    # cosign 3 then attaches statements of its own, beside which it ignores the signature of cosign 2.
    there = public(ours, proxy)
    digest = ours.stored()[ours.references()[0]]
    assert there.delete_manifest(str(there.digest_of(f"{digest.replace(':', '-')}.att")))
    # Test results that cosign 2 signed count for cosign 3 beside those that it signed itself, but not the reverse.
    second = stage(newer, *sign)
    assert second != first
    release(elsewhere(newer, tmp_path / "newer"), second, UNTESTED_GPU, "--check")
    output = release(elsewhere(ours, tmp_path / "older"), second, UNTESTED_GPU, "--check", code=15)
    assert f"{PLAIN}: done in " in output
    assert "no signer listed under `evidence` in matrix.yaml signed it" in output.partition(f"{EXTRA}: no valid")[2]
    release(newer, second, UNTESTED_GPU, *sign)
    assert signatures(newer, proxy) == {PLAIN: "yes", EXTRA: "yes"}
    assert signatures(ours, proxy) == {PLAIN: "yes", EXTRA: "untrusted"}, "as `verify` with cosign 2, below"
    output = verify(newer, proxy, keys, full)
    parts = verified(output)
    assert parts["signature"] == parts["provenance"] == parts["test"] == "signed"
    verify(newer, proxy, keys, ours.references()[0].rpartition(":")[2])
    verify(newer, proxy, keys, f"{full}-{second}")
    # Another tag of the same image is not signed.
    stored = there.manifest(full)
    assert stored
    there.put_manifest(f"{full}-20200101", stored.content, stored.media_type)
    assert f"not for {full}-20200101" in verify(newer, proxy, keys, f"{full}-20200101", code=15)
    assert "no trusted signer signed it" in newer.builder(
        "verify", f"{proxy.address}/{ours.references()[0]}", "--key", str(keys / "theirs.pub"), code=15
    )
    assert "no trusted signer signed it" in verify(ours, proxy, keys, full, code=15)
