"""A bare torch loop over transformers' model: what a trainer's own machinery costs."""

from turns import CORES, start

case, turn = start()

import torch  # noqa: E402  (after the cores are chosen)
from transformers import AutoModelForCausalLM  # noqa: E402

torch.set_num_threads(CORES)


def sft() -> None:
    """SFT: forward pass, backward pass, clipping, AdamW."""
    net = AutoModelForCausalLM.from_pretrained(case["weights"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(net.parameters(), lr=case["learning_rate"], fused=True)
    ids = torch.tensor(case["rows"])
    while True:
        turn()
        logits = net(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), case["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()


sft()
