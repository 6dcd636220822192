"""The layer of Debian packages that `add` puts on an image.

An ordinary container, without the network, has the operating system of the image. apt installs the locked packages in
it, from files; what has changed then is the layer. So the scripts of packages can do no more than those of any image.
"""

from __future__ import annotations

import io
import tarfile
import time
from collections import deque
from tempfile import TemporaryFile

from builder.common.console import Meter
from builder.common.errors import BuildError
from builder.common.files import digest_of_data
from builder.debian import apt, local_repository
from builder.debian.archives import Archives, DebianFetcher
from builder.debian.os_lock import OsLock, OsRequest
from builder.engine.load import Loader
from builder.engine.run import Run
from builder.layers import estargz, os_layer, stored_layers
from builder.layers.installed import DPKG
from builder.layers.oci import Layer
from builder.layers.store import BLOBS, Store
from builder.plan.layer_order import LAYER_FORMAT, MTIME, PlannedLayer
from builder.registry import transfer
from builder.release.image_sources import RegistrySource
from builder.release.parent import Parent

SCRIPT = "templates/add-packages.sh"
TIMEOUT_S = 3600
# The script leaves them out.
_LEFT_OUT = {
    *estargz.RESERVED, "dev", "proc", "sys", "mnt", "etc/hostname", "etc/hosts", "etc/mtab", "etc/resolv.conf"
}  # fmt: skip


def resolve_packages(run: Run, parent: Parent, packages: tuple[str, ...]) -> OsLock:
    """The newest packages that apt would install in an image. Raises LockError, also if it would replace one."""
    request = OsRequest(debian=parent.debian_release, packages=packages, arch=parent.arch)
    status = parent.read_file(DPKG).decode("utf-8", "replace")
    with apt.archive(request.debian, run.host, run.view.say, request.arch, status) as archive:
        return archive.resolve(request, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()))


def make_layer(run: Run, store: Store, parent: Parent, lock: OsLock, name: str) -> tuple[PlannedLayer, Layer]:
    """The layer of locked packages for the image `name`, from the store or made now.

    The same operating system and lock give the same bytes. Raises BuildError, EngineError, FetchError.
    """
    script = run.project.path(SCRIPT).read_bytes()
    inputs = digest_of_data(
        {
            "format": LAYER_FORMAT,
            "below": list(parent.systems),
            "script": script.decode(),
            "packages": [[package.file, package.sha256] for package in lock.packages],
        }
    )
    planned = PlannedLayer(kind="apt", name=" ".join(lock.requested), component="apt", inputs=inputs)
    if stored := stored_layers.stored_layer(store, inputs):
        return planned, stored

    row, systems = f"apt-{parent.arch}", list(parent.systems.values())
    run.view.begin(row, "downloading packages")
    if isinstance(parent.source, RegistrySource):
        layers = [layer.descriptor for layer in systems]
        transfer.fetch_blobs(parent.source.repository, store, layers, Meter(run.view, row, "downloaded", 0).add)
    debs = DebianFetcher(
        Archives(run.project.matrix, run.host, run.view.say_once),
        lock,
        "",
        store.root / BLOBS,
        store.downloads,
        progress=Meter(run.view, row, "downloaded", sum(package.size for package in lock.packages)).add,
    ).fetch_all()

    run.view.begin(row, "installing packages")
    image_id = Loader(run.engine, store, str(store.root), run.view.say).load_bare(*systems)
    output: deque[str] = deque(maxlen=8)
    with TemporaryFile() as files, TemporaryFile() as root, store.new_blob() as blob:
        with tarfile.open(fileobj=files, mode="w") as tar:
            index = {f"debs/{file}": content for file, content in local_repository.index(lock, debs).items()}
            for path, content in {"add-packages.sh": script, **index}.items():
                info = tarfile.TarInfo(f"mnt/{path}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            for package in lock.packages:
                tar.add(debs[package.sha256], f"mnt/debs/{package.file}")
        files.seek(0)
        status = run.engine.run_to_file(
            image_id,
            checkout=str(store.root),
            command=["sh", "/mnt/add-packages.sh", *lock.requested],
            files=files,
            result="/mnt/root.tar",
            out=root,
            on_line=output.append,
            timeout_s=TIMEOUT_S,
            network_mode="none",
            environment={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SOURCE_DATE_EPOCH": str(MTIME)},
        )
        if status:
            lines = "".join(f"  | {line}" for line in output)
            raise BuildError(f"{name}: apt ended with status {status} in a container of the parent\n{lines}")
        root.seek(0)
        below = {
            path: entry
            for layer, toc in zip(parent.image.layers, parent.tocs, strict=True)
            for entry in (toc if layer in systems else ())
            if entry.type != "chunk" and not {path := entry.name.rstrip("/"), path.partition("/")[0]} & _LEFT_OUT
        }
        try:
            written = os_layer.write_system(root, blob.file, below=below)
        except (BuildError, tarfile.TarError) as error:
            raise BuildError(f"{name}: {error}") from error
        blob.digest = written.digest
    store.put_record(inputs, written.as_record())
    run.view.end(row, "done", "")
    return planned, written
