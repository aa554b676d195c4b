"""What `--grad_compression` and `--local_updates` may say, and what they exclude."""

import pytest

from swift.config.checks import find_problems
from swift.config.commands import SftConfig
from swift.config.communication import GradCompression, LocalUpdates, read_compression, read_local_updates


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("bf16", GradCompression("bf16")),
        ("hierarchical", GradCompression("two_stage")),
        ('{"method": "hierarchical", "node_size": 4}', GradCompression("two_stage", node_size=4)),
        (
            '{"method": "topk", "ratio": 1, "error_feedback": false}',
            GradCompression("topk", ratio=1, error_feedback=False),
        ),
        ('{"method": "powersgd", "rank": 2}', GradCompression("powersgd", rank=2)),
        (
            '{"intra": "bf16", "inter": "topk", "ratio": 0.1}',
            GradCompression("two_stage", intra="bf16", inter="topk", ratio=0.1),
        ),
        ('{"inter": "fp16"}', GradCompression("two_stage", inter="fp16")),
        ('{"method": "ring2d", "columns": 8}', GradCompression("ring2d", columns=8)),
    ],
)
def test_compressions_that_are_read(text, read):
    assert read_compression(text) == read


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("local_sgd", LocalUpdates("local_sgd", every=8)),
        ("diloco", LocalUpdates("diloco", 100, 0.7, 0.9)),
        (
            '{"method": "streaming_diloco", "every": 20, "delay": 2}',
            LocalUpdates("streaming_diloco", 20, 0.7, 0.9, fragments=4, delay=2, alpha=0.5),
        ),
        ('{"method": "diloco", "dtype": "bfloat16"}', LocalUpdates("diloco", 100, 0.7, 0.9, dtype="bfloat16")),
    ],
)
def test_local_updates_that_are_read(text, read):
    assert read_local_updates(text) == read


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bfloat16", "did you mean bf16?"),
        ("hierarchic", "did you mean hierarchical?"),
        ("{", "is not JSON"),
        ("{}", "is empty"),
        ('{"ratio": 0.1}', 'has no "method"'),
        ('{"method": "topk", "ration": 0.1}', "did you mean ratio?"),
        ('{"method": "bf16", "ratio": 0.1}', "no option 'ratio' for bf16"),
        ('{"method": "topk", "ratio": 0}', "above 0"),
        ('{"method": "topk", "ratio": 1.5}', "at most 1"),
        ('{"method": "topk", "ratio": true}', "is a number"),
        ('{"method": "powersgd", "rank": 0}', "from 1 on"),
        ('{"method": "powersgd", "start_step": 1}', "from 2 on"),
        ('{"intra": "topk"}', '"intra" can\'t be'),
        ('{"inter": "top"}', "did you mean topk?"),
        ('{"intra": "bf16", "ratio": 0.1}', 'for "inter": "topk"'),
        ('{"method": "topk", "inter": "topk"}', 'leave "method" out'),
        ('{"method": "topk", "error_feedback": 1}', "true or false"),
    ],
)
def test_compressions_that_are_refused(text, words):
    with pytest.raises(ValueError) as caught:
        read_compression(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dilocco", "did you mean diloco?"),
        ('{"method": "local_sgd", "outer_lr": 0.5}', "no option 'outer_lr' for local_sgd"),
        ('{"method": "diloco", "every": 0}', "from 1 on"),
        ('{"method": "diloco", "outer_momentum": 1}', "below 1"),
        ('{"method": "diloco", "every": 5, "delay": 5}', 'must be below "every"'),
        ('{"method": "diloco", "alpha": 0.5}', 'come with a "delay"'),
        ('{"method": "streaming_diloco", "every": 3, "fragments": 4}', '"fragments" 4 must be at most'),
        ('{"method": "diloco", "dtype": "bf16"}', "did you mean bfloat16?"),
    ],
)
def test_local_updates_that_are_refused(text, words):
    with pytest.raises(ValueError) as caught:
        read_local_updates(text)
    assert words in str(caught.value)


def problems(**settings) -> str:
    config = SftConfig()
    for name, value in settings.items():
        holder = next(part for part in vars(config).values() if hasattr(part, name))
        setattr(holder, name, value)
    return "\n".join(f"{p.where}: {p.message} [{p.fix}]" for p in find_problems(config))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"grad_compression": "top_k"}, "did you mean topk?"),
        ({"local_updates": "{"}, "local_updates is not JSON"),
        ({"grad_compression": "bf16", "fsdp": "fsdp2"}, "--reduce_dtype bfloat16"),
        ({"grad_compression": '{"inter": "topk"}', "fsdp": "fsdp2"}, "not for fsdp fsdp2"),
        ({"grad_compression": "bf16", "fsdp": "hsdp"}, 'give "inter" alone'),
        ({"grad_compression": '{"intra": "bf16", "inter": "topk"}', "fsdp": "hsdp"}, 'give "inter" alone'),
        ({"grad_compression": '{"inter": "topk"}', "fsdp": "hsdp", "pipeline_parallel_size": 2}, "not for pipelines"),
        ({"grad_compression": "topk", "parallel": "auto"}, "not for parallel auto"),
        ({"local_updates": "diloco", "parallel": "auto"}, "not for parallel auto"),
        ({"grad_compression": "bf16", "tensor_parallel_size": 2}, "not for tensor_parallel_size 2"),
        ({"local_updates": "diloco", "pipeline_parallel_size": 2}, "not for pipeline_parallel_size 2"),
        ({"balance_micro_batches": True, "sequence_parallel_size": 2}, "not for sequence_parallel_size 2"),
        ({"balance_micro_batches": True, "deepspeed": "zero2"}, "not for deepspeed"),
        ({"local_updates": "diloco", "grad_compression": "bf16"}, "ranks step alone"),
        ({"local_updates": "diloco", "balance_micro_batches": True}, "ranks step alone"),
        ({"local_updates": "diloco", "tuner_type": "adalora"}, "adalora prunes by gradients"),
        ({"local_updates": "diloco", "torch_dtype": "float16"}, "float16 scales its loss"),
        ({"balance_micro_batches": True, "gradient_accumulation_steps": 1}, "nothing to balance"),
    ],
)
def test_what_excludes_one_another(settings, words):
    assert words in problems(**settings)


def test_sound_settings_bring_no_complaint():
    asked = {"grad_compression": "topk", "balance_micro_batches": True}
    assert not any(name in problems(**asked) for name in asked)
    assert "local_updates" not in problems(local_updates="diloco")
    for way in ('{"inter": "topk", "ratio": 0.1}', "hierarchical"):
        assert "grad_compression" not in problems(grad_compression=way, fsdp="hsdp", tensor_parallel_size=2)


def test_fragments_that_nobody_gave_fit_the_steps_between_exchanges():
    assert read_local_updates('{"method": "streaming_diloco", "every": 2}').fragments == 2
    assert read_local_updates("streaming_diloco").fragments == 4
