"""Every kind of source gives the same rows, and every mistake is named with what there is instead."""

import datetime
import decimal
import json

import datasets
import numpy as np
import PIL.Image
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from tunix.data import sources
from tunix.data.sources import open_held_out, open_rows
from tunix.errors import UserError

ROWS = [{"text": f"row {i} é", "n": i} for i in range(2500)]  # more than one batch of Arrow rows


def write_jsonl(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_arrow(path, writer):
    table = pyarrow.Table.from_pylist(ROWS)
    with writer(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=700)
    return path


def check(rows, expected=ROWS):
    assert len(rows) == len(expected)
    for i in (0, 1, 699, 700, 1023, 1024, len(expected) - 1):
        if i < len(expected):
            assert rows[i] == expected[i]


def test_files_and_values_give_the_same_rows(tmp_path):
    check(open_rows(str(write_jsonl(tmp_path / "a.jsonl"))))
    check(open_rows(write_parquet(tmp_path / "a.parquet"), "train"))
    check(open_rows(write_arrow(tmp_path / "stream.arrow", pyarrow.ipc.new_stream)))
    check(open_rows(write_arrow(tmp_path / "file.arrow", pyarrow.ipc.new_file)))
    check(open_rows(ROWS))
    check(open_rows(row for row in ROWS))
    check(open_rows(datasets.Dataset.from_list(ROWS)))
    check(open_rows({"train": [], "test": ROWS}, "test"))


def test_saved_datasets(tmp_path):
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "one")
    check(open_rows(str(tmp_path / "one")))
    datasets.DatasetDict({"train": whole, "test": whole.select([2, 3])}).save_to_disk(tmp_path / "two")
    check(open_rows(str(tmp_path / "two")))
    check(open_rows(str(tmp_path / "two"), "test"), ROWS[2:4])
    with pytest.raises(UserError, match=r"two has no split 'tets'; it has 'train', 'test'\. Did you mean 'test'\?"):
        open_rows(str(tmp_path / "two"), "tets")


def test_folders_of_files(tmp_path):
    for i in range(2):
        write_parquet(tmp_path / f"hub/data/train-0000{i}-of-00002.parquet", ROWS[i * 1250 : (i + 1) * 1250])
    write_jsonl(tmp_path / "hub/data/validation.jsonl", ROWS[:3])
    check(open_rows(str(tmp_path / "hub")))
    check(open_rows(str(tmp_path / "hub"), "validation"), ROWS[:3])
    with pytest.raises(UserError, match="it has 'train', 'validation'"):
        open_rows(str(tmp_path / "hub"), "test")
    for split in ("train", "test"):
        write_jsonl(tmp_path / f"sub/{split}/part-0.jsonl", ROWS[: 5 if split == "test" else 2500])
    check(open_rows(str(tmp_path / "sub"), "test"), ROWS[:5])
    for name, part in (("b", ROWS[1000:]), ("a", ROWS[:1000])):  # no split in the names: one split, in file order
        write_jsonl(tmp_path / f"plain/{name}.jsonl", part)
    check(open_rows(str(tmp_path / "plain"), "train"))


def test_functions(tmp_path, monkeypatch):
    (tmp_path / "my_rows.py").write_text(
        "def good():\n    return ({'text': str(i)} for i in range(3))\n\ndef bad():\n    return 3\n\nvalue = 3\n"
    )
    expected = [{"text": "0"}, {"text": "1"}, {"text": "2"}]
    check(open_rows(f"{tmp_path}/my_rows.py:good"), expected)
    check(open_rows("my_rows.py:good", "train"), expected)
    monkeypatch.syspath_prepend(tmp_path)
    check(open_rows("my_rows:good"), expected)
    for spec, message in {
        "my_rows:bad": "my_rows:bad gives 3, not a list or an iterable",
        "my_rows:value": "is a int, not a function",
        "my_rows:goood": "has no 'goood'. Did you mean 'good'",
        "my_rows.py:goood": "has no 'goood'. Did you mean 'good'",
        "gone.py:rows": r"there is no file gone\.py",
        "gone_module:rows": "No module named 'gone_module'",
    }.items():
        with pytest.raises(UserError, match=message):
            open_rows(spec)


def test_jsonl_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n\n  \r\n{"n": 2}\r\n{"n": }\n[3]\n{"n": "\xff"}\n{"n": 4}')  # no newline at the end
    rows = open_rows(path)
    assert len(rows) == 6
    assert [rows[0], rows[1], rows[5]] == [{"n": 1}, {"n": 2}, {"n": 4}]
    for i, message in {
        2: r"a\.jsonl, line 5 is not JSON: ",
        3: r"line 6 is \[3\], not an object",
        4: "line 7 is not",
    }.items():
        with pytest.raises(UserError, match=message):
            rows[i]


def test_what_is_not_there(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "table.txt").write_text("a,b\n1,2\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "broken.arrow").write_bytes(b"no")
    (tmp_path / "folder").mkdir()
    write_jsonl(tmp_path / "good.jsonl")
    for spec, message in {
        "gone.jsonl": r"gone\.jsonl: there is no such file or folder \(looked from ",
        "./gone": r"\./gone: there is no such file",
        "a/b/c": "a/b/c: there is no such file",
        "empty.jsonl": r"empty\.jsonl is empty",
        "blank.jsonl": r"blank\.jsonl is empty",
        "table.txt": r"table\.txt: rows are read from \.jsonl, .*\.arrow, .* not from '\.txt'",
        "broken.parquet": r"broken\.parquet is no whole \.parquet file",
        "broken.arrow": r"broken\.arrow is no whole \.arrow file",
        "folder": r"folder holds no \.jsonl, .*\.parquet, \.arrow file",
        "nobody/nothing": "nobody/nothing is neither a file here nor a dataset that the hub gives: .*network",
        "nothing": "nothing is neither a file here nor a dataset",
    }.items():
        with pytest.raises(UserError, match=message):
            open_rows(spec)
    with pytest.raises(UserError, match=r"good\.jsonl has no split 'test'; it has 'train'"):
        open_rows("good.jsonl", "test")
    for values, message in (
        ([], "the given rows is empty"),
        ([3], "row 1 of the given rows is 3"),
        ("x", "no such|hub"),
    ):
        with pytest.raises(UserError, match=message):
            open_rows(values)[0]


def held_out(spec, split=None):
    rows = open_held_out(spec, split)
    return rows.split, [rows[i]["n"] for i in range(len(rows))]


def test_held_out_rows_are_never_those_of_the_training_split(tmp_path):
    for name, splits in {"two": ["train", "test"], "three": ["train", "test", "validation"], "one": ["train"]}.items():
        for i, split in enumerate(splits):
            write_jsonl(tmp_path / name / f"{split}.jsonl", [{"n": i}])
    assert held_out(str(tmp_path / "two")) == ("test", [1])
    assert held_out(str(tmp_path / "three")) == ("validation", [2])
    assert held_out(str(tmp_path / "three"), "test") == ("test", [1])
    assert held_out(str(tmp_path / "one")) == ("train", [0])
    assert held_out(str(tmp_path / "one/train.jsonl")) == (None, [0])
    assert held_out([{"n": 7}]) == (None, [7])
    assert held_out({"train_sft": [{"n": 0}], "test_sft": [{"n": 1}]}) == ("test_sft", [1])
    saved = {split: datasets.Dataset.from_list([{"n": i}]) for i, split in enumerate(["train", "dev"])}
    datasets.DatasetDict(saved).save_to_disk(tmp_path / "saved")
    assert held_out(str(tmp_path / "saved")) == ("dev", [1])
    for unclear in ({"train": ROWS, "test_a": ROWS, "test_b": ROWS}, {"train": ROWS, "extra": ROWS}):
        with pytest.raises(UserError, match=r"has the splits 'train', .*which is held out is not clear: .*eval_split"):
            open_held_out(unclear)


def test_a_digest_is_that_of_the_rows(tmp_path):
    base = [{"text": f"row {i}", "n": i} for i in range(5)]
    digest = open_rows(base).digest
    table = datasets.Dataset.from_list(base)
    assert open_rows(table).digest == open_rows({"train": iter(base)}).digest == digest
    changed = [[*base[:3], {**base[3], "n": 4}, base[4]], base[:4], [base[1], base[0], *base[2:]]]
    changed.append([*base[:4], {**base[4], "more": 0}])
    assert digest not in {open_rows(rows).digest for rows in changed}
    # The order within a value counts, since templates write it down; that of columns does not.
    first, second = ({"call": call, "text": "a"} for call in ({"x": 1, "y": 2}, {"y": 2, "x": 1}))
    assert open_rows([first]).digest != open_rows([second]).digest
    assert open_rows([first]).digest == open_rows([dict(reversed(first.items()))]).digest


def test_a_digest_covers_values_that_json_lacks():
    pixels = np.zeros((2, 2), np.uint8)
    values = [b"a", b"b", {(1, 2): 3}, pixels, pixels + 1, PIL.Image.fromarray(pixels), PIL.Image.fromarray(pixels + 1)]
    values += [datetime.date(2024, 7, 26), datetime.date(2024, 7, 27), decimal.Decimal("1.0"), decimal.Decimal("1.1")]
    digests = [open_rows([{"image": value}]).digest for value in values]
    assert digests == [open_rows([{"image": value}]).digest for value in values]
    assert len(set(digests)) == len(values)


def test_a_digest_of_many_rows_reads_some_of_them_and_every_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "COMPARED", 10)
    read = []

    class Many:
        def __len__(self):
            return 100

        def __getitem__(self, i):
            read.append(i)
            return {"n": i}

    assert open_rows(Many()).digest
    assert read == [0, *range(0, 100, 11)]  # the first one says what kind the rows are
    lines = [json.dumps({"n": i}) for i in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text("\r\n".join(lines) + "\r\n")
    lines[50] = '{"n": 51}'
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    a, b, c = (open_rows(tmp_path / f"{name}.jsonl").digest for name in "abc")
    assert a == b != c
