"""Scores completions by a rubric: a judge is asked, its replies are read as verdicts, and verdicts are kept.

Whoever judges is a function from conversations to replies (`Ask`): a server (`servers/chat.py`), or a model in this
process (`run/judges.py`). A reply that is no verdict is returned to the judge once, with what is wrong with it; after
that the sample fails. Verdicts are stored by what they depend on, each as soon as it is there, so that a run that was
killed asks for none of them again. A server is asked while others are still sampled; a model in this process, which
shares the devices with the sampler, is asked for all of a step when its sampling is over.
"""

import hashlib
import itertools
import json
import sys
import threading
from collections.abc import Callable
from collections.abc import Sequence as List
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tunix.data.chat import Message
from tunix.data.examples import prompt_messages
from tunix.data.types import Prompt
from tunix.distributed import processes
from tunix.errors import Failure, UserError
from tunix.rollout.collect import Judge, Judged
from tunix.rollout.rewards.config import JudgeConfig
from tunix.rollout.rewards.rubric import SIDES, Rubric, Unclear, Verdict
from tunix.types import Completion
from tunix.util.atomic_io import append_rows, read_rows, write_text_atomic

NAME = "judge"
"""The reward's name in metrics and messages."""
Ask = Callable[[List[List[Message]]], List[str | Failure]]
"""Conversations -> the judge's reply to each, or why it has none."""


class RubricJudge:
    """Asks a judge for verdicts, and makes scores of them."""

    def __init__(
        self,
        config: JudgeConfig,
        rubric: Rubric,
        identity: str,
        ask: Ask,
        folder: Path | None,
        close: Callable[[], None] | None = None,
    ):
        """Reads the verdicts that are there.

        Args:
            config: the recipe's section.
            rubric: what is judged by.
            identity: which model judges, e.g. `http://host:8000/v1 qwen3`.
            ask: asks it.
            folder: holds judge.jsonl; None where no verdict is to be kept.
            close: ends a server's calls, which several threads may make, each as soon as it has a question; None for
                a model in this process.

        Raises:
            UserError: the file with the verdicts is damaged.
        """
        self._config, self._rubric, self._ask, self._end = config, rubric, ask, close
        self._basis = [identity, config.max_tokens, config.options, rubric.text, rubric.scale]
        self._pool = ThreadPoolExecutor(config.concurrency, "judging") if close else None
        self._lock, self._number = threading.Lock(), itertools.count()
        self._asked: dict[str, Future[list[Verdict | Failure]]] = {}
        """By key what is being asked; of each the verdict alone."""
        self._verdicts: dict[str, Verdict] = {}
        self._file: Path | None = None
        if folder is None or not config.cache:
            return
        # Each process of a run has a file, which it alone appends to.
        self._file = folder / f"{NAME}{f'-{index}' if (index := processes.index()) else ''}.jsonl"
        for file in sorted(folder.glob(f"{NAME}*.jsonl")):
            try:
                rows = read_rows(file)
                self._verdicts |= {row["key"]: row["verdict"] for row in rows}
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(f"{file} is damaged ({error}): delete it, and what it holds is judged again") from None
            if file == self._file and not file.read_bytes().endswith(b"\n"):  # a kill cut the last line short
                write_text_atomic(file, "".join(json.dumps(row) + "\n" for row in rows))

    @property
    def judge(self) -> Judge:
        """What a collector calls."""
        config = self._config
        together = sys.maxsize - 1 if self._pool is None else 2 if config.pairwise else 1
        return Judge(NAME, config.weight, together, self._begin, config.pairwise, self._close)

    def _close(self) -> None:
        if self._pool is not None and self._end is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._end()

    def _begin(
        self, prompts: List[Prompt], completions: List[Completion], texts: List[str]
    ) -> Callable[[], list[Judged]]:
        """Begins to judge completions of prompts by their texts. What it returns waits for the verdicts."""
        rubric, shown = self._rubric, [_text(prompt) for prompt in prompts]
        if self._config.pairwise:
            pairs = [(shown[i], texts[i], texts[i + 1]) for i in range(0, len(texts), 2)]
            asked = [rubric.comparison(x, a, b) for x, one, other in pairs for a, b in ((one, other), (other, one))]
        else:
            asked = [rubric.question(prompt, text) for prompt, text in zip(shown, texts, strict=True)]
        keys = [hashlib.sha256(json.dumps([*self._basis, text]).encode()).hexdigest() for text in asked]
        if not self._config.cache:  # each is a new one
            keys = [f"{key}-{next(self._number)}" for key in keys]
        with self._lock:
            fresh = {
                key: text
                for key, text in zip(keys, asked, strict=True)
                if key not in self._verdicts and key not in self._asked
            }
            for key, text in fresh.items():
                self._asked[key] = self._pool.submit(self._settle, {key: text}) if self._pool else Future()
            waiting = [self._asked.get(key) or self._verdicts[key] for key in keys]
        counted = {"judged": len(keys), "judge_cached": len(keys) - len(fresh)}

        def ended() -> list[Judged]:
            if self._pool is None:
                for key, verdict in zip(fresh, self._settle(fresh), strict=True):
                    self._asked[key].set_result([verdict])
            try:
                verdicts = [x.result()[0] if isinstance(x, Future) else x for x in waiting]
            finally:
                with self._lock:  # those that failed are asked for again where they come again
                    for key in fresh:
                        self._asked.pop(key, None)
            judged = list[Judged]()
            if self._config.pairwise:  # the better one of two wins where both orders say so
                for forth, back in zip(verdicts[::2], verdicts[1::2], strict=True):
                    if isinstance(forth, Failure) or isinstance(back, Failure):
                        judged += [Judged(forth if isinstance(forth, Failure) else back)] * 2  # pyright: ignore[reportArgumentType]
                        continue
                    agree = {forth["better"], back["better"]} == {*SIDES}  # the same text, at the other place
                    first = 0.5 if not agree else 1.0 if forth["better"] == SIDES[0] else 0.0
                    logged = {NAME: {"first": forth, "exchanged": back}}
                    judged += [Judged(first, logged, {f"{NAME}/ties": float(not agree)}), Judged(1 - first, logged)]
            else:
                for verdict in verdicts:
                    if isinstance(verdict, Failure):
                        judged.append(Judged(verdict))
                        continue
                    shares = {f"{NAME}/{name}": share for name, share in rubric.shares(verdict).items()}
                    judged.append(Judged(rubric.score(verdict), {NAME: verdict}, shares))
            return [Judged(x.score, x.logged, x.metrics, {} if i else counted) for i, x in enumerate(judged)]

        return ended

    def _settle(self, questions: dict[str, str]) -> list[Verdict | Failure]:
        """Asks questions, by digests of all that their verdicts depend on, and once more where a reply is no verdict;
        stores the verdicts."""
        read = self._rubric.preference if self._config.pairwise else self._rubric.verdict
        keys = list(questions)
        talks: list[list[Message]] = [[{"role": "user", "content": text}] for text in questions.values()]
        verdicts: list[Verdict | Failure] = [Failure("")] * len(questions)
        left = list(range(len(questions)))
        for _ in range(2):
            replies, again = self._ask([talks[i] for i in left]), []
            for i, reply in zip(left, replies, strict=True):
                if isinstance(reply, Failure):
                    verdicts[i] = reply
                    continue
                try:
                    verdicts[i] = verdict = read(reply)
                except Unclear as error:
                    verdicts[i] = Failure(f"{NAME} gave no verdict, asked twice: its reply {error}")
                    talks[i] += [
                        {"role": "assistant", "content": reply or "{}"},
                        {"role": "user", "content": f"That reply {error}. Reply with the JSON object alone."},
                    ]
                    again.append(i)
                    continue
                with self._lock:
                    if self._config.cache:
                        self._verdicts[keys[i]] = verdict
                    if self._file is not None:
                        append_rows(self._file, [{"key": keys[i], "verdict": verdict}])
            left = again
        return verdicts


def _text(prompt: Prompt) -> str:
    """The prompt as the judge reads it: of a conversation all turns, each after its role."""
    messages = prompt_messages(prompt.row)
    if messages is None or len(messages) == 1:
        return prompt.text
    contents = [x.get("content") for x in messages]
    texts = [x if isinstance(x, str) else json.dumps(x, ensure_ascii=False, default=str) for x in contents]
    return "\n\n".join(f"{message['role']}: {text}" for message, text in zip(messages, texts, strict=True))
