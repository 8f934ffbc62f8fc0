"""A Transformer Engine that fails to import is one that is not there."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from puzzle_align.config.sections.engine import EngineConfig
from puzzle_align.models.transformer_engine import import_error, is_absent
from puzzle_align.stages.engine import resolve_engine

NO_DRIVER = "libcuda.so.1: cannot open shared object file"
# Sources of the package and of its half for torch, and the reason that they give.
BROKEN = {
    "driver": (f"raise OSError('{NO_DRIVER}:\\nno such file')", "", f"{NO_DRIVER}: no such file"),
    "cuda": ("raise RuntimeError('cublas shared object not found.')", "", "cublas shared object"),
    "versions": ("", "assert False, 'package version mismatch'", "package version mismatch"),
    "torch": ("", f"raise ImportError('{NO_DRIVER}')", NO_DRIVER),
}


def write_package(folder: Path, package: str, pytorch: str) -> None:
    (folder / "transformer_engine").mkdir()
    # Megatron-core tries it in many modules: executions are counted.
    count = "with open(__file__ + '.count', 'a') as file: file.write('x')\n"
    (folder / "transformer_engine" / "__init__.py").write_text(count + package)
    (folder / "transformer_engine" / "pytorch.py").write_text(pytorch)
    (folder / "transformer_engine_torch.py").write_text("")


@pytest.fixture(params=BROKEN)
def reason(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch) -> Iterator[str]:
    """Put a broken Transformer Engine on the path; the reason why it cannot be imported."""
    package, pytorch, reason = BROKEN[request.param]
    write_package(tmp_path, package, pytorch)
    for name in [*sys.modules]:
        if name.partition(".")[0] == "transformer_engine":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    import_error.cache_clear()
    yield reason
    import_error.cache_clear()


def test_auto_takes_megatron_s_layers_and_names_the_reason(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = resolve_engine(EngineConfig(device="cuda"), elsewhere=True)
    assert engine.options.transformer_impl == "local"
    (line,) = caplog.messages
    assert reason in line and "\n" not in line
    assert caplog.records[0].levelno == logging.WARNING


def test_where_it_is_asked_for_the_error_names_the_reason(reason: str, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ValueError) as caught:
        resolve_engine(EngineConfig(device="cuda", transformer_impl="te"))
    text = f"{caught.value}"
    assert text.startswith("engine.transformer_impl=te: Transformer Engine cannot be imported (")
    assert reason in text and "\n" not in text


def test_it_is_executed_once(reason: str, tmp_path: Path) -> None:
    for _ in range(3):
        error = import_error()
        assert error is not None and not is_absent(error)
        assert reason in " ".join(str(error).split())
        with pytest.raises(ModuleNotFoundError):
            __import__("transformer_engine")
    assert (tmp_path / "transformer_engine" / "__init__.py.count").read_text() == "x"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"), [("models.chunk", "torch"), ("runtime.groups.world", "driver")]
)
def test_megatron_core_is_imported_beside_it(module: str, name: str, tmp_path: Path) -> None:
    """Each alone: it may be the first to import Megatron-core."""
    package, pytorch, _ = BROKEN[name]
    write_package(tmp_path, package, pytorch)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += f"import puzzle_align.{module}\n"
    code += "from megatron.core import fp8_utils; assert not fp8_utils.HAVE_TE"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
