"""Rows as strangers bring them: null keys that Arrow made, variables of the template, tools in several forms."""

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.data import rendered_as
from tests.data.test_chat import made
from tests.data.test_chat_manners import CALL, DEVELOPER, IM, NAMED, THOUGHT, THOUGHTS, TOKENIZERS
from tests.marks import slow
from tunix.cli import main
from tunix.config import RowKind
from tunix.data.chat import render_chat
from tunix.data.examples import to_example
from tunix.data.sources import open_rows
from tunix.data.templates import TEMPLATES
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import NO_STOP, NOT_WRITTEN, Accounting, Dropped, Kept
from tunix.errors import UserError

TOOLED = (
    "{%- if tools -%}{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}{%- endif -%}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{- 'no thoughts\\n' -}}{%- endif -%}" + NAMED
)
TOKENIZER = made(TOOLED, IM, eos="<|im_end|>")


PARAMETERS = '{"type": "object", "properties": {"at": {"type": "string"}}}'


def text_of(example: Kept | Dropped) -> str:
    assert isinstance(example, Kept), example
    return TOKENIZER.decode(example.sequences[0].tokens)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def called(name: str, **arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    asked: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [
        {"role": "user", "content": "?"},
        asked,
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "R."},
    ]


@pytest.mark.parametrize("form", ["parquet", "arrow", "datasets"])
def test_keys_that_arrow_filled_with_null_are_not_there(tmp_path: Path, form: str):
    """Arrow gives the struct of each row the keys of all rows: arguments and properties of others."""
    rows = [
        {"messages": called("look", at="Oslo"), "tools": [tool("look", at={"type": "string", "enum": None})]},
        {"messages": called("add", a=1, b=2), "tools": [tool("add", a={"type": "integer"}, b={"type": "integer"})]},
        {"messages": called("look", at="Rome"), "tools": None},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if form == "datasets":
        import datasets

        stored: Any = datasets.Dataset.from_list(rows)
    else:
        stored = tmp_path / f"rows.{form}"
        table = pyarrow.Table.from_pylist(rows)
        if form == "parquet":
            pyarrow.parquet.write_table(table, stored)
        else:
            with pyarrow.ipc.new_file(stored, table.schema) as writer:
                writer.write_table(table)
    settings = rendered_as("messages")
    for i, row in enumerate(rows):
        without = json.loads(json.dumps(row).replace(', "enum": null', ""))
        expected = to_example(without, TOKENIZER, settings)
        assert text_of(to_example(open_rows(stored)[i], TOKENIZER, settings)) == text_of(expected), i
    # A null that the author of a JSON line wrote is the author's.
    assert '"enum": null' in text_of(to_example(open_rows(tmp_path / "rows.jsonl")[0], TOKENIZER, settings))


@pytest.mark.parametrize(
    "tools",
    [
        json.dumps([tool("look", at={"type": "string"})]),
        [json.dumps(tool("look", at={"type": "string"}))],
        [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}],
    ],
)  # fmt: skip
def test_tools_that_are_json(tools: Any):
    settings = rendered_as("messages")
    right = to_example({"messages": CALL, "tools": [tool("look", at={"type": "string"})]}, TOKENIZER, settings)
    assert text_of(to_example({"messages": CALL, "tools": tools}, TOKENIZER, settings)) == text_of(right)


@pytest.mark.parametrize("tools", ["{", 3, ["a"], [1]])
def test_tools_that_are_none(tools: Any):
    with pytest.raises(UserError, match=r"tools is .*, not a list of tools"):
        to_example({"messages": CALL, "tools": tools}, TOKENIZER, rendered_as("messages"))


@pytest.mark.parametrize("kind", [RowKind.COMPLETION, RowKind.PROMPT, RowKind.PAIRS])
def test_variables_of_a_row_take_precedence(kind: RowKind):
    row: dict[str, Any] = {"messages": CALL[:1], "prompt": CALL[:1], "chosen": CALL[3:4], "rejected": CALL[5:]}
    if kind == RowKind.COMPLETION:
        row["messages"] = [*CALL[:1], *CALL[3:4]]
    shape = "pairs" if kind == RowKind.PAIRS else "messages"
    fixed = ("prompt",) if kind == RowKind.PAIRS else ()
    settings = rendered_as(
        shape, train_on=kind, fixed=fixed, prompt_length=99, template_kwargs={"enable_thinking": True}
    )
    for variables, said in (
        (None, False),
        ({"enable_thinking": False}, True),
        ('{"enable_thinking": false}', True),
        ({}, False),
    ):
        example = to_example({**row, "chat_template_kwargs": variables}, TOKENIZER, settings)
        assert ("no thoughts" in text_of(example)) == said, variables


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"tools": []}, "chat_template_kwargs sets tools, which tunix sets itself"),
        ("{", "which is not JSON"),
        ([1], r"chat_template_kwargs is \[1\], not an object"),
    ],
)
def test_variables_that_are_none(variables: Any, message: str):
    with pytest.raises(UserError, match=f"row 3.*{message}"):
        to_example({"messages": CALL, "chat_template_kwargs": variables}, TOKENIZER, rendered_as("messages"), "row 3")


def test_refused_rows_are_counted_and_noted_ones_too():
    mute = made(
        "{% for m in messages %}{% if m.role != 'developer' %}{{ m.content }}{% endif %}{% endfor %}", IM, "<|im_end|>"
    )
    settings = rendered_as("messages")
    refused = to_example({"messages": DEVELOPER}, mute, settings)
    assert isinstance(refused, Dropped)
    assert refused.detail.startswith("message 1 (developer): the chat template does not write its content, 'One word.'")
    kept = to_example({"messages": THOUGHT}, mute, settings)
    account = Accounting.of(refused) + Accounting.of(kept) + Accounting.of(kept)
    # Both turns of a row end without a stop token: the row counts once for the rule.
    assert account == Accounting(rows=3, kept=2, dropped={NOT_WRITTEN: 1}, notes={NO_STOP: 2})
    assert Accounting(**json.loads(json.dumps(asdict(account)))) == account


def test_inspect_tells_the_rule_and_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    template = TEMPLATES["chatml"].replace("text(message.content)", "message.content.split('</think>')[-1]")
    (tmp_path / "t.jinja").write_text(
        template.replace("message in messages", "message in messages if message.role != 'developer'")
    )
    rows: list[dict[str, Any]] = [{"messages": x} for x in (THOUGHT, DEVELOPER, THOUGHT, DEVELOPER)]
    rows.append({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "long " * 40}]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = "{init: random, family: qwen3, sizes: {vocab_size: 320}, tokenizer: bytes}"
    data = "{train: rows.jsonl, max_length: 160, chat_template: t.jinja}"
    (tmp_path / "r.yaml").write_text(f"model: {model}\ndata: {data}\n")
    assert main(["inspect", "r.yaml", "--rows", "2"]) == 0
    out = capsys.readouterr().out
    reason = f"{NOT_WRITTEN}: message 1 (developer): the chat template does not write its content, 'One word.'"
    assert f"{THOUGHTS}: <think>\\neasy\n" in out
    assert f"row 2: dropped, {NOT_WRITTEN}\n{reason.split(': ', 1)[1]}" in out
    assert f"row 3: {THOUGHTS}: <think>\\nsame\n" in out
    assert f"row 4: dropped, {reason}" in out
    assert "row 5: cut at 160: " in out
    assert f"with notes             2  {THOUGHTS}\n" in out


def test_an_outline_gives_what_two_renderings_give():
    """Of many conversations of few shapes: a tokenizer that remembers shapes, and a new one for each."""
    words = ["ok", "", " x", "<think>", "x\n\n", '"q"', "é\u2009x", "[INST]", "a" * 50]
    remembers = made(
        TEMPLATES["llama3"],
        ["<bos>", "<eos>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
        "<eos>",
        "<bos>",
    )
    forgets = remembers.replace_template(TEMPLATES["llama3"])
    for a in words:
        for b in words:
            chat = [{"role": "user", "content": a}, {"role": "assistant", "content": b}] * 2
            for trained_from in (0, 2):
                forgets.outlines.clear()
                first, second = (render_chat(chat, x, trained_from=trained_from) for x in (remembers, forgets))
                assert first.tokens.tolist() == second.tokens.tolist()
                assert first.mask.tolist() == second.mask.tolist(), (a, b)
                assert first.notes == second.notes
    assert remembers.outlines


@pytest.mark.parametrize("name", ["qwen3", "deepseek", *slow(["nemotron", "qwen35", "glm", "chatml"])])
def test_an_outline_leaves_out_the_thoughts_that_two_renderings_do(name: str):
    """In the content and as a field, with answers that begin and end in all ways."""
    template, thoughts = TOKENIZERS[name].chat_template, ["easy", "", " x "]
    remembers, forgets = (TOKENIZERS[name].replace_template(template) for _ in range(2))
    outcomes: dict[str, int] = {"rendered": 0, "refused": 0}
    for thought, between, answer in itertools.product(thoughts, ["\n\n", ""], ["Four.", " <b>", '"4"', "", " x"]):
        for said in (
            {"content": f"<think>\n{thought}\n</think>{between}{answer}"},
            {"content": answer, "reasoning_content": thought},
            {"content": answer},
        ):
            turn = {"role": "assistant", **said}
            chat = [{"role": "user", "content": "2 + 2?"}, turn, {"role": "user", "content": "And?"}]
            for rows in (chat[:2], [*chat, turn], chat):
                forgets.outlines.clear()
                first, second = outcome(rows, remembers), outcome(rows, forgets)
                assert first == second, rows
                outcomes["refused" if isinstance(first, str) else "rendered"] += 1
    assert outcomes["rendered"] > outcomes["refused"]
    cuts = any("answer" in outline.written for outline in remembers.outlines.values())
    assert cuts == (name in ("qwen3", "deepseek", "nemotron"))


def outcome(chat: list[dict[str, Any]], tokenizer: Tokenizer) -> object:
    """What is rendered of a conversation, or the complaint."""
    try:
        tokens, mask = (rendered := render_chat(chat, tokenizer))
    except UserError as error:
        return str(error)
    return tokens.tolist(), mask.tolist(), rendered.notes


def test_nulls_of_other_rows_in_json_lines(tmp_path: Path):
    """`datasets` writes the keys of all rows into each line; a null that the tool declares is the author's."""
    optional = {"type": ["string", "null"], "default": None}
    rows = [
        {
            "messages": called("look", at="Oslo", unit=None),
            "tools": [tool("look", at={"type": "string"}, unit=optional)],
        },
        {"messages": called("add", a=1), "tools": [tool("add", a={"type": "integer"})]},
    ]
    padded = json.loads(json.dumps(rows))
    padded[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] |= {"a": None}
    padded[0]["tools"][0]["function"]["parameters"]["properties"] |= {"a": None}
    padded[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] |= {"at": None, "unit": None}
    padded[1]["tools"][0]["function"]["parameters"]["properties"] |= {"at": None, "unit": None}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in padded))
    stored, settings = open_rows("rows.jsonl"), rendered_as("messages")
    for i, row in enumerate(rows):
        assert text_of(to_example(stored[i], TOKENIZER, settings)) == text_of(to_example(row, TOKENIZER, settings))
    assert '"unit": null' in text_of(to_example(stored[0], TOKENIZER, settings))
