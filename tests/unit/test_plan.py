"""The plan: layers, digests of inputs, and what it needs to read for it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from builder import facts, lock, plan, render
from builder.errors import LockError, StaleError
from builder.lock import Lock
from builder.plan import Plan, PlannedImage
from builder.project import Project
from tests.unit import tiny_locks
from tests.unit.test_cells import big

Edit = Callable[[str, str], Project]
CELL = "em-1.10-cu1210-py311-jupyter"


def made(project: Project, cell: str = CELL) -> PlannedImage:
    return plan.make_locked(project, project.select([cell])).images[0]


def relock(project: Project) -> Project:
    """Locks that belong to the project's matrix as it is now."""
    for cell, one in tiny_locks.locks(project).items():
        lock.path(project.root, cell).write_text(lock.dump(one))
    return project


def test_snapshot(tiny: Project, snapshot: Callable[[str, str], None]) -> None:
    """As `builder plan --format json` gives it; masked is only what depends on the bytes of templates/."""
    data = plan.make(tiny, tiny.cells).as_data()
    for image in data["images"]:
        image["digest"] = "(masked)"
        for layer in image["layers"]:
            if layer["kind"] != "wheels":
                layer["inputs"] = "(masked)"
    snapshot("snapshots/plan.json", json.dumps(data, indent=1) + "\n")


def test_two_plans_of_the_same_inputs_are_equal(tiny: Project) -> None:
    again = Project(tiny.root)
    assert plan.make(tiny, tiny.cells).as_data() == plan.make(again, again.cells).as_data()


def test_nothing_of_the_machine_is_in_it(tiny: Project) -> None:
    assert str(tiny.root) not in json.dumps(plan.make(tiny, tiny.cells).as_data())


def test_layers(tiny: Project) -> None:
    """What most images share lies lowest: CUDA, the framework, the operating system, then the variant."""
    assert [(layer.kind, layer.name) for layer in made(tiny).layers] == [
        ("wheels", "cuda"),
        ("wheels", "ember"),
        ("files", "ember bytecode"),
        ("os", "os"),
        ("wheels", "python"),
        ("files", "python bytecode"),
        ("wheels", "board"),
        ("files", "board bytecode"),
        ("wheels", "jupyter"),
        ("files", "jupyter bytecode"),
        ("files", "files"),
    ]


def test_components_with_files_of_their_own(tiny: Project) -> None:
    image = made(tiny)
    with_files = [name for name in image.components if (tiny.root / "templates" / name / "files").is_dir()]
    assert list(image.file_components) == with_files == ["base", "jupyter"]


def test_the_stack_does_not_depend_on_what_is_chosen(tiny: Project) -> None:
    """Layers are ordered by how many images of the matrix share them, not by how many are built now."""
    alone = made(tiny)
    among = next(image for image in plan.make(tiny, tiny.cells).images if image.id == CELL)
    assert alone == among


def test_a_security_refresh_moves_the_operating_system_alone(edit: Edit) -> None:
    """Another package of Debian: the wheels below and above it stay the same layers."""
    before = made(edit("apt: [python3]", "apt: [python3]"))
    after = made(edit("apt: [python3]", "apt: [python3, git]"))
    moved = [new.name for old, new in zip(before.layers, after.layers, strict=True) if old.inputs != new.inputs]
    assert moved == ["os"]
    assert before.os != after.os
    assert after.os == next(layer.inputs for layer in after.layers if layer.kind == "os")


def test_images_with_one_os_share_it(tiny: Project) -> None:
    images = plan.make(tiny, tiny.cells).images
    assert len(images) == len(tiny_locks.LOCKED)
    assert len({image.os for image in images}) == 1


def layers_of(project: Project) -> dict[str, str]:
    return {layer.name: layer.inputs for layer in made(project).layers}


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("templates/os.j2", {"os"}),
        ("templates/macros.j2", {"os"}),
        ("templates/host/env.sh", {"os"}),
        ("templates/base/files/etc/new", {"files"}),
        (plan.COMPILER, {f"{name} bytecode" for name in ("ember", "python", "board", "jupyter")}),
        ("templates/Dockerfile.j2", set()),
        ("locks/uv.txt", set()),
    ],
)
def test_a_changed_file_moves_the_layers_that_are_made_from_it(tiny: Project, name: str, moved: set[str]) -> None:
    before = layers_of(tiny)
    path = tiny.root / name
    path.write_text((path.read_text() if path.exists() else "") + "# more\n")
    after = layers_of(tiny)
    assert {layer for layer in before if before[layer] != after[layer]} == moved


def test_every_wheel_is_in_one_layer(tiny: Project) -> None:
    locked = lock.read(tiny.root, CELL)
    assert locked is not None
    image = made(tiny)
    assert sorted(wheel.file for wheel in image.wheels) == sorted(wheel.file for wheel in locked.wheels)
    assert image.bytes == sum(wheel.size for wheel in locked.wheels)


def test_a_wheel_of_an_unknown_component_is_not_left_out(tiny: Project) -> None:
    locked = lock.read(tiny.root, CELL)
    assert locked is not None
    stray = tuple(replace(wheel, component="emberr") if wheel.name == "emberkit" else wheel for wheel in locked.wheels)
    lock.path(tiny.root, CELL).write_text(lock.dump(replace(locked, wheels=stray)))
    with pytest.raises(LockError, match="emberr"):
        made(tiny)


def test_sums(tiny: Project) -> None:
    both = plan.make(tiny, tiny.select([CELL, CELL.removesuffix("-jupyter")]))
    small, large = sorted(image.bytes for image in both.images)
    assert (both.sum_bytes, both.unique_bytes) == (small + large, large)
    assert Plan(images=()).unique_bytes == 0


def test_cells_without_a_lock(tiny: Project) -> None:
    found = plan.make(tiny, tiny.select(["em-1.9-*"]))
    assert not found.images
    assert found.unlocked == tuple(cell.id for cell in tiny.select(["em-1.9-*"]))
    with pytest.raises(LockError, match=r"^not locked: em-1.9-cu129-py39, ") as caught:
        plan.make_locked(tiny, tiny.select(["*"]))
    assert str(caught.value).endswith(" ...")
    assert caught.value.hint == "Resolve first: builder lock em-1.9-cu129-py39"


def test_a_stale_lock(edit: Edit) -> None:
    """Cells of one group are resolved together, so the lock of the plain one is stale too."""
    project = edit("packages: [notebook]", "packages: [notebook>=2]")
    plain = CELL.removesuffix("-jupyter")
    with pytest.raises(StaleError, match=rf"^locks/{plain}.json does not belong to") as caught:
        made(project)
    assert caught.value.hint == f"Resolve it again: builder lock {plain}"


def test_a_stale_lock_of_a_cell_that_is_not_chosen(edit: Edit) -> None:
    """What other images share decides where a layer lies: a plan of half a matrix would be another one tomorrow."""
    project = edit("packages: [notebook]", "packages: [notebook>=2]")
    with pytest.raises(StaleError, match=r"em-1\.10"):
        made(project, "qz-0.5-cu129-py311")


MATRIX_CHANGES = {
    "Debian package of the Python": ("{debian: newbird}", "{debian: newbird, apt: [python3, python3-extra]}"),
    "base image": ("example/base:new@", "example/base:newer@"),
    "Debian package": ("apt: [python3]", "apt: [python3, git]"),
    "command": ("command: [start-jupyter]", "command: [other]"),
    "health check": ("healthcheck: [check-jupyter]", "healthcheck: [other]"),
    "port": ("port: 8888", "port: 8889"),
    "env": ("EMBER_HOME: /workspace", "EMBER_HOME: /home/user"),
    "namespace": ("namespace: team", "namespace: others"),
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
    """Two plans with one digest give the same Dockerfile: the engine's image of the one is taken for the other."""
    edit("  board: {needs", "  one: {needs: [base]}\n  two: {needs: [base]}\n  board: {needs")
    if "otherbird" in MATRIX_CHANGES[change][1]:
        edit(
            "  newbird:\n",
            f'  otherbird:\n    image: example/base:new@sha256:{"2" * 64}\n    glibc: "2.36"\n  newbird:\n',
        )
    old, new = MATRIX_CHANGES[change]
    project = edit(*BEFORE.get(change, (old, old)))
    image = made(relock(project))
    before = dockerfile(project)
    changed = relock(edit(BEFORE.get(change, (old, old))[1], new))
    assert dockerfile(changed) != before, "this test changes nothing"
    assert made(changed).digest != image.digest


def test_other_facts_have_another_digest(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The labels say the driver: an image that says another one is another image, though its layers are the same."""
    before, text = made(tiny), dockerfile(tiny)
    drivers = {"12": facts.Driver(minimum="526.0", source="made up")}
    changed = facts.load().model_copy(update={"drivers": drivers})
    monkeypatch.setattr(facts, "load", lambda: changed)
    assert dockerfile(tiny) != text
    after = made(tiny)
    assert after.digest != before.digest
    assert after.layers == before.layers


def test_the_digest_is_a_label_and_not_of_itself(tiny: Project) -> None:
    image = made(tiny)
    assert image.settings.labels["gpu-images.plan"] == image.digest
    assert made(Project(tiny.root)).digest == image.digest


def test_a_python_of_other_debian_packages(edit: Edit) -> None:
    """Those of the Python and of all components, each once."""
    before = made(edit("apt: [python3]", "apt: [python3, git]"))
    project = edit('"3.11": {debian: newbird}', '"3.11": {debian: newbird, apt: [python3, tini, python3-extra]}')
    after = made(project)
    parts = [project.matrix.components[name] for name in after.components]
    packages = plan.apt_packages(project.matrix.python["3.11"], parts)
    assert packages == ["ca-certificates", "git", "python3", "python3-extra", "tini"]
    moved = [new.name for old, new in zip(before.layers, after.layers, strict=True) if old.inputs != new.inputs]
    assert moved == ["os"]


BY_UV = '"3.11": {debian: newbird, uv: 3.11.15}'


def test_a_python_of_uv(edit: Edit) -> None:
    """Its release, and which uv it is of, make the operating system; Debian's Python does not come too."""
    edit("apt: [python3]", "apt: []")
    before = layers_of(edit('"3.11": {debian: newbird}', BY_UV))
    project = edit(BY_UV, BY_UV.replace("3.11.15", "3.11.16"))
    after = layers_of(project)
    assert {layer for layer in before if before[layer] != after[layer]} == {"os"}
    (project.root / plan.UV_LOCK).write_text("uv==0.0 --hash=sha256:0\n")
    newer = layers_of(project)
    assert {layer for layer in before if newer[layer] != after[layer]} == {"os"}
    image = made(project)
    assert image.uv == "3.11.16"
    text = dockerfile(project)
    assert "uv python install --no-config --no-bin --install-dir /opt/python 3.11.16\n" in text
    assert "/opt/python/cpython-3.11.16-linux-x86_64-gnu/bin/python3.11 -m venv" in text
    system = text[text.index("AS os\n") :].partition("-m venv")[0]
    assert not [line for line in system.splitlines() if line.split()[:1] == ["python3"]]


def test_a_python_of_debian_says_nothing_of_uv(tiny: Project) -> None:
    assert made(tiny).uv == ""
    assert "/opt/python" not in dockerfile(tiny)
    assert "python3.11 -m venv" in dockerfile(tiny)


def test_a_link_is_content(tiny: Project) -> None:
    """Where it points to is part of the layer, whether or not something is there."""
    path = tiny.root / "templates/base/files/usr/lib/it.so.1"
    path.parent.mkdir(parents=True)
    path.symlink_to("/opt/nowhere/it.so.1")
    before, digest_before = layers_of(tiny), made(tiny).digest
    path.unlink()
    path.symlink_to("/opt/elsewhere/it.so.1")
    after = layers_of(tiny)
    assert {layer for layer in before if before[layer] != after[layer]} == {"files"}
    assert made(tiny).digest != digest_before


def on_the_cpu(project: Project) -> dict[str, Lock]:
    """Locks of quartz on CUDA, and on the cpu the same wheels but CUDA's."""
    found = {}
    for cell in project.select(["qz-0.5-cu129-py311", "qz-0.5-cpu-py311"]):
        locked = tiny_locks.locks(project)["qz-0.5-cu129-py311"]
        found[cell.id] = replace(
            locked,
            cell=cell.id,
            inputs=lock.inputs(project.matrix, cell, project.together[cell.group]),
            wheels=tuple(wheel for wheel in locked.wheels if wheel.component != "cuda" or not cell.is_cpu),
        )
    return found


def test_an_image_for_the_cpu_has_the_same_layers_without_cuda(on_cpu: Project) -> None:
    for cell, locked in on_the_cpu(on_cpu).items():
        lock.path(on_cpu.root, cell).write_text(lock.dump(locked))
    cuda, cpu = (made(on_cpu, cell) for cell in ("qz-0.5-cu129-py311", "qz-0.5-cpu-py311"))
    assert cpu.components == ("base", "python", "quartz")
    assert cpu.references[-1] == "registry.example.test:5000/team/quartz:0.5"
    # The last layer has pip's constraints, which name CUDA's wheels.
    assert [layer for layer in cuda.layers if layer.component != "cuda"][:-1] == list(cpu.layers[:-1])
    assert cuda.layers[-1].inputs != cpu.layers[-1].inputs
    assert cpu.digest != cuda.digest
    text = render.render(on_cpu.root, on_cpu.matrix, plan.make(on_cpu, on_cpu.select(["qz-0.5-cpu-py311"])))
    dockerfile = text["images/qz-0.5-cpu-py311/Dockerfile"]
    assert not [line for line in dockerfile.splitlines() if "nvidia" in line.lower() and not line.startswith("#")]


def dockerfile(project: Project) -> str:
    """The rendered Dockerfile, without the digest of its plan."""
    found = plan.make_locked(project, project.select([CELL]))
    text = render.render(project.root, project.matrix, found)[f"images/{CELL}/Dockerfile"]
    return text.replace(found.images[0].digest, "")


@pytest.mark.parametrize(
    "name",
    [*plan.COMMON_INPUTS, "templates/base/files/etc/new", "templates/python/compile.py", "templates/jupyter/new"],
)
def test_a_changed_template_changes_the_digest(tiny: Project, name: str) -> None:
    before = made(tiny).digest
    path = tiny.root / name
    path.write_text((path.read_text() if path.exists() else "") + "# more\n")
    assert made(tiny).digest != before


def test_another_format_of_layers_has_another_digest(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same wheels in other bytes are another image."""
    before = made(tiny)
    monkeypatch.setattr("builder.splice.FORMAT", 0)
    assert made(tiny).digest != before.digest


@pytest.mark.parametrize(
    "name", ["templates/pytorch/x", "templates/host/ca.crt", "templates/base/__pycache__/x.pyc", "x"]
)
def test_what_is_not_used_does_not_change_the_digest(tiny: Project, name: str) -> None:
    before = made(tiny).digest
    (tiny.root / name).parent.mkdir(parents=True, exist_ok=True)
    (tiny.root / name).write_text("x")
    assert made(tiny).digest == before


def test_ten_thousand_cells(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.root / "matrix.yaml"
    text = big(path.read_text(), lines=8, cudas=20, pythons=20)
    path.write_text(text.replace('versions:\n      "7.0": {release: 7.0.0', 'versions:\n      "6.0": {release: 6.0.0'))
    project = Project(tiny.root)
    read: Counter[str] = Counter()
    wheels = tuple(tiny_locks.wheel("python", f"p{number}", "1", 10) for number in range(3))
    original = Path.read_bytes

    def locked(root: Path, cell_id: str) -> Lock | None:
        read[cell_id] += 1
        cell = by_id[cell_id]
        if cell.line == "7.1":
            return None
        inputs = lock.inputs(project.matrix, cell, project.together[cell.group])
        return Lock(cell=cell_id, inputs=inputs, requirements={}, wheels=wheels)

    def count(file: Path) -> bytes:
        read[file.relative_to(tiny.root).as_posix()] += 1
        return original(file)

    by_id = {cell.id: cell for cell in project.cells}
    monkeypatch.setattr(lock, "read", locked)
    monkeypatch.setattr(Path, "read_bytes", count)
    found = plan.make(project, project.cells)
    assert len(project.cells) == 9 * 20 * 20 * 3
    assert len(found.unlocked) == 20 * 20 * 3
    assert len(found.images) == 8 * 20 * 20 * 3
    assert len({image.digest for image in found.images}) == len(found.images)
    # One layer for each Python.
    assert (found.sum_bytes, found.unique_bytes) == (30 * len(found.images), 30 * 20)
    # Each lock once; a template at most twice: with its component and with the component's files.
    assert {read[cell.id] for cell in project.cells} == {1}
    assert max(read.values()) <= 2, read.most_common(3)
    assert len(found.as_data()["images"]) == len(found.images)


def test_pip_is_kept_from_replacing_the_framework_and_its_cuda(tiny: Project) -> None:
    image = made(tiny, "em-1.10-cu1210-py311-jupyter")
    names = [line.split("==")[0] for line in image.constraints.splitlines()]
    assert "ember" in names
    assert {wheel.name for wheel in image.of_component("cuda")} <= set(names)
    assert not {wheel.name for wheel in image.of_component("jupyter")} & set(names)
    assert names == sorted(names)
