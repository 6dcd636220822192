"""An image for arm64, made on a machine of another architecture: `make arm64`. Takes minutes, so CI leaves it out.
Without QEMU it fails, with what to install.
"""

from __future__ import annotations

from builder.common import machine
from builder.engine.model import EMULATION_HINT
from tests.integration import wheels
from tests.integration.checkout import Checkout
from tests.integration.conftest import (  # noqa: F401  fixtures
    authority,
    checkout,
    environ,
    index,
    new_checkout,
    seed,
    served,
)

CELL = "ty-1.0-cpu-py311-arm64"


def test_an_image_for_arm64_is_made_and_not_run(checkout: Checkout) -> None:  # noqa: F811
    assert machine.emulates("aarch64"), EMULATION_HINT
    tag, files = "cp311-cp311-manylinux_2_28_aarch64", {"tinycpu.py": b"def main():\n    print('on arm64')\n"}
    checkout.index.publish(wheels.wheel("tinycpu", checkout.release, files, tag=tag, command="tinycpu:main"))
    checkout.edit("matrix.yaml", '  "12.8": {}\n', '  "12.8": {}\n  cpu: {}\n')
    checkout.edit(
        "matrix.yaml",
        "    package: tinyframe\n",
        "    cpu_image: ty-cpu\n    package: tinyframe\n    package_on: {cpu: tinycpu}\n",
    )
    checkout.edit("matrix.yaml", 'cuda: ["12.8"]', 'cuda: ["12.8", cpu], arch: {cpu: [arm64]}')
    checkout.builder("lock")
    checkout.builder("render")

    assert "built, not run: a machine for arm64 must test it" in checkout.builder("images", CELL)
    [image] = checkout.image_ids()
    assert checkout.docker("image", "inspect", "-f", "{{.Architecture}}", image) == "arm64"
    assert checkout.docker("run", "--rm", "--platform", "linux/arm64", image, "tinycpu") == "on arm64"
    assert "1 image: 1 up to date" in checkout.builder("images", CELL)
