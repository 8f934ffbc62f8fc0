"""``puzzle-align prepare``: a job's preference data, tokenized and packed for data.format=packed.

Tokens are kept in the job's data.cache_dir, so that a repeated command does not tokenize again.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

from puzzle_align.commands.summary import say
from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolution import Resolution
from puzzle_align.config.stages import PREFERENCES
from puzzle_align.data.packed_files import write_packed
from puzzle_align.data.packing import example_lengths, first_fit_decreasing
from puzzle_align.data.prepare import packed_settings
from puzzle_align.files.messages import shown_path
from puzzle_align.stages.preference.data import job_pairs
from puzzle_align.stages.preference.objective import objective_of
from puzzle_align.stages.tokenizer import open_tokenizer
from puzzle_align.telemetry.text import length_lines


def pack_data(config: JobConfig, output: Path) -> None:
    """Pack the training data of a preference stage, and print what was written.

    Raises:
        ValueError: one line, for wrong data or settings, or an output that exists.
    """
    if os.path.exists(output):  # Path.exists raises in a closed folder
        raise ValueError(
            f"--output {shown_path(output)}: it exists already; remove it, or name another"
        )
    if config.stage not in PREFERENCES:
        raise ValueError(f"stage {config.stage} samples to prompts: there is nothing to pack")
    data, packing = replace(config.data, eval=None, eval_fraction=0.0), config.packing
    if data.format == "packed" or not packing.is_packed:
        raise ValueError(
            "prepare packs data for data.format=packed: give it data.format=auto, the file in "
            "data.train, and a packing.layout that is not padded"
        )
    tokenizer = open_tokenizer(Resolution(config).tokenizer())
    prepared = job_pairs(replace(config, data=data), tokenizer)
    say(prepared.summary)
    dataset = prepared.train
    lengths = example_lengths(dataset.prompt_lengths, dataset.response_lengths, packing.row_layout)
    responses = dataset.response_lengths[dataset.response_lengths > 0]  # rankings have gaps
    parts = {"prompt": dataset.prompt_lengths, "response": responses}
    say(*length_lines({**parts, f"whole, {packing.row_layout}": lengths}))
    start = time.perf_counter()
    rows = first_fit_decreasing(lengths, packing.row_tokens)
    seconds = time.perf_counter() - start
    settings = packed_settings(data, packing, config.tokenizer.add_eos)
    settings["margins"] = objective_of(config).reads_margins
    write_packed(output, dataset, rows, settings, tokenizer, prepared.report)
    fill = lengths.sum() / (len(rows) * packing.row_tokens)
    say(
        f"{len(dataset)} {prepared.report.unit} in {len(rows)} rows of {packing.row_tokens} "
        f"tokens: fill {fill:.2%}, packed in {seconds:.2f} s; wrote {output}"
    )
