"""Docker Engine and containerd of Debian unstable, for the containerd image store: unpacked, not installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from builder.index import host
from tests.integration import programs

PACKAGES = ("docker.io", "containerd")
TIMEOUT_S = 300


def unpack(cache: Path) -> Path:
    """A folder with usr/bin and usr/sbin, from the archive in this machine's apt settings; cached in `cache`."""
    root = cache / "root"
    with programs.locked(cache.with_suffix(".lock")):
        if not (cache / "whole").exists():
            _unpack(cache)
    return root


def _unpack(cache: Path) -> None:
    shutil.rmtree(cache, ignore_errors=True)
    for folder in ("lists/partial", "archives/partial", "root"):
        (cache / folder).mkdir(parents=True)
    settings = host.read_host()
    (main,) = [source.uri for source in settings.apt.sources if source.kind == "main"]
    (cache / "sources.list").write_text(f"deb [signed-by={host.KEYRING}] {main} sid main\n", encoding="utf-8")
    options = {
        "Dir::Etc::SourceList": f"{cache}/sources.list",
        "Dir::Etc::SourceParts": "-",
        "Dir::State::Lists": f"{cache}/lists",
        "Dir::Cache": str(cache),
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-q", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    for command in ([*apt, "update"], [*apt, "download", *PACKAGES]):
        result = subprocess.run(command, cwd=cache, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert result.returncode == 0, settings.hide(f"{' '.join(command[-3:])}\n{result.stderr}")
    for package in PACKAGES:
        (file,) = cache.glob(f"{package}_*.deb")
        subprocess.run(["dpkg", "-x", str(file), f"{cache}/root"], check=True, timeout=TIMEOUT_S)
        file.unlink()
    shutil.rmtree(cache / "lists")
    (cache / "sources.list").unlink()  # no address of a mirror stays
    (cache / "whole").touch()
