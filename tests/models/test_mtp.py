"""The head of Qwen 3.5 that drafts tokens: its math is transformers' layer's, and a folder keeps it bit for bit."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.hf.test_model_folder import rewrite
from tests.models.test_qwen_vision import SEQUENCES
from tests.mtp import (
    DENSE,
    MIXTURE,
    by_expert,
    few,
    folder_with_head,
    load_seeing,
    load_with_head,
    seeing_folder_with_head,
)
from tests.tiny_models import CASES, reference_folder, tokens
from tunix.config import ModelConfig
from tunix.data.packing import pack
from tunix.errors import UserError
from tunix.hf.model_folder import save_folder
from tunix.hf.source import pretrained
from tunix.models.attention.inputs import Segments
from tunix.models.config import MTP
from tunix.models.families.table import FAMILIES, tensors_of
from tunix.models.layers import rope_tables
from tunix.models.model import embedded
from tunix.recipe.recipe import Recipe
from tunix.trainer.step import hidden_of

pytestmark = pytest.mark.models


@pytest.mark.parametrize(("name", "stacked"), [(DENSE, False), (MIXTURE, False), (MIXTURE, True)])
def test_the_head_is_transformers_layer_behind_two_norms_and_a_projection(name, stacked, tmp_path):
    reference = folder_with_head(tmp_path, name, stacked)
    model, params = load_with_head(tmp_path)
    (ids,) = tokens(0, 1, 24)
    states = reference.states(ids)
    expected = reference.head(states[:-1], ids)
    places = jnp.arange(23)[None]
    ones = jnp.ones((1, 23), jnp.int32)
    kind = model.config.cached_kinds[-1]
    rope = rope_tables(places, kind.rope, kind.head_dim)
    x = embedded(model.config, params["embed/w"], jnp.asarray(ids[None, 1:]), model.dtype)
    hidden, _ = model.forward(params, jnp.asarray(ids[None]), jnp.arange(24)[None], jnp.ones((1, 24), jnp.int32))
    ours, _ = model.draft_head(params)(x, hidden[:, :-1], rope, Segments(ones, places))
    np.testing.assert_allclose(ours[0], expected, atol=2e-5)


@pytest.mark.parametrize("case", [DENSE, MIXTURE])
def test_what_it_trains_on_is_the_same_packed_and_with_a_shared_prompt(case, tmp_path):
    """Rows of two sequences, and of a prompt with two completions, each of which repeats the prompt's last token: the
    states from which token t is drafted are those of the sequence alone, from its third token on."""
    reference = folder_with_head(tmp_path, case)
    model, params = load_with_head(tmp_path)
    whole, branch = tokens(0, 1, 24)[0], tokens(1, 1, 8)[0]
    prompt, first = whole[:12], whole[12:20]
    rows = {
        "packed": ([whole, branch], [(1, 0, 1), (2, 0, 2)]),
        "branched": ([prompt, first, branch], [(1, 0, 1), (2, 12, 1), (3, 12, 1)]),
    }
    alone = {
        "packed": [whole, branch],
        "branched": [prompt, np.concatenate([prompt, first]), np.concatenate([prompt, branch])],
    }
    for name, (parts, segments) in rows.items():
        ids = jnp.asarray(np.concatenate(parts)[None])
        places, segment, parents = (
            jnp.asarray(np.concatenate([np.full(len(part), x) for part, x in zip(parts, of, strict=True)])[None])
            for of in zip(*((begin, number, above) for number, begin, above in segments), strict=True)
        )
        places += jnp.asarray(np.concatenate([np.arange(len(part)) for part in parts])[None])
        parents = parents if name == "branched" else None
        hidden, _ = model.forward(params, ids, places, segment, parents=parents)
        found = np.asarray(model.draft_states(params, hidden, ids, places, segment, parents))[0]
        start = 0
        for part, sequence in zip(parts, alone[name], strict=True):
            expected = reference.head(reference.states(sequence)[:-1], sequence)[-(len(part) - 1) :]
            np.testing.assert_allclose(found[start + 1 : start + len(part)], expected, atol=2e-5)
            start += len(part)


def test_what_it_trains_on_sees_pictures(tmp_path):
    """A row of three sequences, two of them with pictures: beside the state before it, the head reads of a picture's
    token what the tower has made of it, and turns each state to its own token's place."""
    reference = seeing_folder_with_head(tmp_path)
    model, params = load_seeing(tmp_path)
    sequences = [replace(sequence, tokens=few(sequence.tokens)) for sequence in SEQUENCES]
    batch = pack(sequences, 3, 100, pictures=4)
    row = map(jnp.asarray, (batch.tokens, batch.positions, batch.segment_ids))
    ours = model.draft_states(params, hidden_of(model, params, batch), *row, pictures=batch.pictures)
    for number, reference.prompt in enumerate(sequences):
        ids = reference.prompt.tokens
        at = (batch.sequence_ids == number) & (batch.segment_ids > 0)
        expected = reference.head(reference.states(ids)[:-1], ids)
        np.testing.assert_allclose(np.asarray(ours)[at][1:], expected, atol=2e-5)


@pytest.mark.parametrize(("name", "stacked"), [(DENSE, False), (MIXTURE, False), (MIXTURE, True)])
def test_a_folder_keeps_the_head_bit_for_bit(name, stacked, tmp_path):
    reference = folder_with_head(tmp_path / "base", name, stacked)
    rewrite(tmp_path / "base", lambda kept: {k: x.bfloat16() if k == "mtp.fc.weight" else x for k, x in kept.items()})
    model, params = load_with_head(tmp_path / "base")
    table, ours = tensors_of(model.config), dict[str, np.ndarray]()
    for name, x in ((name, np.asarray(x)) for name, x in params.items() if name.startswith(MTP)):
        keys, parts = table[name].keys(None, x.shape), x if table[name].by_expert else [x]
        ours |= {key: table[name].write(part) for key, part in zip(keys, parts, strict=True)}
    stored = load_file(tmp_path / "base" / "model.safetensors")
    apart = by_expert({name: stored[name] for name in reference.tensors})
    assert ours.keys() == apart.keys()
    for name, x in ours.items():
        np.testing.assert_array_equal(x, apart[name].float().numpy())
    save_folder(tmp_path / "out", model.config, params, source=None, dtype="float32", base=tmp_path / "base")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == stored.keys()
    for name in reference.tensors:
        assert written[name].dtype == stored[name].dtype
        assert torch.equal(written[name], stored[name])
    trained = replace(model.config, mtp="train")  # written from our weights: a mixture's expert by expert, as published
    save_folder(tmp_path / "trained", trained, params, source=None, dtype="float32", base=tmp_path / "base")
    written = load_file(tmp_path / "trained" / "model.safetensors")
    assert {name for name in written if name.startswith("mtp.")} == apart.keys()
    assert all(torch.equal(written[name], apart[name].float()) for name in apart)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["mtp_num_hidden_layers"] == 1


@pytest.mark.parametrize(
    ("fields", "with_head", "message"),
    [
        ({}, False, r"model.mtp \(--mtp\): .*config.json: the files beside it hold no mtp.* tensor: leave it out"),
        ({"mtp_num_hidden_layers": 0}, True, "mtp_num_hidden_layers = 0, and heads of one layer"),
        ({"mtp_num_hidden_layers": 2}, True, "mtp_num_hidden_layers = 2, and heads of one layer"),
        ({"mtp_use_dedicated_embeddings": True}, True, "mtp_use_dedicated_embeddings = True"),
    ],
)
def test_a_folder_without_such_a_head_is_refused_before_weights_are_read(
    fields, with_head, message, tmp_path, monkeypatch
):
    folder_with_head(tmp_path)
    if not with_head:
        rewrite(tmp_path, lambda kept: {name: x for name, x in kept.items() if not name.startswith("mtp.")})
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | fields))
    monkeypatch.setattr("tunix.hf.safetensors_io.Stored.read", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(UserError, match=message) as refused:
        pretrained(str(tmp_path), mtp="freeze")
    assert "\n" not in str(refused.value)
    pretrained(str(tmp_path))  # without it, the folder is as good as before


def test_other_families_have_none(tmp_path):
    reference_folder(CASES["llama-multiquery-linear-wide-heads"], tmp_path)
    with pytest.raises(UserError, match="model_type = 'llama' has no head that is read here"):
        pretrained(str(tmp_path), mtp="freeze")
    assert [name for name, family in FAMILIES.items() if family.mtp] == ["qwen3_5", "qwen3_5_moe"]


@pytest.mark.parametrize(
    ("model", "rollout", "data", "message"),
    [
        ({}, {}, {}, "model.mtp: freeze loads a head that makes draft tokens, and rollout.speculate asks for none"),
        ({"mtp": "thaw"}, {"speculate": 1}, {}, "model.mtp: .*'freeze'.*'train'"),
        ({"mtp": "train"}, {}, {"adapter": 4}, "model.mtp: train trains weights of the base, which an adapter leaves"),
    ],
)
def test_what_means_nothing_is_refused_by_name(model, rollout, data, message):
    adapter = {"adapter": {"rank": data.pop("adapter")}} if "adapter" in data else {}
    sections = adapter | {
        "model": {"path": "Qwen/Qwen3.5-4B", "mtp": "freeze", **model},
        "data": {"train": "tunix.data.sorting:rows", "max_length": 64, **data},
        "algorithm": {"name": "grpo"},
        "reward": {"functions": ["exact_match"]},
        "rollout": rollout,
        "output": "runs/x",
    }
    with pytest.raises(UserError, match=message):
        Recipe.build(sections)


def test_a_random_model_has_none():
    with pytest.raises(ValueError, match="mtp: freeze drafts with a folder's head, and `init: random` reads none"):
        ModelConfig(init="random", family="qwen3_5", mtp="freeze")
