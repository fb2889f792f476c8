"""Mixtures: exact ratios in a fixed interleave, each data set with columns of its own, exact accounts and positions."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tunix.config import RowKind
from tunix.data.config import DataConfig, whole_weights
from tunix.data.examples import Examples
from tunix.data.mixing import Interleaved, rows_read
from tunix.data.pipeline import Batches, Prompts
from tunix.data.sources import Rows, open_rows
from tunix.data.tokenizer import bytes_tokenizer
from tunix.data.types import Prompt
from tunix.errors import UserError
from tunix.rollout.environments.adapters import training_rows
from tunix.rollout.environments.config import MixtureConfig


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, Any]]:
    """Five rows a0 ... a4 with the column `prompt`, and three rows b0 ... b2 with the column `question`."""
    for name, number, column in (("a", 5, "prompt"), ("b", 3, "question")):
        rows = [{column: f"{name}{i}", "answer": i} for i in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [{"path": "a.jsonl", "weight": 2}, {"path": "b.jsonl", "columns": {"prompt": "question"}}]


def examples(listed: list[dict[str, Any]], **settings: Any) -> Examples:
    config = MixtureConfig.model_validate({"train": listed, **settings})
    return Examples(training_rows(config, None, 0), bytes_tokenizer(), config, RowKind.PROMPT)


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.text for prompt in prompts]


def test_the_data_set_that_is_furthest_behind_comes_next():
    """Weights 2 and 1: due after a place are 2/3 and 1/3 of it, so that 0 is behind, then 1, then 0."""
    assert [Interleaved([99, 99], [2, 1])[i] for i in range(6)] == [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)]
    # Every 7 places hold 4, 2 and 1, and each data set gives its items in turn.
    mixed = Interleaved([400, 200, 100], [4, 2, 1])
    for turn in range(3):
        assert sorted(mixed[7 * turn + i][0] for i in range(7)) == [0, 0, 0, 0, 1, 1, 2]
    for number in range(3):
        items = [item for which, item in map(mixed.__getitem__, range(700)) if which == number]
        assert items == list(range([400, 200, 100][number]))
    assert len(mixed) == 700


@pytest.mark.parametrize(("sizes", "size"), [([5, 3], 8), ([6, 3], 9), ([4, 1], 4), ([4, 99], 6)])
def test_a_mixture_ends_where_the_first_data_set_does(sizes: list[int], size: int):
    """0 1 0, 0 1 0, ...: five items of 0 are missing a sixth at place 8, one of 1 a second at place 4."""
    mixed = Interleaved(sizes, [2, 1])
    assert len(mixed) == size
    taken = [sum(mixed[i][0] == number for i in range(size)) for number in range(2)]
    assert all(count <= most for count, most in zip(taken, sizes, strict=True))
    assert mixed[size][1] == sizes[mixed[size][0]], "the next item is not there"


def test_weights_are_whole_numbers_in_the_ratios_that_are_written():
    assert whole_weights([0.2, 0.3]) == [2, 3]
    assert whole_weights([2.0, 4.0]) == [1, 2]
    with pytest.raises(ValueError, match=r"the weights 0.123457 : 1 are exact only within 1,123,457 rows; round them"):
        whole_weights([0.123457, 1.0])


def test_prompts_know_their_data_set_and_have_our_names(sources: list[dict[str, Any]]):
    stream = Prompts(examples(sources, shuffle=False), seed=0, epochs=1)
    prompts = stream.take(99)
    assert texts(prompts) == ["a0", "b0", "a1", "a2", "b1", "a3", "a4", "b2"]
    assert [prompt.source for prompt in prompts] == [text[0] for text in texts(prompts)]
    assert [prompt.number for prompt in prompts] == [0, 5, 1, 2, 6, 3, 4, 7]
    assert prompts[1].row["prompt"] == "b0"
    assert stream.accounting.kept_of == {"a": 5, "b": 3}
    assert rows_read(examples(sources).rows, examples(sources).config, 1) == 8
    stream.close()


def test_each_data_set_has_an_order_of_its_own_and_repeats_by_itself(sources: list[dict[str, Any]]):
    stream = Prompts(examples(sources), seed=3)
    taken = texts(stream.take(30))
    assert [text[0] for text in taken] == ["a", "b", "a"] * 10
    for name, size in (("a", 5), ("b", 3)):
        given = [text for text in taken if text[0] == name]
        epochs = [given[i : i + size] for i in range(0, len(given) - size + 1, size)]
        assert all(sorted(epoch) == [f"{name}{i}" for i in range(size)] for epoch in epochs)
        assert any(one != other for one, other in itertools.pairwise(epochs)), "another order in another epoch"
    again = Prompts(examples(sources), seed=3)
    again.take(4)
    state = json.loads(json.dumps(again.get_state()))
    resumed = Prompts(examples(sources), seed=3)
    resumed.set_state(state)
    assert texts(resumed.take(26)) == taken[4:]
    assert resumed.accounting == stream.accounting
    for one in (stream, again, resumed):
        one.close()


def test_a_position_belongs_to_the_rows_of_all_data_sets(sources: list[dict[str, Any]], tmp_path: Path):
    stream = Prompts(examples(sources), seed=3)
    state = stream.get_state()
    (tmp_path / "b.jsonl").write_text('{"question": "b9"}\n' * 3)
    other = Prompts(examples(sources), seed=3)
    with pytest.raises(UserError, match=r"a.jsonl \+ b.jsonl has as many rows .* but others"):
        other.set_state(state)
    stream.close()
    other.close()


def test_batches_of_given_completions_are_mixed_too(tmp_path: Path):
    for name in "ab":
        rows = [{"prompt": name * 3, "completion": name.upper() * (i + 1)} for i in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = MixtureConfig(train=[{"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl"}], max_length=32)  # pyright: ignore[reportArgumentType]
    mixed = Examples(training_rows(config, None, 0), bytes_tokenizer(), config)
    batches = Batches(mixed, 4, seed=0, epochs=1)
    first = next(batches)
    assert first.accounting.kept_of == {"a": 3, "b": 1}
    batches.close()


def test_a_data_set_of_which_nothing_is_kept_is_named(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "completion": "y"}\n' * 9)
    (tmp_path / "b.jsonl").write_text('{"prompt": "x", "completion": "y"}\n' + '{"prompt": "", "completion": "z"}\n')
    for row in ('{"input_ids": [5, 6], "loss_mask": [0, 0]}\n',):
        (tmp_path / "b.jsonl").write_text(row * 2)
    config = MixtureConfig.model_validate({"train": ["a.jsonl", "b.jsonl"], "max_length": 32})
    batches = Batches(Examples(training_rows(config, None, 0), bytes_tokenizer(), config), 2, seed=0)
    with pytest.raises(UserError) as told:
        list(itertools.islice(batches, 9))
    batches.close()
    expected = "b.jsonl: nothing in it can be trained on: all 2 rows are dropped; of the last one, nothing to train on"
    assert str(told.value) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": [{"path": "a.jsonl", "weight": 0}]}, "greater than 0"),
        ({"train": ["x/a.jsonl", "a.csv"]}, "train: two data sets are called 'a': give one of them another `name`"),
        ({"train": []}, "train: an empty list has no rows; name a data set"),
        (
            {"train": ["a", "b"], "split": "test"},
            "split: test is that of one data set; give each",
        ),
        ({"train": ["a", "b"], "eval_split": "test"}, "eval_split: test: name its data set in data.eval"),
        ({"train": "a", "eval": [{"path": "b", "weight": 1}]}, "Extra inputs are not permitted"),
    ],
)
def test_lists_that_are_refused(data: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        DataConfig.model_validate(data)


def test_an_unknown_column_of_a_data_set_is_told_with_the_nearest(sources: list[dict[str, Any]]):
    sources[1]["columns"] = {"prompt": "qestion"}
    with pytest.raises(UserError, match=r"row 1 of b\.jsonl has .* Set data.columns: {prompt: question}"):
        examples(sources)


# --- Columns within columns -------------------------------------------------------------------------------------------

VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{i} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"split": "train", "index": i, "need_tools_kwargs": None},
    }
    for i in range(3)
]
"""verl's schema: https://verl.readthedocs.io/en/latest/preparation/prepare_data.html."""


def verl_rows(folder: Path, columns: dict[str, str]) -> Rows:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(VERL), folder / "verl.parquet")
    return open_rows("verl.parquet", None, columns.values())


def test_verls_parquet_is_read_by_dotted_names(tmp_path: Path):
    columns = {"answer": "reward_model.ground_truth", "index": "extra_info.index"}
    config = DataConfig(train="verl.parquet", columns=columns, chat_template="chatml")
    rows = verl_rows(tmp_path, columns)
    assert rows[1]["reward_model.ground_truth"] == "2"
    example = Examples(Rows("x", [{**rows[1], "prompt": "1 + 1?"}]), bytes_tokenizer(), config, RowKind.PROMPT)[0]
    row = example.row  # pyright: ignore[reportAttributeAccessIssue]
    assert (row["answer"], row["index"], row["data_source"]) == ("2", 1, "openai/gsm8k")


def test_a_column_whose_name_has_a_dot_wins(tmp_path: Path):
    table = [{"a.b": 1, "a": {"b": 2, "c.d": 3}}]
    assert open_rows(table, None, ["a.b"])[0]["a.b"] == 1
    assert open_rows(table, None, ["a.c.d"])[0]["a.c.d"] == 3


def test_a_dotted_name_that_leads_nowhere_is_told_with_the_nearest(tmp_path: Path):
    columns = {"answer": "reward_model.ground_truht"}
    config = DataConfig(train="verl.parquet", columns=columns)
    with pytest.raises(UserError) as told:
        Examples(verl_rows(tmp_path, columns), bytes_tokenizer(), config, RowKind.PROMPT)
    expected = (
        "row 1 of verl.parquet: data.columns maps answer to 'reward_model.ground_truht', which is not there; it has"
    )
    assert str(told.value).startswith(expected)
    assert str(told.value).endswith("Did you mean 'reward_model.ground_truth'?")
