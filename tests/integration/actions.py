"""A faked runner of GitHub Actions, which runs the commands of the workflows in order.

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
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
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
USER = 1001  # the user and group id of GitHub's `runner`
SOCKET = Path("/var/run/docker.sock")
DISK = 14 << 30
FAKES = {
    "sudo": 'echo "sudo $*" >>"$CALLS"\ncase $* in *mmdebstrap*) touch "$PLACE/installed" ;; esac\n',
    "docker": '[ "$1" = login ] || exec "$DOCKER" "$@"\necho "docker $*: $(cat)" >>"$CALLS"\n',
    "gh": 'echo "gh $*" | sed "s, /.*/, ," >>"$CALLS"\n'
    'case "$1 $2" in "pr list") echo 0 ;; "pr create") for body; do :; done; cp "$body" "$BODY" ;; esac\n',
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
            "format": "format",
            "always": "always",
            "(": "(",
            ")": ")",
            "==": "==",
            "!=": "!=",
        }
        return token[0] if token[0][0] == "'" else known.get(token[0], f"value({token[0]!r})")

    functions = {"loads": json.loads, "format": str.format, "always": lambda: True}
    return eval(_TOKEN.sub(python, expression.strip()), {"value": value, **functions})


def expand(text: str, context: Mapping[str, Any]) -> Any:
    if whole := _EXPRESSION.fullmatch(text):
        return evaluate(whole[1], context)
    return _EXPRESSION.sub(lambda match: str(evaluate(match[1], context)), text)


@dataclass(kw_only=True)
class Runner:
    """`folder` belongs to the user of the steps, and has a disk for each job: `job-0.ext4`.

    `store` is copied to the jobs that build; None: they begin with an empty one. `jobs` are those that ran, with the
    cells of their part.
    """

    folder: Path
    project: Checkout
    origin: Path
    server: Server
    store: Path | None
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
        """Runs the steps on a new disk; returns their outputs."""
        self.jobs.append(f"{name} {context['matrix'].get('cells', '')}".strip())
        place = self.new_disk()
        self.run_as_user(place, ["mkdir", "tmp"])
        if name.endswith("images") and self.store:  # saves making the operating system; a runner's store is empty
            self.run_as_user(place, ["cp", "-R", str(self.store), "store"])
        steps: dict[str, Any] = {}
        for step in job["steps"]:
            if not evaluate(step.get("if", "'always'"), context):
                continue
            if "uses" in step:
                self._use(step, place)
                continue
            variables = {**job.get("env", {}), **step.get("env", {})}
            environ = {key: str(expand(str(value), context)) for key, value in variables.items()}
            if environ.get("GPU_IMAGES_SIGN") == "keyless":  # Sigstore is not reachable
                environ["GPU_IMAGES_SIGN"] = str(self.folder / "key.key")
            # The cache of builds belongs to this machine.
            command = step["run"].replace(" --prune-cache", "")
            steps[step.get("id", "")] = {"outputs": self._run(command, step.get("shell", ""), place, environ)}
        return steps

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

    def _use(self, step: Mapping[str, Any], place: Path) -> None:
        action = step["uses"].partition("@")[0]
        if action == "actions/checkout":
            depth = ["--depth=1"] if step["with"].get("fetch-depth") != 0 else []
            self.run_as_user(place, ["git", "config", "--global", "safe.directory", "*"])
            self.run_as_user(place, ["git", "clone", "-q", *depth, self.origin.as_uri(), "checkout"])
            # So that the steps find the environment of this checkout.
            ready = f"mkdir .venv && ln -s {BUILDER.parents[1]}/* .venv && touch .venv/.ready"
            self.run_as_user(place, ["sh", "-c", f"cd checkout && {ready}"])
        else:
            assert action in ("sigstore/cosign-installer", "actions/upload-artifact")

    def _run(self, command: str, shell: str, place: Path, environ: Mapping[str, str]) -> dict[str, str]:
        """Runs a command as GitHub does; returns the outputs of the step."""
        script, outputs = self.folder / "script", self.folder / "outputs"
        script.write_text(command, encoding="utf-8")
        outputs.write_text("", encoding="utf-8")
        outputs.chmod(0o666)
        bash = ["bash", "--noprofile", "--norc", "-eo", "pipefail"] if shell == "bash" else ["bash", "-e"]
        self.run_as_user(place, [*bash, str(script)], what=command, FOLDER="checkout", **environ)
        return dict(line.split("=", 1) for line in outputs.read_text(encoding="utf-8").splitlines())

    def run_as_user(self, place: Path, command: Sequence[str], what: str = "", **environ: str) -> str:
        """Runs a command as the user of the steps, with the disk of a job; returns its output. `what` describes it."""
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
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", ON_RUNNER, "sh", *command],
            env={**inherited, **variables, **environ}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{self.jobs[-1:]}: {what or command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def files(self, pattern: str, job: int = 0) -> list[str]:
        """The contents of files on the disk of a job."""
        loop = f'for file in {pattern}; do cat "$file"; printf "\\0"; done'
        return self.run_as_user(self.folder / f"job-{job}", ["sh", "-c", loop]).split("\0")[:-1]

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
