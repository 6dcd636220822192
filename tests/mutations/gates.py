"""Removes each check of a release, one at a time: a unit test must fail every time.

    .venv/bin/python -m tests.mutations.gates

Works in a copy of the checkout. Runs the unit tests of the module's room, and those that import the module, or a module
that uses it.
"""

# ruff: noqa: E501  each check is one line
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT

BUILDER = Path("builder")
PYTEST = Path(sys.executable).with_name("pytest")
TIMEOUT_S = 300


@dataclass(frozen=True)
class Gate:
    """A check, and what replaces its text; `module` is its path below `builder`."""

    name: str
    module: str
    text: str
    without: str


GATES = (
    Gate("tests failed", "evidence/results.py", "        if self.failure:\n            raise", "        if False:\n            raise"),
    Gate("no results at all", "evidence/results.py", "        if not self.reports:\n            raise ImageTestError(", "        if not self.reports:\n            print("),
    Gate("image tests", "evidence/results.py", "        if self.image_tests is None:\n", "        if False:\n"),
    Gate("GPU tests", "release/release_checks.py", 'or coverage.gpu == "passed" or', "or True or"),
    Gate("the image of the evidence", "evidence/results.py", "if evidence.image != self.image:", "if False:"),
    Gate("the cell of a report", "evidence/results.py", "if evidence.cell != self.cell:", "if False:"),
    Gate("the plan of a report", "evidence/results.py", "if evidence.plan != self.plan:", "if False:"),
    Gate("the test suite", "evidence/results.py", "if files := changed_files(evidence.suite, self.suite.files):", "if files := list[str]():"),
    Gate("the image that a command ran", "build/gpu_command.py", "_differing(target.inventory, gpu_results.inventory)", '""'),
    Gate("the tests that a command ran", "build/gpu_command.py", "_differing(tests, gpu_results.tests)", '""'),
    Gate("the run of a command", "build/gpu_command.py", "        if gpu_results.run != self.run_id:\n", "        if False:\n"),
    Gate("the tasks of a command", "build/gpu_command.py", "        if len(packed) > 1:\n", "        if False:\n"),
    Gate("the checks that a command ran", "build/gpu_command.py", "if name not in there]:", "if False]:"),
    Gate("the GPU of a command", "build/gpu_command.py", "        if not gpu_results.report.devices:\n", "        if False:\n"),
    Gate("the exit status of a command", "build/gpu_command.py", "            if status:\n", "            if False:\n"),
    Gate("the signature", "evidence/reports.py", "if not (signer or allow_unsigned):", "if False:"),
    Gate("results of all tests", "evidence/results.py", "if missing := needed - passed - not_applicable:", "if missing := set[str]():"),
    Gate("results of other tests", "evidence/results.py", "        if unknown := ", "        if False and "),
    Gate("what a report must be about", "evidence/reports.py", "            if reason := requirement.why_not_met(evidence):\n                raise VerifyError(reason)\n", ""),
    Gate("results here", "evidence/results.py", "        if reason := requirement.why_not_met(evidence):\n            refused.append(reason)\n        else:", "        if True:"),
    Gate("who is trusted", "evidence/signing.py", "command, *options, *expected)", "command, *options)"),
    Gate("a list of another machine", "release/staging.py", "if _own(project, content).exists():", "if True:"),
    Gate("the signature of a list", "release/staging.py", "            if signer:\n                return\n", "            return\n"),
    Gate("results that nobody signed", "evidence/reports.py", "if report.signer)", ")"),
    Gate("what a statement must be about", "evidence/reports.py", "            if reason := requirement.why_not_met(evidence):\n                refused.append(reason)\n            else:", "            if True:"),
    Gate("the signature of an image", "steps/verify.py", 'if signature.state != "signed":', "if False:"),
    Gate("the tag of a signature", "release/attestations.py", "if not any(_is_for(", "if False and not any(_is_for("),
    Gate("the signature that status shows", "release/status.py", "                if not signer:\n", "                if False:\n"),
    Gate("the stamp of a tag", "release/attestations.py", 'return signature.get("release") == tag', "return True"),
    Gate("the cell of a signature", "evidence/signing.py", "return [notes for notes in texts if annotations.items() <= notes.items()]", "return texts"),
    Gate("the kind of a statement", "evidence/signing.py", '_verified(trust, repository, digest, "verify-attestation", f"--type={kind}")', '_verified(trust, repository, digest, "verify-attestation")'),
    Gate("the plan of a staged image", "release/release_checks.py", "if planned is None or planned.plan != entry.plan:", "if planned is None:"),
    Gate("the exit status of a scanner", "release/release_checks.py", "        if status:\n            raise RefusedError(", "        if False:\n            raise RefusedError("),
    Gate("a scanner that crashes", "release/release_checks.py", "if status is None or status < 0:", "if status is None:"),
    Gate("labels and configuration", "release/expected.py", "    elif oci.config(planned.settings, stack, history, created=created, labels=labels) != config:\n", "    elif False:\n"),
    Gate("the manifest of an image", "release/expected.py", "    elif oci.manifest(Descriptor.of(config, CONFIG_TYPE), stack) != image.manifest.content:\n", "    elif False:\n"),
    Gate("files and known layers", "release/expected.py", "elif expected_layer and (layer.digest, layer.diff_id) != (", "elif False and (layer.digest, layer.diff_id) != ("),
    Gate("the layers of a release", "release/release_checks.py", "compare_with_plan(planned, layers,", "compare_with_plan(planned, {},"),
    Gate("a newer release", "steps/release.py", "        _require_newest(area, staged, images)\n", "        pass\n"),
    Gate("tags never move back", "release/tagging.py", "if moving_back and not roll_back:", "if False:"),
    Gate("tags never lose an architecture", "release/tagging.py", "    elif missing:\n", "    elif False:\n"),
    Gate("all architectures of a tag", "release/release_checks.py", "        if \"missing-arch\" not in allowed:\n", "        if False:\n"),
    Gate("the signature of an index", "release/attestations.py", "        if self.source.index:\n", "        if False:\n"),
    Gate("moving tags come last", "registry/transfer.py", "return errors.collect(lambda future: future.result(), finishing)", "return [future.result() for future in finishing if not future.exception()]"),
    Gate("tags that another push set", "release/tagging.py", "if now not in (was, manifest.digest):", "if False:"),
    Gate("the record before the tags", "steps/release.py", "    area.record(", "    (lambda _: None)("),
    Gate("the bytes of a blob", "registry/client.py", "if part.size != size or f\"sha256:{part.sha256}\" != digest:", "if part.size != size:"),
    Gate("files of a parent", "build/added_image.py", "        raise RefusedError(str(error), hint=CONFLICT) from error", "        pass"),
    Gate("tags with a date", "steps/add.py", "if is_dated and repository.digest_of(", "if False and repository.digest_of("),
    Gate("the tests of an addition", "steps/add.py", "        if done.returncode:\n            lines", "        if False:\n            lines"),
    Gate("the signature of a parent", "steps/add.py", 'if finding.state != "signed":', "if False:"),
    Gate("the hashes of a request", "build/added_image.py", "    check_hashes(requested, hashed | wheels)\n", ""),
    Gate("the signature of an earlier image", "steps/add.py", "        check_signature(target, image, options.trust)\n", "        pass\n"),
    Gate("the CUDA of a parent", "build/added_image.py", "    check_cuda(addition, parent, wheels)\n", ""),
    Gate("the held packages of a parent", "build/added_image.py", "        held=held,", "        held=(),"),
    Gate("private packages of a parent", "index/local_index.py", "                    files = []\n", "                    pass\n"),
    Gate("files that a moved package may not hide", "release/parent.py", " and layer.digest in of_wheels", ""),
    Gate("files of other packages", "release/parent.py", " - others", ""),
    Gate("versions of years ago", "build/added_image.py", "        if is_old and ", "        if False and "),
    Gate("the tag of a parent", "release/additions.py", "if (self.target.name, self.target.target) == (", "if False and ("),
    Gate("the layers of a parent", "steps/verify.py", "if source.image.layers[: len(layers)] != layers:", "if False:"),
    Gate("what differs from the plan", "steps/verify.py", "    except VerifyError as error:\n        return Finding(", "    except ValueError as error:\n        return Finding("),
    Gate("a digest that differs", "steps/verify.py", "        if made == digest:", "        if True:"),
    Gate("the parent or the plan of a provenance", "release/attestations.py", "if (self._parent == parent) if self._parent else (stated.plan == plan):", "if True:"),
    Gate("the wheels of a provenance", "release/attestations.py", "if sha256 not in locked]:", "if False]:"),
    Gate("variables of every image", "release/additions.py", "        if name in FIXED:\n", "        if False:\n"),
    Gate("options of requirements", "release/additions.py", "    if option := re.search(", "    if option := re.fullmatch("),
    Gate("the table of contents of a layer", "layers/estargz.py", "if digest and digest_of_bytes(text) != digest:", "if False:"),
    Gate("the subject of an artifact", "registry/artifacts.py", "if subject != actual:", "if False:"),
)  # fmt: skip


def main() -> int:
    """Names the checks whose removal no test notices."""
    unnoticed = []
    with tempfile.TemporaryDirectory() as folder:
        copy_checkout(Path(folder))
        for gate in GATES:
            module = BUILDER / gate.module
            source = (ROOT / module).read_text(encoding="utf-8")
            assert source.count(gate.text) == 1, f"{gate.name}: {module} has its text {source.count(gate.text)} times"
            outcome = result(Path(folder), module, source.replace(gate.text, gate.without))
            print(f"{outcome}: {gate.name}", flush=True)
            if outcome != "killed":
                unnoticed.append(gate.name)
    print(f"{len(GATES) - len(unnoticed)} of {len(GATES)} checks are tested")
    return 1 if unnoticed else 0


def copy_checkout(target: Path) -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(lambda name: name and os.path.lexists(ROOT / name), listed.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def result(copy: Path, module: Path, source: str) -> str:
    (copy / module).write_text(source, encoding="utf-8")
    for stored in (copy / module).parent.glob(f"__pycache__/{module.stem}.*"):
        stored.unlink()  # bytecode counts as valid for any source of the same size and second
    try:
        return _run(copy, _tests(module))
    finally:
        shutil.copy2(ROOT / module, copy / module)


def _run(copy: Path, tests: list[str]) -> str:
    """`killed` if a test fails, else `survived` or `timeout`."""
    command = [str(PYTEST), "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return "timeout"
    return "killed" if done.returncode else "survived"


def _tests(module: Path) -> list[str]:
    """Test files for a module, its own first. If none imports it, they also are those of the modules that import it."""
    importing = _importing(module, "tests/unit/**/test_*.py")
    if not importing:
        users = _importing(module, "builder/**/*.py")
        importing = {test for user in users for test in _importing(user, "tests/unit/**/test_*.py")}
    room = {path.relative_to(ROOT) for path in (ROOT / "tests/unit" / module.parent.name).glob("test_*.py")}
    return [str(path) for path in sorted(room | importing, key=lambda path: (path.stem != f"test_{module.stem}", path))]


def _importing(module: Path, pattern: str) -> set[Path]:
    """The files that import a module."""
    dotted = ".".join(module.with_suffix("").parts)
    package, _, name = dotted.rpartition(".")
    imported = re.compile(rf"^from {dotted} import |^from {package} import (\([^)]*|.*)\b{name}\b", re.MULTILINE)
    return {path.relative_to(ROOT) for path in ROOT.glob(pattern) if imported.search(path.read_text())}


if __name__ == "__main__":
    sys.exit(main())
