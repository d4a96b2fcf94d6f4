"""report.html."""
import json
import os
import re
import subprocess
import sys

import pytest

from harness import report
from harness.folders import write_jsonl
from test_qerl import HERE

METRICS = ("sigma", "reward", "accuracy", "entropy", "length", "gradient_norm")
# What no font shows stands among them: a line's end, a zero byte, spaces, a token without a text.
TOKENS = ["<think>", " 6", "*", "7", "\n\n", "\ufffd", "\x00", "  ", ""]
SIGNS = ("\u21b5\n\u21b5\n", "··", "\u2205")


def made_up_run(folder, steps=9, text="42", repeated=1):
    """The files of a run, with `text` wherever a model's or a data set's text can stand."""
    asked = {"question": text, "number": text}
    tokens = [*TOKENS, text] * repeated
    completion = {
        "text": text, "tokens": tokens, "entropy": [0.5] * len(tokens),
        "rollout_logprobs": [-3.0] * len(tokens), "training_logprobs": [-2.5] * len(tokens)}
    group = [completion | {"reward": 0.2, "correct": False, "advantage": -0.9},
             completion | {"reward": 2.2, "correct": True, "advantage": 0.9}]

    def answers(*verdicts):
        return [asked | {"greedy": {"text": text, "correct": right}} for right in verdicts]

    logs = {
        "metrics": [{"step": i + 1, **dict.fromkeys(METRICS, 0.5)} for i in range(steps)],
        "samples": [{"step": i + 1, **asked, "completions": group} for i in range(steps)],
        "answers_before": answers(False, False, True, True),
        "answers_after": answers(True, True, False, True),
    }
    for name, lines in logs.items():
        write_jsonl(folder / f"{name}.jsonl", lines)
    summary = {"accuracy_before": 0.5, "accuracy_after": 0.7, "greedy_before": 0.5,
               "greedy_after": 0.75, "seconds": 61.2, "settings": {"model": text, "data": text}}
    (folder / "summary.json").write_text(json.dumps(summary))


def report_of(folder):
    report.main([str(folder)])
    return (folder / "report.html").read_text(encoding="utf-8")


def test_report_shows_a_run(tmp_path, capsys):
    made_up_run(tmp_path)
    page = report_of(tmp_path)
    assert f"{tmp_path}/report.html" in capsys.readouterr().out
    for shown in ("pass@1 50.0% \u2192 70.0%", "50.0% \u2192 75.0%</dd>", "61 s"):
        assert shown in page
    assert re.findall(r"<h3>Step (\d+)</h3>", page) == list("1235679")
    assert re.findall(r"<details open>\s*<summary><h3>Step (\d+)", page) == list("159")
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


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_report_of_what_is_there(tmp_path, steps):
    """All but metrics.jsonl may be missing, as after a kill."""
    made_up_run(tmp_path, steps)
    for name in ("samples.jsonl", "answers_after.jsonl", "summary.json", "answers_before.jsonl"):
        os.remove(tmp_path / name)
        page = report_of(tmp_path)
        assert page.endswith("</html>")
        assert page.count("<img") == (steps > 0)


def test_report_of_long_completions_stays_small(tmp_path):
    made_up_run(tmp_path, repeated=1000)
    page = report_of(tmp_path)
    assert len(page) < 4e6
    assert "tokens left out here" in page


def test_what_is_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        report.main([str(tmp_path)])
    assert "not a run's folder" in capsys.readouterr().err


PICTURE = """
from harness.report import learning_curve, save_figure
step = dict(step=1, accuracy=0.5, reward=0.5, entropy=1.0, length=9, sigma=0.01)
save_figure('curve.png', learning_curve, [step], {'pass@1': (0.1, 0.2)})
"""


@pytest.mark.parametrize("backend,setting,warning", [
    ("module://matplotlib_inline.backend_inline", "", ""),  # what notebooks hand to "!python ..."
    ("", "text.usetex: True", "warning: a picture could not be drawn ("),       # without TeX
])
def test_a_picture_is_drawn_whatever_the_environment_says_or_is_one_warning(
        tmp_path, backend, setting, warning):
    (tmp_path / "matplotlibrc").write_text(setting)
    environment = {**os.environ, "PYTHONPATH": HERE, "PATH": "", "MPLBACKEND": backend}
    result = subprocess.run([sys.executable, "-c", PICTURE], cwd=tmp_path, env=environment,
                            capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stderr.startswith(warning) and result.stderr.count("\n") == bool(warning)
    assert (tmp_path / "curve.png").exists() == (not warning)
