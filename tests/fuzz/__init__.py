"""Foreign files of every kind, damaged at random: each ends in one line, or is as it was.

``python -m tests.fuzz`` runs ten thousand cases of every kind; ``--help`` says more. A kind is a
module of ``tests.fuzz.kinds`` with a class ``Kind`` (``harness.Kind`` says what it must have).
"""
