"""Steps of bare PyTorch (``bare_stack``) beside ours: in the same process, on the same pairs."""

from collections.abc import Iterator
from functools import partial

from bare_stack import BareStack

from puzzle_align.layout.model import Recompute
from report.compare import compare_all
from report.process import Results, free_device
from report.setting import Setting, reason_of, row_of, world
from report.watch import sdpa_kernels


def bare_steps(setting: Setting, recompute: Recompute) -> Iterator[Results]:
    """Measure the whole model's steps; yield the results so far after each data set.

    If nothing runs with ``recompute``, such as for lack of memory, then with recompute of layers.
    """
    for way in dict.fromkeys((recompute, "full")):
        free_device()
        results: Results = {"recompute": way, "data": {}}
        try:
            stack = BareStack(setting.spec, world(setting.device).device, way)
            row, pairs = row_of(setting, setting.bare_data[0], stack.attention)
            results["sdpa"] = sdpa_kernels(partial(stack.reference_outputs, [row], pairs, 2))
        except Exception as error:  # noqa: BLE001 - see reason_of
            yield results | {"error": reason_of(error)}
            continue
        for name, compared in compare_all(setting, stack, setting.bare_data, [stack.attention]):
            results["data"][name] = compared
            yield results | {"attention": stack.attention}
        if any(compared["variants"] for compared in results["data"].values()):
            return
        del stack, row
