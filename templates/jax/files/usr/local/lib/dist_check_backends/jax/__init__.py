"""JAX's module of dist-check: jax.distributed and psum. Constants, without importing it."""

DISTRIBUTION = "jax"
LIBRARIES = {"cpu": "gloo", "gpu": "nccl"}
# The processes connect to a coordinator; the data uses other connections.
HAS_COORDINATOR = True
# The check needs little of a GPU's memory.
VARIABLES = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
