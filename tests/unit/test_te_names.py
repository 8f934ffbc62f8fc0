"""The names that Megatron-core takes from Transformer Engine are there in the versions we allow.

Only the sources are read: Transformer Engine itself needs CUDA. Unseen are its compiled half, and
whatever ``tests.unit.te_uses`` cannot follow.
"""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.unit.te_names import Sources, Tables, is_defined, tables, takes
from tests.unit.te_uses import Use, uses_in

ROOT = Path(__file__).parents[2]
_TE = "transformer_engine.pytorch"

# Absences are (name, keyword). Nothing of ours reaches these.
UNREACHED_FILES = (  # of Megatron-core: experts, tensors split over replicas, graphs, FP4, serving
    "transformer/moe/",
    "tensor_parallel/generalized_tensor_parallelism.py",
    "tensor_parallel/inference_layers.py",
    "transformer/cuda_graphs.py",
    "fp4_utils.py",
    "inference/",
)
UNREACHED = {
    # Delayed scaling is a pydantic dataclass, which ignores them; our configs have other recipes.
    ("transformer_engine.common.recipe.DelayedScaling", "device"),
    ("transformer_engine.common.recipe.DelayedScaling", "override_linear_precision"),
    ("transformer_engine.common.recipe.DelayedScaling", "params_dtype"),
}
UNREACHED_IN_2_9 = {
    (f"{_TE}.DotProductAttention.forward", "num_splits"),  # after an assertion on the version
    # Passed only if ``post_all_gather_processing`` is there.
    (f"{_TE}.tensor.utils.cast_master_weights_to_fp8", "manual_post_all_gather_processing"),
}
# An ImportError is caught, and Megatron-core goes on without them.
SPLIT = {  # it splits queries, keys and values with torch
    (f"{_TE}.attention._SplitAlongDim", ""),
    (f"{_TE}.attention._SplitAlongDim.apply", ""),
}
NO_WORKSPACE = SPLIT | {  # routers of experts multiply with torch
    (f"{_TE}.module.base.get_workspace", ""),
    (f"{_TE}.cpp_extensions.general_gemm", "workspace"),
}
NO_V1 = SPLIT | {
    (f"{_TE}.cpu_offload_v1", ""),  # it takes cpu_offload
    (f"{_TE}.tensor.utils.post_all_gather_processing", ""),  # for weights in FP8
}
NO_EXPERTS = NO_WORKSPACE | {(f"{_TE}.ep.is_symm_backed", "")}  # buffers of experts
# By version of Megatron-core and of Transformer Engine, the newest last: what is absent, with and
# without a fallback.
PAIRS = {
    "0.16": {
        "2.9.0": (NO_V1, UNREACHED | UNREACHED_IN_2_9),
        "2.10.0": (NO_WORKSPACE, UNREACHED),
        "2.11.0": (NO_WORKSPACE, UNREACHED),
    },
    # Before 2.14 its gradient norm would be Megatron's own, which makes the host wait.
    "0.19": {
        **dict.fromkeys(("2.14.1", "2.15.0", "2.16.1", "2.17.1"), (NO_EXPERTS, UNREACHED)),
        **dict.fromkeys(("2.18.0", "2.19.0", "2.20.2"), (NO_WORKSPACE, UNREACHED)),
    },
}
IS_OLD = Version(importlib.metadata.version("megatron-core")) < Version("0.17")
ABSENT = PAIRS["0.16" if IS_OLD else "0.19"]
NEWEST = [*ABSENT][-1]


def tables_file(version: str) -> Path:
    return ROOT / "tests" / "golden" / f"transformer_engine_{version}.json"


@cache
def uses(version: str) -> list[Use]:
    """Uses in what we reach of Megatron-core, and in our package, with this version installed."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations is not None
    folders = [Path(*spec.submodule_search_locations), ROOT / "puzzle_align"]
    found = []
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            source = file.read_text(encoding="utf-8")
            name = str(file.relative_to(folder))
            if "transformer_engine" in source and not name.startswith(UNREACHED_FILES):
                found += uses_in(source, name, version)
    return found


def missing(described: Tables, wanted: list[Use]) -> list[Use]:
    """Uses of names and parameters that are not in the tables."""
    return [
        use
        for use in wanted
        if not (
            takes(described, use.name, use.keyword)
            if use.keyword
            else is_defined(described, use.name)
        )
    ]


def tables_of(sources: Sources, wanted: list[Use]) -> Tables:
    """The tables that hold these uses, for ``tables_file``."""
    keywords = {use.name for use in wanted if use.keyword}
    return tables(sources, sorted({use.name for use in wanted} | LAYERS), sorted(keywords))


# ``models.megatron_config.fuse_gradient_accumulation`` sets it on layers.
LAYERS = {f"{_TE}.{layer}.fuse_wgrad_accumulation" for layer in ("Linear", "LayerNormLinear")}


def check(described: Tables, version: str) -> None:
    absent = missing(described, uses(version))
    shown = "\n".join(f"{u.place}: {u.name} {u.keyword}" for u in absent)
    for has_fallback, known in zip((True, False), ABSENT[version], strict=True):
        found = {(u.name, u.keyword) for u in absent if u.has_fallback == has_fallback}
        assert found == known, shown
    assert all(is_defined(described, name) for name in LAYERS)


def test_the_newest_allowed_version_has_every_name() -> None:
    check(json.loads(tables_file(NEWEST).read_text()), NEWEST)


def test_setup_allows_these_versions_and_no_others() -> None:
    lines = re.findall(r'"(transformer-engine\[.+)",', (ROOT / "setup.py").read_text())
    versions = ["2.8.0", *PAIRS["0.16"], *PAIRS["0.19"], "2.21.0"]
    for python, allowed in (("3.11", [*PAIRS["0.16"]]), ("3.12", versions[1:-1])):
        wanted = [Requirement(line) for line in lines]
        (here,) = [r for r in wanted if r.marker and r.marker.evaluate({"python_version": python})]
        assert [*here.specifier.filter(versions)] == allowed  # Python 3.12 may have either Megatron


def test_the_layers_of_our_models_are_seen() -> None:
    """Were the collector to lose a kind of use, the names would still be found."""
    found = {(use.name, use.keyword) for use in uses(NEWEST)}
    assert {
        (f"{_TE}.Linear", "tp_group"),  # super().__init__(...)
        (f"{_TE}.Linear", "ub_overlap_ag"),  # extra_kwargs[...], passed with **
        (f"{_TE}.LayerNormLinear", "params_dtype"),  # a function's dictionary
        (f"{_TE}.RMSNorm", "zero_centered_gamma"),
        (f"{_TE}.DotProductAttention.set_context_parallel_group", ""),
        (f"{_TE}.attention.rope.apply_rotary_pos_emb", "interleaved"),
        (f"{_TE}.optimizers.FusedAdam", "adam_w_mode"),  # adam_cls = Adam; adam_cls(**kwargs)
        (f"{_TE}.fp8.fp8_autocast", "fp8_recipe"),
        (f"{_TE}.fp8.FP8GlobalStateManager.is_fp8_enabled", ""),
        ("transformer_engine.common.recipe.Format.HYBRID", ""),
    } <= found
    assert (f"{_TE}.Linear", "ub_split_ag") not in found  # of versions before 1.5


IMPORTED = "import transformer_engine as te\n"


@pytest.mark.parametrize(
    ("source", "absent"),
    [
        ("from transformer_engine.pytorch import Linear, NoLayer", ["NoLayer"]),
        ("from transformer_engine.pytorch.nowhere import f", ["nowhere.f"]),
        (IMPORTED + "class A(te.pytorch.NoLayer): pass", ["NoLayer"]),
        (IMPORTED + "def f(): return te.pytorch.ops.NoOperation()", ["ops.NoOperation"]),
        ("import transformer_engine.pytorch as x\nx.fp8_autocast(on=1)", ["fp8_autocast on"]),
        (
            IMPORTED + "class A(te.pytorch.Linear):\n def __init__(self):\n"
            "  k = {'bias': 0}\n  k['bais'] = 1\n  super().__init__(**k)",
            ["Linear bais"],
        ),
        (IMPORTED + "class A(te.pytorch.Linear):\n def f(self): super().gone()", ["Linear.gone"]),
        (IMPORTED + "if is_te_min_version('2.11'): te.pytorch.new", ["new"]),
        (IMPORTED + "if not is_te_min_version('2.12'): te.pytorch.old", ["old"]),
        (IMPORTED + "if HAVE_TE and is_te_min_version('2.12'): te.pytorch.new", []),
        (IMPORTED + "if is_te_min_version('2.11', check_equality=False): te.pytorch.new", []),
        (IMPORTED + "if get_te_version() < PkgVersion('2.9'): te.pytorch.old", []),
        (IMPORTED + "def f(te): te.pytorch.NoLayer", []),  # another te
        ("try:\n import json\nexcept ImportError:\n import transformer_engine.no", []),
    ],
)  # fmt: skip
def test_a_name_that_is_missing_is_found(source: str, absent: list[str]) -> None:
    described = json.loads(tables_file("2.11.0").read_text())
    found = missing(described, uses_in(source, "made_up.py", "2.11.0"))
    assert [f"{u.name} {u.keyword}".strip() for u in found] == [f"{_TE}.{name}" for name in absent]


def test_a_name_behind_a_failed_import_is_told_from_others() -> None:
    source = "try:\n from transformer_engine.pytorch import a\nexcept {}:\n a = None\n"
    for error, has_fallback in (("ImportError", True), ("(A, ImportError)", True), ("A", False)):
        (use,) = uses_in(source.format(error), "made_up.py", NEWEST)
        assert use == Use(f"{_TE}.a", "", has_fallback, "made_up.py:2")


@pytest.mark.slow
@pytest.mark.parametrize("version", ABSENT)
def test_the_sources_have_every_name(version: str, tmp_path: Path) -> None:
    """Download this version's Python sources, 0.7 MB; the newest's tables are made from them."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path)]
    done = subprocess.run([*command, f"transformer-engine=={version}"], capture_output=True)
    if done.returncode:
        pytest.skip(f"pip cannot download transformer-engine {version}")
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    described = tables_of(Sources(tmp_path / "transformer_engine"), uses(version))
    check(described, version)
    if version == NEWEST:
        lines = (f"{json.dumps(name)}: {json.dumps(names)}" for name, names in described.items())
        text = "{\n" + ",\n".join(lines) + "\n}\n"
        made = tmp_path / tables_file(version).name
        made.write_text(text)
        assert tables_file(version).read_text() == text, f"copy {made} to tests/golden"
