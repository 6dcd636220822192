"""Making images: assembling, the Dockerfile way, operating systems, image tests."""
