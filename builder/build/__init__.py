"""Makes layers and images, tests them, and checks the machine for that.

Whatever needs both the store and the engine is here: layers of packages that `builder add` puts on an image, and
`builder doctor`, which checks before a build what a build needs.
"""
