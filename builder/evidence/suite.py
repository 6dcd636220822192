"""The test files of a checkout, and their tests.

The files are parsed, in 0.3 s of processor time: collection by pytest takes 3.1 s (448 tests). The modules of `tests`
that a test file imports are part of the suite too. Test files import nothing from `builder`; they get plain data about
the image. Of `builder`, only the module that runs the tests is part of the suite, without its imports. So other changes
of `builder` do not require all tests to run again.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from builder.common.files import digest_of_bytes, files_below

IMAGE_TESTS, GPU_TESTS = "tests/images", "tests/gpu"
RUNNER = "builder/build/pytest_run.py"
PACKAGE = Path(__file__).parents[1]
_MARK = "pytest.mark."
THOROUGH = "thorough"  # a mark: see pyproject.toml
# The outcome of a GPU test that has nothing to check on this GPU. Here, so that test processes need not import
# `image_tests`, which takes 0.2 s.
NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The image tests of a checkout. `files` are the digests, by path, of all files that can change their results.

    `tests` are the tests in each file by its path, named as pytest does, without parameters (`test_user`,
    `TestLogin::test_user`), and their marks. A test of which only some parameters are thorough always runs.
    """

    files: Mapping[str, str]
    tests: Mapping[str, Mapping[str, frozenset[str]]]

    @classmethod
    def of(cls, *roots: Path) -> Suite:
        """The test files and the tests of a checkout. A file of an earlier root replaces that of a later one.

        The files are the Python files and notebooks of the image tests, the modules below `tests` that these import,
        and the module of `PACKAGE` that runs them. Other files (an editor's swap file) and file modes change no test.
        """
        paths = {path: root for root in roots for top in (IMAGE_TESTS, GPU_TESTS) for path in files_below(root / top)}
        waiting = [path.relative_to(root).as_posix() for path, root in paths.items() if path.suffix in (".py", ".ipy")]
        contents: dict[str, bytes] = {}
        while waiting:
            name = waiting.pop()
            path = next((root / name for root in roots if (root / name).is_file()), None)
            if path and name not in contents:
                contents[name] = path.read_bytes()
                # A name may also be that of a function, which has no file.
                for module in _imports(contents[name]) if name.endswith(".py") else ():
                    if module.startswith("tests."):
                        below = module.replace(".", "/")
                        waiting += [f"{below}.py", f"{below}/__init__.py"]
        return cls(
            files={
                RUNNER: digest_of_bytes((PACKAGE / RUNNER.removeprefix("builder/")).read_bytes()),
                **{name: digest_of_bytes(content) for name, content in sorted(contents.items())},
            },
            tests={name: _tests_of(name, contents) for name in contents if name.endswith(".py")},
        )

    def of_image(self, components: Iterable[str], folder: str, *, thorough: Collection[str] | None = None) -> set[str]:
        """The tests of an image in a folder: `tests/images/test_base.py::test_user`; of a file without tests, its path.

        With `thorough`, leaves out the thorough tests of all other components.
        """
        names: set[str] = set()
        for component in components:
            path = f"{folder}/test_{component}.py"
            if tests := self.tests.get(path):
                is_left_out = thorough is not None and component not in thorough
                names |= {f"{path}::{test}" for test, marks in tests.items() if not (THOROUGH in marks and is_left_out)}
            elif folder == IMAGE_TESTS:  # every component has image tests
                names.add(path)
        return names


def gpu_test(framework: str) -> str:
    """The path of the GPU tests that images of a framework need."""
    return f"{GPU_TESTS}/test_{framework}.py"


@cache
def _imports(content: bytes) -> frozenset[str]:
    """The modules that a module imports, and `module.name` for a name from a module, which may be a module, too."""
    names: set[str] = set()
    for node in ast.walk(_parse(content)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return frozenset(names)


def _tests_of(name: str, contents: Mapping[str, bytes]) -> dict[str, frozenset[str]]:
    """The tests of a file, as pytest finds them, and their marks.

    Functions that it imports by their names `test_...` are tests, too.
    """
    tests: dict[str, frozenset[str]] = {}
    for test, (source, marks) in _definitions(contents[name]).items():
        path = f"{source.replace('.', '/')}.py"
        tests[test] = _definitions(contents[path]).get(test, ("", marks))[1] if path in contents else marks
    return tests


@cache
def _definitions(content: bytes) -> Mapping[str, tuple[str, frozenset[str]]]:
    """Functions `test...` of a module and of its classes `Test...`, with their modules and marks.

    Marks are without arguments. The module is the one that a function is imported from, empty for the module's own
    functions.
    """
    return dict(_named(_parse(content).body))


def _named(body: Iterable[ast.stmt], prefix: str = "") -> Iterator[tuple[str, tuple[str, frozenset[str]]]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            marks = (ast.unparse(decorator) for decorator in node.decorator_list)
            yield prefix + node.name, ("", frozenset(m.removeprefix(_MARK) for m in marks if m.startswith(_MARK)))
        elif isinstance(node, ast.ImportFrom):
            names = (alias.asname or alias.name for alias in node.names)
            yield from ((prefix + name, (node.module or "", frozenset())) for name in names if name.startswith("test_"))
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _named(node.body, f"{prefix}{node.name}::")


def _parse(content: bytes) -> ast.Module:
    """The syntax tree of a module; an empty one of a file with an error, which no test run passes either."""
    try:
        return ast.parse(content)
    except (SyntaxError, ValueError):  # ValueError: it has a null byte
        return ast.Module(body=[], type_ignores=[])
