"""Fails if two packages in a folder have different files for one path.

uv installs packages in parallel: of ten installations of two such wheels, one or two had the other file. Assembled
images take the file of the later wheel.

    overlaps.py FOLDER
"""

import csv
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def overlaps(site: Path) -> Iterator[str]:
    """A line for each path of two packages whose hashes in RECORD differ or are missing."""
    owners: dict[str, tuple[str, str]] = {}
    for record in sorted(site.glob("*.dist-info/RECORD")):
        with record.open(encoding="utf-8", newline="") as file:
            for path, digest, *_ in csv.reader(file):
                package = record.parent.name.removesuffix(".dist-info")
                full = os.path.normpath(site / path)
                other, first = owners.setdefault(full, (package, digest))
                if other != package and (first != digest or not digest):
                    yield f"{other} and {package} have different files for {full}"


def main(site: Path) -> None:
    """Exits with the lines, if there are any."""
    if lines := list(overlaps(site)):
        lines.append("uv installs packages in parallel, so either file could be in the image. Assemble the image with")
        lines.append("`builder images`, without `--method dockerfile`, or pin other versions in matrix.yaml.")
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
