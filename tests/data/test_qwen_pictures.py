"""Pictures that keep their proportions: as transformers' processor of Qwen reads and writes them, and their limits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import Qwen2VLImageProcessorPil, Qwen3VLProcessor

from tests.data import rendered_as
from tests.data.test_pictures import MARK, TEXT, chat, image
from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import to_example
from tunix.data.pipeline import decoded, encoded
from tunix.data.tokenizer import bytes_tokenizer
from tunix.data.types import Kept
from tunix.errors import UserError
from tunix.hf.picture_settings import with_reader, write_settings
from tunix.models.families.table import small, with_vision
from tunix.types import Sequence

DECODER, TOKENIZER = with_reader(
    with_vision(small("qwen3_5"), published=False), bytes_tokenizer("chatml", pictures=True), None, most=2, tokens=12
)
SOFT = TOKENIZER.pictures.soft_id
SQUARE = 64
"""Pixels of a soft token: 2 x 2 patches of 4 x 4."""


def kept(row: dict[str, Any], **how: Any) -> Sequence:
    shape = rendered_as(**{"shape": "messages", "max_length": 300, **how})
    found = to_example(row, TOKENIZER, shape, "row 7 of rows.jsonl")
    assert isinstance(found, Kept), found
    return found.sequences[0]


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
@pytest.mark.parametrize("size", [(23, 37), (300, 40), (5, 4), (16, 16)])
def test_rows_are_those_of_the_processor_of_transformers(mode, size):
    """Its parts, that is: as a whole it wants torchvision, for films."""
    seen = [image(1, size, mode), image(2, (64, 64))]
    content = [MARK, TEXT, MARK, {"type": "text", "text": " And there?"}]
    ours = kept({"messages": chat(*content), "images": seen})
    limits = {"shortest_edge": 4 * SQUARE, "longest_edge": 12 * SQUARE}
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    reader = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=limits, **half)
    theirs = reader(seen, return_tensors="np")
    whole = SimpleNamespace(image_processor=reader, image_token="<|image_pad|>")
    first, *rest = TOKENIZER.hf.apply_chat_template(chat(*content), tokenize=False).split(whole.image_token)
    marks = [Qwen3VLProcessor.replace_image_token(whole, theirs, number) for number in range(2)]
    text = first + "".join(mark + part for mark, part in zip(marks, rest, strict=True))
    np.testing.assert_array_equal(ours.tokens, TOKENIZER.hf(text, add_special_tokens=False)["input_ids"])
    np.testing.assert_array_equal(2 * ours.pictures.grids, theirs["image_grid_thw"][:, 1:])
    numbers = 4 * np.prod(ours.pictures.grids, axis=-1)
    patches = np.concatenate([x[:n] for x, n in zip(ours.pictures.pixels, numbers, strict=True)])
    frames = patches.transpose(0, 3, 1, 2)[:, :, None].repeat(2, axis=2).reshape(len(patches), -1)
    values = (frames.astype(np.float32) / np.float32(255) - 0.5) / 0.5
    np.testing.assert_allclose(values, theirs["pixel_values"], atol=1e-6)
    assert not ours.pictures.pixels[0, numbers[0] :].any()


def test_soft_tokens_are_never_trained_and_rope_turns_them_by_rows_and_columns():
    row = {"messages": chat(MARK, TEXT, MARK), "images": [image(1, (16, 48)), image(2, (16, 16))]}
    for kind in (RowKind.COMPLETION, RowKind.ALL):
        one = kept(row, train_on=kind)
        soft = one.tokens == SOFT
        assert not one.loss_mask[soft].any()
        assert one.loss_mask[-3:].any()
        np.testing.assert_array_equal(one.pictures.places[soft], np.arange(1, soft.sum() + 1))
    (rows, columns), first = one.pictures.grids[0], int(np.argmax(soft))
    turned = one.pictures.rope[first : first + rows * columns].reshape(rows, columns, 3) - one.pictures.rope[first]
    np.testing.assert_array_equal(turned[..., 1], np.arange(rows)[:, None].repeat(columns, 1))
    np.testing.assert_array_equal(turned[..., 2], np.arange(columns)[None].repeat(rows, 0))
    assert not turned[..., 0].any()
    after = one.pictures.rope[first + rows * columns]
    np.testing.assert_array_equal(after, first + max(rows, columns))


def test_a_string_prompt_has_its_pictures_first():
    row = {"prompt": "Which?", "completion": "red", "images": [image(1, (16, 16))]}
    for how in ({}, {"chat": True}):
        one = kept(row, shape="prompt_completion", **how)
        number = int(np.prod(one.pictures.grids))
        said = TOKENIZER.decode(one.tokens)
        assert "<|vision_start|>" + number * "<|image_pad|>" + "<|vision_end|>Which?" in said


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": chat(MARK, MARK, TEXT), "images": [image()]}, r"2 \(of \[\d+, 1\] tokens\), .* 'images' has 1"),
        ({"messages": chat(MARK, TEXT), "images": []}, "1 .* 'images' has 0"),
        ({"messages": chat(MARK, TEXT), "images": [image(0, (4, 900))]}, "4 x 900 pixels: absolute aspect ratio"),
        (
            {"messages": chat(MARK, TEXT), "images": [image(0, (4, 700))]},
            "more than data.picture_tokens 12",
        ),
        ({"messages": chat(MARK, TEXT), "images": [image()] * 3}, "it has 3 pictures, more than data.pictures 2"),
    ],
)
def test_what_cannot_be_read_is_said(row, message):
    with pytest.raises(UserError, match=f"row 7 of rows.jsonl: .*{message}"):
        kept(row)


def test_rows_that_another_process_rendered_have_their_pictures():
    example = to_example(
        {"messages": chat(MARK, TEXT), "images": [image()]}, TOKENIZER, rendered_as("messages", max_length=200)
    )
    (one,), (other,) = example.sequences, decoded(encoded([example]))[0].sequences
    for name, value in vars(one.pictures).items():
        np.testing.assert_array_equal(value, getattr(other.pictures, name), err_msg=name)


def test_settings_of_a_folder_decide_and_what_is_not_handled_is_refused(tmp_path: Path):
    vision = DECODER.vision
    write_settings(tmp_path, vision, [])
    file = tmp_path / "preprocessor_config.json"
    TOKENIZER.save(tmp_path)
    found = with_reader(DECODER, TOKENIZER, tmp_path, 2)[1].pictures
    assert found == TOKENIZER.pictures
    text = file.read_text()
    file.write_text(text.replace("65536", "128").replace("16777216", "512"))
    found = with_reader(DECODER, TOKENIZER, tmp_path, 2)[1].pictures
    assert found.pixel_range == (128, 512)
    file.write_text(text.replace('"patch_size": 4', '"patch_size": 5'))
    with pytest.raises(UserError, match="patch_size = 5 is not supported; only 4 is"):
        with_reader(DECODER, TOKENIZER, tmp_path, 2)


def test_a_number_of_tokens_is_refused_where_it_changes_nothing():
    gemma = with_vision(small("gemma3"), published=False)
    with pytest.raises(UserError, match=r"data\.picture_tokens: all pictures of gemma3 have 4 tokens; leave it out"):
        with_reader(gemma, bytes_tokenizer("gemma", pictures=True), None, 2, tokens=8)
    with pytest.raises(ValueError, match=r"picture_tokens changes nothing without data\.pictures"):
        DataConfig(train="x", picture_tokens=64)
