"""Rows from Python's own documentation: a signature as the prompt, the docstring's first line as the completion.

A real and small task that exists on every machine, so the recipe sft_pydoc needs no download. `train` and `held_out`
are split by a hash of the answer, so that no held-out answer was trained on under another name. `pairs` and
`held_out_pairs` are preferences over the same splits: a function's own line is chosen, another function's rejected. The
same Python version gives the same rows in the same order, whatever else is installed or imported.
"""

import functools
import hashlib
import importlib
import inspect
import json
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

HELD_OUT_PERCENT = 10
OTHERS = 4
"""Pairs of each function, each with another function's line."""

# Modules whose import has no visible side effect; those that a platform lacks are skipped.
_MODULES = """
    abc argparse array ast asyncio.events asyncio.locks asyncio.queues asyncio.streams asyncio.tasks base64 bdb binascii
    bisect bz2 calendar cmath cmd code codecs codeop collections collections.abc colorsys compileall concurrent.futures
    configparser contextlib contextvars copy copyreg csv ctypes dataclasses datetime decimal difflib dis doctest
    email.charset email.generator email.header email.headerregistry email.message email.parser email.policy email.utils
    enum errno filecmp fileinput fnmatch fractions ftplib functools gc getopt getpass gettext glob graphlib gzip hashlib
    heapq hmac html html.parser http.client http.cookiejar http.cookies http.server imaplib importlib.abc
    importlib.machinery importlib.metadata importlib.resources importlib.util inspect io ipaddress itertools json
    json.decoder json.encoder keyword linecache locale logging logging.config logging.handlers lzma mailbox marshal math
    mimetypes mmap modulefinder multiprocessing.connection multiprocessing.managers multiprocessing.pool netrc numbers
    operator optparse os os.path pathlib pdb pickle pickletools pkgutil platform plistlib poplib posixpath pprint
    profile pstats py_compile pyclbr queue quopri random re reprlib runpy sched secrets select selectors shelve shlex
    shutil signal smtplib socket socketserver sqlite3 ssl stat statistics string stringprep struct subprocess symtable
    sys tabnanny tarfile tempfile textwrap threading time timeit token tokenize trace traceback tracemalloc
    types typing unicodedata unittest.case unittest.loader unittest.mock unittest.result unittest.runner unittest.suite
    urllib.error urllib.parse urllib.request urllib.robotparser uuid warnings wave weakref webbrowser
    wsgiref.handlers wsgiref.headers wsgiref.simple_server wsgiref.util xml.dom.minidom xml.dom.pulldom
    xml.etree.ElementTree xml.sax.handler xml.sax.saxutils xml.sax.xmlreader xmlrpc.client xmlrpc.server zipapp zipfile
    zipimport zlib zoneinfo builtins
"""
MODULES = tuple(_MODULES.split())

_LONGEST = 160
"""Most characters of a signature; a longer one explains little and fills a row."""
_CONSTANTS = (type(None), bool, int, float, str, bytes)


def train() -> list[dict[str, str]]:
    """About nine rows in ten: `{"prompt": "heapq.heappop(heap, /)\\n", "completion": "Pop the smallest item ..."}`."""
    return [row for row in _rows() if not _is_held_out(row["completion"])]


def held_out() -> list[dict[str, str]]:
    """The held-out tenth of the rows; none of their completions is in `train`.

    Sorted by hash, so that the first ones, which an evaluation reads and shows, come from all modules.
    """
    return sorted((row for row in _rows() if _is_held_out(row["completion"])), key=lambda row: _hash(row["prompt"]))


def pairs() -> list[dict[str, str]]:
    """Pairs, e.g. `{"prompt": "heapq.heappop(heap, /)\\n", "chosen": "Pop the ...", "rejected": "Return a ..."}`.

    Rejected lines are lines of `train` too, each as often as it is chosen: a line by itself does not reveal the answer,
    only whether it belongs to the function does.
    """
    return [pair for distance in range(1, OTHERS + 1) for pair in _paired(train(), distance)]


def held_out_pairs() -> list[dict[str, str]]:
    """Pairs of held-out functions, one for each in the order of `held_out`; neither side was trained on."""
    return _paired(held_out(), 1)


def _paired(rows: list[dict[str, str]], distance: int) -> list[dict[str, str]]:
    """Pairs every row with the answer of the row `distance` places later in the order of hashes.

    Functions that share their answer, as `readable` of several classes does, make no pair.
    """
    order = sorted(rows, key=lambda row: _hash(row["prompt"]))
    others = order[distance:] + order[:distance]
    return [
        {"prompt": own["prompt"], "chosen": own["completion"], "rejected": other["completion"]}
        for own, other in zip(order, others, strict=True)
        if own["completion"] != other["completion"]
    ]


def _is_held_out(answer: str) -> bool:
    return _hash(answer) % 100 < HELD_OUT_PERCENT


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


@functools.cache
def _rows() -> list[dict[str, str]]:
    """All rows, each once, sorted by prompt.

    They are read by a separate, isolated interpreter: modules that this process has imported may have patched the
    standard library (transformers adds methods to logging.Logger, ipykernel replaces input), and a resumed run must get
    the same rows.
    """
    output = subprocess.run([sys.executable, "-I", "-S", __file__], check=True, stdout=subprocess.PIPE).stdout
    return [{"prompt": prompt, "completion": line} for prompt, line in json.loads(output)]


def _read() -> list[tuple[str, str]]:
    """Prompt and answer of everything that is documented in `MODULES`, as this process sees it."""
    warnings.simplefilter("ignore")  # deprecated modules and names warn when they are accessed
    pairs = set[tuple[str, str]]()
    for name, thing in (pair for module in MODULES for pair in _documented(module)):
        # The docstring's first line of prose, of at least two words and 12 characters.
        doc = inspect.cleandoc(thing.__doc__) if isinstance(thing.__doc__, str) else ""
        called = name.rsplit(".", 1)[-1] + "("
        lines = [line.strip() for line in doc.splitlines()]
        prose = [line for line in lines if line and called not in line and not line.startswith((">>>", "--"))]
        if prose and " " in prose[0] and len(prose[0]) >= 12:
            pairs.add((name + _signature(thing) + "\n", prose[0]))
    return sorted(pairs)


def _documented(name: str) -> Iterator[tuple[str, Any]]:
    """Qualified name and object of a module's own public functions and classes, and of their methods."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return
    prefix = "" if name == "builtins" else name + "."
    kinds = property | classmethod | staticmethod | functools.cached_property
    for attribute, thing in list(vars(module).items()):  # access may import more
        # It is where users find it: it was not imported from another module of the list.
        home = thing.__module__ if isinstance(thing, type | types.FunctionType | types.BuiltinFunctionType) else None
        if attribute.startswith("_") or not callable(thing) or not (home == name or home not in MODULES):
            continue
        yield prefix + attribute, thing
        if isinstance(thing, type):
            for method, function in vars(thing).items():
                if not method.startswith("_") and (inspect.isroutine(function) or isinstance(function, kinds)):
                    yield f"{prefix}{attribute}.{method}", function


def _signature(thing: Any) -> str:
    """The signature, e.g. `(obj, *, skipkeys=False)`, with plain constants as defaults; `(...)` where it is unknown."""
    if isinstance(thing, property | functools.cached_property):
        return ""
    try:
        signature = inspect.signature(thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing)
    except (ValueError, TypeError, AttributeError):  # Python 3.13 fails on select.epoll.register
        return "(...)"
    text = str(signature.replace(parameters=[_plain(parameter) for parameter in signature.parameters.values()]))
    return text if len(text) <= _LONGEST else "(...)"


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter with `...` for a default that may differ between runs or machines: an object, or a path."""
    default = parameter.default
    if default is parameter.empty or (type(default) in _CONSTANTS and "/" not in str(default)):
        return parameter
    return parameter.replace(default=_Dots())


class _Dots:
    def __repr__(self) -> str:
        return "..."


if __name__ == "__main__":
    print(json.dumps(_read()))
