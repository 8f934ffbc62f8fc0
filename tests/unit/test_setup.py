"""Which layers ``engine.transformer_impl=auto`` chooses on a GPU."""

import importlib.util
import sys
from types import ModuleType

import pytest

from puzzle_align.config.sections.engine import EngineConfig
from puzzle_align.stages.setup import resolve_engine

CUDA = EngineConfig(device="cuda")
WHOLE = importlib.util.find_spec("transformer_engine") is not None


def _chosen() -> str:
    return resolve_engine(CUDA, elsewhere=True).options.transformer_impl


@pytest.mark.skipif(WHOLE, reason="Transformer Engine is installed")
def test_without_transformer_engine_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert _chosen() == "local"
    assert not caplog.records


def test_transformer_engine_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert _chosen() == "te"


def test_one_that_cannot_be_imported_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = ModuleType("transformer_engine")
    broken.__path__ = []
    monkeypatch.setitem(sys.modules, "transformer_engine", broken)
    monkeypatch.delitem(sys.modules, "transformer_engine.pytorch", raising=False)
    assert _chosen() == "local"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No module named 'transformer_engine.pytorch'" in caplog.text
    assert "\n" not in caplog.messages[0]
