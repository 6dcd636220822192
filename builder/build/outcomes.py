"""Outcomes of image tests that are neither a pass nor a failure.

A module of its own, so that test processes need not import `image_tests`, which takes 0.2 s.
"""

NOT_APPLICABLE = "not applicable"  # of a GPU test that has nothing to check on this GPU
