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
from packaging.version import Version

from builder.cli import cli
from tests.integration.nightly.actions import applies, evaluate, expand
from tests.integration.test_readme import DOCUMENTS
from tests.packages.run import packages
from tests.paths import ROOT
from tools.upstream import upstream

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
# Commands that are not of this repository, and a script that tests/integration/nightly/test_workflows_run.py runs.
OTHERS = (
    "sudo rm -rf /usr/local/lib/android ",
    "sudo apt-get ",
    "python3 -m tools.pins",
    "printf %s $TOKEN",
    "docker login ",
    "tee ",
    "echo",
    "sh .github/pull-request.sh ",
    "git diff --quiet ",
    "set -f",
    "tar --create --file artifact.tar --directory site .",
    "mkdir -p .builder",
    "mv received/evidence .builder/evidence",
    "exit 1",
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
    scripts = [(step["run"], step.get("env", {})) for step in job["steps"] if "run" in step]
    assert scripts or name == "ci: pages"
    for environ, words in ((environ, words) for script, environ in scripts for words in commands(script)):
        options = re.findall(r"'(--[a-z-]+)'", environ.get("ALLOW", ""))  # of which an expression chooses some
        assert bool(options) == ("$ALLOW" in words)
        values = {"$ALLOW": options, "$TEAM": [__file__]}  # of a file that exists
        match [each for word in words for each in values.get(word, [word])]:
            case ["make", target] | ["sudo", "make", target]:
                assert target in (*TARGETS, ".venv/.ready")
            case [".venv/bin/builder", command, *arguments] | ["sh", ".github/summary.sh", command, *arguments]:
                cli.commands[command].make_context(command, arguments)  # raises for an unknown option
            case [".venv/bin/python", "-m", "tools.upstream", *arguments]:
                upstream.make_context("upstream", arguments)
            case [".venv/bin/python", "-m", "tests.packages.run", *arguments]:
                packages.make_context("packages", arguments)
            case _:
                assert " ".join(words).startswith(OTHERS)


@pytest.mark.parametrize(("name", "job"), jobs(), ids=lambda value: value if isinstance(value, str) else "")
def test_rights(name: str, job: dict[str, Any]) -> None:
    """A job that runs code of an image can neither write nor sign; a pull request has no job that can."""
    rights = job["permissions"]
    words = [words for step in job["steps"] for words in commands(step.get("run", ""))]
    runs_images = any(command in each for each in words for command in ("images", "build", "test", "refresh", "ci"))
    if runs_images or "self-hosted" in job["runs-on"]:
        assert "write" not in rights.values()
        assert "GPU_IMAGES_SIGN" not in str(job)
    if "write" in rights.values():
        assert name.startswith("updates: ") or name in (
            "ci: push", "ci: stage", "ci: gpu-results", "ci: release", "ci: pages", "images: push", "images: release",
            "images: team",
        )  # fmt: skip
    if rights.get("id-token") == "write":
        assert rights.get("contents", "read") == "read"
    assert "secrets." not in str(job) or name == "updates: lock"
    assert "timeout-minutes" in job


def test_nothing_is_pushed_or_signed_for_a_pull_request() -> None:
    """Every job with rights comes after `push`, which needs the output `publish` of the plan.

    A job without a function such as cancelled() in its condition does not run after one that failed or was skipped.
    """
    ci = {name.removeprefix("ci: "): job for name, job in jobs() if name.startswith("ci: ")}
    publish = "github.ref == 'refs/heads/main' && vars.PUBLISH == 'true' && inputs.what != 'build'"
    assert ci["plan"]["env"] == {"PUBLISH": f"${{{{ {publish} }}}}"}
    assert ci["plan"]["outputs"]["publish"] == "${{ env.PUBLISH }}"
    assert "needs.plan.outputs.publish == 'true' && " in ci["push"]["if"]
    previous = {"stage": "push", "gpu": "stage", "gpu-results": "gpu", "release": "stage"}
    for name, before in previous.items():
        assert before in ci[name]["needs"]
        condition = ci[name].get("if", "")
        conditions = (f"needs.{before}.result != 'skipped'", f"needs.{before}.result == 'success'")
        assert "cancelled()" not in condition or any(each in condition for each in conditions)


def test_a_called_workflow_publishes_only_from_the_main_branch_and_only_if_its_caller_says_so() -> None:
    called = dict(jobs())
    publish = called["images: plan"]["env"]["PUBLISH"].removeprefix("${{").removesuffix("}}")
    for ref, event, is_wanted, is_published in (
        ("refs/heads/main", "push", True, True),
        ("refs/heads/main", "push", False, False),
        ("refs/heads/topic", "push", True, False),
        ("refs/heads/main", "pull_request", True, False),
    ):
        context = {"github": {"ref": ref, "event_name": event}, "inputs": {"publish": is_wanted}}
        assert bool(evaluate(publish, context)) == is_published
    assert "needs.plan.outputs.publish == 'true' && " in called["images: push"]["if"]
    assert "push" in called["images: release"]["needs"]
    assert "if" not in called["images: release"]
    [release] = [step for step in called["images: release"]["steps"] if "ALLOW" in step.get("env", {})]
    for is_allowed, option in ((False, ""), (True, "--allow-untested-gpu")):
        assert expand(release["env"]["ALLOW"], {"inputs": {"allow_untested_gpu": is_allowed}}) == option


@pytest.mark.parametrize(
    ("publish", "team", "result", "runs"),
    [
        ("true", "team.yaml", "success", True),
        ("true", "team.yaml", "skipped", True),  # the weekly run, if everything is released
        ("true", "team.yaml", "failure", True),
        ("true", "", "success", False),
        ("false", "team.yaml", "skipped", False),
    ],
)
def test_the_images_of_a_team_follow_the_release(publish: str, team: str, result: str, runs: bool) -> None:
    job = dict(jobs())["images: team"]
    needs = {"plan": {"result": "success", "outputs": {"publish": publish}}, "release": {"result": result}}
    context = {"needs": needs, "inputs": {"team": team}}
    assert set(job["needs"]) == set(needs)
    assert applies(job, context, is_failed=result != "success") == runs


def test_a_job_that_signs_installs_itself_before_it_receives_artifacts() -> None:
    """A job that runs code of images wrote them: in .builder, they could replace the programs that set up .venv."""
    receiving = 0
    for name, job in jobs():
        uses = [step.get("uses", "").partition("@")[0] or step["run"] for step in job["steps"]]
        for number, action in enumerate(uses):
            if action == "actions/download-artifact":
                receiving += 1
                assert "make .venv/.ready" in uses[:number], name
                assert not any(each.startswith("make") for each in uses[number:]), name
                assert job["steps"][number]["with"]["path"] in ("received", ".builder/evidence"), name
                assert "run-id" not in job["steps"][number]["with"], "of this run"
    assert receiving == 3


def test_the_gpu_tests_are_in_parts_on_a_runner_of_our_own() -> None:
    gpu = dict(jobs())["ci: gpu"]
    assert "self-hosted" in gpu["runs-on"]
    assert gpu["strategy"]["matrix"] == "${{ fromJSON(needs.plan.outputs.parts) }}"
    assert "concurrency" not in gpu, "jobs wait for the runner; by default, a group cancels those that wait"
    assert "needs.plan.outputs.gpu == 'true'" in gpu["if"]
    assert dict(jobs())["ci: plan"]["outputs"]["gpu"] == "${{ vars.GPU != 'off' && !inputs.allow-untested-gpu }}"


@pytest.mark.parametrize("is_on", [False, True])
def test_arm64_is_switched_on_by_a_variable(is_on: bool) -> None:
    context = {"vars": {"ARM64": "on"} if is_on else {}, "inputs": {}, "env": {"PUBLISH": "true"}}

    def value(text: str, **more: Any) -> Any:
        return expand(text, context | more)

    workflows = dict(jobs())
    [plan] = [step for step in workflows["ci: plan"]["steps"] if step.get("id") == "plan"]
    assert value(plan["env"]["CELLS"]).split() == ["all", *(["arm64"] if is_on else [])]
    assert value(plan["env"]["CELLS"], env={"PUBLISH": "false"}).split()[:2] == ["all", "unsupported"]
    assert value(plan["env"]["CELLS"], inputs={"cells": "pt-*"}) == "pt-*"
    assert workflows["ci: images"]["runs-on"] == "${{ matrix.runner }}", "of the part: see builder/steps/ci.py"
    [release] = [step for step in workflows["ci: release"]["steps"] if step.get("id") == "release"]
    options = value(release["env"]["ALLOW"], needs={"plan": {"outputs": {"gpu": "true"}}}).split()
    assert options == ([] if is_on else ["--allow-missing-arch"])
    [nightly] = [step for step in workflows["nightly: plan"]["steps"] if step.get("id") == "plan"]
    assert value(nightly["env"]["CELLS"]).split() == ["all", *(["arm64"] if is_on else [])]
    assert value(nightly["env"]["CELLS"], inputs={"cells": "pt-*"}) == "pt-*"
    assert workflows["nightly: images"]["runs-on"] == "${{ matrix.runner }}", "of the part"


def test_one_check_needs_every_job() -> None:
    """The names of jobs of a matrix vary, and a job that is skipped because another one failed counts as a success."""
    ok = dict(jobs())["ci: ok"]
    assert ok["if"] == "always()"
    assert {"ok", *ok["needs"]} == {name.removeprefix("ci: ") for name, _ in jobs() if name.startswith("ci: ")}
    [step] = ok["steps"]
    assert step["run"] == "exit 1"
    needs = {"a": {"result": "success"}, "b": {"result": "skipped"}}
    assert not applies(step, {"needs": needs}, is_failed=False)
    for result in ("failure", "cancelled"):
        assert applies(step, {"needs": needs | {"c": {"result": result}}}, is_failed=False)


def test_the_required_check_reports_on_every_change() -> None:
    """A filter of the workflow would leave it pending; a merge queue waits for it too."""
    data = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    triggers = data[True]  # YAML 1.1 reads `on` as true
    assert set(triggers) == {"push", "pull_request", "merge_group", "workflow_dispatch"}
    assert not [name for name, value in triggers.items() if value and set(value) & {"paths", "paths-ignore"}]


def test_all_tests_run_for_documents_whose_commands_are_tests() -> None:
    [script] = [step["run"] for step in dict(jobs())["ci: changes"]["steps"] if step.get("id") == "changes"]
    names = {word for words in commands(script) for word in words if word.endswith(".md")}
    assert names == {*DOCUMENTS, ":(exclude,glob)*.md"}


PULL_REQUEST = {"pull_request": {"base": {"sha": "base"}}}
SINCE = {
    "a pull request": ({"event": PULL_REQUEST, "vars": {"PUBLISH": "true"}}, "base"),
    "a merge queue": ({"event": {"merge_group": {"base_sha": "base"}}, "vars": {"PUBLISH": "true"}}, "base"),
    "a push": ({"event": {"before": "base"}, "vars": {}}, "base"),
    "a push that releases": ({"event": {"before": "base"}, "vars": {"PUBLISH": "true"}}, ""),
}


@pytest.mark.parametrize(("context", "since"), SINCE.values(), ids=SINCE)
def test_a_push_that_releases_runs_all_tests(context: dict[str, Any], since: str) -> None:
    """A change of documents after a change whose tests failed released its images."""
    [step] = [step for step in dict(jobs())["ci: changes"]["steps"] if step.get("id") == "changes"]
    expression = step["env"]["SINCE"].removeprefix("${{").removesuffix("}}")
    assert evaluate(expression, {"github": {"event": context["event"]}, "vars": context["vars"]}) == since


def test_continuous_integration_is_one_target_here_and_there() -> None:
    """A check that only one of them ran would be missed by the other."""
    assert "make ci" in (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    runs = {step["run"]: step["if"] for step in dict(jobs())["ci: test"]["steps"] if "run" in step}
    assert runs == {
        "sudo make ci": "needs.changes.outputs.tests != 'documents'",
        "make check": "needs.changes.outputs.tests == 'documents'",
    }
    assert re.search(r"^ci: test demo ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_no_rights_and_no_expression_in_a_command(path: Path) -> None:
    """Rights belong to jobs; an expression in a command would let the name of a branch run code."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert data["permissions"] == {}
    commands = [step["run"] for job in data["jobs"].values() for step in job["steps"] if "run" in step]
    assert not [command for command in commands if "${{" in command]


def test_every_action_is_pinned_to_a_commit_and_a_version() -> None:
    """One version of each, whose major runs on Node.js 24."""
    lines = [line for path in WORKFLOWS for line in path.read_text(encoding="utf-8").splitlines() if "uses:" in line]
    pins = [re.fullmatch(r" *(?:- )?uses: ([\w.-]+/[\w.-]+)@([0-9a-f]{40}) # v(\d+)\.\d+\.\d+", line) for line in lines]
    assert all(pins)
    versions = {pin[1]: (pin[2], int(pin[3])) for pin in pins if pin}
    assert len({pin[0].strip("- ") for pin in pins if pin}) == len(versions)
    oldest = {
        "actions/checkout": 5, "actions/upload-artifact": 6, "actions/download-artifact": 7, "actions/deploy-pages": 5,
    }  # fmt: skip
    assert all(versions[action][1] >= major for action, major in oldest.items())


def test_cosign_has_no_known_vulnerabilities() -> None:
    """CVE-2026-22703, CVE-2026-39395 and GHSA-fx35-mq7g-6g98: all are fixed in 3.1.3."""
    steps = [step for _, job in jobs() for step in job["steps"] if "cosign-installer" in step.get("uses", "")]
    releases = {step["with"]["cosign-release"] for step in steps}
    assert len(releases) == 1
    assert Version(releases.pop()) >= Version("3.1.3")


def test_artifacts_can_be_written_again() -> None:
    """A job that runs again, in the same run, failed because of the artifact of its first attempt."""
    uploads = [step for _, job in jobs() for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert uploads
    assert all(step["with"]["overwrite"] for step in uploads)
    handed_over = [step["with"] for step in uploads if "logs" not in step["with"]["name"]]
    assert {values["retention-days"] for values in handed_over} == {1}


def test_every_report_that_is_uploaded_is_written() -> None:
    """The nightly jobs named the folder of JUnit reports, and wrote none."""
    uploading = [job for _, job in jobs() if ".builder/junit" in str([step.get("with") for step in job["steps"]])]
    assert uploading
    for job in uploading:
        assert any("--junit .builder/junit" in step.get("run", "") for step in job["steps"])


@pytest.mark.parametrize(
    ("value", "result", "runs"),
    [("true", "success", True), ("true", "failure", True), ("true", "skipped", False), ("", "success", False)],
)
def test_the_page_of_all_images_is_published_if_a_variable_says_so(value: str, result: str, runs: bool) -> None:
    """Anyone can read it. The job that makes it runs Python packages: one of them could sign with its identity."""
    job, pages = dict(jobs())["ci: catalog"], dict(jobs())["ci: pages"]
    context = {"vars": {"CATALOG": value} if value else {}, "needs": {"release": {"result": result}}}
    assert applies(job, context, is_failed=result != "success") == runs
    assert job["permissions"] == {"contents": "read", "packages": "read"}
    assert applies(pages, {"needs": {"catalog": {"result": "success" if runs else "skipped"}}}, is_failed=True) == runs
    assert pages["permissions"] == {"pages": "write", "id-token": "write"}
    assert [step["uses"].partition("@")[0] for step in pages["steps"]] == ["actions/deploy-pages"]


def test_a_release_has_its_own_job_and_environment() -> None:
    release = dict(jobs())["ci: release"]
    assert (release["environment"], release["needs"]) == ("release", ["plan", "stage", "gpu-results"])
    # By default, GitHub cancels a run that waits if another one waits too, and the required check of its commit fails.
    concurrency = {"group": "release", "cancel-in-progress": False, "queue": "max"}
    assert release["concurrency"] == dict(jobs())["images: release"]["concurrency"] == concurrency
    assert release["permissions"]["attestations"] == "write"
    [script] = [step for step in release["steps"] if "builder release" in step.get("run", "")]
    for gpu, options in (
        ("true", ["--allow-missing-arch"]),
        ("false", ["--allow-untested-gpu", "--allow-missing-arch"]),
    ):
        context = {"needs": {"plan": {"outputs": {"gpu": gpu}}}, "vars": {}}
        assert expand(script["env"]["ALLOW"], context).split() == options


def test_updates_do_not_stop_each_other() -> None:
    lock = dict(jobs())["updates: lock"]
    assert lock["strategy"]["fail-fast"] is False
    names = [step.get("run", "") for step in lock["steps"]]
    last = next(number for number, run in enumerate(names) if "builder lock" in run)
    for step in lock["steps"][last + 1 :]:
        assert "!cancelled()" in step["if"], "a part that failed must not lose the locks of the rest"


def test_only_pull_requests_cancel_each_other() -> None:
    for path in WORKFLOWS:
        concurrency = yaml.safe_load(path.read_text(encoding="utf-8"))["concurrency"]
        if concurrency["cancel-in-progress"]:
            assert concurrency["group"] == "ci-${{ github.event.pull_request.number || github.run_id }}"


CONTEXT = {
    "needs": {"a": {"result": "success"}, "b-c": {"result": "failure", "outputs": {"gpu": "true"}}},
    "vars": {"GPU": "off"},
    "inputs": {"what": "build", "allow-untested-gpu": False},
}
EXPRESSIONS = {
    "needs.b-c.outputs.gpu == 'true'": True,
    "needs.unknown.outputs.gpu == 'true'": False,
    "contains(needs.*.result, 'failure') || contains(needs.*.result, 'cancelled')": True,
    "contains(needs.*.result, 'cancelled')": False,
    "!cancelled() && needs.a.result != 'skipped'": True,
    "vars.GPU != 'off' && !inputs.allow-untested-gpu": False,
    "vars.MISSING != 'off' && !inputs.allow-untested-gpu": True,
    "vars.MISSING != ''": False,
    "inputs.what != 'build' && '--unreleased' || format('--changed-since={0}', vars.MISSING || vars.GPU)": (
        "--changed-since=off"
    ),
    "'it''s'": "it's",
}


@pytest.mark.parametrize(("expression", "value"), EXPRESSIONS.items(), ids=EXPRESSIONS)
def test_the_faked_runner_evaluates_expressions_as_github(expression: str, value: object) -> None:
    assert evaluate(expression, CONTEXT) == value


def test_a_step_after_a_failure_needs_a_function_in_its_condition() -> None:
    assert applies({}, {}, is_failed=False)
    assert not applies({}, {}, is_failed=True)
    assert not applies({"if": "'x' == 'x'"}, {}, is_failed=True)
    assert applies({"if": "${{ !cancelled() && 'x' == 'x' }}"}, {}, is_failed=True)
    assert not applies({"if": "${{ !cancelled() && 'x' == 'y' }}"}, {}, is_failed=True)
