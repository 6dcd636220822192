"""TensorFlow's module of dist-check: MultiWorkerMirroredStrategy. Constants, without importing it."""

DISTRIBUTION = "tensorflow"
LIBRARIES = {"cpu": "ring over gRPC", "gpu": "nccl"}
# The data uses the connections of the workers' gRPC servers.
HAS_COORDINATOR = False
VARIABLES = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # The check needs little of a GPU's memory.
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    # Connections between ranks must not use a proxy for downloads.
    "no_grpc_proxy": "*",
}
