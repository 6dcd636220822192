"""The plan: layers, digests of inputs, and the files that it is made from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from builder.common.errors import BuilderError, LockError, MatrixError, StaleError
from builder.debian.os_lock import OS_LOCKS
from builder.lock.lockfile import GROUP_LOCKS
from builder.lock.python_lock import PYTHON_LOCKS
from builder.matrix import facts
from builder.matrix.project import Project
from builder.matrix.tags import SUPPORT_LABEL
from builder.plan import layer_order, plan, render
from builder.plan.plan import Plan, PlannedImage
from tests.fakes import locks

Edit = Callable[[str, str], Project]
GROUP = "em-1.10-cu1210-py311"
CELL = f"{GROUP}-jupyter"


def planned(project: Project, cell: str = CELL) -> PlannedImage:
    return plan.make_locked_plan(project, project.select([cell])).images[0]


def relock(project: Project) -> Project:
    """Writes locks for the current matrix."""
    for group, lock in locks.locks(project).items():
        (project.root / GROUP_LOCKS.path(group)).write_text(GROUP_LOCKS.dump(lock))
    return locks.write_os_locks(project)


def test_snapshot(tiny: Project, snapshot: Callable[[str, str], None]) -> None:
    """As in `builder plan --format json`, without the digests that depend on templates/."""
    data = plan.make_plan(tiny, tiny.select([CELL, "em-1.9-cu129-py39"])).as_data()
    for image in data["images"]:
        image["digest"] = "(masked)"
        for layer in image["layers"]:
            if layer["kind"] != "wheels":
                layer["inputs"] = "(masked)"
    snapshot("snapshots/plan.json", json.dumps(data, indent=1) + "\n")


def test_an_image_for_arm64_shares_what_does_not_depend_on_the_processor(edit: Edit) -> None:
    """Wheels for any platform, bytecode, and plain files; only CUDA's wheels and the operating system differ."""
    before = planned(edit("namespace: team", "namespace: team"), "qz-0.5-cu129-py311-board")
    project = edit('python: ["3.11"]}', 'python: ["3.11"], arch: [amd64, arm64]}')
    twin = project.groups["qz-0.5-cu129-py311-arm64"]
    (project.root / GROUP_LOCKS.path(twin[0].group)).write_text(GROUP_LOCKS.dump(locks.lock_of(project, twin)))
    locks.write_os_locks(project)
    amd64, arm64 = planned(project, before.id), planned(project, f"{before.id}-arm64")
    assert amd64 == before
    own = [layer.name for layer, other in zip(amd64.layers, arm64.layers, strict=True) if layer.inputs != other.inputs]
    assert own == ["cuda", "os"]
    assert amd64.compiler_inputs == arm64.compiler_inputs
    systems = plan.systems(project)[amd64.compiler_inputs]
    assert (systems[amd64.os_inputs], systems[arm64.os_inputs]) == ("amd64", "arm64")
    assert amd64.plan != arm64.plan
    assert arm64.references == amd64.references == amd64.local_names
    assert arm64.local_names == tuple(f"{name}-arm64" for name in arm64.references)
    assert arm64.folder == f"{amd64.folder}-arm64"


def test_two_plans_of_the_same_inputs_are_equal(tiny: Project) -> None:
    again = Project(tiny.root)
    data = plan.make_plan(tiny, tiny.cells).as_data()
    assert data == plan.make_plan(again, again.cells).as_data()
    assert str(tiny.root) not in json.dumps(data)


def test_a_security_refresh_changes_the_operating_system_alone(tiny: Project) -> None:
    """Other versions of Debian's packages: the wheels below and above stay the same layers."""
    before = planned(tiny)
    after = planned(locks.write_os_locks(tiny, "2.0-1"))
    moved = [new.name for old, new in zip(before.layers, after.layers, strict=True) if old.inputs != new.inputs]
    assert moved == ["os"]
    assert before.os_inputs != after.os_inputs
    assert after.os_inputs == next(layer.inputs for layer in after.layers if layer.kind == "os")


def test_source_packages_change_no_image(tiny: Project) -> None:
    """Only the SBOM names them; recording them must not make a new operating system."""
    before = planned(tiny)
    path = tiny.root / before.os_request.path
    lock = OS_LOCKS.read(tiny.root, before.os_request)
    assert lock
    named = replace(lock, packages=tuple(replace(package, source="glibc") for package in lock.packages))
    path.write_text(OS_LOCKS.dump(named))
    assert planned(Project(tiny.root)) == before


def test_images_with_one_os_share_it(tiny: Project) -> None:
    images = plan.make_plan(tiny, tiny.cells).images
    assert {image.cell.group for image in images} == set(locks.GROUPS)
    assert len({image.os_inputs for image in images}) == 1


def layers_of(project: Project) -> dict[str, str]:
    return {layer.name: layer.inputs for layer in planned(project).layers}


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("templates/os.j2", {"os"}),
        ("templates/macros.j2", {"os"}),
        ("templates/steps/os.sh", {"os"}),
        ("templates/steps/wheels.sh", set()),
        ("templates/host/env.sh", {"os"}),
        ("templates/base/files/etc/new", {"files"}),
        (plan.COMPILER, {"ember bytecode", "jupyter bytecode"}),
        ("templates/Dockerfile.j2", set()),
        ("locks/uv.txt", set()),
        ("templates/pytorch/files/x", set()),
        ("templates/host/ca.crt", set()),
        ("templates/base/files/__pycache__/x.pyc", set()),
    ],
)
def test_a_changed_file_changes_the_layers_made_from_it(tiny: Project, name: str, moved: set[str]) -> None:
    before, digest = layers_of(tiny), planned(tiny).plan
    path = tiny.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + "# more\n")
    after = layers_of(tiny)
    assert {layer for layer in before if before[layer] != after[layer]} == moved
    assert (planned(tiny).plan != digest) is bool(moved)


def test_an_image_of_too_many_layers_is_refused(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """With those of the operating system and the files."""
    count = len(planned(tiny).layers)
    monkeypatch.setattr(layer_order, "MOST", count)
    assert planned(tiny)
    monkeypatch.setattr(layer_order, "MOST", count - 1)
    with pytest.raises(MatrixError, match=f"{CELL} would have {count} layers; the limit of Docker is {count - 1}"):
        planned(tiny)


def test_sums(tiny: Project) -> None:
    both = plan.make_plan(tiny, tiny.select([CELL, CELL.removesuffix("-jupyter")]))
    small, large = sorted(image.bytes for image in both.images)
    assert (both.sum_bytes, both.unique_bytes) == (small + large, large)
    assert Plan(images=()).unique_bytes == 0


def test_cells_without_a_lock(tiny: Project) -> None:
    unlocked = plan.make_plan(tiny, tiny.select(["em-1.9-*"]))
    assert not unlocked.images
    assert unlocked.unlocked == tuple(cell.id for cell in tiny.select(["em-1.9-*"]))


@pytest.mark.parametrize(
    ("edited", "cells", "kind", "message", "hint"),
    [
        ("", "*", LockError, "not locked: em-1.9-cu129-py39, ", "Resolve first: builder lock"),
        (
            "",
            "em-1.9-cu129-py39{,-board}",
            LockError,
            "not locked: em-1.9-cu129-py39, em-1.9-cu129-py39-board",
            "Resolve first: builder lock em-1.9-cu129-py39 em-1.9-cu129-py39-board",
        ),
        (
            "packages: [notebook>=2]",
            CELL,
            StaleError,
            f"locks/{GROUP}.json does not match matrix.yaml: jupyter: matrix.yaml requires",
            f"Resolve it again: builder lock '{GROUP}*'",
        ),
    ],
)
def test_messages(edit: Edit, edited: str, cells: str, kind: type[BuilderError], message: str, hint: str) -> None:
    project = edit("packages: [notebook]", edited or "packages: [notebook]")
    with pytest.raises(kind) as caught:
        plan.make_locked_plan(project, project.select([cells]))
    assert str(caught.value).startswith(message)
    assert caught.value.hint == hint


def test_a_stale_lock_of_a_cell_whose_debian_packages_are_not_locked(edit: Edit) -> None:
    """Both must be locked again: the cell is listed, as one without any lock."""
    project = edit("packages: [notebook]", "packages: [notebook>=2]\n    apt: [git]")
    assert plan.make_plan(project, project.select([CELL])).unlocked == (CELL,)


@pytest.mark.parametrize("cell", [GROUP, "qz-0.5-cu129-py311"])
def test_a_lock_that_is_stale_for_other_cells(edit: Edit, cell: str) -> None:
    """Components that a cell does not have change neither its lock nor its image."""
    before = planned(edit("packages: [notebook]", "packages: [notebook]"), cell)
    assert planned(edit("packages: [notebook]", "packages: [notebook>=2]"), cell) == before


def test_the_base_image_of_dockerfiles_does_not_change_the_plan(edit: Edit) -> None:
    """mmdebstrap makes the operating system from locked packages alone."""
    before = planned(edit("namespace: team", "namespace: team"), CELL)
    after = planned(edit("example/base:new@", "example/base:newer@"), CELL)
    assert after.base != before.base
    assert after.plan == before.plan


MATRIX_CHANGES = {
    "Debian package of the Python": ("{debian: newbird}", "{debian: newbird, apt: [python3, python3-extra]}"),
    "Debian package": ("apt: [python3]", "apt: [python3, git]"),
    "command": ("command: [start-jupyter]", "command: [other]"),
    "health check": ("healthcheck: [check-jupyter]", "healthcheck: [other]"),
    "port": ("port: 8888", "port: 8889"),
    "env": ("EMBER_HOME: /workspace", "EMBER_HOME: /home/user"),
    "source": ("namespace: team", "namespace: team\nsource: https://git.example.test/team/images"),
    "release": ("release: 1.10.0", "release: 1.10.1"),
    "order of components": ("jupyter: [board, jupyter]", "jupyter: [jupyter, board]"),
    "order of components without packages": ("jupyter: [board, jupyter]", "jupyter: [two, one, board, jupyter]"),
    "order of env": ("{EMBER_HOME: /workspace}", "{EMBER_B: b, EMBER_A: a}"),
    "name of the Debian release": ("{debian: newbird}", "{debian: otherbird}"),
}
BEFORE = {
    "order of components without packages": ("jupyter: [board, jupyter]", "jupyter: [one, two, board, jupyter]"),
    "order of env": ("{EMBER_HOME: /workspace}", "{EMBER_A: a, EMBER_B: b}"),
}


@pytest.mark.parametrize("change", MATRIX_CHANGES)
def test_another_dockerfile_has_another_digest(edit: Edit, change: str) -> None:
    """Images with the same digest must have the same Dockerfile: a build of one is reused for the other."""
    edit("  board: {needs", "  one: {needs: [base]}\n  two: {needs: [base]}\n  board: {needs")
    if "otherbird" in MATRIX_CHANGES[change][1]:
        edit(
            "  newbird:\n",
            f'  otherbird:\n    image: example/base:new@sha256:{"2" * 64}\n    glibc: "2.36"\n  newbird:\n',
        )
    old, new = MATRIX_CHANGES[change]
    project = edit(*BEFORE.get(change, (old, old)))
    image = planned(relock(project))
    before = dockerfile(project)
    changed = relock(edit(BEFORE.get(change, (old, old))[1], new))
    assert dockerfile(changed) != before, "this test changes nothing"
    assert planned(changed).plan != image.plan


def test_other_facts_have_another_digest(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A label has the driver: another driver makes another image of the same layers."""
    before, text = planned(tiny), dockerfile(tiny)
    drivers = {"12": facts.Driver(minimum="526.0", source="made up")}
    changed = facts.load_facts().model_copy(update={"drivers": drivers})
    monkeypatch.setattr(facts, "load_facts", lambda: changed)
    assert dockerfile(tiny) != text
    after = planned(tiny)
    assert after.plan != before.plan
    assert after.layers == before.layers


def test_an_image_has_the_last_day_of_its_support_as_a_label(bookworm: Project) -> None:
    """None if it is not known."""
    [image] = plan.make_plan(bookworm, bookworm.select(["qz-0.5-cu129-py311"])).images
    assert image.settings.labels[SUPPORT_LABEL] == "2028-06-30"


def test_a_reason_why_cells_were_not_built_changes_no_image(tiny: Project, edit: Edit) -> None:
    before = [image.plan for image in plan.make_plan(tiny, tiny.cells).images]
    edited = edit('"3.11": {debian: newbird}', '"3.11": {debian: newbird, not_built: "nobody can fetch it"}')
    assert [image.plan for image in plan.make_plan(edited, edited.cells).images] == before


@pytest.mark.parametrize(
    ("old", "new"),
    [("namespace: team", "namespace: others"), ("registry: registry.example.test:5000", 'registry: ""')],
)
def test_a_fork_has_the_same_images(edit: Edit, old: str, new: str) -> None:
    """Nothing in an image names a registry or a namespace."""
    before, text = planned(edit(old, old)), dockerfile(edit(old, old))
    project = edit(old, new)
    after = planned(project)
    assert (after.plan, after.layers, after.settings) == (before.plan, before.layers, before.settings)
    assert dockerfile(project) == text
    assert after.references != before.references


def test_a_python_of_other_debian_packages(edit: Edit) -> None:
    """Those of the Python and of all components, without duplicates."""
    before = planned(locks.write_os_locks(edit("apt: [python3]", "apt: [python3, git]")))
    project = edit('"3.11": {debian: newbird}', '"3.11": {debian: newbird, apt: [python3, tini, python3-extra]}')
    with pytest.raises(LockError):
        planned(project)
    after = planned(locks.write_os_locks(project))
    assert after.os_request.packages == ("ca-certificates", "git", "python3", "python3-extra", "tini")
    moved = [new.name for old, new in zip(before.layers, after.layers, strict=True) if old.inputs != new.inputs]
    assert moved == ["os"]


BY_UV = '"3.11": {debian: newbird, uv: 3.11.15}'


def test_a_python_of_uv(edit: Edit) -> None:
    """The os layer depends on its archive and on uv, which unpacks it, and does not have Debian's Python."""
    edit("apt: [python3]", "apt: []")
    before = layers_of(locks.write_os_locks(edit('"3.11": {debian: newbird}', BY_UV)))
    project = edit(BY_UV, BY_UV.replace("3.11.15", "3.11.16"))
    locks.write_os_locks(project)
    after = layers_of(project)
    moved = {"os", "ember bytecode", "jupyter bytecode"}
    assert {layer for layer in before if before[layer] != after[layer]} == moved
    image = planned(project)
    assert image.uv == "3.11.16"
    assert image.locked_python
    (project.root / PYTHON_LOCKS.path(image.locked_python.release)).write_text(
        PYTHON_LOCKS.dump(replace(image.locked_python, sha256="0" * 64))
    )
    rebuilt = layers_of(project)
    assert {layer for layer in before if rebuilt[layer] != after[layer]} == moved
    for name, content in {plan.UV_LOCK: "uv==0.0 --hash=sha256:0\n", plan.UV_PYTHON_SCRIPT: "# changed\n"}.items():
        (project.root / name).write_text(content)
        newer = layers_of(project)
        assert {layer for layer in before if newer[layer] != rebuilt[layer]} == {"os"}
        rebuilt = newer


def test_the_dockerfile_of_a_python_of_uv_checks_its_hash(edit: Edit) -> None:
    edit("apt: [python3]", "apt: []")
    project = locks.write_os_locks(edit('"3.11": {debian: newbird}', BY_UV))
    archive, text = planned(project).locked_python, dockerfile(project)
    assert archive
    python = "/opt/python/cpython-3.11.15-linux-x86_64-gnu/bin/python3.11"
    assert f"sh /mnt/steps/uv-python.sh {python} \\\n" in text
    assert "uv python install --no-config --no-bin --install-dir /opt/python 3.11.15 && \\\n" in text
    check = f'echo "{archive.sha256}  $(ls /tmp/archive/*.tar.gz)" >/tmp/sha256 && sha256sum --check /tmp/sha256\n'
    assert check in text
    assert f"sh /mnt/steps/os.sh {python} \\\n" in text
    system = text[text.index("AS os\n") :].partition("\n\n")[0]
    assert "python3" not in system.splitlines()[-1].split(), "Debian's Python is not installed beside it"


def test_a_python_of_uv_that_is_not_locked(edit: Edit) -> None:
    project = locks.write_os_locks(edit('"3.11": {debian: newbird}', BY_UV))
    (project.root / "locks/python-3.11.15.json").unlink()
    with pytest.raises(LockError):
        planned(project)


def test_a_link_is_content(tiny: Project) -> None:
    """Its target is part of the layer, whether or not it exists."""
    path = tiny.root / "templates/base/files/usr/lib/it.so.1"
    path.parent.mkdir(parents=True)
    path.symlink_to("/opt/nowhere/it.so.1")
    before, digest_before = layers_of(tiny), planned(tiny).plan
    path.unlink()
    path.symlink_to("/opt/elsewhere/it.so.1")
    after = layers_of(tiny)
    assert {layer for layer in before if before[layer] != after[layer]} == {"files"}
    assert planned(tiny).plan != digest_before


def test_an_image_for_the_cpu_has_the_same_layers_without_cuda(on_cpu: Project) -> None:
    for group in ("qz-0.5-cu129-py311", "qz-0.5-cpu-py311"):
        lock = locks.lock_of(on_cpu, on_cpu.groups[group])
        (on_cpu.root / GROUP_LOCKS.path(group)).write_text(GROUP_LOCKS.dump(lock))
    cuda, cpu = (planned(on_cpu, cell) for cell in ("qz-0.5-cu129-py311", "qz-0.5-cpu-py311"))
    assert cpu.components == ("base", "python", "quartz")
    assert cpu.references[-1] == "registry.example.test:5000/team/quartz:0.5"
    # The last layer has pip's constraints, which name CUDA's wheels.
    without_cuda = [layer for layer in cuda.layers if layer.component != "cuda"]
    assert [layer.name for layer in without_cuda] == [layer.name for layer in cpu.layers]
    assert without_cuda[:-1] == list(cpu.layers[:-1])
    assert cuda.layers[-1].inputs != cpu.layers[-1].inputs
    assert cpu.plan != cuda.plan
    text = render.render(on_cpu, plan.make_plan(on_cpu, on_cpu.select(["qz-0.5-cpu-py311"])))
    dockerfile = text["images/qz-0.5-cpu-py311/plain.Dockerfile"]
    # All images have one PATH.
    own = [line for line in dockerfile.splitlines() if not line.startswith(("#", "ENV PATH="))]
    assert not [line for line in own if "nvidia" in line.lower()]


def dockerfile(project: Project) -> str:
    locked = plan.make_locked_plan(project, project.select([CELL]))
    return render.render(project, locked)[f"images/{GROUP}/jupyter.Dockerfile"]


def test_each_file_is_read_once_for_all_cells(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix may have thousands of cells. A template is read twice: with its component and with its files."""
    read: Counter[str] = Counter()
    original = Path.read_bytes

    def count(file: Path) -> bytes:
        read[file.as_posix()] += 1
        return original(file)

    monkeypatch.setattr(Path, "read_bytes", count)
    plan.make_plan(tiny, tiny.cells)
    assert {number for name, number in read.items() if "/locks/em-" in name} == {1}
    assert max(read.values()) <= 2, read.most_common(3)


def test_constraints_keep_pip_from_replacing_the_framework_and_its_cuda(tiny: Project) -> None:
    image = planned(tiny, "em-1.10-cu1210-py311-jupyter")
    lines = [line for line in image.constraints.splitlines() if not line.startswith("#")]
    names = [line.split("==")[0] for line in lines]
    [own] = [line for line in lines if line.startswith("ember==")]
    assert own.endswith(",!=0+to.override.unset.PIP_CONSTRAINT"), "pip prints it with a conflict"
    assert Requirement(own).specifier.contains(image.cell.release)
    assert names == ["ember", "ember-extra", *locks.CUDA], "what the lock holds, and CUDA's wheels"
    assert image.constraints == planned(tiny, GROUP).constraints, "they are a file of the group"

    lock = locks.locks(tiny)[GROUP]
    toolkit = {locks.CUDA[0]: "==12.10.1.*", "nvcc": "==12.10.88.*"}
    (tiny.root / GROUP_LOCKS.path(GROUP)).write_text(GROUP_LOCKS.dump(replace(lock, toolkit=toolkit)))
    added = set(planned(tiny, GROUP).constraints.splitlines()) - set(image.constraints.splitlines())
    assert added == {"nvcc!=0+to.override.unset.PIP_CONSTRAINT,==12.10.88.*"}, "of the CUDA that no image has"
