"""A team's matrix.yaml that extends the shipped one: `extends: gpu-images`. See docs/own-repository.md.

What the team does not write about debian, python, cuda, frameworks, components, variants and exclude is as shipped.
Mappings merge key by key, and any other value replaces the shipped one. Where the team names frameworks, `versions`
of one or variants, there are no others: a list of names is enough. All other keys are the team's alone.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from builder.common import strict_yaml
from builder.common.errors import MatrixError, did_you_mean
from builder.common.files import digest_of_bytes, short_digest
from builder.common.strict_yaml import Key, Located

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


def extended(own: Located) -> Located:
    """A team's matrix with the entries of the shipped matrix, and the places of its values. Others are unchanged.

    Raises MatrixError for a name without a value that the shipped matrix does not have.
    """
    if not isinstance(own.data, dict) or own.data.get("extends") is None:
        return own
    shipped = read_shipped()
    # A place of a shipped value that the team replaces stays in these mappings: no error names it.
    marks, keys, raw = shipped.marks | own.marks, shipped.keys | own.keys, shipped.raw | own.raw
    both = Located(name=own.name, data=dict(own.data), marks=marks, keys=keys, raw=raw)
    for part in _PARTS:
        both.data[part] = _merged(own.data.get(part), shipped.data[part], (part,), both)
    return both


def _merged(own: Any, shipped: Any, path: Key, both: Located) -> Any:
    """The value at `path`; adds the places of names in lists, which become keys, to `both`."""
    if own is None:
        return shipped
    if path[0] == "frameworks" and len(path) == 2 and isinstance(own, list):  # the lines of a framework
        versions: Key = (*path, "versions")
        both.marks[versions] = both.marks[path]
        both.marks.update({(*versions, index): both.marks[(*path, index)] for index in range(len(own))})
        both.raw.update({(*versions, index): both.raw.get((*path, index), "") for index in range(len(own))})
        own = {"versions": own}
    is_choice = path in (("frameworks",), ("variants",)) or (path[0], *path[2:]) == ("frameworks", "versions")
    if is_choice and isinstance(own, list):
        for index, name in enumerate(own):
            place = both.marks[(*path, index)]
            if not isinstance(name, str):
                typed = both.raw.get((*path, index), "")
                raise MatrixError(f"{place}: {typed or 'this'} is not text", hint=f'Quote it: "{typed}"')
            both.marks[(*path, name)] = both.keys[(*path, name)] = place
        own = dict.fromkeys(own)
    if not isinstance(own, dict) or not isinstance(shipped, dict):
        return own
    for name, value in own.items():
        is_name_alone = value is None or (path == ("frameworks",) and isinstance(value, list))
        if is_choice and is_name_alone and name not in shipped:
            raise MatrixError(
                f"{both.where((*path, name), key=True)}: {'.'.join(map(str, (*path, name)))}: gpu-images has no "
                f"{name!r}{did_you_mean(name, shipped)}"
            )
    names = own if is_choice else {**shipped, **own}
    return {name: _merged(own.get(name), shipped.get(name), (*path, name), both) for name in names}
