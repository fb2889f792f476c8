"""MaxText's checkpoints against `by_hand`, which has the layout of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.fake_store import environment, served
from tests.interop import by_hand
from tests.marks import slow
from tunix.errors import UserError
from tunix.hf.model_folder import named_tensors
from tunix.interop.maxtext import export_maxtext, import_maxtext

pytestmark = pytest.mark.models

ROOT = Path(__file__).parents[2]
EVERY = [
    *[(family, True) for family in by_hand.FAMILIES if family != "gemma3"],
    *slow([("gemma3", True)]),
    *[(family, False) for family in list(by_hand.FAMILIES)[:1]],
    *slow((family, False) for family in list(by_hand.FAMILIES)[1:]),
]

STRETCHED = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}


def same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


@pytest.mark.parametrize(("family", "scanned"), EVERY)
def test_there_and_back_to_the_bit(family, scanned, tmp_path):
    """16 dimensions in all and in a head: their roots are powers of two, so nothing is rounded on either way."""
    config = by_hand.fields(family) if scanned else by_hand.fields(family, num_hidden_layers=2)
    weights = by_hand.tensors(config)
    expected = by_hand.there(config, weights, scanned)
    here = by_hand.folder(tmp_path / "here", config, weights)
    export_maxtext(here, tmp_path / "exported", scanned=scanned)
    same(by_hand.arrays_of(tmp_path / "exported" / "0" / "items"), expected)
    items = by_hand.checkpoint(tmp_path / "there", expected)
    import_maxtext(items, tmp_path / "imported", like=here)
    same(load_file(tmp_path / "imported" / "model.safetensors"), weights)
    # What was exported says itself what it is.
    import_maxtext(tmp_path / "exported", tmp_path / "again")
    same(load_file(tmp_path / "again" / "model.safetensors"), weights)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("family", by_hand.FAMILIES)
def test_bfloat16_comes_back_where_roots_are_not_exact(family, tmp_path):
    scores = {"query_pre_attn_scalar": 12} if family.startswith("gemma") else {}
    config = by_hand.fields(family, head_dim=12, hidden_size=20, **scores)
    weights = by_hand.tensors(config, ml_dtypes.bfloat16)
    here = by_hand.folder(tmp_path / "here", config, weights)
    export_maxtext(here, tmp_path / "exported")
    same(by_hand.arrays_of(tmp_path / "exported" / "0" / "items"), by_hand.there(config, weights, True))
    import_maxtext(tmp_path / "exported", tmp_path / "back", dtype="bfloat16")
    same(load_file(tmp_path / "back" / "model.safetensors"), weights)


def test_a_checkpoint_in_bfloat16_stays_in_it(tmp_path):
    config = by_hand.fields("qwen3")
    weights = by_hand.tensors(config, ml_dtypes.bfloat16)
    here = by_hand.folder(tmp_path / "here", config, weights)
    items = by_hand.checkpoint(tmp_path / "there", by_hand.there(config, weights, True), ml_dtypes.bfloat16)
    import_maxtext(items.parents[1], tmp_path / "back", like=here)
    same(load_file(tmp_path / "back" / "model.safetensors"), weights)


@pytest.mark.parametrize(("family", "ours", "theirs"), [("gemma2", 256_000, 256_128), ("gemma3", 262_208, 262_144)])
def test_vocabularies_of_another_length(family, ours, theirs, tmp_path):
    """MaxText's Gemma 2 has 128 rows more, which are zeros, and its Gemma 3 lacks the last 64."""
    layers = {"gemma2": 2, "gemma3": 1}[family]
    config = by_hand.fields(family, vocab_size=ours, num_hidden_layers=layers)
    weights = by_hand.tensors(config)
    here = by_hand.folder(tmp_path / "here", config, weights)
    settings = export_maxtext(here, tmp_path / "exported")
    found = by_hand.arrays_of(tmp_path / "exported" / "0" / "items")["token_embedder/embedding"]
    embedding = weights["model.embed_tokens.weight"]
    shared = min(ours, theirs)
    assert found.shape == (theirs, 16)
    np.testing.assert_array_equal(found[:shared], embedding[:shared] * np.float32(4))
    assert not found[shared:].any()
    assert f"vocab_size={theirs} logits_via_embedding=true normalize_embedding_logits=true" in settings
    import_maxtext(tmp_path / "exported", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")["model.embed_tokens.weight"]
    assert back.shape == embedding.shape
    np.testing.assert_array_equal(back[:shared], embedding[:shared])
    assert not back[shared:].any()


def test_pictures_are_left_out(tmp_path):
    config = by_hand.fields("gemma3", num_hidden_layers=2)
    weights = by_hand.tensors(config)
    arrays = by_hand.there(config, weights, False)
    arrays["vision_encoder/Gemma3VisionEncoderLayer_0/embedding/bias"] = np.zeros(3)
    items = by_hand.checkpoint(tmp_path / "there", arrays)
    import_maxtext(items, tmp_path / "back", like=by_hand.folder(tmp_path / "here", config, weights))
    same(load_file(tmp_path / "back" / "model.safetensors"), weights)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda a: a.pop("decoder/layers/mlp/wo/kernel"),
            ["1 tensor(s)", "missing: decoder/layers/mlp/wo/kernel"],
        ),
        (lambda a: a.update({"decoder/layers/mlp/bias": np.zeros(2)}), ["no place", "decoder/layers/mlp/bias"]),
        (
            lambda a: a.update({"decoder/decoder_norm/scale": np.zeros(9)}),
            ["decoder/decoder_norm/scale expected (16,), found (9,)"],
        ),
        (
            lambda a: a.update({"decoder/layers/mlp/wo/kernel": np.zeros((24, 2, 16))}),
            ["decoder/layers/mlp/wo/kernel expected (24, 3, 16), found (24, 2, 16)"],
        ),
        (lambda a: a.update({"token_embedder/embedding": np.zeros((41, 16))}), ["expected (40, 16), found (41, 16)"]),
    ],
)
def test_arrays_that_do_not_fit_are_named(change, words, tmp_path):
    config = by_hand.fields("llama")
    weights = by_hand.tensors(config)
    arrays = by_hand.there(config, weights, True)
    change(arrays)
    items = by_hand.checkpoint(tmp_path / "there", arrays)
    here = by_hand.folder(tmp_path / "here", config, weights)
    with pytest.raises(UserError) as caught:
        import_maxtext(items, tmp_path / "out", like=here)
    for word in [*words, str(here)]:
        assert word in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_arrays_of_no_weights_dtype_are_named(tmp_path):
    config = by_hand.fields("llama")
    weights = by_hand.tensors(config)
    items = by_hand.checkpoint(tmp_path / "there", by_hand.there(config, weights, True), np.int8)
    with pytest.raises(UserError, match="are stored as int8: token_embedder/embedding"):
        import_maxtext(items, tmp_path / "out", like=by_hand.folder(tmp_path / "here", config, weights))


def damaged(path: Path) -> Path:
    config = by_hand.fields("llama")
    items = by_hand.checkpoint(path, by_hand.there(config, by_hand.tensors(config), True))
    for file in items.rglob("d/*"):
        file.write_bytes(file.read_bytes()[:100])
    return items


def empty(path: Path) -> Path:
    path.mkdir()
    return path


def of_others(path: Path) -> Path:
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as writer:
        writer.save(path, {"weights": {"w": np.zeros(3)}})
    return path


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda path: path, "there is no such folder"),
        (empty, "holds no checkpoint of MaxText"),
        (of_others, "holds weights, and no params/params/"),
        (damaged, "cannot be read|no whole Orbax checkpoint"),
    ],
)
def test_no_checkpoint(made, words, tmp_path):
    config = by_hand.fields("llama")
    here = by_hand.folder(tmp_path / "here", config, by_hand.tensors(config))
    source = made(tmp_path / "source")
    with pytest.raises(UserError, match=words):
        import_maxtext(source, tmp_path / "out", like=here)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "gemma", "num_hidden_layers": 1}, "gemma has no table for MaxText"),
        (by_hand.fields("gemma2", num_hidden_layers=3), "num_hidden_layers = 3 is odd"),
        (by_hand.fields("gemma3", layer_types=["full_attention"] * 14), "layer_types differ"),
        (by_hand.fields("gemma3", tie_word_embeddings=False), "no place for head/w"),
        (by_hand.fields("gemma3", query_pre_attn_scalar=12), "query_pre_attn_scalar is neither head_dim = 16 nor"),
        (by_hand.fields("gemma2", rms_norm_eps=1e-5), "rms_norm_eps = 1e-05"),
        (by_hand.fields("llama", rope_parameters={**by_hand.LLAMA31, "factor": 32.0}), "the factors 32, 1 and 4"),
        (by_hand.fields("qwen3", rope_parameters=by_hand.LLAMA31), "a rope of the type llama3"),
        (by_hand.fields("qwen2", rope_parameters={"rope_theta": 1000.5}), r"rope_theta = 1000\.5"),
        (by_hand.fields("gemma3", rope_parameters=STRETCHED), "the rope of its local layers is stretched"),
    ],
)
def test_models_without_a_place_there(fields, words, tmp_path):
    fields = by_hand.FIELDS | fields
    here = by_hand.folder(tmp_path / "here", fields, {"model.embed_tokens.weight": np.zeros((40, 16), np.float32)})
    with pytest.raises(UserError, match=words):
        export_maxtext(here, tmp_path / "out")
    with pytest.raises(UserError, match=words):
        import_maxtext(here, tmp_path / "out")


def test_nothing_is_overwritten_and_a_description_is_asked_for(tmp_path):
    config = by_hand.fields("llama")
    weights = by_hand.tensors(config)
    here = by_hand.folder(tmp_path / "here", config, weights)
    items = by_hand.checkpoint(tmp_path / "there", by_hand.there(config, weights, True))
    with pytest.raises(UserError, match="nothing is overwritten"):
        export_maxtext(here, tmp_path / "there")
    with pytest.raises(UserError, match="nothing is overwritten"):
        import_maxtext(items, here, like=here)
    with pytest.raises(UserError, match="--like"):
        import_maxtext(items, tmp_path / "out")
    del weights["model.layers.1.mlp.up_proj.weight"]
    lacking = by_hand.folder(tmp_path / "lacking", config, weights)
    with pytest.raises(UserError, match=r"missing: model\.layers\.1\.mlp\.up_proj"):
        export_maxtext(lacking, tmp_path / "out")
    assert named_tensors(here, "llama")  # as it was
    assert not list(tmp_path.glob("out*"))


@pytest.mark.slow
def test_a_checkpoint_on_an_object_store(tmp_path):
    """Steps in a bucket, of which the last is read: by a process that finds a local folder in the store's place."""
    config = by_hand.fields("qwen3")
    here = by_hand.folder(tmp_path / "here", config, by_hand.tensors(config))
    root = tmp_path / "buckets"
    root.mkdir()
    for step, seed in (("90", 0), ("100", 1)):
        items = by_hand.checkpoint(
            tmp_path / step, by_hand.there(config, by_hand.tensors(config, seed=seed), scanned=True)
        )
        for file in (file for file in items.rglob("*") if file.is_file()):
            key = f"bucket/run/checkpoints/{step}/items/{file.relative_to(items)}"
            (root / quote(key, safe="")).write_bytes(file.read_bytes())
    words = ["import", "maxtext:gs://bucket/run/checkpoints", str(tmp_path / "back"), "--like", str(here)]
    call = [sys.executable, "-m", "tests.fake_store", str(root), *words]
    with served(root) as address:
        env = {**os.environ, **environment(address)}
        done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    same(load_file(tmp_path / "back" / "model.safetensors"), by_hand.tensors(config, seed=1))
