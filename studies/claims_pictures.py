"""The pictures of the claims study: curves over the steps, differences by seed, entropy before."""
from itertools import product
from statistics import fmean as mean

import numpy as np

from studies.factorial import QUESTIONS, at_rate, by_model, differences, rate_text, rates_of
from studies.plots import plot_lines
from studies.study import grouped

# What the curves show of the steps, a row of panels each.
CURVES = {
    "accuracy": "training accuracy (temperature 1)",
    "entropy": "entropy, nats a token",
    "mismatch_kl": "mismatch, nats a token",
}
# Of these arms: the name, the colour of the weights; dashed without noise.
LINES = {
    "nvfp4+aqn": ("NVFP4 + AQN", "C0", "-"),
    "nvfp4": ("NVFP4", "C0", "--"),
    "bf16+aqn": ("BF16 + AQN", "C1", "-"),
    "bf16": ("BF16", "C1", "--"),
}
SMALL = {"small": "one small policy", "small-own-starts": "small policies"}


def named(model, lr):
    """A model and a rate as a picture shows them."""
    return f"{SMALL.get(model, model.removesuffix('-Instruct'))}, {rate_text(lr)}"


def plot_curves(runs, plt):
    """CURVES over the steps, a column a model, a line an arm of LINES.

    A model's is the learning rate with most runs or, of several such, the best in training. runs: rows with
    their steps as "metrics", of LINES alone. A curve is the mean of the seeds, and of a step and the
    four before it; its band is a standard error to either side.
    """
    models = sorted(grouped(runs, "model").items())
    figure, axes = plt.subplots(len(CURVES), len(models), figsize=(1 + 3.3 * len(models), 9),
                                layout="constrained", squeeze=False, sharex="col")
    for column, ((model,), of_model) in zip(axes.T, models):
        shown = max(grouped(of_model, "lr").values(), key=lambda rows: (
            len(rows), mean(row["training_accuracy"] for row in rows)))
        arms = grouped(shown, "arm")
        for (axis, measure), arm in product(zip(column, CURVES), LINES):
            curves = [[step[measure] for step in run["metrics"]] for run in arms.get((arm,), [])]
            if curves:
                plot_band(axis, np.array(curves), *LINES[arm])
        column[0].set_title(named(model, shown[0]["lr"]))
        column[-1].set(xlabel="step", yscale="log")
    for axis, label in zip(axes[:, 0], CURVES.values()):
        axis.set_ylabel(label)
    axes[0, 0].legend(frameon=False)
    return figure


def plot_band(axis, curves, label, color, linestyle):
    """One line of plot_curves. curves: float [seeds, steps]."""
    seeds, count = curves.shape
    steps = range(1, count + 1)
    smooth = np.array([curves[:, max(0, i - 5):i].mean(1) for i in steps])
    middle = smooth.mean(1)
    error = smooth.std(1, ddof=min(1, seeds - 1)) / seeds ** 0.5
    axis.plot(steps, middle, label=label, linewidth=1.2, color=color, linestyle=linestyle)
    axis.fill_between(steps, middle - error, middle + error, color=color, alpha=0.1, linewidth=0)
    axis.grid(alpha=0.3)


# What differences.png asks: a question of QUESTIONS, and its title.
ASKED = {
    "4 bits": "NVFP4 minus BF16\n(mean of both, with\nAQN and without)",
    "noise": "with AQN minus without\n(mean of both,\nNVFP4 and BF16)",
    "both": "NVFP4 + AQN\nminus BF16\nwithout AQN",
    "4 bits by GPTQ": "NVFP4 by GPTQ\nminus BF16 (mean of\nboth, as on the left)",
    "both by AWQ": "NVFP4 by AWQ + AQN\nminus BF16\nwithout AQN",
}
# Student's t: so many standard errors to either side of a mean hold 95 %; of 2 to 11 seeds.
T95 = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23]


def compared(rows):
    """{model: {rate: a list for each of ASKED}}, of rates at which two seeds answer one.

    The list has pass@1's differences by seed, in points, after training and before: float [2, seeds].
    """
    found = {}
    for model, by in by_model(rows).items():
        for lr in rates_of(by):
            answers = [100 * np.array([differences(by, at_rate(QUESTIONS[what], lr), measure)
                                       for measure in ("accuracy_after", "accuracy_before")])
                       for what in ASKED]
            if max(answer.shape[1] for answer in answers) > 1:
                found.setdefault(model, {})[lr] = answers
    return found


def plot_differences(rows, plt):
    """ASKED of pass@1, in points: a row of panels a model, in them a line a learning rate.

    Each seed is a dot, the mean difference before the training a black bar. Three seeds or more have
    their mean and its 95 % interval, too.
    """
    models = compared(rows)
    heights = [len(rates) + 1 for rates in models.values()]
    figure, axes = plt.subplots(
        len(models), len(ASKED), figsize=(2 + 2.2 * len(ASKED), 1 + 0.5 * sum(heights)),
        layout="constrained", sharex="row", sharey="row", squeeze=False, height_ratios=heights)
    for row, (model, rates) in zip(axes, models.items()):
        for axis, *answers in zip(row, *rates.values()):
            for place, answer in enumerate(answers):
                plot_seeds(axis, place, *answer)
            axis.axvline(0, color="black", linewidth=0.8, linestyle=":")
            axis.grid(alpha=0.3)
        axis.set_yticks(range(len(rates)), [named(model, lr) for lr in rates])
        axis.set_ylim(len(rates) - 0.5, -0.5)
    for axis, title in zip(axes[0], ASKED.values()):
        axis.set_title(title, fontsize=10)
    figure.supxlabel("points of pass@1: left of 0 what is named first ends lower, right of it higher",
                     fontsize=10)
    return figure


def plot_seeds(axis, place, after, before):
    """One line of plot_differences."""
    if len(after):
        axis.plot(before.mean(), place, "|", color="black", markersize=16)
    axis.plot(after, [place] * len(after), "o", color="tab:blue", markersize=5, alpha=0.4,
              markeredgewidth=0)
    if len(after) > 2:
        interval = T95[min(len(after), 11) - 2] * after.std(ddof=1) / len(after) ** 0.5
        axis.errorbar(after.mean(), place, xerr=interval, fmt="D", markersize=5, capsize=4,
                      color="tab:red")


# What entropy.json has of rollouts before any training, by format and noise: three draws of noise at
# each sigma (Fig. 5 and 14 of the paper).
BEFORE = {
    "entropy": "entropy, nats",
    "accuracy": "accuracy, temperature 1",
    "mismatch_kl": "KL to the clean policy",
}


def plot_entropy(result, plt):
    """BEFORE of each model against sigma, a line a format through the means of the draws (dashes)."""
    points = [(f"{row['model']}: {label}", row["weights"], row["sigma"], row[key])
              for row in result["rows"] for key, label in BEFORE.items()]
    return plot_lines(plt, points, "sigma", "")
