"""Configuration of all programs of Jupyter: kernels use Unix sockets, which only their user can open.

Everyone in the container's network can reach a kernel's ports, and a kernel sends the source and the output of each
cell to whoever connects, without authentication.
"""

import os
import sys

sys.path.append("/usr/local/lib")
from workstation import state

c = get_config()  # type: ignore[name-defined]  # noqa: F821

c.KernelManager.transport = "ipc"
# The sockets are files in this folder. Their paths have at most 107 bytes (unix(7)), and a home can be long.
os.environ.setdefault("JUPYTER_RUNTIME_DIR", f"{state.make()}/jupyter")
