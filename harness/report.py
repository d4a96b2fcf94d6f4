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
from qerl import UserError, reason, require

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS = 7                              # of samples.jsonl, at most
TOKENS = 30_000                        # on the page, at most: some 80 bytes each
CHANGED = {"wrong to right": 6, "right to wrong": 4}                # questions shown, at most


def write_report(folder):
    """Write report.html and curve.png from the files of a run's folder.

    Any of them but metrics.jsonl may be missing, as after a kill.
    """
    require(os.path.exists(f"{folder}/metrics.jsonl"),
            f"{folder}: not a run's folder (it has no metrics.jsonl)")
    names = ("metrics", "samples", "answers_before", "answers_after")
    metrics, samples, before, after = (read_jsonl(f"{folder}/{name}.jsonl") for name in names)
    summary = {}                           # of an unfinished run
    if os.path.exists(f"{folder}/summary.json"):
        with open(f"{folder}/summary.json", "rb") as f:
            summary = json.load(f)
    settings = summary.pop("settings", {})
    model = settings.get("model")
    data = settings.get("data") or ("GSM8K" if model else "made-up word problems")
    accuracy = {
        title: [summary.get(f"{kind}_{when}") for when in ("before", "after")]
        for title, kind in (("pass@1", "accuracy"), ("greedy", "greedy"))
    }
    held_out = summary.get("held_out_questions", len(before))
    curve = picture(learning_curve, metrics, accuracy) if metrics else None
    if curve:
        atomic_write(f"{folder}/curve.png", curve)
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    templates.filters["percent"] = lambda part: "?" if part is None else f"{part:.1%}"
    templates.filters["base64"] = lambda data: base64.b64encode(data).decode()
    page = templates.get_template("report.html.jinja").render(
        name=last_part(os.path.abspath(folder)),
        title=f"{last_part(model or 'The built-in policy')} on {last_part(data)}",
        summary=summary,
        settings=settings,
        accuracy=accuracy,
        held_out=held_out,
        curve=curve,
        limits=LIMITS,
        metrics=metrics,
        groups=groups(samples, metrics),
        answers=compare(before, after),
    )
    atomic_write(f"{folder}/report.html", page)


def last_part(path):
    return os.path.basename(os.path.normpath(path))


# --------------------------------------------------------------------------------------------------
# One question, several answers

LIMITS = [0.15, 0.4, 0.7, 1.1, 1.6]    # nats at which a token's shade gets darker
RARE = 0.1                             # below this probability a token is underlined

# Signs for what no font shows: arrows for tabs and line ends, Unicode's pictures for the rest.
SIGNS = {code: chr(0x2400 + code) for code in range(32)} | {ord("\t"): "→ ", ord("\n"): "↵\n"}


def groups(samples, metrics):
    """At most STEPS of the recorded steps, evenly spread; the first, middle and last are open."""
    shown = spread(samples, STEPS)
    limit = TOKENS // max(sum(len(sample["completions"]) for sample in shown), 1)
    logged = {m["step"]: m for m in metrics}
    found = []
    for i, sample in enumerate(shown):
        completions = sorted(sample["completions"], key=lambda c: -c["reward"])
        found.append({
            **sample,
            "open": i in (0, len(shown) // 2, len(shown) - 1),
            "logged": logged.get(sample["step"], {}),
            "mean": statistics.fmean(c["reward"] for c in completions),
            "teaches": any(c["advantage"] for c in completions),
            "cards": [card(c, limit) for c in completions],
        })
    return found


def spread(items, count):
    """At most `count` of the items, evenly spaced, with the first and the last."""
    if len(items) <= count:
        return items
    return [items[i * (len(items) - 1) // (count - 1)] for i in range(count)]


def card(completion, limit):
    """A completion as the page shows it; of more than `limit` tokens, the middle is left out."""
    columns = ("tokens", "entropy", "rollout_logprobs", "training_logprobs")
    tokens = list(zip(*(completion[name] for name in columns)))
    left_out = max(len(tokens) - limit, 0)
    beginning = limit * 2 // 3 if left_out else len(tokens)
    return {
        **completion,
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
    verdict = {True: "right", False: "wrong"}
    kinds = {f"{old} to {new}": [] for old in verdict.values() for new in verdict.values()}
    for old, new in zip(before, after):
        if old["question"] == new["question"]:
            was, now = old["greedy"], new["greedy"]
            pair = {**old, "before": was["text"], "after": now["text"]}
            kinds[f"{verdict[was['correct']]} to {verdict[now['correct']]}"].append(pair)
    return {
        "counts": {kind: len(found) for kind, found in kinds.items()},
        "changed": {kind: kinds[kind][:most] for kind, most in CHANGED.items()},
    }


# --------------------------------------------------------------------------------------------------
# Pictures

# Of each panel: the metric, its title, its unit; and whether the noise is drawn into it.
PANELS = [
    ("accuracy", "Accuracy of the training samples", "fraction right", False),
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
    for (kind, values), marker in zip(held_out.items(), "os"):
        values = [math.nan if value is None else value for value in values]
        accuracy_axis.plot([0, steps[-1]], values, marker, color="tab:orange", label=f"held-out, {kind}")
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
