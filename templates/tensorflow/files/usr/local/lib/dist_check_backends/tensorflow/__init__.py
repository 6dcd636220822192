"""TensorFlow's part of dist-check: MultiWorkerMirroredStrategy. What is known without importing it stands here."""

DISTRIBUTION = "tensorflow"
LIBRARIES = {"cpu": "ring over gRPC", "gpu": "nccl"}
# The workers' gRPC servers carry the data too.
MEETS_APART = False
VARIABLES = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # The whole memory of a GPU is not needed to add some numbers.
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    # The ranks talk to one another, never to a proxy that was set for downloads.
    "no_grpc_proxy": "*",
}
