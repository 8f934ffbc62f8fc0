"""torchrun --nproc-per-node N launch/profile.py --config NAME [key=value ...]"""

import sys

if __name__ == "__main__":
    from puzzle_align.cli import profile
    from puzzle_align.cli.main import process

    with process():
        profile.main(sys.argv[1:])
else:
    # A script's folder is first on the path. So `import profile` finds this file instead of the
    # standard library's module, which cProfile imports, and torch imports cProfile: load that one.
    import importlib.util
    import sysconfig
    from pathlib import Path

    _file = Path(sysconfig.get_path("stdlib")) / "profile.py"
    _spec = importlib.util.spec_from_file_location(__name__, _file)
    assert _spec is not None and _spec.loader is not None
    sys.modules[__name__] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[__name__])
