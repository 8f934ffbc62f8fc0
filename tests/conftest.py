"""Set-up for all tests."""

from hypothesis import settings

# No test is timed: on a machine with other work a case may take any time.
settings.register_profile("puzzle_align", deadline=None)
settings.load_profile("puzzle_align")
