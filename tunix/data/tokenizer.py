"""Converts text to token ids and back: a wrapper of a transformers fast tokenizer, and tokenizers made from scratch.

`load_tokenizer` reads a folder's tokenizer.json as it is, with the special tokens and templates that transformers'
AutoTokenizer gives it; `bytes_tokenizer` and `bpe_tokenizer` make a new one. Encoding never adds special tokens by
itself: BOS and EOS are added where the example's shape requires them, and where the text does not bring them. Nothing
is masked by token id, so an EOS that doubles as PAD is harmless.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from tunix.data.templates import END_OF_TURN, MARKERS, PICTURE_MARKERS, TEMPLATES, TemplateName
from tunix.errors import UserError
from tunix.util.atomic_io import refuse_foreign

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import tokenizers
    from transformers import PreTrainedTokenizerFast

    from tunix.data.chat import Outline
    from tunix.data.pictures import PictureReader

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
GENERATION_CONFIG = "generation_config.json"
READ = (".json", ".jinja", ".model", ".txt")
"""Suffixes of the files that are read of a tokenizer's folder, and copied into an export."""

# Qwen's word splitter. For a folder of model type qwen2 AutoTokenizer builds this one and NFC, whatever tokenizer.json
# says, so a ChatML tokenizer is made with both: other readers of an exported folder then get the ids of training.
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIALS = ("<pad>", "<eos>", "<bos>")
"""The first tokens of a vocabulary made on the spot."""
_HALF = re.compile("[\ud800-\udfff]")


def refuse_half_characters(text: str) -> None:
    """Refuses a text with a lone surrogate, which JSON can hold and UTF-8 cannot.

    Raises:
        UserError: the message says which character it is.
    """
    if not text.isascii() and (half := _HALF.search(text)):
        raise UserError(
            f"character {half.start() + 1} of a text is {half[0]!a}, half of a character (a lone surrogate, as "
            "texts have that were cut by UTF-16 units): remove it, or put U+FFFD in its place"
        )


# Without transformers' advice to install torch, since only its tokenizers and configs are used.
logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Token ids of text, special ids, and the chat template of one vocabulary."""

    hf: PreTrainedTokenizerFast
    """The transformers tokenizer, which determines everything here."""
    generation_stops: tuple[int, ...] = ()
    """Further ids that end a completion: the eos ids of the folder's generation_config.json, or of its config.json,
    and what a turn of the chat template ends in."""
    pictures: PictureReader | None = None
    """How pictures are read; None where the model sees none."""

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return max(len(self.hf), 1 + max(self._added, default=-1))

    @cached_property
    def bos_id(self) -> int | None:
        """Id of the token that begins a text; None where there is none."""
        return self._id(self.hf.bos_token)

    @cached_property
    def adds_bos(self) -> bool:
        """Whether the tokenizer's own encoding with special tokens begins with BOS."""
        ids = self.hf.encode("a", add_special_tokens=True)
        return self.bos_id is not None and ids[:1] == [self.bos_id]

    @cached_property
    def eos_id(self) -> int:
        """Id of the token that ends a text.

        Raises:
            UserError: the tokenizer names no such token.
        """
        if (eos := self._id(self.hf.eos_token)) is None:
            raise UserError(f"{self.name}: the tokenizer names no eos_token: set it in its tokenizer_config.json")
        return eos

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a completion: EOS, the families' end-of-turn tokens, and `generation_stops`."""
        turns = [self._added_vocab[token] for token in END_OF_TURN if token in self._added_vocab]
        eos = self._id(self.hf.eos_token)
        return tuple(dict.fromkeys((*([] if eos is None else [eos]), *turns, *self.generation_stops)))

    @cached_property
    def pad_id(self) -> int:
        """Id for padding where a file format requires one; tunix's own batches do not use it."""
        pad = self._id(self.hf.pad_token)
        return self.eos_id if pad is None else pad

    @property
    def chat_template(self) -> str | None:
        """The chat template's Jinja source, or None."""
        template = self.hf.chat_template
        return template.get("default") if isinstance(template, dict) else template

    @property
    def name(self) -> str:
        """The folder or hub id of the tokenizer, for messages."""
        return self.hf.name_or_path or "the tokenizer made on the spot"

    def is_added(self, token_id: int) -> bool:
        """Whether the id is a special or added token, which text is never merged into."""
        return token_id in self._added

    def has_token(self, token: str) -> bool:
        """Whether `token` is one special or added token."""
        return token in self._added_vocab

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Ids of `text`. Where `bos` is True they begin with BOS, which is added unless the text brings it.

        Raises:
            UserError: the text has a lone surrogate.
        """
        ids = self.encode_with_offsets(text)[0]
        if not bos or ids[:1] == [self.bos_id]:
            return ids
        assert self.bos_id is not None, "the tokenizer has no BOS"
        return [self.bos_id, *ids]

    def encode_after(self, previous: Sequence[int], text: str) -> list[int]:
        """Ids of `text` where it continues a text of the ids `previous`, which stay as they are.

        A tokenizer that puts a space before every text puts none before a continuation. The ids are those of both texts
        encoded as one, wherever no token of that crosses the border between them.
        """
        ids, offsets = self.encode_with_offsets(text)
        if self._continuing is None or all(token == self.bos_id for token in previous):
            return ids
        if self.is_added(previous[-1]) and self._puts_spaces_after_added:
            return ids
        added = next((i for i, token in enumerate(ids) if self.is_added(token)), len(ids))
        begin = text if added == len(ids) else text[: offsets[added, 0]]
        return [*self._continuing.encode(begin, add_special_tokens=False).ids, *ids[added:]]

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """Ids of `text`, and the first and end characters that each one covers, `[T 2]`.

        Raises:
            UserError: the text has a lone surrogate.
        """
        refuse_half_characters(text)
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, np.asarray(encoding.offsets, np.int64).reshape(-1, 2)

    def ended(self, ids: list[int]) -> list[int]:
        """The ids, followed by EOS unless the text brings its end: a stop token, and white space at most after it."""
        last = len(ids) - 1
        while last >= 0 and not self.is_added(ids[last]) and not self.decode(ids[last : last + 1]).strip():
            last -= 1
        return ids if last >= 0 and ids[last] in self.stop_ids else [*ids, self.eos_id]

    def decode(self, ids: Iterable[int | np.integer], skip_special: bool = False, previous: Sequence[int] = ()) -> str:
        """The text of `ids`, exactly: spaces are not tidied.

        Args:
            ids: token ids.
            skip_special: whether special tokens are left out.
            previous: the ids before them. Some tokenizers take a space off the beginning of every text that they
                decode; after other ids it stays.
        """
        before = [int(i) for i in previous[-1:]]
        begin, text = (
            self._backend.decode(part, skip_special_tokens=skip_special) for part in (before, [*before, *map(int, ids)])
        )
        # A character whose bytes are in tokens on both sides of the border is whole only in the text of both.
        return text[len(begin) :] if text.startswith(begin) else self.decode(ids, skip_special)

    def marked_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        add_generation_prompt: bool = False,
        return_assistant_tokens_mask: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation by the chat template, soft tokens of pictures included, and the first and end
        character of each part that the template marks as generated, where these are asked for. It is that of
        `apply_chat_template`, for messages without null, within limits; errors of Jinja are not caught."""
        from transformers.utils.chat_template_utils import render_jinja_template

        from tunix.data.template_limits import limited

        with limited():
            texts, marks = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self.hf.get_chat_template(tools=template_kwargs.get("tools")),
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=return_assistant_tokens_mask,
                **{**self.hf.special_tokens_map, **template_kwargs},
            )
        text: str = texts[0]  # pyright: ignore[reportAssignmentType]
        spans: list[Any] = list(marks[0]) if marks else []
        return self.expanded(text), [(len(self.expanded(text[:i])), len(self.expanded(text[:j]))) for i, j in spans]

    @cached_property
    def outlines(self) -> dict[Hashable, Outline]:
        """What the chat template writes around conversations of each shape that was rendered."""
        return {}

    @cached_property
    def marks_generation(self) -> bool:
        """Whether the chat template marks what the assistant generates, by `{% generation %}`."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.chat_template or "") is not None

    @cached_property
    def reads_arguments_as_text(self) -> bool:
        """Whether the chat template writes a tool call's arguments as a string of JSON and fails for an object, as that
        of DeepSeek V3 does."""
        from jinja2 import TemplateError

        def writes(arguments: object) -> bool:
            call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
            said = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                self.marked_text([{"role": "user", "content": "a"}, said], {})
            except (TemplateError, TypeError, ValueError):
                return False
            return True

        return not writes({"a": "b"}) and writes('{"a": "b"}')

    def expanded(self, text: str) -> str:
        """The text with the soft tokens of each picture that it marks; unchanged for a model that sees none."""
        return text if self.pictures is None else self.pictures.expanded(text)

    def replace_template(self, template: str) -> Tokenizer:
        """A copy of this tokenizer with another chat template; this one is unchanged."""
        hf = copy.copy(self.hf)
        hf.chat_template = template
        return Tokenizer(hf, self.generation_stops, self.pictures)

    def seeing(self, pictures: PictureReader) -> Tokenizer:
        """A copy of this tokenizer that reads pictures so; what it has looked up is kept."""
        tokenizer = copy.copy(self)
        object.__setattr__(tokenizer, "pictures", pictures)
        return tokenizer

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and the template, as transformers reads them."""
        self.hf.save_pretrained(str(folder))

    def _id(self, token: object) -> int | None:
        return None if token is None else self._backend.token_to_id(str(token))

    @cached_property
    def _added_vocab(self) -> dict[str, int]:
        return self.hf.get_added_vocab()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._added_vocab.values())

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        """The Rust tokenizer, with offsets that include spaces, and without truncation and padding.

        Llama 3's post-processor trims the spaces off the offsets, which would hide that a token begins before a span.
        """
        backend = self.hf.backend_tokenizer
        post = backend.post_processor
        trims = post is not None and b'"trim_offsets":true' in post.__getstate__()
        if not (trims or backend.truncation or backend.padding):
            return backend
        backend = copy.deepcopy(backend)
        backend.post_processor = None  # pyright: ignore[reportAttributeAccessIssue]
        backend.no_truncation()
        backend.no_padding()
        return backend

    @cached_property
    def _continuing(self) -> tokenizers.Tokenizer | None:
        """The Rust tokenizer without the space that it puts before every text; None where it puts none."""
        import tokenizers

        parts = {
            name: json.loads(part.__getstate__())
            for name in ("normalizer", "pre_tokenizer")
            if (part := getattr(self._backend, name)) is not None
        }
        bare = {name: _without_prefix(part) for name, part in parts.items()}
        if bare == parts:
            return None
        # A tokenizer of one letter, to make the two parts from what they are in tokenizer.json.
        model = {"type": "BPE", "vocab": {}, "merges": []}
        template = tokenizers.Tokenizer.from_str(
            json.dumps({"version": "1.0", "added_tokens": [], "model": model, **bare})
        )
        backend = copy.deepcopy(self._backend)
        backend.normalizer, backend.pre_tokenizer = template.normalizer, template.pre_tokenizer
        return backend

    @cached_property
    def _puts_spaces_after_added(self) -> bool:
        """Whether the space before a text is put after special and added tokens too."""
        token = self.hf.eos_token or next(iter(self._added_vocab), "")
        return self.encode(f"{token}a")[-len(self.encode("a")) :] == self.encode("a")


def _without_prefix(part: Any) -> Any:
    """A normalizer or pre-tokenizer of a tokenizer.json without what puts a space before every text."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    lists = {
        key: [_without_prefix(item) for item in part[key]] for key in ("normalizers", "pretokenizers") if key in part
    }
    off = {"prepend_scheme": "never", "add_prefix_space": False}
    return {**part, **lists, **{key: value for key, value in off.items() if key in part}}


def load_tokenizer(folder_or_id: str | Path) -> Tokenizer | None:
    """The tokenizer of a local folder or a hub id; None for a folder without one, for which rows must be token ids.

    Raises:
        UserError: the folder does not exist, a file is a link out of it, its tokenizer does not load or is not a fast
            one, or the hub does not answer.
    """
    folder, source = Path(folder_or_id).expanduser(), str(folder_or_id)
    if folder.is_dir():
        source = str(folder)
        for file in folder.iterdir():
            if file.suffix in READ:
                refuse_foreign(folder, file.name)
        if not any((folder / name).is_file() for name in VOCABULARY_FILES):
            if (folder / "tokenizer_config.json").is_file():
                raise UserError(f"{folder} has a tokenizer_config.json, but no vocabulary: tokenizer.json is missing")
            return None
    elif source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise UserError(f"{folder_or_id}: there is no such folder, so no tokenizer either")
    import transformers

    try:
        if _file(source, "tokenizer.json") is None:  # transformers makes one of the vocabulary
            hf = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        else:
            # AutoTokenizer would choose a class by the type of model, and some classes replace what tokenizer.json
            # says: that of qwen2 puts its own splitter of words into every tokenizer.
            hf = transformers.PreTrainedTokenizerFast.from_pretrained(source)
            settings = _settings(source, "tokenizer_config.json")
            named = settings.keys() | _settings(source, "special_tokens_map.json").keys()
            if silent := [name for name in ("bos_token", "eos_token", "pad_token") if name not in named]:
                # They are named as the class of the folder's tokenizer does.
                from transformers.models.auto.tokenization_auto import (
                    TOKENIZER_MAPPING_NAMES,
                    tokenizer_class_from_name,
                )

                config = _settings(source, "config.json")
                kind = settings.get("tokenizer_class") or config.get("tokenizer_class")
                kind = kind or TOKENIZER_MAPPING_NAMES.get(config.get("model_type", ""))
                cls = None if kind is None else tokenizer_class_from_name(kind.removesuffix("Fast"))
                defaults = {} if cls is None else inspect.signature(cls.__init__).parameters
                for name in silent:
                    token = defaults[name].default if name in defaults else None
                    if isinstance(token, str) and hf.backend_tokenizer.token_to_id(token) is not None:
                        setattr(hf, name, token)
        hf.encode("a")  # which reads settings of a wrong type
    except Exception as error:  # the Rust library raises bare Exceptions for a broken tokenizer.json
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"{source}: the tokenizer does not load: {reason} (is the name right, the file whole?)"
        ) from error
    if not hf.is_fast:
        raise UserError(f"{source}: only a slow tokenizer; save a tokenizer.json with save_pretrained of a fast one")
    for name in (GENERATION_CONFIG, "config.json"):  # the first takes precedence, as in transformers
        try:
            fields = _settings(source, name)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{source}/{name} is not JSON: {error}. Fix or delete it") from error
        if stops := eos_ids(fields, f"{source}/{name}"):
            return Tokenizer(hf, stops)
    return Tokenizer(hf)


def _file(source: str, name: str) -> str | None:
    """The path of a file of a folder or of a model on the hub; None where it has none."""
    from transformers.utils.hub import cached_file

    return cached_file(source, name, _raise_exceptions_for_missing_entries=False)


def _settings(source: str, name: str) -> dict[str, Any]:
    """The content of a JSON file of a folder or of a model on the hub; empty where it has none."""
    path = _file(source, name)
    settings = {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise ValueError(f"it holds {type(settings).__name__}, and has to be an object")
    return settings


def eos_ids(fields: Mapping[str, Any], file: str) -> tuple[int, ...]:
    """The `eos_token_id` of a folder's JSON file, which may be one id or a list; empty where it names none.

    Args:
        fields: the file's content.
        file: its name, for messages.

    Raises:
        UserError: it is no id.
    """
    ids = fields.get("eos_token_id")
    listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 31 for i in listed):
        raise UserError(f"{file}: eos_token_id is {ids!r:.80}, neither a token id nor a list of them. Fix it")
    return tuple(listed)


def bytes_tokenizer(template: TemplateName = "gemma", pictures: bool = False) -> Tokenizer:
    """A tokenizer with one id per byte of UTF-8, after `<pad> <eos> <bos>` and the template's markers; not trained.

    Args:
        template: the chat template.
        pictures: whether the last ids are the markers of pictures.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    markers = PICTURE_MARKERS[template] if pictures else {}
    letters = bytes_to_unicode()
    tokens = (*_SPECIALS, *MARKERS[template], *(letters[byte] for byte in range(256)), *markers.values())
    backend = Backend(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    return _finish(backend, template, markers)


def bpe_tokenizer(texts: Iterable[str], vocab_size: int, template: TemplateName = "gemma") -> Tokenizer:
    """A byte-level BPE tokenizer trained on `texts`; the same texts give the same ids.

    The vocabulary is smaller than `vocab_size` where the texts do not contain enough merges.

    Raises:
        UserError: `vocab_size` is too small for the 256 bytes and the special tokens.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    specials = [*_SPECIALS, *MARKERS[template]]
    least = 256 + len(specials)
    if vocab_size < least:
        raise UserError(f"a bpe tokenizer wants at least {least} ids (256 bytes and the specials), not {vocab_size}")
    backend = Backend(BPE())
    _split_words(backend, template)
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=list(bytes_to_unicode().values()),
        show_progress=False,
    )  # pyright: ignore[reportCallIssue]
    backend.train_from_iterator(texts, trainer)
    return _finish(backend, template)


def _split_words(backend: tokenizers.Tokenizer, template: TemplateName) -> None:
    """Sets how text is split into words, across which nothing is merged."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    if template == "chatml":
        backend.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(Regex(_QWEN_SPLIT), behavior="isolated")
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)


def _finish(
    backend: tokenizers.Tokenizer, template: TemplateName, pictures: Mapping[str, str] = MappingProxyType({})
) -> Tokenizer:
    """Adds special tokens, BOS and template to a byte-level vocabulary whose first ids are the special tokens;
    `pictures` are the markers of pictures by transformers' names for them."""
    from tokenizers import decoders
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    _split_words(backend, template)
    backend.decoder = decoders.ByteLevel()
    if "bos_token" in TEMPLATES[template]:
        bos = ("<bos>", backend.token_to_id("<bos>"))
        backend.post_processor = TemplateProcessing(single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[bos])
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token=None,  # explicit, or transformers' Qwen2Tokenizer adds an id for one
        extra_special_tokens=list(MARKERS[template]),
        model_specific_special_tokens=dict(pictures),
    )
    hf.chat_template = TEMPLATES[template]
    return Tokenizer(hf)
