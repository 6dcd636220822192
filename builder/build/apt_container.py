"""Runs apt in a container of the newest Debian release, for machines without Debian's apt, keys or archives."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from builder.build.operating_systems import Mmdebstrap
from builder.debian.apt import AptRunner
from builder.engine.run import Run
from builder.index.host import RunProgram

TIMEOUT_S = 300


class ContainerApt(AptRunner):
    """Runs apt in a container of the engine of a run."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.view)
        self._run = run

    @contextmanager
    def container(self) -> Iterator[RunProgram]:
        """Starts a container; yields a function that runs programs in it, with the parameters of subprocess.run.

        The folder of `$APT_CONFIG`, with the files that apt reads, is copied to the same path at the first use. apt's
        lists of packages stay in the container. Raises EngineError if there is no engine, or no image of Debian.
        """
        project, host = self._run.project, self._run.host
        image = Mmdebstrap(self._run).base_image(project.matrix.newest_debian)
        copied: set[Path] = set()
        network, checkout = host.network or None, str(project.root)
        with self._run.engine.running(image, checkout=checkout, network_mode=network) as container:

            def run(
                command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = TIMEOUT_S, **_: object
            ) -> subprocess.CompletedProcess[str]:
                environment = {name: value for name, value in (env or {}).items() if name != "PATH"}
                folder = Path(environment["APT_CONFIG"]).parent if "APT_CONFIG" in environment else None
                if folder and folder not in copied:
                    archive = io.BytesIO()
                    with tarfile.open(fileobj=archive, mode="w") as tar:
                        tar.add(folder)
                    archive.seek(0)
                    container.put(archive)
                    copied.add(folder)
                return container.run(command, environment, timeout)

            yield run
