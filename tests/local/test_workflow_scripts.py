"""The scripts that workflows run, with git and a shell, and stand-ins for `gh` and `builder`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT

GH = """\
case "$1 $2" in
    "pr list") cat "$OPEN" ;;
    "pr create" | "pr edit") echo "$*" >>"$CALLS" ;;
esac
"""
BUILDER = 'echo "$*"; exit 3\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone of a repository, with a stand-in for `builder`, which fails."""
    for path, text in (("bin/gh", GH), ("checkout/.venv/bin/builder", BUILDER)):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(f"#!/bin/sh\n{text}", encoding="utf-8")
        (tmp_path / path).chmod(0o755)
    folder = tmp_path / "checkout"
    run(folder, "git", "init", "-q", "--bare", "../origin.git")
    run(folder, "git", "init", "-q")
    run(folder, "git", "remote", "add", "origin", "../origin.git")
    (folder / ".gitignore").write_text("/.venv/\n", encoding="utf-8")
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.test")
    run(folder, "git", "add", "--all")
    run(folder, "git", *identity, "commit", "-q", "-m", "first")
    return folder


def run(checkout: Path, *command: str) -> int:
    folder = checkout.parent
    names = {"OPEN": "open", "CALLS": "calls", "GITHUB_STEP_SUMMARY": "summary"}
    environ = {
        "PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": str(folder),
        **{name: str(folder / path) for name, path in names.items()},
    }  # fmt: skip
    return subprocess.run(command, cwd=checkout, env=environ, capture_output=True, timeout=60, check=False).returncode


@pytest.mark.parametrize(
    ("open_ones", "call"),
    [("", "pr create --head updates/debian-bookworm"), ("true 7\n", "pr create"), ("true 7\nfalse 9\n", "pr edit 9")],
)
def test_an_update_is_a_pull_request_but_never_one_of_a_fork(checkout: Path, open_ones: str, call: str) -> None:
    """One with the name of the branch kept the pull request of the update from being opened."""
    folder = checkout.parent
    (folder / "open").write_text(open_ones, encoding="utf-8")
    (folder / "changes").write_text("bookworm: resolving 9 packages\nbookworm: tini 1 -> 2\n", encoding="utf-8")
    (checkout / "lock").write_text("new\n", encoding="utf-8")
    script = str(ROOT / ".github/pull-request.sh")
    assert run(checkout, "sh", script, "debian-bookworm", "Lock Debian", str(folder / "changes")) == 0
    [line] = (folder / "calls").read_text(encoding="utf-8").splitlines()
    assert line.startswith(call)
    body = "Result of the update:\n\n```\nbookworm: tini 1 -> 2\n```\n"
    body += "\nWork on a branch of your own: each update overwrites updates/debian-bookworm.\n"
    assert (folder / "summary").read_text(encoding="utf-8") == body
    assert line.endswith(f"--body-file {folder}/changes.md")
    assert (folder / "changes.md").read_text(encoding="utf-8") == body
    assert run(folder / "origin.git", "git", "cat-file", "-e", "updates/debian-bookworm:lock") == 0


@pytest.mark.parametrize(("text", "is_opened"), [("Nothing to do\n", False), ("To do: 1\n", True)])
def test_a_pull_request_without_changes_is_opened_only_if_there_is_something_to_do(
    checkout: Path, text: str, is_opened: bool
) -> None:
    """An engine is newer, or support ends: a person must decide. The summary has the text in any case."""
    folder = checkout.parent
    (folder / "changes").write_text(text, encoding="utf-8")
    (folder / "open").touch()
    script = str(ROOT / ".github/pull-request.sh")
    assert run(checkout, "sh", script, "upstream", "Newer", str(folder / "changes")) == 0
    assert text in (folder / "summary").read_text(encoding="utf-8")
    assert (folder / "calls").exists() == is_opened
    assert (run(folder / "origin.git", "git", "cat-file", "-e", "updates/upstream") == 0) == is_opened


def test_a_summary_has_the_output_of_a_command_that_fails(checkout: Path) -> None:
    assert run(checkout, "sh", str(ROOT / ".github/summary.sh"), "status", "--here") == 3
    assert (checkout.parent / "summary").read_text(encoding="utf-8") == "```\nstatus --here\n```\n"
