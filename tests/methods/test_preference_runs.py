"""`swift rlhf` from the user's level: however a step is cut and laid out and its reference asked, the same numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from fixtures import make_tokenizer
from pool import on_ranks
from preference_rows import LOSSES, rows_of
from runs import trained

from swift.commands.rlhf import rlhf

BASE: dict[str, Any] = {
    "max_steps": 3,
    "logging_steps": 1,
    "max_length": 128,
    "learning_rate": 2e-4,
    "adam_epsilon": 1e-4,  # where gradients are rounding alone, Adam would make steps of them
    "tuner_type": "full",
    "torch_dtype": "float32",
    "add_version": False,
    "report_to": ["none"],
}
COUNT = 11  # the third step of four is a short one
LOSS_RTOL, NORM_RTOL, WEIGHTS_RTOL = 3e-6, 3e-5, 2e-6


def cut(size: int, accumulation: int) -> dict[str, Any]:
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}


WHOLE = cut(4, 1)
# what must not matter: name -> flags
VARIANTS: dict[str, dict[str, Any]] = {
    "1x4, padded": {**cut(1, 4), "padding_free": False, "group_by_length": False},
    "2x2, written out": {**cut(2, 2), "share_prompts": "false"},
    "4x1, padded": {**WHOLE, "padding_free": False, "group_by_length": False},
    "1x4": cut(1, 4),
    "2x2, small chunks": {**cut(2, 2), "loss_chunk_size": 3},
}
VARIANT = {name: list(VARIANTS)[number % len(VARIANTS)] for number, name in enumerate(LOSSES)}
QUICK = ("bco_pair", "aot", "rpo_ld", "wpo", "orpo_turns", "kto", "rm")

Train = Callable[..., Path]


@pytest.fixture
def train(tiny_model_dir: Path, write_rows: Any, tmp_path: Path) -> Train:
    """Runs with these settings; gives the run's folder."""

    def run(name: str, flags: dict[str, Any], **more: Any) -> Path:
        everything = {**BASE, "model": str(tiny_model_dir), **flags, **more}
        if "dataset" not in everything:
            data = write_rows(tmp_path / f"{everything.get('rlhf_type', 'dpo')}.jsonl", rows_of(everything, COUNT))
            everything["dataset"] = [str(data)]
        folder = tmp_path / name.replace(" ", "")
        rlhf(**everything, output_dir=str(folder))
        return folder

    return run


def logged(folder: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "logging.jsonl").read_text().splitlines())
    return [line for line in lines if "grad_norm" in line]


def final(folder: Path) -> dict[str, torch.Tensor]:
    (checkpoint,) = folder.glob("checkpoint-*")
    return trained(checkpoint)


_SAME = ("loss", "nll", "kl", "kto_z0", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies",
         "logps/chosen", "logps/rejected", "logps/ref_chosen")  # fmt: skip


def assert_equal_runs(ours: Path, theirs: Path) -> None:
    """Losses, what is logged beside them, gradient norms, and the weights in the end."""
    lines, others = logged(ours), logged(theirs)
    assert len(lines) == len(others) > 0
    for a, b in zip(lines, others, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=LOSS_RTOL, abs=1e-9)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=NORM_RTOL)
        for name in _SAME:
            assert (name in a) == (name in b), name
            if name in a:
                assert a[name] == pytest.approx(b[name], rel=1e-4, abs=2e-5), name
    left, right = final(ours), final(theirs)
    assert left.keys() == right.keys()
    difference = math.sqrt(sum(float((left[n] - right[n]).double().square().sum()) for n in left))
    norm = math.sqrt(sum(float(right[n].double().square().sum()) for n in right))
    assert difference / norm <= WEIGHTS_RTOL


@pytest.mark.parametrize("name", QUICK)
def test_how_a_step_is_cut_changes_nothing(name: str, train: Train) -> None:
    whole = train("whole", LOSSES[name], **WHOLE)
    assert_equal_runs(train("other", LOSSES[name], **VARIANTS[VARIANT[name]]), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_no_way_of_cutting_a_step_changes_anything(name: str, train: Train) -> None:
    whole = train("whole", LOSSES[name], **WHOLE)
    for variant, flags in VARIANTS.items():
        if name not in QUICK or variant != VARIANT[name]:
            assert_equal_runs(train(variant, LOSSES[name], **flags), whole)


def test_another_step_would_be_seen(train: Train) -> None:
    """The check itself: a pair more in a step must show."""
    with pytest.raises(AssertionError):
        assert_equal_runs(train("4", LOSSES["sigmoid"], **WHOLE), train("5", LOSSES["sigmoid"], **cut(5, 1)))


# rows of several units; all of them in one step, so that packing can't choose which units share one
PACKED = {**cut(COUNT, 1), "packing": True, "packing_length": 256, "max_steps": 2}


@pytest.mark.parametrize(
    "name", [n if n in ("mpo", "kto") else pytest.param(n, marks=pytest.mark.slow) for n in LOSSES]
)
def test_packing_changes_nothing(name: str, train: Train) -> None:
    whole = train("whole", LOSSES[name], **{**cut(COUNT, 1), "max_steps": 2})
    packed = train("packed", LOSSES[name], **PACKED)
    assert_equal_runs(packed, whole)
    written_out = train("written out", LOSSES[name], **PACKED, share_prompts="false")
    assert_equal_runs(written_out, whole)


# a way to have the reference, and one that must give the same
WAYS = {
    "lora, precomputed": ("sigmoid", {"tuner_type": "lora"}, {"reference": "precompute"}),
    "lora, copied": ("bco_pair", {"tuner_type": "lora"}, {"reference": "copy"}),
    "full, copied": ("aot", {}, {"reference": "copy"}),
    "kto, copied": ("kto", {}, {"reference": "copy"}),
    "kto, lora precomputed": ("kto", {"tuner_type": "lora"}, {"reference": "precompute"}),
}


@pytest.mark.parametrize("name", [n if "lora" in n else pytest.param(n, marks=pytest.mark.slow) for n in WAYS])
def test_however_the_reference_is_asked(name: str, train: Train) -> None:
    loss, first, second = WAYS[name]
    flags = {**LOSSES[loss], **cut(2, 2), **first}
    assert_equal_runs(train("own", flags), train("other", flags, **second))


@pytest.mark.slow
def test_the_model_itself_named_as_reference(train: Train, tiny_model_dir: Path) -> None:
    flags = {**LOSSES["sigmoid"], **cut(2, 2)}
    assert_equal_runs(train("own", flags), train("named", flags, ref_model=str(tiny_model_dir)))


def test_a_reference_that_moves_matters(train: Train) -> None:
    """TR-DPO with a share of 1 after each step: the second step begins where model and reference are one again."""
    run = train("moved", LOSSES["tr_dpo"], **WHOLE, ref_model_mixup_alpha=1.0)
    assert [line["loss"] for line in logged(run)] == pytest.approx([math.log(2)] * 3, rel=1e-5)


@pytest.mark.parametrize("name", ["aot", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bco_pair", "kto", "rm"))])
def test_evaluation_counts_each_pair_once(name: str, train: Train, write_rows: Any, tmp_path: Path) -> None:
    """Evaluated on the rows that it has just trained on, with a rate of 0: the loss of training."""
    flags = {**LOSSES[name], **cut(COUNT, 1), "max_steps": 1, "learning_rate": 1e-30}
    data = str(write_rows(tmp_path / "rows.jsonl", rows_of(flags, COUNT)))
    run = train("evaluated", flags, dataset=[data], val_dataset=[data], eval_steps=1)
    lines = [json.loads(line) for line in (run / "logging.jsonl").read_text().splitlines()]
    (found,) = (line["eval_loss"] for line in lines if "eval_loss" in line)
    assert found == pytest.approx(logged(run)[0]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    "way", ["adapter_off", *(pytest.param(w, marks=pytest.mark.slow) for w in ("copy", "precompute"))]
)
def test_noise_is_off_while_the_reference_is_asked(way: str, train: Train) -> None:
    """NEFTune: the reference says what it says without, and the model something else."""
    flags = {**LOSSES["sigmoid"], **cut(4, 1), "tuner_type": "lora", "reference": way, "max_steps": 1}
    (plain,), (noisy,) = (logged(train(f"noise {a}", flags, neftune_noise_alpha=a)) for a in (None, 50.0))
    assert noisy["logps/ref_chosen"] == pytest.approx(plain["logps/ref_chosen"], rel=1e-6)
    assert abs(noisy["logps/chosen"] - plain["logps/chosen"]) > 1e-3


@pytest.mark.parametrize("name", ["bco_pair", pytest.param("kto", marks=pytest.mark.slow)])
def test_recompute_changes_nothing(name: str, train: Train) -> None:
    flags = {**LOSSES[name], **cut(2, 2), "tuner_type": "lora"}
    kept, recomputed = (train(str(on), flags, gradient_checkpointing=on) for on in (False, True))
    assert_equal_runs(recomputed, kept)


@pytest.mark.slow
@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_compiled_layers_change_nothing(tuner: str, train: Train) -> None:
    flags = {**LOSSES["bco_pair"], **cut(2, 2), "tuner_type": tuner}
    assert_equal_runs(train("compiled", flags, torch_compile=True), train("plain", flags))


@pytest.mark.parametrize(
    "name", ["aot", *(pytest.param(n, marks=pytest.mark.slow) for n in ("sigmoid", "kto", "orpo"))]
)
def test_experts_are_balanced_beside_a_preference(name: str, train: Train, mixture_dir: Path) -> None:
    """The auxiliary loss takes part in the gradient, and looking ahead leaves no trace in it."""
    flags = {**LOSSES[name], **cut(4, 1), "model": str(mixture_dir)}
    plain, balanced = train("plain", flags), train("balanced", flags, router_aux_loss_coef=0.5)
    first, second = logged(plain)[0], logged(balanced)[0]
    assert first["loss"] == pytest.approx(second["loss"], rel=LOSS_RTOL)
    assert first["grad_norm"] != pytest.approx(second["grad_norm"], rel=1e-3)
    assert 0.9 < second["router_aux_loss"] < 4.1  # 1 is balanced, the number of experts is one for all
    assert_equal_runs(train("cut", flags, **cut(1, 4)), plain)


@pytest.fixture(scope="module")
def mixture_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts."""
    tokenizer, folder = make_tokenizer(), tmp_path_factory.mktemp("mixture")
    config = tf.Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
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
    tf.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_all(given: list[dict[str, Any]]) -> None:
    for flags in given:
        rlhf(**flags)
    if not dist.is_initialized():  # a run ends its group, and the pool will want to end one
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


SHARED = ("sigmoid", "mpo", "rpo_ld", "wpo", "ipo", "bco_pair", "aot", "aot_unpaired", "forward_kl", "reference_free",
          "tr_dpo", "orpo", "cpo", "simpo", "kto", "apo_zero_unpaired", "rm")  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_equal_one_process(train: Train, tiny_model_dir: Path, tmp_path: Path) -> None:
    given, alone = [], []
    for name in SHARED:
        alone.append(train(f"one-{name}", LOSSES[name], **WHOLE))
        data = [str(tmp_path / f"{LOSSES[name]['rlhf_type']}.jsonl")]
        flags = {**BASE, **LOSSES[name], **cut(1, 2), "model": str(tiny_model_dir), "dataset": data}
        given.append({**flags, "output_dir": str(tmp_path / f"two-{name}")})
    on_ranks(2, run_all, given, timeout_s=500.0)
    for flags, one in zip(given, alone, strict=True):
        assert_equal_runs(Path(flags["output_dir"]), one)
