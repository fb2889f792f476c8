"""A program that asks OPENAI_BASE_URL, as a person would write one without any package; the tests' runs start it.

Its first argument says what it does; it leaves the share of letters and digits in its answers as its reward.
"""

import http.client
import json
import os
import sys
import time
from typing import Any
from urllib.parse import urlsplit

URL, KEY, MODEL = (os.environ[f"OPENAI_{name}"] for name in ("BASE_URL", "API_KEY", "MODEL"))
with open(os.environ["TUNIX_ROW"]) as file:
    ROW = json.load(file)


def ask(prompt: str | list[int], **settings: Any) -> dict[str, Any]:
    """The choice that is answered, or an error of the protocol."""
    place = urlsplit(URL)
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "return_token_ids": True, **settings}
    head = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request("POST", f"{place.path}/completions", json.dumps(body), head)
    answer = json.loads(connection.getresponse().read())
    return answer["choices"][0] if "choices" in answer else answer


def two_turns() -> str:
    """Answers, hears "and", answers again: one transcript."""
    first = ask(ROW["prompt"])
    second = ask([*first["prompt_token_ids"], *first["token_ids"], *b"and"])
    return first["text"] + second["text"]


def forked() -> str:
    """Two answers to one prompt: two transcripts."""
    return ask(ROW["prompt"])["text"] + ask(ROW["prompt"])["text"]


def main(what: str) -> None:
    """Plays an episode."""
    if what == "hangs":
        ask(ROW["prompt"])
        print("waiting for nothing", file=sys.stderr, flush=True)
        time.sleep(600)
    elif what == "asks nothing":
        sys.exit("no idea what to ask")
    elif what == "exits":
        sys.exit(int(ask(ROW["prompt"])["text"].isascii()))
    elif what == "hot":
        print(json.dumps(ask(ROW["prompt"], temperature=2)))
        ask(ROW["prompt"], temperature=1.0)
        with open("reward.json", "w") as file:
            file.write("NaN")
    elif what == "long":
        answers = [ask(ROW["prompt"], max_tokens=100) for _ in range(3)]
        print(answers[-1]["error"]["message"])
        with open("reward.json", "w") as file:
            json.dump(1, file)
    elif what == "written":
        with open("answer.txt", "w") as file:
            file.write(two_turns())
    else:
        text = forked() if what == "forks" else two_turns()
        with open("reward.json", "w") as file:
            json.dump(sum(c.isascii() and c.isalnum() for c in text) / max(len(text), 1), file)


main(sys.argv[1])
