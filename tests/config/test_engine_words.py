"""ms-swift's flags for vLLM, SGLang and LMDeploy."""

from __future__ import annotations

import pytest

from swift.config import InferConfig, SftConfig, parse_command_line
from swift.config.checks import find_problems
from swift.config.engine_words import words_for
from swift.core.errors import UsageError

# what ms-swift 4 has (its settings for engines), without those of reinforcement learning
MS_SWIFT = {
    "vllm": "gpu_memory_utilization tensor_parallel_size pipeline_parallel_size data_parallel_size max_num_seqs "
    "max_model_len enable_lora max_lora_rank use_async_engine enable_expert_parallel disable_custom_all_reduce "
    "enforce_eager limit_mm_per_prompt enable_prefix_caching quantization reasoning_parser disable_cascade_attn "
    "mm_processor_cache_gb speculative_config engine_kwargs",
    "sglang": "tp_size pp_size dp_size ep_size enable_ep_moe mem_fraction_static context_length disable_cuda_graph "
    "quantization kv_cache_dtype enable_dp_attention disable_custom_all_reduce speculative_algorithm "
    "speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens",
    "lmdeploy": "tp session_len cache_max_entry_count quant_policy vision_batch_size",
}
VALUES = {
    "limit_mm_per_prompt": '{"image": 2}', "speculative_config": '{"method": "ngram"}', "engine_kwargs": "{}",
    "gpu_memory_utilization": "0.8", "quantization": "awq", "kv_cache_dtype": "fp8", "speculative_algorithm": "EAGLE",
    "max_num_seqs": "8", "max_lora_rank": "16", "max_model_len": "512", "context_length": "512", "session_len": "512",
}  # fmt: skip
SWITCHES = ("enable", "disable", "use", "enforce")


def infer(*words: str):
    return parse_command_line(InferConfig, ["--model", "x", *words], command="infer")


def said(*words: str) -> list[str]:
    return words_for(infer(*words).config.engine.engine_words)


@pytest.mark.parametrize("engine", list(MS_SWIFT))
def test_every_flag_of_ms_swift_does_something_or_says_why_not(engine):
    for own in MS_SWIFT[engine].split():
        name = f"{engine}_{own}"
        value = VALUES.get(own, "true" if own.startswith(SWITCHES) else "2")
        try:
            parsed = infer("--infer_backend", engine, f"--{name}", value)
        except UsageError as error:
            assert error.fix and own in ("reasoning_parser", "enable_ep_moe"), error
            continue
        usual = infer("--infer_backend", engine).config
        assert parsed.config != usual or parsed.notes or own == "engine_kwargs", name


def test_values_become_the_engines_words():
    flags = "--infer_backend vllm --vllm_gpu_memory_utilization 0.8 --vllm_enforce_eager true"
    assert said(*flags.split(), "--vllm_limit_mm_per_prompt", '{"image": 2}') == [
        "--gpu-memory-utilization=0.8",
        "--enforce-eager",
        '--limit-mm-per-prompt={"image": 2}',
    ]
    assert said("--infer_backend", "vllm", "--vllm_enforce_eager", "false") == ["--no-enforce-eager"]
    assert said("--infer_backend", "sglang", "--sglang_disable_cuda_graph", "false") == []
    assert said("--infer_backend", "vllm", "--vllm_quantization", "none") == []
    assert said("--infer_backend", "vllm", "--gpu_memory_utilization", "0.5") == ["--gpu-memory-utilization=0.5"]
    kwargs = '{"max_logprobs": 5, "enforce_eager": true, "disable_log_stats": false, "seed": null, "x": "y z"}'
    assert said("--infer_backend", "vllm", "--vllm_engine_kwargs", kwargs) == [
        "--max-logprobs=5", "--enforce-eager", "--no-disable-log-stats", "--x=y z",
    ]  # fmt: skip


def test_what_our_own_settings_say_goes_there():
    config = infer("--infer_backend", "vllm", "--vllm_max_model_len", "512", "--vllm_max_num_seqs", "7").config
    assert config.model.max_model_len == 512 and config.engine.max_batch_size == 7
    assert infer("--infer_backend", "lmdeploy", "--lmdeploy_session_len", "99").config.model.max_model_len == 99


def test_flags_of_a_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: x\ninfer_backend: sglang\nsglang_tp_size: 2\nsglang_mem_fraction_static: 0.7\n"
        "engine_args: [--log-level=error]\n"
    )
    config = infer(str(file)).config.engine
    assert words_for(config.engine_words) == ["--tp-size=2", "--mem-fraction-static=0.7"]
    assert config.engine_args == ["--log-level=error"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--infer_backend sglang --vllm_enforce_eager true", "--enforce-eager is a word of vllm's"),
        ("--infer_backend swift --lmdeploy_session_len 5", "a setting of lmdeploy's was given"),
        ("--vllm_tensor_parallel_size 2", "infer_backend is auto"),
        ("--infer_backend vllm --vllm_enforce_eager perhaps", "neither true nor false"),
        ("--infer_backend vllm --vllm_limit_mm_per_prompt {image}", "no JSON"),
        ("--infer_backend vllm --vllm_engine_kwargs [1]", "no JSON mapping"),
        ("--infer_backend vllm --vllm_reasoning_parser qwen3", "can't be had"),
        ("--infer_backend sglang --sglang_enable_ep_moe true", "can't be had"),
        ("--infer_backend vllm --vllm_nonsense 1", "not available"),
        ("--infer_backend swift --engine_python /x", "engines of other projects"),
        ("--infer_backend transformers --engine_args=--x", "engines of other projects"),
        ("--infer_backend vllm --engine_url http://a --engine_python /x", "runs already"),
        ("--infer_backend vllm --engine_url http://a --vllm_enforce_eager true", "runs already"),
    ],
)
def test_what_does_nothing_is_refused(words, expected):
    try:
        found = [problem.message for problem in find_problems(infer(*words.split()).config)]
    except UsageError as error:
        found = [error.message]
    assert any(expected in each for each in found), found


def test_training_has_no_such_flags():
    with pytest.raises(UsageError, match="not available"):
        parse_command_line(SftConfig, ["--vllm_enforce_eager", "true"], command="sft")
