"""The workflows run only commands that are tested, and no job has more rights than it needs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml

from builder.cli import cli
from tests.paths import ROOT
from tools.upstream import upstream

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
# Commands that are not of this repository, and a script that tests/integration/test_workflows_run.py runs.
OTHERS = (
    "sudo rm -rf /usr/local/lib/android ",
    "sudo apt-get ",
    "printf %s $TOKEN",
    "docker login ",
    "tee ",
    "echo",
    "sh .github/pull-request.sh ",
)
OPERATORS = set("();<>|&\n")


def jobs() -> list[tuple[str, dict[str, Any]]]:
    loaded = [(path.stem, yaml.safe_load(path.read_text(encoding="utf-8"))) for path in WORKFLOWS]
    return [(f"{name}: {job}", value) for name, data in loaded for job, value in data["jobs"].items()]


def commands(script: str) -> Iterator[list[str]]:
    """The words of each command of a step, without redirections."""
    lexer = shlex.shlex(script, posix=True, punctuation_chars="".join(OPERATORS))
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " ", True, ""
    before = ""
    for is_operator, words in groupby(lexer, lambda word: set(word) <= OPERATORS):
        if is_operator:
            before = "".join(words)
        elif ">" not in before:
            yield list(words)


def test_the_commands_of_a_step() -> None:
    script = '(builder plan $CELLS && echo) |& tee -a "a b" >> "$FILE"\nmake lint; sed s,a,b,\n'
    words = [["builder", "plan", "$CELLS"], ["echo"], ["tee", "-a", "a b"], ["make", "lint"], ["sed", "s,a,b,"]]
    assert list(commands(script)) == words


@pytest.mark.parametrize(("name", "job"), jobs(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_command_exists_with_its_options(name: str, job: dict[str, Any]) -> None:
    scripts = [step["run"] for step in job["steps"] if "run" in step]
    assert scripts
    for words in (words for script in scripts for words in commands(script)):
        match words:
            case ["make", target] | ["sudo", "make", target]:
                assert target in (*TARGETS, ".venv/.ready")
            case [".venv/bin/builder", command, *arguments] | ["sh", ".github/summary.sh", command, *arguments]:
                cli.commands[command].make_context(command, arguments)  # raises for an unknown option
            case [".venv/bin/python", "-m", "tools.upstream", *arguments]:
                upstream.make_context("upstream", arguments)
            case _:
                assert " ".join(words).startswith(OTHERS)


@pytest.mark.parametrize(("name", "job"), jobs(), ids=lambda value: value if isinstance(value, str) else "")
def test_rights(name: str, job: dict[str, Any]) -> None:
    """Only jobs of the main branch can write, and a pull request has no job with a secret."""
    rights = job["permissions"]
    needs = job.get("needs", [])
    is_after_staging = "stage" in name or {"stage", "gpu"} & set([needs] if isinstance(needs, str) else needs)
    if "write" in rights.values():
        assert is_after_staging or name.startswith("updates: ")
    if name == "ci: staged-images":
        assert "github.event_name != 'pull_request' && vars.PUBLISH == 'true'" in job["if"]
    if "self-hosted" in job["runs-on"]:
        assert "stage" in job["needs"], "it tests what is staged, and nothing of a pull request is"
        assert "concurrency" not in job, "jobs wait for the runner; a group would cancel those that wait"
    if rights.get("packages") == "write":
        assert name == "ci: staged-images" or job["needs"]
    assert "timeout-minutes" in job


def test_continuous_integration_is_one_target_here_and_there() -> None:
    """A check that only one of them ran would be missed by the other."""
    assert "make ci" in (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    assert [step["run"] for step in dict(jobs())["ci: test"]["steps"] if "run" in step] == ["sudo make ci"]
    assert re.search(r"^ci: test demo ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_no_rights_and_no_expression_in_a_command(path: Path) -> None:
    """Rights belong to jobs; an expression in a command would let the name of a branch run code."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert data["permissions"] == {}
    commands = [step["run"] for job in data["jobs"].values() for step in job["steps"] if "run" in step]
    assert not [command for command in commands if "${{" in command]


def test_a_release_has_its_own_job_and_environment() -> None:
    release = dict(jobs())["ci: release"]
    assert (release["environment"], release["needs"]) == ("release", ["stage", "gpu"])
    assert release["concurrency"]["cancel-in-progress"] is False
    assert not [step for step in release["steps"] if "images" in step.get("run", "")], "no code of an image runs there"


def test_only_pull_requests_cancel_each_other() -> None:
    for path in WORKFLOWS:
        concurrency = yaml.safe_load(path.read_text(encoding="utf-8"))["concurrency"]
        if concurrency["cancel-in-progress"]:
            assert concurrency["group"] == "ci-${{ github.event.pull_request.number || github.run_id }}"
