"""Measures `builder add` from registry to registry, against a Dockerfile with `FROM` and `RUN pip install`, and a push.

The parent is an image of the store: python -m benchmarks.add org/jax-cpu:0.10.2-cpu-py311. The registry is on the
loopback, and has it. `builder add` begins with an empty store; Docker has pulled the parent before, and it keeps no
cache of its builds. Both download the same wheels from the index of this machine.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.common import BUILDER, NAMESPACE, PORT, Results, registry
from builder.common.reference import ImageRef
from builder.common.text import duration, size
from builder.index import host
from builder.index.host import Host
from builder.layers import oci, stored_images
from builder.layers.oci import Layer
from builder.layers.store import Store
from builder.registry import transfer
from builder.registry.client import Repository

PACKAGES = ("opencv-python-headless", "pandas", "scikit-learn", "pillow", "lxml", "regex", "einops", "tqdm")
PARENT = f"127.0.0.1:{PORT}/{NAMESPACE}/parent"
ADD, DOCKER = "builder add", "FROM, RUN pip install, and docker push"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parent", help="the name of an image in the store")
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--store", type=Path, default=Path.home() / ".cache/gpu-images")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    results = Results()
    with tempfile.TemporaryDirectory(prefix="builder-bench-") as folder, registry(Path(folder) / "registry"):
        push_parent(Store(options.store), options.parent)
        docker("pull", "-q", f"{PARENT}:1")
        try:
            for number in range(options.runs):
                measure(results, Path(folder), options.packages, number)
        finally:
            docker("image", "rm", "-f", f"{PARENT}:1")
    for name in (ADD, DOCKER):
        print(f"{name}: {duration(results.median(name))} (median of {len(results.times[name])})")
    print("\n".join([*results.facts, f"ratio: {results.median(DOCKER) / results.median(ADD):.1f}"]))


def push_parent(store: Store, name: str) -> None:
    image = stored_images.read_stored_image(store, store.images()[name].digest)
    files = {blob: store.path(blob.digest) for blob in (image.config, *(layer.descriptor for layer in image.layers))}
    repository = Repository(ImageRef.parse(PARENT), host=Host(), write=True)
    transfer.send_blobs(repository, files)
    repository.put_manifest("1", image.manifest.content, image.manifest.media_type)


def read_added(target: str) -> tuple[list[str], list[Layer]]:
    """The file names of the wheels, and the layers, that an image has above its parent."""
    images = []
    for name in (f"{PARENT}:1", target):
        repository = Repository(ImageRef.parse(name), host=Host(), write=False)
        manifest = repository.manifest(ImageRef.parse(name).tag)
        assert manifest
        images.append(oci.read_image(manifest.content, repository.read_blob))
    parent, added = images
    contents = [oci.parse_history(line) for line in added.history[len(parent.layers) :]]
    wheels = [file for content in contents if content for file, _ in content.wheels]
    return wheels, list(added.layers[len(parent.layers) :])


def measure(results: Results, folder: Path, packages: list[str], number: int) -> None:
    """One run of each, with the same versions: those that `add` chose."""
    store, target = folder / "store", f"127.0.0.1:{PORT}/{NAMESPACE}/added"
    shutil.rmtree(store, ignore_errors=True)
    command = [BUILDER, "--store", str(store), "add", f"{PARENT}:1", *packages, "-t", f"{target}:{number}"]
    with results.timed(ADD):
        subprocess.run(command, cwd=folder, capture_output=True, check=True)
    wheels, layers = read_added(f"{target}:{number}")
    if not number:
        results.facts.append(f"{len(wheels)} wheels, {size(sum(layer.size for layer in layers))}")

    context = folder / "context"
    context.mkdir(exist_ok=True)
    settings = host.read_host()
    (context / "ca.crt").write_bytes(settings.ca)
    variables = settings.index.for_builds()
    certificate = "--cert /mnt/ca.crt " if settings.ca else ""
    pins = [f"{wheel.split('-')[0]}=={wheel.split('-')[1]}" for wheel in wheels]
    (context / "Dockerfile").write_text(
        f"FROM {PARENT}:1\n"
        + "".join(f"ARG {name}\n" for name in variables)
        + f"RUN --mount=type=bind,source=ca.crt,target=/mnt/ca.crt pip install -q --no-cache-dir --no-compile "
        f"{certificate}{' '.join(pins)}\n",
        encoding="utf-8",
    )
    arguments = [f"--build-arg={name}={value}" for name, value in variables.items()]
    reference = f"127.0.0.1:{PORT}/{NAMESPACE}/built:{number}"
    try:
        with results.timed(DOCKER):
            docker("build", "-q", "--no-cache", "--network=host", *arguments, "-t", reference, str(context))
            docker("push", "-q", reference)
    finally:
        docker("image", "rm", "-f", reference)


def docker(*arguments: str) -> None:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    if done.returncode and arguments[0] != "image":
        raise SystemExit(f"docker {arguments[0]} failed:\n{done.stderr}")


if __name__ == "__main__":
    main()
