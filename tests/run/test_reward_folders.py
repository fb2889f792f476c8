"""Reward models as transformers' sequence classifiers: equal scores of every family, in and out; what is refused."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.marks import slow
from tests.tiny_models import CASES, HEAVY, one_device, randomise, reference_folder
from tests.tiny_runs import model_folder
from tunix.data.tokenizer import bytes_tokenizer
from tunix.errors import UserError
from tunix.hf import safetensors_io
from tunix.hf.model_folder import has_score, load_params, padding, save_folder
from tunix.hf.peft_folder import load_adapter, save_adapter
from tunix.hf.source import loaded, pretrained, require_lm_head, weights
from tunix.lora.adapt import adapt
from tunix.lora.config import AdapterConfig
from tunix.models.families.table import FAMILIES as TABLE
from tunix.models.families.table import family_of_type, read_config
from tunix.models.model import Model
from tunix.trainer.logprobs import Scorer
from tunix.trainer.microbatches import Microbatcher
from tunix.types import Sequence

pytestmark = pytest.mark.models

PAD, LENGTHS = 0, (5, 17, 11, 1, 24)
FAMILIES = (
    "llama-multihead-untied-llama3",
    "gemma-multiquery",
    "gemma2-windows-caps",
    "gemma3-dual-rope",
    "qwen2-biases-grouped",
    "qwen3-wide-heads-tied",
)
CLASSIFIED = tuple(name for name in HEAVY if TABLE[family_of_type(CASES[name].model_type)].classifier)
"""The heavy cases of which transformers has a classifier."""


def classifier_folder(name: str, folder: Path) -> Path:
    """A random reward model as transformers saves it."""
    config = CASES[name].hf_config()
    config.num_labels, config.pad_token_id = 1, PAD
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomise(model)
    model.save_pretrained(folder)
    return folder


def ids(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 97, length).astype(np.int32) for length in LENGTHS]


def our_model(folder: Path) -> tuple[Model, dict]:
    model = Model(read_config(folder), has_scalar_head=True, has_lm_head=False)
    return model, load_params(model, folder, dict.fromkeys(model.shapes, "float32"), one_device())


def our_scores(model: Model, params: dict) -> np.ndarray:
    """Of packed rows: the value at a spare token behind each sequence."""
    longer = [Sequence(np.append(x, np.int32(0)), np.arange(len(x) + 1) == len(x)) for x in ids()]
    found = Scorer(model, Microbatcher(2, one_device()), max(LENGTHS) + 1).scores("values", params, longer)
    return np.array([values[-1] for values in found])


def classifier(folder: Path, **fields) -> torch.nn.Module:
    """transformers' model of a folder."""
    return AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager", **fields).eval()


def their_scores(model: torch.nn.Module) -> np.ndarray:
    """Of a batch that is padded on the right."""
    padded = torch.full((len(LENGTHS), max(LENGTHS)), model.config.get_text_config().pad_token_id)
    for row, sequence in zip(padded, ids(), strict=True):
        row[: len(sequence)] = torch.from_numpy(sequence)
    seen = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    with torch.no_grad():
        return model(input_ids=padded, attention_mask=seen.long()).logits[:, 0].numpy()


@pytest.mark.parametrize("name", [*FAMILIES, *slow(CLASSIFIED)])
def test_scores_are_transformers_own_in_and_out(name, tmp_path):
    folder = classifier_folder(name, tmp_path / "theirs")
    model, params = our_model(folder)
    expected = their_scores(classifier(folder))
    np.testing.assert_allclose(our_scores(model, params), expected, atol=1e-4)
    assert expected.std() > 0.1  # they do tell sequences apart

    save_folder(tmp_path / "ours", model.config, params, source=None, dtype="float32", scores=True)
    np.testing.assert_allclose(their_scores(classifier(tmp_path / "ours")), expected, atol=1e-4)
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path / "ours", folder))
    assert ours.keys() == theirs.keys()
    assert ours["score.weight"].shape == (1, 32)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert read_config(tmp_path / "ours") == model.config


def test_a_language_model_gives_its_trunk_and_a_reward_model_no_words(tmp_path):
    """The head for words, untied here, is left out; the scalar head is not there and not asked for."""
    folder = tmp_path / "causal"
    reference_folder(CASES["llama-multihead-untied-llama3"], folder)
    model = Model(read_config(folder), has_scalar_head=True, has_lm_head=False)
    assert "head/w" not in model.shapes
    trunk = {name: "float32" for name in model.shapes if name != "value/w"}
    assert load_params(model, folder, trunk, one_device()).keys() == trunk.keys()
    assert not has_score(folder)

    with pytest.raises(UserError, match=r"missing: score\.weight"):
        our_model(folder)
    reward = classifier_folder("llama-grouped-tied", tmp_path / "reward")
    assert has_score(reward)
    speaking = Model(read_config(reward))
    with pytest.raises(UserError, match=r"reward is a reward model.*reward\.model.*algorithm: \{name: reward\}"):
        load_params(speaking, reward, dict.fromkeys(speaking.shapes, "float32"), one_device())


def test_a_classifier_of_several_labels_is_refused(tmp_path):
    config = CASES["llama-grouped-tied"].hf_config()
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "three")
    with pytest.raises(UserError, match=r"score\.weight expected \(1, 32\), found \(3, 32\)"):
        our_model(tmp_path / "three")


def test_padding_is_a_token_that_ends_nothing(tmp_path):
    """transformers scores the rightmost token that is not padding: padding with EOS would score the one before EOS."""
    folder = model_folder(tmp_path / "model", bos_token_id=2, eos_token_id=1, pad_token_id=1)
    config = read_config(folder)
    assert padding(config, folder) == (0, "<pad>")  # the tokenizer's own
    raw = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**raw, "pad_token": "<eos>"}))
    assert padding(config, folder) == (0, "<pad>")  # an added token that is named so
    assert padding(config, None) == (2, None)  # BOS
    stated = read_config(model_folder(tmp_path / "other", eos_token_id=[1, 9], pad_token_id=7))
    assert padding(stated, None) == (7, None)

    model = Model(config, has_scalar_head=True, has_lm_head=False)
    params = {name: jax.numpy.full(shape, 0.01) for name, shape in model.shapes.items()}
    save_folder(tmp_path / "out", config, params, source=folder, dtype="float32", scores=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<pad>", 0)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert (loaded.config.pad_token_id, loaded.config.num_labels) == (0, 1)
    assert tokenizer.encode("ab") == bytes_tokenizer("llama3").encode("ab", bos=True)


def test_adapters_of_reward_models_are_pefts_own_in_and_out(tmp_path):
    """A language model below, LoRA and the scalar head in the PEFT folder: the same scores there and here."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    reference_folder(CASES["llama-multihead-untied-llama3"], base)
    lora = LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    theirs = get_peft_model(classifier(base, num_labels=1, pad_token_id=PAD), lora).eval()
    randomise(theirs)
    # randomise filled the base too: it is put back.
    theirs.get_base_model().load_state_dict(load_base(base), strict=False)
    theirs.save_pretrained(folder)
    expected = their_scores(theirs)

    source = pretrained(str(base), folder)
    assert source.has_scalar_head
    assert not pretrained(str(base)).has_scalar_head
    model = Model(source.decoder, has_scalar_head=True, has_lm_head=False)
    read = {"mesh": one_device(), "seed": 0, "trained": "float32", "frozen": "float32", "full": True}
    params, _ = weights(source, model, **read)
    np.testing.assert_allclose(our_scores(model, params), expected, atol=1e-4)
    with pytest.raises(UserError, match="adapter is a reward model"):
        weights(source, Model(source.decoder), **read)

    config, arrays = load_adapter(folder, source.decoder)
    ours = {name: jax.numpy.asarray(array) for name, array in arrays.items()}
    save_adapter(tmp_path / "ours", ours, config, source.decoder, str(base), scores=True)
    written, saved = (load_file(f / "adapter_model.safetensors") for f in (tmp_path / "ours", folder))
    assert written.keys() == saved.keys()
    again = PeftModel.from_pretrained(classifier(base, num_labels=1, pad_token_id=PAD), tmp_path / "ours").eval()
    np.testing.assert_allclose(their_scores(again), expected, atol=1e-5)


def test_an_adapter_is_read_once(tmp_path, monkeypatch):
    """Asking whether a source gives scores reads none of its weights, however often; loading reads each tensor once."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    reference_folder(CASES["llama-grouped-tied"], base)
    decoder = read_config(base)
    adapter = AdapterConfig(rank=2, targets=("q_proj", "down_proj"))
    model = Model(decoder, adapt=adapt(adapter, decoder))
    params = model.init(jax.random.key(0), dict.fromkeys(model.shapes, "float32"), one_device())
    save_adapter(folder, params, adapter, decoder, str(base))
    opened: list[Path] = []
    monkeypatch.setattr(
        safetensors_io,
        "read_range",
        lambda file, *more, own=safetensors_io.read_range: opened.append(file) or own(file, *more),
    )

    source = pretrained(str(base), folder)
    require_lm_head(source, "mine")
    assert not source.has_scalar_head
    assert [file.parent for file in opened].count(folder) == 0
    loaded(source, "float32", one_device())
    # An A and a B of q and down in each of three layers.
    assert [file.parent for file in opened].count(folder) == 2 * 2 * 3
    opened.clear()
    require_lm_head(source, "mine")
    assert opened == []


def load_base(folder: Path) -> dict:
    """The weights of a folder as PEFT's wrapped model calls them."""
    wrapped = {"q_proj", "down_proj"}
    plain = load_file(folder / "model.safetensors").items()
    return {
        ".".join([*key.split(".")[:-1], "base_layer", "weight"]) if key.split(".")[-2] in wrapped else key: value
        for key, value in plain
    }
