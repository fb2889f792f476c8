"""Where an adapter starts and how it moves from there, beside PEFT: the same learning rate must mean the same."""

import jax
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.tiny_models import CASES, load, one_device, reference_folder, reference_model, tokens
from tests.trainers import PLAIN, trainer
from tunix.algorithms.sft.algorithm import SFT
from tunix.algorithms.sft.config import SFTConfig
from tunix.data.packing import pack
from tunix.hf.peft_folder import load_adapter
from tunix.lora.adapt import adapt, quantization
from tunix.lora.config import AdapterConfig
from tunix.models.model import Model
from tunix.trainer.config import OptimizerConfig
from tunix.types import Sequence

pytestmark = pytest.mark.models

STEPS, RATE = 5, 3e-3
STARTS = {
    "lora": {},
    "rslora": {"rslora": True, "ranks": {"q_proj": 24}},
    "dora": {"dora": True},
    "qlora": {"kind": "qlora", "tile": 16},
    "some": {"targets": ("o_proj", "down_proj"), "also": ("lm_head",)},
}


@pytest.mark.parametrize("name", STARTS)
def test_a_is_uniform_as_in_peft(name):
    """kaiming_uniform with a = sqrt(5): the gain is sqrt(2 / (1 + 5)), the bound sqrt(3) gain / sqrt(inputs), which is
    1 / sqrt(inputs); the variance is bound^2 / 3."""
    adapter = AdapterConfig(**{"rank": 16, **STARTS[name]})
    model = Model(PLAIN, adapt=adapt(adapter, PLAIN), quantization=quantization(adapter))
    names = [name for name in model.shapes if name.endswith("_lora_a")]
    found = jax.device_get(model.init(jax.random.key(0), dict.fromkeys(names, "float32"), one_device()))
    assert len(found) == len(adapter.modules_of(PLAIN))
    for key, a in found.items():
        inputs = {"o": PLAIN.num_heads * PLAIN.head_dim, "down": PLAIN.ffn}.get(key.split("/")[1], PLAIN.d_model)
        bound = inputs**-0.5
        assert np.abs(a).max() <= bound
        assert np.abs(a).max() > 0.97 * bound
        # n >= 1024 values: the mean's deviation is bound / sqrt(3 n), the variance's bound^2 sqrt(4 / 45 / n).
        assert abs(a.mean()) < 4 * bound / (3 * a.size) ** 0.5
        assert a.var() == pytest.approx(bound**2 / 3, abs=4 * bound**2 * (4 / 45 / a.size) ** 0.5)
        theirs = torch.nn.Linear(inputs, 1024, bias=False).weight.detach().numpy()  # what PEFT makes A of
        assert a.std() == pytest.approx(theirs.std(), rel=0.06)


def their_steps(model, ids):
    """Losses of torch's AdamW on what PEFT says trains."""
    optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=RATE, weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow  # where they start stays
def test_five_steps_are_those_of_peft(tmp_path):
    """From A and B as PEFT starts them, with torch's AdamW: the same losses, and the same A and B in the end."""
    case = CASES["qwen2-biases-grouped"]
    reference_folder(case, tmp_path / "base")
    torch.manual_seed(0)
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 3.0}}
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **patterns)
    theirs = get_peft_model(reference_model(case), config)
    theirs.save_pretrained(tmp_path / "start")
    losses = their_steps(theirs, torch.from_numpy(tokens()).long())
    theirs.save_pretrained(tmp_path / "end")

    model, base = load(tmp_path / "base")
    adapter, start = load_adapter(tmp_path / "start", model.config)
    plain = OptimizerConfig(learning_rate=RATE, schedule="constant", clip_norm=None)
    client = trainer(model.config, adapter=adapter, optimizer=plain, rows=3, length=40)
    state = client.state
    client.learner.frozen = base
    client.state = type(state)(
        {name: jax.numpy.asarray(start[name]) for name in state.params}, state.moments, state.step
    )
    mask = np.arange(40) > 0
    batch = pack([Sequence(row, mask) for row in tokens()], 3, 40, packing=True)
    ours = [float(client.step(batch, SFT(SFTConfig()).objective)["train/loss"]) for _ in range(STEPS)]

    assert losses[0] - losses[-1] > 0.2  # it does learn
    np.testing.assert_allclose(ours, losses, atol=1e-5)
    _, end = load_adapter(tmp_path / "end", model.config)
    for name, expected in end.items():
        # An update is near the rate: 5 of them, to within 1 % of one.
        np.testing.assert_allclose(client.state.params[name], expected, atol=0.01 * RATE, rtol=0, err_msg=name)
