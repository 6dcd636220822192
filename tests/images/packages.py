"""A session of a user who installs packages, in the environment of the image and in their own."""

from __future__ import annotations

from typing import Any

from packaging.requirements import Requirement

# Image tests use no package index. This writes a wheel with a module and a script to /tmp/wheels for each argument
# `NAME VERSION REQUIREMENT...`.
WRITE_WHEELS = """
import os, sys, zipfile

def write_wheel(name, version, *requirements):
    module = {"nvidia-ml-py": "pynvml"}.get(name, name.replace("-", "_"))
    stem = name.replace("-", "_") + "-" + version
    info = stem + ".dist-info/"
    files = {
        module + ".py": f"version = {version!r}\\ndef main(): print(version)\\n",
        info + "METADATA": f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n"
                           + "".join(f"Requires-Dist: {text}\\n" for text in requirements),
        info + "WHEEL": "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        info + "entry_points.txt": f"[console_scripts]\\n{name}-version = {module}:main\\n",
    }
    files[info + "RECORD"] = "".join(f"{path},,\\n" for path in (*files, info + "RECORD"))
    with zipfile.ZipFile(f"/tmp/wheels/{stem}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)

os.makedirs("/tmp/wheels", exist_ok=True)
for argument in sys.argv[1:]:
    write_wheel(*argument.split())
"""
PIP = "pip install --quiet --no-index --disable-pip-version-check --find-links /tmp/wheels"
UV = "uv pip install --offline --no-index --find-links /tmp/wheels"
REMOVE = {PIP: "pip uninstall -y", UV: "uv pip uninstall"}


class Session:
    """A shell in a container with some wheels to install; one of them has the name of the framework."""

    def __init__(self, shell: Any, subject: Any) -> None:
        self.run, self.fails = shell.run, shell.fails
        self.installers = [PIP, UV] if "uv" in subject.wheels else [PIP]
        self.framework = Requirement(subject.data["requirements"][subject.cell["framework"]][0]).name
        self.module = {"tensorflow-cpu": "tensorflow"}.get(self.framework, self.framework)
        wheels = ("harmless 1.0", "harmless 2.0.1", "nvidia-ml-py 999.0", f"{self.framework} 999.0")
        self.run(["python", "-c", WRITE_WHEELS, *wheels, f"dependent 1.0 {self.framework} nvidia-ml-py"])

    def python(self, code: str, python: str = "python") -> str:
        return str(self.run([python, "-W", "ignore", "-c", code]))

    def version(self, name: str) -> str:
        return self.python(f"import importlib.metadata as m; print(m.version({name!r}))")


WHERE = "import importlib.util as u; print(u.find_spec({!r}).origin)"

# docs/workstation.md; tests/unit/test_repository.py compares them.
DOCUMENTED = [
    "docker exec C pip install requests==2.31.0",
    "docker exec C uv pip install -r requirements.txt",
    "python -m venv .venv",
    "python -m venv --system-site-packages .venv",
]
OFFLINE = {
    "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/tmp/wheels", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "UV_OFFLINE": "1", "UV_NO_INDEX": "1", "UV_FIND_LINKS": "/tmp/wheels",
}  # fmt: skip
