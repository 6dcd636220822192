"""Unpacks NVIDIA's archives from /mnt/redist into one folder, and links the headers and libraries of CUDA wheels there.

redist.py FOLDER SHA256:ARCHIVE ...
"""

import hashlib
import lzma
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

LIBRARY = re.compile(r"(lib[^.]+\.(?:so|a))(\.[0-9]+)*")


def unpack(archive: Path, sha256: str, folder: Path) -> None:
    """Unpacks an archive without its outermost folder. Its license gets a folder of its own: all have the same name."""
    content = archive.read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        sys.exit(f"{archive.name} does not have the locked SHA-256")
    # tar refuses paths out of the folder; it would need xz, which an image may lack.
    command = ["tar", "-x", "--strip-components=1", "--no-same-owner", "-C", str(folder)]
    subprocess.run(command, input=lzma.decompress(content), check=True)
    licenses = folder / "licenses" / archive.name.partition("-")[0]
    if (folder / "LICENSE").exists():
        licenses.mkdir(parents=True)
        (folder / "LICENSE").rename(licenses / "LICENSE")


def link(path: Path, target: Path) -> None:
    if not path.exists() and not path.is_symlink():
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(target)


def main(folder: Path, archives: list[str]) -> None:
    folder.mkdir()
    for each in archives:
        sha256, _, file = each.partition(":")
        unpack(Path("/mnt/redist", file), sha256, folder)
    wheels = Path(sysconfig.get_path("purelib")).resolve() / "nvidia"
    libraries: dict[str, Path] = {}
    for path in sorted(wheels.glob("*/lib/*")):
        # Wheels have libcublas.so.12 alone; -lcublas finds libcublas.so.
        if folder not in path.parents and (found := LIBRARY.fullmatch(path.name)):
            libraries.setdefault(path.name, path)
            libraries.setdefault(found[1], path)
    for path in sorted(folder.glob("lib/*")):
        if (found := LIBRARY.fullmatch(path.name)) and found[1] in libraries:
            path.unlink()
    for name, path in libraries.items():
        link(folder / "lib" / name, path)
    link(folder / "lib64", Path("lib"))  # where nvcc looks
    for path in sorted(wheels.glob("*/include/*")):
        if folder not in path.parents and path.suffix != ".py" and path.name != "__pycache__":
            link(folder / "include" / path.name, path)
    subprocess.run(["chmod", "-R", "u=rwX,go=rX", str(folder)], check=True)
    subprocess.run(["find", str(folder), "-type", "d", "-empty", "-delete"], check=True)
    subprocess.run(["find", str(folder), "-type", "d", "-exec", "chmod", "0775", "{}", "+"], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
