"""`swift rlhf` against a plain loop: padded batches through the Hugging Face model in float64, papers' formulas, AdamW.

Nothing of the program is used in the loop, not even its chat encoder or its optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from preference_rows import LOSSES, rows_of
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid
from torch.nn.utils import clip_grad_norm_

from swift.commands.rlhf import rlhf

COUNT, SIZE, STEPS, RATE = 11, 4, 3, 2e-4


class ByHand:
    """Models, rows and the running numbers of one plain loop."""

    def __init__(self, folder: Path, rows: list[dict[str, Any]]) -> None:
        self.tokenizer = tf.AutoTokenizer.from_pretrained(folder)
        kind = tf.AutoModelForSequenceClassification if _scores(folder) else tf.AutoModelForCausalLM
        self.model, self.reference = (
            kind.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval() for _ in range(2)
        )
        self.rows = rows
        self.delta = self.seen = 0.0

    def tokens(self, row: dict[str, Any], answer: str) -> tuple[list[int], int]:
        """Ids of a whole conversation, and how many of them are the prompt's."""
        talk = row["messages"][:-1]
        prompt = self.tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        encode = lambda text: self.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
        return encode(prompt + answer + "<|im_end|>"), len(encode(prompt))

    def rejected(self, row: dict[str, Any]) -> str:
        return row["rejected_response"]

    def chosen(self, row: dict[str, Any]) -> str:
        return row["messages"][-1]["content"]

    def logprobs(self, model: Any, sequences: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability of each answer's tokens and log Σ p² of their distributions, [rows, tokens]; which count."""
        width = max(len(ids) for ids, _ in sequences)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in sequences])
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in sequences])
        table = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)[:, :-1]
        scored = torch.zeros_like(ids, dtype=torch.bool)
        for number, (tokens, prompt) in enumerate(sequences):
            scored[number, prompt : len(tokens)] = True
        found = table.gather(2, ids[:, 1:, None])[..., 0]
        return found, (2 * table).logsumexp(-1), scored[:, 1:]

    def sums(self, model: Any, sequences: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
        logprobs, _, scored = self.logprobs(model, sequences)
        return (logprobs * scored).sum(1), scored.sum(1).double()

    def pairs(self, numbers: list[int]) -> tuple[list, list]:
        rows = [self.rows[i] for i in numbers]
        return [self.tokens(r, self.chosen(r)) for r in rows], [self.tokens(r, self.rejected(r)) for r in rows]


def _scores(folder: Path) -> bool:
    return "SequenceClassification" in (folder / "config.json").read_text()


Loss = Callable[[ByHand, list[int]], Tensor]


def on_sums(formula: Callable[..., Tensor], *, reference: bool = True) -> Loss:
    """A loss from S_w, S_l, |y_w|, |y_l| and the reference's S_w, S_l."""

    def loss(hand: ByHand, numbers: list[int]) -> Tensor:
        better, worse = hand.pairs(numbers)
        (sw, nw), (sl, nl) = hand.sums(hand.model, better), hand.sums(hand.model, worse)
        with torch.no_grad():
            rw, rl = (hand.sums(hand.reference, each)[0] if reference else 0.0 for each in (better, worse))
        return formula(hand, sw, sl, nw, nl, rw, rl)

    return loss


def dpo_rpo(hand: ByHand, sw, sl, nw, nl, rw, rl) -> Tensor:
    return -logsigmoid(0.1 * ((sw - rw) - (sl - rl))).mean() - 0.5 * sw.sum() / nw.sum()


def ipo(hand: ByHand, sw, sl, nw, nl, rw, rl) -> Tensor:
    return (((sw - rw) / nw - (sl - rl) / nl - 5.0) ** 2).mean()


def bco(hand: ByHand, sw, sl, nw, nl, rw, rl) -> Tensor:
    rewards = 0.1 * torch.cat([sw - rw, sl - rl]).detach()
    hand.delta = float(hand.delta * hand.seen + rewards.sum()) / (hand.seen + len(rewards))
    hand.seen += len(rewards)
    return -(logsigmoid(0.1 * (sw - rw) - hand.delta) + logsigmoid(-(0.1 * (sl - rl) - hand.delta))).mean()


def aot(hand: ByHand, sw, sl, nw, nl, rw, rl) -> Tensor:
    return -logsigmoid(0.1 * ((sw - sl).sort().values - (rw - rl).sort().values)).mean()


def orpo(hand: ByHand, sw, sl, nw, nl, rw, rl) -> Tensor:
    w, l = (sw / nw).exp(), (sl / nl).exp()  # noqa: E741
    odds = torch.log(w / (1 - w)) - torch.log(l / (1 - l))
    return -sw.sum() / nw.sum() - 0.1 * logsigmoid(odds).mean()


def cpo(hand: ByHand, sw, sl, nw, nl, rw, rl) -> Tensor:
    return -logsigmoid(0.1 * (sw - sl)).mean() - sw.sum() / nw.sum()


def simpo(hand: ByHand, sw, sl, nw, nl, rw, rl) -> Tensor:
    return -logsigmoid(2.0 * (sw / nw - sl / nl) - 1.0).mean()


def ld_dpo(hand: ByHand, numbers: list[int]) -> Tensor:
    better, worse = hand.pairs(numbers)
    total = torch.zeros((), dtype=torch.float64)
    for one, other in zip(better, worse, strict=True):
        short, ratio = min(len(one[0]) - one[1], len(other[0]) - other[1]), []
        for sequence in (one, other):
            with torch.no_grad():
                theirs, _, scored = hand.logprobs(hand.reference, [sequence])
            answer = (hand.logprobs(hand.model, [sequence])[0] - theirs)[scored]
            ratio.append(answer[:short].sum() + 0.3 * answer[short:].sum())
        total = total - logsigmoid(0.1 * (ratio[0] - ratio[1]))
    return total / len(numbers)


def wpo(hand: ByHand, numbers: list[int]) -> Tensor:
    ratios, weights = [], []
    for side in hand.pairs(numbers):
        logprobs, collision, scored = hand.logprobs(hand.model, side)
        with torch.no_grad():
            reference = hand.sums(hand.reference, side)[0]
        ratios.append((logprobs * scored).sum(1) - reference)
        weights.append(((logprobs - collision) * scored).sum(1).div(scored.sum(1)).exp().detach())
    return (-logsigmoid(0.1 * (ratios[0] - ratios[1])) * weights[0] * weights[1]).mean()


def kto(hand: ByHand, numbers: list[int]) -> Tensor:
    rows = [hand.rows[i] for i in numbers]
    own = [hand.tokens(row, hand.chosen(row)) for row in rows]
    # the completion of the row half of the data away, under this row's prompt
    strange = [hand.tokens(hand.rows[i], hand.chosen(hand.rows[(i + COUNT // 2) % COUNT])) for i in numbers]
    with torch.no_grad():
        kl = (hand.sums(hand.model, strange)[0] - hand.sums(hand.reference, strange)[0]).mean()
        reference = hand.sums(hand.reference, own)[0]
    z0, h = max(0.0, float(kl)), hand.sums(hand.model, own)[0] - reference
    liked = torch.tensor([row["label"] for row in rows])
    return torch.where(liked, 1.5 * (1 - torch.sigmoid(0.1 * (h - z0))), 1 - torch.sigmoid(0.1 * (z0 - h))).mean()


def rm(hand: ByHand, numbers: list[int]) -> Tensor:
    scores = []
    for side in hand.pairs(numbers):
        scores.append(torch.stack([hand.model(input_ids=torch.tensor([ids])).logits[0, 0] for ids, _ in side]))
    margin = torch.tensor([hand.rows[i]["margin"] for i in numbers], dtype=torch.float64)
    logit = scores[0] - scores[1] - margin
    return (
        binary_cross_entropy_with_logits(logit, torch.ones_like(logit)) + 0.1 * (scores[0] + scores[1]).square().mean()
    )


HANDS: dict[str, tuple[dict[str, Any], Loss]] = {
    "dpo, rpo_alpha": (LOSSES["rpo_alpha"], on_sums(dpo_rpo)),
    "ipo": (LOSSES["ipo"], on_sums(ipo)),
    "bco": (LOSSES["bco_pair"], on_sums(bco)),
    "aot": (LOSSES["aot"], on_sums(aot)),
    "ld_alpha": (LOSSES["ld_alpha"], ld_dpo),
    "wpo": (LOSSES["wpo"], wpo),
    "orpo": (LOSSES["orpo"], on_sums(orpo, reference=False)),
    "cpo": (LOSSES["cpo"], on_sums(cpo, reference=False)),
    "simpo": (LOSSES["simpo"], on_sums(simpo, reference=False)),
    "kto": (LOSSES["kto"], kto),
    "rm": (LOSSES["rm"], rm),
}


def train_by_hand(hand: ByHand, loss: Loss) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the steps."""
    groups = [[p for p in hand.model.parameters() if (p.ndim >= 2) == matrix] for matrix in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}],
        lr=RATE,
        betas=(0.9, 0.95),
        eps=1e-4,
    )
    losses, norms = [], []
    for start in range(0, STEPS * SIZE, SIZE):
        value = loss(hand, list(range(start, min(start + SIZE, COUNT))))
        value.backward()
        norms.append(float(clip_grad_norm_(hand.model.parameters(), 1.0)))
        losses.append(float(value.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


@pytest.fixture(scope="module")
def scorer_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a head that gives one number."""
    folder = tmp_path_factory.mktemp("scorer")
    torch.manual_seed(1)
    tf.AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=1).save_pretrained(folder)
    tf.AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(folder)
    return folder


QUICK = ("dpo, rpo_alpha", "bco", "orpo", "simpo", "kto", "rm")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in HANDS])
def test_three_steps(name: str, tiny_model_dir: Path, scorer_dir: Path, write_rows: Any, tmp_path: Path) -> None:
    flags, loss = HANDS[name]
    model, rows = scorer_dir if name == "rm" else tiny_model_dir, rows_of(flags, COUNT)
    hand = ByHand(model, rows)
    rlhf(
        **flags,
        model=str(model),
        dataset=[str(write_rows(tmp_path / "rows.jsonl", rows))],
        output_dir=str(tmp_path / "run"),
        tuner_type="full",
        torch_dtype="float32",
        max_steps=STEPS,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=SIZE // 2,
        train_dataloader_shuffle=False,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_epsilon=1e-4,
        add_version=False,
        report_to=["none"],
    )
    losses, norms = train_by_hand(hand, loss)
    lines = [json.loads(line) for line in (tmp_path / "run" / "logging.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "grad_norm" in line]
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-5)
    assert [line["grad_norm"] for line in lines] == pytest.approx(norms, rel=1e-4)
    ours = load_file(tmp_path / "run" / f"checkpoint-{STEPS}" / "model.safetensors")
    theirs, before = hand.model.state_dict(), hand.reference.state_dict()
    assert ours.keys() == theirs.keys()
    off = sum(float((ours[n].double() - theirs[n]).square().sum()) for n in ours) ** 0.5
    moved = sum(float((theirs[n] - before[n]).square().sum()) for n in ours) ** 0.5
    assert off <= 1e-3 * moved, off / moved
