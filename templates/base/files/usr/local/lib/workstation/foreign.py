"""Commands and variables of other images and platforms: the commands work; variables without effect cause a warning.

Sources: "Common features", "Selecting an image" and "Recipes" of the Jupyter Docker Stacks' documentation.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

from .refusal import Refusal

START = ("start.sh", "/usr/local/bin/start.sh")
NOTEBOOK = ("start-notebook.py", "start-notebook.sh")
HUB = ("start-singleuser.py", "start-singleuser.sh")
JUPYTER_ARGUMENTS = "JUPYTER_ARGUMENTS"  # for the run program of the service, one on each line
JUPYTER_LAB = "/usr/local/lib/jupyter-lab"
# Jupyter prints something and ends: it is no service.
PRINTS = {"-h", "--help", "--help-all", "--version", "--show-config", "--show-config-json", "--generate-config"}
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
}


def command(
    arguments: Sequence[str], environ: MutableMapping[str, str], services: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The command without a start script of Docker Stacks, and warnings. Raises Refusal if it cannot work."""
    words = list(arguments)
    if not words:
        return words, []
    name = words[0]
    if name in START:
        rest, notes = command(words[1:], environ, services)
        return rest, [f"{name} is not needed: `docker run IMAGE COMMAND ...` does the same", *notes]
    if name in HUB:
        raise Refusal(f"{name}: JupyterHub is not in this image: install it in a derived image")
    if name == "jupyter-lab" or words[:2] == ["jupyter", "lab"]:
        # Jupyter's own program does not enforce a login.
        return ([JUPYTER_LAB, *words[1 if name == "jupyter-lab" else 2 :]] if "jupyter" in services else words), []
    if name not in NOTEBOOK:
        return words, []
    if "jupyter" not in services:
        raise Refusal(f"{name}: JupyterLab is not in this image: use the variant jupyter or full")
    if PRINTS & set(words):
        return [JUPYTER_LAB, *words[1:]], []
    environ[JUPYTER_ARGUMENTS] = "\n".join(words[1:])
    return ["services"], [f"{name} is not needed: `docker run IMAGE` starts JupyterLab; it uses your arguments"]


def variables(environ: Mapping[str, str]) -> list[str]:
    """A warning for each variable of Docker Stacks that has no effect."""
    return [f"{name} has no effect here: {instead}" for name, instead in VARIABLES.items() if name in environ]
