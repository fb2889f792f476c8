"""Environments written for TRL, played by TRL's own code and by ours: the same tokens, tools, messages and rewards.

TRL brings the published chat templates of many families, with which calls and results are held to transformers too.
"""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests import tool_games, tool_runs
from tests.data.test_chat import made
from tests.rollout.environments.test_history import SPECIALS, TURNS, Asks, played, prompts, shown
from tunix.data.chat import render_continuation, render_prompt
from tunix.data.tokenizer import Tokenizer
from tunix.data.tool_calls import MARKUPS, Call, markup_of, typed
from tunix.errors import UserError
from tunix.rollout.environments.base import Episode
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.environments.remote import read_environment

pytestmark = pytest.mark.worlds

ENVIRONMENT = '''
class Safe:
    """A safe with a code that the row has."""

    def reset(self, **row):
        self.code, self.tries, self.opened = row["code"], 0, False
        return f" It has {len(row['code'])} digits."

    def dial(self, digits: str, fast: bool = False) -> str:
        """Dials a code.

        Args:
            digits: the code
            fast: whether to hurry
        """
        if not digits.isdigit():
            raise ValueError("digits only")
        self.tries += 1
        self.opened = digits == self.code
        return "it opens" if self.opened else f"shut, {self.tries} tried"

    async def listen(self) -> dict:
        """Says what is heard."""
        return {"clicks": self.tries}

    def get_reward(self) -> float:
        return self.opened - 0.1 * self.tries


def polite(prompts, completions, environments, code, **kwargs):
    assert prompts[0][-1]["content"].endswith("digits.")
    return [0.5 * ("please" in said[0]["content"]) + 0.01 * len(said) for said in completions]
'''
ROW = {"prompt": [{"role": "user", "content": "Open the safe."}], "code": "42"}
SPECIAL = re.compile(r"<\|?/?[a-z_\"]+\|?>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", '<|"|>')
EOS = {"qwen": "<|im_end|>", "llama3": "<|eot_id|>", "gptoss": "<|return|>", "gemma4": "<turn|>"}
FAMILIES = ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6"]
FAMILIES += ["qwen3_8", "llama3_1", "llama3_2", "gptoss", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}, "text": {"type": "string"}}},
        },
    }
    for name in ("add", "mul")
]


def family(name: str) -> Tokenizer:
    """A tokenizer of bytes with a published template and its special tokens."""
    template = (templates() / f"{name}.jinja").read_text()
    eos = next(token for start, token in EOS.items() if name.startswith(start))
    specials = [x for x in dict.fromkeys(SPECIAL.findall(template)) if "|" in x or x in TAGS]
    return made(template, ["<bos>", *dict.fromkeys((*specials, '<|"|>', eos))], eos=eos, bos="<bos>", merges=[])


def templates() -> Path:
    import trl

    return Path(trl.__file__).parent / "chat_templates"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("calls", [[{"n": 7, "text": "hi you"}], [{"n": 1}, {"text": "x"}], [{}]])
def test_results_follow_calls_as_published_templates_write_them(name: str, calls: list[dict[str, Any]]):
    """Prompt, the turn as the template writes it, and our continuation are transformers' tokens; the turn is parsed."""
    if len(calls) > 1 and name.startswith(("llama", "gptoss")):
        pytest.skip("one call in a turn is all that it writes")
    tokenizer = family(name)
    functions = [{"name": ("add", "mul")[i], "arguments": arguments} for i, arguments in enumerate(calls)]
    start = [{"role": "user", "content": "go on"}]

    def turn(functions: list[dict[str, Any]]) -> dict[str, Any]:
        asked = [{"type": "function", "id": f"call_{i}", "function": x} for i, x in enumerate(functions)]
        return {"role": "assistant", "content": "", "tool_calls": asked}

    results = [
        {"role": "tool", "name": x["name"], "tool_call_id": f"call_{i}", "content": f"it is {i}\nok"}
        for i, x in enumerate(functions)
    ]
    whole = tokenizer.hf.apply_chat_template(
        [*start, turn(functions), *results], tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    bare = turn([{**x, "arguments": {}} for x in functions])
    answer = render_continuation(start, [bare, *results], tokenizer, True, tools=TOOLS).tolist()
    prompt = render_prompt(start, tokenizer, tools=TOOLS).tokens.tolist()
    assert whole[: len(prompt)] == prompt
    assert whole[-len(answer) :] == answer
    action = whole[len(prompt) : -len(answer)]
    assert action[-1] in tokenizer.stop_ids
    found = MARKUPS[markup_of(tokenizer)].parse(tokenizer.decode(action[:-1])).calls
    assert read_calls(found, tokenizer) == functions


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "glm4moe", "lfm2", "cohere2"])
def test_families_with_other_markups_are_refused(name: str):
    template = (templates() / f"{name}.jinja").read_text()
    with pytest.raises(UserError, match="writes calls of tools in none of the markups that are known"):
        markup_of(made(template, ["<eos>", "<bos>"], eos="<eos>", bos="<bos>"))


def read_calls(calls: Sequence[Call], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Calls as the environment of tools reads them: by the tools' types where the markup writes all values as text."""
    tools = {tool["function"]["name"]: tool for tool in TOOLS}
    as_text = MARKUPS[markup_of(tokenizer)].as_text
    return [{"name": x.name, "arguments": typed(x.arguments, tools[x.name]) if as_text else x.arguments} for x in calls]


def parses_as_trl(tokenizer: Tokenizer, text: str) -> None:
    """Both find the same content, thoughts and calls in a turn."""
    from trl.chat_template_utils import add_response_schema, parse_response

    hf = add_response_schema(tokenizer.hf)
    prompt = render_prompt([{"role": "user", "content": "go"}], tokenizer, tools=TOOLS).tokens.tolist()
    theirs = parse_response(hf, tokenizer.encode(text), prefix=prompt, tools=TOOLS)
    ids = tokenizer.encode(text)
    ours = MARKUPS[markup_of(tokenizer)].parse(tokenizer.decode(ids[:-1]))
    assert theirs["content"].strip() == ours.content
    assert (theirs.get("reasoning_content") or theirs.get("thinking") or "") == ours.thought
    calls = [call["function"] for call in theirs.get("tool_calls") or []]
    assert calls == read_calls(ours.calls, tokenizer)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call><|im_end|>'),
        ("qwen3", "<think>\nhm\n</think>\n\nfour<|im_end|>"),
        (
            "qwen2_5",
            'So.\n<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>\n'
            '<tool_call>\n{"name": "mul", "arguments": {"text": "a b"}}\n</tool_call><|im_end|>',
        ),
        (
            "qwen3_5_nothink",
            "<tool_call>\n<function=add>\n<parameter=n>\n1\n</parameter>\n<parameter=text>\n7\n</parameter>\n</function>"
            "\n</tool_call><|im_end|>",
        ),
        ("llama3_2", '{"name": "add", "parameters": {"n": 1}}<|eot_id|>'),
        ("llama3_1", "four<|eot_id|>"),
        (
            "gptoss",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.add<|channel|>commentary json"
            '<|message|>{"n": 1}<|call|>',
        ),
        ("gptoss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"),
        ("gemma4_v5", '<|tool_call>call:add{n:1,text:<|"|>a b<|"|>}<tool_call|><|tool_response>'),
    ],
)
def test_turns_are_parsed_as_trl_does(name: str, text: str):
    parses_as_trl(family(name), text)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def trl_episode(kind: type, tokenizer: Tokenizer, turns: list[str]) -> tuple[list[int], list[int], list, Any, list]:
    """What TRL's trainer makes of a row and the model's turns: prompt, completion, its mask, messages, the instance.

    The trainer's methods run on an object that has of it what they read; its sampler plays back the turns.
    """
    from trl import GRPOTrainer
    from trl.chat_template_utils import add_response_schema, parse_response

    world = kind()
    add_response_schema(tokenizer.hf)
    prompts = [[dict(message) for message in ROW["prompt"]]]
    said = world.reset(**ROW)
    prompts[0][-1]["content"] += said
    tools = [world.dial, world.listen]
    prompt = tokenizer.hf.apply_chat_template(
        prompts[0], tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    loop = asyncio.new_event_loop()
    drawn = iter([tokenizer.encode(turn) for turn in turns])
    trainer = SimpleNamespace(
        _is_vlm=False,
        _tokenizer=tokenizer.hf,
        processing_class=tokenizer.hf,
        chat_template=None,
        chat_template_kwargs={},
        _sync_tool_dicts=[{"dial": world.dial}],
        _async_tool_dicts=[{"listen": world.listen}],
        async_loop=loop,
        use_vllm=False,
        vllm_mode=None,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10_000)),
        max_completion_length=10_000,
        max_tool_calling_iterations=100,
        environment_factories=None,
        tools=tools,
    )
    trainer._get_tool_suffix_ids = lambda messages: GRPOTrainer._get_tool_suffix_ids(trainer, messages)
    trainer._generate_single_turn = lambda *args, **kwargs: ([next(drawn)], None)
    first = next(drawn)
    completions = [[parse_response(tokenizer.hf, first, prefix=prompt, tools=tools)]]
    import threading

    threading.Thread(target=loop.run_forever, daemon=True).start()
    mask, messages, ids, *_ = GRPOTrainer._tool_call_loop(
        trainer, [list(prompts[0])], [prompt], [first], completions, None, None, {}
    )
    loop.call_soon_threadsafe(loop.stop)
    return prompt, ids[0], mask[0], world, messages[0]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507"])
def test_the_same_class_is_played_as_trl_plays_it(name: str, tmp_path: Path):
    """Tokens, their mask, messages and the reward, over calls that fail, succeed, and come two at a time."""
    (tmp_path / "safe.py").write_text(ENVIRONMENT)
    tokenizer = family(name)
    section = {"trl": "safe.py:Safe", "options": {"rewards": ["safe.py:polite"]}}
    kind, _, options = read_environment(EnvironmentConfig.model_validate(section), tokenizer)
    environment = kind(**options)
    episode = Episode(environment, ROW, np.random.default_rng(0), tokenizer)
    turns = [
        "Now please.\n" + call("dial", '{"digits": "x"}'),
        call("dial", '{"digits": "41", "fast": true}') + "\n" + call("listen", "{}"),
        call("dial", '{"digits": "42"}'),
        "It is open.",
    ]
    turns = [f"{turn}<|im_end|>" for turn in turns]
    module = type(environment._world)
    prompt, ids, mask, world, messages = trl_episode(module, tokenizer, turns)
    assert episode.prompt.tolist() == prompt
    ours, marks = list[int](), list[int]()
    for turn in turns:
        drawn = tokenizer.encode(turn)
        answer = episode.turn(np.asarray(drawn, np.int32))
        seen = [] if answer is None else answer.tolist()
        ours, marks = [*ours, *drawn, *seen], [*marks, *[1] * len(drawn), *[0] * len(seen)]
    assert ours == ids
    assert marks == mask
    bare = [
        {key: x for key, x in message.items() if key not in ("tool_call_id", "tool_calls")}
        | (
            {"tool_calls": [{k: x for k, x in c.items() if k != "id"} for c in y]}
            if (y := message.get("tool_calls"))
            else {}
        )
        for message in environment.messages
    ]
    assert bare == messages
    assert episode.done
    polite = 0.5 + 0.01 * len(messages)
    assert episode.score == pytest.approx(world.get_reward() + polite)
    assert world.get_reward() == pytest.approx(0.8)


def test_a_model_learns_in_an_environment_of_trl(tmp_path: Path):
    """And a run that is killed ends like one that is not."""
    start = tool_runs.first_stage(tmp_path / "sft")
    options = {**tool_games.SHORT, "rewards": ["tests.tool_games:opened"]}
    environment = {"trl": "tests.tool_games:Vault", "options": options, "turns": 3}
    tool_runs.assert_learns(tmp_path / "grpo", start, environment)
    tool_runs.assert_resumes(tmp_path / "killed", start, environment)


@pytest.mark.parametrize(("name", "begun"), [("qwen3", ""), ("qwen3_5_think", "<think>\n")])
@pytest.mark.parametrize("cuts", [False, True])
def test_turns_of_thinking_models_read_what_their_own_templates_show(name: str, begun: str, cuts: bool):
    """Five turns under the templates that TRL has of Qwen 3 and 3.5, one of which begins a turn within the thought."""
    template = (templates() / f"{name}.jinja").read_text()
    tokenizer = made(template, SPECIALS, eos="<|im_end|>")
    said = [text.removeprefix(begun) for text in TURNS]
    completion, prompt, episodes = played(Asks(cuts), tokenizer, said, "<|im_end|>")
    assert prompts(completion, prompt) == shown(tokenizer, Asks(cuts), said)
    assert len(completion.restarts) >= 2
    assert episodes.scores == [1.0]
