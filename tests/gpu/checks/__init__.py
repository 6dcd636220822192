"""What the GPU smoke tests check, one module per framework. This runs inside images: Python 3.9 and newer."""
