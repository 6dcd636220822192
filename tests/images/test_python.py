"""The Python of the image: its version, and exactly the locked packages, compiled and importable."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from testinfra.host import Host


def test_version_is_that_of_the_cell(subject: Any, python: Callable[[str], Any]) -> None:
    found = python("import sys, json; print(json.dumps([sys.prefix, '%d.%d' % sys.version_info[:2]]))")
    assert found == ["/opt/venv", subject.cell["python"]]


def test_installed_is_what_is_locked(subject: Any, python: Callable[[str], Any]) -> None:
    code = """
import importlib.metadata as metadata, json
print(json.dumps(sorted((d.metadata["Name"], d.version) for d in metadata.distributions())))
"""
    installed = [(canonicalize_name(name), version) for name, version in python(code)]
    assert sorted(installed) == sorted(subject.wheels.items())


def test_requirements_are_met(host: Host) -> None:
    done = host.run("python -m pip check --disable-pip-version-check")
    assert done.rc == 0, done.stdout


def test_every_requested_package_is_importable(subject: Any, python: Callable[[str], Any]) -> None:
    """But for CUDA's wheels, which hold libraries and no module, and metapackages, which hold nothing."""
    asked = [Requirement(text).name for texts in subject.data["requirements"].values() for text in texts]
    wanted = [name for name in asked if canonicalize_name(name) not in subject.data["cuda_wheels"]]
    # pip last: a process that has imported it gets Python's own distutils, with which setuptools refuses to work.
    wanted.sort(key=lambda name: name == "pip")
    code = f"""
import importlib, importlib.metadata as metadata, json
wanted = {wanted!r}
failed = dict()
for name in wanted:
    files = metadata.distribution(name).files or ()
    if files and all(file.parts[0].endswith(".dist-info") for file in files):
        continue
    tops = set()
    for file in files:
        if file.suffix in (".py", ".so"):
            tops.add(file.parts[0] if len(file.parts) > 1 else file.name.split(".")[0])
    public = sorted(m for m in tops if not m.startswith("_") and m.isidentifier())
    if not public:
        failed[name] = "has no module"
    for module in public:
        try:
            importlib.import_module(module)
        except Exception as error:
            failed[name] = module + ": " + repr(error)
print(json.dumps(failed))
"""
    assert wanted
    assert python(code) == {}


def test_modules_are_compiled_without_time_stamps(python: Callable[[str], Any]) -> None:
    """Flags 1 in a .pyc: checked by hash, and never looked at (PEP 552). What a wheel itself brings stays as it is."""
    code = """
import importlib.metadata as metadata, importlib.util, json, pathlib, sysconfig
brought = set()
for one in metadata.distributions():
    brought |= {str(one.locate_file(f)) for f in one.files or () if f.suffix == ".pyc" and f.hash}
counts = dict(unchecked=0, other=[])
for source in pathlib.Path(sysconfig.get_path("purelib")).rglob("*.py"):
    compiled = pathlib.Path(importlib.util.cache_from_source(str(source)))
    if str(compiled) in brought:
        continue
    if compiled.exists():
        if compiled.read_bytes()[4:8] == bytes([1, 0, 0, 0]):
            counts["unchecked"] += 1
        else:
            counts["other"].append(str(source))
    else:
        try:
            compile(source.read_bytes(), str(source), "exec")
        except (SyntaxError, ValueError):
            continue
        counts["other"].append(str(source) + ": not compiled")
print(json.dumps(counts))
"""
    found = python(code)
    assert found["other"] == []
    assert found["unchecked"] > 100


def test_pip_list_answers(host: Host, subject: Any) -> None:
    listed = json.loads(host.check_output("python -m pip list --format json --disable-pip-version-check"))
    assert {canonicalize_name(entry["name"]) for entry in listed} == set(subject.wheels)
