"""Writes a repository of a team's own, whose matrix.yaml extends the shipped one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import jinja2

from builder import __version__
from builder.common import strict_yaml
from builder.common.errors import UsageError, did_you_mean
from builder.common.files import files_below, write_atomically
from builder.common.text import listed
from builder.matrix import reader
from builder.matrix.schema import AMD64, CPU

_TEMPLATES = Path(__file__).with_name("new_repository")
CiService = Literal["github", "gitlab"]
_CI_FILES: dict[CiService, str] = {"github": ".github/workflows/images.yml", "gitlab": ".gitlab-ci.yml"}
_CALLED, _COPY = ".github/workflows/images.yml", ".github/workflows/gpu-images.yml"  # the shipped workflow, its copy


def write_repository(
    folder: Path, *, registry: str, namespace: str, frameworks: Sequence[str], source: Mapping[str, Any], ci: CiService
) -> list[str]:
    """Writes the files; returns their names.

    `frameworks` are entries as of `first_images`, `source` is the result of `read_source`. If this package was
    installed from a wheel, that wheel is copied. Raises UsageError if a file exists, MatrixError for a value that
    matrix.yaml cannot have, OSError if the wheel is gone. Nothing is written then, except .builder.
    """
    requirement, wheel = package_of(source)
    values = {
        # JSON is YAML, and a quote or a line break in a value ends nothing.
        "registry": json.dumps(registry),
        "namespace": json.dumps(namespace),
        "frameworks": frameworks,
        "requirement": requirement,
    }
    left_out = {path for service, path in _CI_FILES.items() if service != ci}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701  no HTML
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    names = [path.relative_to(_TEMPLATES).as_posix() for path in files_below(_TEMPLATES)]
    names = [name for name in names if name not in left_out]
    files = {name: environment.get_template(name).render(values).encode() for name in names}
    reader.read_matrix(strict_yaml.parse_yaml(files["matrix.yaml"], "matrix.yaml"))
    if ci == "github":
        workflow = (reader.shipped_files(folder / ".builder") / _CALLED).read_bytes()
        files[_COPY] = f"# A copy of {_CALLED} of gpu-images {__version__}.\n".encode() + workflow
    if wheel:
        files[f"wheels/{wheel.name}"] = wheel.read_bytes()
    if present := [name for name in files if (folder / name).exists() or (folder / name).is_symlink()]:
        raise UsageError(
            f"{folder} already has {listed(present, 3)}: nothing is overwritten", hint="Name a new folder."
        )
    for name, content in files.items():
        write_atomically(folder / name, content)
    return list(files)


def read_source() -> dict[str, Any]:
    """What this package was installed from, as PEP 610 records it; empty for an index."""
    try:
        return dict(json.loads(distribution("gpu-images").read_text("direct_url.json") or "{}"))
    except PackageNotFoundError:
        return {"dir_info": {}}


def package_of(source: Mapping[str, Any]) -> tuple[str, Path | None]:
    """The requirement of this package, which also CI and clones can install, and the wheel to copy for it.

    A name that is on no index yet must not be asked for: whoever registers it there first would run code in each team's
    jobs.
    """
    url: str = source.get("url", "")
    if "dir_info" in source:  # a checkout of this repository: the wheel that a build of it makes
        return f"./wheels/gpu_images-{__version__}-py3-none-any.whl[images]", None
    if url.startswith("file:"):
        wheel = Path(unquote(urlsplit(url).path))
        return f"./wheels/{wheel.name}[images]", wheel
    if vcs := source.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"gpu-images[images] @ {url}" if url else f"gpu-images[images]=={__version__}", None


def first_images(frameworks: Sequence[str], *, is_cpu: bool) -> list[str]:
    """The entries in matrix.yaml for the first line of each framework with such images: one CUDA and one Python.

    Raises UsageError if a framework has no such images.
    """
    shipped = reader.read_matrix(reader.read_shipped())
    entries = []
    for name in dict.fromkeys(frameworks):
        if name not in shipped.frameworks:
            raise UsageError(f"no framework {name!r}{did_you_mean(name, shipped.frameworks)}")
        for line, entry in shipped.frameworks[name].versions.items():
            cudas = [cuda for cuda in entry.cuda if (cuda == CPU) == is_cpu and AMD64 in entry.arch_on(cuda)]
            pythons = [python for python in entry.python if not shipped.python[python].not_built]
            if cudas and pythons:
                chosen = f'cuda: ["{cudas[0]}"], python: ["{pythons[0]}"], arch: [{AMD64}]'
                entries.append(f'{name}: {{versions: {{"{line}": {{{chosen}}}}}}}')
                break
        else:
            raise UsageError(
                f"{name} has no images for {'the CPU' if is_cpu else 'GPUs'} on {AMD64}",
                hint=f"{'Without' if is_cpu else 'With'} --cpu, or another --framework.",
            )
    return entries
