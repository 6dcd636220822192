"""Runs the quick tests of a parent on an image that `builder add` made of it.

They are those of tests/images for its components that are not thorough, in the checkout or of the package. What they
read about the image comes from its labels, its history and its constraints: there is no plan.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from builder.build import pytest_run
from builder.build.context import copy_test_files
from builder.build.image_tests import PACKAGES, check_docker_client
from builder.build.programs import Programs
from builder.common import machine
from builder.common.console import View
from builder.common.errors import ImageTestError
from builder.common.text import counted
from builder.engine.client import RUN_LABEL, Engine
from builder.evidence.results import Evidence
from builder.evidence.suite import Suite
from builder.host import Host
from builder.index.wheels import LockedWheel, is_cuda_wheel
from builder.layers.oci import Image
from builder.layers.store import Store
from builder.matrix import extends
from builder.matrix.project import Project
from builder.matrix.tags import CUDA_LABEL, LABEL
from builder.release.parent import Parent

SHOWN = 12  # failed tests
# What cannot hold for an image with additions. All other tests must pass.
LEFT_OUT = {
    "test_base.py::test_labels_describe_the_plan": "no cell and no plan describes it",
    "test_base.py::test_no_label_names_a_registry_or_a_namespace": "labels name its parent",
    "test_python.py::test_modules_are_compiled_without_time_stamps": "no container compiles new modules",
}


def test_added(
    engine: Engine, project: Project | None, host: Host, store: Store, view: View, name: str,
    parent: Parent, image: Image, wheels: Sequence[LockedWheel], image_id: str, modules: Sequence[str],
) -> Evidence:  # fmt: skip
    """The results of the tests, and of the imports of `modules`, which passed. Raises ImageTestError, EngineError."""
    info, is_cpu = engine.info(), image.labels.get(CUDA_LABEL) == "cpu"
    passed, suite, log = [f"import {each}" for each in modules], {}, store.root / "added.test.log"
    paths = {each: f"tests/images/test_{each}.py" for each in image.labels.get(f"{LABEL}.components", "").split()}
    with TemporaryDirectory(prefix="builder-add-") as scratch:  # not in the store, which has only files in tmp
        folders = project.folders if project else (extends.shipped_files(Path(scratch)),)
        root = copy_test_files(folders, Path(scratch) / "root")
        tests = Suite.of(root)
        files = [root / path for path in paths.values() if path in tests.tests]
        if untested := [each for each, path in paths.items() if path not in tests.tests]:
            view.say(f"{name}: no tests here for components of its parent: {', '.join(untested)}")
        if missing := [package for module, package in PACKAGES.items() if find_spec(module) is None]:
            view.say_once(f"the tests of the parent need {', '.join(missing)}: install builder with its extra `images`")
        elif files:
            check_docker_client()
            results = pytest_run.run_tests(
                Programs(), root, Path(scratch), files,
                _describe(parent, image, wheels) | {
                    "image_id": image_id, "labels": {RUN_LABEL: str(store.root)}, "references": [name],
                    "engine": info.name, "components": list(paths),
                },
                options=[
                    *(f"--deselect=tests/images/{each}" for each in LEFT_OUT),
                    "-p", "xdist.plugin", "-n", str(math.ceil(1.5 * machine.processors())), "--dist", "loadfile",
                ],
                variables=engine.address.variables, log=log, on_line=host.hide,
            )  # fmt: skip
            if results.failed:
                engine.check()  # that may be why they failed
                lines = [f"\n  {each}: {host.hide(results.reasons.get(each, ''))}" for each in results.failed[:SHOWN]]
                raise ImageTestError(
                    f"{name}: {counted(len(results.failed), 'test')} of its parent failed{''.join(lines)}",
                    hint=f"Nothing was pushed. Full log: {log}   For a parent of another builder, use that one.",
                )
            passed, suite = [*passed, *results.passed], dict(tests.files)
    return Evidence(
        image=image.manifest.digest, cell="", plan="", suite=suite, kind="image", passed=tuple(passed), failed=(),
        no_gpu="the image is for the CPU" if is_cpu else "`builder add` runs no GPU tests",
        machine={"engine": info.version, "kernel": platform.release(), **({"engine_id": info.id} if info.id else {})},
        finished=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )  # fmt: skip


def _describe(parent: Parent, image: Image, wheels: Sequence[LockedWheel]) -> dict[str, object]:
    """The image as `pytest_run.describe` describes one of a plan, as far as the image itself says it."""
    labels, installed = image.labels, [*parent.packages.values(), *wheels]
    framework, release = labels.get(f"{LABEL}.framework", ""), labels.get(f"{LABEL}.framework.version", "")
    # The distribution of the framework, such as tensorflow-cpu: the first constraint with its version.
    pins = [line.partition(",")[0].partition("+")[0].partition("==") for line in parent.constraints]
    distribution = next((name for name, _, version in pins if version == release), framework)
    return {
        "cell": {
            "framework": framework, "release": release, "cuda": labels.get(CUDA_LABEL, ""), "python": parent.python,
            "variant": labels.get(f"{LABEL}.variant", ""),
        },
        "thorough": [],
        "requirements": {framework: [distribution]},
        "wheels": {each.name: each.version for each in installed},
        "cuda_wheels": [each.name for each in installed if is_cuda_wheel(each.file)],
        "is_emulated": False,
        "gpu_options": {},
        "private_hosts": [],  # nothing ran on this machine to make it, and labels name the registry of the parent
    }  # fmt: skip
