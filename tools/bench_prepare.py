"""Measure time and memory of preparing preference pairs. Prints JSON.

python tools/bench_prepare.py --pairs 200000 --num-proc 1 2

Writes pairs of texts of 100 to 200 characters, prepares them once for every number of processes,
opens the cache like a job (all checksums compared), and makes the first batch of a loader. Every
case runs in a separate process. All written files are removed.
"""

import contextlib
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from bench_run import parser_of, show

from puzzle_align.data.build import Preparation
from puzzle_align.data.loader import DataView, ExampleLoader
from puzzle_align.data.pairs import Budget, BuildOptions, Limits
from puzzle_align.data.prepare import load_pairs
from puzzle_align.data.tokenize import load_tokenizer

OPTIONS = BuildOptions("auto", Limits(1024), Budget(4096, "shared", True), skip_errors=False)
NUM_TEXTS = 4096  # pairs are made of these, each pair with its number
NUM_WORDS = 3000
LETTERS = "etaoinshrdlucmfwypvbgk"


def words(rng: np.random.Generator) -> list[str]:
    """Made-up words."""
    lengths = rng.integers(2, 10, NUM_WORDS).tolist()
    return ["".join(rng.choice(list(LETTERS), length)) for length in lengths]


def texts(rng: np.random.Generator, number: int) -> list[str]:
    """Texts of 100 to 200 characters."""
    known_words = words(rng)
    made = []
    for length in rng.integers(100, 201, number).tolist():
        text = " ".join(known_words[i] for i in rng.integers(0, NUM_WORDS, length // 3))
        made.append(text[:length])
    return made


def write_pairs(path: Path, num_pairs: int) -> None:
    """A JSONL file of pairs, no two the same."""
    rng = np.random.default_rng(0)
    parts = [json.dumps(text)[1:-1] for text in texts(rng, NUM_TEXTS)]
    with path.open("w", encoding="utf-8") as file:
        for number, (a, b, c) in enumerate(rng.integers(0, NUM_TEXTS, (num_pairs, 3)).tolist()):
            file.write(
                f'{{"prompt": "{number} {parts[a]}", "chosen": " {parts[b]}", '
                f'"rejected": " {parts[c]}"}}\n'
            )


def train_tokenizer(path: Path) -> str:
    """A byte-level BPE tokenizer of 8,000 tokens in a directory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts(np.random.default_rng(0), NUM_TEXTS), trainer)
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    inner.save_pretrained(str(path))
    return str(path)


def prepared(source: Path, tokenizer: str, cache: Path, num_proc: int) -> dict[str, Any]:
    """Seconds of making the cache."""
    opened = load_tokenizer(tokenizer)
    start = time.perf_counter()
    how = Preparation(cache, num_proc)
    data, report = load_pairs(str(source), opened, OPTIONS, how)
    seconds = time.perf_counter() - start
    rate = report.num_used / seconds
    return {"seconds": seconds, "pairs_a_second": rate, "fingerprint": data.fingerprint}


def first_step(source: Path, tokenizer: str, cache: Path, verify: bool) -> dict[str, Any]:
    """Seconds of a rank's start: the source's hash and checksums (on rank 0), then a loader."""
    opened = load_tokenizer(tokenizer)
    start = time.perf_counter()
    how = Preparation(cache, 1, verify=verify)
    data, _ = load_pairs(str(source), opened, OPTIONS, how)
    open_s = time.perf_counter() - start
    loader = ExampleLoader(
        data,
        global_batch_size=512,
        row_tokens=4096,
        layout="shared",
        packed=True,
        scope="batch",
        seed=0,
        shuffle=True,
        view=DataView(data_size=8),
    )
    loader.batch(0)
    read = sum(file.stat().st_size for file in (source, *cache.glob("*/*.bin")) if verify)
    seconds = time.perf_counter() - start
    return {"open_seconds": open_s, "seconds": seconds, "gigabytes_a_second": read / open_s / 1e9}


def measured(case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run ``case`` in a new process; add the peak memory of it and its workers to its result."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        process = psutil.Process(pool.submit(_own_pid).result())
        with _watched(process) as peaks:
            result = pool.submit(case).result()
    workers = [peak for pid, peak in peaks.items() if pid != process.pid]
    return {
        **result,
        "peak_mib": peaks[process.pid]["peak"],
        "peak_anonymous_mib": peaks[process.pid]["anonymous"],
        "workers": len(workers),
        "peak_mib_of_a_worker": max((peak["peak"] for peak in workers), default=0),
    }


def _own_pid() -> int:
    return psutil.Process().pid


@contextlib.contextmanager
def _watched(process: psutil.Process) -> Iterator[dict[int, dict[str, int]]]:
    """Peak MiB of a process and of its children, by process id."""
    peaks: dict[int, dict[str, int]] = {}
    is_over = threading.Event()

    def look() -> None:
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(OSError, KeyError):
                _note(one.pid, peaks.setdefault(one.pid, {"peak": 0, "anonymous": 0}))

    def watch() -> None:
        while not is_over.wait(0.1):
            look()
        look()  # also at a case shorter than the interval

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        is_over.set()
        thread.join()


def _note(pid: int, peak: dict[str, int]) -> None:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    for name, field in (("peak", "VmHWM"), ("anonymous", "RssAnon")):
        peak[name] = max(peak[name], int(values[field].split()[0]) // 1024)


def main() -> None:
    """Write the pairs, and measure."""
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=200_000, help="pairs to prepare (200000)")
    parser.add_argument("--num-proc", type=int, nargs="+", default=[1, 2], help="in turn (1 2)")
    parser.add_argument("--tokenizer", default="byte", help="byte, bpe (trained here), directory")
    parser.add_argument("--folder", help="folder to write in (the system's temporary one)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench_prepare_", dir=args.folder))
    try:
        tokenizer = args.tokenizer
        if tokenizer == "bpe":
            tokenizer = train_tokenizer(folder / "bpe")
        source, cache = folder / "pairs.jsonl", folder / "cache"
        write_pairs(source, args.pairs)
        result: dict[str, Any] = {
            "pairs": args.pairs,
            "tokenizer": args.tokenizer,
            "source_gigabytes": source.stat().st_size / 1e9,
        }
        for num_proc in args.num_proc:
            shutil.rmtree(cache, ignore_errors=True)
            case = partial(prepared, source, tokenizer, cache, num_proc)
            result[f"{num_proc} processes"] = measured(case)
            print(json.dumps(result), file=sys.stderr)
        files = cache.glob("*/*.bin")
        result["cache_gigabytes"] = sum(file.stat().st_size for file in files) / 1e9
        for rank, verify in (("rank 0", True), ("another rank", False)):
            case = partial(first_step, source, tokenizer, cache, verify)
            result[f"start of {rank}"] = measured(case)
        show(result)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
