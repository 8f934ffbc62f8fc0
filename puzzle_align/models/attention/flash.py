"""Choice of the FlashAttention that ``varlen`` uses on CUDA: torch's, or a newer installed one.

If FlashAttention 3 or 4 is installed, torch can use it instead of its built-in 2, for the whole
process: also for ``F.scaled_dot_product_attention``.
"""

from importlib import import_module

import torch
from torch.nn import attention
from torch.torch_version import TorchVersion

_MODULES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute.interface"}
_PACKAGES = {"fa3": "flash-attn-3", "fa4": "flash-attn-4"}
_CAPABILITIES = {"fa3": (9,), "fa4": (9, 10)}  # major versions on which torch uses them


def use_flash_attention(wanted: str, device: torch.device) -> str:
    """Activate FlashAttention ``wanted`` in this process; return its name.

    Args:
        wanted: fa2, fa3, fa4, or auto: the first that works of fa3, fa4, fa2.
        device: a CUDA device.

    Raises:
        ValueError: one line, if ``wanted`` does not work here.
    """
    if wanted == "fa2":
        _restore()
        return wanted
    capability = torch.cuda.get_device_capability(device)
    for name in _MODULES if wanted == "auto" else (wanted,):
        reason = why_no_flash(name, capability) or _why_not_active(name)
        if reason is None:
            return name
        if name == wanted:
            raise ValueError(f"engine.flash_attention={name}: {reason}, or set it to auto")
    _restore()
    return "fa2"


def why_no_flash(name: str, capability: tuple[int, int]) -> str | None:
    """Reason why fa3 or fa4 cannot run on a device of this capability; None if it can."""
    if capability[0] not in _CAPABILITIES[name]:
        number = ".".join(map(str, capability))
        return f"it has no kernels for compute capability {number}; set it to fa2"
    if name == "fa4" and TorchVersion(torch.__version__) < TorchVersion("2.12"):
        return "torch 2.11 has no causal backward through it; install torch 2.12"
    return why_no_import(_MODULES[name], _PACKAGES[name])


def why_no_import(module: str, package: str) -> str | None:
    """Reason why a module of a package to install does not import; None if it does."""
    try:
        import_module(module)
    except Exception as error:  # noqa: BLE001 a broken package raises what it likes
        reason = " ".join(str(error).split())
        return f"{module} does not import ({reason}); install {package}"
    return None


def _why_not_active(name: str) -> str | None:
    """Activate fa3 or fa4; return the reason if that fails."""
    try:
        attention.activate_flash_attention_impl(name.upper())
    except Exception as error:  # noqa: BLE001 as above: maybe another version, without kernels
        reason = " ".join(str(error).split())
        return f"torch cannot use it ({reason}); install another {_PACKAGES[name]}"
    return None


def _restore() -> None:
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()
