"""Compilers: builds and runs C++ and a Python extension in the image."""

from __future__ import annotations

import pytest
from testinfra.host import Host

EXTENSION = r"""
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *none) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "own", 0, -1, methods};
PyMODINIT_FUNC PyInit_own(void) { return PyModule_Create(&module); }
"""


@pytest.mark.parametrize("tool", ["gcc", "g++", "make", "cmake", "ninja", "gdb"])
def test_tool_runs(host: Host, tool: str) -> None:
    assert host.run(f"{tool} --version").rc == 0


def test_a_program_built_with_cmake_runs(host: Host) -> None:
    host.check_output("mkdir -p /tmp/own")
    host.check_output(
        "printf %s > /tmp/own/CMakeLists.txt",
        "cmake_minimum_required(VERSION 3.18)\nproject(own CXX)\nadd_executable(own own.cc)",
    )
    host.check_output("printf %s > /tmp/own/own.cc", "#include <iostream>\nint main() { std::cout << 6 * 7; }")
    host.check_output("cd /tmp/own && cmake -G Ninja -S . -B build >/dev/null && cmake --build build >/dev/null")
    assert host.check_output("/tmp/own/build/own") == "42"


def test_a_python_extension_is_built_and_imported(host: Host) -> None:
    host.check_output("mkdir -p /tmp/ext && echo %s > /tmp/ext/own.c", EXTENSION)
    flags = host.check_output('python -c \'import sysconfig; print("-I" + sysconfig.get_path("include"))\'')
    host.check_output(f"cd /tmp/ext && gcc -shared -fPIC {flags} own.c -o own.so")
    assert host.check_output("cd /tmp/ext && python -c 'import own; print(own.answer())'") == "42"
