"""The GPU checks, one module for each framework. They run in images, so they support Python 3.9 and newer."""
