"""Plots of what is logged beside the loss: which there are, what is in them, and where a run shows them."""

import base64
import html
import json
import re
import warnings
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from test_monitor import PLAN, run_in_terminal

from swift.config.training import MonitorConfig
from swift.monitor import History, build_monitor
from swift.monitor.metric_plot import MOST_CURVES, find_panels, metric_figure, write_metric_plot
from swift.monitor.text import metric_words

RUN = {"loss": 0.5, "learning_rate": 1e-4, "grad_norm": 1.0, "epoch": 0.1, "memory_gib": 1.0, "num_tokens": 9,
       "tokens_per_second": 5.0, "seconds_forward": 0.1, "sent_mib/dp": 3.0}  # fmt: skip


def preference_line(step: int) -> dict[str, float]:
    return {
        **RUN,
        "rewards/chosen": 0.1 * step,
        "rewards/rejected": -0.2 * step,
        "rewards/margins": 0.3 * step,
        "rewards/accuracies": 0.5 + 0.01 * step,
        "logps/chosen": -100.0 + step,
        "logps/rejected": -90.0 - 2 * step,
        "logps/ref_chosen": -100.0,
        "logps/ref_rejected": -90.0,
        "kl": -0.5 * step,
    }


def a_history(folder: Path, *lines: tuple[int, dict[str, float]]) -> History:
    history = History(folder)
    for step, values in lines:
        history.write({"step": step, "time": 1.0, **values})
    history.close()
    return history


def drawn(history: History) -> dict[str, dict[str, list[float]]]:
    """Title -> label of a curve -> its values, read from the figure itself."""
    found = {}
    for axis in metric_figure(history, find_panels(history)).axes:
        labels = [words.get_text() for words in axis.get_legend().get_texts()]
        handles = axis.get_legend().get_lines()
        curves = {(to_hex(line.get_color()), line.get_linestyle()): line for line in axis.lines if not line.get_alpha()}
        found[axis.get_title()] = {
            label: list(curves[to_hex(handle.get_color()), handle.get_linestyle()].get_ydata())
            for label, handle in zip(labels, handles, strict=True)
        }
    return found


def test_a_preference_run_has_its_plots_and_nothing_of_the_machine(tmp_path: Path):
    history = a_history(tmp_path, *((step, preference_line(step)) for step in range(1, 11)))
    plots = drawn(history)
    assert {title: list(curves) for title, curves in plots.items()} == {
        "rewards of chosen and rejected": ["rewards/chosen", "rewards/rejected"],
        "reward margin": ["rewards/margins"],
        "reward accuracy": ["rewards/accuracies"],
        "log-probability of answers": ["logps/chosen", "logps/rejected", "logps/ref_chosen", "logps/ref_rejected"],
        "KL to the reference": ["kl"],
    }
    assert plots["reward margin"]["rewards/margins"] == pytest.approx([0.3 * step for step in range(1, 11)])
    assert plots["log-probability of answers"]["logps/ref_rejected"] == [-90.0] * 10
    assert plots["log-probability of answers"]["logps/rejected"] == [-90.0 - 2 * step for step in range(1, 11)]


def test_an_evaluation_is_drawn_where_training_is(tmp_path: Path):
    lines = [(step, {"rewards/margins": float(step)}) for step in range(1, 5)]
    history = a_history(tmp_path, *lines, (4, {"eval_loss": 0.5, "eval_rewards/margins": 3.5}))
    assert drawn(history) == {"reward margin": {"rewards/margins": [1, 2, 3, 4], "eval_rewards/margins": [3.5]}}


def test_metrics_of_tasks_and_teachers(tmp_path: Path):
    train = {"divergence": 0.5, "nll": 2.0, "teacher_nll": 1.0, "student_entropy": 3.0, "agreement": 0.5,
             "teacher_topk_mass": 0.9, "token_accuracy": 0.4}  # fmt: skip
    tested = {"eval_f1_macro": 0.7, "eval_f1_micro": 0.8, "eval_recall_macro": 0.4, "eval_auc": 0.9,
              "eval_mrr": 0.5, "eval_ndcg": 0.6,
              "eval_ndcg@5": 0.55, "eval_recall@1": 0.1, "eval_recall@5": 0.3, "eval_perplexity": 7.0}  # fmt: skip
    history = a_history(tmp_path, (1, {**RUN, **train}), (1, tested))
    assert {title: set(curves) for title, curves in drawn(history).items()} == {
        "divergence to the teacher": {"divergence"},
        "negative log-likelihood": {"nll", "teacher_nll"},
        "entropy": {"student_entropy"},
        "agreement with the teacher": {"agreement", "teacher_topk_mass"},
        "accuracy": {"token_accuracy"},
        "F1": {"eval_f1_macro", "eval_f1_micro"},
        "precision and recall": {"eval_recall_macro"},
        "area under the ROC curve": {"eval_auc"},
        "ranking": {"eval_mrr", "eval_ndcg", "eval_ndcg@5"},
        "recall": {"eval_recall@1", "eval_recall@5"},
        "perplexity": {"eval_perplexity"},
    }


def test_what_no_table_knows_is_drawn_by_what_names_share(tmp_path: Path):
    unknown = {"mix_share_0": 0.3, "mix_share_1": 0.7, "odd/one": 1.0, "odd/two": 2.0, "router_aux_loss": 1.1}
    history = a_history(tmp_path, (1, {**RUN, **unknown}))
    assert [(panel.title, panel.names) for panel in find_panels(history)] == [
        ("mix_share", ("mix_share_0", "mix_share_1")),
        ("odd", ("odd/one", "odd/two")),
        ("router_aux_loss", ("router_aux_loss",)),
    ]


def test_more_curves_than_can_be_told_apart_are_counted(tmp_path: Path):
    history = a_history(tmp_path, (1, {f"eval_f1/class {number}": 0.5 for number in range(MOST_CURVES + 3)}))
    (axis,) = metric_figure(history, find_panels(history)).axes
    assert axis.get_title() == "f1 (and 3 more in logging.jsonl)"
    assert len(axis.get_legend().get_texts()) == MOST_CURVES


def test_classes_may_have_any_name(tmp_path: Path):
    names = ["$x_{$", "条款", "_hidden", "a%b\\c", "<b>"]
    history = a_history(tmp_path, (1, {f"eval_f1/{name}": 0.5 for name in names}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert write_metric_plot(history, tmp_path / "metrics.png") == ["f1"]
    (axis,) = metric_figure(history, find_panels(history)).axes
    assert [words.get_text() for words in axis.get_legend().get_texts()] == [f"eval_f1/{name}" for name in names]


def run(folder: Path, lines: dict[int, dict[str, float]]) -> str:
    """A run that logs these lines; its report."""
    monitor = build_monitor(MonitorConfig(report_to=["none"]), folder, rank=0)
    monitor.start(PLAN)
    for step, values in lines.items():
        monitor.log(step, values)
    monitor.finish({"status": "finished"})
    return (folder / "report.html").read_text()


def test_the_report_holds_the_plots_and_asks_for_nothing_else(tmp_path: Path, capsys):
    page = run(tmp_path, {step: preference_line(step) | {"eval_f1/<i>": 0.5, '">/a': 1.0} for step in range(1, 8)})
    image = (tmp_path / "metrics.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    found = dict(re.findall(r'<img alt="([^"]*)" src="data:image/png;base64,([^"]*)">', page))
    titles = "rewards of chosen and rejected, reward margin, reward accuracy, log-probability of answers, "
    assert base64.b64decode(found[f"over steps: {titles}KL to the reference, f1, &quot;&gt;"]) == image
    assert base64.b64decode(found["loss over steps"]) == (tmp_path / "loss.png").read_bytes()
    assert page.index("<h2>Loss</h2>") < page.index("<h2>Metrics</h2>") < page.index("<h2>Plan</h2>")
    assert html.escape("eval_f1/<i>") in page and "<i>" not in page
    assert not re.search(r"https?://|<script|<link|url\(", page)


def test_a_run_without_such_metrics_has_no_plots_of_them_nor_those_of_another(tmp_path: Path, capsys):
    run(tmp_path, {1: preference_line(1)})
    assert (tmp_path / "metrics.png").exists()
    page = run(tmp_path, {1: RUN})
    assert not (tmp_path / "metrics.png").exists()
    assert "<h2>Loss</h2>" in page and "<h2>Metrics</h2>" not in page
    page = run(tmp_path, {})
    assert not (tmp_path / "loss.png").exists() and "<img" not in page


def test_warnings_stand_on_top_of_the_report(tmp_path: Path, capsys):
    monitor = build_monitor(MonitorConfig(report_to=["none"]), tmp_path, rank=0)
    monitor.start(PLAN)
    monitor.event("checkpoint", "saved somewhere")
    monitor.event("warning", "a <tag> went wrong")
    monitor.finish({"status": "finished"})
    page = (tmp_path / "report.html").read_text()
    section = page[page.index("<h2>Warnings</h2>") : page.index("<h2>Plan</h2>")]
    assert "a &lt;tag&gt; went wrong" in section and "saved somewhere" not in section
    assert "saved somewhere" in page


def test_lines_of_the_console_tell_margin_and_accuracy():
    words = metric_words({"loss": 0.5, "rewards/margins": 1.23456, "rewards/accuracies": 0.875, "kl": 1.0})
    assert words == ["loss 0.5000", "margin 1.23", "accuracy 0.88"]
    tested = {"eval_loss": 0.5, "eval_rewards/margins": 2.0, "eval_f1/a": 0.1, "eval_f1_macro": 0.25}
    assert metric_words(tested) == ["eval_loss 0.5", "eval_rewards/margins 2", "eval_f1_macro 0.25"]


def test_the_live_line_tells_them_too(tmp_path: Path):
    script = (
        "import json, sys, time; from pathlib import Path\n"
        "from swift.config.training import MonitorConfig; from swift.monitor import build_monitor\n"
        "monitor = build_monitor(MonitorConfig(report_to=['none']), Path(sys.argv[1]), rank=0)\n"
        "monitor.start({'total_steps': 20})\n"
        "monitor.log(4, json.loads(sys.argv[2]))\n"
        "monitor.progress(5, {'loss': 0.25}); time.sleep(0.3); monitor.close()\n"
    )
    output = run_in_terminal(script, str(tmp_path), json.dumps(preference_line(4)))
    live = [line for line in output.replace("\r", "\n").splitlines() if "step 5/20" in line]
    assert live and "loss 0.2500  margin 1.2  accuracy 0.54  5 tok/s" in live[-1]
