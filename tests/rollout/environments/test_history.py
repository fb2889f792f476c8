"""`rollout.history: template` and `Step.messages`: at each turn the model reads what the folder's template shows.

Templates of thinking models leave the thoughts of earlier turns out, so that a turn does not begin with all before.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.data.test_chat import made
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError
from tunix.rollout.environments.base import Environment, Episode, Episodes, Step
from tunix.types import Completion, Restart, Sampling

THINKS = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\\n' -}}
  {%- if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last -%}
    {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}
  {%- endif -%}
  {{- m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""As Qwen 3's: thoughts are shown of what follows the last question only."""
SPECIALS = ["<|im_start|>", "<|im_end|>"]
TURNS = [
    "<think>\nlong\n</think>\n\none",
    "<think>\nlonger\n</think>\n\ntwo",
    "three",
    "<think>\nx\n</think>\n\nfour",
    "five",
]


class Asks(Environment):
    """Asks on; a tool answers the second turn, and after the third the conversation is shortened where `cuts`."""

    def __init__(self, cuts: bool = False):
        self.turns, self.cuts = 0, cuts

    def reset(self, row, rng):
        return [{"role": "system", "content": "be short"}, {"role": "user", "content": "first?"}]

    def step(self, action: str, tokens: np.ndarray) -> Step:
        self.turns += 1
        if self.turns == len(TURNS):
            return Step(reward=1.0, done=True)
        if self.cuts and self.turns == 3:
            return Step(messages=[{"role": "user", "content": "so far: " + action}])
        return Step([{"role": "tool" if self.turns == 2 else "user", "content": f"and {self.turns}?"}])


def played(
    environment: Environment, tokenizer: Tokenizer, said: Sequence[str], stop: str, history: Any = "template"
) -> tuple[Completion, np.ndarray, Episodes]:
    """An episode with these turns, as a sampler puts it together, and its prompt."""
    episode = Episode(environment, {}, np.random.default_rng(0), tokenizer, 16, None, history)
    episodes = Episodes([episode])
    tokens, turns, restarts = np.zeros(0, np.int32), [], []
    completion = Completion(tokens, tokens, "stop", tokens, Sampling(), ())
    for text in said:
        ids = tokenizer.encode(text + stop)
        turns.append((len(tokens), len(tokens) + len(ids)))
        tokens = np.concatenate([tokens, ids]).astype(np.int32)
        completion = Completion(tokens, tokens * 0, "stop", tokens, Sampling(), tuple(turns), restarts=tuple(restarts))
        observation = episodes.reply(0, completion)
        if observation is None:
            break
        if isinstance(observation, Restart):
            restarts.append(len(tokens))
            observation = observation.prompt
        tokens = np.concatenate([tokens, observation]).astype(np.int32)
    return completion, episode.prompt, episodes


def prompts(completion: Completion, prompt: np.ndarray) -> list[list[int]]:
    """What the model had read before each turn."""
    found = []
    for start, _ in completion.turns:
        begin = max((x for x in completion.restarts if x <= start), default=None)
        before = completion.tokens[:start] if begin is None else completion.tokens[begin:start]
        found.append([*(prompt if begin is None else ()), *before.tolist()])
    return found


def shown(tokenizer: Tokenizer, environment: Environment, said: Sequence[str]) -> list[list[int]]:
    """The template's own rendering of the conversation before each turn."""
    messages, found = list(environment.reset({}, np.random.default_rng(0))), []
    for text in said:
        found.append(tokenizer.hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        thought, _, rest = text.rpartition("</think>")
        message = {"role": "assistant", "content": rest.strip()}
        if thought:
            message["reasoning_content"] = thought.removeprefix("<think>").strip()
        step = environment.step(text, np.zeros(0, np.int32))
        messages = list(step.messages) if step.messages is not None else [*messages, message, *(step.observation or ())]
    return found


@pytest.mark.parametrize("cuts", [False, True])
def test_each_turn_reads_what_the_template_shows(cuts: bool):
    tokenizer = made(THINKS, SPECIALS, eos="<|im_end|>")
    completion, prompt, episodes = played(Asks(cuts), tokenizer, TURNS, "<|im_end|>")
    assert prompts(completion, prompt) == shown(tokenizer, Asks(cuts), TURNS)
    # Each sampled token is there once, and a tool's answer goes on with the thoughts before it.
    drawn = [tokenizer.decode(completion.tokens[start:end]) for start, end in completion.turns]
    assert drawn == [text + "<|im_end|>" for text in TURNS]
    assert len(completion.restarts) == 3
    assert episodes.scores == [1.0]


def test_a_conversation_without_thoughts_is_one_transcript():
    tokenizer = made(THINKS, SPECIALS, eos="<|im_end|>")
    said = ["one", "two", "three", "four", "five"]
    plain, prompt, _ = played(Asks(), tokenizer, said, "<|im_end|>", "append")
    shows, again, _ = played(Asks(), tokenizer, said, "<|im_end|>")
    assert shows.restarts == ()
    assert shows.tokens.tolist() == plain.tokens.tolist()
    assert prompt.tolist() == again.tolist()


def test_a_history_is_replaced_where_it_is_appended_to_too():
    tokenizer = made(THINKS, SPECIALS, eos="<|im_end|>")
    completion, prompt, _ = played(Asks(cuts=True), tokenizer, TURNS, "<|im_end|>", "append")
    assert len(completion.restarts) == 1
    fourth, fifth = prompts(completion, prompt)[3:]
    assert tokenizer.decode(fourth) == "<|im_start|>user\nso far: three<|im_end|>\n<|im_start|>assistant\n"
    said = tokenizer.encode(f"{TURNS[3]}<|im_end|>\n<|im_start|>user\nand 4?<|im_end|>\n<|im_start|>assistant\n")
    assert fifth == [*fourth, *said]


def test_a_text_may_become_a_conversation():
    """What follows is then rendered as its continuation."""

    class Turns(Asks):
        def reset(self, row, rng):
            return "a text"

        def step(self, action: str, tokens: np.ndarray) -> Step:
            self.turns += 1
            return Step(messages=ASKED) if self.turns == 1 else Step(ASKED, done=self.turns == 3)

    tokenizer = made(THINKS, SPECIALS, eos="<|im_end|>")
    completion, _, episodes = played(Turns(), tokenizer, ["one", "two", "three"], "<|im_end|>", "append")
    assert len(completion.turns) == 3
    assert completion.restarts == (completion.turns[0][1],)
    assert episodes.scores == [0.0]


class Speaks(Asks):
    """Begins, or goes on, with something."""

    def __init__(self, start: Any, step: Step):
        self.start, self.answer = start, step

    def reset(self, row, rng):
        return self.start

    def step(self, action: str, tokens: np.ndarray) -> Step:
        return self.answer


ASKED = [{"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    ("start", "step", "why"),
    [
        (ASKED, Step("no message"), "answered with no messages, which rollout.history: template renders"),
        (ASKED, Step(ASKED, messages=ASKED), "an observation and with messages that replace all before"),
        (ASKED, Step(messages=[{"role": "nobody"}]), "nobody"),
    ],
)
def test_what_cannot_be_rendered_fails_the_episode(start: Any, step: Step, why: str):
    tokenizer = made(THINKS, SPECIALS, eos="<|im_end|>")
    *_, episodes = played(Speaks(start, step), tokenizer, ["one"], "<|im_end|>")
    assert why in str(episodes.scores[0])


def test_a_text_is_no_conversation():
    tokenizer = made(THINKS, SPECIALS, eos="<|im_end|>")
    with pytest.raises(
        UserError, match="history: template renders messages, and the environment Speaks starts with a text"
    ):
        played(Speaks("a text", Step()), tokenizer, ["one"], "<|im_end|>")
