"""The build backend: flit's, and a wheel with the files that a team's repository uses, in builder/shipped/.

In an archive: a wheel holds no links, and installers set the modes of its files. `builder.matrix.reader` unpacks it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from flit_core import buildapi
from flit_core.buildapi import build_editable, build_sdist  # noqa: F401  frontends call them

ROOT = Path(__file__).resolve().parents[1]
# pyproject.toml has the options of pytest. `tests/kernel.py` is imported by image tests.
# `builder init` copies the workflow.
FILES = (
    "templates", "tests/images", "tests/gpu", "tests/nvml", "tests/kernel.py", "locks/uv.txt", "pyproject.toml",
    ".github/workflows/images.yml",
)  # fmt: skip
HOST, OF_HOST = "templates/host", ("README.md", "env.sh")  # the other files there are private to a machine


def build_wheel(
    wheel_directory: str, config_settings: dict[str, object] | None = None, metadata_directory: str | None = None
) -> str:
    """Builds the wheel; returns its file name. Source: PEP 517."""
    name: str = buildapi.build_wheel(wheel_directory, config_settings, metadata_directory)
    path = Path(wheel_directory) / name
    with ZipFile(path) as wheel:
        entries = [(info, wheel.read(info)) for info in wheel.infolist()]
    *others, (record, lines) = entries  # flit writes RECORD last, as PEP 427 recommends
    with ZipFile(path, "w", ZIP_DEFLATED) as wheel:
        for info, content in others:
            wheel.writestr(info, content, ZIP_DEFLATED)
        for file, content in (("matrix.yaml", (ROOT / "matrix.yaml").read_bytes()), ("files.tar", archive())):
            info = ZipInfo(f"builder/shipped/{file}", record.date_time)
            info.external_attr = 0o100644 << 16
            wheel.writestr(info, content, ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            lines = f"{info.filename},sha256={digest},{len(content)}\n".encode() + lines
        wheel.writestr(record, lines, ZIP_DEFLATED)
    return name


def archive() -> bytes:
    """A tar of the files, the same for the same files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tops = (path for name in FILES for path in [ROOT / name, *sorted((ROOT / name).rglob("*"))])
        for path in tops:
            name = path.relative_to(ROOT)
            is_private = str(name.parent) == HOST and name.name not in OF_HOST
            if "__pycache__" in name.parts or is_private or (path.is_dir() and not path.is_symlink()):
                continue
            info = tar.gettarinfo(path, str(name))
            info.mode = 0o755 if info.mode & 0o100 else 0o644
            info.mtime = info.uid = info.gid = 0
            info.uname = info.gname = ""
            if info.issym():
                tar.addfile(info)
            else:
                with path.open("rb") as file:
                    tar.addfile(info, file)
    return out.getvalue()
