"""Writes templates/*/prefetch.txt, the files that starting an image reads: python -m tools.prefetch CELL...

Nodes that mount the layers of an image download these files first, see docs/lazy.md. Each image starts in a container,
in which fanotify(7) reports the files that are opened. Give a `full` image of each operating system and framework.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import click

from builder.cli import SETTINGS, main
from builder.cli.context import Context
from builder.cli.options import debug_option
from builder.common.errors import BuildError
from builder.common.files import write_atomically
from builder.layers import stored_layers
from builder.layers.estargz import without_versions
from builder.layers.known_layers import KnownLayers
from builder.matrix.tags import PLAN_LABEL
from builder.plan import plan
from builder.plan.plan import PREFETCH, PlannedImage

# Runs in the image as root: starts its command as its user until its services answer, then a kernel if it has Jupyter.
_WATCH = """\
import ctypes, os, struct, subprocess, sys, threading, time

libc, opened = ctypes.CDLL(None, use_errno=True), set()
events = libc.fanotify_init(0, os.O_RDONLY)
ADD_MOUNT, FAN_OPEN, AT_FDCWD = 0x11, 0x20, -100
if events < 0 or libc.fanotify_mark(events, ADD_MOUNT, ctypes.c_uint64(FAN_OPEN), AT_FDCWD, b"/"):
    sys.exit(f"fanotify: {os.strerror(ctypes.get_errno())}")

def watch():
    while True:
        data, at = os.read(events, 1 << 16), 0
        while at < len(data):
            length, _, _, _, _, file, process = struct.unpack_from("=IBBHQii", data, at)
            at += length
            if file >= 0:
                if process != os.getpid():
                    opened.add(os.readlink(f"/proc/self/fd/{file}"))
                os.close(file)

threading.Thread(target=watch, daemon=True).start()
user = {"user": 1000, "group": 0, "extra_groups": [], "env": {**os.environ, "HOME": "/home/user"}}
image = subprocess.Popen(sys.argv[1:], stdout=sys.stderr, **user)
if sys.argv[-1] == "services":
    for _ in range(100):
        if not subprocess.run(["/usr/local/bin/check-services"], capture_output=True, **user).returncode:
            break
        time.sleep(0.2)
    else:
        sys.exit("the services of the image do not answer")
    if os.path.exists("/etc/services.d/jupyter"):
        subprocess.run(["jupyter", "run"], input=b"1 + 1", stdout=sys.stderr, check=True, **user)
    image.terminate()
elif image.wait():
    sys.exit(f"{sys.argv[1:]} failed")
time.sleep(0.5)
print("\\n".join(sorted(opened.copy())))
"""


@click.command(context_settings=SETTINGS)
@click.argument("patterns", metavar="CELL...", nargs=-1, required=True)
@click.option("--store", type=click.Path(path_type=Path), envvar="GPU_IMAGES_STORE", help="As that of builder.")
@debug_option
@click.pass_obj
def update_prefetch(context: Context, patterns: Sequence[str], store: Path | None) -> None:
    """Find the files that starting images reads, and write them to templates/*/prefetch.txt.

    The images must be built and in the engine. A path has `*` for each number, so it holds for other releases, too.
    Layers with these files change: build all images again, and commit locks/layers.json with the lists.
    """
    context.store_root = store
    project = context.project
    found: dict[str, set[str]] = {}
    for image in plan.make_plan(project, project.select(patterns)).images:
        click.echo(f"{image.id}: starting", err=True)
        command = image.settings.command if "services" in image.settings.command else ["python", "-c", "pass"]
        find = ["docker", "image", "ls", "--quiet", f"--filter=label={PLAN_LABEL}={image.plan}"]
        # It prints the id once for each tag.
        image_id = next(iter(subprocess.run(find, stdout=subprocess.PIPE, text=True, check=True).stdout.split()), "")
        if not image_id:
            raise BuildError(f"the engine does not have {image.id}", hint=f"Build it: builder build {image.id}")
        run = ["docker", "run", "--rm", "--cap-add=SYS_ADMIN", "--user=root", "--entrypoint=python", image_id]
        done = subprocess.run(
            [*run, "-c", _WATCH, *image.settings.entrypoint, *command], stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise BuildError(f"{image.id}: the container ended with status {done.returncode}")
        opened = {path.removeprefix("/") for path in done.stdout.splitlines()}
        for component, paths in _by_component(context, image, opened).items():
            click.echo(f"{image.id}: {len(paths)} files of {component}")
            found.setdefault(component, set()).update(paths)
    for component, paths in found.items():
        write_atomically(
            project.root / PREFETCH.format(component=component), "".join(f"{path}\n" for path in sorted(paths))
        )


def _by_component(context: Context, image: PlannedImage, opened: set[str]) -> dict[str, set[str]]:
    """The opened files by the component whose list has the files of their layer."""
    store, known = context.store, KnownLayers(context.project.root)
    by_inputs = {layer.inputs: layer for layer in image.layers}
    result: dict[str, set[str]] = {}
    for layer in image.layers:
        if layer.kind == "files":  # always prefetched
            continue
        stored = stored_layers.stored_layer(store, layer.inputs, known.get(layer.inputs))
        if stored is None:
            raise BuildError(f"{image.id}: the store does not have layer {layer.name}", hint="Build the image first.")
        wheels = [wheel for source in (layer, *map(by_inputs.get, layer.compiled)) if source for wheel in source.wheels]
        owners = {"base"} if layer.kind == "os" else {wheel.component for wheel in wheels if not wheel.is_cuda}
        files = {entry.name for entry in stored_layers.read_stored_toc(store, stored) if entry.type == "reg"}
        if owners and (hits := opened & files):
            owner = max(owners, key=image.components.index)
            result.setdefault(owner, set()).update(map(without_versions, hits))
    return result


if __name__ == "__main__":
    main(update_prefetch, Context())
