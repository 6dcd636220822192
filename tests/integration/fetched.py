"""The two real wheels that a build needs, uv and pip, from the index of this machine's settings."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import requests

from builder.index import settings as index
from builder.index.settings import IndexSettings
from tests.integration.wheels import Distribution
from tests.paths import ROOT

TIMEOUT_S = 120
FITS = re.compile(r".*-(manylinux[0-9a-z_.]*_x86_64|any)\.whl")


def fetch(requirement: str, cache: Path) -> Distribution:
    """The wheel of a requirement for this platform, with a checked hash; cached in `cache`."""
    settings = index.read_index_settings(os.environ, Path.home())
    package = _resolve(requirement, settings)
    for entry in package["wheels"]:
        url, sha256 = str(entry["url"]), str(entry["hashes"]["sha256"])
        file = url.rsplit("/", 1)[-1]
        if FITS.fullmatch(file):
            content = _download(url, sha256, cache / file, settings)
            return Distribution(project=package["name"], file=file, content=content)
    raise AssertionError(f"{requirement} has no wheel for this platform")


def common() -> tuple[Distribution, Distribution]:
    """The wheels that every build needs, cached in this checkout."""
    cache = ROOT / ".builder/test-cache"
    uv = (ROOT / "locks/uv.txt").read_text(encoding="utf-8").split()[0]
    return fetch(uv, cache), fetch("pip", cache)


def _resolve(requirement: str, settings: IndexSettings) -> dict[str, Any]:
    with TemporaryDirectory() as scratch:
        requirements, out = Path(scratch) / "in.txt", Path(scratch) / "pylock.toml"
        requirements.write_text(requirement + "\n", encoding="utf-8")
        subprocess.run(
            [
                str(Path(sys.executable).parent / "uv"), "pip", "compile", str(requirements), "--output-file", str(out),
                "--format", "pylock.toml", "--only-binary", ":all:", "--no-deps", "--quiet",
            ],
            env={**os.environ, **settings.environment()}, timeout=TIMEOUT_S, check=True,
        )  # fmt: skip
        packages = tomllib.loads(out.read_text(encoding="utf-8"))["packages"]
    assert len(packages) == 1
    return dict(packages[0])


def _download(url: str, sha256: str, cached: Path, settings: IndexSettings) -> bytes:
    if cached.is_file() and hashlib.sha256(content := cached.read_bytes()).hexdigest() == sha256:
        return content
    answer = requests.get(url, timeout=TIMEOUT_S, verify=settings.ca_bundle or True)
    answer.raise_for_status()
    assert hashlib.sha256(answer.content).hexdigest() == sha256, f"{cached.name} does not match the hash of the index"
    cached.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=cached.parent, delete=False) as part:  # another process may read `cached` now
        part.write(answer.content)
    Path(part.name).replace(cached)
    return answer.content
