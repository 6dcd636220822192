"""The test files of a checkout, their tests, and the modules of this program that decide whether an image passes.

Read without running them, from syntax trees: what a file imports is part of the suite too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from builder.common import digest

IMAGE_TESTS, GPU_TESTS = "tests/images", "tests/gpu"
PACKAGE = Path(__file__).parents[1]
# The modules that run the tests, and that leave out those that another image has passed. What they import counts too.
_RUNNERS = ("builder/build/image_tests.py", "builder/build/reused_tests.py")
# The rooms that compute the plan, whose digest is in the evidence: their changes that matter change the plan.
_PLANNING = ("builder.matrix", "builder.lock", "builder.plan")


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The image tests of a checkout. `files` are the digests, by path, of all files that decide about an image.

    `tests` are the tests in each file by its path, named as pytest does, without parameters: `test_user`,
    `TestLogin::test_user`.
    """

    files: Mapping[str, str]
    tests: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, root: Path, package: Path = PACKAGE) -> Suite:
        """The Python files and notebooks of the image tests, the modules that run them, and the modules below `tests`
        and in `package` that these import, except for those that compute the plan.

        Other files (an editor's swap file) and file modes change no test.
        """
        paths = [path for folder in (IMAGE_TESTS, GPU_TESTS) for path in digest.tree(root / folder)]
        waiting = [path.relative_to(root).as_posix() for path in paths if path.suffix in (".py", ".ipy")]
        waiting += _RUNNERS
        contents: dict[str, bytes] = {}
        while waiting:
            name = waiting.pop()
            path = package / name.removeprefix("builder/") if name.startswith("builder/") else root / name
            if name not in contents and path.is_file():
                contents[name] = path.read_bytes()
                waiting += _paths(_imports(contents[name])) if path.suffix == ".py" else ()
        return cls(
            files={name: digest.of_bytes(content) for name, content in sorted(contents.items())},
            tests={name: _tests(content) for name, content in contents.items() if name.endswith(".py")},
        )

    def of_image(self, components: Iterable[str], folder: str) -> set[str]:
        """The tests of an image in a folder: `tests/images/test_base.py::test_user`. The path of a file without any."""
        names: set[str] = set()
        for path in (f"{folder}/test_{component}.py" for component in components):
            if tests := self.tests.get(path):
                names |= {f"{path}::{test}" for test in tests}
            elif folder == IMAGE_TESTS:  # every component has image tests
                names.add(path)
        return names


def gpu_test(framework: str) -> str:
    """The path of the GPU tests that images of a framework need."""
    return f"{GPU_TESTS}/test_{framework}.py"


def _paths(modules: Iterable[str]) -> Iterator[str]:
    """Where modules of this program and of the tests may be; a name may also be that of a function."""
    for module in modules:
        if module.startswith(("builder.", "tests.")) and not module.startswith(_PLANNING):
            yield f"{module.replace('.', '/')}.py"
            yield f"{module.replace('.', '/')}/__init__.py"


@cache
def _imports(content: bytes) -> frozenset[str]:
    """The names that a module imports, and those that it imports from each."""
    names: set[str] = set()
    for node in ast.walk(_parse(content)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return frozenset(names)


@cache
def _tests(content: bytes) -> frozenset[str]:
    """The tests of a module, as pytest finds them: functions `test...`, also those of classes `Test...`.

    Functions that it imports by their names `test_...` are tests, too.
    """
    return frozenset(_names(_parse(content).body))


def _names(body: Iterable[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield prefix + node.name
        elif isinstance(node, ast.ImportFrom):
            names = (alias.asname or alias.name for alias in node.names)
            yield from (prefix + name for name in names if name.startswith("test_"))
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _names(node.body, f"{prefix}{node.name}::")


def _parse(content: bytes) -> ast.Module:
    """The syntax tree of a module; an empty one of a file with an error, which no test run passes either."""
    try:
        return ast.parse(content)
    except (SyntaxError, ValueError):  # ValueError: it has a null byte
        return ast.Module(body=[], type_ignores=[])
