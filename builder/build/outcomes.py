"""Outcomes of image tests that are neither a pass nor a failure.

Apart from what runs the tests: each run of them is a process of its own, which would take 0.2 s longer to start.
"""

NOT_APPLICABLE = "not applicable"  # of a GPU test that has nothing to check on this GPU
REUSED = "reused"  # of a thorough test that another image passed
