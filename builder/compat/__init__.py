"""Which framework, CUDA, Python, GPU and driver work together, and why other combinations do not."""
