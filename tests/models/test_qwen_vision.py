"""Qwen 3.5 with pictures against transformers, packed against separate rows, and its folders to the byte.

Patches have 4 x 4 pixels, and 2 x 2 of them make a soft token; a picture has 12 of these at most, in any shape.
"""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests.marks import slow
from tests.models.test_vision import assert_spread_computes_alike, loss_and_gradients
from tests.tiny_models import DELTA, SIZES, one_device, randomise
from tunix.config import MeshConfig
from tunix.data.packing import pack
from tunix.data.pictures import rope_positions
from tunix.errors import UserError
from tunix.hf.model_folder import load_params, save_folder
from tunix.hf.source import read_folder
from tunix.models.families.table import from_hf
from tunix.models.model import Model, Params
from tunix.trainer.microbatches import Microbatcher
from tunix.trainer.step import hidden_of
from tunix.types import Pictures, Sequence

pytestmark = pytest.mark.models

BEGIN, END, SOFT, FILM, TOKENS, PATCHES = 90, 91, 92, 93, 12, 48
TEXT = {
    **SIZES,
    **DELTA,
    "pad_token_id": 0,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "head_dim": 16,
    # Of the 4 pairs that turn, one turns by rows and one by columns.
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
TOWER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "depth": 3,
    "num_heads": 3,
    "patch_size": 4,
    "out_hidden_size": SIZES["hidden_size"],
    "num_position_embeddings": 25,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen3_5ForConditionalGeneration]:
    """A random multimodal model and its folder."""
    torch.manual_seed(0)
    ids = {"vision_start_token_id": BEGIN, "vision_end_token_id": END, "image_token_id": SOFT, "video_token_id": FILM}
    config = Qwen3_5Config(text_config=TEXT, vision_config=TOWER, **ids)
    model = Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    randomise(model)
    folder = tmp_path_factory.mktemp("qwen35")
    model.save_pretrained(folder)
    return folder, model


def load(folder: Path, attention: str = "auto") -> tuple[Model, Params]:
    config = read_folder(folder, pictures=True)
    model = Model(replace(config, vision=replace(config.vision, tokens=TOKENS)), attention=attention)
    return model, load_params(model, folder, dict.fromkeys(model.shapes, "float32"), one_device())


def sequence(seed: int, length: int, *pictures: tuple[int, int, int]) -> Sequence:
    """Random text with pictures, given where each begins and how many rows and columns of soft tokens it has."""
    random = np.random.default_rng(seed)
    ids = random.integers(3, 89, length).astype(np.int32)
    grids, pixels = np.zeros((len(pictures), 2), np.int32), np.zeros((len(pictures), PATCHES, 4, 4, 3), np.uint8)
    for number, (place, rows, columns) in enumerate(pictures):
        soft = rows * columns
        ids[place - 1], ids[place : place + soft], ids[place + soft] = BEGIN, SOFT, END
        grids[number], pixels[number, : 4 * soft] = (rows, columns), random.integers(0, 256, (4 * soft, 4, 4, 3))
    return Sequence(ids, ids != SOFT, pictures=seen(pixels, grids, ids))


def seen(pixels: np.ndarray, grids: np.ndarray, ids: np.ndarray) -> Pictures:
    """The pictures of a sequence with these tokens."""
    soft = ids == SOFT
    places = np.where(soft, np.cumsum(soft), 0).astype(np.int32)
    return Pictures(pixels, grids, places, rope_positions(places, grids))


SEQUENCES = (sequence(0, 40, (6, 3, 4), (25, 1, 5)), sequence(1, 25), sequence(2, 30, (3, 4, 2)))


def given(one: Sequence, soft: int = SOFT) -> dict[str, torch.Tensor]:
    """What transformers' model reads of a sequence whose pictures' tokens have this id."""
    ids = torch.from_numpy(one.tokens).long()[None]
    read = {"input_ids": ids, "mm_token_type_ids": (ids == soft).int()}
    if not one.pictures.number:
        return read
    rows = []
    for pixels, (height, width) in zip(one.pictures.pixels, one.pictures.grids, strict=True):
        frames = pixels[: 4 * height * width].transpose(0, 3, 1, 2)[:, :, None].repeat(2, axis=2)
        rows.append(frames.reshape(len(frames), -1).astype(np.float32))
    values = (torch.from_numpy(np.concatenate(rows)) / 255 - 0.5) / 0.5
    grid = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in one.pictures.grids.tolist()])
    return {**read, "pixel_values": values, "image_grid_thw": grid}


def their_logits(model: Qwen3_5ForConditionalGeneration, one: Sequence) -> torch.Tensor:
    model.model.rope_deltas = None  # which would be the last sequence's
    return model(**given(one), use_cache=False).logits[0]


@pytest.mark.parametrize("attention", ["auto", "chunked"])
def test_packed_logits_equal_transformers_logits_of_each_sequence(made, attention):
    """One row of three sequences, with room for one picture more than there are."""
    model, params = load(made[0], attention)
    batch = pack(SEQUENCES, 3, 100, pictures=4)
    assert batch.tokens.shape == (1, 100)
    logits = jax.jit(lambda params: model.logits(params, hidden_of(model, params, batch)))(params)
    for number, one in enumerate(SEQUENCES):
        with torch.no_grad():
            theirs = their_logits(made[1], one).numpy()
        here = (batch.sequence_ids == number) & (batch.segment_ids > 0)
        np.testing.assert_allclose(np.asarray(logits)[here], theirs, atol=1e-4)


def test_rope_turns_tokens_where_transformers_does(made):
    for one in SEQUENCES:
        read = given(one)
        theirs, _ = made[1].model.get_rope_index(
            read["input_ids"], read["mm_token_type_ids"], read.get("image_grid_thw")
        )
        np.testing.assert_array_equal(one.pictures.rope, theirs[:, 0].T)
        # What follows a sequence counts on, as transformers' generate does.
        longer = Sequence(np.append(one.tokens, [7, 8]), np.ones(len(one.tokens) + 2, bool))
        again = seen(one.pictures.pixels, one.pictures.grids, longer.tokens)
        np.testing.assert_array_equal(one.pictures.followed(2).rope, again.rope)


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
    pairs["layers/pre_attn_norm/w"] = np.stack([inner[f"layers.{at}.input_layernorm.weight"] for at in range(4)])
    pairs["layers/q_norm/w"] = np.stack([inner[f"layers.{at}.self_attn.q_norm.weight"] for at in (1, 3)])
    pairs["layers/rate/bias"] = np.stack([inner[f"layers.{at}.linear_attn.dt_bias"] for at in (0, 2)])
    for name, grad in pairs.items():
        off = np.linalg.norm(np.asarray(ours[name]) - grad) / np.linalg.norm(grad)
        assert off < 1e-3, (name, off)
    assert not any(np.any(grad) for name, grad in ours.items() if name.startswith("vision/")), "the tower is frozen"


def equal(model: Model, params: Params, one: tuple, other: tuple) -> None:
    """A loss and its gradients are another's, as near as those of all families of text are."""
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
    for name in params:
        scale = np.abs(other[1][name]).max()
        np.testing.assert_allclose(one[1][name], other[1][name], atol=1e-4 * max(scale, 1e-6), err_msg=name)


def test_packed_rows_equal_separate_rows(made):
    """Row by row, in another order, and in a row without any picture beside rows that have some."""
    model, params = load(made[0])
    together = loss_and_gradients(model, params, pack(SEQUENCES, 3, 100, pictures=3))
    equal(model, params, together, loss_and_gradients(model, params, pack(SEQUENCES, 3, 100, False, pictures=3)))


@pytest.mark.slow
def test_pairs_with_pictures_equal_separate_rows(made):
    """DeltaNets' states are not branched: each side has its prompt again. Of the last pair each side has a picture."""
    model, params = load(made[0])

    def pair(prompt: Sequence, seed: int, *more: tuple[int, int, int]) -> list[Sequence]:
        sides = []
        for end in (sequence(seed + side, 15 + 3 * side, *more) for side in range(2)):
            tokens = np.concatenate([prompt.tokens, end.tokens])
            pixels, grids = (
                np.concatenate([getattr(x.pictures, name) for x in (prompt, end)]) for name in ("pixels", "grids")
            )
            mask = (np.arange(len(tokens)) >= len(prompt.tokens)) & (tokens != SOFT)
            sides.append(Sequence(tokens, mask, pictures=seen(pixels, grids, tokens)))
        return sides

    first, second, third = SEQUENCES
    pairs = [*pair(first, 10), *pair(second, 20), *pair(third, 30, (3, 2, 3))]
    together = pack(pairs, 6, 330, sequences_per_example=2, pictures=8)
    apart = pack(pairs, 6, 330, packing=False, sequences_per_example=2, pictures=4)
    equal(model, params, loss_and_gradients(model, params, together), loss_and_gradients(model, params, apart))


def test_a_row_without_pictures_is_that_of_a_text_model(made):
    model, params = load(made[0])
    text = Model(replace(model.config, vision=None))
    seen_row = hidden_of(model, params, pack([SEQUENCES[1]], 1, 32, pictures=1))
    alone = replace(SEQUENCES[1], pictures=None)
    plain = hidden_of(text, {name: params[name] for name in text.shapes}, pack([alone], 1, 32))
    np.testing.assert_allclose(seen_row, plain, atol=1e-5)


def test_what_fills_a_picture_up_is_not_seen(made):
    """Other pixels after a picture's last patch change nothing, whatever they are."""
    model, params = load(made[0])
    one = SEQUENCES[2]
    pixels = one.pictures.pixels.copy()
    pixels[:, 32:] = 200
    noisy = replace(one, pictures=replace(one.pictures, pixels=pixels))
    first, second = (hidden_of(model, params, pack([x], 1, 32, pictures=2)) for x in (one, noisy))
    np.testing.assert_array_equal(first, second)


def test_a_microbatch_has_all_that_its_rows_have_of_pictures(made):
    batch = pack(SEQUENCES, 3, 96, packing=False, pictures=2)
    placed = Microbatcher(3, one_device()).place(batch).at(0).pictures
    for name, right in vars(batch.pictures).items():
        np.testing.assert_array_equal(getattr(placed, name), right, err_msg=name)
    model, params = load(made[0])
    blind = replace(batch, pictures=replace(batch.pictures, rope=None))
    with pytest.raises(AssertionError, match="rope is told of the rows"):
        hidden_of(model, params, blind)


MESHES = slow([MeshConfig(data=2, fsdp=2, tensor=2), MeshConfig(fsdp=1, tensor=8)])


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh.data}-{mesh.fsdp}-{mesh.tensor}")
def test_eight_devices_compute_what_one_does(made, mesh):
    assert_spread_computes_alike(*load(made[0]), SEQUENCES, mesh)


def test_a_multimodal_folder_is_exported_to_the_byte(made, tmp_path):
    """With and without the folder that was loaded; its heads that draft tokens come along."""
    tensors = {**load_file(made[0] / "model.safetensors"), "mtp.norm.weight": torch.ones(3)}
    source = tmp_path / "published"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    raw = json.loads((made[0] / "config.json").read_text())
    raw["text_config"]["mtp_num_hidden_layers"] = 1
    (source / "config.json").write_text(json.dumps(raw))
    config = read_folder(source, pictures=True)
    model = Model(config)
    params = load_params(model, source, dict.fromkeys(model.shapes, "float32"), one_device())
    for base in (source, None):
        out = tmp_path / f"out{base is None}"
        save_folder(out, config, params, source=source, dtype="float32", base=base)
        found = load_file(out / "model.safetensors")
        wanted = tensors if base else {key: x for key, x in tensors.items() if not key.startswith("mtp.")}
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
        assert read_folder(out, pictures=True) == config
        again = Qwen3_5ForConditionalGeneration.from_pretrained(out, attn_implementation="eager").eval()
        with torch.no_grad():
            assert torch.equal(their_logits(again, SEQUENCES[0]), their_logits(made[1], SEQUENCES[0]))


def test_without_pictures_the_text_part_is_read_and_written(made, tmp_path):
    model = Model(read_folder(made[0]))
    params = load_params(model, made[0], dict.fromkeys(model.shapes, "float32"), one_device())
    save_folder(tmp_path / "out", model.config, params, source=made[0], dtype="float32", base=made[0])
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "qwen3_5_text"
    assert not any("visual" in key for key in load_file(tmp_path / "out/model.safetensors"))


def test_missing_and_misshapen_tensors_of_the_tower_are_named(made, tmp_path):
    tensors, name = load_file(made[0] / "model.safetensors"), "model.visual.blocks.2.attn.qkv.weight"
    (tmp_path / "config.json").write_text((made[0] / "config.json").read_text())
    for wrong in ({}, {name: tensors[name][1:].contiguous()}):
        kept = {key: x for key, x in tensors.items() if key != name}
        save_file({**kept, **wrong}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=r"visual\.blocks\.2\.attn\.qkv\.weight"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("vision_config", {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ("vision_config", {"num_heads": 5}, "num_heads = 5 times 4 does not divide hidden_size = 24"),
        ("vision_config", {"out_hidden_size": 33}, "out_hidden_size = 33 is not the decoder's hidden_size = 32"),
        ("vision_config", {"num_position_embeddings": 26}, "num_position_embeddings = 26 is no square"),
        ("vision_config", {"deepstack_visual_indexes": [1]}, r"deepstack_visual_indexes = \[1\] is not supported"),
        ("vision_config", {"windows": 1}, "vision_config.windows = 1 is a field that tunix does not know"),
        ("vision_config", {"rope_parameters": {"rope_theta": 5.0}}, "rope_theta = 5.0 is not supported"),
    ],
)
def test_towers_that_are_not_understood_are_refused(made, part, fields, message, tmp_path):
    raw = json.loads((made[0] / "config.json").read_text())
    with pytest.raises(UserError, match=message):
        from_hf({**raw, part: {**raw[part], **fields}}, tmp_path / "config.json", pictures=True)
