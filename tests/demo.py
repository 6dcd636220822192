"""Runs two tiny images through the whole pipeline, to a release and a roll-back, and shows every command: `make demo`.

`python -m tests.demo picture FILE` also draws the picture of docs/pipeline.md, of each command and its last line.

It uses this machine's Docker Engine, Debian's archives, a package index with tiny wheels and a registry, both on the
loopback and in a temporary folder. Only the programs cosign and docker-registry, from Debian's packages, stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.text import Text

from tests import pictures
from tests.integration import checkout as checkouts
from tests.integration import fetched, leftovers, programs, wheels
from tests.integration import registry as registries
from tests.integration.checkout import OURS, PLAIN, ROOT, SHORT, Checkout
from tests.integration.index import Index


class Demo:
    """Machines with the same checkout, and a registry at `address`."""

    def __init__(self, builder: Checkout, folder: Path, address: str) -> None:
        self.builder, self.folder, self.address = builder, folder, address
        self.picture: dict[str, tuple[str, str]] = {}  # the first run of a command that succeeded, and its last line
        self.names = {
            f"{folder}/checkout/": "",
            f"{folder}/": "",
            str(folder): "...",
            builder.namespace: "org",
            address: "registry.example",
        }

    def say(self, text: str) -> None:
        print(self.shown(text), flush=True)

    def draw(self, path: Path) -> None:
        """Writes a picture of the commands, each with its last line."""
        lines = []
        for command, summary in self.picture.values():
            lines.append(Text(f"$ builder {self.shown(command)}", style="bold green"))
            lines.append(Text(self.shown(summary)))
        pictures.draw(lines, "make demo, with two tiny images", path)

    def shown(self, text: str) -> str:
        """A text without what differs from run to run."""
        for name, shown in self.names.items():
            text = text.replace(name, shown)
        return text

    def run(self, machine: Checkout, *arguments: str, code: int = 0) -> None:
        """Runs `builder`, and shows the command and what it prints."""
        self.say(f"$ builder {shlex.join(arguments)}")
        lines = machine.builder(*arguments, code=code).splitlines()
        for line in lines:
            self.say(f"  {line}")
        summaries = [line for line in lines if line.strip() and not line.startswith(("  ", "total time"))]
        if code == 0 and arguments[0] not in ("render", "status", "prune", "gc"):
            self.picture.setdefault(arguments[0], (shlex.join(arguments), summaries[-1]))

    def elsewhere(self) -> Checkout:
        """Another machine: the same checkout, an empty store, no results of tests."""
        root = self.folder / "other"
        shutil.copytree(self.builder.root, root, symlinks=True, ignore=shutil.ignore_patterns(".builder"))
        environ = {**self.builder.environ, "GPU_IMAGES_STORE": str(self.folder / "other-store")}
        return dataclasses.replace(self.builder, root=root, environ=environ)

    def play(self) -> None:
        here, sign = self.builder, ("--sign", str(self.folder / "key.key"))
        self.say("\n# Lock exact wheels and Debian packages, render Dockerfiles, then build, test and tag.")
        for name in ("lock", "render", "images"):
            self.run(here, name)
        self.say("\n# Push what passed to staging, by digest, with signed results.")
        self.run(here, "stage", *sign)

        self.say("\n# Another machine, with an empty store, runs the missing tests: with a GPU, the GPU tests.")
        other = self.elsewhere()
        self.run(other, "test", "--staged", "newest", PLAIN, *sign)
        self.say(
            "\n# Images for GPUs need GPU tests to be released, unless an option allows it; the release records it."
        )
        self.run(other, "release", code=8)
        self.run(other, "release", "--allow-untested-gpu", *sign)
        self.run(other, "status")

        self.say("\n# Whoever uses an image can check it, without a checkout.")
        image = f"{self.address}/{here.references()[0]}"
        consumer = dataclasses.replace(other, root=self.folder)
        self.run(consumer, "verify", image, "--key", str(here.root / "keys/key.pub"))

        self.say("\n# Change one file: only its layer changes. Publish a second release on the same day.")
        notes = here.root / "templates/base/files/etc/notes"
        notes.write_text("changed\n", encoding="utf-8")
        for arguments in (["render"], ["images"], ["stage", *sign]):
            self.run(here, *arguments)
        self.run(here, "release", "--allow-untested-gpu", *sign)

        self.say("\n# Take the newest Debian packages: images without newer ones are left as they are.")
        self.run(here, "refresh", *sign)

        self.say("\n# Delete what is not needed in staging, such as the first release.")
        self.run(here, "prune", "--keep", "1", "--delete")

        self.say("\n# Back to the first release, from its commit.")
        first = time.strftime("%Y%m%d", time.gmtime())
        self.run(other, "release", first, "--roll-back", "--allow-untested-gpu", *sign)
        self.run(here, "gc")


@contextmanager
def prepared() -> Iterator[Demo]:
    """The demo with everything around it; removes it at the end."""
    programs.install_from("trixie", "cosign")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="demo-")))
        index = stack.enter_context(Index().serving())
        index.publish(*fetched.common(), wheels.cuda(), wheels.driver_library())
        server = stack.enter_context(registries.Server(folder=folder / "registry").serving())
        address = f"127.0.0.1:{server.port}"
        environ = {name: value for name, value in os.environ.items() if not name.startswith(OURS)} | {
            "UV_DEFAULT_INDEX": index.url,
            "PIP_INDEX_URL": index.url,
            "UV_CACHE_DIR": str(folder / "uv-cache"),
            "GPU_IMAGES_STORE": str(folder / "store"),
            "DOCKER_CONFIG": str(folder / "docker"),
            "COSIGN_PASSWORD": "",
            "COLUMNS": "160",
        }
        namespace = leftovers.namespace(secrets.token_hex(4))
        release = f"1.0.{secrets.randbelow(9000)}"
        builder = checkouts.make(
            folder / "checkout", namespace=namespace, release=release, extra=release, index=index, environ=environ
        )
        stack.callback(builder.remove)
        builder.write_tests(SHORT)
        subprocess.run(
            ["cosign", "generate-key-pair", f"--output-key-prefix={folder}/key"],
            env={**os.environ, "COSIGN_PASSWORD": ""}, capture_output=True, check=True,
        )  # fmt: skip
        (builder.root / "keys").mkdir()
        shutil.move(folder / "key.pub", builder.root / "keys/key.pub")
        settings = f'registry: "{address}"\nevidence: [{{key: keys/key.pub}}]'
        builder.edit("matrix.yaml", 'registry: ""', settings)
        yield Demo(builder, folder, address)


def serve() -> None:
    """A registry on the loopback, whose data stays in .builder/registry, until Ctrl-C."""
    folder = ROOT / ".builder/registry"
    folder.mkdir(parents=True, exist_ok=True)
    with registries.Server(folder=folder, fixed_port=5000).serving():
        print("registry running at 127.0.0.1:5000 (data in .builder/registry); press Ctrl-C to stop it", flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()


def play(pictures: Sequence[Path]) -> None:
    began = time.monotonic()
    with prepared() as demo:
        demo.play()
        demo.say(f"\n# Done in {time.monotonic() - began:.0f} s.")
        for path in pictures:
            demo.draw(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("registry", help="only start a registry on the loopback, and wait for Ctrl-C")
    picture = commands.add_parser("picture", help="also draw the picture of the README")
    picture.add_argument("file", type=Path)
    options = parser.parse_args()
    if options.command == "registry":
        serve()
    else:
        play([options.file] if options.command == "picture" else [])


if __name__ == "__main__":
    main()
