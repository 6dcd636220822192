"""Every command and every edit of the README is run in a fresh clone, or stands in .ci/run, or names a real image."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(sh|diff)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 300
HARMLESS = (
    "make lock render",
    "git diff",
    *(f".venv/bin/builder {word}" for word in ("doctor", "plan", "explain", "diff", "--help")),
)


@dataclass(frozen=True)
class Section:
    """A heading of the README with its code blocks, in order."""

    title: str
    blocks: tuple[tuple[str, str], ...]


def sections() -> Iterator[Section]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for part in re.split(r"^(?=##+ )", text, flags=re.MULTILINE):
        blocks = tuple((kind, body) for kind, body in BLOCK.findall(part))
        if blocks:
            yield Section(part.splitlines()[0].lstrip("# "), blocks)


def commands(body: str) -> list[str]:
    return [line.split("   #")[0].split("    #")[0].strip() for line in body.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This working tree, as a clone with its own environment."""
    target = tmp_path_factory.mktemp("readme") / "clone"
    files = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT).split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())
            (target / name).chmod((ROOT / name).stat().st_mode)
    run(["git", "init", "-q"], target)
    run(["git", "add", "-A"], target)
    run(["git", "-c", "user.name=t", "-c", "user.email=t@example.test", "commit", "-qm", "as it is"], target)
    return target


def run(command: list[str], cwd: Path) -> str:
    """What it prints. A make that is run here must not take this test for a part of the make that runs the tests."""
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(
        command, cwd=cwd, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
        capture_output=True, env={**outside, "COLUMNS": "200", "GPU_IMAGES_STORE": f"{cwd}/.builder/store"},
    )  # fmt: skip
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def apply(diff: str, clone: Path) -> None:
    """Replaces the lines with `-`, which must stand in matrix.yaml as they are, by those with `+`."""
    old = "".join(line[1:].strip() + "\n" for line in diff.splitlines() if line.startswith("-"))
    new = [line[1:].strip() for line in diff.splitlines() if line.startswith("+")]
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
    elif words[:2] in (["make", "rebase"], ["make", "push"]):
        # For real in test_same_bytes.py and test_publish.py: here it would be with this machine's own images.
        recipe = run(["make", "--dry-run", *words[1:]], clone).splitlines()
        assert f".venv/bin/builder {words[1]}" in [line.strip() for line in recipe]
        run([".venv/bin/builder", words[1], "--help"], clone)
    elif words[0] == "builder":
        run([".venv/bin/builder", words[1], "--help"], clone)
    elif words[:2] == ["docker", "run"]:
        image = next(word for word in words if word.startswith("org/"))
        tags = run([".venv/bin/builder", "plan", "all"], ROOT)
        assert re.search(rf"{re.escape(image)}\s*$", tags, re.MULTILINE), f"no image is called {image}"
    elif words[:2] == ["docker", "build"]:
        assert (ROOT / words[words.index("-f") + 1]).is_file()  # built for real in test_plain_build.py
    else:
        assert command.startswith(HARMLESS), f"say here how to try `{command}` without changing this machine's images"
        run(["sh", "-c", command], clone)


@pytest.mark.parametrize("section", list(sections()), ids=lambda section: section.title)
def test_what_the_readme_says_works(section: Section, clone: Path) -> None:
    run(["make", ".venv/.ready"], clone)
    run(["git", "checkout", "-q", "."], clone)
    run(["git", "clean", "-qfd"], clone)
    for kind, body in section.blocks:
        if kind == "diff":
            apply(body, clone)
            continue
        for command in commands(body):
            check(command, clone)
    if any(kind == "diff" for kind, _ in section.blocks):
        assert "images/" in run(["git", "status", "--porcelain"], clone)


def test_the_readme_has_the_sections_that_are_promised() -> None:
    titles = {section.title for section in sections()}
    assert {"Make the images", "A framework version", "A Python", "A variant", "A package"} <= titles
