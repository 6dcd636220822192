"""Everything about this repository that can be checked without running it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def _files(*patterns: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def _shell_scripts() -> list[str]:
    """By name, and by first line for those without an extension."""
    plain = [name for name in _files("templates/**", ".ci/*") if "." not in Path(name).name]
    return _files("*.sh") + [name for name in plain if (ROOT / name).read_bytes()[:64].splitlines()[0].endswith(b"sh")]


def checks() -> dict[str, list[str]]:
    """Name -> command, the longest first."""
    workflows = _files(".github/workflows/*")
    return {
        "mypy": ["mypy"],
        "ruff": ["ruff", "check", "."],
        "ruff format": ["ruff", "format", "--check", "."],
        "rooms": ["lint-imports", "--no-cache"],
        "hadolint": ["hadolint", *_files("images/*/*.Dockerfile")],
        "shellcheck": ["shellcheck", *_shell_scripts()],
        "zizmor": ["zizmor", "--offline", "--quiet", "--min-severity=medium", *workflows],
        "workflow schema": ["check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows],
        "compose schema": [
            "check-jsonschema",
            "--builtin-schema",
            "vendor.compose-spec",
            *_files("examples/compose*.yaml"),
        ],
        # 1.29 is the oldest release that the examples name.
        "kubernetes schemas": [
            "kubernetes-validate",
            "--strict",
            "--quiet",
            "-k",
            "1.29",
            "-k",
            "1.35",
            *_files("examples/kubernetes-*.yaml"),
        ],
        "renovate schema": ["check-jsonschema", "--builtin-schema", "vendor.renovate", ".github/renovate.json"],
        # A fixture of the session used one of a single test: on machines with GPUs, no test could run.
        "fixtures": ["pytest", "-q", "-p", "no:cacheprovider", "--setup-plan", "tests/images", "tests/gpu"],
        "locks": ["builder", "lock", "--check"],
        "images/": ["builder", "render", "--check"],
    }


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=ROOT, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip


def main() -> int:
    """Runs all checks, one on each processor, shows the output of those that fail, and says how many passed."""
    commands = checks()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(commands, pool.map(_run, commands.values()), strict=True))
    failed = {name: done.stdout for name, done in results.items() if done.returncode}
    for name, output in failed.items():
        print(f"lint: {name} failed:\n{output}\n  again: .venv/bin/{' '.join(commands[name])[:200]}", flush=True)
    print(f"lint: {len(commands) - len(failed)} of {len(commands)} checks passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
