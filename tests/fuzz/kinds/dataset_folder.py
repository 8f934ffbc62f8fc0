"""Directories of ``datasets``: states, infos and Arrow files that are damaged, strange or missing.

Scripts lie in all of them, as they did when ``datasets`` ran those: nothing runs.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.fuzz.columns import changed_table
from tests.fuzz.harness import Case
from tests.fuzz.mutate import damaged_bytes
from tests.fuzz.reading import GOOD, Use
from tests.fuzz.values import changed_json

ARROW = "data-00000-of-00001.arrow"
STATE = {
    "_data_files": [{"filename": ARROW}],
    "_fingerprint": "64899acea534414a",
    "_format_columns": None,
    "_format_kwargs": {},
    "_format_type": None,
    "_output_all_columns": False,
    "_split": None,
}
FORMATS = ("numpy", "torch", "pandas", "arrow", "python", "custom", "jax", "polars")
FEATURES = (
    *("Image", "Audio", "Video", "Json", "Features", "Dataset", "os", "Sequence", "ClassLabel"),
    *("Array2D", "Translation", "generate_from_dict", "__import__", "dataclass", ""),
)


class Kind:
    """See ``harness.Kind``."""

    limit_s = 4.0
    imports = ("torch", "datasets", "puzzle_align.data.prepare_prompts", "jinja2.sandbox")

    def __init__(self, folder: Path) -> None:
        import datasets

        datasets.disable_progress_bars()
        self.folder, self.mark = folder / "some", folder / "mark"
        self.infos = {form: _info(folder, records) for form, records in GOOD.items()}

    def case(self, draw: random.Random) -> Case:
        """A directory, of one data set or of splits."""
        form = draw.choice(sorted(GOOD))
        use = Use.drawn(draw, form)
        what, table = changed_table(draw, GOOD[form], self.mark)
        files = {
            "state.json": json.dumps(STATE).encode(),
            "dataset_info.json": self.infos[form] if draw.random() < 0.5 else b"{}",
            ARROW: _stream(draw, table),
        }
        more, files = _changed(draw, files)
        shutil.rmtree(self.folder, ignore_errors=True)
        place, source = self._place(draw)
        place.mkdir(parents=True)
        for name, data in files.items():
            (place / name).write_bytes(data)
        script = f"open({str(self.mark)!r}, 'w')"
        for name in ("some.py", "dataset.py", "__init__.py"):
            (place / name).write_text(script)

        def wrong(found: Any) -> str | None:
            raws = _read(place)
            known = [repr(record) for record in GOOD[form]]
            good = [raw for raw in raws or () if repr(raw) in known]
            return None if raws is None else use.wrong(found, raws, good)

        named = f"{use.name}{', skipping' if use.skips else ''} of {form}: {what}; {more}"
        return Case(named, lambda: use.prepare(source), wrong, self.mark)

    def _place(self, draw: random.Random) -> tuple[Path, str]:
        """Where the data set lies, and what a config calls it."""
        if draw.random() < 0.7:
            return self.folder, str(self.folder)
        self.folder.mkdir()
        text = json.dumps({"splits": ["train"]})
        if draw.random() < 0.5:
            text = changed_json(draw, {"splits": ["train", "test"]})[1]
        (self.folder / "dataset_dict.json").write_text(text)
        return self.folder / "train", f"{self.folder}{draw.choice(('', '#train', '#test', '#..'))}"


def _info(folder: Path, records: list[dict[str, Any]]) -> bytes:
    """What ``datasets`` says of records of the first one's form."""
    import datasets

    datasets.Dataset.from_list(records[:1]).save_to_disk(str(folder / "good"))
    data = (folder / "good" / "dataset_info.json").read_bytes()
    shutil.rmtree(folder / "good")
    return data


def _stream(draw: random.Random, table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    codec = draw.choice((None, None, None, "lz4", "zstd"))
    options = pa.ipc.IpcWriteOptions(compression=codec)
    try:
        with pa.ipc.new_stream(sink, table.schema, options=options) as stream:
            stream.write_table(table, max_chunksize=draw.choice((1, 1000)))
    except pa.ArrowException:  # nested deeper than Arrow writes
        return b"?"
    return sink.getvalue().to_pybytes()


def _changed(draw: random.Random, files: dict[str, bytes]) -> tuple[str, dict[str, bytes]]:
    """What was done to the files, and what they are then."""
    name, kind = draw.choice(sorted(files)), draw.random()
    data = files[name]
    if kind < 0.2:
        return "no file changed", files
    if kind < 0.25:
        return f"no {name}", {other: files[other] for other in files if other != name}
    if kind < 0.35 and name != ARROW:
        tree = json.loads(data)
        what = _nasty_state(draw, tree) if name == "state.json" else _nasty_feature(draw, tree)
        return what, {**files, name: json.dumps(tree).encode()}
    if kind < 0.7 and name != ARROW:
        what, text = changed_json(draw, json.loads(data) or {"features": None})
        return f"{name}: {what}", {**files, name: text.encode()}
    what, data = damaged_bytes(draw, data)
    return f"{name}: {what}", {**files, name: data}


def _nasty_state(draw: random.Random, state: dict[str, Any]) -> str:
    """Formats, which make other values of rows, and files that lie elsewhere."""
    if draw.random() < 0.5:
        state["_format_type"] = draw.choice(FORMATS)
        state["_format_kwargs"] = draw.choice(({}, {"transform": "print"}, {"dtype": "x"}))
        return f"state.json: format {state['_format_type']}"
    name = draw.choice(("../../etc/passwd", "/dev/zero", "state.json", "", "/", "hf://x/y", "a\0b"))
    state["_data_files"] = draw.choice(([{"filename": name}], [], [name], name, [{}]))
    return f"state.json: files {state['_data_files']!r}"


def _nasty_feature(draw: random.Random, info: dict[str, Any]) -> str:
    """Features that there are not, or that would read what values name."""
    features = info.setdefault("features", {"prompt": {"dtype": "string", "_type": "Value"}})
    name = draw.choice(sorted(features))
    own = features[name] if isinstance(features[name], dict) else {}
    key = draw.choice(("_type", "dtype"))
    value = draw.choice(FEATURES if key == "_type" else ("int32", "object", "json", "null", "list"))
    features[name] = {**own, key: value}
    return f"dataset_info.json: {name} has {key} {value}"


def _read(place: Path) -> list[Any] | None:
    """The rows of the Arrow files, read all at once; None where they cannot be."""
    try:
        files = json.loads((place / "state.json").read_text())["_data_files"]
        return [row for file in files for row in _rows(place / file["filename"])]
    except Exception:  # noqa: BLE001 - of columns that the use does not need, say
        return None


def _rows(file: Path) -> list[Any]:
    with pa.memory_map(str(file)) as stream:
        table = pa.ipc.open_stream(stream).read_all()
        table.validate(full=True)
        for at, field in enumerate(table.schema):
            if field.type == pa.json_():  # which datasets parses
                values = map(json.loads, table.column(at).to_pylist())
                table = table.set_column(at, field.name, [[*values]])
        return table.to_pylist()
