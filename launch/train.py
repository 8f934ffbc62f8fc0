"""torchrun --nproc-per-node N launch/train.py --config NAME [key=value ...]"""

import sys

from puzzle_align.cli import train
from puzzle_align.cli.main import process

if __name__ == "__main__":
    with process():
        train.main(sys.argv[1:])
