"""Curricula: which prompts are taken follows from seed, position and state alone, and the state goes into JSON."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tunix.config import RowKind
from tunix.data.config import CurriculumConfig, DataConfig
from tunix.data.curriculum import BySuccess, Curriculum, curriculum_of
from tunix.data.examples import Examples
from tunix.data.pipeline import Prompts
from tunix.data.sources import open_rows
from tunix.data.tokenizer import bytes_tokenizer
from tunix.data.types import Kept, Prompt
from tunix.errors import UserError

ROWS = [{"prompt": f"p{i}", "level": i // 4, "words": (7 * i) % 12} for i in range(12)]


FIFTH = Prompt(np.zeros(1, np.int32), "", {}, number=5)


def stream(prompts: int = 24, seed: int = 0, rows: list[dict[str, Any]] = ROWS, **settings: Any) -> Prompts:
    config = DataConfig(train="rows", curriculum=CurriculumConfig(**settings))
    examples = Examples(open_rows(rows), bytes_tokenizer(), config, RowKind.PROMPT)
    return Prompts(examples, seed, None, curriculum_of(config, examples.rows, seed, prompts))


def steps(stream: Prompts, number: int, rate: Callable[[Prompt], float], size: int = 4) -> list[list[int]]:
    """The numbers of the prompts of some steps, each of which is learned from."""
    taken = []
    for _ in range(number):
        prompts = stream.take(size)
        assert stream.curriculum is not None
        for prompt in prompts:
            stream.curriculum.learn(prompt, rate(prompt))
        taken.append([prompt.number for prompt in prompts])
    return taken


def half(prompt: Prompt) -> float:
    """Success rates: prompts 0 to 3 always succeed, 4 to 7 never, the others every other time."""
    return [1.0, 0.0, 0.5][prompt.number // 4]


def test_the_chance_of_a_prompt():
    """floor + (1 - floor) 4 p (1 - p): of p = 1/4 and a floor of 0.2 it is 0.2 + 0.8 * 0.75."""
    curriculum = BySuccess(CurriculumConfig(by="success", floor=0.2, window=2), 0)
    kept = Kept((), number=5)
    assert curriculum.chance(kept) == 1
    curriculum.learn(FIFTH, 0.25)
    assert curriculum.chance(kept) == pytest.approx(0.8)
    # The mean of two groups, 1/4 and 1; from then on half of the way: 0.625 -> 0.8125.
    curriculum.learn(FIFTH, 1.0)
    assert curriculum.state["rates"]["5"] == [0.625, 2]
    curriculum.learn(FIFTH, 1.0)
    assert curriculum.state["rates"]["5"] == [0.8125, 2]


@pytest.mark.slow
def test_easy_and_hard_prompts_are_taken_less_and_none_dies():
    prompts = stream(by="success", floor=0.1)
    counts = Counter(number for step in steps(prompts, 150, half) for number in step)
    prompts.close()
    assert min(counts.values()) > 0
    assert len(counts) == 12
    medium = sum(counts[i] for i in range(8, 12)) / 4
    for others in (range(4), range(4, 8)):
        assert sum(counts[i] for i in others) / 4 < medium / 5
    assert prompts.curriculum is not None
    metrics = prompts.curriculum.metrics([])
    assert (metrics["curriculum/easy"], metrics["curriculum/hard"]) == (4 / 12, 4 / 12)
    assert metrics["curriculum/success"] == pytest.approx(0.5)
    assert metrics["curriculum/known"] == 12
    # A third of the rows always, two thirds with a chance of 0.1.
    assert metrics["curriculum/taken"] == pytest.approx((1 + 2 * 0.1) / 3, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["success", "level", "words"])
def test_a_run_that_is_killed_takes_the_same_prompts(by: str):
    whole = stream(by=by)
    expected = steps(whole, 6, half)
    first = stream(by=by)
    assert steps(first, 2, half) == expected[:2]
    state = json.loads(json.dumps(first.get_state()))
    steps(first, 2, half)  # what came after is lost
    second = stream(by=by)
    second.set_state(state)
    assert steps(second, 4, half) == expected[2:]
    assert second.get_state() == whole.get_state()
    for each in (whole, first, second):
        each.close()


def test_a_column_orders_the_whole_run():
    """24 prompts of 12 rows: each comes twice, in ascending order; behind them the order of the data goes on."""
    prompts = stream(by="words")
    taken = prompts.take(24)
    assert [prompt.row["words"] for prompt in taken] == sorted(2 * list(range(12)))
    assert prompts.curriculum is not None
    assert prompts.curriculum.metrics(taken[:4]) == {"curriculum/words": 0.5}
    assert len(prompts.take(5)) == 5
    prompts.close()


def test_a_level_rises_when_enough_succeed():
    prompts = stream(by="level", window=4, floor=0.25)
    assert isinstance(prompts.curriculum, Curriculum)
    first = [prompt for _ in range(2) for prompt in prompts.take(4)]
    assert {prompt.row["level"] for prompt in first} == {0}
    for prompt, total in zip(first[:4], [1.0, 1.0, 1.0, 0.0], strict=True):
        prompts.curriculum.learn(prompt, total)
    assert prompts.curriculum.metrics([]) == {"curriculum/level": 0.0, "curriculum/success": 0.75}
    prompts.curriculum.learn(first[4], 1.0)
    assert prompts.curriculum.state["level"] == 0, "0.75 again: the first of the four has left the window"
    prompts.curriculum.learn(first[5], 1.0)
    prompts.curriculum.learn(first[6], 1.0)
    prompts.curriculum.learn(first[7], 1.0)
    assert prompts.curriculum.metrics([]) == {"curriculum/level": 1.0}
    counts = Counter(prompt.row["level"] for prompt in prompts.take(200))
    assert counts[2] == 0
    assert counts[0] / counts[1] == pytest.approx(0.25, abs=0.1)
    prompts.close()


def test_what_is_refused():
    with pytest.raises(UserError, match=r"row 1 of the given rows has the columns .*, not 'word'.*'words'"):
        stream(by="word")
    with pytest.raises(UserError, match="row 2 of the given rows has None in 'words', whose numbers order the prompts"):
        stream(by="words", rows=[{"prompt": "p", "words": 1}, {"prompt": "q", "words": None}])
    with pytest.raises(ValueError, match="raise_at: of no effect with by: success; leave out"):
        CurriculumConfig(by="success", raise_at=0.5)
    first, other = stream(by="words"), stream(by="words", prompts=48)
    with pytest.raises(UserError, match="has sorted the 24 prompts of a whole run, which now takes 48"):
        other.set_state(first.get_state())
    first.close()
    other.close()
