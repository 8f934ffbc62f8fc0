"""torchrun --nproc-per-node N launch/generate.py --model DIR --prompts FILE [key=value ...]"""

import sys

from puzzle_align.cli.main import run

if __name__ == "__main__":
    run(["generate", *sys.argv[1:]])
