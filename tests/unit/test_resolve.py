"""Resolving, with a stand-in for uv: which wheel is taken, and what is said when it does not work."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.tags import parse_tag

from builder import lock, resolve
from builder.cells import Cell
from builder.errors import FetchError, LockError, UnreachableError
from builder.host import Host
from builder.index import IndexSettings
from builder.project import Project
from builder.resolve import Resolver, tag_ranks
from tests.unit.fakes import Programs

GROUP = "em-1.10-cu1210-py311"
CELL = Cell(framework="ember", short="em", line="1", release="1.0", cuda="12.9", python="3.11", variant="plain")
LINUX = "manylinux_2_28_x86_64"


def rank(tag: str, python: str = "3.11", glibc: str = "2.36") -> int | None:
    ranks = tag_ranks(python, glibc)
    return min((ranks[one] for one in parse_tag(tag) if one in ranks), default=None)


# From the most specific to the least, as pip orders them.
ORDER = [
    "cp311-cp311-manylinux_2_36_x86_64",
    "cp311-cp311-manylinux_2_17_x86_64",
    "cp311-cp311-manylinux2014_x86_64",
    "cp311-cp311-manylinux_2_16_x86_64",
    "cp311-cp311-manylinux_2_12_x86_64",
    "cp311-cp311-manylinux2010_x86_64",
    "cp311-cp311-manylinux1_x86_64",
    "cp311-cp311-linux_x86_64",
    f"cp311-abi3-{LINUX}",
    f"cp311-none-{LINUX}",
    f"cp310-abi3-{LINUX}",
    f"cp32-abi3-{LINUX}",
    f"py311-none-{LINUX}",
    f"py3-none-{LINUX}",
    f"py30-none-{LINUX}",
    "cp311-none-any",
    "py311-none-any",
    "py3-none-any",
    "py30-none-any",
]


def test_tags_from_specific_to_general() -> None:
    ranks = [rank(tag) for tag in ORDER]
    assert None not in ranks
    assert ranks == sorted(ranks, key=lambda one: one or 0)
    assert len(set(ranks)) == len(ranks)
    assert ranks[0] == 0


@pytest.mark.parametrize(
    "tag",
    [
        "cp312-cp312-manylinux_2_17_x86_64",
        "cp310-cp310-manylinux_2_17_x86_64",
        "cp312-abi3-manylinux_2_17_x86_64",
        "cp311-cp311-manylinux_2_37_x86_64",
        "cp311-cp311-manylinux_2_17_aarch64",
        "cp311-cp311-musllinux_1_2_x86_64",
        "cp311-cp311t-manylinux_2_17_x86_64",
        "cp311-cp311-win_amd64",
        "py2-none-any",
        "pp311-pypy311_pp73-manylinux_2_17_x86_64",
    ],
)
def test_tags_that_do_not_fit(tag: str) -> None:
    assert rank(tag) is None


def test_tags_of_an_older_machine() -> None:
    assert rank("cp39-cp39-manylinux_2_31_x86_64", "3.9", "2.31") == 0
    assert rank("cp39-cp39-manylinux_2_34_x86_64", "3.9", "2.31") is None


def entry(file: str, *, sha256: str | None = None) -> dict[str, Any]:
    hashes = {"sha256": sha256 if sha256 is not None else hashlib.sha256(file.encode()).hexdigest()}
    return {"url": f"https://files.example.test/a/{file}", "hashes": hashes}


def best(*files: str) -> str:
    package = {"version": "1.0", "wheels": [entry(file) for file in files]}
    wheel, url = resolve._best_wheel(CELL, "x", package, tag_ranks("3.11", "2.36"))
    assert url.endswith(wheel.file)
    return wheel.file


@pytest.mark.parametrize(
    "files",
    [
        # The first is to be taken.
        ["x-1.0-cp311-cp311-manylinux_2_17_x86_64.whl", "x-1.0-py3-none-any.whl"],
        ["x-1.0-cp311-cp311-manylinux_2_28_x86_64.whl", "x-1.0-cp311-cp311-manylinux_2_17_x86_64.whl"],
        ["x-1.0-cp39-abi3-manylinux_2_17_x86_64.whl", "x-1.0-py3-none-any.whl"],
        ["x-1.0-10-py3-none-any.whl", "x-1.0-9-py3-none-any.whl", "x-1.0-py3-none-any.whl"],
        ["x-1.0-2b-py3-none-any.whl", "x-1.0-2a-py3-none-any.whl"],
        ["x-1.0-cp311-cp311-linux_x86_64.whl", "x-1.0-9-py3-none-any.whl"],
        ["x-1.0-py3-none-any.whl", "x-1.0-cp312-cp312-manylinux_2_17_x86_64.whl"],
        ["x-1.0-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", "x-1.0-py3-none-manylinux2014_x86_64.whl"],
    ],
)
def test_the_wheel_that_an_installer_takes(files: list[str]) -> None:
    assert best(*files) == files[0]
    assert best(*reversed(files)) == files[0]


def test_a_local_version_in_an_address() -> None:
    package = {"version": "1.0+cu129", "wheels": [entry("x-1.0%2Bcu129-py3-none-any.whl")]}
    wheel, _ = resolve._best_wheel(CELL, "x", package, tag_ranks("3.11", "2.36"))
    assert (wheel.file, wheel.version) == ("x-1.0+cu129-py3-none-any.whl", "1.0+cu129")


SAME = "x-1.0-py3-none-any.whl"
UNFIT: dict[str, tuple[list[dict[str, Any]], str]] = {
    "none at all": ([], "x 1.0 has no wheel for Python 3.11 on x86_64"),
    "none that fits": ([entry("x-1.0-cp312-cp312-win_amd64.whl")], "x 1.0 has no wheel for Python 3.11"),
    "two builds alike": ([entry(SAME), entry("x-1.0-py2.py3-none-any.whl")], "x has two builds that fit equally"),
    "one name, two contents": ([entry(SAME), entry(SAME, sha256="0" * 64)], "x has two builds that fit equally"),
    "no hash": ([entry(SAME, sha256="")], f"the index gives no SHA-256 for {SAME}"),
    "no wheel's name": ([entry("x.whl")], "the index lists 'x.whl', which is no wheel's name"),
}


@pytest.mark.parametrize(("wheels", "says"), UNFIT.values(), ids=UNFIT.keys())
def test_no_wheel_can_be_chosen(wheels: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(LockError) as caught:
        resolve._best_wheel(CELL, "x", {"version": "1.0", "wheels": wheels}, tag_ranks("3.11", "2.36"))
    assert str(caught.value).startswith(f"{CELL.id}: ")
    assert says in str(caught.value)


def test_one_file_listed_twice_is_no_conflict() -> None:
    assert best(SAME, SAME) == SAME


NO_SOLUTION = """\
warning: something else
  \u00d7 No solution found when resolving dependencies:
  ╰─▶ Because you require ember==1.0 and ember==1.1, we can conclude that your requirements are unsatisfiable.
"""
TOLD = {
    NO_SOLUTION: "Change a version in matrix.yaml",
    "error: Failed to fetch: `https://index.example.test/x/`\n  Caused by: dns error": "did not answer as it should",
    "error: operation timed out": "did not answer as it should",
    "  \u00d7 Failed to download `x==1`\n  ╰─▶ Hash mismatch for `x==1`": "other bytes than it promises",
    "  ╰─▶ Because x==1 has no usable wheels and building from source is disabled": "pin a version that has one",
    "  ╰─▶ Because x==1 has no wheels with a matching Python version tag": "pin a version that has one",
}


@pytest.mark.parametrize(("told", "hint"), TOLD.items(), ids=list(TOLD.values()))
def test_hints(told: str, hint: str) -> None:
    assert hint in resolve._hint(told)


def test_uv_in_its_own_words_without_decoration() -> None:
    assert resolve._explain(NO_SOLUTION).splitlines() == [
        "  No solution found when resolving dependencies:",
        "  Because you require ember==1.0 and ember==1.1, we can conclude that your requirements are unsatisfiable.",
    ]


Answer = Callable[[list[str]], tuple[int, str, str]]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What uv read: requirements, constraints, and versions to be kept."""

    wanted: list[str]
    bounds: list[str]
    known: dict[str, str]
    python: str


def uv(
    wheels: Path, *, cuda_version: str = "", told: tuple[int, str] = (0, ""), asked: list[Asked] | None = None
) -> Answer:
    """Answers as `uv pip compile` does: every requirement has one wheel in a folder, and a framework the CUDA runtime.

    What was there before it keeps; `asked` gets what it read.
    """

    def answer(command: list[str]) -> tuple[int, str, str]:
        out, wanted = Path(command[command.index("-o") + 1]), Path(command[3]).read_text().splitlines()
        bounds = Path(command[command.index("--constraint") + 1]).read_text().splitlines()
        here = dict(line.split("==") for line in out.read_text().splitlines()) if out.exists() else {}
        python = command[command.index("--python-version") + 1]
        if asked is not None:
            asked.append(Asked(wanted=wanted, bounds=bounds, known=here, python=python))
        pins = dict(bound.split("==") for bound in bounds if "==" in bound)
        pairs = {
            name: pins.get(name, here.get(name, "2.0"))
            for name in (want.split("==")[0].split("[")[0] for want in wanted)
        }
        if any("ember==" in want or "quartz[" in want for want in wanted):
            runtime = "nvidia-cuda-runtime-cu12"
            cuda = cuda_version or ("12.10.7" if any("toolkit" in want for want in wanted) else "12.9.7")
            pairs[runtime] = pins.get(runtime, here.get(runtime, cuda))
        if out.name == "pylock.toml":
            out.write_text("lock-version = '1.0'\n" + "".join(package(*pair) for pair in pairs.items()))
        else:
            out.write_text("".join(f"{name}=={version}\n" for name, version in pairs.items()))
        return told[0], "", told[1]

    def package(name: str, version: str) -> str:
        tag = f"py3-none-{LINUX}" if name.startswith("nvidia") else "py3-none-any"
        path = wheels / f"{name.replace('-', '_')}-{version}-{tag}.whl"
        path.write_bytes(name.encode())
        sha256 = hashlib.sha256(name.encode()).hexdigest()
        return (
            f"[[packages]]\nname = '{name}'\nversion = '{version}'\n"
            f"wheels = [{{ url = '{path.as_uri()}', hashes = {{ sha256 = '{sha256}' }} }}]\n"
        )

    return answer


def resolver(
    project: Project,
    monkeypatch: pytest.MonkeyPatch,
    answer: Answer,
    url: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Resolver, Programs]:
    programs = Programs(answer)
    monkeypatch.setattr("subprocess.run", programs)
    return Resolver(project, Host(index=IndexSettings(url=url)), environ={}, say=say), programs


def test_a_group_is_resolved_together_then_by_cell(
    tiny: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, programs = resolver(tiny, monkeypatch, uv(tmp_path))
    group = tiny.groups[GROUP]
    locks = made.resolve(group, tiny.together[GROUP], {})
    assert [one.cell for one in locks] == [cell.id for cell in group]
    for one, cell in zip(locks, group, strict=True):
        assert one.inputs == lock.inputs(tiny.matrix, cell, tiny.together[GROUP])
        assert list(one.wheels) == sorted(one.wheels, key=lambda wheel: (wheel.component, wheel.name))
    plain, jupyter, board = ({wheel.name: wheel for wheel in one.wheels} for one in locks)
    assert set(jupyter) - set(plain) == {"board", "notebook"}
    assert all(jupyter[name] == wheel for name, wheel in {**plain, **board}.items())
    runtime = plain["nvidia-cuda-runtime-cu12"]
    assert (runtime.component, runtime.size) == ("cuda", len("nvidia-cuda-runtime-cu12"))
    assert plain["emberkit"].component == "ember"
    # The group once, then each prefix of components that is not known yet.
    assert len(programs.calls) == 1 + len({"python", "python ember", "… board", "… board jupyter"})
    assert all("--only-binary" in call and ":all:" in call for call in programs.calls)
    assert programs.calls[0][programs.calls[0].index("--python-platform") + 1] == "x86_64-manylinux_2_36"
    assert not any(str(tmp_path) in lock.dump(one) for one in locks)


PAIR = ("em-1.10-cu129-py311", "qz-0.5-cu129-py311")  # of one CUDA and Python


def test_frameworks_of_one_cuda_and_python_are_resolved_once_and_get_the_same_cuda(
    tiny: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Asked] = []
    told: list[str] = []
    made, _ = resolver(tiny, monkeypatch, uv(tmp_path, asked=asked), say=told.append)
    locks = [one for group in PAIR for one in made.resolve(tiny.groups[group], tiny.together[group], {})]
    joint = [one for one in asked if not any("==" in bound for bound in one.bounds)]
    assert [one.wanted for one in joint] == [lock.joint_requirements(tiny.matrix, tiny.together[PAIR[0]])]
    assert {wheel for one in locks for wheel in one.of_component("cuda")} == set(locks[0].of_component("cuda"))
    assert len(locks) == 6
    # Each cell has what it asks for itself, not what it was resolved with.
    assert not [wheel for one in locks for wheel in one.wheels if wheel.name.startswith("ember") and "qz" in one.cell]
    assert [line for line in told if "together" in line] == [f"{', '.join(PAIR)}: resolving 7 requirements together"]


def test_pins_of_the_toolkit_bound_what_comes_and_are_not_installed(
    tiny: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Asked] = []
    made, _ = resolver(tiny, monkeypatch, uv(tmp_path, asked=asked))
    locks = made.resolve(tiny.groups[GROUP], tiny.together[GROUP], {})
    assert "cuda-toolkit[all]==12.10.1" in asked[0].wanted
    assert all("cuda-toolkit==2.0" in one.bounds for one in asked[1:])
    assert not any("cuda-toolkit" in want for one in asked[1:] for want in one.wanted)
    assert not [wheel for one in locks for wheel in one.wheels if wheel.name == "cuda-toolkit"]


def test_constraints_hold_and_known_versions_are_kept(
    edit: Callable[[str, str], Project], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    edit("{release: 0.5.3", "{constraints: [sums<3], release: 0.5.3")
    project = edit("release: 1.10.0\n", "release: 1.10.0\n        constraints: [tools<82]\n")
    asked: list[Asked] = []
    made, _ = resolver(project, monkeypatch, uv(tmp_path, asked=asked))
    locks = made.resolve(project.groups[PAIR[0]], project.together[PAIR[0]], {"notebook": "1.5", "gone": "1"})
    first, *rest = asked
    assert (first.bounds, first.known) == (["sums<3", "tools<82"], {"notebook": "1.5", "gone": "1"})
    assert rest
    assert all("notebook==1.5" in one.bounds for one in rest), "pins of the joint resolution"
    assert {wheel.version for one in locks for wheel in one.wheels if wheel.name == "notebook"} == {"1.5"}


def unfit(answer: Answer, *, alone: tuple[str, ...] = ()) -> Answer:
    """Of the two frameworks not both fit into one environment, and those in `alone` not even there."""

    def refuse(command: list[str]) -> tuple[int, str, str]:
        found = answer(command)
        wanted = Path(command[3]).read_text()
        both = "ember==" in wanted and "quartz[" in wanted
        return (1, "", NO_SOLUTION) if both or any(name in wanted for name in alone) else found

    return refuse


def test_a_group_that_does_not_fit_to_the_others_is_resolved_alone(
    tiny: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Asked] = []
    told: list[str] = []
    made, _ = resolver(tiny, monkeypatch, unfit(uv(tmp_path, asked=asked)), say=told.append)
    known = {"notebook": "1.5"}
    locks = {group: made.resolve(tiny.groups[group], tiny.together[group], known) for group in PAIR}
    # It is tried once, and told for each.
    free = [one.wanted for one in asked if not any("==" in bound for bound in one.bounds)]
    assert free == [
        lock.joint_requirements(tiny.matrix, cells)
        for cells in (tiny.together[PAIR[0]], tiny.groups[PAIR[0]], tiny.groups[PAIR[1]])
    ]
    told = [line for line in told if "alone" in line]
    for group, other, line in zip(PAIR, reversed(PAIR), told, strict=True):
        assert line.startswith(f"{group}: resolved alone, for it does not fit to {other}: No solution found")
        assert "\n  Because you require" in line
    for group, found in locks.items():
        assert [one.inputs for one in found] == [
            lock.inputs(tiny.matrix, cell, tiny.together[group]) for cell in tiny.groups[group]
        ], "the lock belongs to the matrix all the same"
        assert {wheel.version for one in found for wheel in one.wheels if wheel.name == "notebook"} == {"1.5"}


def test_a_group_that_does_not_resolve_even_alone(
    tiny: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, _ = resolver(tiny, monkeypatch, unfit(uv(tmp_path), alone=("quartz",)))
    assert made.resolve(tiny.groups[PAIR[0]], tiny.together[PAIR[0]], {})
    with pytest.raises(LockError, match=f"^{PAIR[1]}: cannot be resolved to wheels\n  No solution found"):
        made.resolve(tiny.groups[PAIR[1]], tiny.together[PAIR[1]], {})


def test_a_group_with_no_others_is_asked_for_once(
    tiny: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[str] = []
    made, programs = resolver(tiny, monkeypatch, uv(tmp_path, told=(1, NO_SOLUTION)), say=told.append)
    with pytest.raises(LockError):
        made.resolve(tiny.groups[GROUP], tiny.together[GROUP], {})
    assert len(programs.calls) == 1
    assert not [line for line in told if "alone" in line]


def test_the_same_requirements_on_another_python_are_resolved_anew(
    edit: Callable[[str, str], Project], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    project = edit("qz-0.5-cu1210-py39-board,", "qz-0.5-cu1210-py311-board,")
    old, new = "em-1.10-cu1210-py39", GROUP
    project = edit(
        "include:\n", 'include:\n  - {cell: qz-0.5-cu1210-py39-board, reason: "made up: the same on both"}\n'
    )
    asked: list[Asked] = []
    made, _ = resolver(project, monkeypatch, uv(tmp_path, asked=asked))
    for group in (old, new):
        made.resolve(project.groups[group], project.together[group], {})
    first, second = (one for one in asked if not any("==" in bound for bound in one.bounds))
    assert (first.wanted, first.python, second.python) == (second.wanted, "3.9", "3.11")


def test_on_the_cpu(on_cpu: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Asked] = []
    made, _ = resolver(on_cpu, monkeypatch, uv(tmp_path, asked=asked))
    group = "qz-0.5-cpu-py311"
    locks = made.resolve(on_cpu.groups[group], on_cpu.together[group], {})
    assert asked[0].wanted == ["board", "notebook", "pip", "quartz==0.5.3"]
    assert {wheel.component for one in locks for wheel in one.wheels} == {"python", "quartz", "board", "jupyter"}


def test_a_build_for_the_cpu_that_brings_cuda(
    edit: Callable[[str, str], Project], on_cpu: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert on_cpu.cells
    project = edit('package_on: {"12": "quartz[cuda]"}', 'package_on: {cpu: "quartz[cuda]"}')
    made, _ = resolver(project, monkeypatch, uv(tmp_path))
    group = "qz-0.5-cpu-py311"
    with pytest.raises(LockError, match=rf"^{group}: quartz 0.5.3 brings CUDA wheels on this index \(nvidia-cuda-runt"):
        made.resolve(project.groups[group], project.together[group], {})


def test_why_a_cell_does_not_work(tiny: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The matrix need not have the cell; it is asked for by itself, and no lock is made."""
    cell = Cell(framework="ember", short="em", line="1.9", release="1.9.2", cuda="12.9", python="3.11", variant="plain")
    assert cell not in tiny.cells
    asked: list[Asked] = []
    made, _ = resolver(tiny, monkeypatch, uv(tmp_path, asked=asked))
    assert made.reason(cell) == ""
    assert (asked[0].wanted, asked[0].python) == (["ember==1.9.2", "emberkit", "pip"], "3.11")
    made, _ = resolver(tiny, monkeypatch, uv(tmp_path, cuda_version="12.8.9"))
    assert "brings CUDA 12.8.9 (nvidia-cuda-runtime-cu12), not 12.9" in made.reason(cell), "lock would refuse it"
    made, _ = resolver(tiny, monkeypatch, uv(tmp_path, told=(1, NO_SOLUTION)))
    assert made.reason(cell).startswith(f"{cell.id}: cannot be resolved to wheels\n  No solution found")


def test_a_cell_that_resolves_and_does_not_work_all_the_same(
    edit: Callable[[str, str], Project], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    project = edit("packages: [board]", "packages: [tensorboard==2.9.1]")
    answer = uv(tmp_path)

    def pinned(command: list[str]) -> tuple[int, str, str]:
        found = answer(command)
        out = Path(command[command.index("-o") + 1])
        out.write_text(out.read_text().replace("tensorboard==2.0", "tensorboard==2.9.1"))
        return found

    made, _ = resolver(project, monkeypatch, pinned)
    [cell] = project.select(["qz-0.5-cu129-py311-board"])
    assert "tensorboard 2.9.1 takes setuptools<82: it imports pkg_resources" in made.reason(cell)


def test_an_index_that_does_not_answer_says_nothing_of_a_cell(
    tiny: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither that it does not work, nor that it does not fit to others."""
    down = uv(tmp_path, told=(2, "error: Failed to fetch: `https://index.example.test/simple/ember/`"))
    said: list[str] = []
    made, _ = resolver(tiny, monkeypatch, down, say=said.append)
    with pytest.raises(FetchError, match="Failed to fetch"):
        made.reason(tiny.cells[0])
    with pytest.raises(UnreachableError):
        made.resolve(tiny.groups[GROUP], tiny.together[GROUP], {})
    assert not [line for line in said if "resolved alone" in line]


def test_another_cuda_than_the_tag_says(tiny: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made, _ = resolver(tiny, monkeypatch, uv(tmp_path, cuda_version="12.9.7"))
    with pytest.raises(LockError, match=r"brings CUDA 12.9.7"):
        made.resolve(tiny.groups[GROUP], tiny.together[GROUP], {})


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ((0, 'warning: `ember==1.10.0` is yanked (reason: "broken")\n'), 'ember==1.10.0` is yanked (reason: "broken")'),
        ((0, "warning: `ember==1.10.0` is yanked\n"), "is yanked"),
        ((2, NO_SOLUTION), "cannot be resolved to wheels\n  No solution found"),
    ],
)
def test_what_uv_says(
    tiny: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: tuple[int, str], says: str
) -> None:
    made, _ = resolver(tiny, monkeypatch, uv(tmp_path, told=told))
    with pytest.raises(LockError) as caught:
        made.resolve(tiny.groups[GROUP], tiny.together[GROUP], {})
    assert str(caught.value).startswith(f"{GROUP}: ")
    assert says in str(caught.value)
    assert caught.value.hint


def test_the_mirror_is_not_named(tiny: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = "error: Failed to fetch: `https://me:pw@mirror.example.test/simple/x/`"
    made, _ = resolver(tiny, monkeypatch, uv(tmp_path, told=(2, told)), url="https://me:pw@mirror.example.test/simple")
    with pytest.raises(LockError) as caught:
        made.resolve(tiny.groups[GROUP], tiny.together[GROUP], {})
    assert "Failed to fetch: `https://<mirror>/simple/x/`" in str(caught.value)
    assert "pw" not in str(caught.value)


def test_an_index_that_stalls(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def stall(command: list[str]) -> tuple[int, str, str]:
        raise subprocess.TimeoutExpired(command, resolve.TIMEOUT_S)

    made, _ = resolver(tiny, monkeypatch, stall)
    with pytest.raises(LockError, match=rf"^{GROUP}: the package index gave no answer in {resolve.TIMEOUT_S} s"):
        made.resolve(tiny.groups[GROUP], tiny.together[GROUP], {})


def test_a_file_that_the_index_lists_but_does_not_have(
    tiny: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer = uv(tmp_path)

    def lose(command: list[str]) -> tuple[int, str, str]:
        result = answer(command)
        for path in tmp_path.glob("emberkit-*"):
            path.unlink()
        return result

    made, _ = resolver(tiny, monkeypatch, lose)
    with pytest.raises(LockError, match=rf"^{GROUP}: the index does not serve emberkit-2.0-py3-none-any.whl"):
        made.resolve(tiny.groups[GROUP], tiny.together[GROUP], {})
