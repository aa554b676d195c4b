"""Settings of `swift rlhf`: ranges, contradictions, what a method never reads, defaults, other tools' files."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from swift.config import InferConfig, RlhfConfig, SftConfig, build_config, load_config, parse_command_line, save_config
from swift.config.checks import find_problems
from swift.config.convert import convert_file
from swift.config.preference import DistillConfig, PreferenceConfig, reference_way, settle
from swift.config.preference_checks import LOSSES, READ_BY
from swift.config.tuner import TunerConfig
from swift.core.errors import UsageError


def problems(words: str):
    parsed = parse_command_line(
        RlhfConfig, ["--model", "smollm2", "--dataset", "rows.jsonl", *words.split()], command="rlhf"
    )
    return find_problems(parsed.config, places=parsed.places)


GKD = "--rlhf_type gkd --teacher_model t "


@pytest.mark.parametrize(
    ("words", "flag", "message"),
    [
        ("--beta 0", "--beta", "beta must be a finite number above 0"),
        (GKD + "--beta 1.5", "--beta", "at most 1 (reverse KL)"),
        ("--label_smoothing 0.5", "--label_smoothing", "label_smoothing must be at least 0 and below 0.5"),
        ("--ld_alpha 1.1", "--ld_alpha", "ld_alpha must be at least 0 and at most 1"),
        ("--rlhf_type kto --desirable_weight 0", "--desirable_weight", "must be above 0"),
        (GKD + "--lmbda 1.2", "--lmbda", "lmbda must be at least 0 and at most 1"),
        (GKD + "--distill_temperature 0", "--distill_temperature", "must be above 0"),
        (GKD + "--temperature 0", "--temperature", "answers are sampled"),
        (GKD + "--gkd_logits_topk 0", "--gkd_logits_topk", "at least 1"),
        ("--loss_type sigmoid sft --loss_weights 1", "--loss_weights", "1 value(s) for 2 loss_type(s)"),
        ("--loss_type sigmoid sft --loss_weights 1 -1", "--loss_weights", "from 0 on"),
        ("--loss_type sft sft", "--loss_type", "named twice"),
        ("--loss_type kto", "--loss_type", "kto is no loss_type of rlhf_type dpo"),
        ("--rlhf_type cpo --loss_type aot", "--loss_type", "aot is no loss_type of rlhf_type cpo"),
        ("--loss_type exo_pair", "--loss_type", "label_smoothing 0 says that they are certain"),
        ("--loss_type ipo --label_smoothing 0.1", "--label_smoothing", "does nothing with loss_type ipo"),
        ("--discopop_tau 0.1", "--discopop_tau", "is for loss_type discopop"),
        ("--use_weighting true --loss_type aot", "--use_weighting", "aot compares sorted ones"),
        ("--f_divergence_type js_divergence --loss_type bco_pair", "--f_divergence_type", "bco_pair isn't made of one"),
        ("--f_divergence_type forward_kl --reference_free true", "--f_divergence_type", "no reference"),
        ("--f_alpha_divergence_coef 0.5", "--f_alpha_divergence_coef", "does nothing with f_divergence_type reverse"),
        ("--rlhf_type orpo --rpo_alpha 1", "--rpo_alpha", "rpo_alpha does nothing with rlhf_type orpo"),
        ("--simpo_gamma 1", "--simpo_gamma", "simpo_gamma does nothing with rlhf_type dpo"),
        ("--rlhf_type rm --beta 0.1", "--beta", "beta does nothing with rlhf_type rm"),
        ("--lmbda 0.1", "--lmbda", "lmbda does nothing with rlhf_type dpo"),
        ("--rlhf_type simpo --ref_model x", "--ref_model", "ref_model does nothing with rlhf_type simpo"),
        ("--reference_free true --ref_model x", "--ref_model", "reference_free true takes none"),
        ("--precompute_ref_log_probs true --reference copy", "--precompute_ref_log_probs", "exclude each other"),
        ("--ref_model x --reference adapter_off", "--ref_model", "names another one"),
        ("--rpo_alpha 0.2 --loss_type sigmoid sft", "--rpo_alpha", "names it as well"),
        ("--ref_model x --reference copy", "--ref_model", "names another one"),
        ("--reference adapter_off --tuner_type full", "--reference", "no adapter to switch off"),
        ("--reference adapter_off --init_weights pissa", "--reference", "pissa moves a part"),
        ("--tuner_type full --streaming true --max_steps 5", "--streaming", "before rows are read"),
        ("--tuner_type full --reference copy --deepspeed zero3", "--deepspeed", "stage 3 has put those away"),
        ("--sync_ref_model true --reference precompute", "--sync_ref_model", "there is none to move"),
        ("--ref_model_sync_steps 5", "--ref_model_sync_steps", "without sync_ref_model"),
        ("--rlhf_type kto --gradient_accumulation_steps 1", "--gradient_accumulation_steps", "a step has only one"),
        ("--rlhf_type kto --global_batch_size 1", "--global_batch_size", "a step has only one"),
        ("--rlhf_type gkd", "--teacher_model", "gkd needs a teacher"),
        (GKD + "--teacher_self true", "--teacher_model and --teacher_self", "several teachers"),
        ("--rlhf_type gkd --teacher_logits . --topk_tail bucket", "--teacher_logits", "--lmbda"),
        ("--rlhf_type gkd --teacher_logits gone --lmbda 0", "--teacher_logits", "there is no folder gone"),
        ("--rlhf_type gkd --teacher_model_server http://x/v1", "--teacher_model_server", "gkd_logits_topk"),
        ("--rlhf_type gkd --teacher_model_server x --gkd_logits_topk 5", "--teacher_model_server", "is no address"),
        (
            "--rlhf_type gkd --teacher_model_server http://x --gkd_logits_topk 5 --seq_kd true",
            "--seq_kd", "one that runs here",
        ),
        (GKD + "--teacher_prompt hi", "--teacher_prompt", "is for teacher_self"),
        (GKD + "--topk_tail bucket", "--topk_tail", "whole vocabulary"),
        (GKD + "--on_policy_objective policy_gradient --lmbda 0", "--on_policy_objective", "there are none"),
    ],
)  # fmt: skip
def test_refused(words, flag, message, monkeypatch):
    for name in ("WORLD_SIZE", "NPROC_PER_NODE", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    found = problems(words)
    assert len(found) == 1, found
    text = f"{found[0].message} {found[0].fix}"
    assert message in text and flag in [*found[0].where.split(" and "), found[0].where]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--packing true --max_length 64",
        "--loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1",
        "--loss_type exo_pair --label_smoothing 0.001",
        "--sync_ref_model true --reference copy --tuner_type full",
        "--streaming true --max_steps 5",
        "--tuner_type full --reference copy --deepspeed zero2",
        "--tuner_type full --deepspeed zero3",
        "--f_divergence_type alpha_divergence --f_alpha_divergence_coef 0.5",
        "--rlhf_type kto --gradient_accumulation_steps 2",
        "--rlhf_type kto --gradient_accumulation_steps 1 --nproc_per_node 2",
        "--rlhf_type kto --loss_type apo_zero_unpaired --gradient_accumulation_steps 1",
        "--rlhf_type rm --center_rewards_coefficient 0.01 --metric_for_best_model eval_rewards/accuracies",
        "--rlhf_type gkd --teacher_self true",
        "--rlhf_type gkd --teacher_self true --tuner_type full",  # rows may bring what only the teacher sees
        "--rlhf_type gkd --teacher_logits . --lmbda 0",
        "--rlhf_type gkd --teacher_model t --seq_kd true --gkd_logits_topk 20 --topk_tail renormalize",
    ],
)
def test_allowed(words, monkeypatch):
    for name in ("WORLD_SIZE", "NPROC_PER_NODE", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    assert problems(words) == []


def test_one_row_for_each_of_two_groups_of_ranks_is_one_row_where_ranks_share_it(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = "--rlhf_type kto --gradient_accumulation_steps 1 --nproc_per_node 2 --sequence_parallel_size 2"
    assert ["a step has only one" in problem.message for problem in problems(words)] == [True]


@pytest.mark.parametrize("method", ["ppo", "grpo"])
def test_reinforcement_learning_is_refused_by_name(method):
    with pytest.raises(UsageError, match=f"rlhf_type {method} is not available yet") as caught:
        parse_command_line(RlhfConfig, ["--rlhf_type", method], command="rlhf")
    assert "reinforcement learning" in caught.value.fix


def test_tables_name_settings_and_every_loss():
    fields = {f.name: f for cls in (PreferenceConfig, DistillConfig) for f in dataclasses.fields(cls)}
    assert set(READ_BY) <= set(fields)
    read_by_all = {"rlhf_type", "compat", "disable_dropout", "share_prompts"}
    assert set(fields) - set(READ_BY) == read_by_all
    for losses in LOSSES.values():
        build_config(RlhfConfig, {"loss_type": list(losses)})


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("--lora_dropout 0.1", "disable_dropout true switches it off"),
        ("--ref_model_sync_steps 512 --rlhf_type orpo", "ref_model_sync_steps does nothing with rlhf_type orpo"),
        ("--rlhf_type gkd --lmbda 0 --top_p 0.9 --temperature 1", "top_p, temperature do nothing with lmbda 0"),
    ],
)
def test_said(words, note):
    found = parse_command_line(RlhfConfig, words.split(), command="rlhf").notes
    assert len(found) == 1 and note in found[0]


def test_what_is_left_open():
    assert settle(PreferenceConfig()).losses == (("sigmoid", 1.0),) and settle(PreferenceConfig()).beta == 0.1
    simpo = PreferenceConfig(rlhf_type="simpo")
    ours = settle(simpo)
    assert (ours.beta, ours.simpo_gamma, ours.cpo_alpha, ours.losses) == (2.0, 1.0, 0.0, (("simpo", 1.0),))
    swift = settle(dataclasses.replace(simpo, compat="ms-swift"))
    assert (swift.beta, swift.simpo_gamma, swift.cpo_alpha) == (2.0, 1.0, 1.0)
    trl = settle(dataclasses.replace(simpo, compat="trl"))
    assert (trl.beta, trl.simpo_gamma, trl.cpo_alpha) == (0.1, 0.5, 0.0)
    gkd = PreferenceConfig(rlhf_type="gkd")
    assert (settle(gkd).beta, settle(gkd).distill_temperature, settle(gkd).topk_tail) == (0.5, 1.0, "bucket")
    swift = settle(dataclasses.replace(gkd, compat="ms-swift"), DistillConfig(temperature=0.7))
    assert (swift.distill_temperature, swift.topk_tail) == (0.7, "renormalise")
    mixed = PreferenceConfig(loss_type=["sigmoid", "sft"], loss_weights=[0.8, 1.0], beta=0.3)
    assert settle(mixed).losses == (("sigmoid", 0.8), ("sft", 1.0)) and settle(mixed).beta == 0.3
    assert settle(PreferenceConfig(rlhf_type="cpo")).cpo_alpha == 1.0


@pytest.mark.parametrize(
    ("preference", "tuner", "adapters", "way"),
    [
        ({}, {}, [], "adapter_off"),
        ({}, {"init_weights": "gaussian"}, [], "adapter_off"),
        ({}, {"tuner_type": "full"}, [], "precompute"),
        ({}, {"init_weights": "pissa_niter_4"}, [], "precompute"),
        ({}, {"lora_bias": "all"}, [], "precompute"),
        ({}, {}, ["sft-adapter"], "precompute"),
        ({"ref_model": "x"}, {}, [], "precompute"),
        ({"precompute_ref_log_probs": True}, {}, [], "precompute"),
        ({"reference": "copy"}, {}, [], "copy"),
        ({"reference_free": True}, {}, [], "none"),
        ({"rlhf_type": "orpo"}, {}, [], "none"),
    ],
)
def test_where_the_reference_comes_from(preference, tuner, adapters, way):
    assert reference_way(PreferenceConfig(**preference), TunerConfig(**tuner), adapters) == way


def test_a_saved_run_is_read_back_by_other_commands(tmp_path):
    config = build_config(RlhfConfig, {"model": "m", "loss_type": ["ipo"], "temperature": 0.5, "rlhf_type": "dpo"})
    save_config(config, tmp_path)
    assert load_config(RlhfConfig, tmp_path) == config
    assert load_config(SftConfig, tmp_path).task.loss_type is None
    assert load_config(InferConfig, tmp_path).generation.temperature is None
    assert load_config(SftConfig, tmp_path).template.loss_scale == "last_round"


def convert(tmp_path, text: str):
    source = tmp_path / "theirs.yaml"
    source.write_text(text)
    result = convert_file(source)
    target = tmp_path / "ours.yaml"
    target.write_text(result.to_yaml(source.name))
    parsed = parse_command_line(RlhfConfig, [str(target)], command="rlhf")
    assert result.command == "rlhf" and yaml.safe_load(target.read_text())
    return result, parsed.config


LLAMA_FACTORY = "model_name_or_path: m\nfinetuning_type: lora\n"
AXOLOTL = "base_model: m\nadapter: lora\ndatasets: [{path: ./rows.jsonl, type: chatml.intel}]\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LLAMA_FACTORY + "stage: dpo\npref_beta: 0.2\npref_loss: hinge\ndpo_label_smoothing: 0.1\npref_ftx: 0.5",
         {"rlhf_type": "dpo", "beta": 0.2, "loss_type": ["hinge"], "label_smoothing": 0.1, "rpo_alpha": 0.5}),
        (LLAMA_FACTORY + "stage: dpo\npref_loss: orpo\npref_beta: 0.3", {"rlhf_type": "orpo", "beta": 0.3}),
        (LLAMA_FACTORY + "stage: dpo\npref_loss: simpo\nsimpo_gamma: 0.7",
         {"rlhf_type": "simpo", "beta": 0.1, "simpo_gamma": 0.7}),
        (LLAMA_FACTORY + "stage: kto\nkto_chosen_weight: 1.5\nkto_rejected_weight: 0.5\nref_model: r",
         {"rlhf_type": "kto", "desirable_weight": 1.5, "undesirable_weight": 0.5, "ref_model": "r"}),
        (LLAMA_FACTORY + "stage: rm", {"rlhf_type": "rm", "beta": None}),
        (AXOLOTL + "rl: dpo\nrl_beta: 0.2\nrpo_alpha: 1.0\ndpo_use_weighting: true",
         {"rlhf_type": "dpo", "beta": 0.2, "rpo_alpha": 1.0, "use_weighting": True}),
        (AXOLOTL + "rl: ipo", {"rlhf_type": "dpo", "loss_type": ["ipo"]}),
        (AXOLOTL + "rl: orpo\norpo_alpha: 0.2", {"rlhf_type": "orpo", "beta": 0.2}),
        (AXOLOTL + "rl: simpo\nrl_beta: 2.5", {"rlhf_type": "simpo", "beta": 2.5, "cpo_alpha": 1.0}),
        (AXOLOTL + "rl: kto\nkto_desirable_weight: 0.4", {"rlhf_type": "kto", "desirable_weight": 0.4}),
        (AXOLOTL + "reward_model: true", {"rlhf_type": "rm"}),
        ("rlhf_type: simpo\nmodel: m\ntuner_type: full", {"rlhf_type": "simpo", "cpo_alpha": 1.0, "beta": None}),
        ("rlhf_type: dpo\nmodel: m\ntuner_type: full\nrpo_alpha: 0.1\nloss_type: [sigmoid]", {"rpo_alpha": 0.1}),
    ],
)  # fmt: skip
def test_other_tools_files(tmp_path, text, expected):
    result, config = convert(tmp_path, text)
    assert not result.lost
    assert {name: getattr(config.preference, name) for name in expected} == expected


def test_what_a_method_does_not_read_is_listed(tmp_path):
    result, _ = convert(tmp_path, LLAMA_FACTORY + "stage: rm\npref_beta: 0.2")
    assert set(result.lost) == {"pref_beta"}
    result, _ = convert(tmp_path, AXOLOTL + "rl: dpo\nkto_desirable_weight: 2")
    assert set(result.lost) == {"kto_desirable_weight"}


def test_distillation_of_ms_swift(tmp_path):
    text = "rlhf_type: gkd\nmodel: m\ntuner_type: full\nteacher_model: t\ngkd_logits_topk: 20\ntemperature: 0.8"
    _, config = convert(tmp_path, text)
    assert config.distill.distill_temperature == 0.8 and config.distill.topk_tail == "renormalise"
