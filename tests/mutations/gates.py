"""Removes each check of a release, one at a time: a unit test must fail every time.

.venv/bin/python -m tests.mutations.gates
"""

# ruff: noqa: E501  each check is one line
from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.mutations.__main__ import copy_checkout, result
from tests.paths import ROOT

REGISTRY = Path("builder/registry")


@dataclass(frozen=True)
class Gate:
    """A check, and what replaces its text."""

    name: str
    module: str
    text: str
    without: str


GATES = (
    Gate("tests failed", "evidence.py", "        if self.failure:\n            raise", "        if False:\n            raise"),
    Gate("no results at all", "evidence.py", "        if not self.reports:\n            raise ImageTestError(", "        if not self.reports:\n            print("),
    Gate("image tests", "evidence.py", "        if self.image_tests is None:\n", "        if False:\n"),
    Gate("GPU tests", "release.py", 'or coverage.gpu == "passed" or', "or True or"),
    Gate("the image of the evidence", "evidence.py", "if evidence.image != self.image:", "if False:"),
    Gate("the cell of a report", "evidence.py", "if evidence.cell != self.cell:", "if False:"),
    Gate("the plan of a report", "evidence.py", "if evidence.plan != self.plan:", "if False:"),
    Gate("the test suite", "evidence.py", "if files := changed_files(evidence.suite, self.suite.files):", "if files := list[str]():"),
    Gate("the signature", "reports.py", "if not (signer or allow_unsigned):", "if False:"),
    Gate("results of all tests", "evidence.py", "if missing := needed - passed - not_applicable:", "if missing := set[str]():"),
    Gate("results of other tests", "evidence.py", "        if unknown := ", "        if False and "),
    Gate("what a report must be about", "reports.py", "            if reason := requirement.why_not_met(evidence):\n                raise VerifyError(reason)\n", ""),
    Gate("results here", "evidence.py", "        if reason := requirement.why_not_met(evidence):\n            refused.append(reason)\n        else:", "        if True:"),
    Gate("who is trusted", "signing.py", "command, *options, *_identity(trust.root, who))", "command, *options)"),
    Gate("the signature of a list", "staging.py", "            if signer:\n                return\n", "            return\n"),
    Gate("results that nobody signed", "reports.py", "if report.signer)", ")"),
    Gate("what a statement must be about", "reports.py", "            if reason := requirement.why_not_met(evidence):\n                refused.append(reason)\n            else:", "            if True:"),
    Gate("the signature of an image", "attestations.py", 'if signature.state != "signed":', "if False:"),
    Gate("the tag of a signature", "attestations.py", "if not any(_is_for(", "if False and not any(_is_for("),
    Gate("the signature that status shows", "status.py", "                if not signer:\n", "                if False:\n"),
    Gate("the SBOM of an image", "attestations.py", "        if lines:\n            raise VerifyError(", "        if False:\n            raise VerifyError("),
    Gate("the stamp of a tag", "attestations.py", 'return signature.get("release") == tag', "return True"),
    Gate("the cell of a signature", "signing.py", "return [notes for notes in texts if annotations.items() <= notes.items()]", "return texts"),
    Gate("the kind of a statement", "signing.py", '_verified(trust, registry, digest, "verify-attestation", f"--type={kind}")', '_verified(trust, registry, digest, "verify-attestation")'),
    Gate("the plan of a staged image", "release.py", "if planned is None or planned.digest != staged.plan:", "if planned is None:"),
    Gate("the exit status of a scanner", "scan.py", "        if status:\n            raise RefusedError(", "        if False:\n            raise RefusedError("),
    Gate("a scanner that crashes", "scan.py", "if status is None or status < 0:", "if status is None:"),
    Gate("labels and configuration", "expected.py", "    lines = differences(expected, manifest, config)\n", "    lines: list[str] = []\n"),
    Gate("files and known layers", "expected.py", "elif expected_layer and (layer.digest, layer.diff_id) != (", "elif False and (layer.digest, layer.diff_id) != ("),
    Gate("a newer release", "release.py", "            self._check_newest(candidates)\n", "            pass\n"),
    Gate("tags never move back", "publish.py", "if backward and not self.roll_back:", "if False:"),
    Gate("tags never lose an architecture", "publish.py", "        elif missing:\n", "        elif False:\n"),
    Gate("all architectures of a tag", "release.py", "                if not self.allow_missing_arch:\n", "                if False:\n"),
    Gate("a run on a real machine", "release.py", "            if not self.allow_not_run:\n", "            if False:\n"),
    Gate("the signature of an index", "attestations.py", "        if self.index:\n", "        if False:\n"),
    Gate("moving tags come last", "parallel.py", "return errors.collect(lambda future: future.result(), finishing)", "return [future.result() for future in finishing if not future.exception()]"),
    Gate("stamps from the future", "tagging.py", "if now and datetime.combine(day, time.min, UTC) > now + AHEAD:", "if False:"),
    Gate("tags that another push set", "tagging.py", "if now not in (was, manifest.digest):", "if False:"),
    Gate("the record before the tags", "publish.py", "            self.documents.record()\n", "            pass\n"),
    Gate("the bytes of a blob", "client.py", "return part.size == size and f\"sha256:{part.sha256}\" == digest", "return part.size == size"),
    Gate("the subject of an artifact", "artifacts.py", "if subject != actual:", "if False:"),
)  # fmt: skip


def main() -> int:
    """Names the checks whose removal no test notices."""
    unnoticed = []
    with tempfile.TemporaryDirectory() as folder:
        copy_checkout(Path(folder))
        for gate in GATES:
            module = REGISTRY / gate.module
            source = (ROOT / module).read_text(encoding="utf-8")
            assert source.count(gate.text) == 1, f"{gate.name}: {module} has its text {source.count(gate.text)} times"
            outcome = result(Path(folder), module, source.replace(gate.text, gate.without))
            print(f"{outcome}: {gate.name}", flush=True)
            if outcome != "killed":
                unnoticed.append(gate.name)
    print(f"{len(GATES) - len(unnoticed)} of {len(GATES)} checks are tested")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
