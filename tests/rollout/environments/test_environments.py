"""Environments: what an episode tells the sampler, what it is worth, and the shipped ones played by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.data import rendered_as
from tests.guessing_games import demonstrations
from tunix.data.chat import render_prompt
from tunix.data.config import DataConfig
from tunix.data.examples import to_example
from tunix.data.tokenizer import Tokenizer, bytes_tokenizer
from tunix.data.types import Kept
from tunix.errors import UserError
from tunix.recipe.sections import rows_left_out
from tunix.rollout.environments.adapters import ADAPTERS, row_seed, training_rows
from tunix.rollout.environments.base import Environment, Episode, Episodes, Observation, Row, Step
from tunix.rollout.environments.calculator import Calculator, calculate, held_out_problems, problems
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.environments.guessing import Guessing, secrets
from tunix.rollout.environments.problem import Problem, extracted
from tunix.rollout.environments.remote import read_environment
from tunix.rollout.rewards.base import Failure
from tunix.types import Completion, Sampling
from tunix.util.plugins import load_object

RNG = np.random.default_rng(0)
TOKENIZER = bytes_tokenizer()


class Scripted(Environment):
    """Plays back what a test wrote down; an exception is raised."""

    def __init__(self, *steps: Any, start: Observation = "go ") -> None:
        self._steps, self._start, self.seen = list(steps), start, []

    def reset(self, row: Row, rng: np.random.Generator) -> Observation:
        return self._start

    def step(self, action: str, tokens: np.ndarray) -> Step:
        self.seen.append((action, tokens.tolist()))
        step = self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]
        if isinstance(step, Exception):
            raise step
        return step


def episode(environment: Environment, row: Row | None = None, turns: int = 16) -> Episode:
    return Episode(environment, row or {}, RNG, TOKENIZER, turns)


def ids(text: str) -> np.ndarray:
    return np.asarray(TOKENIZER.encode(text), np.int32)


def play(environment: Environment, row: Row, *actions: str) -> tuple[list[str | None], Episode]:
    """The answers to a model that writes `actions`, as texts."""
    played = episode(environment, row)
    answers = [played.turn(ids(action)) for action in actions]
    return [None if answer is None else TOKENIZER.decode(answer) for answer in answers], played


def test_texts_are_encoded_alone_and_tokens_taken_as_they_are():
    environment = Scripted(Step("more ", 0.5), Step(np.array([7, 8, 9]), None), Step("not read", 0.25, done=True))
    played = episode(environment)
    assert played.prompt.tolist() == [TOKENIZER.bos_id, *ids("go ")]
    assert played.turn(ids("a")).tolist() == ids("more ").tolist()  # no second BOS
    assert played.turn(np.array([*ids("b"), TOKENIZER.eos_id])).tolist() == [7, 8, 9]
    assert played.turn(ids("c")) is None
    assert environment.seen[1] == ("b", [*ids("b").tolist(), TOKENIZER.eos_id])  # the text without the stop token
    assert played.rewards == [0.5, None, 0.25]
    assert played.score == 0.75
    assert played.done


def test_no_observation_ends_the_episode():
    played = episode(Scripted(Step(None, 1.0)))
    assert played.turn(ids("a")) is None
    assert played.done
    assert played.score == 1.0


def test_an_environment_that_never_ends_is_a_failure():
    played = episode(Scripted(Step("again ", 1.0)), turns=3)
    assert [played.turn(ids("a")) is None for _ in range(3)] == [False, False, True]
    assert played.score == Failure("the environment Scripted had not ended after 3 turns")


def test_the_last_turn_that_is_allowed_may_end_it():
    played = episode(Scripted(Step("again "), Step(reward=1.0, done=True)), turns=2)
    played.turn(ids("a"))
    assert played.turn(ids("b")) is None
    assert played.score == 1.0


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (KeyError("board"), "raised KeyError: 'board'"),
        (UserError("no"), "raised UserError: no"),
        (Step("x", float("nan")), "gave a reward that is no number: it returned NaN"),
        (Step(""), "answered with no tokens"),
        (Step(np.zeros((2, 2), np.int32)), "raised UserError: token ids are a vector of whole numbers"),
        (Step([{"role": "user", "content": "hi"}]), "raised UserError: an observation of messages wants a prompt of"),
    ],
)
def test_what_goes_wrong_is_a_failure_of_that_episode(step: Any, reason: str):
    played = episode(Scripted(step))
    assert played.turn(ids("a")) is None
    assert isinstance(played.score, Failure)
    assert played.score.reason.startswith(f"the environment Scripted {reason}")


def test_an_episode_that_does_not_start_says_why():
    class Broken(Scripted):
        def reset(self, row: Row, rng: np.random.Generator) -> Observation:
            raise KeyError("level")

    with pytest.raises(UserError, match="environment Broken does not start: it raised KeyError: 'level'"):
        episode(Broken())
    with pytest.raises(UserError, match="starts with an empty prompt"):
        Episode(Scripted(start=np.zeros(0, np.int32)), {}, RNG)
    with pytest.raises(UserError, match="speak in token ids"):
        Episode(Scripted(start="text"), {}, RNG)


def test_token_ids_need_no_tokenizer():
    environment = Scripted(Step(np.array([5]), None), start=np.array([1, 2]))
    played = Episode(environment, {}, RNG)
    assert played.prompt.tolist() == [1, 2]
    assert played.turn(np.array([3, 4])).tolist() == [5]
    assert environment.seen == [("", [3, 4])]


CHATML = bytes_tokenizer("chatml")
STOPS = {"gemma": "<end_of_turn>", "gemma4": "<turn|>", "llama3": "<|eot_id|>", "chatml": "<|im_end|>"}


@pytest.mark.parametrize("template", ["gemma", "gemma4", "llama3", "chatml"])
@pytest.mark.parametrize("stopped", [True, False])
def test_messages_go_on_as_the_template_writes_them(template: Any, stopped: bool):
    """Prompt + turn + continuation are the tokens of the whole conversation, where the turn says what was drawn.

    A turn without its stop token (a stop string ended it) gets the token from the continuation.
    """
    tokenizer: Tokenizer = bytes_tokenizer(template)
    start = [{"role": "user", "content": "2+2?"}]
    said = {"role": "assistant", "content": "four"}
    new = [{"role": "user", "content": "sure?"}]
    played = Episode(Scripted(Step(new, None), start=start), {}, RNG, tokenizer)
    action = tokenizer.encode("four" + STOPS[template] * stopped)
    observed = played.turn(np.asarray(action, np.int32))
    assert observed is not None
    whole = render_prompt([*start, said, *new], tokenizer).tokens
    assert [*played.prompt, *action, *observed] == whole.tolist()


def test_a_row_brings_variables_of_the_template():
    said = "{% if brief %}Be brief. {% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = CHATML.replace_template(said)
    row = {"chat_template_kwargs": {"brief": True}}
    played = Episode(Scripted(start=[{"role": "user", "content": "2+2?"}]), row, RNG, tokenizer, 1, {"brief": False})
    assert tokenizer.decode(played.prompt) == "Be brief. 2+2?"


def completion_of(*turns: tuple[int, int], tokens: np.ndarray, finish: Any = "stop") -> Completion:
    return Completion(
        tokens, np.zeros(len(tokens), np.float32), finish, np.zeros(len(tokens), np.int32), Sampling(), turns
    )


def test_replies_to_a_batch():
    """Two requests, each with its own episode; the second is cut off in its second turn, which is judged too."""
    game = Guessing
    episodes = Episodes([episode(game(), {"secret": 16}), episode(game(), {"secret": 20})])
    first = ids("16\n")
    assert episodes.reply(0, completion_of((0, 3), tokens=first)) is None
    observed = episodes.reply(1, completion_of((0, 3), tokens=first))
    assert TOKENIZER.decode(observed) == "higher\n"
    tokens = np.concatenate([first, observed, ids("20")])
    second = completion_of((0, 3), (10, 12), tokens=tokens, finish="length")
    episodes.finish(dict(enumerate([completion_of((0, 3), tokens=first), second])))
    assert episodes.scores == [1.0, 1.0]


def test_what_was_paused_is_caught_up_with():
    """Of three guesses for 20 two were answered, the third is half written; an episode that has ended is worth what
    it was; and of one that was answered otherwise the next turn is the last, and a failure."""
    first, second = ids("16\nhigher\n"), ids("24\nlower\n")
    tokens = np.concatenate([first, second, ids("2")])
    paused = completion_of((0, 3), (10, 13), (19, 20), tokens=tokens, finish="paused")
    won = completion_of((0, 3), (10, 13), tokens=np.concatenate([first, ids("20\n")]))
    other = replace(paused, tokens=np.concatenate([first, ids("24\nhigher\n2")]), turns=((0, 3), (10, 13), (20, 21)))
    episodes = Episodes([episode(Guessing(), {"secret": 20}) for _ in range(4)])
    episodes.catch_up({0: paused, 2: other})
    ended = []
    for x in episodes.episodes:
        assert x is not None
        x.on_end = ended.append
    after = np.concatenate([tokens[:19], ids("20\n")])
    assert episodes.reply(0, completion_of((0, 3), (10, 13), (19, 22), tokens=after)) is None
    assert episodes.reply(2, other) is None
    assert len(ended) == 2
    never = completion_of((0, 3), tokens=ids("20\n"))
    episodes.finish(dict(enumerate([completion_of((0, 3), (10, 13), (19, 22), tokens=after), won, other, never])))
    assert episodes.scores[:2] == [1.0, 1.0]
    assert episodes.scores[3] == 1.0
    assert isinstance(failure := episodes.scores[2], Failure)
    assert "not deterministic given row and rng" in failure.reason
    assert len(ended) == 2, "what had ended before was counted then"


def test_an_episode_cut_short_is_worth_what_it_has_earned():
    assert episode(Scripted(Step("x", 0.5))).score == 0.0
    played = episode(Scripted(Step("x", 0.5)), turns=1)
    played.turn(ids("a"), cut=True)
    assert played.score == 0.5
    assert episode(Problem(), {"prompt": "p"}).score is None  # the reward functions judge it


# --- problem


def test_problem_prompts():
    row = {"prompt": "1+1?", "question": "why {x}?", "prompt_ids": None}
    assert Problem().reset({"prompt": "1+1?"}, RNG) == "1+1?"
    assert Problem("Q: {question}\n{{A}}: ").reset(row, RNG) == "Q: why {x}?\n{A}: "
    chat = [{"role": "system", "content": "think"}, {"role": "user", "content": "1+1?"}]
    assert Problem(chat=True, system="think").reset({"prompt": "1+1?"}, RNG) == chat
    assert Problem(system="think").reset({"prompt": chat[1:]}, RNG) == chat
    assert np.array_equal(Problem().reset({"prompt_ids": [1, 2]}, RNG), [1, 2])


def test_problem_is_over_after_one_turn():
    answers, played = play(Problem(), {"prompt": "1+1?"}, "2")
    assert answers == [None]
    assert played.done
    assert played.score is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "{anser}"}, "the row has no 'anser'; it has 'answer'. Did you mean 'answer'"),
        ({"template": "{answer.__class__}"}, "a column's name stands alone"),
        ({"template": "{answer!r}"}, "a column's name stands alone"),
        ({"template": "{answer}", "system": "s"}, "set the environment's option chat: true"),
        ({}, "the row has no 'prompt'"),
    ],
)
def test_problem_mistakes(settings: dict[str, str], message: str):
    with pytest.raises(UserError, match=message):
        Problem(**settings).reset({"answer": "7"}, RNG)


# --- calculator


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3*4", "12"),
        (" (2 + 3) * -4 ", "-20"),
        ("7/2", "3.5"),
        ("1/3", "0.333333"),
        ("0.1 + 0.2", "0.3"),
        ("7 // 2 + 7 % 4", "6"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("1,000 * 2", "2000"),
        ("1e3", "1000"),
        ("1/0", "error: division by zero"),
        ("0**-1", "error: division by zero"),
        ("9**9**9", "error: too large"),
        ("10**39 * 10", "error: too large"),
        ("9" * 5000, "error: not an arithmetic expression"),
        ("2**0.5", "error: not an arithmetic expression"),
        ("", "error: not an arithmetic expression"),
        ("1 +", "error: not an arithmetic expression"),
        ("x", "error: not an arithmetic expression"),
        ("__import__('os').getpid()", "error: not an arithmetic expression"),
        ("True + 1", "error: not an arithmetic expression"),
        ("'a' * 9", "error: not an arithmetic expression"),
        ("1 if 1 else 2", "error: not an arithmetic expression"),
        ("(" * 500 + "1" + ")" * 500, "error: not an arithmetic expression"),
        ("-" * 5000 + "1", "error: not an arithmetic expression"),
    ],
)
def test_calculate(text: str, value: str):
    assert calculate(text) == value


ROW = {"prompt": "What is 3 * 4 + 5?", "answer": "17"}


def test_calculator_answers_calls_and_judges_the_last_turn():
    answers, played = play(Calculator(), ROW, "First <calc>3*4</calc>", "then <calc>12+5</calc>", " so 17.")
    assert answers == ["<result>12</result>", "<result>17</result>", None]
    assert played.rewards == [None, None, 1.0]
    assert played.score == 1.0


@pytest.mark.parametrize(
    ("actions", "score"),
    [
        (["17"], 1.0),
        (["16"], 0.0),
        (["17 <calc>1</calc>", "I do not know"], 0.0),  # an earlier turn's number is no answer
        (["<calc>17</calc>", ""], 0.0),  # nor is what the calculator wrote
        (["</calc> 17"], 1.0),  # no call
    ],
)
def test_calculator_scores_the_final_answer_only(actions: list[str], score: float):
    assert play(Calculator(), ROW, *actions)[1].score == score


def test_calculator_has_a_limit_of_calls():
    answers, played = play(Calculator(calls=1), ROW, "<calc>1</calc>", "17 <calc>17</calc>")
    assert answers == ["<result>1</result>", None]
    assert played.score == 0.0


def test_calculator_problems_are_right_and_apart():
    train, held_out = problems(500), held_out_problems(100)
    for row in train + held_out:
        assert calculate(row["prompt"].removeprefix("What is ").removesuffix("?")) == row["answer"]
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert problems(500) == train


# --- guessing


def test_guessing_by_halves_always_wins():
    """31 = 2^5 - 1 numbers: five guesses in the middle of what is left find every one of them."""
    for secret in range(1, 32):
        played = episode(Guessing(), {"secret": secret})
        assert TOKENIZER.decode(played.prompt, skip_special=True) == "1-31\n"
        low, high = 1, 31
        while not played.done:
            guess = (low + high) // 2
            answer = played.turn(ids(f"{guess}\n"))
            if answer is not None:
                higher = TOKENIZER.decode(answer) == "higher\n"
                assert higher == (secret > guess)
                low, high = (guess + 1, high) if higher else (low, guess - 1)
        assert played.score == 1.0


@pytest.mark.parametrize(
    ("actions", "score"),
    [
        (["1\n", "2\n", "3\n", "4\n", "5\n"], 0.0),
        (["1\n", "2\n", "3\n", "4\n", "20\n"], 1.0),
        (["20"], 1.0),
        (["32\n"], 0.0),
        (["0\n"], 0.0),
        (["\n"], 0.0),
        (["higher\n"], 0.0),
        (["-20\n"], 0.0),
        (["2\u0660\n"], 0.0),  # a digit, but not of ours
        (["020\n"], 0.0),
        (["20 20\n"], 0.0),
        (["9" * 5000 + "\n"], 0.0),
    ],
)
def test_guessing_reads_guesses_only(actions: list[str], score: float):
    answers, played = play(Guessing(), {"secret": 20}, *actions)
    assert answers[-1] is None
    assert played.score == score


def test_guessing_draws_its_secret_from_the_episodes_own_generator():
    def secret(seed: int) -> list[str]:
        played = Episode(Guessing(), {}, np.random.default_rng(seed), TOKENIZER)
        answers = [played.turn(ids(f"{guess}\n")) for guess in (8, 16, 24, 28)]
        return [TOKENIZER.decode(answer) for answer in answers if answer is not None]

    assert secret(3) == secret(3)
    assert len({tuple(secret(seed)) for seed in range(8)}) > 1


def test_every_secret_comes_in_turn():
    assert [row["secret"] for row in secrets(33)] == [*range(1, 32), 1, 2]


def test_demonstrations_replay_as_legal_games():
    """Each row is played again from its tokens: the observed ones are the environment's, the trained ones guesses."""
    rows = demonstrations(200, seed=1)
    assert rows == demonstrations(200, seed=1)
    won = [0, 0]
    for i, row in enumerate(rows):
        kept = to_example(row, TOKENIZER, rendered_as("tokens"))
        assert isinstance(kept, Kept)
        tokens, mask = kept.sequences[0].tokens, kept.sequences[0].loss_mask
        edges = np.flatnonzero(np.diff(mask.astype(int), append=0))
        pieces = np.split(tokens, edges + 1)  # prompt, guess, answer, guess, ...
        texts = [TOKENIZER.decode(piece, skip_special=True) for piece in pieces if len(piece)]
        assert texts[0] == "1-31\n"
        guesses, answers = [int(text) for text in texts[1::2]], texts[2::2]
        assert 1 <= len(guesses) <= 5
        assert len(answers) == len(guesses) - 1
        low, high = 1, 31
        for guess, answer in zip(guesses, answers, strict=False):
            assert 1 <= guess <= 31
            assert i % 2 == 0 or low <= guess <= high
            low, high = (max(low, guess + 1), high) if answer == "higher\n" else (low, min(high, guess - 1))
        assert low <= high  # the answers do not contradict each other
        won[i % 2] += len(guesses) < 5
    # Random guesses find the number within four in about 1 - (30/31)^4 = 12 % of the games, sensible ones more often.
    assert won[0] < 30
    assert won[1] > won[0]


# --- from a recipe


def test_from_a_recipe():
    rules = {"highest": 7, "guesses": 3}
    kind, source, _ = read_environment(EnvironmentConfig(name="guessing", options=rules))
    assert source == "tunix.rollout.environments.guessing:Guessing"
    assert kind(**rules).reset({"secret": 7}, RNG) == "1-7\n"
    with pytest.raises(UserError, match="does not start: it raised ValueError: the secret 8 is not between 1 and 7"):
        episode(kind(**rules), {"secret": 8})


def test_ones_own_from_a_file(tmp_path: Any):
    (tmp_path / "mine.py").write_text(
        "from tunix.rollout.environments.base import Environment, Step\n"
        "class Echo(Environment):\n"
        "    def __init__(self, times=2): self.left = times\n"
        "    def reset(self, row, rng): return row['prompt']\n"
        "    def step(self, action, tokens):\n"
        "        self.left -= 1\n"
        "        return Step(action, reward=1, done=self.left == 0)\n"
    )
    kind, *_ = read_environment(EnvironmentConfig(name="mine.py:Echo", options={"times": 3}))
    answers, played = play(kind(times=3), {"prompt": "p"}, "a", "b", "c")
    assert answers == ["a", "b", None]
    assert played.score == 3.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "gessing"}, "Did you mean 'guessing'"),
        ({"name": "guessing", "options": {"guess": 5}}, "Did you mean 'guesses'"),
        ({"name": "guessing", "options": {"guesses": "5"}}, "guesses: '5'. Input should be a valid integer"),
        ({"name": "json:dumps"}, "not a class that extends"),
        ({"verifiers": "gsm8k"}, r"the environment verifiers:gsm8k needs verifiers: .pip install '\.\[verifiers\]'"),
        ({"openenv": "http://host:8000"}, r"the environment openenv:http://host:8000 needs openenv: .pip install"),
        ({"name": "openenv"}, "rollout.environment.name is 'openenv'; written is openenv:URL"),
    ],
)
def test_mistakes_are_refused_at_the_start(settings: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        read_environment(EnvironmentConfig.model_validate(settings))


def test_a_seat_s_outcome_belongs_to_its_last_turn():
    game = Scripted(Step("b", seat=0), Step("a", seat=1), Step(done=True, seat=0, outcomes={0: 1.0, 1: -0.5, 2: 9.0}))
    played = episode(game)
    for _ in range(3):
        played.turn(ids("x"))
    assert played.seats == [0, 1, 0]
    assert played.rewards == [None, -0.5, 1.0]  # the third seat has taken no turn
    assert played.score == 0.5
    wrong = episode(Scripted(Step(done=True, outcomes={0: float("nan")})))
    wrong.turn(ids("x"))
    assert "gave a reward that is no number" in str(wrong.failure)


@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        (None, " 7\n", "7"),
        ("answer", "<answer>1</answer> no, <answer> 2 </answer>", "2"),
        ("answer", "2", None),
        (r"\d+", "1 or 22", "22"),
        (r"= (\d+)", "a = 1, b = 2!", "2"),
    ],
)
def test_an_answer_is_taken_from_a_text(pattern: str | None, text: str, answer: str | None):
    assert extracted(text, pattern) == answer


def test_an_answer_s_pattern_is_checked():
    with pytest.raises(UserError, match=r"extract: \( is no regular expression"):
        extracted("", "(")


@pytest.mark.parametrize("name", ["reasoning_gym", "textarena:Nim-v0", "gymnasium:FrozenLake-v1"])
def test_an_environment_of_a_package_that_is_not_there_says_how_to_install_it(name: str):
    adapter = ADAPTERS[name.partition(":")[0]]
    assert issubclass(load_object(adapter.source), Environment)  # read without the package
    assert adapter.package is not None
    with pytest.raises(UserError, match=rf"{name} needs {adapter.package}: .*{adapter.extra}"):
        read_environment(EnvironmentConfig(name=name))


def test_an_episode_s_seed_follows_from_its_row():
    assert row_seed({"seed": 0, "index": 1}) == row_seed({"seed": 0, "index": 1, "level": 3})
    assert len({row_seed({"seed": seed, "index": i}) for seed in range(3) for i in range(3)}) == 9
    with pytest.raises(UserError, match=r"and index is None in a row with seed, prompt"):
        row_seed({"seed": 0, "prompt": "a"})


def test_a_mistyped_package_without_rows_is_told():
    sections = {"data": {}, "rollout": {"environment": {"name": "reasoning_gim"}}}
    assert rows_left_out(sections)
    assert not rows_left_out({"rollout": {"environment": {"name": "problem"}}})
    assert not rows_left_out({**sections, "data": {"train": "rows.jsonl"}})
    data = DataConfig(train="environment")
    with pytest.raises(UserError, match=r"reasoning_gim makes no rows of its own.* Did you mean 'reasoning_gym'\?"):
        training_rows(data, EnvironmentConfig(name="reasoning_gim"), 0)
