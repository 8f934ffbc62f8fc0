"""Progress: its lines in a log, and what a terminal shows."""

import fcntl
import io
import logging
import os
import pty
import re
import select
import struct
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

import pytest

from puzzle_align.telemetry import text
from puzzle_align.telemetry.progress import Progress


def test_step_lines():
    now, stream = [0.0], io.StringIO()
    lines = Progress(200, 10, wants_bar=True, stream=stream, clock=lambda: now[0])
    now[0] = 0.66
    metrics = {
        "pairs_per_second": 35.1234,
        "tokens_per_second": 4123.0,
        "loss": 0.693147,
        "rewards/accuracies": 0.5156,
        "learning_rate": 1e-6,
        "logps/chosen": -100.0,
    }
    lines.step(11, metrics, logged=False)
    lines.step(12, metrics, logged=True)
    assert stream.getvalue() == (  # 0.33 s a step since step 10, 188 to go
        "step 12/200 loss 0.6931 rewards/accuracies 0.52 lr 1.00e-06"
        " 35.1 pairs/s 4.12k tok/s eta 1m02s\n"
    )


def test_the_line_of_a_ppo_step():
    stream = io.StringIO()
    metrics = {
        "responses_per_second": 12.0,
        "tokens_per_second": 345.0,
        "loss/policy_avg": -0.00123,
        "loss/value_avg": 0.5,
        "kl": 0.5,  # of a token
        "objective/kl": 0.0421,
        "objective/scores": 0.31234,
        "policy/approxkl_avg": 0.00123,
        "policy/clipfrac_avg": 0.0125,
        "completions/mean_length": 15.25,
        "val/ratio": 1.0,
        "learning_rate": 1e-3,
    }
    lines = Progress(2, wants_bar=True, stream=stream, clock=lambda: 0.0)
    lines.step(1, metrics, logged=True)
    assert stream.getvalue() == (
        "step 1/2 scores 0.3123 kl 0.0421 approxkl 1.23e-03 clipfrac 0.013 loss/policy -0.0012"
        " loss/value 0.5000 length 15.2 lr 1.00e-03 12 responses/s 345 tok/s eta 0s\n"
    )


def test_the_line_of_a_preparation():
    now, stream = [0.0], io.StringIO()
    lines = Progress(400, wants_bar=True, title="tokenize a", stream=stream, clock=lambda: now[0])
    now[0] = 30.0
    lines.show(99, ("7 pairs/s",), has_line=False)
    lines.show(100, ("7 pairs/s",), has_line=True)
    assert stream.getvalue() == "tokenize a: 25% 7 pairs/s eta 1m30s\n"


def test_a_preparation_of_unknown_size_shows_its_rate_alone() -> None:
    stream = io.StringIO()
    lines = Progress(0, wants_bar=True, title="tokenize a", stream=stream, clock=lambda: 1.0)
    lines.show(0, ("7 pairs/s",), has_line=True)
    assert stream.getvalue() == "tokenize a: 7 pairs/s\n"
    with _terminal(80) as (terminal, screen):
        bar = Progress(0, wants_bar=True, title="tokenize a", stream=terminal, clock=lambda: 1.0)
        bar.show(0, ("7 pairs/s",), has_line=True)
        assert screen() == ["", "tokenize a 7 pairs/s"]
        bar.close()
        assert screen() == []


def test_a_terminal_gets_plain_lines_where_no_bar_is_wanted() -> None:
    with _terminal(80) as (terminal, screen):
        lines = Progress(2, wants_bar=False, stream=terminal, clock=lambda: 0.0)
        lines.step(1, {"loss": 0.5}, logged=False)
        lines.step(2, {"loss": 0.25}, logged=True)
        lines.close()
        assert screen() == ["step 2/2 loss 0.2500 eta 0s"]


@contextmanager
def _terminal(columns: int) -> Iterator[tuple[TextIO, Callable[[], list[str]]]]:
    """A terminal of so many columns: its stream, and what reads the lines on its screen."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    rows, seen = [""], io.StringIO()

    def screen() -> list[str]:
        while select.select([ours], [], [], 0.1)[0]:
            seen.write(os.read(ours, 65536).decode())
        row = column = 0
        for piece in re.findall(r"\r|\n|\x1b\[\d*[AJ]|[^\r\n\x1b]+", seen.getvalue()):
            if piece == "\r":
                column = 0
            elif piece == "\n":
                row += 1
                rows.extend([""] * (row + 1 - len(rows)))
            elif piece == "\x1b[J":
                rows[row:] = [rows[row][:column]]
            elif piece.startswith("\x1b"):
                row -= int(piece[2:-1])
            else:
                rows[row] = rows[row][:column] + piece + rows[row][column + len(piece) :]
                column += len(piece)
        return rows[:-1] if not rows[-1] else rows

    with open(theirs, "w") as stream:
        yield stream, screen
    os.close(ours)


@pytest.mark.parametrize(("columns", "eta"), [(80, " 7h30m"), (140, " 7h30m"), (74, "")])
def test_two_lines_on_a_terminal_keep_to_its_width(columns: int, eta: str) -> None:
    logger, handlers = logging.getLogger("puzzle_align.test"), logging.getLogger().handlers
    now = [0.0]
    with _terminal(columns) as (stream, screen):
        handlers.append(handler := logging.StreamHandler(stream))
        bar = Progress(2000, 1000, wants_bar=True, stream=stream, clock=lambda: now[0])
        metrics = {
            "loss": 0.693147,
            "rewards/accuracies": 0.5156,
            "rewards/margins": 0.0123,
            "grad_norm": 12.345,
            "learning_rate": 1.25e-6,
            "pairs_per_second": 135.1,
            "tokens_per_second": 123456.0,
        }
        for step in range(1001, 1101):
            now[0] += 30.0
            bar.step(step, metrics, logged=True)
            if step == 1050:
                logger.warning("an update was skipped")
                stream.write("printed by a reward function\n")
                bar.say("eval at step 1050")
        bar.close()
        bar.say("summary")
        handlers.remove(handler)
        lines = screen()
    assert handler.stream is stream  # given back
    assert lines == [
        "an update was skipped",
        "printed by a reward function",
        "eval at step 1050",
        f"step 1100/2000 [###########         ] 55% 135 pairs/s 123k tok/s eta{eta}",
        "loss 0.6931 accuracy 0.52 grad_norm 12.3 lr 1.25e-06",
        "summary",
    ]


def test_the_lines_of_a_ppo_step_fit_80_columns() -> None:
    metrics = {
        "objective/scores": -10.31234,
        "objective/kl": 12.0421,
        "loss/policy_avg": -0.00123,
        "loss/value_avg": 0.5,
        "policy/grad_norm": 0.0001234,
        "policy/learning_rate": 1.25e-6,
        "responses_per_second": 12.0,
        "tokens_per_second": 34567.0,
    }
    with _terminal(80) as (stream, screen):
        bar = Progress(100000, 0, wants_bar=True, stream=stream)
        bar.step(12345, metrics, logged=True)
        bar.close()
        first, second = screen()
    assert re.fullmatch(
        r"step 12345/100000 \[##  .*\] 12% 12 responses/s 34.6k tok/s eta .*", first
    )
    assert second == "score -10.3123 loss -0.0012 kl 12.0421 grad_norm 0.000123 lr 1.25e-06"
    assert max(len(first), len(second)) <= 79


def test_words_that_do_not_fit_are_left_out_whole() -> None:
    assert text.cut("loss 0.5 lr 1", 8) == "loss 0.5" == text.cut("loss 0.5", 8)
    assert text.cut("loss 0.5 lr 1", 9) == "loss 0.5"
    assert text.cut("x" * 100, 9) == "x" * 9


def test_a_log_that_cannot_be_written_ends_no_run():
    """Its disk is full, or who reads it has left."""
    for make in (lambda: open("/dev/full", "w"), _without_reader):  # noqa: SIM115
        stream = make()
        lines = Progress(2, wants_bar=True, stream=stream)
        lines.step(1, {"loss": 0.5}, logged=True)
        lines.say("a line")
        lines.close()
        with suppress(OSError):
            stream.close()


def _without_reader() -> TextIO:
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")
