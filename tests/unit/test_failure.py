"""What counts as another rank's failure, and what a rank says of its own."""

import json

import pytest
from torch.distributed import DistBackendError, DistNetworkError

from puzzle_align.runtime.liveness import failure
from puzzle_align.runtime.liveness.activity import activity

CLOSED = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize(
    "error", [RuntimeError(CLOSED), DistBackendError("NCCL error"), DistNetworkError("no answer")]
)
def test_lost_connections_are_another_rank_s_failure(error: Exception) -> None:
    assert failure.lost_peer(error)
    with pytest.raises(ValueError) as wrapped:
        try:
            raise error
        except RuntimeError as caught:
            raise ValueError("the checkpoint could not be written") from caught
    assert failure.lost_peer(wrapped.value)


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), ValueError("bad row")])
def test_other_errors_are_this_rank_s_own(error: Exception) -> None:
    assert not failure.lost_peer(error)


def test_a_failure_is_told_with_what_was_being_done(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(RuntimeError) as raised, activity("action actor:F3.0 (12 of 40)"):
        raise RuntimeError("out of memory\nby far")
    failure.report(raised.value)
    headline, *trace = capsys.readouterr().err.splitlines()
    assert headline == "rank 0 failed in action actor:F3.0 (12 of 40): RuntimeError: out of memory"
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[-3:] == [
        "RuntimeError: out of memory",
        "by far",
        "in action actor:F3.0 (12 of 40)",
    ]
    words = json.loads((tmp_path / "error.json").read_text())["message"]
    assert words["message"] == headline
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]
