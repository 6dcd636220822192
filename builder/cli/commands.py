"""The list of commands. The module of a command is imported when the command is used, as some take 0.3 s to import."""

from __future__ import annotations

import signal
from collections import UserDict
from importlib import import_module
from typing import Any

import click

# Command -> its module in builder.cli, and the first sentence of its help.
COMMANDS = {
    "build": ("images", "Build images, without testing or tagging them."),
    "clean": ("machine", "Remove test containers, untagged images and logs."),
    "diff": ("compare", "Show what changed from A to B, by package and bytes."),
    "doctor": ("machine", "Check whether this machine can build images."),
    "engine": ("engine", "Find a running Docker Engine, or install one."),
    "explain": ("explain", "Show whether a combination works, or which images run on a GPU."),
    "gc": ("machine", "Show the images in the store, and delete unused blobs."),
    "images": ("images", "Build, test and tag images."),
    "lock": ("lock", "Choose the exact wheels and Debian packages of CELLS."),
    "plan": ("plan", "Show what would be built: cells, tags, layers, sizes."),
    "push": ("release", "Publish images that passed their tests."),
    "refresh": ("refresh", "Apply Debian security updates: lock, build, test and stage."),
    "registry": ("registry", "Inspect the registry, and delete what is not needed."),
    "release": ("release", "Publish the staged release STAMP: sign it, then set its tags."),
    "render": ("render", "Write images/ from templates/ and locks/."),
    "scan": ("release", "Scan released images for vulnerabilities."),
    "stage": ("release", "Push images that passed their tests to staging, with the results."),
    "status": ("release", "Show how far each cell is on its way to a release."),
    "test": ("testing", "Run the tests of built or staged images."),
    "verify": ("verify", "Check the signature and contents of IMAGE against its plan."),
}


class Commands(UserDict[str, Any]):
    """The commands by name; reading one imports its module. Source: Click, "Lazily Loading Subcommands"."""

    def __getitem__(self, name: str) -> click.Command:
        module, _ = self.data[name]
        command = getattr(import_module(f"builder.cli.{module}"), f"{name}_command")
        assert isinstance(command, click.Command)
        # Replaces the handler of `builder.start`: an exception in the import of a compiled module shows a traceback.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return command


class Group(click.Group):
    """A group whose --help lists the commands without importing them."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, sentence) for name, (_, sentence) in COMMANDS.items()])
