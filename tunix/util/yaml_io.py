"""Reads YAML and overrides into plain values, and turns validation errors into messages that help.

`read_mapping` (a YAML file) -> `overridden` (`section.key=value` from the command line) -> the recipe's models, whose
`ValidationError` is turned into `problems`: one line each, with the key, the value and the remedy. `write_yaml` writes
plain values.
"""

import copy
import json
import math
import re
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from tunix.errors import UserError, nearest

Keys = Mapping[str, List[str]]
"""The known keys of each section; the top level's are under the empty name."""
MOST_VALUES = 100_000
"""Most values of a YAML document with every alias replaced by its value."""
ALIKE = 10
"""Mistakes in one list or section that are named one by one, at most."""


class _Loader(yaml.SafeLoader):
    """Reads YAML with the plain scalars of YAML 1.2 (only true and false are booleans, dates are text)."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML's own name; `add_implicit_resolver` copies it per class)

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        """Builds a mapping and refuses duplicate keys, of which PyYAML by itself keeps the last."""
        lines: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else []:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused below
            if key.value in lines:
                problem = f"key {key.value!r} is given twice; the first is in line {lines[key.value]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return super().construct_mapping(cast("yaml.MappingNode", node), deep)  # it refuses others

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node; PyYAML lets the errors of Python's own conversions rise, as that of `!!int x`."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError) as error:
            problem = f"{shown(node.value)} cannot be read as {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


def _expanded(node: yaml.Node, known: dict[int, float]) -> float:
    """Number of values in a node with every alias followed; infinite for a node that contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf  # while it is being counted: met again, it contains itself
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for one in inner for part in (one if isinstance(one, tuple) else (one,))]
        known[id(node)] = 1.0 + sum(_expanded(part, known) for part in parts)
    return known[id(node)]


class _Dumper(yaml.SafeDumper):
    """Writes YAML that `_Loader` reads back as equal values: text that looks like a number is quoted, no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always True: `&id001` would not help a reader."""
        return True


def _style(text: str) -> str | None:
    """Text of several lines as a block, which is readable where a quoted one is not. Unicode's line ends are escaped:
    PyYAML would write them as they are, and read spaces."""
    return '"' if re.search("[\x85\u2028\u2029\ufeff]", text) else "|" if "\n" in text else None


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style=_style(text))
)

# PyYAML follows YAML 1.1, where 1e-4 is text, 010 is eight and `on` is true.
_FLOAT = r"[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d[\d_]*([eE][-+]?\d+)?|\.(inf|nan))$"
for _tag, _pattern, _first in (
    ("bool", r"(true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"(~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"[-+]?(0|[1-9][\d_]*)$", "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("merge", r"<<$", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+.0123456789"))


def parse_yaml(text: str, where: str) -> Any:
    """The value of one YAML document; raises UserError, with `where:line:column:`, where it is not valid."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None and _expanded(node, {}) > MOST_VALUES:
            problem = f"more than {MOST_VALUES} values where every alias (*name) stands for what it means"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise UserError(f"{place}: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:  # the last two: "\\UFFFFFFFF"
        raise UserError(f"{where}: not readable as YAML: {str(error).splitlines()[0]}") from error


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; raises UserError where there is none, or it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        siblings = [other.name for other in path.parent.glob("*.y*ml")]
        raise UserError(f"{path}: no such file.{nearest(path.name, siblings)}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{path}: cannot be read: {reason}") from error
    value = parse_yaml(text, str(path))
    if not isinstance(value, dict):
        content = "it is empty" if value is None else f"it holds {type(value).__name__} {shown(value)}"
        raise UserError(f"{path}: a recipe is a mapping with sections such as `model:` and `data:`, but {content}")
    if odd := [key for key in value if not isinstance(key, str)]:
        raise UserError(f"{path}: {shown(odd[0])}: a key is text, as `model:` and `data:` are")
    return value


def write_yaml(value: Mapping[str, Any]) -> str:
    """YAML text that `read_mapping` reads back as an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def overridden(tree: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of the tree with each override `section.key=value` applied; values are read as YAML.

    Raises:
        UserError: an override is malformed, or its path leads through something that is not a section.
    """
    result = copy.deepcopy(dict(tree))
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(re.fullmatch(r"\w+", part) for part in parts):
            raise UserError(f"{override!r}: an override is written section.key=value, as in optimizer.b1=0.9")
        if not text.strip():
            raise UserError(f"{override!r}: no value after '='; `{key}=null` clears a key")
        place: Any = result
        for depth, part in enumerate(parts, start=1):
            key_there: Any = part
            if isinstance(place, list):
                if not re.fullmatch(r"\d{1,9}", part) or int(part) >= len(place):
                    names = f"{part!r} names none of the {len(place)} items there; they count from 0"
                    raise UserError(f"{override!r}: {names}")
                key_there = int(part)
            if depth == len(parts):
                place[key_there] = parse_yaml(text, f"override {override!r}")
                break
            if isinstance(place, dict) and place.get(part) is None:
                place[part] = {}  # a missing section is created
            place = place[key_there]
            if not isinstance(place, dict | list):
                path = ".".join(parts[:depth])
                raise UserError(f"{override!r}: {path} is {shown(place)}, which has no keys")
    return result


def without_effect(tree: Mapping[str, Any], overrides: Iterable[str]) -> list[str]:
    """A message for each override outside of the stages whose key every stage sets itself, so that it has no effect."""
    stages = tree.get("stages")
    if not isinstance(stages, list) or not stages:
        return []
    return [
        f"{key}: every stage sets its own, which takes precedence; write stages.0.{key}=... (stages count from 0)"
        for key in (override.partition("=")[0].strip() for override in overrides)
        if all(_sets(stage, key) for stage in stages)
    ]


def keys_set(tree: Mapping[str, Any], overrides: Iterable[str]) -> list[frozenset[str]]:
    """The keys that overrides set, without their values: those of a recipe, or of each of its stages."""
    keys, stages = [override.partition("=")[0].strip() for override in overrides], tree.get("stages")
    if not isinstance(stages, list) or not stages:
        return [frozenset(keys)]
    sets = []
    for number, stage in enumerate(stages):
        # A key above the stages holds for those that do not set it themselves.
        shared = (key for key in keys if not key.startswith("stages.") and not _sets(stage, key))
        begin = f"stages.{number}."
        sets.append(frozenset([*shared, *(key.removeprefix(begin) for key in keys if key.startswith(begin))]))
    return sets


def _sets(section: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(section, Mapping) or part not in section:
            return False
        section = section[part]
    return True


def problems(error: ValidationError, keys: Keys) -> list[str]:
    """Each validation error as `section.key: what is wrong and what to do`, in the order of the recipe's fields.

    Of the items of a list, and of the unknown keys of a section, no more than `ALIKE` are named.
    """
    wanted: dict[str, tuple[Any, list[str]]] = {}
    lines: list[tuple[str, str]] = []  # (what they are about but for the item of a list, message)
    for item in error.errors(include_url=False):
        # The branches of a union add parts such as "tuple[str, ...]", no keys; an unknown key may be any text.
        unknown = item["loc"][-1:] if item["type"] == "extra_forbidden" else ()
        known = item["loc"][: len(item["loc"]) - len(unknown)]
        path = tuple(str(part) for part in (*(part for part in known if "[" not in str(part)), *unknown))
        key = ".".join(path)
        prefix, section = f"{key}: " if path else "", _without_items(key)
        context = item.get("ctx", {})
        if item["type"] == "missing":
            lines.append((section, f"{prefix}missing; the recipe has to say it"))
        elif item["type"] == "extra_forbidden":
            lines.append((".".join(path[:-1]), f"{prefix}unknown key{_remedy(path, keys)}"))
        elif item["type"] == "value_error":
            lines += [(section, prefix + line) for line in str(context["error"]).splitlines()]
        else:
            # The expected value as a noun, e.g. `a whole number`.
            noun = _NOUNS.get(item["type"].split("_")[0], item["msg"])
            if item["type"] in _BOUNDS:
                noun = f"a number {_BOUNDS[item['type']]} {next(iter(context.values()))}"
            elif item["type"] == "literal_error":
                noun = re.sub(r",? or ", ", ", context["expected"]).replace("True", "true").replace("False", "false")
            wanted.setdefault(key, (item["input"], []))[1].append(noun)
    for key, (value, kinds) in wanted.items():
        choices = re.findall(r"'([^']*)'", " ".join(kinds))
        hint = nearest(value, choices) if isinstance(value, str) else ""
        verdict = f"is not {'one of ' if len(choices) > 1 else ''}{kinds[0]}"
        if len(kinds) > 1:
            verdict = f"is neither {' nor '.join(kinds)}"
        lines.append((_without_items(key), f"{key}: {shown(value)} {verdict}{'.' if hint else ''}{hint}"))
    places: dict[str, list[str]] = {}
    for section, line in lines:
        places.setdefault(section, []).append(line)
    named = [line for place in places.values() for line in place[:ALIKE]]
    more = [f"{key}: and {len(x) - ALIKE} more like it".lstrip(": ") for key, x in places.items() if len(x) > ALIKE]
    return named + more


def _without_items(key: str) -> str:
    """A dotted key without the numbers of items: `targets` for `targets.3`."""
    return ".".join(part for part in key.split(".") if not part.isdigit())


def _remedy(path: tuple[str, ...], keys: Keys) -> str:
    """A hint for an unknown key: a similar known key, the same key in another section, or the list of known keys."""
    section, name = ".".join(path[:-1]), path[-1]
    known = list(keys.get(section) or keys.get(_without_items(section), ()))
    if hint := nearest(name, known):
        return f".{hint}"
    elsewhere = [f"{other}.{name}".lstrip(".") for other in keys if name in keys[other] and "." not in other]
    if elsewhere:
        return f". Did you mean {elsewhere[0]!r}?"
    return f"; {section or 'a recipe'} has {', '.join(known)}" if known else ""


def shown(value: Any, longest: int = 60) -> str:
    """A value as the recipe spells it, shortened to `longest` characters."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= longest else text[: longest - 3] + "..."


_BOUNDS = {
    "greater_than": "above",
    "greater_than_equal": "not below",
    "less_than": "below",
    "less_than_equal": "not above",
}
_NOUNS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "dict": "a mapping",
    "model": "a section with keys",
    "finite": "a finite number",
    "invalid": "a name",
}
"""The expected value as a noun, by the first word of pydantic's error type."""
