"""Podman as the engine, by its API for Docker's clients, with a store of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from builder.index import host
from tests.integration.checkout import PLAIN, SHORT, Checkout, until
from tests.integration.conftest import NewCheckout
from tests.integration.programs import install

pytestmark = pytest.mark.skipif(not host.is_debian(), reason="only on Debian, whose Podman is installed here")


# Podman raises the limits of processes, which root may not do in some sandboxes. Runs runc without them; crun refuses
# machines with both versions of cgroups.
RUNTIME = """\
#!/usr/bin/python3
import json, os, sys
for option, name in (("--bundle", "/config.json"), ("-b", "/config.json"), ("--process", ""), ("-p", "")):
    if option in sys.argv:
        path = sys.argv[sys.argv.index(option) + 1] + name
        with open(path) as file:
            data = json.load(file)
        data.get("process", data).pop("rlimits", None)
        with open(path, "w") as file:
            json.dump(data, file)
os.execvp("runc", ["runc", *sys.argv[1:]])
"""


@pytest.fixture(scope="module")
def podman() -> Iterator[list[str]]:
    """The command of a Podman with a store of its own, whose API is served."""
    install("podman")
    with TemporaryDirectory(prefix="podman-") as folder:
        command = ["podman", "--root", f"{folder}/root", "--runroot", f"{folder}/run", "--tmpdir", f"{folder}/tmp"]
        runtime, settings = Path(folder) / "runtime", Path(folder) / "containers.conf"
        runtime.write_text(RUNTIME)
        runtime.chmod(0o755)
        settings.write_text(f'[engine]\nruntime = "limitless"\n[engine.runtimes]\nlimitless = ["{runtime}"]\n')
        service = subprocess.Popen(
            [*command, "system", "service", "--time", "0", f"unix://{folder}/api.sock"],
            env={**os.environ, "CONTAINERS_CONF": str(settings)},
        )
        try:
            until((Path(folder) / "api.sock").exists, "Podman serves its API")
            yield [*command, "--url", f"unix://{folder}/api.sock"]
        finally:
            subprocess.run([*command, "system", "reset", "--force"], capture_output=True, check=False)
            service.terminate()
            service.wait()


@pytest.fixture(scope="module")
def there(
    new_checkout: NewCheckout, seed: Path, podman: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Checkout:
    checkout = new_checkout(tmp_path_factory.mktemp("there"), fresh=True)
    checkout.write_tests(SHORT)
    checkout.lock_and_render()
    checkout.take_store(like=seed)
    checkout.engine = podman[-1]
    return checkout


def test_images_are_built_tested_and_tagged_by_the_engine_of_the_context(there: Checkout, tmp_path: Path) -> None:
    """The image was in one engine, and the tests looked for it in another."""
    there.environ["DOCKER_CONFIG"] = str(tmp_path)
    for command in (["create", "podman", "--docker", f"host={there.engine}"], ["use", "podman"]):
        subprocess.run(["docker", "context", *command], env=there.environ, check=True)

    output = there.builder("images", PLAIN, DOCKER_HOST="")
    assert "cannot pull from this machine" not in output, "Podman was asked to pull"
    assert "1 image: 1 built, 1 tested, 1 tagged" in output
    for reference in there.references():
        assert there.docker("run", "--rm", reference, "tinyframe") == there.release
    [evidence] = (there.root / ".builder/evidence").glob("*.image.json")
    version = there.docker("version", "--format", "{{.Server.Version}}")
    assert json.loads(evidence.read_text())["machine"]["engine"] == version
    assert "1 image: 1 up to date" in there.builder("images", PLAIN)


def test_doctor_names_it(there: Checkout) -> None:
    """It was reported as a Docker Engine 4.3.1 that is too old."""
    assert re.search(r"ok +engine +Podman 4", there.builder("doctor"))
