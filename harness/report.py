"""A run's report.html: its curve, completions token by token, answers before and after.

    python -m harness.report FOLDER           write the page of an existing run again

The page is one file and loads nothing. Its text and its looks are in report.html.jinja.
"""
import base64
import bisect
import io
import json
import math
import os
import statistics
import sys

import jinja2

import qerl
from harness.command import Parser, one_line
from harness.folders import atomic_write, read_jsonl
from qerl import UserError, reason

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS = 7                              # of samples.jsonl, at most
TOKENS = 30_000                        # on the page, at most: some 80 bytes each
CHANGED = {"wrong to right": 6, "right to wrong": 4}                # questions shown, at most


def write_report(folder):
    """Write report.html and curve.png from the files of a run's folder."""
    shown = contents(folder)
    if shown["curve"]:
        atomic_write(f"{folder}/curve.png", shown["curve"])
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["percent"] = percent
    templates.filters["base64"] = lambda data: base64.b64encode(data).decode()
    page = templates.get_template("report.html.jinja").render(shown)
    atomic_write(f"{folder}/report.html", page)


def contents(folder):
    """What the template shows. Any file but metrics.jsonl may be missing, as after a kill."""
    if not os.path.exists(f"{folder}/metrics.jsonl"):
        raise UserError(f"{folder}: not a run's folder (it has no metrics.jsonl)")
    metrics = read_jsonl(f"{folder}/metrics.jsonl")
    before = read_jsonl(f"{folder}/answers_before.jsonl")
    after = read_jsonl(f"{folder}/answers_after.jsonl")
    summary = read_summary(f"{folder}/summary.json")
    settings = summary.pop("settings", {})
    accuracy = {
        "pass@1": before_and_after("accuracy", summary, before, after),
        "greedy": before_and_after("greedy", summary, before, after),
    }
    held_out = summary.get("held_out_questions", len(before))
    return {
        "name": os.path.basename(os.path.abspath(folder)),
        "model": last_part(settings.get("model") or "The built-in policy"),
        "data": data_name(settings),
        "summary": summary,
        "settings": settings,
        "accuracy": accuracy,
        "held_out": held_out,
        "standard_error": 0.5 / math.sqrt(max(held_out, 1)),
        "steps": len(metrics),
        "curve": picture(learning_curve, metrics, accuracy) if metrics else None,
        "limits": LIMITS,
        "groups": groups(read_jsonl(f"{folder}/samples.jsonl"), metrics),
        "answers": compare(before, after),
    }


def read_summary(path):
    """summary.json's object; an unfinished run has none: {}."""
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def before_and_after(kind, summary, before, after):
    """The two accuracies as summary.json has them, else of the answers, else None."""
    return (
        summary.get(f"{kind}_before", mean_correct(before, kind)),
        summary.get(f"{kind}_after", mean_correct(after, kind)),
    )


def mean_correct(answers, kind):
    return statistics.fmean(a[kind]["correct"] for a in answers) if answers else None


def data_name(settings):
    """What the questions were, as a heading says it."""
    if settings.get("data"):
        return last_part(settings["data"])
    return "GSM8K" if settings.get("model") else "made-up word problems"


def last_part(path):
    return os.path.basename(os.path.normpath(path))


def percent(fraction):
    return "?" if fraction is None else f"{fraction:.1%}"


# --------------------------------------------------------------------------------------------------
# One question, several answers

LIMITS = [0.15, 0.4, 0.7, 1.1, 1.6]    # nats at which a token's shade gets darker
RARE = 0.1                             # below this probability a token is underlined

# Signs for what no font shows: arrows for tabs and line ends, Unicode's pictures for the rest.
SIGNS = {code: chr(0x2400 + code) for code in range(32)} | {ord("\t"): "→ ", ord("\n"): "↵\n"}


def groups(samples, metrics):
    """At most STEPS of the recorded steps, evenly spread; the first, middle and last are open."""
    shown = spread(samples, STEPS)
    completions = sum(len(sample["completions"]) for sample in shown)
    limit = TOKENS // max(completions, 1)
    first_middle_last = (0, len(shown) // 2, len(shown) - 1)
    logged = {m["step"]: m for m in metrics}
    return [
        {
            **sample,
            "open": i in first_middle_last,
            "logged": logged.get(sample["step"], {}),
            "mean": statistics.fmean(c["reward"] for c in sample["completions"]),
            "teaches": any(c["advantage"] for c in sample["completions"]),
            "cards": [card(c, limit)
                      for c in sorted(sample["completions"], key=lambda c: -c["reward"])],
        }
        for i, sample in enumerate(shown)
    ]


def spread(items, count):
    """At most `count` of the items, evenly spaced, with the first and the last."""
    if len(items) <= count:
        return items
    return [items[i * (len(items) - 1) // (count - 1)] for i in range(count)]


def card(completion, limit):
    """A completion as the page shows it; of more than `limit` tokens, the middle is left out."""
    tokens = list(zip(
        completion["tokens"],
        completion["entropy"],
        completion["rollout_logprobs"],
        completion["training_logprobs"],
    ))
    left_out = max(len(tokens) - limit, 0)
    beginning = len(tokens) if not left_out else limit * 2 // 3
    return {
        "reward": completion["reward"],
        "correct": completion["correct"],
        "advantage": completion["advantage"],
        "length": len(tokens),
        "left_out": left_out,
        "beginning": [token_span(*t) for t in tokens[:beginning]],
        "end": [token_span(*t) for t in tokens[beginning + left_out:]],
    }


def token_span(token, entropy, rollout_logprob, training_logprob):
    """A token's text and its figures, as short as they can be: a page has thousands."""
    sampled = math.exp(rollout_logprob)
    trained = math.exp(training_logprob)
    ratio = math.exp(min(training_logprob - rollout_logprob, 99.0))
    shade = f"e{bisect.bisect(LIMITS, entropy)}"
    return {
        "text": token.translate(SIGNS) if token.strip(" ") else "·" * len(token) or "∅",
        "class": f"{shade} rare" if sampled < RARE else shade,
        "entropy": f"{entropy:.3g}",
        "sampled": f"{100 * sampled:.3g}",
        "trained": f"{100 * trained:.3g}",
        "ratio": f"{ratio:.4g}",
    }


def one_group(samples, batch, text):
    """All completions of one question, token by token, for samples.jsonl.

    It is the first question whose rewards differ, else the first.
    """
    chosen = int(qerl.has_signal(samples.rewards).int().argmax())
    group = samples.rewards.shape[1]
    completions = []
    for row in range(chosen * group, (chosen + 1) * group):
        length = int(batch.length[row])
        completions.append({
            "text": samples.texts[row],
            "reward": samples.rewards.flatten()[row].item(),
            "correct": bool(samples.correct.flatten()[row]),
            "advantage": round(batch.advantages[row].item(), 4),
            "tokens": [text.decode([token]) for token in batch.tokens[row, :length].tolist()],
            "entropy": rounded(samples.rollout.entropy[row, :length]),
            "rollout_logprobs": rounded(batch.rollout_logprobs[row, :length]),
            "training_logprobs": rounded(batch.old_logprobs[row, :length]),
        })
    question = samples.questions[chosen]
    return {
        "question": question["question"],
        "number": str(question["right"]),
        "completions": completions,
    }


def rounded(tensor):
    return [round(value, 4) for value in tensor.tolist()]


# --------------------------------------------------------------------------------------------------
# Before and after

def compare(before, after):
    """Greedy answers to the same questions: how many of each kind, and some that changed."""
    kinds = {"right to right": [], "right to wrong": [], "wrong to right": [], "wrong to wrong": []}
    for old, new in zip(before, after):
        if old["question"] == new["question"]:
            kinds[f"{verdict(old)} to {verdict(new)}"].append({
                "question": old["question"],
                "number": old["number"],
                "before": old["greedy"]["text"],
                "after": new["greedy"]["text"],
            })
    return {
        "counts": {kind: len(found) for kind, found in kinds.items()},
        "changed": {kind: kinds[kind][:most] for kind, most in CHANGED.items()},
    }


def verdict(answer):
    return "right" if answer["greedy"]["correct"] else "wrong"


# --------------------------------------------------------------------------------------------------
# Pictures

# Of each panel: the metric, its title, its unit; and whether the noise is drawn into it.
PANELS = [
    ("accuracy", "Accuracy (training, temperature 1)", "fraction right", False),
    ("reward", "Reward", "mean", False),
    ("entropy", "Entropy", "nats a token", True),
    ("length", "Completion length", "mean tokens", False),
    ("mismatch_kl", "Mismatch: KL of sampled to trained policy", "nats a token", True),
    ("gradient_norm", "Gradient norm, before clipping", "norm", False),
]


def picture(draw, *data):
    """A PNG in 256 colours, bytes, of the figure that draw(*data, matplotlib.pyplot) returns.

    None, with a warning, if it cannot be drawn.
    """
    os.environ["MPLBACKEND"] = "agg"        # a notebook's backend may not be installed here
    try:
        import matplotlib.pyplot as plt
        from PIL import Image               # which matplotlib brings
        drawn, png = io.BytesIO(), io.BytesIO()
        figure = draw(*data, plt)
        figure.savefig(drawn, format="png", dpi=110)
        plt.close(figure)
        colours = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
        colours.save(png, format="png", optimize=True)
        return png.getvalue()
    except Exception as e:
        print(f"warning: a picture could not be drawn ({reason(e)})", file=sys.stderr)


def save_figure(path, draw, *data):
    """Write such a picture, if it can be drawn."""
    png = picture(draw, *data)
    if png:
        atomic_write(path, png)


def learning_curve(metrics, held_out, plt):
    """PANELS over the steps. held_out: {"pass@1" or "greedy": (accuracy before, after)}, each may be None."""
    steps = [m["step"] for m in metrics]
    sigmas = [m["sigma"] for m in metrics]
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.4), layout="constrained")
    for axis, (key, title, unit, noisy) in zip(axes.flat, PANELS):
        axis.plot(steps, [m.get(key, math.nan) for m in metrics], color="tab:blue", linewidth=1.2)
        axis.set(title=title, xlabel="step", ylabel=unit)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
        if noisy:
            noise_axis = axis.twinx()
            noise_axis.plot(steps, sigmas, color="tab:red", linewidth=1.2, drawstyle="steps-post")
            noise_axis.set_ylabel("noise σ (red)", color="tab:red")
            noise_axis.set_ylim(bottom=0)
    accuracy_axis = axes[0, 0]
    accuracy_axis.set_ylim(0, 1)
    for (kind, before_and_after), marker in zip(held_out.items(), "os"):
        places = [0, max(steps, default=0)]
        values = [math.nan if value is None else value for value in before_and_after]
        accuracy_axis.plot(places, values, marker, color="tab:orange", label=f"held-out, {kind}")
    measured = [m for m in metrics if "accuracy_validation" in m]
    if measured:
        accuracy_axis.plot([m["step"] for m in measured], [m["accuracy_validation"] for m in measured],
                           "-v", color="tab:green", label="validation, pass@1")
    accuracy_axis.legend(loc="upper left", frameon=False)
    return figure


# --------------------------------------------------------------------------------------------------
# The command

def report_on(folder):
    """write_report; raises UserError where someone has changed the run's files."""
    try:
        write_report(folder)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as e:
        raise UserError(f"{folder}: its files are not those of a run ({type(e).__name__}: {e}), so "
                        "report.html is not renewed")


def main(argv=None):
    with one_line():
        parser = Parser(__doc__, prog="python -m harness.report")
        parser.add_argument("folder", help="of a run")
        folder = parser.parse_args(argv).folder
        report_on(folder)
        print(f"look at {folder}/report.html")


if __name__ == "__main__":
    main()
