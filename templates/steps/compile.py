"""Compiles the modules of this Python's site-packages that have no bytecode yet, except the packages' own tests.

Nobody runs those in an image, and their bytecode took 103 MB of the Jupyter image of PyTorch (sympy 48, pandas 37).

It skips modules with bytecode, because a rewritten file of a lower layer would be stored again. Unchecked-hash files
(PEP 552) have no time stamp, so the same sources give the same bytes, and Python uses them without reading the source.
Like pip, it skips files that are not valid for this Python (templates, tests of syntax errors).

With a path as argument, it also writes the compiled files to a zip file there, with paths relative to /.
"""

import importlib.util
import marshal
import operator
import os
import sys
import sysconfig
import zipfile
from concurrent.futures import ProcessPoolExecutor
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

UNCHECKED_HASH = b"\x01\0\0\0"  # PEP 552
TESTS = {"test", "tests"}  # names of folders
SHARED = ("nvidia",)  # layers of CUDA's libraries are the same for every Python; their modules are empty


def compile_one(path: str) -> str:
    """Compiles a file; returns the path of the bytecode, empty if the file is not valid for this Python."""
    source = Path(path).read_bytes()
    try:
        code = with_own_sets(SourceFileLoader("<compile>", path).source_to_code(source, path))
    except Exception:  # a syntax error, or code that is too deep or too large
        return ""
    bytecode = Path(importlib.util.cache_from_source(path))
    bytecode.parent.mkdir(exist_ok=True)
    bytecode.write_bytes(
        importlib.util.MAGIC_NUMBER + UNCHECKED_HASH + importlib.util.source_hash(source) + marshal.dumps(code)
    )
    return str(bytecode)


def with_own_sets(code: CodeType) -> CodeType:
    """The same code, in which no two functions share a constant set.

    Whether Python shares equal sets depends on the names in the process; since 3.12, also on names of modules that it
    has compiled before.
    """
    constants = tuple(
        with_own_sets(constant)
        if isinstance(constant, CodeType)
        else frozenset([*constant])
        if isinstance(constant, frozenset)
        else constant
        for constant in code.co_consts
    )
    return code if all(map(operator.is_, constants, code.co_consts)) else code.replace(co_consts=constants)


def compile_separately(paths: list[str]) -> list[str]:
    """Compiles each file in a separate process, without names of other files; returns the paths of the bytecode.

    Before 3.11, marshal writes a string differently if another object in the process has the same string, and a set in
    the order of its hashes.
    """
    running: dict[int, str] = {}
    failed = set()

    def wait_for_one() -> None:
        process, status = os.wait()
        path = running.pop(process)
        if status:
            failed.add(path)

    for path in paths:
        if len(running) >= (os.cpu_count() or 1):
            wait_for_one()
        process = os.fork()
        if not process:
            os._exit(0 if compile_one(path) else 1)
        running[process] = path
    while running:
        wait_for_one()
    return [importlib.util.cache_from_source(path) for path in paths if path not in failed]


def main() -> int:
    if not sys.flags.no_site:
        # Starts again without the imports of .pth files, because bytecode depends on the names in the process.
        environ = {**os.environ, "PYTHONHASHSEED": "0", "COMPILE_SITE": sysconfig.get_path("purelib")}
        os.execve(sys.executable, [sys.executable, "-S", "-B", *sys.argv], environ)
    site = Path(os.environ["COMPILE_SITE"])
    sources = []
    for source in site.rglob("*.py"):
        folders = source.relative_to(site).parts[:-1]
        if source.is_file() and TESTS.isdisjoint(folders) and folders[:1] != SHARED:
            sources.append(source)
    missing = [str(path) for path in sources if not Path(importlib.util.cache_from_source(str(path))).exists()]
    if sys.version_info < (3, 11):
        compiled = compile_separately(sorted(missing))
    else:
        with ProcessPoolExecutor() as pool:
            compiled = [path for path in pool.map(compile_one, sorted(missing), chunksize=32) if path]
    if len(sys.argv) > 1:
        with zipfile.ZipFile(sys.argv[1], "w") as archive:
            for path in compiled:
                # lib/python3.11 is a link to lib/python. The time is constant, in 1980.
                item = zipfile.ZipInfo(os.path.realpath(path).lstrip("/"))
                item.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(item, Path(path).read_bytes(), compresslevel=3)
    print(f"compiled {len(compiled)} of {len(missing)} modules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
