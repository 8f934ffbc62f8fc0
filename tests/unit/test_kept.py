"""Results that objects keep of their methods."""

import gc
import weakref

from puzzle_align.planning.search.times import kept


class _Squares:
    def __init__(self) -> None:
        self.asked: list[int] = []

    @kept
    def of(self, number: int) -> int:
        self.asked.append(number)
        return number**2


def test_a_method_runs_once_for_each_argument_and_object() -> None:
    one, other = _Squares(), _Squares()
    assert [one.of(3), one.of(4), one.of(3), other.of(3)] == [9, 16, 9, 9]
    assert (one.asked, other.asked) == ([3, 4], [3])


def test_what_is_kept_goes_with_its_object_at_once() -> None:
    own = _Squares()
    own.of(3)
    gone = weakref.ref(own)
    gc.disable()
    try:
        del own
        assert gone() is None
    finally:
        gc.enable()
