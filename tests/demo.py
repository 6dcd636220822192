"""Runs two tiny images through the whole pipeline, to a release and a roll-back, and shows every command: `make demo`.

It uses this machine's Docker Engine, Debian's archives, a package index with tiny wheels and a registry, both on the
loopback and in a temporary folder. Only the programs cosign and docker-registry, from Debian's packages, stay.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.integration import checkout as checkouts
from tests.integration import fetched, leftovers, programs, wheels
from tests.integration import registry as registries
from tests.integration.checkout import OURS, PLAIN, ROOT, SHORT, Checkout
from tests.integration.index import Index


class Demo:
    """Machines with the same checkout, and a registry at `address`."""

    def __init__(self, builder: Checkout, folder: Path, address: str) -> None:
        self.builder, self.folder, self.address = builder, folder, address
        self.names = {str(folder): "...", builder.namespace: "org", address: "registry.example"}

    def say(self, text: str) -> None:
        for name, shown in self.names.items():
            text = text.replace(name, shown)
        print(text, flush=True)

    def run(self, machine: Checkout, *arguments: str, code: int = 0) -> None:
        """Runs `builder`, and shows the command and what it prints."""
        self.say(f"$ builder {shlex.join(arguments)}")
        for line in machine.builder(*arguments, code=code).splitlines():
            self.say(f"  {line}")

    def elsewhere(self) -> Checkout:
        """Another machine: the same checkout, an empty store, no results of tests."""
        root = self.folder / "other"
        shutil.copytree(self.builder.root, root, symlinks=True, ignore=shutil.ignore_patterns(".builder"))
        environ = {**self.builder.environ, "GPU_IMAGES_STORE": str(self.folder / "other-store")}
        return dataclasses.replace(self.builder, root=root, environ=environ)

    def play(self) -> None:
        here = self.builder
        self.say("\n# Lock exact wheels and Debian packages, render Dockerfiles, then build, test and tag.")
        for name in ("lock", "render", "images"):
            self.run(here, name)
        self.say("\n# Push what passed to staging, by digest, with signed results.")
        self.run(here, "stage", "--sign", str(self.folder / "key.key"))

        self.say("\n# Another machine, with an empty store, runs the missing tests: with a GPU, the GPU tests.")
        other = self.elsewhere()
        self.run(other, "test", "--staged", "newest", PLAIN, "--sign", str(self.folder / "key.key"))
        self.say(
            "\n# Images for GPUs need GPU tests to be released, unless an option allows it; the release records it."
        )
        self.run(other, "release", code=8)
        self.run(other, "release", "--allow-untested-gpu", "--sign", str(self.folder / "key.key"))
        self.run(other, "status")

        self.say("\n# Anyone can check the signature.")
        image = f"{self.address}/{here.references()[0]}"
        options = ["--key", "keys/key.pub", "--insecure-ignore-tlog=true", "--allow-http-registry", "--output=text"]
        command = ["cosign", "verify", *options, "-a", f"cell={PLAIN}", image]
        self.say(f"$ {shlex.join(command)}")
        subprocess.run(command, cwd=here.root, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        self.say("\n# Change one file: only its layer changes. Publish a second release on the same day.")
        notes = here.root / "templates/base/files/etc/notes"
        notes.write_text("changed\n", encoding="utf-8")
        for arguments in (["render"], ["images"], ["stage", "--sign", str(self.folder / "key.key")]):
            self.run(here, *arguments)
        self.run(here, "release", "--allow-untested-gpu", "--sign", str(self.folder / "key.key"))

        self.say("\n# Back to the first release, from its commit.")
        first = time.strftime("%Y%m%d", time.gmtime())
        self.run(other, "release", first, "--roll-back", "--allow-untested-gpu", "--sign", str(self.folder / "key.key"))
        self.say("\n# Delete what no image of the store uses.")
        self.run(here, "gc")


@contextmanager
def prepared() -> Iterator[Demo]:
    """The demo with everything around it; removes it at the end."""
    programs.install_from("trixie", "cosign")
    registries.install()
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
            folder / "checkout", namespace=namespace, release=release, index=index, environ=environ
        )
        stack.callback(builder.remove)
        builder.write_tests(SHORT)
        subprocess.run(
            ["cosign", "generate-key-pair", f"--output-key-prefix={folder}/key"],
            env={**os.environ, "COSIGN_PASSWORD": ""}, capture_output=True, check=True,
        )  # fmt: skip
        (builder.root / "keys").mkdir()
        shutil.move(folder / "key.pub", builder.root / "keys/key.pub")
        settings = f'registry: "{address}"\nstaging: {address}/staging\nevidence: [{{key: keys/key.pub}}]'
        builder.edit("matrix.yaml", 'registry: ""', settings)
        yield Demo(builder, folder, address)


def serve() -> None:
    """A registry on the loopback, whose data stays in .builder/registry, until Ctrl-C."""
    registries.install()
    folder = ROOT / ".builder/registry"
    folder.mkdir(parents=True, exist_ok=True)
    with registries.Server(folder=folder, fixed_port=5000).serving():
        print("registry running at 127.0.0.1:5000 (data in .builder/registry); press Ctrl-C to stop it", flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()


def main() -> None:
    began = time.monotonic()
    with prepared() as demo:
        demo.play()
        demo.say(f"\n# Done in {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["registry"] else main()
