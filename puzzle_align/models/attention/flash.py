"""Which FlashAttention computes ``varlen``'s calls on CUDA: torch's own, or a newer one beside it.

Torch lets FlashAttention 3 or 4, where they are installed, take the place of its own 2 for the
whole process: also for what ``F.scaled_dot_product_attention`` gives to FlashAttention.
"""

from importlib import import_module

import torch
from torch.nn import attention
from torch.torch_version import TorchVersion

_MODULES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute.interface"}
_PACKAGES = {"fa3": "flash-attn-3", "fa4": "flash-attn-4"}
_CAPABILITIES = {"fa3": (9,), "fa4": (9, 10)}  # major ones, that torch passes on to them


def use_flash_attention(wanted: str, device: torch.device) -> str:
    """Let ``wanted`` compute from now on: fa2, fa3, fa4, or auto: the first of fa3, fa4, fa2.

    Args:
        device: on CUDA.

    Returns:
        Which one computes.

    Raises:
        ValueError: one line, if what is named does not work here.
    """
    chosen = "fa2"
    if wanted != "fa2":
        newer = _MODULES if wanted == "auto" else (wanted,)
        capability = torch.cuda.get_device_capability(device)
        reasons = {name: why_no_flash(name, capability) for name in newer}
        chosen = next((name for name, reason in reasons.items() if reason is None), "fa2")
        if wanted not in ("auto", chosen):
            raise ValueError(
                f"engine.flash_attention={wanted}: {reasons[wanted]}, or set it to auto"
            )
    _activate(chosen)
    return chosen


def why_no_flash(name: str, capability: tuple[int, int]) -> str | None:
    """Why fa3 or fa4 cannot compute on a device of this capability; None where it can."""
    if not hasattr(attention, "activate_flash_attention_impl"):
        return "this torch knows only its own; install torch 2.11"
    if name == "fa4" and TorchVersion(torch.__version__) < TorchVersion("2.12"):
        return "torch 2.11 has no causal backward through it; install torch 2.12"
    if capability[0] not in _CAPABILITIES[name]:
        found = ".".join(map(str, capability))
        return f"it has no kernels for compute capability {found}; set it to fa2"
    try:
        import_module(_MODULES[name])
    except ImportError as error:
        found = " ".join(str(error).split())
        return f"{_MODULES[name]} does not import ({found}); install {_PACKAGES[name]}"
    return None


def _activate(name: str) -> None:
    if name != "fa2":
        attention.activate_flash_attention_impl(name.upper())
    elif _is_replaced():
        attention.restore_flash_attention_impl()


def _is_replaced() -> bool:
    current = getattr(attention, "current_flash_attention_impl", lambda: None)
    return current() is not None
