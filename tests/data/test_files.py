"""Folders of files as splits, beside what the library `datasets` makes of them; formats; and files that are broken."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tunix.data.sources import open_rows
from tunix.errors import UserError


def write(path: Path, rows: list[dict[str, int]]) -> None:
    """Rows of numbers in the format of the file's suffix; anything unknown is JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.name in ("dataset_infos.json", "config.json"):
        path.write_text("{}")
    elif path.name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.name.endswith(".json"):
        path.write_text(json.dumps(rows))
    elif path.name.endswith(".csv"):
        path.write_text("\n".join(["n", *(str(row["n"]) for row in rows)]))
    elif path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)


def listed(files: str) -> list[str]:
    """The names in a row of a table, which may hold blanks."""
    return re.findall(r"\S.*?\.\w+(?:\.gz)?(?= |$)", files)


def numbers(folder: Path, split: str) -> list[int]:
    rows = open_rows(str(folder), split)
    return [int(rows[i]["n"]) for i in range(len(rows))]


# Each file has one row, whose number is the file's in this list.
SAME = {
    "a word between separators": ("questions_train.jsonl questions_test.jsonl", {"train": [0], "test": [1]}),
    "three splits": ("train.jsonl dev.jsonl test.jsonl", {"train": [0], "validation": [1], "test": [2]}),
    "several files": ("train_easy.jsonl train_hard.jsonl test.jsonl", {"train": [0, 1], "test": [2]}),
    "other words": ("math-training.jsonl math.eval.jsonl val1.jsonl", {"train": [0], "validation": [2], "test": [1]}),
    "digits": ("train1.jsonl train2.jsonl 3test4.jsonl", {"train": [0, 1], "test": [2]}),
    "blanks": ("my train rows.jsonl my test rows.jsonl", {"train": [0], "test": [1]}),
    "shards": (
        "data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet data/test-00000-of-00001.parquet",
        {"train": [0, 1], "test": [2]},
    ),
    "shards of other names": (
        "data/train_sft-00000-of-00001.jsonl data/test_sft-00000-of-00001.jsonl",
        {"test_sft": [1], "train_sft": [0]},
    ),
    "folders": ("train/a.jsonl train/b.jsonl test/a.jsonl", {"train": [0, 1], "test": [2]}),
    "words in folders": ("my_train_set/a.jsonl my-valid/x/a.jsonl", {"train": [0], "validation": [1]}),
    "no word": ("a.jsonl b.jsonl", {"train": [0, 1]}),
    "words within words": ("contest.jsonl latest.jsonl", {"train": [0, 1]}),
    "hidden files and folders": (
        "train.jsonl .git/train.jsonl .ipynb_checkpoints/train-checkpoint.jsonl .train.jsonl __pycache__/train.jsonl",
        {"train": [0]},
    ),
    "compressed": ("train.jsonl.gz test.jsonl.gz", {"train": [0], "test": [1]}),
    "tables": ("train.csv test.csv", {"train": [0], "test": [1]}),
    "two formats of two splits": ("train.json test.jsonl", {"train": [0], "test": [1]}),
    "descriptions": ("train.json test.json dataset_infos.json config.json", {"train": [0], "test": [1]}),
}
"""Files -> splits, the same as those of `datasets`."""

OTHER = {
    # `datasets` would train on each row twice.
    "copies by name": ("train.jsonl train.jsonl~ train.jsonl.bak train.jsonl.1", {"train": [0]}),
    # ... on the test rows too.
    "capitals": ("Train.jsonl Test.jsonl", {"train": [0], "test": [1]}),
    # ... on what an unfinished job has left.
    "folders of other programs": ("_temporary/0/train.jsonl train.jsonl", {"train": [1]}),
    # ... and knows only the test rows of these.
    "a folder and a file": ("train.jsonl test/a.jsonl", {"train": [0], "test": [1]}),
    "a name without a word": ("questions.jsonl test.jsonl", {"questions": [0], "test": [1]}),
}
"""Files -> splits, on purpose not those of `datasets`."""

REFUSED = {
    "two words": ("train_test.jsonl test.jsonl", "train", "train_test.jsonl may be of the split 'train' or 'test'"),
    "a word in a folder of another": ("train/a.jsonl train/test_b.jsonl", "train", "train/test_b.jsonl may be of the"),
    "two formats": (
        "train.jsonl train.parquet",
        "train",
        "train.jsonl and train.parquet hold the split",
    ),
    "compressed and not": ("train.jsonl train.jsonl.gz", "train", "train.jsonl and train.jsonl.gz hold the split"),
    "two words for one": ("train.jsonl training.jsonl", "train", "train.jsonl and training.jsonl are both named as"),
    "a file and a folder": ("train.jsonl train/a.jsonl", "train", "train/a.jsonl and train.jsonl are both named as"),
    "two held out": ("train.jsonl dev.jsonl valid.jsonl", "validation", "dev.jsonl and valid.jsonl are both named as"),
    "a copy on a Mac": (
        "train.jsonl train copy.jsonl",
        "train",
        "train.jsonl and train copy.jsonl look like",
    ),
    "a copy on Windows": (
        "train.jsonl train - Copy.jsonl",
        "train",
        "train - Copy.jsonl look like a file and",
    ),
    "a download again": ("rows.jsonl rows (1).jsonl", "train", "rows.jsonl and rows (1).jsonl look like a file and"),
    "a copy of a drive": ("rows.jsonl Copy of rows.jsonl", "train", "rows.jsonl and Copy of rows.jsonl look like"),
    "a backup": (
        "train.jsonl train_old.jsonl",
        "train",
        "train.jsonl and train_old.jsonl look like",
    ),
    "a missing shard": ("data/train-00000-of-00002.jsonl", "train", "is one of 2 shards, of which 1 are there"),
    "shards of two times": (
        "train-00000-of-00001.jsonl train-00000-of-00002.jsonl train-00001-of-00002.jsonl",
        "train",
        "train-00000-of-00001.jsonl and train-00000-of-00002.jsonl are shards of different numbers",
    ),
    "words that do not stand by themselves": ("testset.jsonl trainset.jsonl", "train", "may be different splits"),
    "held out in other words": ("rows.jsonl held_out.jsonl", "train", "held_out.jsonl and rows.jsonl may be different"),
    "no such split": ("train.jsonl test.jsonl", "validation", "has no split 'validation'; it has 'train', 'test'"),
}
"""Files, wanted split -> what is said."""


@pytest.mark.parametrize("name", SAME)
def test_the_splits_of_a_folder_are_those_of_datasets(name: str, tmp_path: Path):
    files, expected = SAME[name]
    for number, file in enumerate(listed(files)):
        write(tmp_path / "rows" / file, [{"n": number}])
    theirs = datasets.load_dataset(str(tmp_path / "rows"), cache_dir=str(tmp_path / "cache"))
    assert {split: [int(row["n"]) for row in rows] for split, rows in theirs.items()} == expected
    assert {split: numbers(tmp_path / "rows", split) for split in expected} == expected
    with pytest.raises(UserError, match=f"it has {', '.join(map(repr, expected))}\\."):
        open_rows(str(tmp_path / "rows"), "other")


@pytest.mark.parametrize("name", OTHER)
def test_splits_that_datasets_mixes_or_loses(name: str, tmp_path: Path):
    files, expected = OTHER[name]
    for number, file in enumerate(files.split()):
        write(tmp_path / file, [{"n": number}])
    assert {split: numbers(tmp_path, split) for split in expected} == expected


@pytest.mark.parametrize("name", REFUSED)
def test_folders_that_would_mix_or_repeat_rows_are_refused(name: str, tmp_path: Path):
    files, split, message = REFUSED[name]
    for number, file in enumerate(listed(files)):
        write(tmp_path / file, [{"n": number}])
    with pytest.raises(UserError, match=re.escape(message)):
        open_rows(str(tmp_path), split)


def test_a_copy_of_a_hub_dataset_of_several_configurations_is_refused(tmp_path: Path):
    for name in ("main", "socratic"):
        write(tmp_path / f"{name}/train-00000-of-00001.parquet", [{"n": len(name)}])
    card = "---\nlicense: mit\nconfigs:\n- config_name: main\n  data_files: main/*\n"
    (tmp_path / "README.md").write_text(f"{card}---\n# Rows\n")
    assert numbers(tmp_path, "train") == [4, 8]
    (tmp_path / "README.md").write_text(f"{card}- config_name: socratic\n  data_files: socratic/*\n---\n# Rows\n")
    with pytest.raises(UserError, match=r"holds several datasets, as its README\.md says \(main, socratic\)"):
        open_rows(str(tmp_path))
    assert numbers(tmp_path / "main", "train") == [4]


def test_words_for_a_split_mean_the_same(tmp_path: Path):
    write(tmp_path / "train.jsonl", [{"n": 0}])
    write(tmp_path / "dev.jsonl", [{"n": 1}])
    assert numbers(tmp_path, "dev") == numbers(tmp_path, "validation") == numbers(tmp_path, "val") == [1]


def test_files_of_equal_rows_or_of_different_columns_are_refused(tmp_path: Path):
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / "equal" / name, [{"n": 5}, {"n": 6}])
        write(tmp_path / "halves" / name, [{"n": 5}, {"n": 6 if name == "a.jsonl" else 7}])
    with pytest.raises(UserError, match=r"a\.jsonl and b\.jsonl hold the same rows: take one of them away"):
        open_rows(str(tmp_path / "equal"))
    assert numbers(tmp_path / "halves", "train") == [5, 6, 5, 7]
    (tmp_path / "kinds").mkdir()
    (tmp_path / "kinds/a.jsonl").write_text('{"prompt": "p"}\n{"prompt": "p", "answer": "a"}\n')
    (tmp_path / "kinds/b.jsonl").write_text('{"prompt": "q"}\n')
    assert len(open_rows(str(tmp_path / "kinds"))) == 3, "a column that some rows lack"
    (tmp_path / "kinds/c.jsonl").write_text('{"prompt": "r", "solution": "s"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl and c\.jsonl have rows of different columns \(answer, prompt; "):
        open_rows(str(tmp_path / "kinds"))


ROWS = [{"prompt": "ä, b", "answer": "007"}, {"prompt": 'two\n"lines"', "answer": ""}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
TABLE = 'prompt,answer\n"ä, b",007\n"two\n""lines""",\n'.encode()


def zstd(data: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


FORMATS = {
    "rows.jsonl": LINES,
    "rows.ndjson": LINES,
    "rows.JSONL": LINES,
    "rows.json": json.dumps(ROWS).encode(),
    "pretty.json": json.dumps(ROWS, indent=2).encode(),
    "lines.json": LINES,
    "array.jsonl": json.dumps(ROWS).encode(),
    "mark.jsonl": b"\xef\xbb\xbf" + LINES,
    "mark.json": b"\xef\xbb\xbf" + json.dumps(ROWS).encode(),
    "windows.jsonl": LINES.replace(b"\n", b"\r\n"),
    "rows.jsonl.gz": gzip.compress(LINES),
    "two.jsonl.gz": gzip.compress(LINES[:10]) + gzip.compress(LINES[10:]),
    "rows.json.gz": gzip.compress(json.dumps(ROWS, indent=2).encode()),
    "rows.jsonl.zst": zstd(LINES),
    "rows.csv": TABLE,
    "mark.csv": b"\xef\xbb\xbf" + TABLE,
    "rows.csv.gz": gzip.compress(TABLE),
    "rows.csv.zst": zstd(TABLE),
    "rows.tsv": 'prompt\tanswer\nä, b\t007\n"two\n""lines"""\t\n'.encode(),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(name: str, tmp_path: Path):
    (tmp_path / name).write_bytes(FORMATS[name])
    rows = open_rows(str(tmp_path / name))
    assert [rows[i] for i in range(len(rows))] == ROWS
    assert rows.digest == open_rows(ROWS).digest, "wherever and however they are stored"


def test_a_table_of_windows_and_long_texts(tmp_path: Path):
    (tmp_path / "a.csv").write_bytes(b"prompt,answer\r\n\r\na,1.50\r\n")
    assert open_rows(tmp_path / "a.csv")[0] == {"prompt": "a", "answer": "1.50"}
    (tmp_path / "b.csv").write_text("text\n" + "x" * 200_000)
    assert len(open_rows(tmp_path / "b.csv")[0]["text"]) == 200_000


BROKEN = {
    "a.jsonl": (b'{"n": 1}\n{"n": \n', "a.jsonl, line 2 is not JSON: Expecting value at column 6"),
    "cut.jsonl": (LINES[:-9], "cut.jsonl, line 2 is not JSON: "),
    "nan.jsonl": (b'{"n": NaN}\n', "nan.jsonl, line 1 is not JSON: NaN is no JSON value: write null or leave the key"),
    "inf.jsonl": (b'{"n": [-Infinity]}\n', "line 1 is not JSON: -Infinity is no JSON value"),
    "twice.jsonl": (
        b'{"n": 1}\n{"n": 1, "m": 2, "n": 3}\n',
        "line 2 is not JSON: the key 'n' is there twice",
    ),
    "within.jsonl": (
        b'{"m": [{"role": "user", "role": "user"}]}\n',
        "line 1 is not JSON: the key 'role' is",
    ),
    "bytes.jsonl": (b'{"n": "\xe4"}\n', "bytes.jsonl, line 1 is not JSON: 'utf-8' codec can't decode byte 0xe4"),
    "utf16.jsonl": ('{"n": 1}\n'.encode("utf-16"), "utf16.jsonl is text in UTF-16: save it as UTF-8"),
    "deep.jsonl": (b"{" + b'"a":{' * 100_000, "deep.jsonl, line 1 is not JSON"),
    "lists.jsonl": (
        b"[1]\n[2]\n",
        "is read as one JSON array of rows, and is not: Extra data at line 2, column 1",
    ),
    "array.json": (b'[{"n": 1},\n{"n": 2}, 3]', "array.json: element 3 of its array is 3, not an object with columns"),
    "cut.json": (
        b'[{"n": 1},\n{"n": ',
        "cut.json begins with '[', so that it is read as one JSON array",
    ),
    "object.json": (
        b'{"version": 1,\n"data": [{"n": 1}]}',
        "is one JSON object with the keys 'version', 'data'",
    ),
    "line.json": (b'{"n": 1}\n{"n" 2}\n', "line.json, line 2 is not JSON: Expecting ':' delimiter at column 6"),
    "cut.jsonl.gz": (gzip.compress(LINES)[:-12], "cut.jsonl.gz is no whole .gz file: "),
    "cut.jsonl.zst": (zstd(LINES)[:-4], "cut.jsonl.zst is no whole .zst file: "),
    "not.jsonl.gz": (LINES, "not.jsonl.gz is no whole .gz file: "),
    "few.csv": (
        b"a,b\n1,2\n3\n",
        "few.csv, line 3 has 1 values for the 2 columns of the header (a, b)",
    ),
    "many.csv": (b'a,b\n"1\n",2\n3,4,5\n', "many.csv, line 4 has 3 values for the 2 columns"),
    "quote.csv": (b'a,b\n1,"2\n', "quote.csv, line 2: unexpected end of data"),
    "twice.csv": (b"a,b,a\n1,2,3\n", "twice.csv has the column 'a' twice: rename one of them"),
    "points.csv": (
        b"a;b\n1;2\n",
        "its header is the single column 'a;b'; values are separated by commas",
    ),
    "bytes.csv": (
        b"a,b\n1,2\n\xe4,3\n",
        "bytes.csv, line 3 is not UTF-8 (invalid continuation byte): save it",
    ),
    "header.csv": (b"a,b\n", "header.csv is empty: there are no rows to read"),
    "rows.txt": (
        b"a\n",
        "rows are read from .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow, the",
    ),
    "rows.parquet.gz": (b"a\n", "not from '.gz'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_its_line(name: str, tmp_path: Path):
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)):
        assert open_rows(str(tmp_path / name)).digest, "all rows are read for it"


def test_two_columns_of_one_name(tmp_path: Path):
    table = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["n", "n"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet has the column 'n' twice"):
        open_rows(tmp_path / "a.parquet")


def test_rows_are_read_without_jax():
    script = "import sys, tunix.data.sources; print({'jax', 'datasets', 'pyarrow'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"
