"""The launcher of the images: checks, user, GPUs, services. Runs on every Python that an image may have."""
