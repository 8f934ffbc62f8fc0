"""The kinds of foreign files: each module here has a class ``Kind``, as in ``harness``."""
