"""Pathways, with a stand-in for its package: it is prepared where JAX is asked for it, and only there."""

import sys
from collections.abc import Iterator
from types import ModuleType

import jax
import pytest

from tunix.cli import main
from tunix.errors import UserError
from tunix.util.startup import begin_pathways


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the stand-in."""
    asked: list[str] = []
    module = ModuleType("pathwaysutils")
    module.__dict__["initialize"] = lambda: asked.append("initialize")
    monkeypatch.setitem(sys.modules, "pathwaysutils", module)
    return asked


@pytest.fixture
def proxy() -> Iterator[None]:
    """JAX as `JAX_PLATFORMS=proxy` leaves it, until the test ends."""
    before = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_platforms", "proxy,cpu")
    yield
    jax.config.update("jax_platforms", before)


@pytest.mark.usefixtures("proxy")
def test_pathways_is_prepared_where_it_is_asked_for(calls: list[str]):
    assert begin_pathways()
    assert calls == ["initialize"]


def test_nothing_is_asked_of_it_elsewhere(calls: list[str]):
    assert not begin_pathways()
    assert calls == []


@pytest.mark.usefixtures("proxy")
def test_its_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pathwaysutils", None)
    with pytest.raises(UserError, match=r"JAX_PLATFORMS=proxy,cpu asks for Pathways, .*'\.\[pathways\]'"):
        begin_pathways()


@pytest.mark.usefixtures("proxy")
def test_a_run_prepares_it_before_it_trains_and_looks_for_no_other_process(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
):
    def place_of(*_: object) -> None:
        pytest.fail("under Pathways there is one process")

    monkeypatch.setattr("tunix.distributed.meeting.place_of", place_of)
    monkeypatch.setattr("tunix.run.train.run", lambda *_, **__: calls.append("train"))
    assert main(["run", "quickstart", "--tiny"]) == 0
    assert calls == ["initialize", "train"]
