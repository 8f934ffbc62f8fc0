"""Transformer Engine's Python sources over an extension in plain torch, to run its layers on CPUs.

The sources are those of the pinned version, as pip brings them; in place of the compiled half is
``emulated_te_torch.py``. Four places that ask for a device are changed.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

VERSION = "2.11.0"
_EXTENSION = Path(__file__).with_name("emulated_te_torch.py")
# By file: what is there, and what is put in its place.
_CHANGES = {
    "pytorch/cpp_extensions/gemm.py": [
        (
            "workspace = get_cublas_workspace(get_tensor_device(A), ub is not None, False)",
            "workspace = torch.empty(1)",
        )
    ],
    "pytorch/module/base.py": [
        ('device="cuda",', 'device="cpu",'),
        ('assert torch.cuda.is_available(), "TransformerEngine needs CUDA."', "pass"),
        ('assert inp.is_cuda, "TransformerEngine needs CUDA."', "pass"),
    ],
}
_LOADER = """
def load_framework_extension(framework):
    import transformer_engine_torch
"""
# Packages for exports and layouts, which no layer of ours reaches.
_UNUSED = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return None
"""


def write(folder: Path) -> bool:
    """Write the package into a folder; False if pip cannot download it."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    done = subprocess.run([*command, f"transformer-engine=={VERSION}"], capture_output=True)
    if done.returncode:
        return False
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    package = folder / "transformer_engine"
    for name, changes in _CHANGES.items():
        source = (package / name).read_text(encoding="utf-8")
        for there, instead in changes:
            assert source.count(there) == 1, (name, there, source.count(there))
            source = source.replace(there, instead)
        (package / name).write_text(source, encoding="utf-8")
    common = package / "common" / "__init__.py"
    source, _, _ = common.read_text(encoding="utf-8").partition(
        '\nif "NVTE_PROJECT_BUILDING" not in os.environ'
    )
    common.write_text(source + _LOADER, encoding="utf-8")
    (package / "pytorch" / "onnx_extensions.py").write_text(_UNUSED)
    (folder / "einops.py").write_text(_UNUSED)
    (folder / "transformer_engine_torch.py").write_text(_EXTENSION.read_text(encoding="utf-8"))
    return True
