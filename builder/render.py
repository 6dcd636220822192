"""Writes images/<id>/ from the plan and templates/, or checks that it is there as it should be.

A rendered Dockerfile is the readable specification of its image and builds with plain `docker build`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import jinja2

from builder import atomic, settings, splice
from builder.cells import CUDA
from builder.errors import StaleError, TemplateError
from builder.matrix import Matrix
from builder.plan import Plan, PlannedImage, apt_packages


def render(root: Path, matrix: Matrix, plan: Plan) -> dict[str, str]:
    """Path relative to the root -> text, for every file of every image of the plan. Pure but for reading templates."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root / "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701  Dockerfiles, not HTML; builder.matrix confines every value
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["argv"] = lambda words: json.dumps(list(words))
    files: dict[str, str] = {}
    for image in plan.images:
        files |= _image(root, environment, matrix, image)
    return files


def _image(root: Path, environment: jinja2.Environment, matrix: Matrix, image: PlannedImage) -> dict[str, str]:
    folder = f"images/{image.id}"
    # CUDA first: what the others need is then in place.
    order = sorted(image.components, key=lambda name: name != CUDA)
    groups = [(name, wheels) for name in order if (wheels := image.of_component(name))]
    context = {
        "image": image,
        "folder": folder,
        "apt": apt_packages(matrix.python[image.cell.python], (matrix.components[name] for name in image.components)),
        "epoch": splice.MTIME,
        "settings": image.settings,
        "groups": groups,
        "constraints": settings.CONSTRAINTS,
        "file_components": image.file_components,
        "debian": image.debian,
        "python": image.cell.python,
        "uv": image.uv,
    }
    try:
        dockerfile = environment.get_template("Dockerfile.j2").render(context)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"templates/{error.name}:{error.lineno}: {error.message} ({image.id})") from error
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise TemplateError(f"{_template_place(error)}: {error} ({image.id})") from error
    files = {f"{folder}/Dockerfile": dockerfile, f"{folder}/constraints.txt": image.constraints}
    for name, wheels in groups:
        lines = [f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in wheels]
        files[f"{folder}/wheels-{name}.txt"] = "".join(lines)
    return files


def _template_place(error: Exception) -> str:
    """`templates/<file>:<line>` of the innermost template frame."""
    place, trace = "templates", error.__traceback__
    while trace:
        name = trace.tb_frame.f_code.co_filename
        if "templates" in Path(name).parts:
            place = f"templates/{Path(name).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def write(root: Path, files: Mapping[str, str]) -> list[str]:
    """Makes images/ hold exactly `files`; returns the paths that changed."""
    changed = []
    for name, text in files.items():
        path = root / name
        if _differs(path, text):
            atomic.write_text(path, text)
            changed.append(name)
    for stray in _strays(root, files):
        path = root / stray
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        changed.append(stray)
    return changed


def check(root: Path, files: Mapping[str, str]) -> None:
    """Raises StaleError naming every difference between images/ and `files`."""
    wrong = [f"{name}: {_state(root / name)}" for name, text in files.items() if _differs(root / name, text)]
    wrong += [f"{name}: belongs to no cell" for name in _strays(root, files)]
    if wrong:
        listed = "\n".join(f"  {line}" for line in wrong[:20])
        raise StaleError(
            f"images/ is not what templates/ and locks/ give:\n{listed}",
            hint="Write it again: builder render",
        )


def _differs(path: Path, text: str) -> bool:
    return path.is_symlink() or not path.is_file() or path.read_bytes() != text.encode()


def _state(path: Path) -> str:
    return "differs" if path.exists() else "missing"


def _strays(root: Path, files: Mapping[str, str]) -> list[str]:
    """Files and folders in images/ that no cell has, outermost only."""
    images = root / "images"
    if not images.is_dir():
        return []
    folders = {Path(name).parts[1] for name in files}
    strays = [f"images/{path.name}" for path in sorted(images.iterdir()) if path.name not in folders]
    for folder in sorted(folders):
        inside = sorted((images / folder).iterdir()) if (images / folder).is_dir() else []
        strays += [name for path in inside if (name := path.relative_to(root).as_posix()) not in files]
    return strays
