"""Rootless Docker, which a user without rights runs. Its network has a loopback of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from builder.index import host
from tests.integration.checkout import PLAIN, SHORT, until
from tests.integration.conftest import NewCheckout
from tests.integration.programs import install

pytestmark = pytest.mark.skipif(not host.is_debian(), reason="only on Debian, whose packages are installed here")
START = "/usr/share/docker.io/contrib/dockerd-rootless.sh"
# In some sandboxes only root may open this device, and mounts are not shared.
NAMESPACE = f"""\
mount --make-rshared / && mknod -m 666 "$1/tun" c 10 200 && mount --bind "$1/tun" /dev/net/tun &&
exec setpriv --reuid "$2" --regid "$2" --init-groups {START}
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """The address of the engine of a new user."""
    for program in ("rootlesskit", "slirp4netns"):
        install(program)
    user = f"builder-{os.getpid()}"
    with TemporaryDirectory(prefix="rootless-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        home = ["--home-dir", str(folder / "home"), "--create-home"]
        # Not the first free number: other tests run programs with it.
        subprocess.run(["useradd", "--key", "UID_MIN=20000", *home, user], check=True)
        try:
            (folder / "run").mkdir(mode=0o700)
            shutil.chown(folder / "run", user, user)
            environ = {"PATH": "/usr/sbin:/usr/bin", "HOME": f"{folder}/home", "XDG_RUNTIME_DIR": f"{folder}/run"}
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(
                    ["unshare", "--mount", "sh", "-c", NAMESPACE, "sh", str(folder), user],
                    cwd=folder / "home", env=environ, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            try:
                socket = folder / "run/docker.sock"
                until(lambda: socket.exists() or process.poll() is not None, "rootless Docker answers")
                assert socket.exists(), (folder / "log").read_text(errors="replace")[-3000:]
                yield f"unix://{socket}"
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(60)
        finally:
            until(
                lambda: subprocess.run(["userdel", user], check=False).returncode == 0, "no process of the user is left"
            )


def test_images_are_built_and_tested_in_rootless_docker(
    new_checkout: NewCheckout, seed: Path, engine: str, tmp_path: Path
) -> None:
    checkout = new_checkout(tmp_path, fresh=True)
    checkout.write_tests(SHORT)
    checkout.lock_and_render()
    checkout.take_store(like=seed)
    checkout.engine = engine
    assert "name=rootless" in checkout.docker("info", "--format", "{{.SecurityOptions}}"), "doctor looks for it"
    output = checkout.builder("images", PLAIN)
    assert output.count("Docker Engine cannot pull from this machine; sending whole archives instead") == 1
    assert "1 image: 1 built, 1 tested, 1 tagged" in output
    for reference in checkout.references():
        assert checkout.docker("run", "--rm", reference, "tinyframe") == checkout.release
