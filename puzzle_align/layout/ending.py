"""How a process has ended, in words."""

import signal


def ending(code: int) -> str:
    """``ended with code 3`` or ``was ended by SIGKILL``.

    Args:
        code: as ``subprocess`` has it; below 0 the number of a signal.
    """
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have numbers alone
        return f"was ended by signal {-code}"
