"""How many answers share a row: the fewest operations, by arithmetic."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.trainers import PLAIN
from tunix.algorithms.dpo.algorithm import DPO
from tunix.algorithms.grpo.algorithm import GRPO
from tunix.config import MeshConfig
from tunix.data.packing import pack, row_length
from tunix.hf.source import Source
from tunix.mesh import build_mesh
from tunix.recipe.recipe import Recipe
from tunix.run.setup import Setup
from tunix.trainer.microbatches import Microbatcher, answers_per_row, rows_per_microbatch
from tunix.types import Sequence

BIG = replace(PLAIN, d_model=1024, num_heads=8, num_kv_heads=8, head_dim=128, ffn=4096)
"""A layer has 1024 x 1024 x 4 + 3 x 1024 x 4096 = 16.8M weights; attention costs 8 x 1024 for each token of a row."""


def one_device():
    return build_mesh(MeshConfig(), jax.devices()[:1])


def setup(**changes) -> Setup:
    """A run of GRPO on one device; the changes are of its recipe."""
    recipe = Recipe.model_validate(
        {
            "output": "runs/x",
            "model": {"path": "folder"},
            "data": {"train": "rows.jsonl", "max_length": 128, "completion_length": 64, **changes.pop("data", {})},
            "algorithm": {"name": "grpo", "group_size": 8, **changes.pop("algorithm", {})},
            "reward": {"functions": ["exact_match"]},
            "batch_size": 4,
            **changes,
        }
    )
    return Setup(recipe, Source(BIG, None), GRPO(GRPO.Config()), one_device())


def test_transcripts_share_what_they_begin_with_where_turns_are_prompted_by_a_template():
    """Kernels are chosen for rows whose segments see others, though no answers share a row."""
    played = {"environment": "guess.py:Guess"}
    appended, template = setup(rollout=played), setup(rollout={**played, "history": "template"})
    agent = setup(rollout={"environment": {"name": "agent", "agent": {"command": ["python"], "reward": "file"}}})
    assert [x.microbatcher.trie for x in (appended, template, agent)] == [False, True, True]
    assert [x.branched for x in (appended, template, agent)] == [False, True, True]
    row = Sequence(np.arange(1, 9, dtype=np.int32), np.arange(8) > 0)
    for trie in (False, True):
        placed = Microbatcher(1, one_device()).place(pack([row], 1, 8, trie=trie))
        assert placed.at(0).interleaved == trie


def test_tokens_of_a_row():
    # 64 + 64; two of them are 63 + 65 + 65, eight 63 + 8 x 65.
    assert [row_length(k, 128, 64) for k in (1, 2, 8)] == [128, 193, 583]
    assert row_length(2, 128, None) == 256
    assert row_length(3, 128, 128) == 3 * 128


@pytest.mark.parametrize(
    ("group", "longest", "completion", "together"),
    [
        # Tokens an answer: 128, 96.5, 80.75, 72.9 for 1, 2, 4, 8; attention's share is small.
        (8, 128, 64, 8),
        # No divisor but 7 and 1.
        (7, 128, 64, 7),
        # A prompt of one token is none to share: its only token predicts the first one of each.
        (4, 65, 64, 1),
        # A prompt of 1000 and answers of 500: two would take 2001 tokens, of the 2048 that fill a CPU; four do not fit.
        (4, 1500, 500, 2),
        (1, 128, 64, 1),
    ],
)
def test_the_fewest_operations(group: int, longest: int, completion: int, together: int):
    assert answers_per_row(one_device(), BIG, group, 4 * group, longest, completion, None) == together


def test_attention_over_a_long_row_counts():
    """The shape of docs/log.md, where rows of four were the fastest."""
    small = replace(PLAIN, d_model=256, num_heads=4, num_kv_heads=2, head_dim=64, ffn=1024)
    assert answers_per_row(one_device(), small, 8, 16, 128, 64, None) == 4


def test_a_mesh_is_not_left_without_rows():
    """32 answers: in rows of eight only four of eight devices would work; in rows of four all of them do."""
    mesh = build_mesh(MeshConfig(data=8), jax.devices()[:8])
    assert answers_per_row(mesh, BIG, 8, 32, 128, 64, None) == 4


def test_a_recipe():
    plain = setup()
    assert plain.answers_together == 8
    assert (plain.length, plain.microbatcher.unit) == (plain.sampled_row_length(8), 8) == (583, 8)
    # A row of eight is no more than the sequences of a pass.
    small = setup(micro_batch_size=4)
    assert small.answers_together == 4
    assert small.microbatcher.rows == 1
    assert setup(data={"packing": False}).answers_together == 1
    # An environment says its own first words, and what it answers belongs to the completion.
    played = setup(rollout={"environment": {"name": "guess_number"}}, reward=None)
    assert played.answers_together == 1
    assert played.sampled_row_length(2) == 256


@pytest.mark.parametrize(
    ("batch", "length", "packing", "rows"),
    [
        # 2048 tokens fill a CPU: 25 rows of 79, a quarter of them 6; of 16 rows that is two passes of 8.
        (16, 79, True, 8),
        # A sixteenth of many is enough, until the device is full.
        (160, 79, True, 10),
        (1024, 79, True, 25),
        # Half of a few; one, where one fills a quarter.
        (8, 64, True, 4),
        (4, 512, True, 1),
        (1, 64, True, 1),
        # Unpacked there is nothing to save.
        (16, 79, False, 16),
        (160, 79, False, 25),
    ],
)
def test_rows_of_a_pass(batch: int, length: int, packing: bool, rows: int):
    assert rows_per_microbatch(one_device(), batch, None, length, packing) == rows


def test_a_batch_whose_sequences_share_rows_has_no_more_passes_than_it_needs():
    """Four answers in two rows, in passes of one row: two, of which both are filled."""
    prompt, answers = [5, 6, 7], ([1, 2], [3], [4, 4, 4], [9])
    rows = [Sequence(np.array(prompt + one), np.array([0] * 3 + [1] * len(one)).astype(bool)) for one in answers]
    length = row_length(2, 6, 3)
    batch = pack(rows, 4, length, together=2)
    assert [Microbatcher(1, one_device(), unit).place(batch).rows["tokens"].shape[0] for unit in (1, 2)] == [4, 2]


def test_pairs_that_are_drawn_fit_where_nothing_is_shared():
    """Two sequences of 128 tokens behind each other, where a shared prompt would leave 193."""
    assert setup().sampled_row_length(2) == 193
    assert setup(data={"packing": False}).sampled_row_length(2) == 256


def test_pairs_are_no_group():
    assert DPO(DPO.Config(online=True)).group == 1


@pytest.mark.parametrize(
    ("dtype", "rollout", "tolerance"),
    [
        ("float32", {}, 1e-3),
        ("bfloat16", {}, 0.25),
        # A rounded cache counts where it rounds more than the model does.
        ("float32", {"cache_dtype": "int8"}, 1.0),
        ("bfloat16", {"cache_dtype": "float32"}, 0.25),
        ("float32", {"cache_dtype": "int8", "replay": {"cache": True}}, 1e-3),
        ("float32", {"engine": "vllm", "servers": ["http://host:8000"]}, 0.01),
        ("bfloat16", {"mismatch_tolerance": 0.5}, 0.5),
    ],
)
def test_what_the_sampler_may_differ_by(dtype: str, rollout: dict, tolerance: float):
    assert setup(model={"path": "folder", "dtype": dtype}, rollout=rollout).tolerance == tolerance
