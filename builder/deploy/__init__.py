"""Examples of running an image with Compose, Kubernetes and Slurm."""
