"""torchrun --nproc-per-node N launch/train.py --config NAME [key=value ...]"""

import sys

from puzzle_align.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
