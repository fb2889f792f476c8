"""The use of experts as a step logs it, and the loss that evens it out."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.marks import slow
from tests.trainers import sequences, trainer
from tunix.algorithms.sft.algorithm import SFT
from tunix.algorithms.sft.config import SFTConfig
from tunix.config import MeshConfig, ModelConfig
from tunix.data.packing import pack
from tunix.errors import UserError
from tunix.hf.source import adapted
from tunix.lora.config import AdapterConfig
from tunix.models.config import Experts
from tunix.models.families.table import small
from tunix.models.quantization.rules import QuantizationConfig
from tunix.trainer.config import OptimizerConfig
from tunix.trainer.step import COUNTS, MEANS, load_metrics, load_sums

pytestmark = pytest.mark.models

SFT_LOSS = SFT(SFTConfig()).objective
CONFIG = replace(small("qwen3_moe"), vocab_size=96, d_model=16, ffn=8, experts=Experts(4, 2))


def test_metrics_are_those_of_the_rows_of_all_micro_batches():
    """8 rows of 2 layers: 4 to one expert and 4 to the second is 4 * 4/8 = 2, and 2 each is 1; two of 8 have none.

    Shares of 1/2, 1/2, 0, 0 and mean probabilities 6/8, 1/8, 1/8, 0 give 4 (3/8 + 1/16) = 1.75, and even ones 1.
    """
    rows, expected = jnp.asarray([[4.0, 4, 0, 0], [2, 2, 2, 2]]), jnp.asarray([[6.0, 1, 1, 0], [5, 1, 1, 1]])
    sums = {COUNTS: rows, MEANS: expected, "train/loss": jnp.float32(3)}
    assert {name: float(x) for name, x in load_metrics(sums).items()} == {
        "train/loss": 3.0,
        "moe/load_balance": (1.75 + 1) / 2,
        "moe/largest_share": 1.5,
        "moe/largest_share_max": 2.0,
        "moe/unused": 0.25,
    }
    assert load_metrics({"train/loss": sums["train/loss"]}) == {"train/loss": sums["train/loss"]}


def test_the_losses_of_micro_batches_add_up_to_that_of_the_batch():
    """A batch of 8 rows, of which the micro-batch has two: it chose the third expert and expected the first, which
    has half of the batch's rows: 0.1 * 4 * (1/2 * 2/8) = 0.05. Alone, its own choice has nothing to do with it: 0."""
    terms = {"rows": jnp.asarray([[0.0, 0, 2, 0]]), "expected": jnp.asarray([[2.0, 0, 0, 0]])}
    sums = load_sums(terms, jnp.asarray([[4.0, 2, 2, 0]]), 0.1)
    np.testing.assert_allclose(sums["loss/router_aux"], 0.05, rtol=1e-6)
    assert load_sums(terms, None, 0.1)["loss/router_aux"] == 0.0
    assert "loss/router_aux" not in load_sums(terms, None, 0.0)
    assert load_sums({}, None, 0.1) == {}


@pytest.fixture(scope="module")
def whole():
    """The metrics of one step of all rows at once."""
    client = trainer(CONFIG, rows=8)
    return jax.device_get(client.step(pack(sequences(8), 8, 24, packing=False), SFT_LOSS))


@pytest.mark.parametrize(
    "layout", slow([{"rows": 2}, {"devices": 4, "mesh": MeshConfig(data=1, fsdp=2, expert=2), "rows": 8}]), ids=repr
)
def test_micro_batches_padding_and_devices_do_not_change_the_metrics(whole, layout):
    """Rows of padding go in front: a micro-batch of them alone is all padding, or the tokens differ in their number."""
    assert 1 < whole["moe/largest_share"] < 4
    batch = pack(sequences(8), 8, 24, packing=layout["rows"] == 2)
    found = trainer(CONFIG, **layout).step(batch, SFT_LOSS)
    for name in ("load_balance", "largest_share", "largest_share_max", "unused"):
        np.testing.assert_allclose(found[f"moe/{name}"], whole[f"moe/{name}"], rtol=1e-6, err_msg=name)


def test_the_coefficient_turns_a_loss_on_that_trains_the_router_and_is_not_evaluated(whole):
    batch = pack(sequences(8), 8, 24, packing=False)
    plain, evened = (trainer(CONFIG, rows=8, router_aux_loss_coef=c) for c in (0.0, 0.5))
    evaluated = [client.evaluate([batch], SFT_LOSS)["eval/loss"] for client in (plain, evened)]
    assert evaluated[0] == evaluated[1]
    assert not [name for name in plain.evaluate([batch, batch], SFT_LOSS) if "moe" in name], "shares are not added up"
    metrics = evened.step(batch, SFT_LOSS)
    np.testing.assert_allclose(metrics["loss/router_aux"], 0.5 * whole["moe/load_balance"], rtol=1e-5)
    np.testing.assert_allclose(metrics["train/loss"], whole["train/loss"] + metrics["loss/router_aux"], rtol=1e-5)
    assert "loss/router_aux" not in whole
    before = float(metrics["moe/load_balance"])
    other = plain.step(batch, SFT_LOSS)
    for _ in range(20):
        metrics, other = evened.step(batch, SFT_LOSS), plain.step(batch, SFT_LOSS)
    assert metrics["moe/load_balance"] < min(before, other["moe/load_balance"])


@pytest.mark.slow
def test_micro_batches_do_not_change_what_the_load_trains():
    """Weights after a step of plain gradient descent, of all rows at once and of four micro-batches of two rows."""
    optimizer = OptimizerConfig(name="sgd", learning_rate=1.0, schedule="constant", clip_norm=None)
    batch = pack(sequences(8), 8, 24, packing=False)
    clients = [trainer(CONFIG, rows=rows, router_aux_loss_coef=2.0, optimizer=optimizer) for rows in (8, 2)]
    together, split = (jax.device_get(client.step(batch, SFT_LOSS)) for client in clients)
    for name in ("train/loss", "loss/router_aux", "moe/load_balance", "train/grad_norm"):
        np.testing.assert_allclose(split[name], together[name], rtol=1e-5, err_msg=name)
    one, two = (jax.device_get(client.state.params) for client in clients)
    for name, x in one.items():
        np.testing.assert_allclose(two[name], x, atol=1e-5, err_msg=name)


def test_the_recipe_field_reaches_the_model_and_is_refused_without_experts():
    config = ModelConfig(init="random", family="qwen3_moe", router_aux_loss_coef=0.001)
    assert adapted(CONFIG, config, None).router_aux_loss_coef == 0.001
    with pytest.raises(UserError, match=r"model.router_aux_loss_coef: llama has no experts"):
        adapted(small("llama"), config, None)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, r"all-linear would leave the experts \(mlp.experts\).* \[q_proj, k_proj, v_proj, o_proj, experts.gate_up"),
        ({"targets": ["gate_proj"]}, r"qwen3_moe has no gate_proj"),
    ],
)
def test_experts_are_never_left_out_silently(section, message):
    config = ModelConfig(init="random", family="qwen3_moe")
    with pytest.raises(UserError, match=message):
        adapted(CONFIG, config, AdapterConfig(**section))
    assert adapted(CONFIG, config, AdapterConfig(targets=("q_proj",))).adapt is not None
    rule = {"module": "experts.*", "weights": "int8", "activations": "int8"}
    rules = QuantizationConfig.model_validate({"mode": "qat", "rules": [rule]})
    with pytest.raises(UserError, match=r"quantization.rules: what comes into experts \(gates\) cannot be rounded"):
        _ = adapted(CONFIG, config, None, rules).shapes


def test_a_shared_expert_is_adapted_by_the_names_of_a_dense_one():
    config = small("qwen3_5_moe")
    assert AdapterConfig(targets=("gate_proj", "out_proj")).targeted_in(config) == ("gate_proj", "out_proj")
