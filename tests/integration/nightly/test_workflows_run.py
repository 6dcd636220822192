"""Every command of the workflows, in order, on a faked runner (`actions`) with a local registry."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from rich.console import Console

from builder.common.console import View
from builder.common.reference import ImageRef
from builder.debian import mmdebstrap
from builder.host import Host
from builder.registry.client import Repository
from tests.integration import programs, wheels
from tests.integration import registry as registries
from tests.integration.checkout import ROOT, Checkout, today
from tests.integration.index import Index
from tests.integration.nightly.actions import FAKES, TOKEN, UBUNTU, USER, Runner, commit, git
from tests.integration.registry import Server
from tests.packages.run import LIST

PLAIN, EXTRA = "ty-1.0-cpu-py311", "ty-1.0-cpu-py311-extra"
LOGIN = f"docker login ghcr.io --username somebody --password-stdin: {TOKEN}"
FREE_DISK = "sudo rm -rf /usr/local/lib/android /usr/share/dotnet /opt/ghc /opt/hostedtoolcache/CodeQL"
INSTALL = ["sudo apt-get update -q", "sudo apt-get install -y -q mmdebstrap debian-archive-keyring"]
PACKAGES = f"""\
frameworks:
  tiny: import tinyframe
packages:
  tinyextra:
    cells: [{PLAIN}]
    check: import tinyextra
"""
BODIES = {
    "debian": r"bookworm: tini 0\.1-1 -> \S+ \(1 lock\)\n",
    "wheels": f"{PLAIN}:\n  nvidia-ml-py 13.0 -> 99.0\n\nno newer releases of tiny\n",
}
PUSH = {
    "event_name": "push",
    "ref": "refs/heads/main",
    "event": {"before": "0" * 40, "repository": {"visibility": "public"}},
}


@pytest.fixture
def folder(fresh: Checkout) -> Iterator[Path]:
    """A folder that the user of the steps can use, with the files of the runner. pytest's are for one user alone."""
    programs.install_from("trixie", "cosign")
    registries.install()
    assert not mmdebstrap.install(View(Console(quiet=True)))  # the runner hides it until a step "installs" it
    with TemporaryDirectory(prefix="runner-") as temporary:
        folder = Path(temporary)
        folder.chmod(0o755)
        shutil.copy2(fresh.environ["SSL_CERT_FILE"], folder / "bundle.pem")
        for name, text in ({f"bin/{name}": f"#!/bin/sh\n{text}" for name, text in FAKES.items()} | UBUNTU).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
            (folder / name).chmod(0o755)
        subprocess.run(
            ["cosign", "generate-key-pair", f"--output-key-prefix={folder}/key"],
            env={**os.environ, "COSIGN_PASSWORD": ""}, capture_output=True, timeout=60, check=True,
        )  # fmt: skip
        for path in (folder, folder / "key.key"):
            os.chown(path, USER, USER)
        yield folder


@pytest.fixture
def runner(seed: Path, fresh: Checkout, index: Index, tmp_path: Path, folder: Path) -> Iterator[Runner]:
    """The tiny project on the CPU alone, so that `--gpu require` passes, as a repository with a branch main."""
    root, release = fresh.root, fresh.release
    index.publish(wheels.framework(release, requires=()))
    with Server(folder=tmp_path / "registry").serving() as server:
        address = f"127.0.0.1:{server.port}"
        settings = f'registry: "{address}"\nstaging: {address}/staging\nevidence: [{{key: keys/key.pub}}]'
        fresh.edit("matrix.yaml", 'registry: ""', settings)
        fresh.edit("matrix.yaml", '  "12.8": {}', "  cpu: {}")
        fresh.edit("matrix.yaml", 'cuda: ["12.8"]', "cuda: [cpu]")
        fresh.edit("matrix.yaml", "image: ty-cuda", "image: ty-cuda\n    cpu_image: ty-cpu")
        scripts = (".github/pull-request.sh", ".github/summary.sh", "builder/bootstrap.sh")
        for name in ("Makefile", ".gitignore", "locks/builder.txt", *scripts):
            (root / name).parent.mkdir(exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
        (root / LIST).parent.mkdir(parents=True)
        (root / LIST).write_text(PACKAGES, encoding="utf-8")
        (root / "keys").mkdir()
        shutil.copy2(folder / "key.pub", root / "keys/key.pub")
        fresh.lock_and_render()
        origin = folder / "origin.git"
        git(folder, "init", "-q", "--bare", "--shared=0666", "--initial-branch=main", str(origin))
        store = folder / "store"
        shutil.copytree(seed, store, ignore=shutil.ignore_patterns("*.part", "*.whl"))
        git(root, "init", "-q", "--initial-branch=main")
        git(root, "remote", "add", "origin", origin.as_uri())
        commit(root)
        yield Runner(folder=folder, project=fresh, origin=origin, server=server, store=store)


@pytest.fixture
def pulled_base(runner: Runner) -> Iterator[None]:
    """The registry has the base image that the project names, and the engine does not."""
    project = runner.project
    name = f"127.0.0.1:{runner.server.port}/debian:trixie"
    project.docker("tag", project.base_image("trixie"), name)
    digest = re.findall(r"digest: (sha256:[0-9a-f]{64})", project.docker("push", name))[-1]
    project.docker("image", "rm", name)
    with (project.root / "templates/steps/slim.sh").open("a", encoding="utf-8") as script:
        script.write("# So that the engine does not have the base image of this script.\n")
    matrix = project.root / "matrix.yaml"
    text = matrix.read_text(encoding="utf-8")
    matrix.write_text(re.sub(r"debian:trixie-slim\S+", f"{name}@{digest}", text), encoding="utf-8")
    project.builder("render")
    commit(project.root)
    yield
    project.docker("image", "rm", f"{name}@{digest}")  # fails if it was not pulled


def test_the_steps_run_as_on_a_hosted_runner(runner: Runner) -> None:
    command = "id -un; id -u; . /etc/os-release; echo $ID; command -v mmdebstrap || echo none; docker version -f ok"
    output = runner.run_as_user(
        runner.new_disk(), ["sh", "-c", f"{command}; df --output=size,target -BG . | tail -n 1"]
    )
    *lines, disk = output.splitlines()
    assert lines == ["runner", str(USER), "ubuntu", "none", "ok"]
    assert disk.split() == ["14G", str(runner.folder / "job-0")]


def test_a_push_to_main_ends_with_a_signed_release(runner: Runner) -> None:
    """The jobs that run code of images sign nothing and push nothing."""
    both = f"{PLAIN} {EXTRA}"
    runner.play("ci", PUSH, PUBLISH="true")
    building = ["changes", "test", "plan", f"images {both}", f"push {both}"]
    assert runner.jobs == [*building, "stage", f"gpu {both}", "gpu-results", "release", "ok"]
    *calls, attest = runner.calls
    assert calls == ["sudo make ci", LOGIN, FREE_DISK, *[LOGIN] * 6]
    name, release = f"{runner.project.namespace}/ty-cpu", runner.project.release
    full = f"{release}-cpu-py311"
    tags = [full, f"{full}-extra", f"{full}-{today()}", f"{full}-extra-{today()}"]
    short = [f"{tag}{suffix}" for tag in (release, "1.0", "1.0-cpu-py311") for suffix in ("", "-extra")]
    assert sorted(runner.tags()) == sorted([*tags, *short])
    for tag, cell in zip(tags, (PLAIN, EXTRA) * 2, strict=True):
        options = ["--insecure-ignore-tlog=true", "--allow-http-registry", "-a", f"cell={cell}"]
        image = f"127.0.0.1:{runner.server.port}/{name}:{tag}"
        command = ["cosign", "verify", f"--key={runner.project.root}/keys/key.pub", *options, image]
        subprocess.run(command, capture_output=True, timeout=60, check=True)
    subjects = [str(runner.tags()[tag]).removeprefix("sha256:") for tag in (full, f"{full}-extra")]
    repository = f"127.0.0.1:{runner.server.port}/{name}"
    assert attest == f"actions/attest: {' '.join(f'{digest} {repository}' for digest in subjects)}"
    runner.play("ci", PUSH, PUBLISH="true")
    assert runner.jobs == ["changes", "test", "plan", "ok"], "everything is released"


def test_a_called_workflow_ends_with_the_images_of_the_team(runner: Runner) -> None:
    """After the release, and each week, also if everything is released."""
    place = f"127.0.0.1:{runner.server.port}/{runner.project.namespace}"
    text = f"images: [{{image: {place}/vision:1, parent: '{place}/ty-cpu:1.0', packages: [tinyextra]}}]\n"
    (runner.project.root / "team.yaml").write_text(text, encoding="utf-8")
    commit(runner.project.root)
    inputs = {"cells": "*", "publish": True, "allow_untested_gpu": False, "team": "team.yaml"}
    runner.play("images", PUSH, inputs=inputs)
    both = f"{PLAIN} {EXTRA}"
    assert runner.jobs == ["plan", f"images {both}", f"push {both}", "release", "team"]
    vision = Repository(ImageRef.parse(f"{place}/vision:1"), host=Host(), write=False)
    first = vision.digest_of("1")
    assert first
    runner.play("images", PUSH | {"event_name": "schedule"}, inputs=inputs)
    assert runner.jobs == ["plan", "team"]
    assert vision.digest_of("1") == first, "the parent is the same"


def test_a_pipeline_of_gitlab_ends_with_a_signed_release(runner: Runner) -> None:
    """The jobs that build have no key, and hand only test results to the one that releases."""
    place = f"127.0.0.1:{runner.server.port}/{runner.project.namespace}"
    text = f"images: [{{image: {place}/vision:1, parent: '{place}/ty-cpu:1.0', packages: [tinyextra]}}]\n"
    (runner.project.root / "team.yaml").write_text(text, encoding="utf-8")
    commit(runner.project.root)
    runner.play_gitlab(PUBLISH="true", TEAM="team.yaml")
    assert runner.jobs == ["plan", f"images of {PLAIN} (2 images)", "release", "team"]
    assert runner.calls == [f"docker login registry -u somebody --password-stdin: {TOKEN}"] * 4
    options = ["--insecure-ignore-tlog=true", "--allow-http-registry"]
    for image in (f"{place}/ty-cpu:{runner.project.release}-cpu-py311-extra", f"{place}/vision:1"):
        command = ["cosign", "verify", f"--key={runner.project.root}/keys/key.pub", *options, image]
        subprocess.run(command, capture_output=True, timeout=60, check=True)
    runner.play_gitlab(PUBLISH="true", TEAM="team.yaml")
    assert runner.jobs == ["plan", "team"], "everything is released"


def test_an_image_that_fails_holds_back_the_release(runner: Runner) -> None:
    """The next run releases all."""
    test = runner.project.root / "tests/images/test_extra.py"
    test.parent.mkdir(parents=True, exist_ok=True)
    before = test.read_text(encoding="utf-8") if test.exists() else "def test_it() -> None: ...\n"
    test.write_text("def test_it() -> None:\n    raise AssertionError\n", encoding="utf-8")
    commit(runner.project.root)
    runner.play("ci", PUSH, failing=("images", "push", "ok"), PUBLISH="true", GPU="off")
    assert runner.results["stage"] == runner.results["release"] == "skipped"
    assert not runner.tags()
    test.write_text(before, encoding="utf-8")
    commit(runner.project.root)
    runner.play("ci", PUSH, PUBLISH="true", GPU="off")
    assert [tag for tag in runner.tags() if "extra" in tag]


def test_a_change_of_documents_alone_runs_no_integration_tests(runner: Runner) -> None:
    """The required check is there nonetheless. (`make check` fails here: the project has no tests of its own.)"""
    base = git(runner.project.root, "rev-parse", "HEAD")
    (runner.project.root / "docs").mkdir(exist_ok=True)
    (runner.project.root / "docs/notes.md").write_text("new\n", encoding="utf-8")
    commit(runner.project.root)
    event = {"event_name": "merge_group", "event": {"merge_group": {"base_sha": base}}}
    runner.play("ci", event, failing=("test", "ok"))
    assert runner.jobs == ["changes", "test", "plan", "ok"]
    assert runner.calls == [], "no `sudo make ci`"


def test_a_person_builds_what_he_names(runner: Runner) -> None:
    inputs = {"what": "build", "cells": PLAIN, "allow-untested-gpu": False}
    runner.play("ci", PUSH | {"event_name": "workflow_dispatch", "event": {}}, inputs=inputs, PUBLISH="true")
    assert runner.jobs == ["changes", "test", "plan", f"images {PLAIN}", "ok"]
    assert not list(runner.server.data.iterdir()), "nothing was pushed"


def test_a_pull_request_builds_what_it_changes_without_credentials(runner: Runner) -> None:
    base = git(runner.project.root, "rev-parse", "HEAD")
    notes = runner.project.root / "templates/extra/files/etc/notes"
    notes.parent.mkdir(parents=True)
    notes.write_text("new\n", encoding="utf-8")
    runner.project.builder("render")
    commit(runner.project.root)
    runner.play(
        "ci", {"event_name": "pull_request", "event": {"pull_request": {"base": {"sha": base}}}}, PUBLISH="true"
    )
    assert runner.jobs == ["changes", "test", "plan", f"images {EXTRA}", "ok"]
    assert runner.calls == ["sudo make ci", FREE_DISK]
    summary = (runner.folder / "summary.md").read_text(encoding="utf-8")
    assert "cells: 2 unchanged" in summary
    line = rf"^{EXTRA} +yes +yes +[0-9]+ passed +(?:[0-9]+ min )?[0-9.]+ s +cpu +[0-9]+ days? *$"
    assert re.search(line, summary, re.MULTILINE), summary
    assert not list(runner.server.data.iterdir()), "nothing was pushed"


@pytest.mark.usefixtures("pulled_base")
def test_every_night_all_images_are_built(runner: Runner) -> None:
    """With an empty store, and without root: the builder runs mmdebstrap in a container of Debian, from a registry."""
    runner.store = None
    runner.play("nightly", {"event_name": "schedule"})
    assert runner.jobs == ["plan", f"images {PLAIN} {EXTRA}", "tests", "list", f"packages {PLAIN}", "unsupported"]
    assert runner.calls == [FREE_DISK, "sudo make test-all", FREE_DISK, FREE_DISK]
    files = runner.files("checkout/.builder/evidence/*.json", job=1)
    assert {(each["cell"], *each["failed"]) for each in map(json.loads, files)} == {(PLAIN,), (EXTRA,)}
    [[tested]] = map(json.loads, runner.files("checkout/tests/packages/results.json", job=4))
    assert (tested["package"], tested["cell"], tested["fault"]) == ("tinyextra", PLAIN, "")


@pytest.mark.parametrize(
    ("what", "cells", "schedule"), [("debian", "bookworm", "41 4 * * 1"), ("wheels", "tiny", "41 5 1 * *")]
)
def test_updates_are_a_pull_request(runner: Runner, index: Index, what: str, cells: str, schedule: str) -> None:
    root = runner.project.root
    if what == "debian":
        (lock,) = (root / "locks").glob("os-*.json")
        text = lock.read_text(encoding="utf-8")
        old = re.sub(r'("name": ?"tini",\s*"version": ?")[^"]+', r"\g<1>0.1-1", text)
        assert old != text
        lock.write_text(old, encoding="utf-8")
        runner.project.builder("render")
        commit(root)
    else:
        library = wheels.driver_library()
        index.publish(wheels.wheel(library.project, "99.0", {"pynvml.py": b""}))
    app = "id of the app" if what == "debian" else ""
    runner.play("updates", {"event_name": "schedule", "event": {"schedule": schedule}}, UPDATES_APP=app)
    index.withdraw("nvidia-ml-py", "99.0")
    assert runner.jobs == ["list", f"lock {cells}"]
    branch = f"updates/{what}-{cells}"
    calls = [call for call in runner.calls if not call.startswith("actions/")]
    token = "token of the app" if app else TOKEN
    assert calls == [
        *INSTALL,
        f"gh auth setup-git with {token}",
        f"gh pr list --head {branch} --state open --json number,isCrossRepository "
        rf'--jq .[] | "\(.isCrossRepository) \(.number)" with {token}',
        f"gh pr create --head {branch} --title Lock current {what}: {cells} --body-file changes.txt.md with {token}",
    ]
    minted = "actions/create-github-app-token: id of the app key of the app write write"
    assert (minted in runner.calls) == bool(app)
    body = (runner.folder / "body.md").read_text(encoding="utf-8")
    assert re.fullmatch(rf"Result of the update:\n\n```\n{BODIES[what]}```\n", body), body
    changed = git(runner.origin, "diff", "--name-only", "main", branch).splitlines()
    assert {name.partition("/")[0] for name in changed} <= {"locks", "images"}
    assert [name for name in changed if name.startswith("locks/os-" if what == "debian" else "locks/ty-")]


GH = """\
#!/bin/sh
case "$1 $2" in "pr list") cat "$OPEN" ;; *) echo "$1 $2 $3" >>"$CALLS" ;; esac
"""


@pytest.mark.parametrize(
    ("pull_requests", "call"),
    [("", "pr create --head"), ("true 7\n", "pr create --head"), ("true 7\nfalse 9\n", "pr edit 9")],
)
def test_a_pull_request_of_a_fork_is_never_the_one_of_an_update(tmp_path: Path, pull_requests: str, call: str) -> None:
    """One with the name of the branch kept the pull request of the update from being opened."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gh").write_text(GH, encoding="utf-8")
    (tmp_path / "bin/gh").chmod(0o755)
    for name, text in {"open": pull_requests, "changes": "bookworm: tini\n", "summary": ""}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    checkout = tmp_path / "checkout"
    environ = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": str(tmp_path), "OPEN": str(tmp_path / "open"),
        "CALLS": str(tmp_path / "calls"), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
    }  # fmt: skip

    def run(*command: str, folder: Path = tmp_path) -> None:
        subprocess.run(command, cwd=folder, env=environ, capture_output=True, timeout=60, check=True)

    run("git", "init", "-q", "--bare", "origin.git")
    run("git", "clone", "-q", "origin.git", "checkout")
    (checkout / "lock").write_text("new\n", encoding="utf-8")
    script = str(ROOT / ".github/pull-request.sh")
    run("sh", script, "debian", "bookworm", str(tmp_path / "changes"), folder=checkout)
    assert (tmp_path / "calls").read_text(encoding="utf-8").splitlines() == ["auth setup-git ", call]


def test_newer_releases_are_in_the_summary_if_no_lock_changed(runner: Runner) -> None:
    """There is no pull request then whose text could list them. (Here, there are none.)"""
    runner.play("updates", {"event_name": "schedule", "event": {"schedule": "41 5 1 * *"}})
    assert runner.calls == INSTALL
    summary = (runner.folder / "summary.md").read_text(encoding="utf-8")
    assert summary.endswith("\n\nno newer releases of tiny\n```\n"), summary
