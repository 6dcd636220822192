"""Makes small changes to some rooms, one at a time, and lists those that no unit test notices.

    .venv/bin/python -m tests.mutations builder/lock builder/registry/client.py --count 50

Works in a copy of the checkout. Runs the unit tests of the module's room, and those that import the module, or a module
that uses it.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.mutations.mutants import of_source
from tests.paths import ROOT

PYTEST = Path(sys.executable).with_name("pytest")
ROOMS = ("builder/layers", "builder/lock", "builder/registry", "builder/evidence", "builder/release")
TIMEOUT_S = 300


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("paths", nargs="*", default=ROOMS, help=f"folders and modules (default: {' '.join(ROOMS)})")
    parser.add_argument("--count", type=int, default=100, help="how many of all mutants to try (default: 100)")
    parser.add_argument("--seed", type=int, default=13, help="number that determines which (default: 13)")
    options = parser.parse_args()
    mutants = [
        (module, mutant) for module in _modules(options.paths) for mutant in of_source((ROOT / module).read_bytes())
    ]
    chosen = random.Random(options.seed).sample(mutants, min(options.count, len(mutants)))
    results: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        copy_checkout(Path(folder))
        if _run(Path(folder), sorted({test for module, _ in chosen for test in _tests(module)})) != "survived":
            print("tests fail without any change: run `make unit`", file=sys.stderr)
            return 1
        for module, mutant in chosen:
            outcome = result(Path(folder), module, mutant.source)
            results[outcome] += 1
            if outcome != "killed":
                line = (ROOT / module).read_text(encoding="utf-8").splitlines()[mutant.line - 1].strip()
                old, new = (" ".join(text.split())[:60] for text in (mutant.old, mutant.new))
                print(f"{outcome}: {module}:{mutant.line}: {line}\n    {old}  ->  {new}", flush=True)
    print(f"{len(chosen)} of {len(mutants)} mutants: {', '.join(f'{n} {name}' for name, n in results.items())}")
    return 0


def _modules(paths: list[str]) -> list[Path]:
    modules_by_path = [[*path.rglob("*.py")] if path.is_dir() else [path] for path in (ROOT / path for path in paths)]
    return sorted(module.relative_to(ROOT) for modules in modules_by_path for module in modules)


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
