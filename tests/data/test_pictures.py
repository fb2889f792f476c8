"""Pictures of rows: as transformers' processor reads and writes them, and one clear message for what cannot be read."""

import io
import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoProcessor

from tests.data import rendered_as
from tunix.config import RowKind
from tunix.data import pictures as reading
from tunix.data.config import DataConfig
from tunix.data.examples import Examples, to_example
from tunix.data.pipeline import Batches, decoded, encoded
from tunix.data.sources import open_rows
from tunix.data.tokenizer import Tokenizer, bytes_tokenizer, load_tokenizer
from tunix.data.types import PICTURE_CUT, Dropped, Kept
from tunix.errors import UserError
from tunix.hf.picture_settings import with_reader, write_settings
from tunix.models.config import DecoderConfig
from tunix.models.families.table import small, with_vision
from tunix.types import Sequence

PLAIN = bytes_tokenizer("gemma", pictures=True)
DECODER: DecoderConfig
DECODER, TOKENIZER = with_reader(with_vision(small("gemma3"), published=False), PLAIN, None, most=2)
SHAPE = rendered_as("messages", max_length=200)
SOFT = TOKENIZER.pictures.soft_id


def image(seed: int = 0, size: tuple[int, int] = (23, 37), mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3)).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def png(made: Image.Image) -> bytes:
    held = io.BytesIO()
    made.save(held, "PNG")
    return held.getvalue()


def chat(*parts: Any, answer: str = "red") -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": answer}]


MARK, TEXT = {"type": "image"}, {"type": "text", "text": "Which colour?"}


def kept(row: dict[str, Any], tokenizer: Tokenizer = TOKENIZER, **how: Any) -> Sequence:
    shape = rendered_as(**{"shape": "messages", "max_length": 200, **how})
    found = to_example(row, tokenizer, shape, "row 7 of rows.jsonl")
    assert isinstance(found, Kept), found
    return found.sequences[0]


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("processor")
    TOKENIZER.save(folder)
    write_settings(folder, DECODER.vision, [])
    return AutoProcessor.from_pretrained(folder)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
@pytest.mark.parametrize("size", [(23, 37), (300, 40), (5, 4)])
def test_rows_are_those_of_the_processor_of_transformers(processor, mode, size):
    seen = [image(1, size, mode), image(2, (64, 64))]
    content = [MARK, TEXT, MARK, {"type": "text", "text": " And there?"}]
    ours = kept({"messages": chat(*content), "images": seen})
    given = iter(seen)
    theirs = processor.apply_chat_template(
        chat(*({**part, "image": next(given)} if part is MARK else part for part in content)),
        tokenize=True,
        return_dict=True,
        return_tensors="np",
    )
    np.testing.assert_array_equal(ours.tokens, theirs["input_ids"][0])
    np.testing.assert_array_equal(ours.pictures.places > 0, theirs["token_type_ids"][0] == 1)
    pixels = (ours.pictures.pixels.astype(np.float32) / np.float32(255) - 0.5) / 0.5
    whole = pixels.reshape(-1, 4, 4, 4, 4, 3).transpose(0, 5, 1, 3, 2, 4).reshape(-1, 3, 16, 16)
    np.testing.assert_allclose(whole, theirs["pixel_values"], atol=1e-6)


def test_soft_tokens_are_never_trained_and_places_count_along_the_row():
    row = {"messages": chat(MARK, TEXT, MARK), "images": [image(1), image(2)]}
    for kind in (RowKind.COMPLETION, RowKind.ALL):
        one = kept(row, train_on=kind)
        soft = one.tokens == SOFT
        assert not one.loss_mask[soft].any()
        assert one.loss_mask[-3:].any()
        np.testing.assert_array_equal(one.pictures.places[soft], np.arange(1, 9))
        assert not one.pictures.places[~soft].any()


def test_every_way_to_give_a_picture_is_the_same(tmp_path):
    made, file = image(3), tmp_path / "a.png"
    file.write_bytes(png(made))
    ways = [made, png(made), str(file), {"bytes": png(made), "path": None}, {"bytes": None, "path": str(file)}]
    rows = [{"messages": chat(MARK, TEXT), "images": [way]} for way in ways]
    rows += [{"messages": chat(MARK, TEXT), "images": made}]
    rows += [{"messages": chat({**MARK, key: way}, TEXT)} for key, way in (("image", made), ("path", str(file)))]
    # Without a mark they come before the first question.
    rows += [{"messages": [{"role": "user", "content": TEXT["text"]}, chat()[1]], "images": [made]}]
    rows += [{"messages": chat(TEXT), "images": [made]}]
    first, *others = map(kept, rows)
    for one in others:
        np.testing.assert_array_equal(one.tokens, first.tokens)
        np.testing.assert_array_equal(one.pictures.pixels, first.pictures.pixels)


def test_a_string_prompt_has_its_pictures_first():
    row = {"prompt": "Which?", "completion": "red", "images": [image()]}
    said = TOKENIZER.decode(kept(row, shape="prompt_completion").tokens)
    assert said.startswith("<bos>\n\n<start_of_image>" + 4 * "<image_soft_token>" + "<end_of_image>\n\nWhich?")
    asked = TOKENIZER.decode(kept(row, shape="prompt_completion", chat=True).tokens)
    assert "<start_of_turn>user\n\n\n<start_of_image>" in asked


def test_a_turned_photograph_is_turned_back(tmp_path):
    made = image(5, (20, 40))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    made.save(tmp_path / "turned.png", exif=exif)
    one, other = (
        kept({"messages": chat(MARK, TEXT), "images": [way]}).pictures.pixels
        for way in (str(tmp_path / "turned.png"), made.transpose(Image.Transpose.ROTATE_270))
    )
    np.testing.assert_array_equal(one, other)


def bomb() -> bytes:
    """A PNG of 20,000 x 20,000 pixels in under 100 bytes."""

    def chunk(name: bytes, held: bytes) -> bytes:
        return struct.pack(">I", len(held)) + name + held + struct.pack(">I", zlib.crc32(name + held))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 20_000, 20_000, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


BROKEN = png(image(0, (200, 200)))[:900]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["none.png"], r"picture 1, \S+none.png, does not exist: paths count from"),
        ([BROKEN], r"picture 1 cannot be read \(.*\): is the file whole\?"),
        ([b"GIF, or so it says"], "picture 1 is no picture that Pillow knows: give PNG, JPEG or WebP"),
        (["text.txt"], r"picture 1, \S+text.txt, is no picture that Pillow knows"),
        (["."], r"picture 1, \S+, is no file"),
        ([bomb()], "picture 1 has (400,000,000|more than 50,000,000) pixels.*make it smaller"),
        (
            [image(), "https://a.b/c.png"],
            "picture 2, https://a.b/c.png, is an address: tunix fetches nothing; download",
        ),
        (["data:image/png;base64,AA"], "is an address: tunix fetches nothing"),
        ([7], "picture 1 is 7, not a path, bytes or a PIL image"),
        ([{"bytes": None}], "without bytes and path"),
        ([image()] * 3, "it has 3 pictures, more than data.pictures 2: raise that"),
    ],
)
def test_what_cannot_be_read_is_one_message_with_row_file_and_remedy(values, message, tmp_path):
    (tmp_path / "text.txt").write_text("no picture")
    row = {"messages": chat(*[MARK] * len(values), TEXT), "images": values}
    with pytest.raises(UserError, match=message) as error:
        to_example(row, TOKENIZER, SHAPE, "row 7 of rows.jsonl", tmp_path)
    assert str(error.value).startswith("row 7 of rows.jsonl: ")
    assert "\n" not in str(error.value)


def test_just_too_many_pixels_are_refused_and_as_many_as_allowed_are_not(monkeypatch):
    row = {"messages": chat(MARK, TEXT), "images": [image(0, (10, 20))]}
    monkeypatch.setattr(reading, "MOST_PIXELS", 200)
    assert len(kept(row).pictures.pixels) == 1
    monkeypatch.setattr(reading, "MOST_PIXELS", 199)
    with pytest.raises(UserError, match="picture 1 has 200 pixels, more than 199: make it smaller"):
        kept(row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": chat(MARK, MARK, TEXT), "images": [image()]}, r"2 \(of \[4, 4\] tokens\), .* 'images' has 1"),
        ({"messages": chat(MARK, TEXT), "images": []}, "1 .* 'images' has 0"),
        ({"messages": chat({**TEXT, "text": "<image_soft_token>"})}, r"1 \(of \[1\] tokens\), .* has 0"),
    ],
)
def test_marks_and_pictures_have_to_be_as_many(row, message):
    with pytest.raises(UserError, match=f"row 7 of rows.jsonl: its text has places for pictures .*: {message}"):
        kept(row)


def test_pictures_that_nobody_would_look_at_are_refused():
    row = {"messages": chat(TEXT), "images": [image()]}
    for kind in (RowKind.COMPLETION, RowKind.PROMPT, RowKind.ROW):
        with pytest.raises(UserError, match=r"row 7 of rows.jsonl: it has pictures .images., .*set data.pictures"):
            kept(row, PLAIN, train_on=kind)
    labelled = {"prompt": chat(TEXT)[:1], "completion": "a", "label": True, "images": [image()]}
    with pytest.raises(UserError, match="which only sft, dpo and grpo look at"):
        kept(labelled, shape="prompt_completion", train_on=RowKind.LABELS)
    assert kept({"messages": chat(TEXT), "images": []}, PLAIN).pictures is None
    assert kept({"messages": chat(TEXT), "images": None}, PLAIN).pictures is None


def test_an_environment_has_its_rows_pictures_by_where_they_are(tmp_path: Path):
    """Paths from the data's folder, which it does not know; addresses and whole paths stay as they are."""
    images = ["seen/1.png", str(tmp_path / "2.png"), "https://a.b/c.png"]
    shape = rendered_as("messages", train_on=RowKind.ROW, max_length=200)
    found = to_example({"messages": chat(TEXT), "images": images}, TOKENIZER, shape, "row 7", tmp_path / "rows")
    assert isinstance(found, Kept)
    assert found.row["images"] == [str(tmp_path / "rows/seen/1.png"), *images[1:]]


def test_both_sides_of_a_pair_see_its_pictures_however_it_is_written():
    asked, sides = {"role": "user", "content": "Which?"}, ("red", "blue")
    said = [[{"role": "assistant", "content": side}] for side in sides]
    ways = [
        {"prompt": [asked], "chosen": said[0], "rejected": said[1]},
        {"prompt": [asked], "chosen": [asked, *said[0]], "rejected": [asked, *said[1]]},
        {"prompt": "Which?", "chosen": [asked, *said[0]], "rejected": [asked, *said[1]]},
        {"chosen": [asked, *said[0]], "rejected": [asked, *said[1]]},
    ]
    marked = {"role": "user", "content": [MARK, {"type": "text", "text": "Which?"}]}
    ways += [{"prompt": [marked], "chosen": said[0], "rejected": said[1]}]
    found = []
    for way in ways:
        fixed = ("prompt",) if "prompt" in way else ()
        how = rendered_as("pairs", max_length=200, train_on=RowKind.PAIRS, fixed=fixed)
        example = to_example({**way, "images": [image()]}, TOKENIZER, how)
        assert isinstance(example, Kept), way
        found.append(example.sequences)
    chat_of_strings = rendered_as("pairs", max_length=200, train_on=RowKind.PAIRS, fixed=("prompt",), chat=True)
    row = {"prompt": "Which?", "chosen": "red", "rejected": "blue", "images": [image()]}
    found.append(to_example(row, TOKENIZER, chat_of_strings).sequences)
    for sequences in found:
        for one, first in zip(sequences, found[0], strict=True):
            np.testing.assert_array_equal(one.tokens, first.tokens)
            np.testing.assert_array_equal(one.pictures.places, first.pictures.places)
            np.testing.assert_array_equal(one.pictures.pixels, first.pictures.pixels)
            assert one.pictures.places.max() == 4


def test_a_row_that_is_cut_within_a_picture_is_dropped_and_one_that_is_cut_after_it_kept():
    row = {"messages": chat(MARK, TEXT, answer="red " * 40), "images": [image()]}
    whole = kept(row)
    last = int(np.flatnonzero(whole.pictures.places).max())
    cut = kept(row, max_length=len(whole.tokens) - 20)
    np.testing.assert_array_equal(cut.pictures.places, whole.pictures.places[:-20])
    late = {"messages": [*chat(TEXT), *chat(MARK, TEXT)], "images": [image()]}
    ends = int(np.flatnonzero(kept(late).pictures.places).max())
    assert ends > last
    assert to_example(late, TOKENIZER, rendered_as("messages", max_length=ends)) == Dropped(PICTURE_CUT)
    assert isinstance(to_example(late, TOKENIZER, rendered_as("messages", max_length=ends + 1)), Kept)


def test_a_prompt_has_its_pictures_or_is_dropped():
    """A prompt that is too long loses its beginning, where pictures are."""
    row = {"messages": chat(TEXT), "images": [image()]}
    prompt = kept(row, train_on=RowKind.PROMPT, prompt_length=99)
    soft = prompt.tokens == TOKENIZER.pictures.soft_id
    np.testing.assert_array_equal(prompt.pictures.places, np.where(soft, np.cumsum(soft), 0))
    assert soft.sum() == TOKENIZER.pictures.tokens * len(prompt.pictures.pixels) == TOKENIZER.pictures.tokens
    first = int(np.flatnonzero(soft)[0])
    limit = len(soft) - first
    whole = to_example(row, TOKENIZER, rendered_as("messages", RowKind.PROMPT, prompt_length=limit))
    assert isinstance(whole, Kept)
    assert whole.sequences[0].pictures.places[0] == 1
    shorter = rendered_as("messages", RowKind.PROMPT, prompt_length=limit - 1)
    assert to_example(row, TOKENIZER, shorter) == Dropped(PICTURE_CUT)


def test_files_are_found_from_the_data_and_batches_have_room_whether_rows_have_pictures(tmp_path):
    (tmp_path / "seen").mkdir()
    rows = []
    for number in range(6):
        image(number).save(tmp_path / f"seen/{number}.png")
        rows.append({"messages": chat(MARK, TEXT), "images": [f"seen/{number}.png"]})
    rows += [{"messages": chat(TEXT)}] * 6
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train=str(data), max_length=200, pictures=2, shuffle=False)
    with_them, without = next_batches(open_rows(str(data)), config)
    expected = np.stack(
        [kept({"messages": chat(MARK, TEXT), "images": [image(n)]}).pictures.pixels[0] for n in range(6)]
    )
    held = with_them.pictures.pixels
    assert held.shape[1:] == without.pictures.pixels.shape[1:] == (2, 16, 4, 4, 3)
    flat = [one for one in held.reshape(-1, 16, 16, 3) if one.any()]
    assert sorted(one.tobytes() for one in flat) == sorted(one.tobytes() for one in expected)
    assert not without.pictures.pixels.any()
    assert not without.pictures.places.any()


def next_batches(rows: Any, config: DataConfig) -> list[Any]:
    stream = Batches(Examples(rows, TOKENIZER, config), 6, 0)
    try:
        return [next(stream).batch for _ in range(2)]
    finally:
        stream.close()


def test_settings_that_would_resize_in_another_way_are_refused(tmp_path):
    vision = DECODER.vision
    write_settings(tmp_path, vision, [])
    TOKENIZER.save(tmp_path)
    file: Path = tmp_path / "preprocessor_config.json"
    loaded = load_tokenizer(tmp_path)
    assert with_reader(DECODER, loaded, tmp_path, 2)[1].pictures == TOKENIZER.pictures
    for change in (
        {"do_pan_and_scan": True},
        {"image_mean": [0.4, 0.5, 0.5]},
        {"size": {"height": 32, "width": 16}},
        {"rescale_factor": 1 / 127.5},
        {"do_normalize": False},
    ):
        write_settings(tmp_path, vision, [])
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
        with pytest.raises(UserError, match=f"{re.escape(str(file))}: {next(iter(change))} = .* is not supported"):
            with_reader(DECODER, loaded, tmp_path, 2)
        file.unlink()
        (tmp_path / "processor_config.json").unlink()


def test_rows_that_another_process_rendered_have_their_pictures():
    example = to_example({"messages": chat(MARK, TEXT), "images": [image()]}, TOKENIZER, SHAPE)
    found = decoded(encoded([example]))[0]
    (one,), (other,) = example.sequences, found.sequences
    np.testing.assert_array_equal(one.pictures.pixels, other.pictures.pixels)
    np.testing.assert_array_equal(one.pictures.places, other.pictures.places)


def test_another_chat_template_leaves_pictures_as_they_are():
    other = TOKENIZER.replace_template("{% for m in messages %}<start_of_image>{% endfor %}")
    assert other.marked_text(chat(TEXT), {})[0] == 2 * TOKENIZER.expanded("<start_of_image>")


def test_a_tokenizer_without_the_tokens_is_refused():
    with pytest.raises(UserError, match="has no token <start_of_image>, <end_of_image>, <image_soft_token>"):
        with_reader(DECODER, bytes_tokenizer("gemma"), None, 2)
    with pytest.raises(UserError, match="the model has no tokenizer"):
        with_reader(DECODER, None, None, 2)


def test_pillow_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(UserError, match=r"pictures need Pillow: `pip install '\.\[pictures\]'"):
        reading.opened(b"", 1, None)
