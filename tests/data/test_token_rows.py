"""Rows of token ids: what is trained by each column that speaks of single tokens, and which are refused.

The tokenizer's first ids are `<pad>` 0, `<eos>` 1 and `<bos>` 2.
"""

import json

import numpy as np
import pytest

from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import to_example
from tunix.data.shapes import rendering
from tunix.data.tokenizer import Tokenizer, bytes_tokenizer, load_tokenizer
from tunix.data.types import NOTHING_TRAINED, Dropped, Kept
from tunix.errors import UserError

TOKENIZER = bytes_tokenizer()
IDS = [72, 105, 33, 72, 105]
LAST_TWO = [0, 0, 0, 1, 1]


def rendered(row, tokenizer: Tokenizer | None = TOKENIZER, train_on="completion", **settings):
    """The tokens and the mask of a row's sequences."""
    how = rendering(DataConfig(train="given", **settings), row, "row 1", RowKind(train_on))
    example = to_example(row, tokenizer, how, "row 7")
    assert isinstance(example, Kept), example
    return [(one.tokens.tolist(), one.loss_mask.astype(int).tolist()) for one in example.sequences]


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "loss_mask"])
def test_each_mask_says_what_is_trained(name):
    assert rendered({"input_ids": IDS, name: LAST_TWO}) == [(IDS, LAST_TWO)]
    assert rendered({"input_ids": IDS, "is_answer": LAST_TWO}, columns={name: "is_answer"}) == [(IDS, LAST_TWO)]
    assert rendered({"input_ids": np.array(IDS), name: np.array(LAST_TWO, bool)}, None) == [(IDS, LAST_TWO)]
    # A column that data.columns makes another of ours is read as that one, and not a second time.
    row = {"input_ids": IDS, "attention_mask": LAST_TWO}
    assert rendered(row, columns={name: "attention_mask"}) == [(IDS, LAST_TWO)]
    how = rendering(DataConfig(train="given"), {"input_ids": IDS}, "row 1")
    assert to_example({"input_ids": IDS, name: [0] * 5}, None, how) == Dropped(NOTHING_TRAINED)


def test_masks_together():
    """Completion and assistant both, as TRL reads them; any others say the same, or the row is refused."""
    both = {"input_ids": IDS, "completion_mask": [0, 0, 1, 1, 1], "assistant_masks": [0, 1, 0, 1, 1]}
    assert rendered(both) == [(IDS, LAST_TWO)]
    labels = [-100, -100, -100, 72, 105]
    assert rendered({"input_ids": IDS, "labels": labels, "completion_mask": LAST_TWO}) == [(IDS, LAST_TWO)]
    # Nothing here says what is trained, or seen.
    harmless = {"special_tokens_mask": [1, 0, 0, 0, 1], "token_type_ids": [0] * 5, "position_ids": [3, 4, 5, 6, 7]}
    harmless |= {"length": 5, "id": "a", "ones_mask": [1] * 5, "offsets": [[0, 1]] * 5, "words": ["a"] * 5}
    assert rendered({"input_ids": IDS, "assistant_masks": LAST_TWO, "seq_lengths": [5], **harmless}) == [
        (IDS, LAST_TWO)
    ]


@pytest.mark.parametrize(("left", "right"), [(2, 0), (0, 3), (1, 2)])
def test_padding_is_cut_off_with_what_belongs_to_it(left, right):
    def padded(values, filler):
        return [filler] * left + values + [filler] * right

    row = {"input_ids": padded(IDS, 0), "attention_mask": padded([1] * 5, 0)}
    everything = [0, 1, 1, 1, 1]
    assert rendered(row) == [(IDS, everything)]
    assert rendered(row, train_on="all") == [(IDS, everything)]
    assert rendered({**row, "completion_mask": padded(LAST_TWO, 0)}) == [(IDS, LAST_TWO)]
    assert rendered({**row, "assistant_masks": padded(LAST_TWO, 1)}) == [(IDS, LAST_TWO)]
    labels = [-100, -100, -100, 72, 105]
    for filler in (-100, 0, 77):  # what labels say of padding is nothing
        assert rendered({**row, "labels": padded(labels, filler)}) == [(IDS, LAST_TWO)]
    positions = [1] * left + [0, 1, 2, 3, 4] + [9] * right
    assert rendered({**row, "position_ids": positions}) == [(IDS, everything)]
    weighted = {**row, "loss_weights": padded([0, 0, 0, 0.5, 2], 1)}
    example = to_example(weighted, None, rendering(DataConfig(train="given"), weighted, "row 1"))
    assert isinstance(example, Kept)
    assert example.sequences[0].per_token["loss_weights"].tolist() == [0, 0, 0, 0.5, 2]
    assert example.sequences[0].loss_mask.astype(int).tolist() == LAST_TWO


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"completion_mask": [0, 1]}, "completion_mask has 2 values for 5 input_ids"),
        ({"assistant_masks": [0, 0, 0, 2, 1]}, "assistant_masks holds 0 and 1, not 2"),
        ({"attention_mask": [1, 1]}, "attention_mask has 2 values for 5 input_ids"),
        ({"attention_mask": [1, 1, 2, 2, 2]}, "attention_mask holds 0 and 1, not 2"),
        ({"attention_mask": [0, 1, 0, 1, 1]}, "attention_mask is 0 at token 3, and 1 before and after it"),
        ({"attention_mask": [[1] * 5] * 5}, "attention_mask is .*not a list of whole numbers"),
        (
            {"labels": IDS, "assistant_masks": LAST_TWO},
            "labels and assistant_masks, which differ at token 1: leave one",
        ),
        ({"loss_mask": LAST_TWO, "completion_mask": [0, 0, 0, 0, 1]}, "loss_mask and completion_mask.* at token 4"),
        ({"position_ids": [0, 1, 2, 0, 1]}, "position_ids does not count on at token 4, .* give each its own"),
        ({"token_type_ids": [0, 0, 1, 1, 1]}, "token_type_ids is not all 0"),
        ({"seq_lengths": [3, 2]}, "seq_lengths says that 2 sequences share the row"),
        ({"prompt_mask": [1, 1, 1, 0, 0]}, r"the column 'prompt_mask' .* is not read: map it .*loss_mask: prompt_mask"),
        ({"trainable": [False, False, False, True, True]}, "the column 'trainable' has a number for every token"),
        ({"token_weights": [0.5, 1, 1, 1, 2]}, "the column 'token_weights'"),
        ({"shifted_labels": [105, 33, 72, 105, 1]}, "the column 'shifted_labels'"),
        ({"seq_idx": [4, 4, 4, 5, 5]}, "the column 'seq_idx'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(columns, message):
    with pytest.raises(UserError, match=f"^row 7: .*{message}"):
        rendered({"input_ids": IDS, **columns})


@pytest.mark.parametrize("name", ["loss_mask", "completion_mask", "labels"])
def test_weights_stand_alone(name):
    row = {"input_ids": IDS, "loss_weights": [1, 1, 1, 1, 1], name: IDS if name == "labels" else LAST_TWO}
    with pytest.raises(UserError, match=f"loss_weights and {name}: a weight of 0 says what is not trained"):
        rendered(row)


def test_padding_without_a_mask_is_known_by_its_id(tmp_path):
    with pytest.raises(UserError, match=r"row 7: input_ids ends with 2 x <pad> \(id 0\), padding .*attention_mask"):
        rendered({"input_ids": [*IDS, 0, 0]})
    with pytest.raises(UserError, match=r"input_ids begins with 1 x <pad> \(id 0\)"):
        rendered({"input_ids": [0, *IDS], "completion_mask": [0, *LAST_TWO]})
    # At the end and not trained, nothing sees it. Without a tokenizer no id is known to be padding.
    assert rendered({"input_ids": [*IDS, 0], "completion_mask": [*LAST_TWO, 0]}) == [([*IDS, 0], [*LAST_TWO, 0])]
    assert rendered({"input_ids": [*IDS, 0]}, None) == [([*IDS, 0], [0, 1, 1, 1, 1, 1])]
    # A PAD that is the EOS too ends a text once.
    TOKENIZER.save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "<eos>"}))
    shared = load_tokenizer(tmp_path)
    assert rendered({"input_ids": [*IDS, 1]}, shared) == [([*IDS, 1], [0, 1, 1, 1, 1, 1])]
    with pytest.raises(UserError, match=r"input_ids ends with 3 x <eos> \(id 1\)"):
        rendered({"input_ids": [*IDS, 1, 1, 1]}, shared)


PAIR = {"prompt_ids": [72, 105], "chosen_ids": [33, 34, 35], "rejected_ids": [36]}
LABELLED = {"prompt_ids": [72, 105], "completion_ids": [33, 34, 35], "label": True}


@pytest.mark.parametrize(("row", "train_on"), [(PAIR, "pairs"), (LABELLED, "labels"), (LABELLED, "prompt")])
def test_ids_that_are_taken_whole_have_no_masks(row, train_on):
    plain = rendered(row, train_on=train_on)
    assert rendered({**row, "prompt_mask": [1, 1], "labels_of_raters": [3, 4, 5, 6, 7, 8]}, train_on=train_on) == plain
    # Columns of the length of input_ids belong to these, which are another shape of the row.
    other = {"input_ids": [72, 105, 33, 34, 35], "labels": [-100, -100, 33, 34, 35]}
    assert rendered({**row, **other}, train_on=train_on) == plain
    with pytest.raises(UserError, match=r"row 7: the column 'prompt_attention_mask' .* only the ids that it keeps"):
        rendered({**row, "prompt_attention_mask": [0, 1]}, train_on=train_on)
    with pytest.raises(UserError, match="row 7: prompt_ids begins with 2 x <pad>"):
        rendered({**row, "prompt_ids": [0, 0, 72]}, train_on=train_on)


def test_the_masks_of_completions_and_pairs_are_refused():
    for columns in ({"completion_mask": [1, 1, 0]}, {"labels_mask": [0, 0, 1, 1, 0]}):
        with pytest.raises(UserError, match=f"the column '{next(iter(columns))}'"):
            rendered({**LABELLED, **columns}, train_on="labels")
    with pytest.raises(UserError, match="rejected_ids ends with 1 x <pad>"):
        rendered({**PAIR, "rejected_ids": [36, 0]}, train_on="pairs")
