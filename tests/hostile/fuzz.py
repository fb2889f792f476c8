"""Bytes that a coverage-guided fuzzer finds, for what reads input from outside: `python -m tests.hostile.fuzz TARGET`.

atheris (libFuzzer) changes bytes towards lines of tunix that no case has reached. A target makes input of them and does
what the hypothesis properties of this folder do: a value, or the product's own error, within `SLOWEST` seconds. Any
other error ends the fuzzer and leaves the bytes in a file. What deserves it becomes a named test.

    python -m tests.hostile.fuzz recipe --seconds 300
    python -m tests.hostile.fuzz recipe --case crash-0123abcd    what a find does, again
"""

import argparse
import importlib
import json
import os
import re
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SLOWEST = 20
"""Seconds of a case at most: what the product ends by itself, such as a template, ends after 10."""
Check = Callable[[bytes], None]


@dataclass(frozen=True)
class Target:
    """What reads bytes."""

    make: Callable[[Path], tuple[Check, Iterable[bytes]]]
    """Makes what is checked, in a folder of its own, and bytes to begin with."""
    words: Callable[[], Iterable[str]] = tuple
    """What is put into the bytes as it is."""


def text(data: bytes) -> str:
    """Any text, with halves of characters."""
    return data.decode("utf-8", "surrogateescape")


def document(data: bytes, documents: list[bytes]) -> bytes:
    """JSON: the bytes after the first or, where that is odd, one of the documents with values that the bytes change."""
    from tests.hostile.test_folders import KEYS, ODD, changed

    if len(data) < 2 or data[0] % 2 == 0:
        return data[1:]
    fives = (data[i : i + 5] for i in range(2, len(data) - 4, 5))
    changes = [(a % 8, b << 8 | c, ODD[d % len(ODD)], KEYS[e % len(KEYS)]) for a, b, c, d, e in fives]
    return json.dumps(changed(json.loads(documents[data[1] % len(documents)]), changes)).encode()


def seeds_of(documents: list[bytes]) -> list[bytes]:
    """What `document` makes each of them of, and each with one value that is another."""
    changed = (bytes([1, i, kind, 0, kind, 7 * kind, kind]) for i in range(len(documents)) for kind in range(8))
    return [*(b"\0" + content for content in documents), *changed]


def recipe(folder: Path) -> tuple[Check, Iterable[bytes]]:
    from tests.hostile.test_recipes import BASE, FINDS, STAGES, loads
    from tunix.util.yaml_io import write_yaml

    return loads, [
        *(write_yaml(tree).encode() for tree in (BASE, STAGES)),
        *(find.encode("utf-8", "surrogatepass") for find, _ in FINDS.values() if len(find) < 1000),
    ]


def override(folder: Path) -> tuple[Check, Iterable[bytes]]:
    from tests.hostile.test_recipes import BASE, KEYS, STAGES, overrides

    def check(data: bytes) -> None:
        overrides(((BASE, STAGES)[len(data) % 2], text(data).split("\0")))

    return check, [f"{key}={value}".encode() for key in KEYS for value in ("1", "a", "[1]", "{name: dpo}")]


def header(folder: Path) -> tuple[Check, Iterable[bytes]]:
    """A header, and as many bytes after it as its tensors say, if they are few; Rust reads it, which is not guided."""
    from tests.hf.test_folders_that_lie import SINGLE, written
    from tests.hostile.test_folders import reads_tensors

    file = written(folder / "llama") / SINGLE
    whole = file.read_bytes()
    begin = 8 + struct.unpack("<Q", whole[:8])[0]
    small = json.dumps({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    documents = [whole[8:begin], small]

    def check(data: bytes) -> None:
        said = document(data, documents)
        offsets = [int(number) for number in re.findall(rb"\[ ?\d+, ?(\d{1,4})\]", said)]
        end = max(offsets, default=0)
        file.write_bytes(struct.pack("<Q", len(said)) + said + bytes(end))
        reads_tensors(file, end)

    return check, seeds_of(documents)


def index(folder: Path) -> tuple[Check, Iterable[bytes]]:
    from tests.hf.test_folders_that_lie import INDEX, SINGLE, written
    from tests.hostile.test_folders import reads_folder
    from tunix.hf.safetensors_io import tensors_of_file

    model = written(folder / "llama")
    names = tensors_of_file(model / SINGLE)
    (model / SINGLE).rename(model / "a.safetensors")
    documents = [json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}).encode(), b'{"weight_map": {}}']

    def check(data: bytes) -> None:
        (model / INDEX).write_bytes(document(data, documents))
        reads_folder(model)

    return check, seeds_of(documents)


def config(folder: Path) -> tuple[Check, Iterable[bytes]]:
    from tests.hf.test_folders_that_lie import written
    from tests.hostile.test_folders import FAMILIES, reads_folder

    folders = [written(folder / family, family) for family in FAMILIES]
    documents = [(x / "config.json").read_bytes() for x in folders]

    def check(data: bytes) -> None:
        model = folders[data[1] % len(folders) if len(data) > 1 else 0]
        (model / "config.json").write_bytes(document(data, documents))
        reads_folder(model)

    return check, seeds_of(documents)


def tokenizer(folder: Path) -> tuple[Check, Iterable[bytes]]:
    """The first byte chooses the file; Rust reads tokenizer.json, which is not guided."""
    from tests.hostile.test_folders import model_with_tokenizer, reads_tokenizer

    documents = {file.name: file.read_bytes() for file in sorted(model_with_tokenizer(folder).glob("*.json"))}
    names = list(documents)

    def check(data: bytes) -> None:
        name = names[data[0] % len(names)] if data else names[0]
        (folder / name).write_bytes(document(data[1:], [documents[name]]))
        reads_tokenizer(folder)
        (folder / name).write_bytes(documents[name])

    return check, [bytes([i]) + seed for i, content in enumerate(documents.values()) for seed in seeds_of([content])]


def template(folder: Path) -> tuple[Check, Iterable[bytes]]:
    from tests.hostile.test_templates import BOMBS, renders
    from tunix.data.tokenizer import bytes_tokenizer

    known = bytes_tokenizer("chatml")
    kept = {
        name: written for name, (written, _) in BOMBS.items() if name != "loops in loops"
    }  # it takes its ten seconds
    shipped = [bytes_tokenizer(name).chat_template or "" for name in ("chatml", "llama3", "gemma")]
    return (lambda data: renders(known, text(data))), [x.encode() for x in (*kept.values(), *shipped)]


def body(folder: Path) -> tuple[Check, Iterable[bytes]]:
    """What the server makes of a body before the engine has it."""
    import asyncio

    import jax
    from starlette.requests import Request

    from tests.serving.test_fuzz import GOOD
    from tests.tiny_runs import model_folder
    from tunix.inference.model import InferenceModel, InferenceOptions
    from tunix.serving.app import body_of, refused
    from tunix.serving.bodies import ChatBody, CompletionBody, DetokenizeBody, GenerateBody, TokenizeBody, read
    from tunix.serving.gate import Gate
    from tunix.serving.service import Service
    from tunix.serving.tinker.futures import Refusal

    model = str(model_folder(folder / "llama", max_position_embeddings=512))
    service = Service(InferenceModel(InferenceOptions(model, slots=4)), devices=jax.devices()[:1])
    documents = [json.dumps(good).encode() for good in GOOD.values()]
    gate, sampled, others = Gate(), (CompletionBody, ChatBody, GenerateBody), (TokenizeBody, DetokenizeBody)

    def check(data: bytes) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": document(data, documents), "more_body": False}

        try:
            told = asyncio.run(body_of(Request({"type": "http"}, receive), gate))
        except Refusal:
            return
        for kind in (*sampled, *others):
            try:
                asked = read(kind, {**told, "model": model} if kind in sampled else told)
                if isinstance(asked, sampled):
                    service.prepared(asked)
            except Refusal as refusal:
                json.loads(bytes(refused(refusal).body))

    return check, seeds_of(documents)


def answer(folder: Path) -> tuple[Check, Iterable[bytes]]:
    """A completion, and the row's answer after a zero byte."""
    from tests.hostile.test_answers import PIECES, scores

    def check(data: bytes) -> None:
        completion, _, right = data.partition(b"\0")
        scores((text(completion), text(right)))

    return check, [f"so {piece} = {piece}\0{piece}".encode("utf-8", "replace") for piece in PIECES if len(piece) < 99]


def stop(folder: Path) -> tuple[Check, Iterable[bytes]]:
    """A text and its stop strings, parted by zero bytes; those after the last are sizes, and places of hidden ones."""
    from tests.hostile.test_stop_strings import finds

    def check(data: bytes) -> None:
        shown, *strings, numbers = [*data.split(b"\0", 4), b"", b""][:5]
        kept = [word.decode("utf-8", "ignore") for word in strings]
        words = [word for word in kept if word]
        if words and (said := shown[:400].decode("utf-8", "ignore")):
            finds((said, words, [1 + x % 40 for x in numbers[:6]] or [1], [x * 2 for x in numbers[6:22]]))

    return check, ["abcé日ab\0ab\0日a\0\0\3\5".encode(), b"<|end|> <|end|>\0<|end|>\0|> <\0\0\1\x28\7\7\7\7\2"]


def run(folder: Path) -> tuple[Check, Iterable[bytes]]:
    """The first byte chooses the file of a run folder, of which a report is made."""
    from tests.commands.test_report import write_run
    from tests.hostile.test_run_folders import FILES, reports

    made = write_run(folder / "run")
    told = {name: (made / name).read_bytes() for name in FILES}

    def check(data: bytes) -> None:
        name = FILES[data[0] % len(FILES)] if data else FILES[0]
        (made / name).write_bytes(data[1:])
        reports(made)
        (made / name).write_bytes(told[name])

    return check, [bytes([number]) + told[name][:3000] for number, name in enumerate(FILES)]


def yaml_words() -> Iterable[str]:
    from tests.hostile.test_recipes import KEYS, PIECES

    return [*PIECES, *KEYS]


def template_words() -> Iterable[str]:
    from tests.hostile.test_templates import PIECES

    return PIECES


def answer_words() -> Iterable[str]:
    from tests.hostile.test_answers import PIECES

    return PIECES


def json_words() -> Iterable[str]:
    from tests.hostile.test_folders import ODD

    return [json.dumps(odd) for odd in ODD]


TARGETS = {
    "recipe": Target(recipe, yaml_words),
    "override": Target(override, yaml_words),
    "header": Target(header, json_words),
    "index": Target(index, json_words),
    "config": Target(config, json_words),
    "tokenizer": Target(tokenizer, json_words),
    "template": Target(template, template_words),
    "body": Target(body, json_words),
    "answer": Target(answer, answer_words),
    "stop": Target(stop),
    "run": Target(run, json_words),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hostile.fuzz", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, help="a folder that keeps what was found to reach further lines")
    parser.add_argument("--case", type=Path, help="a file of bytes that are checked once, without atheris")
    asked = parser.parse_args()
    target = TARGETS[asked.target]
    here, place = Path.cwd(), Path(tempfile.mkdtemp(prefix="tunix-fuzz-"))
    os.chdir(place)
    try:
        if asked.case is not None:
            target.make(place)[0]((here / asked.case).read_bytes())
            return
        try:
            atheris: Any = importlib.import_module("atheris")  # nobody but a fuzzer needs it
        except ModuleNotFoundError:
            sys.exit("error: atheris is not installed: `pip install atheris` (Linux, Python 3.11 to 3.13)")
        with atheris.instrument_imports(include=["tunix", "yaml", "jinja2"], enable_loader_override=False):
            check, seeds = target.make(place)
        corpus = here / asked.corpus if asked.corpus else place / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds):
            (corpus / f"seed-{number}").write_bytes(seed)
        lines = [word.encode("utf-8", "replace") for word in target.words() if 0 < len(word) < 60]
        quoted = ("".join(f"\\x{byte:02x}" for byte in line) for line in lines)
        (place / "words").write_text("# words\n" + "".join(f'"{word}"\n' for word in quoted))
        options = [f"-max_total_time={asked.seconds}", f"-timeout={SLOWEST}", "-rss_limit_mb=8000", "-len_control=20"]
        options += [f"-dict={place / 'words'}", f"-artifact_prefix={here / asked.target}-", "-print_final_stats=1"]

        def whole(data: bytes) -> None:
            check(data)
            assert not os.path.exists("exploded"), "it ran what it read"

        atheris.Setup([sys.argv[0], *options, str(corpus)], whole)
        atheris.Fuzz()
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
