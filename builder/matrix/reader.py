"""Reads matrix.yaml. A team's may extend the shipped one: `extends: gpu-images`, see docs/own-repository.md.

The parts debian, python, cuda, frameworks, components, variants and exclude default to the shipped values. Mappings
merge key by key, and any other value replaces the shipped one. If the team lists frameworks, variants or the `versions`
of a framework, only these are used; a list of names is enough. All other keys are the team's alone.
"""

from __future__ import annotations

import tarfile
from collections import ChainMap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from builder.common import strict_yaml, validation
from builder.common.errors import MatrixError, did_you_mean
from builder.common.files import digest_of_bytes, short_digest
from builder.common.strict_yaml import Key, Located
from builder.matrix import support
from builder.matrix.schema import Matrix

# In a wheel: matrix.yaml of this repository, and an archive with the other shipped files. See tools/shipped_wheel.py.
_SHIPPED = Path(__file__).parents[1] / "shipped"
_CHECKOUT = Path(__file__).parents[2]
_PARTS = ("debian", "python", "cuda", "frameworks", "components", "variants", "exclude")


def read_shipped() -> Located:
    """The shipped matrix.yaml."""
    folder = _SHIPPED if _SHIPPED.is_dir() else _CHECKOUT
    return strict_yaml.load_yaml(folder / "matrix.yaml", "builder/shipped/matrix.yaml")


def shipped_files(state: Path) -> Path:
    """The folder with the shipped templates and tests: unpacked into `state`, or this repository's own checkout."""
    if not _SHIPPED.is_dir():
        return _CHECKOUT
    archive = _SHIPPED / "files.tar"
    folder = state / f"shipped-{short_digest(digest_of_bytes(archive.read_bytes()))}"
    if not folder.exists():
        state.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=state) as temporary, tarfile.open(archive) as tar:
            # Python 3.11.2 has no filters. Source: tarfile, "Supporting older Python versions".
            tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
            tar.extractall(f"{temporary}/files")  # noqa: S202  our own archive
            try:
                Path(f"{temporary}/files").rename(folder)
            except OSError:
                if not folder.exists():  # another process was faster
                    raise
    return folder


def read_matrix(located: Located) -> Matrix:
    """The matrix in parsed YAML, with the entries of the shipped one if it extends that. Raises MatrixError."""
    if isinstance(located.data, dict) and located.data.get("extends") is not None:
        shipped = read_shipped()
        merged = {part: _merged(located.data.get(part), shipped.data[part], (part,), located) for part in _PARTS}
        # A place is looked up in the team's file first. Errors never point at a shipped value
        # that the team has replaced.
        located = Located(located.name, located.data | merged, ChainMap(located.places, shipped.places))
    matrix = validation.validate(located, Matrix)
    matrix.locate(located)
    if faults := list(support.reasons_without_end(matrix)):
        raise MatrixError("\n".join(faults))
    return matrix


def _merged(own: Any, shipped: Any, path: Key, located: Located) -> Any:
    """The value at `path`. Raises MatrixError for a name without a value that the shipped matrix does not have."""
    if own is None:
        return shipped
    is_choice = path in (("frameworks",), ("variants",)) or (path[0], *path[2:]) == ("frameworks", "versions")
    if is_choice and isinstance(own, list):
        for index, name in enumerate(own):
            if not isinstance(name, str):
                typed = located.typed((*path, index))
                raise MatrixError(
                    f"{located.where((*path, index))}: {typed or 'this'} is not text", hint=f'Quote it: "{typed}"'
                )
        own = dict.fromkeys(own)
    if not isinstance(own, dict) or not isinstance(shipped, dict):
        return own
    for name, value in own.items():
        # A framework that only the team has needs a mapping: a list cannot say what each version contains.
        is_name_alone = value is None or (isinstance(value, dict) and isinstance(value.get("versions"), list))
        if is_choice and is_name_alone and name not in shipped:
            raise MatrixError(
                f"{located.where((*path, name), key=True)}: {'.'.join(map(str, (*path, name)))}: gpu-images has no "
                f"{name!r}{did_you_mean(name, shipped)}"
            )
    names = own if is_choice else {**shipped, **own}
    return {name: _merged(own.get(name), shipped.get(name), (*path, name), located) for name in names}
