"""Model families, one file each: a new one is a new file with a ``FAMILY``, and nothing else."""

import pkgutil
from importlib import import_module

from puzzle_align.layout.family import Family


def _listed() -> dict[str, Family]:
    """Every file's family by its ``model_type``, in order of names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    found = (import_module(f"{__name__}.{name}").FAMILY for name in names)
    return {family.model_type: family for family in found}


FAMILIES = _listed()
