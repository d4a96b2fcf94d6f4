"""A run's report.html: its curve, completions token by token, answers before and after.

    python -c "import harness.report; harness.report.write_report('runs/NAME')"     of a stopped run

The page is one file and loads nothing. Its text and its looks are in report.html.jinja.
"""
import base64
import bisect
import io
import math
import os
import sys
from pathlib import Path

import jinja2

import qerl
from harness.folders import atomic_write, read_json, read_jsonl, read_steps
from harness.errors import reason

STEPS = 7                              # of samples.jsonl, at most
TOKENS = 500                           # of a completion, at most: some 80 bytes each


def write_report(folder):
    """Write report.html and curve.png from the files of a run's folder.

    Any of them may be missing, as after a kill.
    """
    metrics, samples = (read_steps(f"{folder}/{name}.jsonl") for name in ("metrics", "samples"))
    before, after = (read_jsonl(f"{folder}/answers_{when}.jsonl") for when in ("before", "after"))
    path = Path(folder, "summary.json")
    summary = read_json(path) if path.exists() else {}       # of an unfinished run
    settings = summary.pop("settings", {})
    model = settings.get("model")
    data = settings.get("data") or ("GSM8K" if model else "made-up word problems")
    curve = metrics and save_curve(f"{folder}/curve.png", metrics, summary)
    template = Path(__file__).with_name("report.html.jinja").read_text("utf-8")
    page = jinja2.Template(template, autoescape=True, trim_blocks=True, lstrip_blocks=True).render(
        name=Path(folder).resolve().name,
        title=f"{Path(model or 'The built-in policy').name} on {Path(data).name}",
        summary=summary,
        settings=settings,
        held_out=summary.get("held_out_questions", len(before)),
        curve=curve and base64.b64encode(curve).decode(),
        limits=LIMITS,
        metrics=metrics,
        groups=evenly_spread(samples),
        spans=spans,
        answers=compare(before, after),
    )
    atomic_write(f"{folder}/report.html", page)


# --------------------------------------------------------------------------------------------------
# One question, several answers

LIMITS = [0.15, 0.4, 0.7, 1.1, 1.6]    # nats at which a token's shade gets darker
RARE = 0.1                             # below this probability a token is underlined

SIGNS = str.maketrans({"\t": "→ ", "\n": "↵\n"})


def evenly_spread(samples):
    """At most STEPS of the recorded steps."""
    count = min(STEPS, len(samples))
    return [samples[i * (len(samples) - 1) // max(count - 1, 1)] for i in range(count)]


def spans(completion):
    """The last TOKENS tokens of a completion."""
    columns = ("tokens", "entropy", "rollout_logprobs", "training_logprobs")
    return list(map(token_span, *(completion[name][-TOKENS:] for name in columns)))


def token_span(token, entropy, rollout_logprob, training_logprob):
    """A token's text and its figures, as short as they can be: a page has thousands."""
    sampled = math.exp(rollout_logprob)
    ratio = math.exp(min(training_logprob - rollout_logprob, 99.0))
    shade = f"e{bisect.bisect(LIMITS, entropy)}"
    return {
        "text": token.translate(SIGNS) if token.strip(" ") else "·" * len(token) or "∅",
        "class": f"{shade} rare" if sampled < RARE else shade,
        "entropy": f"{entropy:.3g}",
        "sampled": f"{100 * sampled:.3g}",
        "trained": f"{100 * math.exp(training_logprob):.3g}",
        "ratio": f"{ratio:.4g}",
    }


def one_group(samples, batch, text):
    """All completions of one question, token by token, for samples.jsonl.

    It is the first question whose rewards differ, else the first.
    """
    chosen = int(qerl.has_signal(samples.rewards).int().argmax())
    group = samples.rewards.shape[1]
    figures = {
        "entropy": samples.rollout.entropy,
        "rollout_logprobs": batch.rollout_logprobs,
        "training_logprobs": batch.old_logprobs,
    }
    completions = []
    for i in range(group):
        row = chosen * group + i
        sampled = row, slice(int(batch.length[row]))
        completions.append({
            "text": samples.texts[row],
            "reward": samples.rewards[chosen, i].item(),
            "correct": bool(samples.correct[chosen, i]),
            "advantage": round(batch.advantages[row].item(), 4),
            "tokens": [text.decode([token]) for token in batch.tokens[sampled].tolist()],
            **{name: [round(x, 4) for x in t[sampled].tolist()] for name, t in figures.items()},
        })
    question = samples.questions[chosen]
    return {
        "question": question["question"],
        "number": str(question["right"]),
        "completions": completions,
    }


# --------------------------------------------------------------------------------------------------
# Before and after

def compare(before, after):
    """{"wrong to right" and so on: [(a question with its answers before, after)]}, by the greedy one."""
    kinds = {}
    for pair in zip(before, after):
        kind = " to ".join("right" if answer["greedy"]["correct"] else "wrong" for answer in pair)
        kinds.setdefault(kind, []).append(pair)
    return kinds


# --------------------------------------------------------------------------------------------------
# Pictures

# Of each panel: the metric, its title, its unit; and whether the noise is drawn into it.
PANELS = [
    ("accuracy", "Accuracy", "fraction right", False),
    ("reward", "Reward", "mean", False),
    ("entropy", "Entropy", "nats a token", True),
    ("length", "Completion length", "mean tokens", False),
    ("mismatch_kl", "Mismatch: KL of sampled to trained policy", "nats a token", True),
    ("gradient_norm", "Gradient norm, before clipping", "norm", False),
]


def save_curve(path, metrics, summary):
    """Write the learning_curve as a PNG -> its bytes; None, with a warning, if it cannot be drawn."""
    try:
        os.environ.pop("MPLBACKEND", None)          # a notebook's, which "!python ..." inherits, may be missing
        from matplotlib.figure import Figure        # not pyplot, which would take a backend
        png = io.BytesIO()
        figure = Figure(figsize=(13, 6.4), layout="constrained")
        learning_curve(metrics, summary, figure)
        figure.savefig(png, format="png", dpi=110)
    except Exception as e:
        print(f"warning: a picture could not be drawn ({reason(e)})", file=sys.stderr)
        return None
    atomic_write(path, png.getvalue())
    return png.getvalue()


def learning_curve(metrics, summary, figure):
    """PANELS over the steps, with the accuracies of a summary.json, each of which may be missing."""
    steps = [m["step"] for m in metrics]
    axes = figure.subplots(2, 3)
    for axis, (key, title, unit, noisy) in zip(axes.flat, PANELS):
        axis.plot(steps, [m.get(key) for m in metrics], ".-", markersize=3, label="training samples")
        axis.axhline(0, alpha=0)               # or a level line is on the upper edge
        axis.set(title=title, xlabel="step", ylabel=unit, ylim=(0, None))
        axis.grid(alpha=0.3)
        if noisy:
            noise_axis = axis.twinx()
            noise_axis.step(steps, [m["sigma"] for m in metrics], color="tab:red", where="post")
            noise_axis.set(ylabel="noise σ (red)", ylim=(0, None))
    accuracy_axis = axes[0, 0]
    accuracy_axis.set_ylim(0, 1)
    for kind, title, marker in (("accuracy", "pass@1", "o"), ("greedy", "greedy", "s")):
        values = [summary.get(f"{kind}_{when}") for when in ("before", "after")]
        accuracy_axis.plot([0, steps[-1]], values, marker, color="tab:orange", label=f"held-out, {title}",
                           markerfacecolor="none", markersize=9, zorder=3)
    measured = [(m["step"], m["accuracy_validation"]) for m in metrics if "accuracy_validation" in m]
    if measured:
        accuracy_axis.plot(*zip(*measured), "-v", color="tab:green", label="kept apart, pass@1")
    accuracy_axis.legend(frameon=False)
