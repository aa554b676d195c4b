"""What sharing a pair's prompt saves: CPU seconds of forward and backward, shared against written out.

    OMP_NUM_THREADS=1 python benchmarks/shared_prefix.py [--prompt 256] [--completions 64 64] [--repeats 7]

The model has the shape of SmolLM2-135M and random weights in fp32, all of them trained. Both ways have one row, the
`varlen` attention and the same loss: next tokens of the completions, head on their states only. They take turns, and
the medians of the process's CPU seconds are shown, with the ratio of tokens that go through the layers: linear layers
can't save more than that. The largest relative difference of a gradient is shown too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers as tf

from swift.models.attention import VARLEN, segment_arguments
from swift.models.prefix_proof import lay_out


def build() -> tf.LlamaForCausalLM:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rope_theta=100000.0, tie_word_embeddings=True,
    )  # fmt: skip
    return tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=VARLEN)


def loss_of(model: tf.LlamaForCausalLM, row: torch.Tensor, places: list[list[int]], **arguments) -> torch.Tensor:
    """Cross-entropy of sequences, each given by the rows of the last token of its prompt and of its completion."""
    hidden = model.model(input_ids=row[None], use_cache=False, **arguments).last_hidden_state[0]
    states = torch.tensor([i for rows in places for i in rows[:-1]])
    targets = torch.tensor([i for rows in places for i in rows[1:]])
    return F.cross_entropy(model.lm_head(hidden[states]), row[targets])


def ways(model: tf.LlamaForCausalLM, prompt: int, completions: list[int]) -> dict[str, Callable[[], torch.Tensor]]:
    """The loss of the same sequences, both ways."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 49152, (n,), generator=generator) for n in (prompt, *completions)]
    cpu = torch.device("cpu")

    def shared() -> torch.Tensor:
        borders, prefixes, positions = lay_out(((prompt, tuple(completions)),))
        places = [[prompt - 1, *range(start, start + n)] for start, n in zip(borders[1:], completions, strict=False)]
        arguments = segment_arguments(borders, cpu, lengths=False, prefixes=prefixes)
        return loss_of(model, torch.cat(ids), places, position_ids=torch.tensor(positions)[None], **arguments)

    def written_out() -> torch.Tensor:
        borders, positions, places = [0], [], []
        for n in completions:
            places.append([*range(borders[-1] + prompt - 1, borders[-1] + prompt + n)])
            borders.append(borders[-1] + prompt + n)
            positions += range(prompt + n)
        row = torch.cat([piece for completion in ids[1:] for piece in (ids[0], completion)])
        arguments = segment_arguments(borders, cpu, lengths=False)
        return loss_of(model, row, places, position_ids=torch.tensor(positions)[None], **arguments)

    return {"shared": shared, "written out": written_out}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--completions", type=int, nargs="+", default=[64, 64])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    model = build()
    losses = ways(model, options.prompt, options.completions)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in losses}
    gradients: dict[str, list[torch.Tensor]] = {}
    for repeat in range(options.repeats + 1):  # the first warms up
        for name, loss in losses.items():
            model.zero_grad(set_to_none=True)
            started = time.process_time()
            value = loss()
            between = time.process_time()
            value.backward()
            ended = time.process_time()
            if repeat:
                seconds[name].append((between - started, ended - between))
            else:
                gradients[name] = [p.grad for p in model.parameters() if p.grad is not None]
    medians = {name: [statistics.median(part) for part in zip(*taken, strict=True)] for name, taken in seconds.items()}
    for name, (forward, backward) in medians.items():
        print(f"{name:12} forward {forward:.3f} s  backward {backward:.3f} s  both {forward + backward:.3f} s")
    count, own = len(options.completions), sum(options.completions)
    print(
        f"written out / shared: {sum(medians['written out']) / sum(medians['shared']):.2f} times the CPU seconds, ",
        end="",
    )
    print(f"{(count * options.prompt + own) / (options.prompt + own):.2f} times the tokens")
    pairs = zip(gradients["shared"], gradients["written out"], strict=True)
    print(f"gradients differ by {max(((a - b).norm() / b.norm()).item() for a, b in pairs):.1e} at most")


if __name__ == "__main__":
    main()
