"""A causal model of Hugging Face in OpenVINO's format, with its cache as state: what openvino-genai runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.integrations import sdpa_attention

from swift.models.openvino import without_telemetry


class _Past(DynamicCache):
    """Keys and values that are given, and grow without branches that a trace would freeze."""

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.pairs = pairs
        self.layers = []

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any) -> Any:
        before = self.pairs[layer]
        self.pairs[layer] = torch.cat([before[0], keys], -2), torch.cat([before[1], values], -2)
        return self.pairs[layer]

    def get_seq_length(self, layer: int = 0, *_: Any, **__: Any) -> Any:
        return self.pairs[layer][0].shape[2]


class _Traced(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, *past: Any) -> Any:
        cache = _Past(list(zip(past[::2], past[1::2], strict=True)))
        rows, columns = input_ids.shape[1], attention_mask.shape[1]
        causal = torch.arange(columns)[None, :] <= torch.arange(rows)[:, None] + (columns - rows)
        mask = (causal[None] & (attention_mask[:, None, :] > 0))[:, None]
        out = self.model(
            input_ids=input_ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache, use_cache=True
        )
        return out.logits, *(each for pair in cache.pairs for each in pair)


def convert(folder: Path, target: Path) -> Path:
    """Write the model in `folder` to `target` in fp32, its tokenizer and configuration beside it."""
    without_telemetry()
    import openvino
    from openvino import opset13 as ops
    from openvino._offline_transformations import apply_make_stateful_transformation

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    config = model.config
    layers, heads, dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    past = [torch.randn(2, heads, 3, dim) for _ in range(2 * layers)]
    example = torch.randint(0, 10, (2, 4)), torch.ones(2, 7, dtype=torch.long), torch.arange(3, 7)[None].repeat(2, 1)
    shared = sdpa_attention.use_gqa_in_sdpa
    sdpa_attention.use_gqa_in_sdpa = lambda *_: False  # a form that OpenVINO knows
    try:
        with torch.no_grad():
            graph = openvino.convert_model(_Traced(model), example_input=(*example, *past))
    finally:
        sdpa_attention.use_gqa_in_sdpa = shared
    kinds = [f"{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
    names = ["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{kind}" for kind in kinds)]
    for given, name in zip(graph.inputs, names, strict=True):
        given.get_tensor().set_names({name})
        given.get_node().set_friendly_name(name)
        shape = [-1, heads, -1, dim] if name.startswith("past") else [-1, -1]
        given.get_node().set_partial_shape(openvino.PartialShape(shape))
    for made, name in zip(graph.outputs, ["logits", *(f"present.{kind}" for kind in kinds)], strict=True):
        made.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()
    beam = ops.parameter([-1], dtype=np.int32, name="beam_idx")
    beam.output(0).get_tensor().add_names({"beam_idx"})
    graph.add_parameters([beam])
    for name in names[3:]:
        given = graph.input(name)
        readers = given.get_target_inputs()
        chosen = ops.gather(given, beam, ops.constant(0))
        for reader in readers:
            reader.replace_source_output(chosen.output(0))
    graph.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(graph, {f"past_key_values.{kind}": f"present.{kind}" for kind in kinds})
    batch = ops.gather(ops.shape_of(graph.input("input_ids"), output_type="i64"), ops.constant([0]), ops.constant(0))
    sizes = [ops.constant(np.array([size], dtype=np.int64)) for size in (heads, 0, dim)]
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            shape = ops.concat([batch, *sizes], axis=0)
            node.set_arguments([ops.broadcast(ops.constant(0.0, dtype=np.float32), shape)])
    graph.validate_nodes_and_infer_types()
    target.mkdir(parents=True, exist_ok=True)
    openvino.save_model(graph, str(target / "openvino_model.xml"), compress_to_fp16=False)
    config.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    return target
