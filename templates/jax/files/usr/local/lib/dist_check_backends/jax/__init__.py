"""JAX's part of dist-check: jax.distributed and psum. What is known without importing it stands here."""

DISTRIBUTION = "jax"
LIBRARIES = {"cpu": "gloo", "gpu": "nccl"}
# The processes find one another at a coordinator; the data goes over further connections.
MEETS_APART = True
# The whole memory of a GPU is not needed to add some numbers.
VARIABLES = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
