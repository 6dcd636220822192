"""Commands and variables of other images and platforms: the commands work; variables without effect cause a warning.

Sources: "Common features", "Selecting an image" and "Recipes" of the Jupyter Docker Stacks' documentation, and the
documentation of each platform.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from .refusal import Refusal

START = ("start.sh", "/usr/local/bin/start.sh")
NOTEBOOK = ("start-notebook.py", "start-notebook.sh")
HUB = ("start-singleuser.py", "start-singleuser.sh", "jupyterhub-singleuser", "jupyter-labhub")
HUB_VARIABLES = ("JUPYTERHUB_API_TOKEN", "JUPYTERHUB_SERVICE_URL")  # a JupyterHub sets them
SINGLE_USER = "/usr/local/bin/jupyterhub-singleuser"
SERVICES = "services"
JUPYTER_ARGUMENTS = "JUPYTER_ARGUMENTS"  # for the run program of the service, one on each line
JUPYTER_LAB = "/usr/local/lib/jupyter-lab"
# Jupyter prints something and ends: it is no service.
PRINTS = {"-h", "--help", "--help-all", "--version", "--show-config", "--show-config-json", "--generate-config"}
# With a value, in JUPYTER_ARGUMENTS; of IdentityProvider, ServerApp, NotebookApp, ...
TOKEN = re.compile(r"^(--\w+\.token)[=\n].", re.MULTILINE)
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
    # Of platforms.
    "PUBLIC_KEY": "it is of RunPod: set SSH_PUBLIC_KEY, in the variants ssh and full",
    "JUPYTER_PASSWORD": "it is of RunPod: set JUPYTER_TOKEN",
    "OPEN_BUTTON_TOKEN": "it is of Vast.ai: set JUPYTER_TOKEN",
    "PROVISIONING_SCRIPT": "it is of Vast.ai: use a hook, /etc/start.d/*.sh",
    "PAPERSPACE_FQDN": "it is of Paperspace: its notebooks need `jupyter lab ...` as the command of the container",
    "SAGEMAKER_APP_TYPE": "it is of SageMaker Studio, which needs JUPYTER_BASE_URL=/jupyterlab/default",
    "CODER_AGENT_TOKEN": "it is of Coder: its agent starts with the template's `entrypoint` or `command`",
}
HOMES = ("/home/jovyan", "/home/sagemaker-user")  # of other images; here, only a volume can be there


def command(
    arguments: Sequence[str], environ: MutableMapping[str, str], services: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The command that this image runs for that of Docker Stacks or of a JupyterHub, and warnings.

    Raises Refusal if it cannot work.
    """
    words = list(arguments)
    name = words[0] if words else SERVICES
    if name in START:
        rest, notes = command(words[1:], environ, services)
        return rest, [f"{name} is not needed: `docker run IMAGE COMMAND ...` does the same", *notes]
    has_jupyter = "jupyter" in services
    if name in (*NOTEBOOK, *HUB) and not has_jupyter:
        raise Refusal(f"{name}: JupyterLab is not in this image: use the variant jupyter or full")
    # A spawner without a command of its own passes the image's, and appends its arguments.
    is_in_hub = all(variable in environ for variable in HUB_VARIABLES)
    if is_in_hub and has_jupyter and name in (SERVICES, *NOTEBOOK, *HUB):
        return [SINGLE_USER, *words[1:]], []
    if name in HUB:
        raise Refusal(
            f"{name} needs the variables of the JupyterHub that starts it ({', '.join(HUB_VARIABLES)}): without a "
            "JupyterHub, give no command"
        )
    if name not in NOTEBOOK:
        return words, []
    if PRINTS & set(words):
        return [JUPYTER_LAB, *words[1:]], []
    environ[JUPYTER_ARGUMENTS] = "\n".join(words[1:])
    if match := TOKEN.search(environ[JUPYTER_ARGUMENTS]):
        raise Refusal(f"{name}: everyone in the container can read the value of {match[1]}: set JUPYTER_TOKEN instead")
    return [SERVICES], [f"{name} is not needed: `docker run IMAGE` starts JupyterLab; it uses your arguments"]


def homes() -> list[str]:
    """A warning for each volume that is at the home of other images: files elsewhere are lost with the container."""
    return [
        f"{home} is not the home here: mount it at /home/user or /workspace" for home in HOMES if Path(home).exists()
    ]


def variables(environ: Mapping[str, str]) -> list[str]:
    """A warning for each variable of Docker Stacks or of a platform that has no effect."""
    return [f"{name} has no effect here: {instead}" for name, instead in VARIABLES.items() if name in environ]
