"""Rendering: the text of Dockerfiles and lists of wheels, and the upkeep of images/."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from builder.build.dockerfile import context_files
from builder.common.errors import StaleError, TemplateError
from builder.layers import oci
from builder.lock.lockfile import GROUP_LOCKS, Lock
from builder.matrix.project import Project
from builder.matrix.tags import PLAN_LABEL
from builder.plan import plan, render
from tests.fakes import locks

Edit = Callable[[str, str], Project]
GROUP = "em-1.10-cu1210-py311"
CELL = f"{GROUP}-jupyter"
PLAIN = "qz-0.5-cu129-py311"
DOCKERFILES = {CELL: f"images/{GROUP}/jupyter.Dockerfile", PLAIN: f"images/{PLAIN}/plain.Dockerfile"}


def rendered(project: Project, *ids: str) -> dict[str, str]:
    planned = plan.make_locked_plan(project, project.select(ids or (CELL, PLAIN)))
    return render.render(project, planned)


@pytest.mark.parametrize("cell", [CELL, PLAIN])
def test_snapshot(tiny: Project, snapshot: Callable[[str, str], None], cell: str) -> None:
    snapshot(f"snapshots/{cell}.Dockerfile", rendered(tiny, cell)[DOCKERFILES[cell]])


# ---- one group


def listed(text: str) -> list[str]:
    """Names of the wheels in a list."""
    return [line.partition("==")[0] for line in text.splitlines() if not line.startswith("#")]


def relock(project: Project, needs: dict[str, list[str]]) -> Lock:
    """Rewrites the lock of the group: the components in `needs` also need these wheels, new or not."""
    before = locks.locks(project)[GROUP]
    entries = {entry.name: entry for entry in before.wheels}
    for name in sorted({name for names in needs.values() for name in names} - set(entries)):
        tag = "py3-none-manylinux_2_28_x86_64" if name.startswith("nvidia-") else "py3-none-any"
        entries[name] = locks.entry(name, "1", 1000, tag)
    parts = {
        component: replace(part, wheels=sorted({*part.wheels, *needs.get(component, ())}))
        for component, part in before.components.items()
    }
    after = replace(before, components=parts, wheels=tuple(entries[name] for name in sorted(entries)))
    (project.root / GROUP_LOCKS.path(GROUP)).write_text(GROUP_LOCKS.dump(after))
    return after


def test_cells_of_a_group_share_their_lists_and_constraints(tiny: Project) -> None:
    """Each file exists once for the group, and a cell rendered alone has the same text."""
    cells = [cell.id for cell in tiny.groups[GROUP]]
    together = rendered(tiny, *cells)
    assert sorted(together) == [
        f"images/{GROUP}/{name}"
        for name in (
            "board.Dockerfile",
            "constraints.txt",
            "cuda.txt",
            "jupyter.Dockerfile",
            "plain.Dockerfile",
            "wheels-board.txt",
            "wheels-ember.txt",
            "wheels-jupyter.txt",
            "wheels-python.txt",
        )
    ]
    alone = {cell: rendered(tiny, cell) for cell in cells}
    for files in alone.values():
        assert files.items() <= together.items()
    shared = [name for name in together if all(name in files for files in alone.values())]
    assert sorted(shared) == [
        f"images/{GROUP}/{name}" for name in ("constraints.txt", "cuda.txt", "wheels-ember.txt", "wheels-python.txt")
    ]


def test_a_list_has_all_that_its_component_needs(tiny: Project) -> None:
    """Even wheels that an earlier component installs: not every cell of the group has that component."""
    relock(tiny, {"board": ["emberkit", "sums"], "jupyter": ["board", "sums"]})
    files = rendered(tiny, *(cell.id for cell in tiny.groups[GROUP]))
    assert listed(files[f"images/{GROUP}/wheels-board.txt"]) == ["board", "emberkit", "sums"]
    assert listed(files[f"images/{GROUP}/wheels-jupyter.txt"]) == ["board", "notebook", "sums"]
    assert files.items() >= rendered(tiny, CELL).items()


def test_wheels_of_a_variant_are_in_no_constraint(tiny: Project) -> None:
    """Not its CUDA wheels: the group shares the file."""
    before = rendered(tiny, GROUP)[f"images/{GROUP}/constraints.txt"]
    assert listed(before) == ["ember", "ember-extra", *locks.CUDA]
    relock(tiny, {"board": ["nvidia-compiler"]})
    for cell in tiny.groups[GROUP]:
        assert rendered(tiny, cell.id)[f"images/{GROUP}/constraints.txt"] == before


def test_lists_follow_the_lock_of_the_group(tiny: Project) -> None:
    """Every wheel of the lock is in a list, with its hash."""
    locked = locks.locks(tiny)[GROUP]
    files = rendered(tiny, *(cell.id for cell in tiny.groups[GROUP]))
    lists = [text for name, text in files.items() if name.endswith(".txt") and "constraints" not in name]
    lines = {line for text in lists for line in text.splitlines()}
    assert lines == {f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}" for wheel in locked.wheels}


def steps(text: str) -> list[tuple[str, str]]:
    """List and argument of each step that installs wheels, in order."""
    runs = re.findall(
        r"source=(images/\S+),target=/mnt/wheels\.txt \\\n *sh /mnt/steps/wheels\.sh(.*)$", text, flags=re.MULTILINE
    )
    assert len(runs) == text.count("wheels.sh")
    return [(path.rpartition("/")[2], argument.strip()) for path, argument in runs]


def test_a_component_called_cuda_may_have_packages_of_its_own(edit: Edit) -> None:
    """Their list is not that of the CUDA wheels."""
    project = edit("cuda: {needs: [python]}", "cuda: {needs: [python], packages: [sums]}")
    path = project.root / GROUP_LOCKS.path(GROUP)
    path.write_text(GROUP_LOCKS.dump(locks.lock_of(project, project.groups[GROUP])))
    files = rendered(project, CELL)
    assert listed(files[f"images/{GROUP}/wheels-cuda.txt"]) == ["sums"]
    assert sorted(listed(files[f"images/{GROUP}/cuda.txt"])) == sorted(locks.CUDA)


def test_cuda_of_a_variant_has_a_list_of_its_own(tiny: Project) -> None:
    """It leaves out the framework's CUDA wheels, which an earlier step installs."""
    relock(tiny, {"board": ["nvidia-compiler", locks.CUDA[0]], "python": [locks.CUDA[1]]})
    files = rendered(tiny, CELL)
    assert listed(files[f"images/{GROUP}/cuda-board.txt"]) == ["nvidia-compiler"]
    assert sorted(listed(files[f"images/{GROUP}/cuda.txt"])) == sorted(locks.CUDA)
    assert listed(files[f"images/{GROUP}/wheels-python.txt"]) == ["pip"]
    assert steps(files[DOCKERFILES[CELL]])[-3:] == [
        ("cuda-board.txt", "cuda"),
        ("wheels-board.txt", ""),
        ("wheels-jupyter.txt", ""),
    ]


def test_a_dockerfile_reads_only_files_that_exist(tiny: Project) -> None:
    """Files of images/, templates/ and locks/ by their paths in the build context."""
    files = rendered(tiny, *locks.LOCKED)
    render.write_rendered(tiny.root, files)
    texts = [text for name, text in files.items() if name.endswith(".Dockerfile")]
    assert len(texts) == len(locks.LOCKED)
    for text in texts:
        sources = re.findall(r"(?:source=|^COPY )((?:images|templates|locks)/[^\s,]+)", text, flags=re.MULTILINE)
        assert {"templates/steps", "locks/uv.txt"} < set(sources)
        assert not [source for source in sources if not (tiny.root / source).exists()]
        for script in re.findall(r"sh /mnt/steps/(\S+)", text):
            assert (tiny.root / "templates/steps" / script).is_file()


# ---- what is in no rendered file


def test_no_digest_of_the_plan_the_lock_or_a_layer_is_in_it(tiny: Project) -> None:
    """The only digests are that of the pinned base image and those of the wheels."""
    planned = plan.make_locked_plan(tiny, tiny.select(locks.LOCKED))
    files = render.render(tiny, planned)
    wheels = {wheel.sha256 for image in planned.images for wheel in image.wheels}
    bases = {image.base.partition("@sha256:")[2] for image in planned.images}
    for name, text in files.items():
        digests = set(re.findall(r"[0-9a-f]{12,}", text))
        assert digests <= (bases if name.endswith(".Dockerfile") else wheels), name
        assert not [label for label in (PLAN_LABEL, "io.github.gpu-images.lock") if label in text], name


# ---- the text of a Dockerfile


def instructions(text: str, word: str) -> list[str]:
    return [line for line in text.replace(" \\\n", " ").splitlines() if line.startswith(f"{word} ")]


def pairs(text: str, word: str) -> dict[str, str]:
    """The names and values of ENV or LABEL, read as BuildKit reads them.

    In double quotes, a backslash escapes a double quote, a backslash and a dollar sign; any other dollar sign begins a
    variable. Source: Dockerfile reference, "Environment replacement".
    """
    [line] = instructions(text, word)
    pair = r' +([\w.-]+)="((?:[^"\\$]|\\["\\$])*)"'
    assert re.fullmatch(f"{word}(?:{pair})+", line)
    return {name: re.sub(r"\\(.)", r"\1", value) for name, value in re.findall(pair, line)}


@pytest.mark.parametrize(
    "value",
    [
        "", "compute,utility", "--a=1 --b=2", " x ", "$HOME ${HOME} $$", "it's \"here\"", "a\\", '\\"', "\\$x",
        "#x # y", "`id` $(id)", "<<EOF", "a=b;c&d|e>f", "{{ x }}", "é 中", "\\n",
    ],
)  # fmt: skip
def test_a_variable_of_an_image_has_exactly_its_value(edit: Edit, value: str) -> None:
    """A Dockerfile would otherwise replace or split it."""
    project = edit("EMBER_HOME: /workspace", f"EMBER_HOME: {json.dumps(value, ensure_ascii=False)}, EMBER_B: b")
    [image] = plan.make_locked_plan(project, project.select([CELL])).images
    assert image.settings.env["EMBER_HOME"] == value
    assert pairs(rendered(project, CELL)[DOCKERFILES[CELL]], "ENV") == image.settings.env


@pytest.mark.parametrize("cell", [CELL, PLAIN])
def test_the_dockerfile_equals_the_configuration_of_an_assembled_image(tiny: Project, cell: str) -> None:
    text = rendered(tiny, cell)[DOCKERFILES[cell]]
    [image] = plan.make_locked_plan(tiny, tiny.select([cell])).images
    config = json.loads(oci.config(image.settings, (), (), created="", labels={}))["config"]

    assert [f"{name}={value}" for name, value in pairs(text, "ENV").items()] == config["Env"]
    assert list(pairs(text, "LABEL").items()) == list(config["Labels"].items())
    assert instructions(text, "USER") == [f"USER {config['User']}"]
    assert instructions(text, "WORKDIR") == [f"WORKDIR {config['WorkingDir']}"]
    assert instructions(text, "EXPOSE") == [f"EXPOSE {port[:-4]}" for port in config.get("ExposedPorts", ())]
    assert instructions(text, "ENTRYPOINT") == [f"ENTRYPOINT {json.dumps(config['Entrypoint'])}"]
    assert instructions(text, "CMD") == [f"CMD {json.dumps(config['Cmd'])}"]
    if health := config.get("Healthcheck"):
        [line] = instructions(text, "HEALTHCHECK")
        times = {
            "interval": "Interval",
            "timeout": "Timeout",
            "start-period": "StartPeriod",
            "start-interval": "StartInterval",
        }
        options = [f"--{option}={health[field] // 10**9}s" for option, field in times.items()]
        command = ["CMD", json.dumps(health["Test"][1:])]
        assert line.split() == ["HEALTHCHECK", *options, f"--retries={health['Retries']}", *command]
    else:
        assert instructions(text, "HEALTHCHECK") == []


MACRO = "{% macro step_mounts() %}\n{{ nothing }}\n{% endmacro %}\n"


@pytest.mark.parametrize(
    ("name", "text", "line", "message"),
    [
        ("Dockerfile.j2", "# one\n{{ nothing }}\n", 2, "'nothing' is undefined"),
        ("Dockerfile.j2", "# one\n{{ image.nothing }}\n", 2, "has no attribute 'nothing'"),
        ("Dockerfile.j2", "# one\n{% if %}\n", 2, "Expected an expression"),
        ("Dockerfile.j2", "# one\n{% include 'absent.j2' %}\n", 2, "absent.j2"),
        ("Dockerfile.j2", "# one\n{{ 1 // 0 }}\n", 2, "division"),
        ("Dockerfile.j2", "# one\n{{ image.id + 1 }}\n", 2, "can only concatenate str"),
        ("macros.j2", MACRO, 2, "'nothing' is undefined"),
    ],
)
def test_an_invalid_template_is_reported_with_its_line(
    tiny: Project, name: str, text: str, line: int, message: str
) -> None:
    (tiny.root / "templates" / name).write_text(text)
    with pytest.raises(TemplateError) as caught:
        rendered(tiny, PLAIN)
    assert str(caught.value).startswith(f"templates/{name}:{line}: ")
    assert message in str(caught.value)
    assert PLAIN in str(caught.value)


def test_no_template(tiny: Project) -> None:
    (tiny.root / "templates/Dockerfile.j2").unlink()
    with pytest.raises(TemplateError):
        rendered(tiny, PLAIN)


def test_write_then_check_then_write_nothing(tiny: Project) -> None:
    files = rendered(tiny)
    with pytest.raises(StaleError, match=f"{DOCKERFILES[CELL]}: missing"):
        render.check_rendered(tiny.root, files)
    assert not (tiny.root / "images").exists()
    assert render.write_rendered(tiny.root, files) == list(files)
    render.check_rendered(tiny.root, files)
    assert render.write_rendered(tiny.root, files) == []


DOCKERFILE = DOCKERFILES[PLAIN]
CHANGES = {
    "text": (DOCKERFILE, b"FROM scratch\n", f"{DOCKERFILE}: differs"),
    "not UTF-8": (DOCKERFILE, b"\xff\xfe", f"{DOCKERFILE}: differs"),
    "list of wheels": (f"images/{PLAIN}/cuda.txt", b"", f"images/{PLAIN}/cuda.txt: differs"),
    "constraints": (f"images/{PLAIN}/constraints.txt", b"", f"images/{PLAIN}/constraints.txt: differs"),
    "line ends": (DOCKERFILE, None, f"{DOCKERFILE}: differs"),
    "stray file": (f"images/{PLAIN}/x", b"", f"images/{PLAIN}/x: belongs to no cell"),
    "stray file in a folder": (f"images/{PLAIN}/d/x", b"", f"images/{PLAIN}/d: belongs to no cell"),
    "variant that is gone": (f"images/{PLAIN}/x.Dockerfile", b"", f"images/{PLAIN}/x.Dockerfile: belongs to no cell"),
    "stray folder": ("images/gone/plain.Dockerfile", b"", "images/gone: belongs to no cell"),
    "stray file beside": ("images/README", b"", "images/README: belongs to no cell"),
}


@pytest.mark.parametrize(("name", "content", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_every_difference_is_found_and_corrected(tiny: Project, name: str, content: bytes | None, message: str) -> None:
    files = rendered(tiny)
    render.write_rendered(tiny.root, files)
    path = tiny.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n") if content is None else content)
    with pytest.raises(StaleError) as caught:
        render.check_rendered(tiny.root, files)
    assert str(caught.value).splitlines()[1:] == [f"  {message}"]
    assert caught.value.hint == "Update it: builder render"
    assert render.write_rendered(tiny.root, files) == [message.partition(":")[0]]
    render.check_rendered(tiny.root, files)
    written = {
        file.relative_to(tiny.root).as_posix(): file for file in (tiny.root / "images").rglob("*") if file.is_file()
    }
    assert {file: path.read_bytes().decode() for file, path in written.items()} == files


def test_a_link_in_images_is_removed_not_followed(tiny: Project) -> None:
    files = rendered(tiny)
    render.write_rendered(tiny.root, files)
    (tiny.root / "images/link").symlink_to(tiny.root / "templates")
    assert render.write_rendered(tiny.root, files) == ["images/link"]
    assert (tiny.root / "templates/Dockerfile.j2").exists()


def test_a_long_list_of_differences_is_truncated(tiny: Project) -> None:
    files = {f"images/x/{number}": "" for number in range(100)}
    with pytest.raises(StaleError) as caught:
        render.check_rendered(tiny.root, files)
    assert len(str(caught.value).splitlines()) == 21


def test_wheels_of_a_named_index_have_a_list_and_a_step_of_their_own(tiny: Project, edit: Edit) -> None:
    """An installer that gets both indexes could take a package from the wrong one."""
    before = rendered(tiny, CELL)
    edit("debian:\n", "indexes: {company: https://python.example.test/simple}\ndebian:\n")
    edit("    packages: [notebook]\n", "    packages: [notebook, notes]\n    index: company\n")
    own_packages = "        packages: [ember-extra==1.10.0]\n"
    project = edit(own_packages, own_packages + "        index: company\n")
    path = project.root / GROUP_LOCKS.path(GROUP)
    own = {"ember", "ember-extra", "notebook", "notes"}
    lock = locks.lock_of(project, project.groups[GROUP])
    wheels = tuple(replace(wheel, index="company") if wheel.name in own else wheel for wheel in lock.wheels)
    path.write_text(GROUP_LOCKS.dump(replace(lock, wheels=wheels)))
    files = rendered(project, CELL)
    assert files[f"images/{GROUP}/wheels-jupyter-at-company.txt"].startswith(
        "# index: https://python.example.test/simple\nnotebook==2.0 --hash=sha256:"
    )
    assert listed(files[f"images/{GROUP}/wheels-ember.txt"]) == ["emberkit"]
    assert listed(files[f"images/{GROUP}/wheels-ember-at-company.txt"]) == ["ember", "ember-extra"]
    assert f"images/{GROUP}/wheels-jupyter.txt" not in files
    dockerfile = files[f"images/{GROUP}/jupyter.Dockerfile"]
    secret = "--mount=type=secret,id=netrc,target=/mnt/netrc \\\n    sh /mnt/steps/wheels.sh\n"
    assert dockerfile.count(f"-at-company.txt,target=/mnt/wheels.txt \\\n    {secret}") == 2
    assert dockerfile.count("type=secret") == 2
    assert "example.test/simple" not in dockerfile, "the history of the image has its commands"
    assert "type=secret" not in before[f"images/{GROUP}/jupyter.Dockerfile"]
    unchanged = ("cuda.txt", "wheels-python.txt", "wheels-board.txt", "constraints.txt")
    assert all(files[f"images/{GROUP}/{name}"] == before[f"images/{GROUP}/{name}"] for name in unchanged)


def test_wheels_of_a_folder_are_mounted(tiny: Project, edit: Edit) -> None:
    (tiny.root / "packages/wheels").mkdir(parents=True)
    edit("debian:\n", "indexes: {own: packages/wheels/}\ndebian:\n")
    project = edit("    packages: [notebook]\n", "    packages: [notebook]\n    index: own\n")
    lock = locks.locks(tiny)[GROUP]
    wheels = tuple(replace(wheel, index="own") if wheel.name == "notebook" else wheel for wheel in lock.wheels)
    (project.root / GROUP_LOCKS.path(GROUP)).write_text(GROUP_LOCKS.dump(replace(lock, wheels=wheels)))
    files = rendered(project, CELL)
    name = f"images/{GROUP}/wheels-jupyter-at-own.txt"
    assert files[name].startswith("notebook==2.0 --hash=sha256:")
    text = files[f"images/{GROUP}/jupyter.Dockerfile"]
    mount = "--mount=type=bind,source=packages/wheels,target=/mnt/wheels UV_FIND_LINKS=/mnt/wheels"
    assert f"source={name},target=/mnt/wheels.txt \\\n    {mount} \\\n    sh /mnt/steps/wheels.sh\n" in text
    assert (text.count("UV_FIND_LINKS"), text.count("type=secret")) == (1, 0)
    (image,) = plan.make_plan(project, project.select([CELL])).images
    wheel = project.root / "packages/wheels/notebook-2.0-py3-none-any.whl"
    wheel.touch()
    assert context_files(project, image)["packages/wheels/notebook-2.0-py3-none-any.whl"] == wheel


def test_an_index_changes_no_layer_and_no_digest(tiny: Project, edit: Edit) -> None:
    """The bytes of a wheel do not depend on where it comes from."""
    (before,) = plan.make_plan(tiny, tiny.select([CELL])).images
    edit("debian:\n", "indexes: {company: https://python.example.test/simple}\ndebian:\n")
    project = edit("    packages: [notebook]\n", "    packages: [notebook]\n    index: company\n")
    lock = locks.locks(tiny)[GROUP]
    wheels = tuple(replace(wheel, index="company") if wheel.name == "notebook" else wheel for wheel in lock.wheels)
    (project.root / GROUP_LOCKS.path(GROUP)).write_text(GROUP_LOCKS.dump(replace(lock, wheels=wheels)))
    (after,) = plan.make_plan(project, project.select([CELL])).images
    assert (after.plan, after.layers[0].inputs) == (before.plan, before.layers[0].inputs)
    assert [layer.inputs for layer in after.layers] == [layer.inputs for layer in before.layers]
