"""Which framework, CUDA, Python, GPU and driver go together, and why others do not."""
