"""`tunix plan` on the screen, and what `tunix run` asks of it."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.marks import slow
from tests.plan.test_plan import recipe
from tunix.cli import main
from tunix.commands import plan as command
from tunix.commands.plan import Plan
from tunix.errors import UserError
from tunix.util import accelerators
from tunix.util.accelerators import MEMORY, Card

GIB = 2**30


def verdict(fits: bool, **more: Any) -> dict[str, Any]:
    """A verdict of 20 GiB for one step, of 24 or of 16."""
    step = {
        "name": "step",
        "total": 20 * GIB,
        "kinds": {"weights": 4 * GIB, "activations and temporaries": 16 * GIB},
        "buffers": [[3 * GIB, "bf16[28,16,2048]", "jit(run)/while/body/dot_general"]],
        "work": [2e12, 0.6e9, 0.4e9],
        "sent": {"all-reduce": 5e8},
        "traced_in": 3.2,
        "compiled_in": 21.0,
        "refused": "",
        "times": 1.0,
        "model_flops": 1e12,
        "tokens": 1000,
        "seconds": 0.5,
        "bound": "compute",
        "place": "training",
        **more,
    }
    return {
        "devices": "h100:1",
        "number": 1,
        "limit": (24 if fits else 16) * GIB,
        "needed": 20 * GIB,
        "fits": fits,
        "places": {"training": {"number": 1, "needed": 20 * GIB, "held": {}}},
        "chosen": ["attention: mosaic"],
        "programs": [step],
        "prediction": {"step_seconds": 0.5, "tokens_per_second": 2000.0, "mfu": 0.25},
    }


def shown(monkeypatch: pytest.MonkeyPatch, found: Plan, **options: Any) -> str:
    monkeypatch.setattr(command, "ask", lambda *_, **__: found)
    console = Console(file=StringIO(), highlight=False, soft_wrap=True)
    command.plan(recipe(), ["h100:1"], 60.0, console=console, **options)
    return console.file.getvalue()


def test_the_screen_says_what_fits_and_what_it_costs(monkeypatch: pytest.MonkeyPatch):
    text = shown(monkeypatch, Plan([verdict(True)]))
    assert "runs/plan on h100:1: fits: 20.0 GiB of 24.0 GiB during `step`, 4.0 GiB to spare" in text
    assert "attention: mosaic" in text
    assert "3.0 GiB  bf16[28,16,2048]  while/body/dot_general" in text
    assert "TFLOP, GB and least ms by arithmetic" in text
    assert "predicted, not measured: a step of 0.5 s at the least, 2,000 trained tokens/s, MFU 25%" in text
    (row,) = (line for line in text.splitlines() if line.startswith("  step "))
    assert row.split() == ["step", "20.00", "1", "x", "2.0", "1", "0.5", "500,", "compute", "3", "+", "21"]


def test_devices_that_only_sample_have_a_table_of_their_own(monkeypatch: pytest.MonkeyPatch):
    """A decode of 23 GiB on four devices does not fit 22, beside a step of 20 that does on four others."""
    found = verdict(True) | {"limit": 22 * GIB, "needed": 23 * GIB, "fits": False, "number": 8}
    decode = {**found["programs"][0], "name": "decode", "total": 23 * GIB, "place": "sampling", "buffers": []}
    decode["kinds"] = {"sampler's copy": 13 * GIB, "caches": 10 * GIB}
    sampling = {"number": 4, "needed": 23 * GIB, "held": {"sampler's copy": 13 * GIB}}
    found["places"] = {"training": {"number": 4, "needed": 20 * GIB, "held": {}}, "sampling": sampling}
    text = shown(monkeypatch, Plan([found | {"programs": [decode, *found["programs"]]}]))
    assert "does not fit: 23.0 GiB of 22.0 GiB during `decode` on each sampling device, 1.0 GiB too much" in text
    assert "too much; 20.0 GiB during `step` on each training device" in text
    training, sampling = (text.index(f"of each of 4 {place} device(s), during") for place in ("training", "sampling"))
    assert training < text.index("activations and temporaries") < sampling < text.index("sampler's copy")


def test_devices_at_hand_are_counted():
    found = verdict(True) | {"devices": "NVIDIA H100 80GB HBM3", "number": 8}
    assert command.summary(found).startswith("on 8 x NVIDIA H100 80GB HBM3: fits: 20.0 GiB of 24.0 GiB")


def test_large_and_small_predictions_are_readable(monkeypatch: pytest.MonkeyPatch):
    prediction = {"step_seconds": 1350.4, "tokens_per_second": 874.2, "mfu": 0.0042}
    text = shown(monkeypatch, Plan([verdict(True) | {"prediction": prediction}]))
    assert "a step of 1,350 s at the least, 874 trained tokens/s, MFU 0.4%" in text


def test_the_screen_says_what_does_not_fit_and_what_would(monkeypatch: pytest.MonkeyPatch):
    text = shown(monkeypatch, Plan([verdict(False)], {0: "model.remat=block"}))
    assert "does not fit: 20.0 GiB of 16.0 GiB during `step`, 4.0 GiB too much" in text
    assert "it fits with: model.remat=block" in text
    assert "none of these fits: a; b" in shown(monkeypatch, Plan([verdict(False)], {0: None}, ["a", "b"]))


def test_a_compiler_that_refuses_is_translated(monkeypatch: pytest.MonkeyPatch):
    text = shown(monkeypatch, Plan([verdict(False, refused="RESOURCE_EXHAUSTED: 20.00G of 16.00G")], {0: None}))
    assert "4.0 GiB too much: the compiler refuses `step`; the largest array is 3.0 GiB  bf16[28,16,2048]" in text


def test_json_has_everything(monkeypatch: pytest.MonkeyPatch):
    assert json.loads(shown(monkeypatch, Plan([verdict(True)]), as_json=True))["verdicts"] == [verdict(True)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--deadline", "0"], "--deadline 0: it is a number of seconds above 0"),
        *slow([(["--topology", "h10:8"], "'h10' is not known. Did you mean 'h100'?")]),
        *slow([(["--topology", "v5e:7x9"], "v5e")]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_sentences(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe().to_yaml())
    assert main(["plan", str(file), *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


# --- What `tunix run` asks ------------------------------------------------------------------------------------------


def asked(monkeypatch: pytest.MonkeyPatch, found: Plan | UserError, *, here: bool = True) -> list[Any]:
    """Lets `require_fit` find an accelerator and this plan; the list is filled with what it asks."""
    calls: list[Any] = []

    def ask(*arguments: Any, **options: Any) -> Plan:
        calls.append(arguments)
        if isinstance(found, UserError):
            raise found
        return found

    monkeypatch.setattr(command, "ask", ask)
    monkeypatch.setattr(command, "accelerated", lambda: here)
    return calls


def test_a_run_that_does_not_fit_is_refused_with_the_change_that_would(monkeypatch: pytest.MonkeyPatch):
    asked(monkeypatch, Plan([verdict(False)], {0: "model.remat=block"}))
    with pytest.raises(UserError) as error:
        command.require_fit(recipe(), fresh=False)
    for words in (
        "runs/plan on h100:1: does not fit: 20.0 GiB of 16.0",
        "It fits with: model.remat=block",
        "--no-plan",
    ):
        assert words in str(error.value)


def test_only_a_new_run_on_an_accelerator_is_planned(monkeypatch: pytest.MonkeyPatch):
    calls = asked(monkeypatch, Plan([verdict(True)]))
    command.require_fit(recipe(), fresh=False)
    assert len(calls) == 1
    Path("runs/plan").mkdir(parents=True)
    command.require_fit(recipe(), fresh=False)
    assert len(calls) == 1
    command.require_fit(recipe(), fresh=True)
    assert len(calls) == 2
    assert asked(monkeypatch, Plan([verdict(False)]), here=False) == []
    command.require_fit(recipe(), fresh=True)


@pytest.mark.parametrize(("free", "share", "planned"), [(80e9, None, False), (80e9, "0.0001", True), (5e6, None, True)])
def test_a_run_is_not_planned_where_what_jax_may_take_is_ample(
    monkeypatch: pytest.MonkeyPatch, free: float, share: str | None, planned: bool
):
    calls = asked(monkeypatch, Plan([verdict(True)]))
    monkeypatch.setattr(command, "cards", lambda: (Card(0, "GPU-aa", "NVIDIA H100", 85e9, free),))
    monkeypatch.delenv(MEMORY, raising=False)
    if share is not None:
        monkeypatch.setenv(MEMORY, share)
    command.require_fit(recipe(), fresh=False)
    assert bool(calls) == planned


def test_a_run_that_cannot_be_planned_starts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    asked(monkeypatch, UserError("nobody/nothing: its sizes are not known here"))
    command.require_fit(recipe(), fresh=False)
    assert "not planned: nobody/nothing" in capsys.readouterr().err
    asked(monkeypatch, Plan([verdict(True)], late=True))
    command.require_fit(recipe(), fresh=False)
    assert "not planned to the end" in capsys.readouterr().err


def test_accelerators_are_found_without_jax(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(accelerators, "DEVICES", (str(tmp_path / "nvidia[0-9]*"),))
    monkeypatch.delenv("JAX_PLATFORMS")
    assert not accelerators.accelerated()
    (tmp_path / "nvidia0").touch()
    assert accelerators.accelerated()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not accelerators.accelerated()


def test_the_command_line_plans_before_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe().to_yaml())
    asked(monkeypatch, Plan([verdict(False)], {0: None}))
    assert main(["run", str(file)]) == 2
    assert not Path("runs").exists()
