"""mini-swe-agent, as its command line runs it, mends a toy repository: its tests are the reward."""

import re
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.scripted_engine import Scripted
from tunix.data.config import DataConfig
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.rollout.environments.agents import PlayedEpisode
from tunix.rollout.environments.config import AgentConfig
from tunix.serving.agents import MODEL, AgentPlayer
from tunix.serving.app import tiny_source
from tunix.types import Sampling

pytestmark = pytest.mark.worlds
LENGTH = 32_768
STEPS = ("cat calc.py", "sed -i 's/a - b/a + b/' calc.py", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
"""What a policy does that has learned to mend it."""


@pytest.mark.parametrize("mends", [True, False])
def test_it_mends_a_repository(mends: bool, tmp_path: Path):
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (repository / "test_calc.py").write_text("from calc import add\n\nassert add(2, 3) == 5\n")
    source = tiny_source()
    source = replace(source, decoder=replace(source.decoder, max_positions=LENGTH))

    def answer(prompt: str) -> str:
        turn = len(re.findall(r"<\|im_start\|>assistant", prompt)) - 1
        step = "true" if turn == 1 and not mends else STEPS[turn]
        return f"THOUGHT: on with it.\n\n```mswea_bash_command\n{step}\n```"

    mini = (
        f"{Path(sys.executable).with_name('mini')} -y --exit-immediately --agent-class default -l 0 -m openai/{MODEL} "
        "--model-class litellm_textbased -c mini_textbased.yaml -c model.model_kwargs.temperature=1.0"
    )
    # A file: its output and its memory of other runs stay in the folder of the episode.
    settings = "MSWEA_CONFIGURED=true MSWEA_GLOBAL_CONFIG_DIR=$PWD/.mini MSWEA_COST_TRACKING=ignore_errors"
    script = (
        f'cp -r {repository}/. . && env {settings} LITELLM_LOCAL_MODEL_COST_MAP=True {mini} -o run.json -t "$0" '
        f"&& {sys.executable} test_calc.py"
    )
    config = AgentConfig(command=("sh", "-c", script, "{issue}"), deadline=120)
    inference = InferenceModel(InferenceOptions("tiny"), source)
    player = AgentPlayer(config, source, DataConfig(train="rows.jsonl", max_length=LENGTH), 1.0, None)
    with closing(player):
        sampling = Sampling(max_tokens=4096, stop_ids=source.stop_ids)
        rows = [{"issue": "add subtracts: make test_calc.py pass"}]
        batch = player.play(Scripted(inference, answer), rows, sampling, 0, [0])
        assert batch.scores == [float(mends)], batch.logged
        (episode,) = batch.episodes
        assert isinstance(episode, PlayedEpisode)
        assert len(episode.completion.turns) == 3
        assert episode.completion.restarts == ()  # a growing conversation is one transcript
        assert ("a + b" in (episode.folder / "calc.py").read_text()) == mends
        batch.finish([episode.completion])
    assert not episode.folder.exists()
    assert "a - b" in (repository / "calc.py").read_text()
