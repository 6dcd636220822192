"""The workflows run only commands that exist, in jobs with the rights that they need, and in the right order.

Linters check the rest: their schema, pinned actions, expressions in commands, and dangerous triggers (tests/lint.py).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from packaging.version import Version

from builder.cli import cli
from builder.matrix.project import Project
from builder.plan import plan
from builder.steps import ci
from tests.integration.test_readme import DOCUMENTS
from tests.paths import ROOT
from tools.facts import check_facts
from tools.packages import packages
from tools.upstream import upstream

Job = dict[str, Any]
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
WORKFLOWS = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
JOBS: dict[str, Job] = {
    f"{flow}: {name}": job for flow, data in WORKFLOWS.items() for name, job in data["jobs"].items()
}
GITLAB = ROOT / "builder/steps/new_repository/.gitlab-ci.yml"
TARGETS = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
# Commands of this repository in a shell script, up to the next command or redirection.
COMMAND = re.compile(r"(?:\.venv/bin/\S+|python3|\bsh \.github/summary\.sh|\bmake) [^\n|&;<>)]+")
PUBLISHES = "needs.plan.outputs.publish == 'true'"
each_job = pytest.mark.parametrize(("name", "job"), JOBS.items(), ids=JOBS)


def scripts(job: Job) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def actions(job: Job) -> list[str]:
    return [step.get("uses", "").partition("@")[0] for step in job["steps"]]


def step_with(job: Job, text: str) -> Job:
    """The step whose command has this text."""
    [step] = [step for step in job["steps"] if text in step.get("run", "")]
    return dict(step)


def conditions(job_or_step: Job) -> set[str]:
    """The conditions that must all hold."""
    return set(job_or_step.get("if", "").removeprefix("${{ ").removesuffix(" }}").split(" && "))


def check_command(words: list[str]) -> None:
    """Fails for a command, an option or a target that does not exist."""
    match words:
        case ["make", target]:
            assert target in (*TARGETS, ".venv/.ready")
        case [".venv/bin/builder", command, *arguments] | ["sh", ".github/summary.sh", command, *arguments]:
            cli.commands[command].make_context(command, arguments)
        case [".venv/bin/python", "-m", "tools.upstream", *arguments]:
            upstream.make_context("upstream", arguments)
        case [".venv/bin/python", "-m", "tools.facts", *arguments]:
            check_facts.make_context("facts", arguments)
        case ["python3", "-m", "tools.pins"]:
            pass
        case [".venv/bin/python", "-m", "tools.packages", *arguments]:
            packages.make_context("packages", arguments)
        case _:
            raise AssertionError(f"unknown command: {shlex.join(words)}")


@each_job
def test_every_command_exists_with_its_options(name: str, job: Job) -> None:
    environ = {key: value for step in [job, *job["steps"]] for key, value in step.get("env", {}).items()}
    values = {f"${key}": re.findall(r"'(--[a-z-]+[^' ]*)'", str(value)) for key, value in environ.items()}
    values["$TEAM"] = [__file__]  # a file that exists
    for command in COMMAND.findall(scripts(job)):
        # An expression chooses among options, or has something else, such as cells.
        check_command([each for word in shlex.split(command) for each in values.get(word) or [word]])


@pytest.mark.parametrize("publish", [False, True])
def test_every_command_of_a_gitlab_pipeline_exists_with_its_options(publish: bool) -> None:
    project = Project(ROOT)
    child = ci.gitlab_pipeline(plan.make_plan(project, project.cells[:1]).images, publish=publish)
    texts = [
        line
        for data in map(yaml.safe_load, (GITLAB.read_text(encoding="utf-8"), child))
        for job in data.values()
        if isinstance(job, dict)
        for line in job.get("script", ())
    ]
    commands = COMMAND.findall("\n".join(texts))
    assert len(commands) == (6 if publish else 3)
    options = {"$limit": ["--unreleased", "--publish"], "$allow": ["--allow-untested-gpu"], "$TEAM": [__file__]}
    for command in commands:
        check_command([each for word in shlex.split(command) for each in options.get(word, [word])])


def test_a_pipeline_of_gitlab_publishes_from_the_default_branch_only() -> None:
    parent = yaml.safe_load(GITLAB.read_text(encoding="utf-8"))
    [limit] = [line for line in parent["plan"]["script"] if "--publish" in line]
    test = 'test "$PUBLISH" != true || test "$CI_COMMIT_BRANCH" != "$CI_DEFAULT_BRANCH" || limit='
    assert limit == f'{test}"--unreleased --publish"'
    [rule] = parent["team"]["rules"]
    assert rule["if"] == '$TEAM && $PUBLISH == "true" && $CI_COMMIT_BRANCH == $CI_DEFAULT_BRANCH'
    assert parent["team"]["environment"] == {"name": "release"}, "GitLab gives the key to jobs of this environment only"
    assert "environment" not in parent["plan"]


# ---- Rights

# What publishes, the job before it, and the condition that keeps it from running if that one was skipped. Without a
# function such as cancelled() it needs none: a job does not run after one that failed or was skipped.
PUBLISHING = {
    "ci: push": ("plan", PUBLISHES),
    "ci: stage": ("push", ""),
    "ci: gpu": ("stage", ""),
    "ci: gpu-results": ("gpu", "needs.gpu.result != 'skipped'"),
    "ci: release": ("stage", "needs.stage.result == 'success'"),
    "ci: catalog": ("release", "needs.release.result != 'skipped'"),
    "ci: pages": ("catalog", "needs.catalog.result == 'success'"),
    "images: push": ("plan", PUBLISHES),
    "images: release": ("push", ""),
    "images: team": ("plan", PUBLISHES),
}
UPDATES = ("updates: lock", "updates: upstream")  # they open pull requests


@each_job
def test_rights(name: str, job: Job) -> None:
    """A job that runs code of an image can neither write nor sign; no job but that of updates has a secret."""
    rights = job["permissions"]
    runs_images = re.search(r"builder (images|build|test|refresh)\b|make (ci|test-all)\b", scripts(job))
    if runs_images or "self-hosted" in job["runs-on"]:
        assert "write" not in rights.values()
        assert "GPU_IMAGES_SIGN" not in str(job)
    if "write" in rights.values():
        assert name in (*PUBLISHING, *UPDATES)
    if rights.get("id-token") == "write":
        assert rights.get("contents", "read") == "read"
    assert "secrets." not in str(job) or name in UPDATES
    assert "timeout-minutes" in job
    assert all(step["with"]["persist-credentials"] is False for step in job["steps"] if "checkout@" in str(step))


def test_rights_belong_to_jobs() -> None:
    assert all(data["permissions"] == {} for data in WORKFLOWS.values())


def test_an_action_and_cosign_have_one_version_each() -> None:
    """CVE-2026-22703, CVE-2026-39395 and GHSA-fx35-mq7g-6g98 of cosign are fixed in 3.1.3."""
    text = "".join(TEXTS.values())
    uses = re.findall(r"uses: (\S+)@(\w{40} # v\d+\.\d+\.\d+)\n", text)
    assert len(uses) == text.count("uses: ")
    assert len(set(uses)) == len(dict(uses))
    [cosign] = set(re.findall(r"cosign-release: v(\S+)", text))
    assert Version(cosign) >= Version("3.1.3")


def test_no_workflow_with_a_secret_runs_for_a_pull_request() -> None:
    assert set(WORKFLOWS["updates"][True]) == {"schedule", "workflow_dispatch"}  # YAML 1.1 reads `on` as true


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("ci", "github.ref == 'refs/heads/main' && vars.PUBLISH == 'true' && inputs.what != 'build'"),
        ("images", "github.ref == 'refs/heads/main' && github.event_name != 'pull_request' && inputs.publish"),
    ],
)
def test_only_the_main_branch_publishes(name: str, condition: str) -> None:
    plan_job = WORKFLOWS[name]["jobs"]["plan"]
    assert plan_job["env"]["PUBLISH"] == f"${{{{ {condition} }}}}"
    assert plan_job["outputs"]["publish"] == "${{ env.PUBLISH }}"


@pytest.mark.parametrize(("name", "before", "condition"), [(name, *needed) for name, needed in PUBLISHING.items()])
def test_nothing_is_published_for_a_pull_request(name: str, before: str, condition: str) -> None:
    assert before in JOBS[name]["needs"]
    if condition:
        assert condition in conditions(JOBS[name])
    else:
        assert "()" not in JOBS[name].get("if", "")


def test_a_job_that_signs_installs_itself_before_it_receives_artifacts() -> None:
    """A job that runs code of images wrote them: in .builder, they could replace the programs that set up .venv."""
    receiving = 0
    for name, job in JOBS.items():
        for number, action in enumerate(actions(job)):
            if action == "actions/download-artifact":
                receiving += 1
                commands = [step.get("run", "") for step in job["steps"]]
                assert "make .venv/.ready" in commands[:number], name
                assert not any(each.startswith("make") for each in commands[number:]), name
                assert job["steps"][number]["with"]["path"] in ("received", ".builder/evidence"), name
                assert "run-id" not in job["steps"][number]["with"], "of this run"
    assert receiving == 3


def test_the_page_of_all_images_is_published_if_a_variable_says_so() -> None:
    """Anyone can read it. The job that makes it runs Python packages: one of them could sign with its identity."""
    catalog, pages = JOBS["ci: catalog"], JOBS["ci: pages"]
    assert "vars.CATALOG == 'true'" in conditions(catalog)
    assert catalog["permissions"] == {"contents": "read", "packages": "read"}
    assert pages["permissions"] == {"pages": "write", "id-token": "write"}
    assert actions(pages) == ["actions/deploy-pages"]


def test_a_release_has_its_own_job_and_environment() -> None:
    release = JOBS["ci: release"]
    assert release["environment"] == "release"
    # By default, GitHub cancels a run that waits if another one waits too, and the required check of its commit fails.
    concurrency = {"group": "release", "cancel-in-progress": False, "queue": "max"}
    assert release["concurrency"] == JOBS["images: release"]["concurrency"] == concurrency


# ---- Order


def references(job: Job, kind: str) -> Iterator[list[str]]:
    """The names in expressions that begin with `kind`, in parts."""
    for found in re.findall(rf"(?<![\w/]){kind}\.([\w-]+(?:\.[\w-]+)*)", str(job)):
        yield found.split(".")


def written(step: Job) -> set[str]:
    """The outputs of a step."""
    run = step.get("run", "")
    if "--format github" in run:
        [command] = re.findall(r"builder (\w+)", run)
        return {"plan": {"parts", "cells"}, "stage": {"stamp"}, "release": {"subjects"}}[command]
    return {"debian", "frameworks"} if "--format updates" in run else {*re.findall(r'echo "?(\w+)=', run), "token"}


@each_job
def test_what_a_job_refers_to_exists(name: str, job: Job) -> None:
    """GitHub takes an unknown name for an empty one."""
    jobs, inputs = WORKFLOWS[name.partition(":")[0]]["jobs"], str(WORKFLOWS[name.partition(":")[0]][True])
    for need, *rest in references(job, "needs"):
        assert need in job["needs"]
        assert rest[0] == "result" or rest[1] in jobs[need]["outputs"]
    steps = {step["id"]: step for step in job["steps"] if "id" in step}
    for step, _, output in references(job, "steps"):
        assert output in written(steps[step])
    keys = {"cells", *ci.RUNNERS["amd64"], "name"}
    assert {key for key, *_ in references(job, "matrix")} <= (keys if "matrix" in job.get("strategy", {}) else set())
    assert all(f"'{each}'" in inputs for each, *_ in references(job, "inputs"))


@pytest.mark.parametrize("name", ["ci", "images"])
def test_an_image_that_fails_holds_back_the_release_but_no_other_image(name: str) -> None:
    jobs = WORKFLOWS[name]["jobs"]
    assert {"!cancelled()", "needs.images.result != 'skipped'"} <= conditions(jobs["push"])
    assert all(job["strategy"]["fail-fast"] is False for job in jobs.values() if "strategy" in job)
    assert "if" not in jobs["stage" if name == "ci" else "release"]


def test_a_release_waits_for_the_results_of_the_gpu() -> None:
    assert "(needs.plan.outputs.gpu != 'true' || needs.gpu-results.result == 'success')" in JOBS["ci: release"]["if"]


def test_the_images_of_a_team_follow_the_release() -> None:
    """Also in the weekly run, if everything is released and the release is skipped."""
    team = JOBS["images: team"]
    assert (team["needs"], conditions(team)) == (
        ["plan", "release"],
        {"!cancelled()", PUBLISHES, "inputs.team != ''"},
    )


def test_the_gpu_tests_are_in_parts_on_a_runner_of_our_own() -> None:
    gpu = JOBS["ci: gpu"]
    assert "self-hosted" in gpu["runs-on"]
    assert gpu["strategy"]["matrix"] == "${{ fromJSON(needs.plan.outputs.parts) }}"
    assert "concurrency" not in gpu, "jobs wait for the runner; by default, a group cancels those that wait"
    assert "needs.plan.outputs.gpu == 'true'" in conditions(gpu)
    assert JOBS["ci: plan"]["outputs"]["gpu"] == "${{ vars.GPU != 'off' && !inputs.allow-untested-gpu }}"


@pytest.mark.parametrize(
    ("name", "command", "variable", "expression"),
    [
        ("ci: plan", "builder plan", "CELLS", "vars.ARM64 == 'on' && 'arm64' || ''"),
        ("nightly: plan", "builder plan", "CELLS", "vars.ARM64 == 'on' && 'all arm64' || 'all'"),
        ("ci: release", "builder release", "ALLOW", "vars.ARM64 != 'on' && '--allow-missing-arch' || ''"),
        ("ci: release", "builder release", "ALLOW", "needs.plan.outputs.gpu != 'true' && '--allow-untested-gpu' || ''"),
        ("images: release", "builder release", "ALLOW", "inputs.allow_untested_gpu && '--allow-untested-gpu' || ''"),
    ],
)
def test_what_variables_and_inputs_switch_on(name: str, command: str, variable: str, expression: str) -> None:
    assert expression in step_with(JOBS[name], command)["env"][variable]


@pytest.mark.parametrize("name", UPDATES)
def test_updates_do_not_stop_each_other(name: str) -> None:
    job = JOBS[name]
    assert job.get("strategy", {"fail-fast": False})["fail-fast"] is False
    first = ["| tee" in step.get("run", "") or "|& tee" in step.get("run", "") for step in job["steps"]].index(True)
    for step in job["steps"][first + 1 :]:
        assert "!cancelled()" in conditions(step), "a part that failed must not lose the rest"


def test_only_pull_requests_cancel_each_other() -> None:
    for data in WORKFLOWS.values():
        if data["concurrency"]["cancel-in-progress"]:
            assert data["concurrency"]["group"] == "ci-${{ github.event.pull_request.number || github.run_id }}"


# ---- The required check


def test_one_check_needs_every_job() -> None:
    """The names of jobs of a matrix vary, and a job that is skipped because another one failed counts as a success."""
    ok = JOBS["ci: ok"]
    assert ok["if"] == "always()"
    assert {"ok", *ok["needs"]} == set(WORKFLOWS["ci"]["jobs"])
    [step] = ok["steps"]
    condition = "contains(needs.*.result, 'failure') || contains(needs.*.result, 'cancelled')"
    assert step == {"if": condition, "run": "exit 1"}


def test_the_required_check_reports_on_every_change() -> None:
    """A filter of the workflow would leave it pending; a merge queue waits for it too."""
    triggers = WORKFLOWS["ci"][True]
    assert set(triggers) == {"push", "pull_request", "merge_group", "workflow_dispatch"}
    assert not [name for name, value in triggers.items() if value and set(value) & {"paths", "paths-ignore"}]


def test_all_tests_run_for_documents_whose_commands_are_tests_and_for_a_push_that_releases() -> None:
    """A change of documents after a change whose tests failed released its images."""
    step = step_with(JOBS["ci: changes"], "git diff")
    assert set(re.findall(r"(?<=\s)[\w/]+\.md\b", step["run"])) == set(DOCUMENTS)
    assert step["env"]["SINCE"].endswith("|| vars.PUBLISH != 'true' && github.event.before || '' }}")


def test_continuous_integration_is_one_target_here_and_there() -> None:
    """A check that only one of them ran would be missed by the other."""
    assert "bare make ci" in (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    assert {step["run"]: step["if"] for step in JOBS["ci: test"]["steps"] if "run" in step} == {
        "sudo make ci": "needs.changes.outputs.tests != 'documents'",
        "make check": "needs.changes.outputs.tests == 'documents'",
    }
    assert re.search(r"^ci: test demo ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


# ---- Artifacts


def test_artifacts_can_be_written_again() -> None:
    """A job that runs again, in the same run, failed because of the artifact of its first attempt."""
    uploads = [step["with"] for job in JOBS.values() for step in job["steps"] if "upload-artifact" in str(step)]
    assert uploads
    assert all(upload["overwrite"] for upload in uploads)
    assert {upload["retention-days"] for upload in uploads if "logs" not in upload["name"]} == {1}


def test_every_report_that_is_uploaded_is_written() -> None:
    """The nightly jobs named the folder of JUnit reports, and wrote none."""
    uploading = [job for job in JOBS.values() if ".builder/junit" in str([step.get("with") for step in job["steps"]])]
    assert uploading
    assert all("--junit .builder/junit" in scripts(job) for job in uploading)
