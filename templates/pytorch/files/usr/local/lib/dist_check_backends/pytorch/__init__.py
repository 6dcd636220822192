"""PyTorch's part of dist-check: torch.distributed. What is known without importing it stands here."""

DISTRIBUTION = "torch"
LIBRARIES = {"cpu": "gloo", "gpu": "nccl"}
# The ranks find one another in a store of its own; the data goes over further connections.
MEETS_APART = True
VARIABLES: dict[str, str] = {}
