"""A faked runner of GitHub Actions, which runs the commands of the workflows in order.

Real are make, builder, Docker Engine, git and cosign. `sudo`, `gh` and `docker login` record their calls and do nothing
else: `sudo make ci` would run the tests that use this. Each job has a clone, a store and a home of its own, and apt's
sources and /etc/os-release are Ubuntu's. It runs as root, unlike GitHub's runners.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from builder.common.reference import ImageRef
from builder.index.host import Host
from builder.registry.client import Registry
from tests.integration.checkout import BUILDER, ROOT, Checkout
from tests.integration.registry import Server

TOKEN = "secret of the job"
TIMEOUT_S = 300
FAKES = {
    "sudo": 'echo "sudo $*" >>"$CALLS"\n',
    "docker": '[ "$1" = login ] || exec "$DOCKER" "$@"\necho "docker $*: $(cat)" >>"$CALLS"\n',
    "gh": 'echo "gh $*" | sed "s, /.*/, ," >>"$CALLS"\n'
    'case "$1 $2" in "pr list") echo 0 ;; "pr create") for body; do :; done; cp "$body" "$BODY" ;; esac\n',
}
UBUNTU = {
    "ubuntu/os-release": 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n',
    "ubuntu/sources/ubuntu.sources": "Types: deb\nURIs: http://ubuntu.example.test/ubuntu/\nSuites: noble\n"
    "Components: main universe\nSigned-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg\n",
}
ON_UBUNTU = """\
mount --bind "$UBUNTU/os-release" /etc/os-release
mount --bind "$UBUNTU/sources" /etc/apt/sources.list.d
[ ! -e /etc/apt/sources.list ] || mount --bind /dev/null /etc/apt/sources.list
exec "$@"
"""
_TOKEN = re.compile(r"'[^']*'|[=!]=|&&|\|\||[()]|[A-Za-z_][\w.-]*", re.ASCII)
_EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}")


def evaluate(expression: str, context: Mapping[str, Any]) -> Any:
    """The value of an expression of GitHub Actions; of an unknown name empty. As there, `&&` and `||` give a side."""

    def value(name: str) -> Any:
        node: Any = context
        for part in name.split("."):
            node = node.get(part, "") if isinstance(node, Mapping) else ""
        return node

    def python(token: re.Match[str]) -> str:
        known = {
            "&&": "and",
            "||": "or",
            "fromJSON": "loads",
            "always": "always",
            "(": "(",
            ")": ")",
            "==": "==",
            "!=": "!=",
        }
        return token[0] if token[0][0] == "'" else known.get(token[0], f"value({token[0]!r})")

    return eval(_TOKEN.sub(python, expression.strip()), {"value": value, "loads": json.loads, "always": lambda: True})


def expand(text: str, context: Mapping[str, Any]) -> Any:
    if whole := _EXPRESSION.fullmatch(text):
        return evaluate(whole[1], context)
    return _EXPRESSION.sub(lambda match: str(evaluate(match[1], context)), text)


@dataclass(kw_only=True)
class Runner:
    """`store` is copied to the jobs that build; `jobs` are those that ran, with the cells of their part."""

    folder: Path
    project: Checkout
    origin: Path
    server: Server
    store: Path
    jobs: list[str] = field(default_factory=list)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def play(self, workflow: str, github: Mapping[str, Any], **variables: str) -> None:
        """Runs the jobs of a workflow for an event, one after another."""
        self.jobs.clear()
        (self.folder / "calls").unlink(missing_ok=True)
        done: dict[str, Any] = {}
        content = yaml.safe_load((ROOT / f".github/workflows/{workflow}.yml").read_text(encoding="utf-8"))
        for name, job in content["jobs"].items():
            needs = job.get("needs", [])
            needs = [needs] if isinstance(needs, str) else needs
            context = {"github": {**github, "token": TOKEN}, "vars": variables, "needs": done}
            if not done.keys() >= set(needs) or not evaluate(job.get("if", "'always'"), context):
                continue
            matrix = expand(job["strategy"]["matrix"], context)["include"] if "strategy" in job else [{}]
            for part in matrix:
                steps = self._job(name, job, {**context, "matrix": part})
                outputs = {key: expand(value, {"steps": steps}) for key, value in job.get("outputs", {}).items()}
                done[name] = {"outputs": outputs}

    def _job(self, name: str, job: Mapping[str, Any], context: Mapping[str, Any]) -> dict[str, Any]:
        """Runs the steps in a new folder; returns their outputs."""
        self.jobs.append(f"{name} {context['matrix'].get('cells', '')}".strip())
        place = self.folder / f"job-{len(list(self.folder.glob('job-*')))}"
        place.mkdir()
        if name.endswith("images"):  # saves making the operating system; a runner's store is empty
            shutil.copytree(self.store, place / "store", ignore=shutil.ignore_patterns("*.part", "*.whl"))
        steps: dict[str, Any] = {}
        for step in job["steps"]:
            if not evaluate(step.get("if", "'always'"), context):
                continue
            if "uses" in step:
                self._use(step, place / "checkout")
                continue
            variables = {**job.get("env", {}), **step.get("env", {})}
            environ = {key: str(expand(str(value), context)) for key, value in variables.items()}
            if environ.get("GPU_IMAGES_SIGN") == "keyless":  # Sigstore is not reachable
                environ["GPU_IMAGES_SIGN"] = str(self.folder / "key.key")
            # The cache of builds belongs to this machine.
            command = step["run"].replace(" PRUNE_CACHE=1", "")
            steps[step.get("id", "")] = {"outputs": self._run(command, step.get("shell", ""), place, environ)}
        return steps

    def _use(self, step: Mapping[str, Any], work: Path) -> None:
        action = step["uses"].partition("@")[0]
        if action == "actions/checkout":
            depth = ["--depth=1"] if step["with"].get("fetch-depth") != 0 else []
            git(work.parent, "clone", "-q", *depth, self.origin.as_uri(), str(work))
            (work / ".venv").mkdir()  # so that make finds the environment of this checkout
            (work / ".venv/bin").symlink_to(BUILDER.parent)
            (work / ".venv/.ready").touch()
        else:
            assert action in ("sigstore/cosign-installer", "actions/upload-artifact")

    def _run(self, command: str, shell: str, place: Path, environ: Mapping[str, str]) -> dict[str, str]:
        """Runs a command as GitHub does; returns the outputs of the step."""
        script, outputs = place / "script", place / "outputs"
        script.write_text(command, encoding="utf-8")
        outputs.write_text("", encoding="utf-8")
        bash = ["bash", "--noprofile", "--norc", "-eo", "pipefail"] if shell == "bash" else ["bash", "-e"]
        own = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
        inherited = {key: value for key, value in self.project.environ.items() if key not in own}
        mine = {
            "PATH": f"{self.folder}/bin:{inherited['PATH']}", "HOME": str(place), "DOCKER_CONFIG": f"{place}/docker",
            "DOCKER": shutil.which("docker") or "", "GPU_IMAGES_STORE": f"{place}/store", "COSIGN_PASSWORD": "",
            "CALLS": f"{self.folder}/calls", "BODY": f"{self.folder}/body.md", "UBUNTU": f"{self.folder}/ubuntu",
            "GITHUB_ACTOR": "somebody", "GITHUB_OUTPUT": str(outputs), "RUNNER_TEMP": str(place),
            "GITHUB_STEP_SUMMARY": f"{self.folder}/summary.md", "CI": "true",
        }  # fmt: skip
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", ON_UBUNTU, "sh", *bash, str(script)], cwd=place / "checkout",
            env={**inherited, **mine, **environ}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{self.jobs[-1]}: {command}\n{done.stdout}\n{done.stderr}"
        return dict(line.split("=", 1) for line in outputs.read_text(encoding="utf-8").splitlines())

    def tags(self) -> dict[str, str | None]:
        """Digests of the released images by tag."""
        name = ImageRef(registry=f"127.0.0.1:{self.server.port}", repository=f"{self.project.namespace}/ty-cpu")
        there = Registry(name, host=Host(), write=False)
        return {tag: there.digest_of(tag) for tag in there.list_tags() if not tag.startswith("sha256-")}


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(root: Path) -> str:
    """Commits and pushes everything; returns the commit."""
    git(root, "add", "--all")
    git(root, "-c", "user.name=t", "-c", "user.email=t@example.test", "commit", "-qm", "change")
    git(root, "push", "-q", "origin", "HEAD:main")
    return git(root, "rev-parse", "HEAD")
