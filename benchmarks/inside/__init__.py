"""Programs that run in the images: standard library, NumPy and the framework, on Python 3.9 and newer."""
