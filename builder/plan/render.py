"""Writes images/<group>/ from the plan and templates/, or checks that it is current.

A rendered Dockerfile is the readable specification of its image and builds with plain `docker build`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from builder.common.errors import StaleError, TemplateError, for_cells
from builder.common.files import write_atomically
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.plan import budget, layer_order, plan, settings
from builder.plan.plan import Plan


def render(project: Project, plan: Plan) -> dict[str, str]:
    """Path relative to the root -> text, for every file of every image of the plan. Only reads templates/."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(project.path("templates/Dockerfile.j2").parent),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701  Dockerfiles, not HTML; builder.matrix restricts values, and `quoted` quotes
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["argv"] = lambda words: json.dumps(list(words))
    environment.filters["quoted"] = _quoted
    files: dict[str, str] = {}
    for image in plan.images:
        context = vars(image) | {
            "image": image,
            "system": image.os_request,
            "epoch": layer_order.MTIME,
            "constraints": settings.CONSTRAINTS,
            "python": image.cell.python,
            "has_environment_files": any(
                project.path(f"templates/{name}/files/opt/venv").exists() for name in image.file_components
            ),
        }
        try:
            files[image.dockerfile] = environment.get_template("Dockerfile.j2").render(context)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"templates/{error.name}:{error.lineno}: {error.message} ({image.id})") from error
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise TemplateError(f"{_template_place(error)}: {error} ({image.id})") from error
        files[f"{image.folder}/constraints.txt"] = image.constraints
        for wheel_list in image.lists:
            lines = [f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in wheel_list.wheels]
            # The step passes this address to uv: the history of the image, which has the command of a step, must not.
            has_address = wheel_list.index and not wheel_list.folder
            head = [f"# index: {project.matrix.indexes[wheel_list.index]}\n"] if has_address else []
            files[wheel_list.path] = "".join([*head, *lines])
    return files


def _quoted(text: str) -> str:
    """A printable text as a value of ENV or LABEL. Source: Dockerfile reference, "Environment replacement"."""
    return '"' + re.sub(r'["\\$]', r"\\\g<0>", text) + '"'


def _template_place(error: Exception) -> str:
    """`templates/<file>:<line>` of the innermost template frame."""
    place, trace = "templates", error.__traceback__
    while trace:
        name = trace.tb_frame.f_code.co_filename
        if "templates" in Path(name).parts:
            place = f"templates/{Path(name).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def write_rendered(root: Path, files: Mapping[str, str], *, is_part: bool = False) -> list[str]:
    """Writes `files` and, unless they are only a part, removes all others from images/; returns the changed paths."""
    changed = []
    for name, text in files.items():
        path = root / name
        if _differs(path, text):
            write_atomically(path, text)
            changed.append(name)
    for stray in () if is_part else _strays(root, files):
        path = root / stray
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        changed.append(stray)
    return changed


def check_rendered(root: Path, files: Mapping[str, str], part: Sequence[str] | None = None) -> None:
    """Raises StaleError with every difference between images/ and `files`.

    If `files` belong to some cells only, or to none, `part` has the ids of these cells: other files do not matter.
    """
    faults = [
        f"{name}: {'differs' if (root / name).exists() else 'missing'}"
        for name, text in files.items()
        if _differs(root / name, text)
    ]
    if part is None:
        faults += [f"{name}: belongs to no cell" for name in _strays(root, files)]
    if faults:
        lines = [f"  {fault}" for fault in faults[:20]]
        message = "\n".join(["images/ does not match templates/ and locks/:", *lines])
        raise StaleError(message, hint=f"Update it: {for_cells('builder render', part or ())}")


def _differs(path: Path, text: str) -> bool:
    return path.is_symlink() or not path.is_file() or path.read_bytes() != text.encode()


def _strays(root: Path, files: Mapping[str, str]) -> list[str]:
    """Files and folders in images/ that are not in `files`, outermost only."""
    images = root / "images"
    if not images.is_dir():
        return []
    folders = {Path(name).parts[1] for name in files}
    strays = [f"images/{path.name}" for path in sorted(images.iterdir()) if path.name not in folders]
    for folder in sorted(folders):
        inside = sorted((images / folder).iterdir()) if (images / folder).is_dir() else []
        strays += [name for path in inside if (name := path.relative_to(root).as_posix()) not in files]
    return strays


def load_checked_plan(project: Project, chosen: Sequence[Cell]) -> Plan:
    """The plan of the chosen cells.

    Raises an error unless their files in images/ are up to date and they are within the budgets. The locks and files of
    other cells do not matter.
    """
    planned = plan.make_locked_plan(project, chosen)
    check_rendered(project.root, render(project, planned), [cell.id for cell in chosen])
    budget.check_plan(project.matrix, planned.images)
    return planned
