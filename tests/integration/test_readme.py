"""Every command and edit of the documents works: in a fresh clone, or in .ci/run, or it names a real image."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from packaging.version import Version

from builder.compat import gpu_support
from builder.compat.gpu_support import Device
from builder.matrix import facts, support, tags
from builder.matrix.project import Project
from builder.matrix.schema import AMD64, ARM64, CPU, Arch
from builder.plan import plan
from tests import pictures
from tests.integration import clones, programs
from tests.integration.clones import run
from tests.paths import ROOT

PROJECT = Project(ROOT)
# Some files belong to another example, copy a whole release or test any image, and name no image.
PARTS = (
    "README.md",
    "copy-oras.sh",
    "copy-skopeo.sh",
    "gpu-tests-job.sh",
    "gpu-tests.yaml",
    "kustomization.yaml",
    "onnx_server.py",
    "train_parameter_server.py",
)
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.name not in PARTS)
REGISTRY = "registry.example.com/org/"  # in the examples
STAMP = "-20261122"
BLOCK = re.compile(r"^```(sh|diff)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# CI runs them, or their parts.
NOT_RUN = (
    "make check",
    "make ci",
    "make test",
    "make demo",
    "make browser",
    "make arm64",
    "make packages",
    ".builder/tools/bin/uv pip compile",
)
DOCUMENTS = (
    "README.md",
    "docs/matrix.md",
    "docs/publish.md",
    "docs/pipeline.md",
    "docs/verify.md",
    "CONTRIBUTING.md",
)
RECIPES = {
    "refresh": ["refresh"],
    "stage": ["stage"],
    "test-staged": ["test"],
    "release": ["release"],
}  # the builder commands of a target
HARMLESS = (
    "make lock render",
    "git diff",
    "builder doctor",
    "builder plan",
    "builder explain",
    "builder --help",
    "make status",
)


@dataclass(frozen=True)
class Section:
    """A heading of the README with its code blocks, in order."""

    title: str
    blocks: tuple[tuple[str, str], ...]


def sections() -> Iterator[Section]:
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        for part in re.split(r"^(?=##+ )", text, flags=re.MULTILINE):
            if blocks := tuple((kind, body) for kind, body in BLOCK.findall(part)):
                yield Section(f"{document}: {part.splitlines()[0].lstrip('# ')}", blocks)


def commands(body: str) -> list[str]:
    lines = body.replace("\\\n", " ").splitlines()
    return [line.split("   #")[0].split("    #")[0].strip() for line in lines if line.strip()]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clones.make(tmp_path_factory.mktemp("readme") / "clone")


@cache
def show(*command: str, cwd: Path) -> str:
    """The output of a command that several documents name and that no edit changes, run once."""
    return run([*command], cwd)


def apply(diff: str, clone: Path) -> None:
    """Replaces one line of matrix.yaml, with `-` or as context, by the lines of the diff without that with `-`."""
    (old,) = [line[1:].strip() + "\n" for line in diff.splitlines() if line[0] in "- "]
    new = [line[1:].strip() for line in diff.splitlines() if line[0] in "+ "]
    assert new != [old.strip()], "the edit changes nothing"
    matrix = clone / "matrix.yaml"
    lines = matrix.read_text(encoding="utf-8").splitlines(keepends=True)
    places = [number for number, line in enumerate(lines) if line.strip() + "\n" == old]
    assert len(places) == 1, f"matrix.yaml has {len(places)} lines like: {old}"
    indent = lines[places[0]][: len(lines[places[0]]) - len(lines[places[0]].lstrip())]
    lines[places[0]] = "".join(f"{indent}{line}\n" for line in new)
    matrix.write_text("".join(lines), encoding="utf-8")


def check(command: str, clone: Path) -> None:
    """Runs a command of the README, or makes sure in a cheaper way that it would work."""
    words = shlex.split(command)
    ci = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    if command in ci:
        return  # CI runs it as it stands
    if words[:2] == ["make", "images"]:
        cells = [word.removeprefix("CELLS=") for word in words[2:]]
        listed = run([".venv/bin/builder", "plan", "--format", "json", *cells], clone)
        assert '"not_locked": []' in listed
        assert '"id"' in listed
        run([".venv/bin/builder", "render", "--check"], clone)
    elif words[0] == "make" and words[1] in RECIPES:
        # For real in test_images.py, test_publish.py and releases/:
        # here it would be with this machine's own images.
        recipe = run(["make", "--dry-run", *words[1:]], clone).splitlines()
        commands = [line.split()[:2] for line in recipe if line.startswith(".venv/bin/builder ")]
        assert commands == [[".venv/bin/builder", name] for name in RECIPES[words[1]]]
        for _, name in commands:
            show(".venv/bin/builder", name, "--help", cwd=clone)
    elif words[:2] in (["docker", "run"], ["builder", "add"]):
        # Images and additions are tested for real in tests/images and test_add.py.
        image = next(word for word in words if word.startswith("org/"))
        tags = show(".venv/bin/builder", "plan", "all", cwd=ROOT)
        assert re.search(rf"{re.escape(image)}\s*$", tags, re.MULTILINE), f"no image is called {image}"
    elif words[:2] == ["docker", "build"]:
        assert (ROOT / words[words.index("-f") + 1]).is_file()  # built for real in test_dockerfile.py
    elif command.startswith(HARMLESS):
        refused = (
            "|| test $? = 16" if command.startswith("builder explain") else ""
        )  # 16: it does not work, as explained
        run(["sh", "-c", f'PATH="$PWD/.venv/bin:$PATH"; {command} {refused}'], clone)
    elif words[0] in ("mkdir", "cosign", "cp"):
        programs.install_from("trixie", "cosign")
        run([*words[:2], "--help"] if words[1].startswith("verify") else words, clone)  # verified for real in releases/
    elif words[0] == "builder":
        show(".venv/bin/builder", words[1], "--help", cwd=clone)
    else:
        assert command.startswith(NOT_RUN), f"say here how to try `{command}` without changing this machine's images"


# A section that repeats the blocks of another one is not run again.
ONCE = list({section.blocks: section for section in reversed(list(sections()))}.values())[::-1]
# They resolve packages of the real index for minutes: nightly/test_matrix_guide.py.
AT_NIGHT = [section for section in ONCE if section.title.startswith("docs/matrix.md")]


@pytest.mark.parametrize(
    "section", [section for section in ONCE if section not in AT_NIGHT], ids=lambda section: section.title
)
def test_what_the_readme_says_works(section: Section, clone: Path) -> None:
    follow(section, clone)


def follow(section: Section, clone: Path) -> None:
    clones.reset(clone)
    for kind, body in section.blocks:
        if kind == "diff":
            apply(body, clone)
            continue
        for command in commands(body):
            check(command, clone)
    if any(kind == "diff" for kind, _ in section.blocks):
        assert "images/" in run(["git", "status", "--porcelain"], clone)


def test_the_parts_of_a_change_are_outputs_of_a_step(clone: Path) -> None:
    """What the workflow `ci` builds."""
    clones.reset(clone)
    parts = [".venv/bin/builder", "plan", "all", "--changed-since", "HEAD", "--format", "github"]
    assert run(parts, clone) == 'parts={"include": []}\ncells=\n'
    (clone / "templates/jupyter/files/etc/changed").write_text("changed")
    first, second = run(parts, clone).splitlines()
    cells = second.removeprefix("cells=").split()
    assert cells
    assert all(cell.endswith(("-jupyter", "-full")) for cell in cells)
    entries = json.loads(first.removeprefix("parts="))["include"]
    assert sorted(cell for entry in entries for cell in entry["cells"].split()) == sorted(cells)
    (clone / "templates/jupyter/files/etc/changed").unlink()


def test_the_documents_have_the_sections_that_are_promised() -> None:
    titles = {section.title for section in sections()}
    assert {"README.md: Make the images", "README.md: Use an image", "README.md: Add your packages"} <= titles
    added = ("framework version", "Python version", "variant", "package")
    assert {f"docs/matrix.md: A {what}" for what in added} <= titles


# ---- the documents and CI are for this matrix.yaml: a copy with another one sees it here, not in the unit tests


def test_the_readme_lists_the_images() -> None:
    """With their CUDA versions and Pythons, the default first."""
    rows = re.findall(
        r"^\| `(\S+-cuda):(\S+)` \| ([^|]+) \| ([^|]+) \|", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    listed = {(image, line): (cudas.split(", "), pythons.split(", ")) for image, line, cudas, pythons in rows}
    assert listed == {
        (framework.image, line): ([cuda for cuda in version.cuda if cuda != CPU], version.python)
        for framework in PROJECT.matrix.frameworks.values()
        for line, version in framework.versions.items()
    }


def test_the_guide_has_the_images_to_begin_with_for_every_gpu() -> None:
    """The first of matrix.yaml, and those that run with older drivers, as `builder explain --gpu` says."""
    known, text = facts.load_facts(), (ROOT / "docs/which-image.md").read_text(encoding="utf-8")
    header, *rows = [
        [value.strip() for value in line.strip("|").split("|")]
        for line in text.partition("\n## ")[0].splitlines()
        if line.startswith("| ")
    ]
    listed, drivers = [], set()
    for gpu, last, *columns in rows:
        names, numbers = gpu.removesuffix(")").split(" (")
        named = [gpu_support.find_gpu(name, known) for name in names.split(", ")]
        arch = ARM64 if "ARM" in last else AMD64
        assert {device.capability for device in named} == {*numbers.split(", ")}
        for capability in numbers.split(", "):
            group = known.gpus[capability]
            devices = [device for device in named if device.capability == capability]
            assert [arch == ARM64] * len(devices) == [device.name in group.arm for device in devices]
            assert last.startswith(group.last or "any")
            for column, image in zip(columns, header[2:], strict=True):
                found, oldest = images_for(image.strip("`"), devices[0], arch)
                assert column == found, f"{gpu}: {image}"
                drivers |= oldest
        listed += [(capability, arch) for capability in numbers.split(", ")]
    assert len({*listed}) == len(listed)
    assert {number for number, arch in listed if arch == AMD64} == {
        number for number, group in known.gpus.items() if group.names
    }
    [exact] = re.findall(r"^Exactly: ([\d., ]+)\.$", text, re.MULTILINE)
    assert exact.split(", ") == sorted(drivers, key=Version)


def images_for(image: str, device: Device, arch: Arch) -> tuple[str, set[str]]:
    """The cell of the table for an image and a GPU, and the drivers in it.

    Of cells that were built and run without a known flaw, in the default CUDA version of their line if possible. Lines
    without support only if there is no other.
    """
    known, matrix = facts.load_facts(), PROJECT.matrix
    names = tags.compute(matrix, PROJECT.cells)
    chosen = [
        cell
        for cell in PROJECT.select(["*"])
        if (matrix.frameworks[cell.framework].image, cell.variant, cell.arch) == (image, "plain", arch)
        and not cell.is_cpu
        and not matrix.python[cell.python].not_built
        and cell.python == matrix.frameworks[cell.framework].versions[cell.line].python[0]
    ]
    unsupported = {*PROJECT.select(["unsupported"])}
    lines = next([*entry.versions] for entry in matrix.frameworks.values() if entry.image == image)
    found: dict[str, str] = {}  # by driver
    for cell in sorted(chosen, key=lambda cell: (cell in unsupported, lines.index(cell.line))):
        verdict = gpu_support.judge(device, "", gpu_support.needs_of_cell(matrix, cell, known), known)
        if not verdict.runs or known.caveats_of(cell.framework, cell.cuda, device.capability):
            continue
        if cell in unsupported and found:
            continue
        [driver] = re.findall(r"needs driver (\S+) or newer", "\n".join(verdict.reasons))
        if all(Version(driver) < Version(other) for other in found):
            tag = min((name.tag for name in names[cell.id]), key=len)
            ptx = " (PTX)" if any(reason.startswith("PTX") for reason in verdict.reasons) else ""
            found[driver] = f"`{tag}` from {driver.partition('.')[0]}{ptx}"
    return ", ".join(found.values()) or "none", {*found}


def test_the_guide_has_the_end_of_support_of_every_python() -> None:
    """No part has an earlier one."""
    rows = re.findall(r"^\| ([\d.]+) \| (\S[^|]+) \| (\S+) \|$", (ROOT / "docs/support.md").read_text(), re.MULTILINE)
    pythons = PROJECT.matrix.python.items()
    assert [row[:2] for row in rows] == [
        (version, "uv" if python.uv else f"Debian {python.debian}") for version, python in pythons
    ]
    assert {
        (cell.python, support.ends_of_cell(PROJECT.matrix, cell)[0].last.isoformat()) for cell in PROJECT.cells
    } == {(version, last) for version, _, last in rows}


def test_the_images_share_as_much_as_the_readme_says() -> None:
    """Of the images that were built."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    claim = re.search(r"the (\d+) images on CUDA ([\d.]+) share layers \| \*\*(\d+) GB\*\* \| (\d+) GB", text)
    assert claim
    count, cuda, unique, total = int(claim[1]), claim[2], int(claim[3]), int(claim[4])
    built = [cell for cell in PROJECT.cells if not PROJECT.matrix.python[cell.python].not_built]
    chosen = [cell for cell in built if cell.cuda == cuda]
    planned = plan.make_locked_plan(PROJECT, chosen)
    assert len(planned.images) == count
    assert [round(size / 10**9) for size in (planned.unique_bytes, planned.sum_bytes)] == [unique, total]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_image_of_an_example_is_one_of_the_matrix(path: Path) -> None:
    names = tags.compute(PROJECT.matrix, PROJECT.cells).values()
    published = {str(name).rpartition("/")[2]: references[0].tag for references in names for name in references}
    text = path.read_text(encoding="utf-8")
    images = re.findall(rf"({re.escape(REGISTRY)}|\b)((?:pt|tf|jax)-(?:cuda|cpu):[\w.-]*\w)", text)
    assert [prefix for prefix, _ in images].count(REGISTRY) == 1, "one image to edit"
    assert {name for _, name in images} <= published.keys()
    # The stamped tag in its comment is that of the same image.
    [name] = [name for prefix, name in images if prefix]
    assert re.findall(rf"[\w.-]+(?={STAMP})", text) == [published[name]]


def test_ci_builds_every_variant() -> None:
    """No set had an image with SSH and without Jupyter; such images failed their own tests."""
    [in_turn] = re.findall(r"^sets=\((.*)\)$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)
    built = {cell.variant for name in ("default", *in_turn.split()) for cell in PROJECT.select([name])}
    assert built == {cell.variant for cell in PROJECT.select(["all"])}


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 110
    assert [line for line in lines if len(line) > 100] == []


def test_the_picture_of_the_terminal_is_of_today(tmp_path: Path) -> None:
    """But for sizes and counts, which each lock changes. To draw it again: python -m tests.pictures."""
    pictures.write_repository(tmp_path)

    def without_numbers(text: str) -> str:
        return re.sub(r"\d+(\.\d+\s[kMG]B)?|\s", "", text)

    drawn = html.unescape(re.sub(r"<[^>]+>", "", pictures.TERMINAL.read_text(encoding="utf-8")))
    for command in pictures.COMMANDS:
        lines = pictures.printed(command, tmp_path)
        assert without_numbers(" ".join([f"$ {command}", *lines])) in without_numbers(drawn), command
