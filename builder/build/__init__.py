"""Makes layers and images, tests them, and checks the machine for that.

Whatever needs both the store and the engine is here: layers of packages that `builder add` puts on an image, the check
that the disk has room, and `builder doctor`, which asks the same questions as a build before there is one.
"""
