"""Models for other tasks than predicting tokens give the scores that Hugging Face's own classes give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from distributed.equality import make_batches
from safetensors.torch import load_file, save_file
from training.architectures import COMMON, CONFIGS

from swift.config.inference import MergeConfig
from swift.config.model import ModelConfig
from swift.config.tuner import TunerConfig
from swift.core.errors import ModelError
from swift.models.adapters import Swift
from swift.models.empty import build_empty_model
from swift.models.fill import Start, fill_model
from swift.models.head import find_decoder, find_head, prove_head
from swift.models.kinds import CAUSAL_LM, Task, fresh_parameters, fresh_words, read_task, task_of, write_task
from swift.models.loading import check_context, load_model
from swift.models.memory import estimate_memory
from swift.models.merge import merge_adapter
from swift.models.prepare import choose_attention, decoder_layers, enable_checkpointing, first_position, fix_ends
from swift.models.proof import small_model
from swift.models.tuners import apply_tuner
from swift.objectives import LossTerms
from swift.training.module import Objectives, TrainModule

_ENCODER: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
ENCODERS = {
    "bert": lambda: tf.BertConfig(**_ENCODER),
    "roberta": lambda: tf.RobertaConfig(**_ENCODER),
    "electra": lambda: tf.ElectraConfig(**_ENCODER),
    "deberta": lambda: tf.DebertaV2Config(**_ENCODER),
    "modernbert": lambda: tf.ModernBertConfig(
        **_ENCODER, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, classifier_pooling="mean"
    ),
    "albert": lambda: tf.AlbertConfig(**_ENCODER, embedding_size=32),
    "distilbert": lambda: tf.DistilBertConfig(
        vocab_size=97, dim=64, hidden_dim=96, n_layers=2, n_heads=4, max_position_embeddings=128, pad_token_id=0
    ),
}
DECODERS = {
    name: CONFIGS[kind]
    for name, kind in {
        "llama": "llama",
        "llama-tied": "llama-tied",
        "qwen2": "qwen2-bias",
        "qwen3": "qwen3-qk-norm",
        "gemma2": "gemma2-softcap-window",
        "mistral": "mistral-window",
        "cohere": "cohere-scale",
        "granite": "granite-scale",
    }.items()
} | {"gemma3": lambda: tf.Gemma3TextConfig(**COMMON, head_dim=16, sliding_window=8)}
FAMILIES = DECODERS | ENCODERS
SEQ, TOKEN, EMBED = Task("seq_cls", num_labels=3), Task("token_cls", labels=("in", "out")), Task("embedding")


def save(name: str, folder: Path, auto: Any = None) -> Path:
    """A random checkpoint: of a model that predicts tokens, or as `auto` makes it; all vectors random too."""
    config = FAMILIES[name]()
    config.architectures = None
    auto = auto or (tf.AutoModelForMaskedLM if name in ENCODERS else tf.AutoModelForCausalLM)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = auto.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, task: Task, *, seed: int = 3, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(folder, ModelConfig(), dtype=dtype, task=task, seed=seed)


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Three texts of different lengths, padded on the right with token 0, and their mask."""
    draw = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 97, (3, 11), generator=draw)
    mask = torch.ones_like(ids)
    for row, length in enumerate((11, 7, 4)):
        ids[row, length:], mask[row, length:] = 0, 0
    return ids, mask


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "bert", "roberta", "modernbert"])
def test_scores_of_a_text_are_those_of_hugging_face(name: str, tmp_path: Path) -> None:
    config = FAMILIES[name]()
    config.num_labels = 3
    auto = tf.AutoModelForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        auto.from_config(config).save_pretrained(tmp_path)
    theirs = auto.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager").eval()
    ours = load_model(tmp_path, ModelConfig(), dtype=torch.float64, attn_implementation="eager", task=Task("seq_cls"))
    ids, mask = padded()
    with torch.no_grad():
        states = find_decoder(ours)(input_ids=ids, attention_mask=mask).last_hidden_state
        ends = mask.sum(1) - 1
        pooling = task_of(ours).pooling
        if pooling == "last":
            chosen = torch.stack([states[row, end] for row, end in enumerate(ends)])
        elif pooling == "cls":
            chosen = states[:, 0]
        else:
            chosen = torch.stack([states[row, : end + 1].mean(0) for row, end in enumerate(ends)])
        expected = theirs(input_ids=ids, attention_mask=mask).logits
        assert expected.std() > 1e-3
        torch.testing.assert_close(find_head(ours).logits(chosen), expected, rtol=1e-10, atol=1e-10)
    assert task_of(ours).num_labels == 3 and fresh_parameters(ours) == []


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "roberta"])
def test_scores_of_tokens_are_those_of_hugging_face(name: str, tmp_path: Path) -> None:
    save(name, tmp_path, tf.AutoModelForTokenClassification)
    theirs = tf.AutoModelForTokenClassification.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    ours = load_model(tmp_path, ModelConfig(), dtype=torch.float64, attn_implementation="eager", task=Task("token_cls"))
    ids, mask = padded()
    with torch.no_grad():
        states = find_decoder(ours)(input_ids=ids, attention_mask=mask).last_hidden_state
        expected = theirs(input_ids=ids, attention_mask=mask).logits
        torch.testing.assert_close(find_head(ours).logits(states), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_predicts_tokens_gets_a_head_from_the_seed(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path)
    stored = load_file(folder / "model.safetensors")
    for task, size in ((SEQ, 3), (TOKEN, 2)):
        model, again, other = load(folder, task), load(folder, task), load(folder, task, seed=4)
        empty = build_empty_model(folder, ModelConfig(), dtype=torch.float32, task=task)
        fresh = fresh_parameters(model)
        assert fresh and fresh == fresh_parameters(empty) and fresh[0] in (fresh_words(model) or "")
        assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in empty.named_parameters()}
        found, same, different = (dict(m.named_parameters()) for m in (model, again, other))
        assert any(found[n].shape[0] == size and found[n].std() > 0 for n in fresh if n.endswith("weight"))
        assert all(torch.equal(found[n], same[n]) for n in found)
        assert any(not torch.equal(found[n], different[n]) for n in fresh)
        kept = [n for n in found if n in stored]
        assert all(torch.equal(found[n], stored[n]) for n in kept)
        # everything but a new head came from the file: its numbers are there, whatever their names
        values = {float(t.double().sum()) for t in stored.values()}
        assert all(float(p.detach().double().sum()) in values for n, p in found.items() if n not in fresh)
        prove_head(model, find_decoder(model), find_head(model))


def test_the_head_of_a_new_classifier_is_normal_with_the_models_own_deviation(tmp_path: Path) -> None:
    config = tf.LlamaConfig(**(COMMON | {"hidden_size": 1024, "head_dim": 16}), initializer_range=0.05)
    tf.LlamaForCausalLM(config).save_pretrained(tmp_path)
    weight = load(tmp_path, Task("seq_cls", num_labels=8)).score.weight
    assert abs(weight.mean()) < 0.003 and abs(weight.std() - 0.05) < 0.003


@pytest.mark.parametrize("name", ["llama", "cohere", "bert"])
@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_filling_an_empty_model_gives_the_loaded_one(name: str, tuner: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    settings = TunerConfig(tuner_type=tuner, lora_rank=2)
    dtype = torch.bfloat16
    expected = apply_tuner(load(tmp_path, SEQ, seed=7, dtype=dtype), settings)
    causal_lm = build_empty_model(tmp_path, ModelConfig(), dtype=dtype, task=SEQ)
    whole = apply_tuner(causal_lm, settings)
    for model in (expected, whole) if tuner == "lora" else ():  # a head is trained in fp32, rounded as it was drawn
        for parameter in model.parameters():
            parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    fill_model(whole, causal_lm, Start(tmp_path, ModelConfig(), settings, 7, dtype, SEQ), device="cpu")
    theirs = {n: p for n, p in expected.named_parameters() if ".lora_" not in n}
    ours = dict(whole.named_parameters())
    assert all(torch.equal(p, ours[n]) for n, p in theirs.items())
    assert {n for n, p in ours.items() if p.requires_grad} == {
        n for n, p in expected.named_parameters() if p.requires_grad
    }
    assert fresh_parameters(causal_lm) == fresh_parameters(load(tmp_path, SEQ))


def test_a_head_that_the_checkpoint_has_is_kept_and_its_labels_too(tmp_path: Path) -> None:
    first = load(save("qwen3", tmp_path / "base"), Task("seq_cls", labels=("bad", "fine", "good"), problem_type=None))
    first.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert config["id2label"] == {"0": "bad", "1": "fine", "2": "good"}
    second = load(tmp_path / "saved", Task("seq_cls"), seed=9)
    assert torch.equal(first.score.weight, second.score.weight)
    assert task_of(second).labels == ("bad", "fine", "good") and fresh_words(second) is None


def test_a_family_without_a_class_of_its_own_gets_decoder_and_score(tmp_path: Path) -> None:
    first = load(save("cohere", tmp_path / "base"), SEQ)
    assert type(first).__name__ == "CohereForSequenceClassification" and first.score.weight.shape == (3, 64)
    first.save_pretrained(tmp_path / "saved")
    second = load(tmp_path / "saved", SEQ, seed=9)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    "task, words",
    [
        (Task("seq_cls", num_labels=5), "head for 3 labels, and 5 are asked for"),
        (Task("token_cls", num_labels=3), "is a sequence classifier, and a token classifier is asked for"),
    ],
)
def test_another_head_than_the_checkpoint_has_is_refused(task: Task, words: str, tmp_path: Path) -> None:
    load(save("llama", tmp_path / "base"), SEQ).save_pretrained(tmp_path / "saved")
    for attempt in (
        lambda: load(tmp_path / "saved", task),
        lambda: build_empty_model(tmp_path / "saved", ModelConfig(), dtype=torch.float32, task=task),
    ):
        with pytest.raises(ModelError, match=words):
            attempt()


def test_what_a_checkpoint_should_have_and_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="how many labels"):
        load(save("llama", tmp_path / "base"), Task("seq_cls"))
    load(tmp_path / "base", SEQ).save_pretrained(tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    del stored["score.weight"]
    save_file(stored, tmp_path / "saved" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks weights: score\.weight"):
        load(tmp_path / "saved", SEQ)
    del stored["model.norm.weight"]
    (tmp_path / "base" / "model.safetensors").unlink()
    save_file(stored, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks weights: model\.norm\.weight"):
        load(tmp_path / "base", SEQ)


@pytest.mark.parametrize("name", ["qwen3", "bert", "albert"])
def test_an_embedding_model_is_the_decoder_alone_and_other_tools_load_it(name: str, tmp_path: Path) -> None:
    model = load(save(name, tmp_path / "base"), EMBED)
    assert find_decoder(model) is model and task_of(model).pooling == ("last" if name == "qwen3" else "mean")
    assert not any("pooler" in n or "lm_head" in n for n, _ in model.named_parameters())
    model.save_pretrained(tmp_path / "saved")
    ids, mask = padded()
    with torch.no_grad():
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        assert torch.equal(find_head(model).logits(states[0]), states[0])
        other = tf.AutoModel.from_pretrained(tmp_path / "saved").eval()
        torch.testing.assert_close(other(input_ids=ids, attention_mask=mask).last_hidden_state, states)
        again = load(tmp_path / "saved", EMBED)
        torch.testing.assert_close(again(input_ids=ids, attention_mask=mask).last_hidden_state, states)


def test_an_embedding_model_pools_as_its_files_say(tmp_path: Path) -> None:
    save("bert", tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    assert task_of(load(tmp_path, EMBED)).pooling == "cls"
    assert task_of(load(tmp_path, Task("embedding", pooling="mean"))).pooling == "mean"
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(ModelError, match="pools in a way"):
        load(tmp_path, EMBED)


@pytest.mark.parametrize("name", ["llama", "deberta", "roberta"])
def test_an_adapter_trains_the_new_head_in_full_and_brings_it_along(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path / "base")
    model = load(folder, SEQ)
    fresh = fresh_parameters(model)
    tuned: Any = apply_tuner(model, TunerConfig(lora_rank=2))
    trained = {n: p for n, p in tuned.named_parameters() if p.requires_grad}
    full = {n for n in trained if ".lora_" not in n}
    assert full == {
        f"base_model.model.{n.partition('.')[0]}.modules_to_save.default{dot}{rest}"
        for n in fresh
        for _, dot, rest in [n.partition(".")]
    }
    with torch.no_grad():
        for number, parameter in enumerate(trained.values()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.1)
    tuned.eval()
    ids, mask = padded()
    expected = tuned(input_ids=ids, attention_mask=mask).logits
    Swift.save(tuned, tmp_path / "adapter")
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert saved["task_type"] == "SEQ_CLS" and len(saved["modules_to_save"]) == len(set(saved["modules_to_save"]))
    for trainable in (False, True):
        loaded = Swift.from_pretrained(load(folder, SEQ, seed=99), tmp_path / "adapter", is_trainable=trainable)
        torch.testing.assert_close(loaded.eval()(input_ids=ids, attention_mask=mask).logits, expected)
    again = json.loads((Swift.save(loaded, tmp_path / "again") / "adapter_config.json").read_text())
    assert sorted(again["modules_to_save"]) == sorted(saved["modules_to_save"])


@pytest.mark.parametrize("kind", ["seq_cls", "token_cls", "embedding"])
def test_a_merged_adapter_answers_as_before_for_other_tools(kind: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    task = Task("embedding") if kind == "embedding" else Task(kind, num_labels=3)  # type: ignore[arg-type]
    tuned: Any = apply_tuner(load(tiny_model_dir, task), TunerConfig(lora_rank=2)).eval()
    with torch.no_grad():
        for number, (_, p) in enumerate((n, p) for n, p in tuned.named_parameters() if p.requires_grad):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(number)) * 0.1)
    Swift.save(tuned, tmp_path / "adapter")
    write_task(tmp_path / "adapter", task_of(tuned.get_base_model()))
    report = merge_adapter(
        tiny_model_dir,
        tmp_path / "adapter",
        tmp_path / "merged",
        model_config=ModelConfig(model=str(tiny_model_dir)),
        merge_config=MergeConfig(),
    )
    assert report.merged.tokens > 100
    auto = {
        "seq_cls": tf.AutoModelForSequenceClassification,
        "token_cls": tf.AutoModelForTokenClassification,
        "embedding": tf.AutoModel,
    }[kind]
    merged = auto.from_pretrained(tmp_path / "merged").eval()
    ids = torch.tensor([[5, 8, 13, 21]])
    answer = "last_hidden_state" if kind == "embedding" else "logits"
    expected, got = (getattr(m(input_ids=ids), answer) for m in (tuned, merged))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert read_task(tmp_path / "merged") == task_of(tuned.get_base_model())


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_are_trained_on_padded_texts_as_hugging_face_would(name: str, tmp_path: Path) -> None:
    """Places count from where the family counts them, which is not 0 in RoBERTa's."""
    model = load(save(name, tmp_path), SEQ)
    small_model(model.config, task=task_of(model))  # as where the model lies spread over processes
    seen = []

    def remember(hidden: torch.Tensor, head: Any, batch: Any) -> LossTerms:
        seen.append((hidden, head.logits(hidden)))
        return LossTerms(hidden.sum(), 1.0)

    decoder = find_decoder(model)
    objectives = Objectives(remember, remember)
    module = TrainModule(model, decoder=decoder, head=find_head(model), objectives=objectives).eval()
    (batch,) = make_batches("padded", 1)
    module(batch)
    assert (batch.attention_mask == 0).any()
    states = decoder(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    torch.testing.assert_close(seen[0][0], states.flatten(0, 1)[batch.target_index])
    assert seen[0][1].shape == (len(seen[0][0]), 3)


def test_positions_that_a_family_keeps_for_padding_are_not_there_for_texts(tmp_path: Path) -> None:
    model = load(save("roberta", tmp_path), SEQ)
    first = first_position(find_decoder(model))
    assert first == 1 and check_context(model.config, 127, first_position=first) is None
    with pytest.raises(ModelError, match="has 127 positions"):
        check_context(model.config, 128, first_position=first)


def test_a_task_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_task(tmp_path, CAUSAL_LM)
    assert read_task(tmp_path) is None
    task = Task("seq_cls", 2, "regression", ("好", "b"), "mean", {"yes": "yes", "dims": [64, 128]})
    write_task(tmp_path, task)
    assert read_task(tmp_path) == task
    values = json.loads((tmp_path / "task.json").read_text())
    (tmp_path / "task.json").write_text(json.dumps(values | {"color": 1}))
    with pytest.raises(ModelError, match="color"):
        read_task(tmp_path)
    (tmp_path / "task.json").write_text("{")
    with pytest.raises(ModelError, match="can't be read"):
        read_task(tmp_path)


@pytest.mark.parametrize(
    "values, words",
    [
        ({"kind": "seq_clz"}, "did you mean seq_cls"),
        ({"kind": "seq_cls", "num_labels": 0}, "0 labels"),
        ({"kind": "seq_cls", "num_labels": 3, "labels": ("a", "b")}, "2 labels are named, and num_labels is 3"),
        ({"kind": "seq_cls", "labels": ("a", "a")}, "'a' is named twice"),
        ({"kind": "embedding", "pooling": "max"}, "'max'"),
    ],
)
def test_a_task_that_makes_no_sense_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Task(**values)


@pytest.mark.parametrize("name, free", [("qwen3", True), ("bert", False), ("modernbert", False)])
@pytest.mark.parametrize("task", [SEQ, TOKEN, EMBED], ids=["seq_cls", "token_cls", "embedding"])
def test_such_a_model_is_prepared_for_training(name: str, free: bool, task: Task, tmp_path: Path) -> None:
    model = load(save(name, tmp_path), task)
    padding_free, notes = choose_attention(model, "auto", padding_free=None, packing=False)
    assert padding_free is free and bool(notes) is not free
    fix_ends(model, [3])
    assert len(decoder_layers(find_decoder(model))) == 2
    enable_checkpointing(model)
    small = small_model(model.config, task=task_of(model))
    assert type(small) is type(model)
    estimate = estimate_memory(model, model.config, tokens=64, dtype=torch.float32, logits_rows=0)
    assert estimate.weights == sum(p.numel() * 4 for p in model.parameters())
    ids, mask = padded()
    states = find_decoder(model.train())(input_ids=ids, attention_mask=mask).last_hidden_state
    find_head(model).logits(states[:, 0]).square().sum().backward()
    # a head that nothing goes through would stop data-parallel training
    assert all(p.grad is not None for p in model.parameters())
