"""The environment `tools` and TRL's classes, in this process and in workers: prompts, calls, answers, refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_tool_calls import family
from tunix.data.tokenizer import Tokenizer, bytes_tokenizer
from tunix.errors import UserError
from tunix.rollout.environments.base import Environment, Episode, Episodes, Step
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.environments.remote import Player, read_environment
from tunix.rollout.rewards.base import Failure

CHATML = bytes_tokenizer("chatml")
TOOLS = '''
import time


def add(a: int, b: int = 2) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def later(text: str) -> str:
    """Says it later.

    Args:
        text: what
    """
    return text.upper()


def hang() -> None:
    """Hangs."""
    time.sleep(3600)


def untyped(x) -> None:
    """Has no type.

    Args:
        x: what
    """


def undescribed(x: int) -> None:
    """Does not say what x is."""


def silent(x: int) -> None:
    pass


def strange(x: object) -> None:
    """Takes anything.

    Args:
        x: what
    """


def many(*xs: int) -> None:
    """Takes any number.

    Args:
        xs: which
    """


number = 3


class Door:
    """A class for TRL's trainer."""

    def __init__(self):
        self.open = False

    def reset(self, **row):
        self.code = row["code"]
        return " Mind the step."

    def dial(self, code: int) -> str:
        """Dials a code.

        Args:
            code: the code
        """
        if code < 0:
            raise ValueError("no such code")
        self.open = code == self.code
        return "open" if self.open else "shut"

    def _hidden(self):
        return None

    def get_reward(self):
        return float(self.open)


class Silent(Door):
    get_reward = None


class Closed:
    def dial(self) -> None:
        """Has no reset."""


def turns(prompts, completions, environments, code, **kwargs):
    assert [message["role"] for message in completions[0]][-1] == "assistant"
    return [len(completions[0]) + environments[0].code / 100 + code[0] / 1000]


async def nothing(completions, **kwargs):
    return [None]


def wants(completions, trainer_state):
    return [0.0]
'''


@pytest.fixture(autouse=True)
def _written(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(TOOLS)


def episode(
    row: dict[str, Any] | None = None, tokenizer: Tokenizer = CHATML, turns: int = 16, **section: Any
) -> Episode:
    """An episode in this process."""
    config = EnvironmentConfig.model_validate(section or {"tools": ["my.py:add", "my.py:later"]})
    kind, _, options = read_environment(config, tokenizer)
    return Episode(kind(**options), row or {"prompt": "go"}, np.random.default_rng(0), tokenizer, turns)


def said(played: Episode, text: str, tokenizer: Tokenizer = CHATML, stop: str = "<|im_end|>") -> str | None:
    """What follows a turn."""
    answer = played.turn(np.asarray(tokenizer.encode(text + stop), np.int32))
    return None if answer is None else tokenizer.decode(answer)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tool(*answers: str) -> str:
    """Answers in a template that writes the role as it is."""
    return "\n" + "".join(f"<|im_start|>tool\n{x}<|im_end|>\n" for x in answers) + "<|im_start|>assistant\n"


def test_calls_are_answered_until_there_is_none():
    played = episode()
    assert said(played, call("add", a=1)) == tool("3")
    assert said(played, f"Both.\n{call('add', a=1, b=1)}\n{call('later', text='hi')}") == tool("2", "HI")
    assert said(played, "It is 3.") is None
    assert played.done
    assert played.rewards == [None] * 3
    assert played.score is None  # reward functions score


def test_what_is_wrong_with_a_call_is_an_answer():
    played = episode()
    assert said(played, "<tool_call>{</tool_call>") == tool(
        "error: the call is not understood: it is not JSON: Expecting property name enclosed in double quotes: line 1 "
        'column 2 (char 1). Write it as <tool_call>\n{"name": "NAME", "arguments": {"KEY": "VALUE"}}\n</tool_call>'
    )
    assert said(played, call("ad", a=1)) == tool(
        "error: there is no tool 'ad'; there are add, later. Did you mean 'add'?"
    )
    wrong = said(played, call("add", x=1) + call("add", a=5))
    assert wrong == tool("error: TypeError: add() got an unexpected keyword argument 'x'", "7")
    assert played.failure is None


@pytest.mark.parametrize("markup", ["hermes", "xml", "llama", "gemma4", "harmony"])
def test_a_template_that_knows_tools_shows_them(markup: str):
    tokenizer = family(markup)
    played = episode(tokenizer=tokenizer)
    assert '"description": "Adds two numbers."' in tokenizer.decode(played.prompt)
    assert "You can call" not in tokenizer.decode(played.prompt)
    calls = {
        "hermes": call("add", a=1),
        "xml": "</think>\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "llama": '{"name": "add", "parameters": {"a": 1}}',
        "gemma4": "<|tool_call>call:add{a:1}<tool_call|>",
        "harmony": "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary to=functions.add"
        '<|message|>{"a": 1}',
    }
    stops = {"llama": "<|eot_id|>", "gemma4": "<|tool_response>", "harmony": "<|call|>"}
    answers = {
        "hermes": "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        "xml": "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
        "llama": '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "gemma4": "response:3<tool_response|>",
        "harmony": "<|start|>functions.add to=assistant<|channel|>commentary<|message|>3<|end|><|start|>assistant",
    }
    assert said(played, calls[markup], tokenizer, stops.get(markup, "<|im_end|>")) == answers[markup]


def test_a_template_that_knows_none_gets_instructions():
    gemma = bytes_tokenizer("gemma")
    row = {"prompt": [{"role": "system", "content": "Help."}, {"role": "user", "content": "go"}]}
    played = episode(row, gemma)
    prompt = gemma.decode(played.prompt)
    assert prompt.startswith("<bos><start_of_turn>user\nYou can call these functions:\n{")
    assert '```tool_code\nNAME(key="VALUE")\n```\n\nHelp.\n\ngo<end_of_turn>' in prompt
    answer = said(played, "```tool_code\nadd(a=2)\nadd(a=3)\n```", gemma, "<end_of_turn>")
    assert answer is not None
    assert answer.startswith("\n<start_of_turn>user\n```tool_output\n4\n```\n```tool_output\n5\n```<end_of_turn>\n")
    options = {"instructions": "Use `add`."}
    played = episode(None, gemma, tools=["my.py:add"], options=options)
    assert gemma.decode(played.prompt) == (
        "<bos><start_of_turn>user\nUse `add`.\n\ngo<end_of_turn>\n<start_of_turn>model\n"
    )


def test_the_last_turn_that_is_allowed_ends_the_episode():
    """A model that calls on and on has not failed: it is scored as it is."""
    played = episode(turns=2)
    said(played, call("add", a=1))
    assert said(played, call("add", a=1)) is None
    assert played.done
    assert played.failure is None


class Ends(Environment):
    """A last reward, whatever ended the episode."""

    def __init__(self) -> None:
        self.turns, self.ended = 0, 0

    def reset(self, row: Any, rng: np.random.Generator) -> str:
        return "go"

    def step(self, action: str, tokens: np.ndarray) -> Step:
        self.turns += 1
        return Step("more", 1.0, done=action == ".")

    def finish(self) -> float:
        self.ended += 1
        return 10.0 * self.turns


@pytest.mark.parametrize("ends", [True, False])
def test_the_last_reward_is_given_once(ends: bool):
    environment = Ends()
    played = Episode(environment, {}, np.random.default_rng(0), CHATML)
    said(played, "a", stop="")
    if ends:
        said(played, ".", stop="")
    Episodes([played]).finish(dict(enumerate([completion(1 + ends)])))
    assert played.score == (22.0 if ends else 11.0)
    assert played.rewards == ([1.0, 21.0] if ends else [11.0])
    assert environment.ended == 1


def completion(turns: int) -> Any:
    from tests.rollout.environments.test_environments import completion_of

    return completion_of(*((i, i + 1) for i in range(turns)), tokens=np.zeros(turns, np.int32))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"tools": ["my.py:untyped"]}, "the tool my.py:untyped cannot be a JSON schema: Argument x is missing a type"),
        ({"tools": ["my.py:undescribed"]}, "the tool my.py:undescribed cannot be a JSON schema: .* no description"),
        ({"tools": ["my.py:silent"]}, "the tool my.py:silent cannot be a JSON schema: .* it has no docstring"),
        (
            {"tools": ["my.py:strange"]},
            "the tool my.py:strange cannot be a JSON schema: Couldn't convert the type hint",
        ),
        (
            {"tools": ["my.py:many"]},
            r"the tool my.py:many has the parameter \*xs: int, which a call by names cannot fill",
        ),
        ({"tools": ["my.py:number"]}, "my.py:number is 3, not a function that a model can call"),
        ({"tools": ["my.py:ad"]}, "my.py has no 'ad'. Did you mean 'add'?"),
        ({"tools": ["add"]}, "environment.tools has 'add': write `file.py:function` or `module:function`"),
        ({"tools": ["my.py:add", "my.py:add"]}, "another tool is called 'add': rename one"),
        (
            {"tools": ["my.py:add"], "options": {"markup": "herms"}},
            "has markup: 'herms'. Input should be 'hermes', 'xml'",
        ),
        ({"tools": ["my.py:add"], "options": {"sytem": "x"}}, "has no option 'sytem'"),
        ({"mcp": {"command": ["no-such-program"]}}, "environment.mcp needs mcp|no program 'no-such-program'"),
        ({"trl": "my.py:Door", "options": {"rewards": ["my.py:wants"]}}, "wants wants trainer_state, which only TRL's"),
        (
            {"trl": "my.py:Door", "options": {"rewards": ["wants"]}},
            "rewards has 'wants', which is no `file.py:function`",
        ),
        ({"trl": "my.py:Closed"}, "write trl:file.py:Class, whose class has a method `reset`"),
        ({"trl": "my.py:add"}, "write trl:file.py:Class, whose class has a method `reset`"),
        ({"name": "trl"}, "rollout.environment.name is 'trl'; written is trl:SOURCE"),
    ],
)
def test_bad_tools_are_refused_before_a_run(section: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        read_environment(EnvironmentConfig.model_validate(section), CHATML)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "guessing", "tools": ["my.py:add"]}, "tools and mcp: no part of the environment guessing"),
        ({"name": "tools"}, "the environment tools has none: name some in `tools: "),
        ({"mcp": {"command": []}}, "at least 1 item"),
    ],
)
def test_sections_that_say_nothing_or_too_much(section: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        EnvironmentConfig.model_validate(section)


def test_a_template_that_cannot_render_calls_is_refused():
    refuses = CHATML.replace_template("{{ tools }}<tool_call>{{ raise_exception('never') if messages[1] else '' }}")
    with pytest.raises(UserError, match=r"the chat template of .* refuses the conversation: never"):
        read_environment(EnvironmentConfig(name="tools", tools=("my.py:add",)), refuses)


def test_an_environment_of_trl():
    played = episode({"prompt": "Open.", "code": 7}, trl="my.py:Door", options={"instructions": "", "system": "Be."})
    assert CHATML.decode(played.prompt) == (
        "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nOpen. Mind the step.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert said(played, call("dial", code=-1)) == tool("{'error': 'no such code'}")
    assert said(played, call("reset")) == tool(str({"error": "there is no tool 'reset'; there are dial."}))
    assert said(played, call("dial", code=7)) == tool("open")
    assert said(played, "Done.") is None
    assert played.score == 1.0


def test_reward_functions_of_an_environment_of_trl():
    """Six messages, the code twice, and what the class says itself; None adds nothing."""
    rewards = ["my.py:turns", "my.py:nothing"]
    played = episode(
        {"prompt": "Open.", "code": 7}, trl="my.py:Door", tools=["my.py:add"], options={"rewards": rewards}
    )
    assert '"name": "dial"' in CHATML.decode(played.prompt)
    said(played, call("dial", code=7) + call("add", a=1))
    said(played, "Done.")
    assert played.score == pytest.approx(1.0 + 4 + 0.07 + 0.007)


def test_in_workers(tmp_path: Path):
    """A tool that hangs is named in the failure of its episode, and spoils no other one."""
    section = {"tools": ["my.py:add", "my.py:hang"], "deadline": 1, "workers": 1}
    play = Player(EnvironmentConfig.model_validate(section), CHATML)
    try:
        played = play([{"prompt": "a"}, {"prompt": "b"}], 0)
        first, second = played.episodes
        assert '"name": "hang"' in CHATML.decode(first.prompt)
        assert said(second, call("add", a=1)) == tool("3")
        assert said(first, call("hang")) is None
        assert isinstance(first.score, Failure)
        assert first.score.reason.startswith("the environment Tools took longer than 1 s at '<tool_call>")
        assert '"hang"' in first.score.reason
        assert said(second, call("add", a=2)) == tool("4")
        assert said(second, "4") is None
        assert second.score is None
    finally:
        play.close()


def test_an_environment_of_trl_in_a_worker():
    play = Player(EnvironmentConfig.model_validate({"trl": "my.py:Door", "workers": 1}), CHATML)
    try:
        assert play.scores
        played = play([{"prompt": "a", "code": 7}, {"prompt": "b", "code": 7}], 0)
        for i, code in enumerate((7, 8)):
            said(played.episodes[i], call("dial", code=code))
        assert said(played.episodes[0], "Done.") is None
        played.finish(dict(enumerate([completion(2), completion(1)])))  # the second one was cut off after its call
        assert played.scores == [1.0, 0.0]
    finally:
        play.close()
