"""Commands and variables of other images and platforms: the commands work; variables without effect cause a warning.

Sources: "Common features", "Selecting an image" and "Recipes" of the Jupyter Docker Stacks' documentation, and the
documentation of each platform.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from pathlib import Path

from .refusal import Refusal

START = "start.sh"
NOTEBOOK = ("start-notebook.py", "start-notebook.sh")
HUB = ("start-singleuser.py", "start-singleuser.sh", "jupyterhub-singleuser", "jupyter-labhub")
LAB = "jupyter-lab"
# Docker Stacks' and this image's folders of programs. `./start.sh` and `/workspace/start.sh` are programs of the user.
FOLDERS = ("", "/usr/local/bin/", "/opt/conda/bin/", "/opt/venv/bin/")
HUB_VARIABLES = ("JUPYTERHUB_API_TOKEN", "JUPYTERHUB_SERVICE_URL")  # a JupyterHub sets them
SERVICES = "services"
JUPYTER_ARGUMENTS = "JUPYTER_ARGUMENTS"  # for the run program of the service, one on each line
JUPYTER_LAB = "/usr/local/lib/jupyter-lab"  # checks its login, whatever its configuration
SINGLE_USER = "/usr/local/bin/jupyterhub-singleuser"
SERVERS = (JUPYTER_LAB, SINGLE_USER)
# With these arguments, Jupyter prints a text and ends: no service is needed.
PRINTS = {"-h", "--help", "--help-all", "--version", "--show-config", "--show-config-json", "--generate-config"}
# With a value, in JUPYTER_ARGUMENTS; of IdentityProvider, ServerApp, NotebookApp, ...
TOKEN = re.compile(r"^(--?[\w.]+\.token)[=\n].", re.MULTILINE)
VARIABLES = {
    "NB_USER": "the user's name is fixed: NB_UID and NB_GID set the user's ids",
    "NB_GROUP": "the group's name is fixed: NB_GID sets its id",
    "NB_UMASK": "call `umask` in a hook: /etc/start.d/*.sh",
    "GRANT_SUDO": "there is no sudo: install Debian packages in a derived image, or with `docker exec -u root`",
    "CHOWN_EXTRA": "change owners on the host, or in a hook of a container that stays root",
    "CHOWN_HOME_OPTS": "there are no options: CHOWN_HOME=1 changes the owners in the home",
    "JUPYTER_ENABLE_LAB": "JupyterLab always runs",
    "DOCKER_STACKS_JUPYTER_CMD": "JupyterLab always runs",
    "NOTEBOOK_ARGS": "pass them after the image: `docker run ... IMAGE start-notebook.py --ServerApp.x=y`",
    "RESTARTABLE": "a service that ends is always restarted",
    "JUPYTER_ENV_VARS_TO_UNSET": "unset them in a hook: /etc/start.d/*.sh",
    "PROVISIONING_SCRIPT": "it is of Vast.ai: use a hook, /etc/start.d/*.sh",
}
# Platforms set these by themselves. By name: the platform, and the variables of this image that replace it.
PLATFORMS = {
    "JUPYTER_PASSWORD": ("RunPod", ("JUPYTER_TOKEN", "JUPYTER_TOKEN_FILE")),
    "OPEN_BUTTON_TOKEN": ("Vast.ai", ("JUPYTER_TOKEN", "JUPYTER_TOKEN_FILE")),
    "PUBLIC_KEY": ("RunPod", ("SSH_PUBLIC_KEY", "SSH_PUBLIC_KEYS_FILE")),
}
# Others may use the same name: only with this variable, it is the platform's.
MARKERS = {"PUBLIC_KEY": "RUNPOD_POD_ID"}
HOMES = ("/home/jovyan", "/home/sagemaker-user")  # of other images


def command(
    arguments: Sequence[str], environ: MutableMapping[str, str], services: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The command that this image runs for that of Docker Stacks or of a JupyterHub, and warnings.

    Raises Refusal if it cannot work.
    """
    words = list(arguments)
    name, rest = _program(words)
    if name == START:
        replaced, notes = command(rest, environ, services)
        return replaced, [f"{name} is not needed: `docker run IMAGE COMMAND ...` does the same", *notes]
    has_jupyter = "jupyter" in services
    if name in (*NOTEBOOK, *HUB) and not has_jupyter:
        raise Refusal(f"{name}: JupyterLab is not in this image: use the variant jupyter or full")
    # A spawner without a command of its own passes the image's, and appends its arguments.
    is_in_hub = all(environ.get(variable) for variable in HUB_VARIABLES)
    if is_in_hub and has_jupyter and name in (SERVICES, LAB, *NOTEBOOK, *HUB):
        return [SINGLE_USER, *rest], []
    if name in HUB:
        raise Refusal(
            f"{name} needs the variables of the JupyterHub that starts it ({', '.join(HUB_VARIABLES)}): without a "
            "JupyterHub, give no command"
        )
    if name == LAB and has_jupyter:
        return [JUPYTER_LAB, *rest], []
    if name not in NOTEBOOK:
        return words, []
    if PRINTS & set(rest):
        return [JUPYTER_LAB, *rest], []
    environ[JUPYTER_ARGUMENTS] = "\n".join(rest)
    if match := TOKEN.search(environ[JUPYTER_ARGUMENTS]):
        raise Refusal(f"{name}: everyone in the container can read the value of {match[1]}: set JUPYTER_TOKEN instead")
    return [SERVICES], [f"{name} is not needed: `docker run IMAGE` starts JupyterLab; it uses your arguments"]


def _program(words: Sequence[str]) -> tuple[str, list[str]]:
    """The name of the program that is run, and its arguments: `jupyter lab` is `jupyter-lab`."""
    path, *rest = words or [SERVICES]
    folder, slash, name = path.rpartition("/")
    if folder + slash not in FOLDERS:
        return path, rest
    if name == "jupyter" and rest and f"jupyter-{rest[0]}" in (LAB, *HUB):
        return f"jupyter-{rest[0]}", rest[1:]
    return name, rest


def homes(mounts: str | None = None) -> list[str]:
    """A warning for each volume in the home of other images: files elsewhere are lost with the container.

    `mounts` are the lines of /proc/self/mountinfo; the fifth word of each is a folder. Source: proc(5).
    """
    lines = (Path("/proc/self/mountinfo").read_text() if mounts is None else mounts).splitlines()
    folders = [line.split()[4] for line in lines]
    return [
        f"{folder} is not in the home here: mount it at /home/user or /workspace"
        for folder in folders
        if f"{folder}/".startswith(tuple(f"{home}/" for home in HOMES))
    ]


def variables(environ: Mapping[str, str], known: Collection[str]) -> list[str]:
    """A warning for each variable of Docker Stacks or of a platform that has no effect. `known` are the image's own.

    One that a platform sets causes none if a variable is set that replaces it, or if the image has no such variable.
    """
    given = {name for name, value in environ.items() if value}
    warnings = [f"{name} has no effect here: {instead}" for name, instead in VARIABLES.items() if name in given]
    return warnings + [
        f"{name} has no effect here: it is of {platform}: set {ours[0]}"
        for name, (platform, ours) in PLATFORMS.items()
        if {name, MARKERS.get(name, name)} <= given and ours[0] in known and not given & {*ours}
    ]
