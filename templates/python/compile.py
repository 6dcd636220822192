"""Compiles the modules of this Python's site-packages that have no bytecode yet.

Only those, because rewriting a file of a lower layer would store it again. Unchecked-hash files (PEP 552) hold no
time stamp, so the same sources give the same bytes, and Python reads them without looking at the source.
Files that are not valid for this Python (templates, tests of syntax errors) are left alone, as pip does.

With a path as argument, what was compiled is also put into a zip file there, as it is to lie in /.
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


def compile_one(path: str) -> str:
    """Path of the bytecode; empty if the file is not valid Python for this version."""
    source = Path(path).read_bytes()
    try:
        code = with_own_sets(SourceFileLoader("<compile>", path).source_to_code(source, path))
    except Exception:  # whatever a compiler finds wrong, or too deep, or too large
        return ""
    made = Path(importlib.util.cache_from_source(path))
    made.parent.mkdir(exist_ok=True)
    made.write_bytes(
        importlib.util.MAGIC_NUMBER + UNCHECKED_HASH + importlib.util.source_hash(source) + marshal.dumps(code)
    )
    return str(made)


def with_own_sets(code: CodeType) -> CodeType:
    """The same code, with no constant set shared by two functions.

    Python shares equal sets, or not, by which names the process knows already: from 3.12 on also those of what it
    has compiled before.
    """
    own = tuple(
        with_own_sets(one) if isinstance(one, CodeType) else frozenset([*one]) if isinstance(one, frozenset) else one
        for one in code.co_consts
    )
    return code if all(map(operator.is_, own, code.co_consts)) else code.replace(co_consts=own)


def each_alone(paths: list[str]) -> list[str]:
    """Compiles each file in a process of its own, which knows no name of another.

    Before 3.11, marshal writes a string in another way if anything else in the process has the same one, and a set in
    the order of its hashes.
    """
    running: dict[int, str] = {}
    bad = set()

    def end_one() -> None:
        process, status = os.wait()
        path = running.pop(process)
        if status:
            bad.add(path)

    for path in paths:
        if len(running) >= (os.cpu_count() or 1):
            end_one()
        process = os.fork()
        if not process:
            os._exit(0 if compile_one(path) else 1)
        running[process] = path
    while running:
        end_one()
    return [importlib.util.cache_from_source(path) for path in paths if path not in bad]


def main() -> int:
    if not sys.flags.no_site:
        # Once more, without what .pth files import: how a module is written depends on what the process knows.
        environ = {**os.environ, "PYTHONHASHSEED": "0", "COMPILE_SITE": sysconfig.get_path("purelib")}
        os.execve(sys.executable, [sys.executable, "-S", "-B", *sys.argv], environ)
    site = Path(os.environ["COMPILE_SITE"])
    # `nvidia` is a link to /opt/nvidia, which no Python owns; rglob does not follow it.
    sources = [path for path in site.rglob("*.py") if path.is_file()]
    missing = [str(path) for path in sources if not Path(importlib.util.cache_from_source(str(path))).exists()]
    if sys.version_info < (3, 11):
        made = each_alone(sorted(missing))
    else:
        with ProcessPoolExecutor() as pool:
            made = [path for path in pool.map(compile_one, sorted(missing), chunksize=32) if path]
    if len(sys.argv) > 1:
        with zipfile.ZipFile(sys.argv[1], "w") as archive:
            for path in made:
                item = zipfile.ZipInfo(path.lstrip("/"))  # with the constant time of 1980
                item.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(item, Path(path).read_bytes(), compresslevel=3)
    print(f"compiled {len(made)} of {len(missing)} modules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
