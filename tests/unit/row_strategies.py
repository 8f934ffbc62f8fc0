"""Random rows for property tests."""

from hypothesis import strategies as st

from puzzle_align.layout.rows import RowLayout, Segment

# Single tokens often, and lengths that cross blocks of 128 sometimes.
LENGTHS = st.one_of(st.just(1), st.integers(1, 12), st.integers(100, 200))
PROMPTS = st.one_of(st.just(0), LENGTHS)
GAPS = st.one_of(st.just(0), st.just(0), st.integers(1, 150))


@st.composite
def layouts(draw: st.DrawFn, max_segments: int = 4, max_responses: int = 3) -> RowLayout:
    """Rows of no to ``max_segments`` segments, with and without padding before and after each.

    Some segments have no prompt.
    """
    segments, at = [], draw(GAPS)
    for _ in range(draw(st.integers(0, max_segments))):
        responses = draw(st.lists(LENGTHS, min_size=1, max_size=max_responses))
        segment = Segment(at, draw(PROMPTS), tuple(responses))
        segments.append(segment)
        at = segment.end + draw(GAPS)
    return RowLayout(max(at, 1), tuple(segments))
