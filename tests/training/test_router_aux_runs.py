"""Runs of a mixture of experts with --router_aux_loss_coef: logged, equal over ranks, and it does balance."""

import json

import pytest
import torch
from runs import BASE, run_cli, trained

from swift import sft
from swift.core.errors import UsageError


@pytest.fixture(scope="module")
def mixture_dir(tmp_path_factory):
    """A tiny mixture with experts of unlike load."""
    import transformers as tf
    from fixtures import make_tokenizer

    tokenizer = make_tokenizer()
    config = tf.Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = tf.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_(std=0.3)
    folder = tmp_path_factory.mktemp("mixture")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def flags(mixture_dir, chat_rows, write_rows, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", chat_rows(21))
    return {
        **BASE,
        "model": str(mixture_dir),
        "dataset": [str(data)],
        "tuner_type": "full",
        "max_steps": 4,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3,
        "router_aux_loss_coef": 0.5,
    }


def logged(run_dir, name):
    lines = [json.loads(line) for line in (run_dir / "logging.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if "grad_norm" in line]


@pytest.mark.slow
def test_two_ranks_equal_one_process_with_their_micro_batches_joined(flags, tmp_path):
    sft(**{**flags, "per_device_train_batch_size": 4, "output_dir": str(tmp_path / "one")})
    two = {"per_device_train_batch_size": 2, "nproc_per_node": 2, "output_dir": str(tmp_path / "two")}
    result = run_cli({**flags, **two})
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("loss", "router_aux_loss", "grad_norm"):
        assert logged(tmp_path / "two", name) == pytest.approx(logged(tmp_path / "one", name), rel=1e-5), name
    one, two = (trained(tmp_path / run / "checkpoint-4") for run in ("one", "two"))
    for name, weight in one.items():
        assert (weight - two[name]).norm() <= 1e-5 * weight.norm(), name


def test_the_load_becomes_more_even(flags, tmp_path):
    flags |= {"max_steps": 20, "save_strategy": "no", "learning_rate": 2e-3, "per_device_train_batch_size": 4}
    balance = {}
    for coefficient in (1e-9, 1.0):  # the first only to see what happens by itself
        folder = tmp_path / str(coefficient)
        sft(**{**flags, "router_aux_loss_coef": coefficient, "output_dir": str(folder)})
        balance[coefficient] = logged(folder, "router_aux_loss")
    assert balance[1.0][0] == pytest.approx(balance[1e-9][0]) and balance[1.0][0] > 1.1
    assert balance[1.0][-1] < 0.8 * balance[1e-9][-1]


def test_without_the_setting_it_is_neither_taken_nor_logged(flags, tmp_path):
    sft(**{**flags, "router_aux_loss_coef": 0.0, "max_steps": 1, "output_dir": str(tmp_path / "without")})
    sft(**{**flags, "max_steps": 1, "output_dir": str(tmp_path / "with")})
    assert "router_aux_loss" not in (tmp_path / "without" / "logging.jsonl").read_text()
    with_, without = (logged(tmp_path / run, "loss")[0] for run in ("with", "without"))
    assert with_ == pytest.approx(without, rel=1e-6)  # what is shown as loss is the objective's alone


def test_refused(flags, tiny_model_dir, tmp_path):
    with pytest.raises(UsageError, match="has no routers whose load could be balanced"):
        sft(**{**flags, "model": str(tiny_model_dir), "output_dir": str(tmp_path / "dense")})
    with pytest.raises(UsageError, match="router_aux_loss_coef must be"):
        sft(**{**flags, "router_aux_loss_coef": -0.1, "output_dir": str(tmp_path / "negative")})
    with pytest.raises(UsageError, match="run different numbers of them"):
        sft(**{**flags, "balance_micro_batches": True, "output_dir": str(tmp_path / "uneven")})
