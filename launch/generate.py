"""torchrun --nproc-per-node N launch/generate.py --model DIR --prompts FILE [key=value ...]"""

import sys

from puzzle_align.cli import generate
from puzzle_align.cli.main import process

if __name__ == "__main__":
    with process():
        generate.main(sys.argv[1:])
