"""What is decided before step 1: precision, recompute, NEFTune's noise, schedules of evaluation."""

import json

import pytest
import torch
from architectures import build
from runs import BASE, read_log

from swift import sft
from swift.core.devices import Device
from swift.core.errors import UsageError
from swift.data.loading.batch import Batch
from swift.models.head import find_decoder, find_head
from swift.models.memory import MemoryEstimate, decide_checkpointing, estimate_memory
from swift.models.prepare import choose_attention, fix_ends
from swift.objectives import CausalLM
from swift.training.module import Objectives, TrainModule
from swift.training.precision import choose_precision


def device(kind="cpu", bf16=False, fp16=False):
    return Device(kind, 0, "test", bf16, fp16, 1 << 34)


@pytest.mark.parametrize(
    ("wanted", "place", "expected"),
    [
        (None, device(), torch.float32),
        (None, device(bf16=True), torch.float32),
        (None, device("cuda", bf16=True, fp16=True), torch.bfloat16),
        (None, device("cuda", fp16=True), torch.float16),
        ("bfloat16", device(), torch.bfloat16),
        ("float32", device("cuda", bf16=True, fp16=True), torch.float32),
    ],
)
def test_precision_is_what_the_device_does_well(wanted, place, expected):
    precision, notes = choose_precision(wanted, place)
    assert precision.compute == expected
    assert (precision.scaler() is not None) == (expected == torch.float16)
    if wanted == "bfloat16" and not place.bf16:
        assert "slower" in notes[0] or "faster" in notes[0]


def test_float16_on_a_cpu_is_refused():
    with pytest.raises(UsageError, match="float16"):
        choose_precision("float16", device())


def test_recompute_only_where_memory_asks_for_it():
    estimate = MemoryEstimate(weights=100, gradients=10, optimizer=20, activations=1000, recomputed=100)
    assert decide_checkpointing(None, estimate, 2000)[0] is False
    on, words = decide_checkpointing(None, estimate, 1000)
    assert on is True
    assert "may not fit" not in words
    assert "may not fit" in decide_checkpointing(None, estimate, 100)[1]
    assert decide_checkpointing(False, estimate, 100)[0] is False
    assert decide_checkpointing(True, estimate, 10**9)[0] is True
    assert decide_checkpointing(None, estimate, 2000, processes=2)[0] is True


def test_the_estimate_grows_with_tokens_and_counts_trained_parameters():
    model = build("llama")
    sizes = {
        tokens: estimate_memory(model, model.config, tokens=tokens, dtype=torch.float32, logits_rows=8)
        for tokens in (100, 200)
    }
    parameters = sum(p.numel() for p in model.parameters())
    assert sizes[100].weights == 4 * parameters
    assert sizes[100].optimizer == 8 * parameters
    layers = 2 * (14 * 64 + 8 * 96) * 4
    assert sizes[200].activations - sizes[100].activations == 100 * layers
    assert sizes[100].recomputed < sizes[100].activations


def test_memory_that_is_short_turns_recompute_on_and_says_so(
    tiny_model_dir, chat_rows, write_rows, tmp_path, monkeypatch, capfd
):
    import swift.training.model as model

    data = write_rows(tmp_path / "rows.jsonl", chat_rows(8))
    flags = {**BASE, "model": str(tiny_model_dir), "dataset": [str(data)], "max_steps": 3, "lora_dropout": 0.0}
    plain = sft(**flags, output_dir=str(tmp_path / "plain"))
    assert "gradient checkpointing off" in capfd.readouterr().out
    monkeypatch.setattr(model, "free_memory_bytes", lambda device: 1 << 20)
    short = sft(**flags, output_dir=str(tmp_path / "short"))
    assert "gradient checkpointing on" in capfd.readouterr().out
    for a, b in zip(read_log(plain.run_dir), read_log(short.run_dir), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


def batch_of(lengths):
    ids = torch.arange(3, 3 + sum(lengths))[None] % 90
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    borders = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    nothing = torch.empty(0, dtype=torch.int64)
    return Batch(ids, positions, borders, None, nothing, nothing, torch.empty(0), [], sum(lengths))


def test_neftune_noise_has_the_size_of_each_example_and_none_in_evaluation():
    """alpha / sqrt(L * d), L the example's own length (arXiv 2310.05914, algorithm 1)."""
    model = build("llama")
    choose_attention(model, "auto", padding_free=None, packing=True)
    alpha, lengths = 5.0, [4, 64]
    module = TrainModule(
        model,
        decoder=find_decoder(model),
        head=find_head(model),
        objectives=Objectives(CausalLM(), CausalLM()),
        neftune_alpha=alpha,
    )
    seen = []
    find_decoder(model).layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    batch = batch_of(lengths)
    clean = model.get_input_embeddings().weight[batch.input_ids].detach()
    module.train()
    module(batch)
    module.eval()
    module(batch)
    noise = (seen[0] - clean)[0]
    for piece, length in zip(noise.split(lengths), lengths, strict=True):
        bound = alpha / (length * 64) ** 0.5
        assert piece.abs().max() <= bound * (1 + 1e-5)
        assert piece.abs().max() > 0.9 * bound
        assert piece.std() == pytest.approx(bound / 3**0.5, rel=0.1)
    torch.testing.assert_close(seen[1], clean)


def test_generation_stops_at_what_was_trained():
    model = build("llama")
    model.generation_config.eos_token_id = 2
    fix_ends(model, [7, 2])
    assert model.generation_config.eos_token_id == [7, 2]
    fix_ends(model, [7])
    assert model.generation_config.eos_token_id == [7, 2]


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({"eval_strategy": "epoch"}, [6, 12]),
        ({"eval_steps": 5}, [5, 10, 12]),
        ({"save_strategy": "epoch"}, [6, 12]),
        ({"save_strategy": "no"}, [12]),
        ({"eval_strategy": "no"}, []),
        ({"eval_on_start": True, "eval_steps": 12}, [0, 12]),
    ],
)
def test_when_it_evaluates(flags, steps, tiny_model_dir, chat_rows, write_rows, tmp_path):
    data, val = write_rows(tmp_path / "rows.jsonl", chat_rows(24)), write_rows(tmp_path / "val.jsonl", chat_rows(5))
    base = {**BASE, "model": str(tiny_model_dir), "dataset": [str(data)], "val_dataset": [str(val)], "max_steps": 12}
    result = sft(**{**base, "output_dir": str(tmp_path / "run"), "save_steps": 6, **flags})
    lines = [json.loads(line) for line in (result.run_dir / "logging.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_loss" in line] == steps
