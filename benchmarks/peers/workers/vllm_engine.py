"""vLLM's worker: its engine in this process, on the CPU."""

import os

from turns import CORES, start

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": str(CORES),
}
case, turn = start()

from vllm import LLM, SamplingParams  # noqa: E402  (after the cores are chosen)

if __name__ == "__main__":
    prompts, new = case["prompts"], case["new"]
    length = max(len(ids) + limit for ids, limit in zip(prompts, new, strict=True))
    engine = LLM(
        model=case["weights"],
        dtype="float32",
        max_model_len=length,
        max_num_seqs=case["slots"],
        # Every turn has the same prompts: they are computed again, as by the others.
        enable_prefix_caching=False,
        enforce_eager=True,
        skip_tokenizer_init=True,
        seed=case["seed"],
    )
    settings = [
        SamplingParams(temperature=1.0, max_tokens=limit, ignore_eos=True, seed=index, detokenize=False)
        for index, limit in enumerate(new)
    ]
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    tokens = 0
    while True:
        turn(tokens=tokens)
        found = engine.generate(asked, settings, use_tqdm=False)
        tokens = sum(len(one.outputs[0].token_ids) for one in found)
