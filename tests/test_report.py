"""report.html."""
import json
import os
import re
import subprocess
import sys

import pytest

from common import REPORT_TOKENS
from harness import report
from harness.folders import write_jsonl
from test_qerl import HERE

REPORT_METRICS = {
    "sigma": 0.01,
    "reward": 0.5,
    "accuracy": 0.25,
    "entropy": 0.3,
    "length": 9.0,
    "kl": 0.01,
    "mismatch_kl": float("nan"),
    "gradient_norm": 0.1,
}

REPORT_SUMMARY = {
    "accuracy_before": 0.5,
    "accuracy_after": 0.75,
    "greedy_before": 0.25,
    "greedy_after": 0.5,
    "held_out_questions": 4,
    "seconds": 61.2,
}

REPORT_SETTINGS = {
    "algo": "grpo",
    "beta": 0.04,
    "weights": "nvfp4",
    "gradient_clip": 0.2,
    "sigma_start": 0.01,
}


def recorded_answer(token, reward, advantage, length):
    """A completion as samples.jsonl has it: REPORT_TOKENS and one more token, `length` times."""
    tokens = (REPORT_TOKENS + [token]) * length
    return {
        "text": "".join(tokens),
        "reward": reward,
        "correct": reward > 1,
        "advantage": advantage,
        "tokens": tokens,
        "entropy": [0.05, 0.2, 0.5, 0.9, 1.2, 2.0, 0.0, 0.0, 0.0, 0.3] * length,
        "rollout_logprobs": [-3.0] * len(tokens),
        "training_logprobs": [-2.5] * len(tokens),
    }


def held_out_answers(text, verdicts):
    """answers_before.jsonl or answers_after.jsonl: one question for each verdict."""
    lines = []
    for i, correct in enumerate(verdicts):
        answer = {"text": text, "correct": correct}
        question = {"question": f"{text} {i}", "number": "42"}
        lines.append({**question, "accuracy": answer, "greedy": answer})
    return lines


def made_up_run(folder, steps=9, text="42", length=1):
    """The files of a run, with `text` wherever a model's or a data set's text can stand."""
    samples = []
    for step in range(1, steps + 1):
        worse = recorded_answer(text, 0.2, -0.9, length)
        better = recorded_answer(text, 2.2, 0.9, length)
        question = {"question": text, "number": text}
        samples.append({"step": step, **question, "completions": [worse, better]})
    settings = {**REPORT_SETTINGS, "model": text, "data": text}
    summary = {**REPORT_SUMMARY, "settings": settings}
    metrics = [{"step": step + 1, **REPORT_METRICS} for step in range(steps)]
    before = held_out_answers(text, [False, False, True, True])
    after = held_out_answers(text, [True, True, False, True])
    (folder / "summary.json").write_text(json.dumps(summary))
    write_jsonl(folder / "metrics.jsonl", metrics)
    write_jsonl(folder / "samples.jsonl", samples)
    write_jsonl(folder / "answers_before.jsonl", before)
    write_jsonl(folder / "answers_after.jsonl", after)


def report_of(folder):
    report.write_report(folder)
    return (folder / "report.html").read_text(encoding="utf-8")


def test_report_shows_a_run(tmp_path):
    made_up_run(tmp_path)
    page = report_of(tmp_path)
    assert "pass@1 50.0% \u2192 75.0%" in page
    assert "25.0% \u2192 50.0%" in page
    assert "61 s" in page
    assert re.findall(r"<h3>Step (\d+)</h3>", page) == list("1235679")
    assert re.findall(r"<details open>\s*<summary><h3>Step (\d+)", page) == list("159")
    assert page.count('data-s="4.98" data-p="8.21" data-r="1.649"') == 7 * 2 * 10
    for shown in ("\u21b5\n\u21b5\n", "\u2400", "··", "\u2205"):
        assert f">{shown}</span>" in page
    assert page.index("2.2</span>") < page.index("0.2</span>")             # the best answer first
    assert re.findall(r"<td>(\d)</td>", page)[:4] == ["1", "1", "2", "0"]
    assert page.index("From wrong to right") < page.index("From right to wrong")


def test_report_loads_nothing(tmp_path):
    made_up_run(tmp_path)
    page = report_of(tmp_path)
    assert not re.search(r"<(script|link|iframe|object|embed|use)\b", page)
    assert not re.search(r"\bsrcset=|url\(|@import", page)
    assert re.findall(r'\bsrc="([^"]{22})', page) == ["data:image/png;base64,"]
    assert re.findall('href="(.)', page) == ["#"] * 4


def test_report_escapes_what_models_and_data_say(tmp_path):
    made_up_run(tmp_path, text="<script>alert('\"')</script>")
    page = report_of(tmp_path)
    assert "<script" not in page
    for place in ('class="question">', "<b>", 'data-r="1.649">', 'class="text">', "<td>"):
        assert f"{place}&lt;script&gt;" in page


@pytest.mark.parametrize("missing", [
    ["samples.jsonl"],
    ["answers_before.jsonl"],
    ["answers_after.jsonl"],
    ["summary.json"],
    ["samples.jsonl", "answers_before.jsonl", "answers_after.jsonl", "summary.json"],
])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_report_of_what_is_there(tmp_path, missing, steps):
    made_up_run(tmp_path, steps)
    for name in missing:
        os.remove(tmp_path / name)
    page = report_of(tmp_path)
    assert page.endswith("</html>")
    assert page.count("<img") == (steps > 0)


def test_report_of_long_completions_stays_small(tmp_path):
    made_up_run(tmp_path, length=1000)
    page = report_of(tmp_path)
    assert len(page) < 4e6
    assert "tokens left out here" in page


def test_report_again_and_what_is_no_run(tmp_path, monkeypatch, capsys):
    made_up_run(tmp_path)
    report.main([str(tmp_path)])
    assert (tmp_path / "report.html").exists()
    assert "report.html" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    for argument in (tmp_path, tmp_path / "no-such-folder"):
        with pytest.raises(SystemExit) as stop:
            report.main([str(argument)])
        assert stop.value.code == 2
        assert capsys.readouterr().err.count("error: ") == 1


@pytest.mark.parametrize("environment,setting,drawn", [
    # What notebooks hand on to "!python ...".
    ({"MPLBACKEND": "module://matplotlib_inline.backend_inline"}, "", True),
    ({"MPLBACKEND": "nonsense"}, "", True),
    ({}, "text.usetex: True", False),                  # and there is no TeX on the path
])
def test_a_picture_is_drawn_whatever_the_environment_says_or_is_one_warning(
        tmp_path, environment, setting, drawn):
    (tmp_path / "matplotlibrc").write_text(f"{setting}\n")
    script = ("from harness.report import learning_curve, save_figure\n"
              "step = dict(step=1, accuracy=0.5, reward=0.5, entropy=1.0, length=9, sigma=0.01)\n"
              "save_figure('curve.png', learning_curve, [step], {'pass@1': (0.1, 0.2)})")
    environment = {**os.environ, "PYTHONPATH": HERE, "PATH": "", **environment}
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment,
                            capture_output=True, text=True)
    assert result.returncode == 0
    assert (tmp_path / "curve.png").exists() == drawn
    if drawn:
        assert result.stderr == ""
    else:
        assert result.stderr.startswith("warning: a picture could not be drawn (")
        assert result.stderr.count("\n") == 1
