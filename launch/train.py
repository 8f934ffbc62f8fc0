"""torchrun --nproc-per-node N launch/train.py --config NAME [key=value ...]"""

import sys

from puzzle_align.cli.main import run

if __name__ == "__main__":
    run(["train", *sys.argv[1:]])
