"""`tunix report`: what it reads of run folders that are made by hand, and the page that it makes of it."""

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiny_runs import write_rows
from tunix.cli import main
from tunix.commands import report as module
from tunix.commands.report import ALARMS, alarms_of, facts_of, page, reports

HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"> & \u2028 \ud800"
)
SPANS = [
    ["rollout", "MainThread", 1795551924.0, 1795551925.0],
    ["reward", "rewards", 1795551924.5, 1795551925.25],
    ["update", "MainThread", 1795551925.25, 1795551926.0],
]


def metric(step: int, **values: float) -> dict[str, Any]:
    row = {"step": step, "time/seconds": 0.5 * step, "train/loss": 2 / step, "reward/mean": 0.1 * step}
    return row | {name.replace("__", "/"): value for name, value in values.items()}


def sample(step: int, group: int, number: int, **values: Any) -> dict[str, Any]:
    """An answer of 3 tokens to a prompt; its advantage is its number."""
    return {
        "step": step,
        "group": group,
        "prompt": f"question {group}",
        "completion": "a b c",
        "rewards": {"letters": number / 4},
        "failures": {},
        "tokens": 3,
        "finish": "stop",
        "advantage": float(number),
        "per_token": {
            "tokens": ["a", " b", "\n"],
            "trained": [1, 0, 1],
            "advantages": [1.5, 0.0, -0.5],
            "logprobs": [-0.1, -2.0, -0.3],
            "mismatch": [0.0, 0.001 * number, 0.0],
        },
        **values,
    }


def write_run(
    folder: Path,
    metrics: Iterable[Mapping[str, Any]] = (),
    samples: Iterable[Mapping[str, Any]] = (),
    recipe: str = "steps: 10\noptimizer: {learning_rate: 0.001}\n",
) -> Path:
    """A run folder with all that a report reads: ten steps, of which each has a group of four samples."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(recipe)
    rows = [metric(step, data__kept=8.0 * step, data__dropped=1.0, perf__peak_memory=1e9) for step in range(1, 11)]
    write_rows(folder / "metrics.jsonl", metrics or rows)
    write_rows(folder / "samples.jsonl", samples or [sample(i, 0, j) for i in range(1, 11) for j in range(4)])
    write_rows(folder / "spans.jsonl", [{"step": step, "spans": SPANS} for step in range(1, 11)])
    verdict = {"clear": {"score": 0.5, "reason": f"It is short. {HOSTILE}"}}
    write_rows(folder / "judge.jsonl", [{"key": "0", "verdict": verdict}])
    (folder / "log.txt").write_text("12:00:01 rows: 1 of the first 9: dropped, too long (tunix inspect shows which)\n")
    return folder


def data_of(html: str) -> dict[str, Any]:
    """What the page's script reads."""
    return json.loads(html.partition('id="recorded">')[2].partition("</script>")[0])


def test_a_run_is_read(tmp_path: Path):
    (run,) = data_of(page([write_run(tmp_path / "run")]))["runs"]
    assert (run["name"], run["step"], run["steps"], run["every"]) == ("run", 10, 10, 1)
    assert run["curves"]["train/loss"][:3] == [[1, 2.0], [2, 1.0], [3, 0.66667]]
    assert run["recipe"] == {"steps": 10, "optimizer.learning_rate": 0.001}
    assert run["data"] == {"data/kept": 80.0, "data/dropped": 1.0}
    assert run["rows"] == ["rows: 1 of the first 9: dropped, too long (tunix inspect shows which)"]
    spans = [["rollout", "MainThread", 0.0, 1.0], ["reward", "rewards", 0.5, 1.25], ["update", "MainThread", 1.25, 2.0]]
    assert {row["step"]: row["spans"] for row in run["spans"]} == dict.fromkeys(range(1, 11), spans)
    assert [(row["step"], row["advantage"], row["mismatch"]) for row in run["samples"]] == [
        (step, float(number), 0.001 * number) for step in range(1, 11) for number in range(4)
    ]
    assert run["samples"][1]["per_token"] == sample(1, 0, 1)["per_token"]
    assert [verdict["clear"]["score"] for verdict in run["verdicts"]] == [0.5]


def test_the_command_writes_one_file_and_loads_no_jax(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}/report.html is written: open it in a browser\n"
    assert main(["report", str(run)]) == 0  # its own file may be written again, another one not
    assert main(["report", str(run), "--out", str(run / "report.html")]) == 2
    code = f"import sys; from tunix.cli import main; main(['report', {str(run)!r}]); sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_hostile_text_stays_text(tmp_path: Path):
    """No `<` of the data is in the page, so nothing ends its element; the only script is named by its digest."""
    rows = [metric(1, **{HOSTILE: 1.0})]
    samples = [sample(1, 0, 0, prompt=HOSTILE, completion=HOSTILE, failures={HOSTILE: HOSTILE}, **{HOSTILE: HOSTILE})]
    run = write_run(tmp_path / "<b>run", rows, samples, recipe=f"name: {json.dumps(HOSTILE[:-2])}\n")
    (file,) = reports(run)
    html = file.read_text(encoding="utf-8")
    (shown,) = data_of(html)["runs"][0]["samples"]
    assert (shown["prompt"], shown["completion"], shown[HOSTILE]) == (HOSTILE,) * 3
    text = html.partition('id="recorded">')[2].partition("</script>")[0]
    assert not set("<>&\u2028\u2029") & set(text)
    assert len(re.findall("<script", html)) == 2  # the data and the page's own
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)
    assert policy is not None
    assert re.fullmatch(
        r"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-[\w+/]{43}='; .*", policy[1]
    )
    assert "http" not in re.sub(r"http://www\.w3\.org/2000/svg", "", html.replace("http-equiv", ""))


@pytest.mark.slow
def test_a_long_run_is_small_in_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every n-th step of a long file is parsed, and the last; the page has room for the worst samples and a few steps
    from all of the run."""
    run = write_run(
        tmp_path / "run",
        [metric(step, **{f"reward__{i}": step % 7 for i in range(50)}) for step in range(1, 3001)],
        [sample(step, 0, i, completion="é<" * 500) for step in range(1, 401) for i in range(4)],
    )
    with (run / "samples.jsonl").open("a") as file:
        file.write(json.dumps(sample(401, 0, 7, tokens=9999, completion="longest")) + "\n")
    size = (run / "metrics.jsonl").stat().st_size
    monkeypatch.setitem(module.READ, "metrics.jsonl", math.ceil(size / 4))
    html = page([run, write_run(tmp_path / "other")])
    assert len(html.encode()) < 5_000_000
    facts = data_of(html)["runs"][0]
    assert (facts["every"], facts["step"], facts["samples_read"]) == (4, 3000, 1601)
    points = facts["curves"]["reward/3"]
    assert 200 < len(points) <= module.POINTS_OF_ALL // 2 // 53 + 1
    # Steps 4, 8 and 12 are the first point; modulo 7 they are 4, 1 and 5.
    assert points[0] == [12, 3.3333, 1.0, 5.0]
    assert points[-1][0] == 3000
    shown = [row["step"] for row in facts["samples"]]
    assert {1, 401} <= set(shown)
    assert 100 < len(shown) < 401
    assert shown == sorted(shown)
    assert "longest" in {row["completion"] for row in facts["samples"]}


def test_steps_with_evaluations_are_read_whatever_the_stride(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [metric(step, **({"eval/reward": step / 10} if step % 25 == 0 else {})) for step in range(1, 101)]
    run = write_run(tmp_path / "run", rows)
    monkeypatch.setitem(module.READ, "metrics.jsonl", math.ceil((run / "metrics.jsonl").stat().st_size / 10))
    facts = facts_of(run)
    assert [step for step, *_ in facts["curves"]["eval/reward"]] == [25, 50, 75, 100]
    assert [step for step, *_ in facts["curves"]["train/loss"]] == sorted({*range(10, 101, 10), 25, 75})


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path):
    run = write_run(tmp_path / "run")
    for name in ("metrics", "samples", "spans", "judge"):
        with (run / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 11, "train/lo')
    assert facts_of(run)["step"] == 10


def test_bad_folders_are_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_run(tmp_path / "run")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/recipe.yaml").write_text("steps: 3\n")
    for name in ("damaged", "older", "broken", "binary", "huge"):
        write_run(tmp_path / name)
    (tmp_path / "damaged/metrics.jsonl").write_text('{"step": 1, "a": 1}\n{"step": 2, oh\n')
    (tmp_path / "older/spans.jsonl").write_text('{"step": 1, "spans": [["rollout", 1.0]]}\n')
    (tmp_path / "broken/recipe.yaml").write_text("steps: [\n")
    (tmp_path / "binary/samples.jsonl").write_bytes(b'{"step": 1, "completion": "\xff\xfe"}\n')
    (tmp_path / "huge/metrics.jsonl").write_text('{"step": 1, "a": 1' + "0" * 400 + "}\n")
    write_run(tmp_path / "elsewhere", [{"step": 1, "time/seconds": 1.0, "their/metric": 1.0}], [])
    (tmp_path / "elsewhere/samples.jsonl").unlink()
    (tmp_path / "staged/one").mkdir(parents=True)
    (tmp_path / "staged/recipe.yaml").write_text("steps: 3\n")
    (tmp_path / "staged/one/metrics.jsonl").write_text('{"step": 1}\n')
    refusals = {
        "missing": "is no run folder",
        "foreign": "is no run folder: it has no recipe.yaml",
        "empty": "has recorded no metrics yet",
        "damaged": "is damaged, or of another version of tunix: line 2 of metrics.jsonl is no JSON",
        "older": "is damaged, or of another version of tunix: ",
        "broken": "broken/recipe.yaml",
        "binary": "line 1 of samples.jsonl is no JSON",
        "huge": "is damaged, or of another version",
        "staged": "each of which has a report: ",
    }
    for name, reason in refusals.items():
        assert main(["report", str(tmp_path / name)]) == 2, name
        said = capsys.readouterr().err
        assert reason in said, said
        assert len(said.splitlines()) == 1, said
        assert not (tmp_path / name / "report.html").exists()
    assert main(["report", str(run), str(tmp_path / "elsewhere")]) == 2
    assert "have no metric in common" in capsys.readouterr().err
    assert main(["report", str(run), str(write_run(tmp_path / "second"))]) == 0


def test_two_runs_are_called_by_what_differs(tmp_path: Path):
    runs = [write_run(tmp_path / name, recipe=f"seed: {i}\n") for i, name in enumerate(("one", "two"))]
    assert [run["name"] for run in data_of(page(runs))["runs"]] == ["one", "two"]
    inner = [write_run(run / "run") for run in runs]
    said = data_of(page(inner))["runs"]
    assert [run["name"] for run in said] == ["one/run", "two/run"]
    assert [run["name"] for run in data_of(page([inner[0], inner[0]]))["runs"]] == ["run", "run"]


def test_a_run_that_goes_on_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A second look finds nothing new and writes nothing, the third a step, and then Ctrl-C ends it."""
    run, looks = write_run(tmp_path / "run"), list[float]()

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metric(11)) + "\n")
        if len(looks) == 3:
            raise KeyboardInterrupt

    # Not of all threads: one that an earlier test has left would look, too.
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep, strftime=time.strftime))
    followed = reports(run, watch=True)
    for step in (10, 11):
        said = data_of(next(followed).read_text())
        assert (said["runs"][0]["step"], said["watch"]) == (step, True)
    with pytest.raises(KeyboardInterrupt):
        next(followed)
    assert len(looks) == 3


RAISED: dict[str, dict[str, tuple[float, float]]] = {
    "entropy collapse": {"policy/entropy": (2.0, 0.49)},
    "length drift": {"rollout/length": (100.0, 151.0)},
    "repetition drift": {"samples/repetition": (0.1, 0.26)},
    "held-out reward falls": {"reward/mean": (0.1, 0.2), "eval/reward": (0.3, 0.29)},
    "dead groups": {"reward/signal": (0.9, 0.29)},
    "truncated answers": {"rollout/truncated": (0.2, 0.11)},
    "failed rewards": {"reward/failed": (0.0, 0.03)},
    "mismatch trend": {"mismatch/mean": (0.001, 0.0021)},
    "stale tokens": {"rollout/stale": (0.5, 0.31)},
}
"""Alarm -> metrics that raise it: the mean of the first fifth, and of the last."""
QUIET: dict[str, dict[str, tuple[float, float]]] = {
    "entropy collapse": {"policy/entropy": (2.0, 0.51)},
    "length drift": {"rollout/length": (100.0, 149.0)},
    "repetition drift": {"samples/repetition": (0.1, 0.24)},
    "held-out reward falls": {"reward/mean": (0.1, 0.2), "eval/reward": (0.3, 0.31)},
    "dead groups": {"reward/signal": (0.1, 0.31)},
    "truncated answers": {"rollout/truncated": (0.2, 0.09)},
    "failed rewards": {"reward/failed": (0.5, 0.01)},
    "mismatch trend": {"mismatch/mean": (0.0001, 0.0009)},
    "stale tokens": {"rollout/stale": (0.5, 0.29)},
}


@pytest.mark.parametrize(("table", "state"), [(RAISED, "raised"), (QUIET, "quiet")])
def test_alarms(table: Mapping[str, Mapping[str, tuple[float, float]]], state: str):
    """Of ten values the first two and the last two are compared; what is between them counts for nothing."""
    assert list(table) == [alarm.title for alarm in ALARMS]
    for title, metrics in table.items():
        series = {
            name: [(i, float(x)) for i, x in enumerate([begin - 0.001, begin + 0.001, *[50.0] * 6, end, end])]
            for name, (begin, end) in metrics.items()
        }
        judged = {alarm["title"]: alarm for alarm in alarms_of(series)}
        assert judged[title]["state"] == state, title
        assert all(
            f"{name} went from {ends[0]:.4g} to {ends[1]:.4g}" in judged[title]["seen"]
            for name, ends in metrics.items()
        )
        # Of too few values, or without one of its metrics, it says nothing.
        assert {alarm["state"] for alarm in alarms_of({name: x[:4] for name, x in series.items()})} == {"unknown"}


@pytest.mark.parametrize(("end", "state"), [(49.0, "raised"), (51.0, "quiet")])
def test_shorter_answers_raise_an_alarm_too(end: float, state: str):
    series = {"rollout/length": [(step, 100.0 if step < 5 else end) for step in range(10)]}
    assert {x["title"]: x["state"] for x in alarms_of(series)}["length drift"] == state


def test_repetition_is_measured_of_the_samples(tmp_path: Path):
    """`a b a b a b a` has 4 sequences of four words, two of them different: a half. `a b c` has none."""
    samples = [sample(step, 0, 0, completion="a b a b a b a" if step > 8 else "a b c") for step in range(1, 11)]
    facts = facts_of(write_run(tmp_path / "run", samples=samples))
    assert facts["curves"]["samples/repetition"] == [[i, 0.0] for i in range(1, 9)] + [[9, 0.5], [10, 0.5]]
    assert {x["title"]: x["state"] for x in facts["alarms"]}["repetition drift"] == "raised"


def test_remedies_name_keys_that_a_recipe_has():
    reference = (Path(__file__).parents[2] / "docs/recipe.md").read_text()
    keys = {
        key for alarm in ALARMS for key in re.findall(r"\b(?:algorithm|data|optimizer|rollout)\.(\w+)", alarm.remedy)
    }
    assert len(keys) > 8
    assert {key for key in keys if f"| `{key}` |" not in reference} == set()


@pytest.mark.slow  # where a browser is: pip install playwright, apt-get install chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser(tmp_path: Path, width: int):
    """At the width of a desk and of a phone: nothing is fetched, fails or sticks out, hostile text does nothing, every
    control has a name, and all is reached by keys."""
    browsers = pytest.importorskip("playwright.sync_api")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("there is no chromium")
    samples = [sample(i, 0, j, completion=HOSTILE, prompt=HOSTILE) for i in range(1, 4) for j in range(4)]
    run, other = (write_run(tmp_path / name, samples=samples) for name in ("run", "other"))
    (file,) = reports(run, other, tmp_path / "two.html")
    with browsers.sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"]).new_page(
            viewport={"width": width, "height": 900}
        )
        said, fetched = [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(file.as_uri())
        assert page.title() == "tunix report: run and other"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # A curve reads its values by keys, and a sample its tokens.
        page.locator("#curves svg").first.focus()
        page.keyboard.press("ArrowLeft")
        assert re.match(r"step 10: run: [\d.]+; other: [\d.]+$", page.locator("#curves output").first.inner_text())
        page.get_by_role("button", name="Show sample 2 of run: step 1, group 0").press("Enter")
        assert page.evaluate("document.activeElement.textContent") == "run: step 1, group 0"
        assert page.locator(".model").inner_text().startswith("</script><script>document.title")
        page.get_by_label("coloured by").select_option("mismatch")
        page.locator(".tokens").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.locator(".tokens + output").inner_text() == (
            'token 2, " b": advantage 0, mismatch 0.001, surprise 2, not trained'
        )
        page.locator("#samples .controls select").nth(1).select_option("failed rewards")
        assert page.locator("#samples output").first.inner_text() == "0 of the 24 samples in this page."
        page.locator("#samples .controls select").nth(1).select_option("all")
        page.locator("#samples .controls input").fill("ONERROR")
        assert page.locator("#samples output").first.inner_text() == "24 of the 24 samples in this page."
        nameless = page.evaluate(
            """[...document.querySelectorAll("input, select, button, svg, [role=region], [tabindex='0']")].filter((x) =>
               !(x.getAttribute("aria-label") || x.closest("label")?.textContent.trim() || x.textContent.trim()))
               .map((x) => x.outerHTML)"""
        )
        assert nameless == []
        assert page.title() == "tunix report: run and other"
        assert said == []
        assert fetched == [file.as_uri()]
