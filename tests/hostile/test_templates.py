"""Chat templates of folders that come from anybody: what they may not do, and what they may not cost."""

import time
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.hostile.attack import attack, numbers
from tunix.data import template_limits
from tunix.data.chat import render_chat, render_prompt
from tunix.data.tokenizer import Tokenizer, bytes_tokenizer
from tunix.data.types import Refused
from tunix.errors import UserError

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LOOP = "{% set r = range(99999) %}" + "{% for i in r %}" * 3 + "{% endfor %}" * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return bytes_tokenizer("chatml")


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "LONGEST", 0.2)


BOMBS = {
    "loops in loops": (LOOP, "it takes more than 0.2 seconds"),
    "a long range": ("{% for i in range(10**12) %}{% endfor %}", "OverflowError: Range too big"),
    "a power": ("{{ 10**(10**10) }}", "it makes something of more than 1000000 characters, items or bits"),
    "a power of a variable": ("{% set x = 10 %}{{ x**(x**x) }}", "it makes something of more than 1000000"),
    "repeated squares": (
        "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "it",
    ),
    "a long text": ("{{ 'a' * 10**10 }}", "it makes something of more than 1000000"),
    "a long text, turned": ("{{ (10**10) * 'a' }}", "it makes something of more than 1000000"),
    "a long list": ("{{ [0] * 10**10 }}", "it makes something of more than 1000000"),
    "a macro that calls itself": (
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "RecursionError: maximum recursion",
    ),
    "a division by 0": ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
    "parents": ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
    "parents by a filter": (
        "{{ (''|attr('__class__')).x }}",
        "access to attribute '__class__' of 'str' object is unsafe",
    ),
    "globals": ("{{ cycler.__init__.__globals__.os.mkdir('exploded') }}", "'__init__' of 'type' object is unsafe"),
    "a macro's function": ("{% macro f() %}{% endmacro %}{{ f.__call__.__globals__ }}", "is unsafe"),
    "a format": (
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "access to attribute '__class__' of 'int' object is unsafe",
    ),
    "the messages": ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
    "another file": ("{% include '/etc/passwd' %}", "no loader for this environment"),
    "no template": ("{% for %}", "Expected an expression"),
}


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(("template", "words"), BOMBS.values(), ids=BOMBS)
def test_a_template_that_is_a_bomb_is_refused_in_seconds(template: str, words: str, tokenizer: Tokenizer):
    start = time.monotonic()
    for render in (render_prompt, render_chat):
        with pytest.raises(UserError, match=r"the chat template of .* refuses the conversation: ") as refused:
            render(TURNS if render is render_chat else TURNS[:1], tokenizer.replace_template(template))
        assert words in str(refused.value)
    assert time.monotonic() - start < 20


@pytest.mark.usefixtures("quickly")
def test_a_rendering_that_ends_in_time_leaves_nothing_behind(tokenizer: Tokenizer):
    """Nothing is raised later, in what the thread does next."""
    slow = tokenizer.replace_template(LOOP)
    for _ in range(2):
        with pytest.raises(UserError, match="it takes more than"):
            render_prompt(TURNS[:1], slow)
        assert len(render_prompt(TURNS[:1], tokenizer).tokens) > 5
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        pass
    assert template_limits._watch().ends == {}


PIECES = [
    *(
        "{{",
        "}}",
        "{%",
        "%}",
        "{#",
        "#}",
        " for m in messages ",
        " endfor ",
        " if ",
        " endif ",
        " set x = ",
        " m.role ",
        "1",
    ),
    *(
        " m.content ",
        " + ",
        " * ",
        " ** ",
        " / ",
        " ~ ",
        "[0]",
        "[m]",
        "(",
        ")",
        "|length",
        "|tojson",
        "|join",
        "|trim",
    ),
    *(
        "range(9)",
        "namespace(a=1)",
        "raise_exception('a')",
        "'a'",
        " macro f(x) ",
        " endmacro ",
        "f(1)",
        ".__class__",
        "|first",
    ),
    *(
        " generation ",
        " endgeneration ",
        "tools",
        "<|im_start|>",
        "\n",
        "messages",
        "bos_token",
        " x ",
        " break ",
        "|int",
    ),
]
BLOCKS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
TEMPLATES = st.lists(
    st.sampled_from(["{{ % }}", "{% for m in messages %}%{% endfor %}", "{% set x = % %}", "%"]).flatmap(
        lambda frame: BLOCKS.map(lambda text: frame.replace(" % ", text).replace("%{%", text + "{%"))
    ),
    max_size=4,
).map("".join)


def renders(tokenizer: Tokenizer, template: str) -> None:
    changed: Any = tokenizer.replace_template(template)
    for render, turns in ((render_prompt, TURNS[:1]), (render_chat, TURNS)):
        try:
            render(turns, changed)
        except (UserError, Refused):
            continue


@numbers
def test_no_template_is_a_traceback(number: int, tokenizer: Tokenizer):
    attack(lambda template: renders(tokenizer, template), TEMPLATES, number)
