"""The launcher of the images: checks, user, GPUs, services. It runs on the Python versions of all images."""
