"""`adapter: {from: ...}`: an adapter of PEFT's or of a run goes on from where it is, on its own base."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny_models import one_device
from tests.tiny_runs import EVAL, metrics, model_folder, train, write_recipe
from tunix.errors import UserError
from tunix.hf.peft_folder import FILE, fingerprint
from tunix.hf.source import adapter_weights, pretrained, settled
from tunix.models.families.table import read_config
from tunix.models.model import Model
from tunix.recipe.recipe import Recipe
from tunix.run.build import assemble
from tunix.trainer.progress import Display
from tunix.types import Sequence

pytestmark = pytest.mark.models

PLAIN = {"r": 3, "lora_alpha": 5, "rank_pattern": {"q_proj": 2}, "target_modules": ["q_proj", "down_proj"]}
KINDS = {"plain": PLAIN, "dora": {**PLAIN, "use_dora": True, "use_rslora": True}}
ROWS = np.random.default_rng(0).integers(3, 250, (2, 20)).astype(np.int32)


def given(folder: Path, **settings) -> Path:
    """An adapter of PEFT's on `base`, both in a folder; its A and B are random."""
    model_folder(folder / "base")
    torch.manual_seed(0)
    config = LoraConfig(**{**PLAIN, **settings}, init_lora_weights=False, task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    get_peft_model(base, config).save_pretrained(folder / "adapter")
    return folder / "adapter"


def sections(**adapter) -> dict:
    return {"model": {"path": "base", "dtype": "float32"}, "adapter": {"from": "adapter", **adapter}}


def theirs(adapter: str | None) -> list[np.ndarray]:
    """Log-probs of ROWS as transformers and PEFT compute them."""
    model = AutoModelForCausalLM.from_pretrained("base")
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter).eval()
    ids = torch.from_numpy(ROWS).long()
    with torch.no_grad():
        found = torch.log_softmax(model(ids).logits[:, :-1].double(), -1)
    return list(found.gather(-1, ids[:, 1:, None])[..., 0].numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_it_starts_as_peft_has_it_and_leaves_as_peft_reads_it(kind, tmp_path):
    given(tmp_path, **KINDS[kind])
    write_recipe(tmp_path / "r.yaml", sections())
    recipe = Recipe.load("r.yaml")
    assert recipe.sections()["adapter"] == {"from": "adapter"}  # what is the folder's to say is not said
    assert Recipe.build(recipe.sections()) == recipe
    with closing(assemble(recipe, tmp_path / "run", Display("run", 0, 0))) as job:
        rows = [Sequence(row, np.ones(20, bool)) for row in ROWS]
        ours, reference = job.client.logprobs(rows), job.client.logprobs(rows, of="reference")
        adapter = job.client.learner.spec.adapter
        job.client.export(tmp_path / "out", adapter=True)
    assert (adapter.rank, adapter.alpha, adapter.targeted) == (3, 5.0, ("q_proj", "down_proj"))
    for found, other, expected, base in zip(ours, reference, theirs("adapter"), theirs(None), strict=True):
        np.testing.assert_allclose(found[1:], expected, atol=1e-4)
        np.testing.assert_allclose(other[1:], base, atol=1e-4)  # the reference is the base
        assert np.abs(expected - base).max() > 0.1
    for found, expected in zip(theirs("out"), theirs("adapter"), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow  # two runs
def test_stages_go_on_with_one_adapter_on_a_rounded_base(tmp_path):
    """The second stage takes the adapter of the first, its kind too; its base is the folder and not what was merged."""
    model_folder(tmp_path / "base")
    first = {"adapter": {"kind": "qlora", "rank": 2, "tile": 16, "targets": ["q_proj"]}}
    stages = [first, {"adapter": {"from": "run/0_sft"}}]
    whole = {"model": {"path": "base", "dtype": "float32"}, **EVAL, "stages": stages, "steps": 2}
    train(str(write_recipe(tmp_path / "r.yaml", whole)))
    before, after = (
        [row["eval/loss"] for row in metrics(f"run/{stage}_sft") if "eval/loss" in row] for stage in (0, 1)
    )
    assert after[0] == pytest.approx(before[-1], abs=1e-5)
    assert after[-1] != after[0]
    config = json.loads(Path("run/1_sft/export/adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (2, str(tmp_path / "base"))
    assert json.loads(Path("run/1_sft/export", FILE).read_text())["rounded"] == {"base": "nf4", "tile": 16}
    theirs("run/1_sft/export")  # it loads


def resolved(adapter: dict, path: str = "base"):
    recipe = Recipe.build(
        {"model": {"path": path}, "data": {"train": "t"}, "output": "o", "adapter": {"from": "adapter", **adapter}}
    )
    adapter, source = settled(recipe.adapter, pretrained(path))
    return recipe.model_copy(update={"adapter": adapter}), source


def test_what_says_the_same_may_be_said(tmp_path):
    given(tmp_path)
    same = {"rank": 3, "alpha": 5.0, "ranks": {"self_attn.q_proj": 2}, "targets": ["down_proj", "q_proj"]}
    recipe, source = resolved({**same, "dora": False, "dropout": 0.1, "kind": "qlora"})
    assert recipe.adapter.dropout == 0.1
    assert (recipe.adapter.kind, recipe.adapter.base, recipe.adapter.ranks) == ("qlora", "nf4", {"q_proj": 2})
    # A model that ends in the same adapter stands for its base.
    again, below = resolved({}, "adapter")
    assert below.merged is None
    assert below.folder.samefile(source.folder)
    assert again.adapter.rank == 3


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"from": "elsewhere/else/where"}, r"adapter\.from: elsewhere/else/where: there is no such folder"),
        ({"from": "base"}, r"adapter\.from: base holds no adapter_config\.json, so no adapter; `tunix export RUN"),
        ({"rank": 4}, r"adapter\.rank: 4 contradicts adapter, which adapter\.from names: its rank is 3\. Leave rank"),
        ({"alpha": 8}, r"adapter\.alpha: 8\.0 contradicts"),
        ({"ranks": {"down_proj": 1}}, r"adapter\.ranks: {'down_proj': 1} contradicts .* {'q_proj': 2}"),
        ({"alphas": {"q_proj": 1}}, r"adapter\.alphas: .* contradicts"),
        ({"targets": ["q_proj"]}, r"adapter\.targets: \('q_proj',\) contradicts"),
        ({"rslora": True}, r"adapter\.rslora: True contradicts"),
        ({"dora": True}, r"adapter\.dora: True contradicts"),
        ({"also": ["lm_head"]}, r"adapter\.also: \('lm_head',\) contradicts"),
        ({"start": "pissa"}, r"start: pissa changes nothing with from"),
        ({"from": True}, r"adapter\.from: true does not fit"),
    ],
)
def test_what_contradicts_the_folder_is_refused(section, told, tmp_path):
    given(tmp_path)
    with pytest.raises(UserError, match=told):
        resolved(section)


def test_what_cannot_go_on_is_refused(tmp_path):
    folder = given(tmp_path)
    base = tmp_path / "base"
    whole = {"model": {"init": "random", "family": "llama"}, "data": {"train": "t"}, "output": "o"}
    with pytest.raises(UserError, match=r"adapter\.from: .* this one is random: set model\.path"):
        Recipe.build({**whole, "adapter": {"from": "adapter"}})
    given(tmp_path / "other")
    recipe = Recipe.build({**whole, "model": {"path": "base"}, "adapter": {"from": "adapter"}})
    with pytest.raises(UserError, match=r"ends in the adapter other/adapter, which would be merged below adapter"):
        settled(recipe.adapter, pretrained("base", Path("other/adapter")))

    file = folder / FILE
    rounded = '"rounded": {"base": "nf4", "tile": 16}'
    file.write_text(fingerprint(str(base), base, read_config(base), None).replace('"rounded": null', rounded))
    assert resolved({})[0].adapter.tile == 16
    with pytest.raises(UserError, match=r"adapter\.kind: adapter was trained on a base in nf4 \(tile 16\)"):
        resolved({"kind": "lora"})
    model_folder(tmp_path / "stranger", seed=5)
    with pytest.raises(
        UserError, match=r"adapter was trained on .*base and is put on .*stranger: .* nothing in common"
    ):
        resolved({}, "stranger")

    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({name: x for name, x in tensors.items() if "layers.1.mlp.down_proj.lora_A" not in name}, weights)
    adapter = resolved({})[0].adapter
    with pytest.raises(UserError, match=r"1 tensor\(s\).*missing.*layers\.1\.mlp\.down_proj\.lora_A"):
        adapter_weights(adapter, Model(read_config(base)), {}, one_device())
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "peft_type": "LOHA"}))
    with pytest.raises(UserError, match=r"peft_type = 'LOHA' is not supported; only LORA is"):
        resolved({})


def test_a_tiny_run_makes_its_own(tmp_path):
    """The random model of --tiny has no such adapter: it starts a fresh one."""
    given(tmp_path)
    whole = {"model": {"path": "org/llama-3.2-1b"}, "data": {"train": "t.jsonl"}, "output": "o"}
    tiny = Recipe.build({**whole, "adapter": {"from": "adapter", "dropout": 0.1}}).tiny().adapter
    assert (tiny.source, tiny.dropout, tiny.start) == (None, 0.1, "zero")
