"""The steps from plan to tagged images: assembling, the Dockerfile way, tests, disk."""
