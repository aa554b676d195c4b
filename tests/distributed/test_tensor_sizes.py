"""Which sizes of the tensor-parallel axis are possible, and what lies on each rank."""

import pytest
import transformers as tf

from swift.core.errors import UsageError
from swift.distributed.tensor import check_tensor_parallel
from swift.distributed.tensor.cut import own_ranges
from swift.distributed.tensor.plan import Part
from swift.distributed.tensor.sizes import vocabulary_share

SIZES = {
    "vocab_size": 96,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}


def refusal(config: tf.PreTrainedConfig, tp: int) -> str:
    with pytest.raises(UsageError) as caught:
        check_tensor_parallel(config, tp)
    return str(caught.value)


def test_the_nearest_possible_sizes_are_named():
    config = tf.LlamaConfig(**SIZES)
    for possible in (1, 2, 4, 12):  # 12: three ranks share a key-value head
        check_tensor_parallel(config, possible)
    message = refusal(config, 3)
    assert "4 key-value heads" in message and "--tensor_parallel_size 2 or 4" in message
    assert "12 heads" in refusal(config, 5) and "--tensor_parallel_size 4 or 12" in refusal(config, 5)


def test_widths_count():
    config = tf.LlamaConfig(**(SIZES | {"intermediate_size": 98}))
    assert "intermediate_size 98" in refusal(config, 4) and "--tensor_parallel_size 2" in refusal(config, 4)
    moe = tf.Qwen3MoeConfig(**SIZES, moe_intermediate_size=30)
    assert "moe_intermediate_size 30" in refusal(moe, 4)


def test_every_rank_needs_a_part_of_the_vocabulary():
    config = tf.LlamaConfig(**(SIZES | {"vocab_size": 9}))
    check_tensor_parallel(config, 2)
    assert "a vocabulary of 9" in refusal(config, 4)  # 3, 3, 3 and none


def test_the_text_part_of_a_multimodal_model_counts():
    config = tf.Qwen2VLConfig(text_config=SIZES | {"num_key_value_heads": 2})
    assert "12 heads" in refusal(config, 5)


def test_shares():
    assert [vocabulary_share(97, 4, rank) for rank in range(4)] == [(0, 25), (25, 50), (50, 75), (75, 97)]
    # queries of 4 heads and keys and values of 2, in one matrix with 3 rows per head
    parts = (Part(12, 4), Part(6, 2), Part(6, 2))
    assert own_ranges(parts, 2, 1) == [(6, 12), (15, 18), (21, 24)]
    # over 4 ranks two of them share a key-value head
    assert own_ranges(parts, 4, 2) == [(6, 9), (15, 18), (21, 24)]
    assert own_ranges(parts, 4, 1) == [(3, 6), (12, 15), (18, 21)]
