"""report.html."""
import json
import re

from harness import report
from harness.folders import append_jsonl, write_jsonl

METRICS = ("sigma", "reward", "accuracy", "entropy", "length", "gradient_norm")
# What no font shows stands among them: a line's end, a zero byte, spaces, a token without a text.
TOKENS = ["<think>", " 6", "*", "7", "\n\n", "\ufffd", "\x00", "  ", ""]
SIGNS = ("\u21b5\n\u21b5\n", "··", "\u2205")


def made_up_run(folder, text="42"):
    """The files of a run of nine steps, with `text` wherever a model's or a data set's can stand."""
    asked = {"question": text, "number": text}
    completion = {
        "text": text, "tokens": [*TOKENS, text], "entropy": [0.5] * 10,
        "rollout_logprobs": [-3.0] * 10, "training_logprobs": [-2.5] * 10}
    group = [completion | {"reward": 0.2, "correct": False, "advantage": -0.9},
             completion | {"reward": 2.2, "correct": True, "advantage": 0.9}]
    for step in range(1, 10):
        append_jsonl(folder / "metrics.jsonl", {"step": step, **dict.fromkeys(METRICS, 0.5)})
        append_jsonl(folder / "samples.jsonl", {"step": step, **asked, "completions": group})
    verdicts = {"before": [False, False, True, True], "after": [True, True, False, True]}
    for when in verdicts:
        answers = [asked | {"greedy": {"text": text, "correct": right}} for right in verdicts[when]]
        write_jsonl(folder / f"answers_{when}.jsonl", answers)
    summary = {"accuracy_before": 0.5, "accuracy_after": 0.7, "greedy_before": 0.5,
               "greedy_after": 0.75, "seconds": 61.2, "settings": {"model": text, "data": text}}
    (folder / "summary.json").write_text(json.dumps(summary))


def report_of(folder):
    report.write_report(folder)
    return (folder / "report.html").read_text(encoding="utf-8")


def test_report_shows_a_run(tmp_path):
    made_up_run(tmp_path)
    page = report_of(tmp_path)
    assert "pass@1 50.0% \u2192 70.0%" in page
    assert re.findall(r"<h3>Step (\d+)</h3>", page) == list("1235679")
    assert page.count('data-s="4.98" data-p="8.21" data-r="1.649"') == 7 * 2 * 10
    assert all(f">{sign}</span>" in page for sign in SIGNS)
    assert page.index("2.2</span>") < page.index("0.2</span>")         # the best answer first
    assert re.findall(r"<td>(\d)</td>", page)[:4] == ["1", "1", "2", "0"]
    assert page.index("From wrong to right") < page.index("From right to wrong")


def test_report_loads_nothing_and_runs_nothing(tmp_path):
    """Whatever models and data say, it is text."""
    made_up_run(tmp_path, text="<script>alert('\"')</script>")
    page = report_of(tmp_path)
    assert not re.search(r"<(script|link|iframe|object|embed|use)\b|\bsrcset=|url\(|@import", page)
    assert re.findall(r'\bsrc="([^"]{22})', page) == ["data:image/png;base64,"]
    assert re.findall('href="(.)', page) == ["#"] * 4
    for place in ('class="question">', "<b>", 'data-r="1.649">', 'class="text">', "<td>"):
        assert f"{place}&lt;script&gt;" in page


def test_report_of_what_is_there(tmp_path):
    """All may be missing, as after a kill."""
    made_up_run(tmp_path)
    for name in ("samples.jsonl", "answers_after.jsonl", "summary.json", "answers_before.jsonl"):
        (tmp_path / name).unlink()
        assert "<img" in report_of(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    page = report_of(tmp_path)
    assert page.endswith("</html>") and "<img" not in page


def test_a_picture_that_cannot_be_drawn_is_one_warning(tmp_path, monkeypatch, capsys):
    """As where matplotlib's settings ask for TeX, which is not there."""
    monkeypatch.setattr(report, "learning_curve", None)
    made_up_run(tmp_path)
    assert "<img" not in report_of(tmp_path)
    warning, = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: a picture could not be drawn (")
