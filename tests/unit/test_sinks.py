"""Sinks on a disk that fails."""

from functools import partial

import pytest

from puzzle_align.telemetry import Sample
from puzzle_align.telemetry.sinks import JsonlSink, Sink, TensorBoardSink


@pytest.mark.parametrize("kind", ["metrics", "samples", "tensorboard"])
@pytest.mark.parametrize("fault", ["full", "deleted"])
def test_what_cannot_be_written_is_one_line_with_its_path(tmp_path, capfd, kind, fault):
    folder = tmp_path / "out"
    sink: Sink = JsonlSink(folder / "metrics.jsonl", None)
    path = folder / f"{kind}.jsonl"
    if kind == "tensorboard":
        pytest.importorskip("tensorboard")
        path = folder / kind
        sink = TensorBoardSink(path, None)
    if fault == "deleted":  # in one go: TensorBoard's thread may be writing
        folder.rename(tmp_path / "gone")
    else:
        full = tmp_path / "full"
        full.symlink_to("/dev/full")
        for file in path.iterdir() if kind == "tensorboard" else [path]:
            full.rename(file)
    write = partial(sink.write_samples, 2, [Sample("p", "r", 0.5)])
    if kind != "samples":
        write = partial(sink.write, 2, {"loss": 0.5})
    why = "No space left on device" if fault == "full" else "No such file or directory"
    with pytest.raises(ValueError) as raised:
        write()
    assert str(raised.value) == (
        f"{path} cannot be written ({why}): free space or mend the disk there, and run the same"
        " command again"
    )
    assert capfd.readouterr().err == ""
