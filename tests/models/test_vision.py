"""Gemma 3 with pictures against transformers, packed against separate rows, and its folders to the byte.

The pictures of a row are of 24 pixels a side: 36 patches, of which four each make the 9 soft tokens of a picture. The
window of the local layers is 6, so that a picture is longer.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from tests.marks import slow
from tests.tiny_models import GEMMA3_ROPE, SIZES, TYPES, one_device, randomise
from tunix.config import MeshConfig
from tunix.data.packing import pack
from tunix.errors import UserError
from tunix.hf.model_folder import load_params, save_folder
from tunix.hf.source import read_folder
from tunix.mesh import build_mesh
from tunix.models.attention.attend import described, implementation, spec_of
from tunix.models.attention.inputs import Segments
from tunix.models.families.table import from_hf
from tunix.models.model import Model, Params
from tunix.trainer.microbatches import Microbatcher
from tunix.trainer.step import hidden_of
from tunix.types import Batch, Pictures, Sequence

pytestmark = pytest.mark.models

SOFT, BEGIN, END, TOKENS, SIDE = 92, 90, 91, 9, 24
TEXT = {"sliding_window": 6, "layer_types": TYPES, "rope_parameters": GEMMA3_ROPE, "query_pre_attn_scalar": 24}
TOWER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "image_size": SIDE,
    "patch_size": 4,
    "vision_use_head": False,
}


def reference(folder: Path, **text: Any) -> Gemma3ForConditionalGeneration:
    """A random multimodal model, saved in the folder."""
    torch.manual_seed(0)
    config = Gemma3Config(
        text_config={**SIZES, "pad_token_id": 0, **TEXT, **text},
        vision_config=TOWER,
        mm_tokens_per_image=TOKENS,
        boi_token_index=BEGIN,
        eoi_token_index=END,
        image_token_index=SOFT,
    )
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Gemma3ForConditionalGeneration]:
    folder = tmp_path_factory.mktemp("gemma3")
    return folder, reference(folder)


def load(folder: Path, attention: str = "auto") -> tuple[Model, Params]:
    model = Model(read_folder(folder, pictures=True), attention=attention)
    return model, load_params(model, folder, dict.fromkeys(model.shapes, "float32"), one_device())


def sequence(seed: int, length: int, *at: int) -> Sequence:
    """Random text with pictures whose first soft tokens are at these places."""
    random = np.random.default_rng(seed)
    ids = random.integers(3, 89, length).astype(np.int32)
    for place in at:
        ids[place - 1], ids[place : place + TOKENS], ids[place + TOKENS] = BEGIN, SOFT, END
    soft = ids == SOFT
    return Sequence(ids, ~soft, pictures=seen(random.integers(0, 256, (len(at), 36, 4, 4, 3)).astype(np.uint8), ids))


def seen(pixels: np.ndarray, ids: np.ndarray) -> Pictures:
    """Pictures of these patches, each of 3 x 3 soft tokens, among the tokens `[T]` of a sequence."""
    soft = ids == SOFT
    grids = np.full((len(pixels), 2), 3, np.int32)
    return Pictures(pixels, grids, np.where(soft, np.cumsum(soft), 0).astype(np.int32))


def whole(pixels: np.ndarray) -> torch.Tensor:
    """The pictures of patches, as transformers' processor would hand them to the model."""
    rows = pixels.reshape(-1, 6, 6, 4, 4, 3).transpose(0, 5, 1, 3, 2, 4).reshape(-1, 3, SIDE, SIDE)
    return (torch.from_numpy(rows.astype(np.float32)) / 255 - 0.5) / 0.5


SEQUENCES = (sequence(0, 40, 6, 21), sequence(1, 25), sequence(2, 30, 3))


def their_logits(model: Gemma3ForConditionalGeneration, one: Sequence) -> torch.Tensor:
    ids = torch.from_numpy(one.tokens).long()[None]
    given = {"pixel_values": whole(one.pictures.pixels)} if one.pictures.number else {}
    return model(input_ids=ids, token_type_ids=(ids == SOFT).long(), **given).logits[0]


def loss_and_gradients(model: Model, params: Params, batch: Batch) -> tuple[jax.Array, Params]:
    """The summed negative log-prob of the text."""

    def loss(params: Params) -> jax.Array:
        hidden = hidden_of(model, params, batch)
        read = map(jnp.asarray, (batch.tokens, batch.positions, batch.loss_mask))
        return -model.logprobs_of(params, hidden, *read)[0].sum()

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize("attention", ["auto", "chunked"])
def test_packed_logits_equal_transformers_logits_of_each_sequence(made, attention, monkeypatch):
    """One row of three sequences, with room for one picture more than there are."""
    monkeypatch.setattr("tunix.models.attention.chunked.BLOCK", 16)
    # The first picture's first token is the last of its block, and sees all of it.
    monkeypatch.setattr("tunix.models.attention.einsum.BLOCK_Q", 7)
    monkeypatch.setattr("tunix.models.attention.einsum.MOST_BLOCKS", 100)
    model, params = load(made[0], attention)
    batch = pack(SEQUENCES, 3, 100, pictures=4)
    assert batch.tokens.shape == (1, 100)
    logits = jax.jit(lambda params: model.logits(params, hidden_of(model, params, batch)))(params)
    for number, one in enumerate(SEQUENCES):
        with torch.no_grad():
            theirs = their_logits(made[1], one).numpy()
        here = (batch.sequence_ids == number) & (batch.segment_ids > 0)
        np.testing.assert_allclose(np.asarray(logits)[here], theirs, atol=1e-4)


def test_gradients_equal_those_of_transformers(made):
    folder, theirs = made
    model, params = load(folder)
    _, ours = loss_and_gradients(model, params, pack(SEQUENCES, 3, 100, pictures=4))
    theirs.zero_grad()
    for one in SEQUENCES:
        targets = torch.from_numpy(np.where(one.loss_mask, one.tokens, -100)).long()[1:]
        torch.nn.functional.cross_entropy(their_logits(theirs, one)[:-1], targets, reduction="sum").backward()
    inner = {key: weight.grad.numpy() for key, weight in theirs.model.language_model.named_parameters()}
    pairs = {"embed/w": inner["embed_tokens.weight"], "norm/w": inner["norm.weight"]}
    for name, key in (("pre_attn_norm", "input_layernorm"), ("q_norm", "self_attn.q_norm")):
        pairs[f"layers/{name}/w"] = np.stack([inner[f"layers.{layer}.{key}.weight"] for layer in range(3)])
    down = np.stack([inner[f"layers.{layer}.mlp.down_proj.weight"].T for layer in range(3)])
    for name, grad in {**pairs, "layers/down/w": down}.items():
        # transformers gives the padding's embedding no gradient.
        off = np.linalg.norm(np.asarray(ours[name]) - grad) / np.linalg.norm(grad)
        assert off < 1e-3, (name, off)
    assert not any(np.any(grad) for name, grad in ours.items() if name.startswith("vision/")), "the tower is frozen"


def test_packed_rows_equal_separate_rows(made):
    """Row by row, in another order, and in a row without any picture beside rows that have some."""
    model, params = load(made[0])
    together, packed = loss_and_gradients(model, params, pack(SEQUENCES, 3, 100, pictures=3))
    apart, separate = loss_and_gradients(model, params, pack(SEQUENCES, 3, 100, packing=False, pictures=3))
    np.testing.assert_allclose(together, apart, rtol=1e-5)
    for name in params:
        scale = np.abs(separate[name]).max()
        np.testing.assert_allclose(packed[name], separate[name], atol=1e-5 * max(scale, 1e-6), err_msg=name)


@pytest.mark.slow
def test_pairs_that_share_a_prompt_with_pictures_equal_separate_rows(made):
    """The prompt, with two pictures, is computed once; a second pair has none, and of a third each side has one more,
    after what both share."""
    model, params = load(made[0])

    def pair(prompt: Sequence, seed: int, *at: int) -> list[Sequence]:
        sides = []
        for end in (sequence(seed + side, 15 + 3 * side, *at) for side in range(2)):
            tokens = np.concatenate([prompt.tokens, end.tokens])
            pixels = np.concatenate([prompt.pictures.pixels, end.pictures.pixels])
            mask = (np.arange(len(tokens)) >= len(prompt.tokens)) & (tokens != SOFT)
            sides.append(Sequence(tokens, mask, pictures=seen(pixels, tokens)))
        return sides

    first, second, third = SEQUENCES
    pairs = [*pair(first, 10), *pair(second, 20), *pair(third, 30, 3)]
    together = pack(pairs, 6, 230, sequences_per_example=2, pictures=5)
    assert together.pictures.pixels.shape[:2] == (1, 5)
    apart = pack(pairs, 6, 230, packing=False, sequences_per_example=2, pictures=4)
    assert apart.parents is None
    one, packed = loss_and_gradients(model, params, together)
    other, separate = loss_and_gradients(model, params, apart)
    np.testing.assert_allclose(one, other, rtol=1e-5)
    for name in params:
        scale = np.abs(separate[name]).max()
        np.testing.assert_allclose(packed[name], separate[name], atol=1e-5 * max(scale, 1e-6), err_msg=name)
    with pytest.raises(ValueError, match="sequences that share a row have 4 pictures; rows have room for 3"):
        pack(pairs, 6, 230, packing=False, sequences_per_example=2, pictures=3)


def test_a_row_without_pictures_is_that_of_a_text_model(made):
    model, params = load(made[0])
    text = Model(replace(model.config, vision=None))
    (one,) = (one for one in SEQUENCES if not len(one.pictures.pixels))
    seen = hidden_of(model, params, pack([one], 1, 32, pictures=1))
    plain = hidden_of(text, {name: params[name] for name in text.shapes}, pack([replace(one, pictures=None)], 1, 32))
    np.testing.assert_allclose(seen, plain, atol=1e-5)


MESHES = slow([MeshConfig(data=2, fsdp=2, tensor=2), MeshConfig(fsdp=2, context=4), MeshConfig(fsdp=1, tensor=8)])


def assert_spread_computes_alike(model: Model, params: Params, sequences: tuple[Sequence, ...], mesh: MeshConfig):
    """Eight devices compute what one does, gradients included."""
    batch = pack(sequences, 3, 96, packing=False, pictures=2, multiple=4)
    one, right = loss_and_gradients(model, params, batch)
    devices = build_mesh(mesh)
    with jax.set_mesh(devices):
        spread = jax.device_put(params, model.shardings(devices))
        placed = Microbatcher(4, devices).place(batch)
        found, ours = loss_and_gradients(model, spread, jax.tree.map(np.asarray, placed.at(0)))
    np.testing.assert_allclose(found, one, rtol=1e-5)
    for name in params:
        scale = np.abs(right[name]).max()
        np.testing.assert_allclose(ours[name], right[name], atol=1e-4 * max(scale, 1e-6), err_msg=name)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh.data}-{mesh.fsdp}-{mesh.context}-{mesh.tensor}")
def test_eight_devices_compute_what_one_does(made, mesh):
    """Of the tower's heads, three, none is split; its 36 patches are, over the parts of rows."""
    assert_spread_computes_alike(*load(made[0]), SEQUENCES, mesh)


def test_rows_take_no_more_pictures_than_they_have_room_for():
    """Three sequences fit a row by their tokens; with two pictures a row the one of two has it with the text."""
    batch = pack(SEQUENCES, 3, 100, pictures=2)
    assert batch.tokens.shape[0] == 2
    assert [set(row[row > 0]) for row in batch.pictures.places] == [set(range(1, 19)), set(range(1, 10))]
    np.testing.assert_array_equal(batch.pictures.pixels[0], SEQUENCES[0].pictures.pixels)
    np.testing.assert_array_equal(batch.pictures.pixels[1, 0], SEQUENCES[2].pictures.pixels[0])
    assert not batch.pictures.pixels[1, 1].any()
    with pytest.raises(ValueError, match="a sequence has 2 pictures; rows have room for 1"):
        pack(SEQUENCES, 3, 100, pictures=1)
    with pytest.raises(ValueError, match="a sequence has 2 pictures; rows have room for 0"):
        pack(SEQUENCES, 3, 100)


def test_rows_for_several_devices_have_no_more_pictures_than_room():
    """Texts of 85 and 20 tokens, and three pictures of 12 each: the emptiest row would take all three. First fit has
    one beside the long text."""
    ones = [sequence(seed, 12, 1) for seed in range(3)]
    batch = pack([sequence(8, 85), sequence(9, 20), *ones], 5, 100, pictures=2, multiple=2)
    numbers = [len(set((row[row > 0] - 1) // TOKENS)) for row in batch.pictures.places]
    assert numbers == [1, 2]


def test_a_multimodal_folder_is_exported_to_the_byte(made, tmp_path):
    """By the names that the folder has, also those of published ones; without a folder by those."""
    folder = made[0]
    tensors = load_file(folder / "model.safetensors")
    published = {key.replace("vision_tower.", "vision_tower.vision_model."): x for key, x in tensors.items()}
    other = tmp_path / "published"
    other.mkdir()
    save_file(published, other / "model.safetensors")
    (other / "config.json").write_text((folder / "config.json").read_text())
    for source, wanted, base in ((folder, tensors, folder), (other, published, other), (folder, published, None)):
        model, params = load(source)
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        save_folder(out, model.config, params, source=source, dtype="float32", base=base)
        found = load_file(out / "model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
        assert read_folder(out, pictures=True) == model.config
        again = Gemma3ForConditionalGeneration.from_pretrained(out, attn_implementation="eager").eval()
        with torch.no_grad():
            assert torch.equal(their_logits(again, SEQUENCES[0]), their_logits(made[1], SEQUENCES[0]))


def test_without_pictures_the_text_part_is_read_and_written(made, tmp_path):
    model = Model(read_folder(made[0]))
    params = load_params(model, made[0], dict.fromkeys(model.shapes, "float32"), one_device())
    save_folder(tmp_path / "out", model.config, params, source=made[0], dtype="float32", base=made[0])
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "gemma3_text"
    assert not any("vision" in key or "projector" in key for key in load_file(tmp_path / "out/model.safetensors"))
    assert not (tmp_path / "out/preprocessor_config.json").exists()


def test_missing_and_misshapen_tensors_of_the_tower_are_named(made, tmp_path):
    tensors = load_file(made[0] / "model.safetensors")
    name = "vision_tower.encoder.layers.3.mlp.fc1.weight"
    (tmp_path / "config.json").write_text((made[0] / "config.json").read_text())
    save_file({key: x for key, x in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"vision_tower\.encoder\.layers\.3\.mlp\.fc1\.weight"):
        load(tmp_path)
    save_file({**tensors, name: tensors[name][1:].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"vision_tower\.encoder\.layers\.3\.mlp\.fc1\.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("vision_config", {"vision_use_head": True}, "vision_use_head = True must be false"),
        ("vision_config", {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ("vision_config", {"patch_size": 5}, "patch_size = 5 does not divide image_size = 24"),
        ("vision_config", {"num_attention_heads": 5}, "num_attention_heads = 5 does not divide hidden_size = 24"),
        ("vision_config", {"rope": 1}, "vision_config.rope = 1 is a field that tunix does not know"),
        (None, {"mm_tokens_per_image": 16}, "mm_tokens_per_image = 16 is no square whose side divides the 6 patches"),
    ],
)
def test_towers_that_are_not_understood_are_refused(made, part, fields, message, tmp_path):
    raw = json.loads((made[0] / "config.json").read_text())
    raw = {**raw, part: {**raw[part], **fields}} if part else {**raw, **fields}
    with pytest.raises(UserError, match=message):
        from_hf(raw, tmp_path / "config.json", pictures=True)


def test_a_text_model_that_is_given_pictures_is_refused_by_name(tmp_path):
    raw = {"model_type": "gemma3_text", "hidden_size": 32, "num_attention_heads": 4}
    with pytest.raises(UserError, match="model_type = 'gemma3_text' is read as a text model, which sees no pictures"):
        from_hf(raw, tmp_path / "config.json", pictures=True)


@pytest.mark.parametrize(("platform", "capability", "kernel"), [("tpu", None, "splash"), ("gpu", 9.0, "mosaic")])
def test_kernels_say_that_they_compute_no_pictures(platform, capability, kernel, monkeypatch):
    """Then chunks are taken, or the einsums for short rows."""
    monkeypatch.setattr("tunix.models.attention.mosaic.missing", lambda name: None)
    q = jnp.zeros((1, 2048, 4, 64), jnp.bfloat16)
    ids = jnp.ones(q.shape[:2], jnp.int32)
    plain = replace(spec_of(q, q, Segments(ids, ids), None), platform=platform, capability=capability)
    assert implementation(plain).name == kernel
    seen = replace(plain, pictures=spec_of(q, q, Segments(ids, ids, pictures=ids), None).pictures)
    assert implementation(seen).name == "chunked"
    assert f"{kernel}: tokens of a picture see later ones" in described([seen])
    assert implementation(replace(seen, queries=512, keys=512)).name == "einsum"
