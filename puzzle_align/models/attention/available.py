"""Which backends can train on a device in a precision, with the packages that are here."""

from puzzle_align.layout.model import AttentionBackend

_OF_FLASH = ("varlen", "flex_flash")  # on CUDA: no kernels for float32


def why_unavailable(backend: AttentionBackend, device: str, dtype: str) -> str | None:
    """Why a backend cannot train, and what to do; None where it can.

    Args:
        device: cpu or cuda.
        dtype: fp32 or bf16.
    """
    if device == "cpu":
        if backend in ("flex", "flex_flash"):
            return "FlexAttention has no backward on CPU; set it to segments"
        return None
    if backend in _OF_FLASH and dtype != "bf16":
        return f"FlashAttention computes in bf16 only, not engine.dtype={dtype}; set it to flex"
    if backend == "flex_flash":
        return _why_no_cute()
    return None


def _why_no_cute() -> str | None:
    try:
        import flash_attn.cute.interface  # type: ignore[import-not-found] # noqa: F401
    except Exception as error:  # noqa: BLE001 a broken package raises what it likes
        reason = " ".join(str(error).split())
        return (
            f"flash_attn.cute does not import ({reason}); install flash-attn-4, or set it to flex"
        )
    return None
