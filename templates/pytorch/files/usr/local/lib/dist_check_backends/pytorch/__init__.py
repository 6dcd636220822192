"""PyTorch's module of dist-check: torch.distributed. Constants, without importing it."""

DISTRIBUTION = "torch"
LIBRARIES = {"cpu": "gloo", "gpu": "nccl"}
# The ranks connect to a store; the data uses other connections.
HAS_COORDINATOR = True
VARIABLES: dict[str, str] = {}
