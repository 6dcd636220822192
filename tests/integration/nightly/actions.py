"""A faked runner of GitHub Actions and GitLab CI, which runs the commands of the workflows in order.

Real are make, builder, Docker Engine, git and cosign. `sudo`, `gh` and `docker login` record their calls and do nothing
else: `sudo make ci` would run the tests that use this. The steps run as on GitHub's hosted runners:

- as the user `runner`, who may use the engine and is not root;
- with the checkout, home, store and temporary folder of a job on a new disk of 14 GB. The engine's data is elsewhere;
- with Ubuntu's /etc/os-release and apt sources. mmdebstrap and Debian's keys are missing until `sudo apt-get` installs
  them.

The disk and the changed files of the system are mounted for one step at a time, in a mount namespace.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from builder.common.reference import ImageRef
from builder.host import Host
from builder.registry.client import Repository
from tests.integration.checkout import BUILDER, ROOT, Checkout
from tests.integration.registry import Server

TOKEN = "secret of the job"
TIMEOUT_S = 300
USER = 1001  # the user and group id of GitHub's `runner`
SOCKET = Path("/var/run/docker.sock")
DISK = 14 << 30
FAKES = {
    "sudo": 'echo "sudo $*" >>"$CALLS"\ncase $* in *mmdebstrap*) touch "$PLACE/installed" ;; esac\n',
    "docker": '[ "$1" = login ] || exec "$DOCKER" "$@"\necho "docker $*: $(cat)" >>"$CALLS"\n',
    "gh": 'echo "gh $*${GH_TOKEN:+ with $GH_TOKEN}" | sed "s, /.*/, ," >>"$CALLS"\n'
    'case "$1 $2" in "pr list") echo true 7 ;; "pr create") for body; do :; done; cp "$body" "$BODY" ;; esac\n',
}
UBUNTU = {
    "ubuntu/os-release": 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n',
    "ubuntu/passwd": f"runner:x:{USER}:{USER}::/home/runner:/bin/bash\n",
    "ubuntu/group": f"runner:x:{USER}:\n",
    "ubuntu/sources/ubuntu.sources": "Types: deb\nURIs: http://ubuntu.example.test/ubuntu/\nSuites: noble\n"
    "Components: main universe\nSigned-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg\n",
}
# Programs and the tests' interpreter may be in root's home, which no other user can read.
ON_RUNNER = """\
mount -o loop,nobarrier "$PLACE.ext4" "$PLACE"
mount --bind "$UBUNTU/os-release" /etc/os-release
mount --bind "$UBUNTU/sources" /etc/apt/sources.list.d
[ ! -e /etc/apt/sources.list ] || mount --bind /dev/null /etc/apt/sources.list
for name in passwd group; do
    { cat "/etc/$name"; cat "$UBUNTU/$name"; } >"$UBUNTU/all-$name"
    mount --bind "$UBUNTU/all-$name" "/etc/$name"
done
if [ ! -e "$PLACE/installed" ]; then
    mount --bind /dev/null /usr/bin/mmdebstrap
    mount -t tmpfs tmpfs /usr/share/keyrings
fi
mount -t tmpfs -o mode=755 tmpfs /mnt
for path in $READABLE; do
    mkdir -p "/mnt$path"
    mount --bind "$path" "/mnt$path"
done
[ ! -d /mnt/root ] || mount --rbind /mnt/root /root
cd "$PLACE/$FOLDER"
exec setpriv --reuid="$RUNNER" --regid="$RUNNER" --groups="$RUNNER,$DOCKER_GROUP" "$@"
"""
_TOKEN = re.compile(r"'(?:[^']|'')*'|[=!]=|!|&&|\|\||[(),]|[A-Za-z_][\w.*-]*", re.ASCII)
_EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
_STATUS = re.compile(r"\b(always|cancelled|failure|success)\(\)")
_PYTHON = {"&&": " and ", "||": " or ", "!": " not ", "true": "True", "false": "False"}


def evaluate(expression: str, context: Mapping[str, Any], *, is_failed: bool = False) -> Any:
    """The value of an expression of GitHub Actions; of an unknown name empty. As there, `&&` and `||` give a side.

    `is_failed` is whether an earlier step or job failed. `!` is that of Python: `!a == b` is not `(!a) == b`.
    """

    def value(name: str) -> Any:
        nodes, is_list = [context], False
        for part in name.split("."):
            is_list = is_list or part == "*"
            if part == "*":
                nodes = [each for node in nodes if isinstance(node, Mapping) for each in node.values()]
            else:
                nodes = [node.get(part, "") if isinstance(node, Mapping) else "" for node in nodes]
        return nodes if is_list else nodes[0]

    functions = {
        "fromJSON": json.loads,
        "format": str.format,
        "contains": lambda items, item: item in items,
        "always": lambda: True,
        "cancelled": lambda: False,
        "failure": lambda: is_failed,
        "success": lambda: not is_failed,
    }

    def python(token: re.Match[str]) -> str:
        text = token[0]
        if text in _PYTHON:
            return _PYTHON[text]
        if text[0] == "'":
            return repr(text[1:-1].replace("''", "'"))
        return f"value({text!r})" if text[0].isalpha() and text not in functions else text

    return eval(" ".join(_TOKEN.sub(python, expression).split()), {"value": value, **functions})


def applies(step_or_job: Mapping[str, Any], context: Mapping[str, Any], *, is_failed: bool) -> bool:
    """Whether a step or a job runs: without a function like always(), not after a failure."""
    condition = _EXPRESSION.sub(r"\1", str(step_or_job.get("if", "success()")))
    return bool(evaluate(condition, context, is_failed=is_failed)) and (
        not is_failed or bool(_STATUS.search(condition))
    )


def expand(text: str, context: Mapping[str, Any]) -> Any:
    if whole := _EXPRESSION.fullmatch(text):
        return evaluate(whole[1], context)
    return _EXPRESSION.sub(lambda match: as_text(evaluate(match[1], context)), text)


def as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(kw_only=True)
class Runner:
    """`folder` belongs to the user of the steps, and has a disk for each job: `job-0.ext4`.

    `store` is copied to the jobs that build; None: they begin with an empty one. `jobs` are those that ran, with the
    cells of their part, `results` all jobs with their results.
    """

    folder: Path
    project: Checkout
    origin: Path
    server: Server
    store: Path | None
    jobs: list[str] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def play(
        self,
        workflow: str,
        github: Mapping[str, Any],
        *,
        inputs: Mapping[str, Any] = {},
        failing: Sequence[str] = (),
        **variables: str,
    ) -> None:
        """Runs the jobs of a workflow for an event, one after another. `failing` are the jobs that must fail."""
        self.jobs.clear()
        self.results.clear()
        (self.folder / "calls").unlink(missing_ok=True)
        shutil.rmtree(self.folder / "artifacts", ignore_errors=True)
        done: dict[str, Any] = {}
        ancestors: dict[str, set[str]] = {}
        content = yaml.safe_load((ROOT / f".github/workflows/{workflow}.yml").read_text(encoding="utf-8"))
        for name, job in content["jobs"].items():
            needs = job.get("needs", [])
            needs = [needs] if isinstance(needs, str) else needs
            ancestors[name] = set(needs).union(*(ancestors[need] for need in needs))
            context = {
                "github": {**github, "token": TOKEN}, "vars": variables, "inputs": inputs,
                "secrets": {"UPDATES_APP_KEY": "key of the app"}, "needs": {need: done[need] for need in needs},
            }  # fmt: skip
            # As on GitHub, a job without a function like always() does not run after one that was skipped.
            is_failed = any(self.results[ancestor] != "success" for ancestor in ancestors[name])
            done[name] = {"result": "skipped", "outputs": {}}
            if applies(job, context, is_failed=is_failed):
                failures = 0
                for number, part in enumerate(_parts(job, context)):
                    started = {**context, "matrix": part, "strategy": {"job-index": number}}
                    outputs, is_success = self._job(name, job, started, may_fail=name in failing)
                    done[name]["outputs"] |= outputs
                    failures += not is_success
                done[name]["result"] = "failure" if failures else "success"
            self.results[name] = done[name]["result"]
        assert [name for name, result in self.results.items() if result == "failure"] == list(failing)

    def _job(
        self, name: str, job: Mapping[str, Any], context: Mapping[str, Any], *, may_fail: bool
    ) -> tuple[dict[str, str], bool]:
        """Runs the steps on a new disk; returns the outputs of the job, and whether it succeeded."""
        self.jobs.append(f"{name} {context['matrix'].get('cells', '')}".strip())
        place = self.new_disk()
        self.run_as_user(place, ["mkdir", "tmp"])
        before = self._registry_files()
        job_variables = {key: as_text(expand(str(value), context)) for key, value in job.get("env", {}).items()}
        context = {**context, "env": job_variables, "runner": {"temp": str(place)}}
        steps: dict[str, Any] = {}
        is_failed = False
        for step in job["steps"]:
            context = {**context, "steps": steps}
            if not applies(step, context, is_failed=is_failed):
                continue
            if "uses" in step:
                steps[step.get("id", "")] = {"outputs": self._use(step, place, context)}
                # Saves making the operating system; the store of a runner is empty.
                if self.store and name in ("images", "packages", "unsupported") and "checkout" in step["uses"]:
                    store = job_variables.get("GPU_IMAGES_STORE", "../store")
                    copy = f"mkdir -p $(dirname {store}) && cp -R {self.store} {store}"
                    self.run_as_user(place, ["sh", "-c", copy], FOLDER="checkout")
                continue
            own = {key: as_text(expand(str(value), context)) for key, value in step.get("env", {}).items()}
            environ = {**job_variables, **own}
            if environ.get("GPU_IMAGES_SIGN") == "keyless":  # Sigstore is not reachable
                assert job["permissions"]["id-token"] == "write"
                environ["GPU_IMAGES_SIGN"] = str(self.folder / "key.key")
            status, output, outputs = self._run(step["run"], step.get("shell", ""), place, environ)
            steps[step.get("id", "")] = {"outputs": outputs}
            if status and not step.get("continue-on-error"):
                assert may_fail, f"{self.jobs[-1]}: {step['run']}\n{output}"
                is_failed = True
        if job["permissions"].get("packages") != "write":
            assert self._registry_files() == before, f"{self.jobs[-1]} wrote to the registry"
        outputs = {key: as_text(expand(value, context)) for key, value in job.get("outputs", {}).items()}
        return outputs, not is_failed or bool(job.get("continue-on-error"))

    def play_gitlab(self, **variables: str) -> None:
        """Runs the jobs of the pipeline that `builder init` writes for GitLab, and of its child; all must succeed.

        As with the executor `shell`. Artifacts are there before the first command. Only jobs of an environment get the
        key.
        """
        self.jobs.clear()
        (self.folder / "calls").unlink(missing_ok=True)
        shutil.rmtree(self.folder / "artifacts", ignore_errors=True)
        parent = yaml.safe_load((ROOT / "builder/steps/new_repository/.gitlab-ci.yml").read_text(encoding="utf-8"))
        self._gitlab_job(parent, "plan", variables)
        number = len(list(self.folder.glob("job-*.ext4"))) - 1
        child = yaml.safe_load(self.files("checkout/images.yml", job=number)[0])
        ordered = [(stage, name) for stage in child["stages"] for name in child if name not in ("workflow", "default")]
        for stage, name in ordered:
            if isinstance(child[name], dict) and child[name].get("stage") == stage:
                self._gitlab_job(child, name, variables)
        self._gitlab_job(parent, "team", variables)

    def _gitlab_job(self, pipeline: Mapping[str, Any], name: str, variables: Mapping[str, str]) -> None:
        self.jobs.append(name)
        job, place = pipeline[name], self.new_disk()
        self.run_as_user(place, ["mkdir", "tmp"])
        self._use({"uses": "actions/checkout", "with": {"fetch-depth": "0"}}, place, {})
        if self.store and name.startswith("images"):
            self.run_as_user(place, ["cp", "-R", str(self.store), "store"])
        received = {"pattern": "evidence-*", "path": ".builder", "merge-multiple": True}
        self._use({"uses": "actions/download-artifact", "with": received}, place, {})
        own = {key: text.replace("$CI_PROJECT_DIR", f"{place}/checkout") for key, text in pipeline["variables"].items()}
        registry = {"CI_REGISTRY": "registry", "CI_REGISTRY_USER": "somebody", "CI_REGISTRY_PASSWORD": TOKEN}
        branch = {"CI_COMMIT_BRANCH": "main", "CI_DEFAULT_BRANCH": "main", "CI_COMMIT_BEFORE_SHA": "0" * 40}
        key = {"GPU_IMAGES_SIGN": str(self.folder / "key.key")} if "environment" in job else {}
        script = "\n".join([*pipeline["default"]["before_script"], *job["script"]])
        status, output, _ = self._run(script, "bash", place, {**own, **registry, **branch, **key, **variables})
        assert status == 0, f"{name}: {script}\n{output}"
        if "artifacts" in pipeline["default"]:
            paths = "\n".join(pipeline["default"]["artifacts"]["paths"])
            sent = {"name": f"evidence-{len(self.jobs)}", "path": paths, "if-no-files-found": "ignore"}
            self._use({"uses": "actions/upload-artifact", "with": sent}, place, {})

    def _registry_files(self) -> set[Path]:
        return {path for path in self.server.data.rglob("*") if path.is_file() and "_uploads" not in path.parts}

    def new_disk(self) -> Path:
        """An empty disk; returns where it is mounted for each step."""
        place = self.folder / f"job-{len(list(self.folder.glob('job-*.ext4')))}"
        place.mkdir()
        disk = place.with_suffix(".ext4")
        with disk.open("wb") as file:
            file.truncate(DISK)
        options = ["-O", "^has_journal", "-E", f"lazy_itable_init=1,root_owner={USER}:{USER}"]
        subprocess.run(["mkfs.ext4", "-q", *options, str(disk)], capture_output=True, timeout=60, check=True)
        return place

    def _use(self, step: Mapping[str, Any], place: Path, context: Mapping[str, Any]) -> dict[str, str]:
        """Does what an action does; returns its outputs."""
        action = step["uses"].partition("@")[0]
        values = {key: as_text(expand(str(value), context)) for key, value in step.get("with", {}).items()}
        artifacts = self.folder / "artifacts"
        match action:
            case "actions/checkout":
                depth = ["--depth=1"] if values.get("fetch-depth") != "0" else []
                self.run_as_user(place, ["git", "config", "--global", "safe.directory", "*"])
                self.run_as_user(place, ["git", "clone", "-q", *depth, self.origin.as_uri(), "checkout"])
                # So that the steps find the environment of this checkout.
                ready = f"mkdir .venv && ln -s {BUILDER.parents[1]}/* .venv && touch .venv/.ready"
                self.run_as_user(place, ["sh", "-c", f"cd checkout && {ready}"])
            case "actions/upload-artifact":
                # The names in an artifact begin at the nearest folder that all paths have in common.
                lines = values["path"].splitlines()
                paths = [line for line in lines if not line.startswith("!")]
                common = os.path.commonpath(paths)
                names = " ".join(os.path.relpath(path, common) for path in paths)
                excluded = [f"--exclude={os.path.relpath(line[1:], common)}" for line in lines if line.startswith("!")]
                script = (
                    f"mkdir -p {artifacts}; cd {common} 2>/dev/null || exit 0\n"
                    f'present=$(ls -d {names} 2>/dev/null || true); [ "$present" ] || exit 0\n'
                    f"tar -c -f {artifacts}/{values['name']} {' '.join(excluded)} $present"
                )
                self.run_as_user(place, ["sh", "-ec", script], FOLDER="checkout")
                is_there = (artifacts / values["name"]).exists()
                assert is_there or values["if-no-files-found"] == "ignore"
            case "actions/download-artifact":
                assert set(values) in ({"name", "path"}, {"pattern", "path", "merge-multiple"})
                archives = sorted(artifacts.glob(values.get("name") or values["pattern"]))
                assert archives or "pattern" in values
                for archive in archives:
                    unpack = f"mkdir -p {values['path']} && tar -x -C {values['path']} -f {archive}"
                    self.run_as_user(place, ["sh", "-ec", unpack], FOLDER="checkout")
            case "actions/attest" | "actions/create-github-app-token":
                with (self.folder / "calls").open("a", encoding="utf-8") as calls:
                    calls.write(f"{action}: {' '.join(' '.join(values.values()).split())}\n")
                return {"token": "token of the app"}
            case _:
                assert action == "sigstore/cosign-installer"
        return {}

    def _run(
        self, command: str, shell: str, place: Path, environ: Mapping[str, str]
    ) -> tuple[int, str, dict[str, str]]:
        """Runs a command as GitHub does; returns its status, its output, and the outputs of the step."""
        script, outputs = self.folder / "script", self.folder / "outputs"
        script.write_text(command, encoding="utf-8")
        outputs.write_text("", encoding="utf-8")
        outputs.chmod(0o666)
        bash = ["bash", "--noprofile", "--norc", "-eo", "pipefail"] if shell == "bash" else ["bash", "-e"]
        done = self._start(place, [*bash, str(script)], FOLDER="checkout", **environ)
        values: dict[str, str] = {}
        lines = iter(outputs.read_text(encoding="utf-8").splitlines())
        for line in lines:
            name, _, end = line.partition("<<")
            if end and "=" not in name:
                values[name] = "\n".join(takewhile(lambda text, end=end: text != end, lines))  # type: ignore[misc]
            else:
                name, _, values[name] = line.partition("=")
        return done.returncode, f"{done.stdout}\n{done.stderr}", values

    def run_as_user(self, place: Path, command: Sequence[str], **environ: str) -> str:
        """Runs a command as the user of the steps, with the disk of a job; returns its output."""
        done = self._start(place, command, **environ)
        assert done.returncode == 0, f"{self.jobs[-1:]}: {command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _start(self, place: Path, command: Sequence[str], **environ: str) -> subprocess.CompletedProcess[str]:
        own = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "UV_CACHE_DIR")
        inherited = {key: value for key, value in self.project.environ.items() if key not in own}
        variables = {
            "PATH": f"{self.folder}/bin:{inherited['PATH']}", "HOME": str(place), "USER": "runner",
            "TMPDIR": f"{place}/tmp", "SSL_CERT_FILE": f"{self.folder}/bundle.pem",
            "PIP_CERT": f"{self.folder}/bundle.pem", "DOCKER_CONFIG": f"{place}/docker",
            "DOCKER": shutil.which("docker") or "", "GPU_IMAGES_STORE": f"{place}/store", "COSIGN_PASSWORD": "",
            "CALLS": f"{self.folder}/calls", "BODY": f"{self.folder}/body.md", "UBUNTU": f"{self.folder}/ubuntu",
            "GITHUB_ACTOR": "somebody", "GITHUB_OUTPUT": f"{self.folder}/outputs", "RUNNER_TEMP": str(place),
            "GITHUB_STEP_SUMMARY": f"{self.folder}/summary.md", "CI": "true",
            "PLACE": str(place), "FOLDER": "", "RUNNER": str(USER), "DOCKER_GROUP": str(SOCKET.stat().st_gid),
            "READABLE": " ".join({str(path) for path in (ROOT, sys.base_prefix)}),
        }  # fmt: skip
        return subprocess.run(
            ["unshare", "--mount", "sh", "-ec", ON_RUNNER, "sh", *command],
            env={**inherited, **variables, **environ}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip

    def files(self, pattern: str, job: int = 0) -> list[str]:
        """The contents of files on the disk of a job."""
        loop = f'for file in {pattern}; do cat "$file"; printf "\\0"; done'
        return self.run_as_user(self.folder / f"job-{job}", ["sh", "-c", loop]).split("\0")[:-1]

    def tags(self) -> dict[str, str | None]:
        """Digests of the released images by tag."""
        name = ImageRef(registry=f"127.0.0.1:{self.server.port}", repository=f"{self.project.namespace}/ty-cpu")
        there = Repository(name, host=Host(), write=False)
        return {tag: there.digest_of(tag) for tag in there.list_tags() if not tag.startswith("sha256-")}


def _parts(job: Mapping[str, Any], context: Mapping[str, Any]) -> list[Mapping[str, str]]:
    """The values of the matrix of each job; one empty part without a matrix."""
    matrix = job.get("strategy", {}).get("matrix", {"include": [{}]})
    if isinstance(matrix, str):
        matrix = expand(matrix, context)
    if "include" in matrix:
        return list(matrix["include"])
    [(key, values)] = matrix.items()
    return [{key: value} for value in expand(values, context)]


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(root: Path) -> str:
    """Commits and pushes everything; returns the commit."""
    git(root, "add", "--all")
    git(root, "-c", "user.name=t", "-c", "user.email=t@example.test", "commit", "-qm", "change")
    git(root, "push", "-q", "origin", "HEAD:main")
    return git(root, "rev-parse", "HEAD")
