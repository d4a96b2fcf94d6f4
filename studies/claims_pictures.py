"""The pictures of the claims study: differences, curves over the steps, learning rates, ablations."""
import math
from collections import Counter
from statistics import fmean as mean
from statistics import mode

from studies.factorial import ABLATIONS, ARMS, CHANGES, QUESTIONS, best_rates, by_arm_and_seed
from studies.factorial import differences_by_seed, with_gains
from studies.study import rate_text, standard_error

# What the curves show of the steps, a row of panels each.
CURVES = {
    "accuracy": "training accuracy (temperature 1)",
    "entropy": "entropy, nats a token",
    "mismatch_kl": "mismatch, nats a token",
}
SMALL = {"small": "one small policy", "small-own-starts": "small policies"}
CODES = {"gptq": "NVFP4 by GPTQ", "awq": "NVFP4 by AWQ", "full": "full fine-tuning"}


def short_name(model):
    """A model's name as a picture shows it."""
    return SMALL.get(model, model.removesuffix("-Instruct"))


def setting_name(model, lr):
    """A model and a learning rate as a picture shows them."""
    return f"{short_name(model)}, {rate_text(lr)}"


def arm_name(arm):
    """An arm of ARMS as a picture shows it: "gptq+aqn" -> "NVFP4 by GPTQ + AQN"."""
    weights, plus, _ = arm.partition("+aqn")
    return CODES.get(weights, weights.upper()) + (" + AQN" if plus else "")


def running_mean(values, width=5):
    """The mean of each value and those before it, `width` in all."""
    return [mean(values[max(0, i + 1 - width):i + 1]) for i in range(len(values))]


def shown_rates(rows):
    """{arm: learning rate} of a model: one for all arms, as far as they have several seeds of it.

    An arm's own is its best if that has several seeds or as many as any, else the one with most.
    The one for all is the own of most arms, and of those the one that most arms have. Full
    fine-tuning, for which LoRA's rates are too large, keeps its own.
    """
    own = {}
    seeds = {arm: Counter(r["lr"] for r in rows if r["arm"] == arm) for arm in ARMS}
    best = {arm: lr for (_, arm), lr in best_rates(rows).items()}
    for arm in ARMS:
        if seeds[arm]:
            most = mode(sorted(seeds[arm].elements()))
            lr = best.get(arm, most)
            own[arm] = lr if seeds[arm][lr] >= min(2, seeds[arm][most]) else most
    rates = sorted(own.values())
    common = max(rates, key=lambda lr: (rates.count(lr), sum(seeds[arm][lr] > 1 for arm in own)))
    return {arm: common if seeds[arm][common] > 1 and arm != "full" else lr
            for arm, lr in own.items()}


def style_of(arm):
    """An arm's line in all pictures: a colour for its weights, dashed without noise."""
    weights = [name.removesuffix("+aqn") for name in ARMS]
    colors = list(dict.fromkeys(weights))
    return {
        "color": f"C{colors.index(arm.removesuffix('+aqn'))}",
        "linestyle": "-" if arm.endswith("+aqn") else "--",
    }


def plot_band(axis, curves, label, style):
    """The mean of curves of several seeds (lists of numbers), in a band of its standard error."""
    curves = [running_mean(curve) for curve in curves]
    steps = range(1, min(map(len, curves)) + 1)
    columns = [[curve[i - 1] for curve in curves] for i in steps]
    middle = [mean(column) for column in columns]
    errors = [standard_error(column) or 0 for column in columns]
    axis.plot(steps, middle, label=label, linewidth=1.2, **style)
    low = [m - e for m, e in zip(middle, errors)]
    high = [m + e for m, e in zip(middle, errors)]
    axis.fill_between(steps, low, high, color=style["color"], alpha=0.1, linewidth=0)


def seeds_text(count):
    return "1 seed" if count == 1 else f"{count} seeds"


def unusual_arms(seeds, rates, usual):
    """"arm, arm: 2 seeds, 5e-5; ...": arms whose number of seeds or learning rate is not the usual.

    seeds, rates: {arm: its number, its rate}; usual: the (number, rate) of most arms.
    """
    others = {}                                                # {how they differ: arms}
    for arm in seeds:
        differs = []
        if seeds[arm] != usual[0]:
            differs.append(seeds_text(seeds[arm]))
        if rates[arm] != usual[1]:
            differs.append(rate_text(rates[arm]))
        if differs:
            others.setdefault(", ".join(differs), []).append(arm)
    named = {what: ", ".join(map(arm_name, arms)) for what, arms in others.items()}
    return "; ".join(f"{names}: {what}" for what, names in named.items())


def plot_curves(runs, plt):
    """CURVES over the steps, a column a model, a line an arm.

    runs: pairs of a row and its steps, of ARMS alone. An arm's learning rate is
    that of shown_rates; the titles have those of most arms. A curve is a running mean of five steps.
    """
    models = sorted({row["model"] for row, _ in runs})
    figure, axes = plt.subplots(len(CURVES), len(models), figsize=(1 + 3.3 * len(models), 9),
                                layout="constrained", squeeze=False, sharex="col")
    lines = {}
    for column, model in zip(axes.T, models):
        shown = shown_rates([row for row, _ in runs if row["model"] == model])
        own = {arm: [metrics for row, metrics in runs
                     if (row["model"], row["arm"], row["lr"]) == (model, arm, lr)]
               for arm, lr in shown.items()}
        for axis, (measure, label) in zip(column, CURVES.items()):
            for arm, of_seeds in own.items():
                curves = [[step[measure] for step in metrics] for metrics in of_seeds]
                plot_band(axis, curves, arm, style_of(arm))
            axis.grid(alpha=0.3)
        lines.update((line.get_label(), line) for line in column[0].lines)
        seeds = {arm: len(of_seeds) for arm, of_seeds in own.items()}
        usual = mode(seeds.values()), mode(shown.values())
        setting = f"{rate_text(usual[1])}, {seeds_text(usual[0])}"
        column[0].set_title(f"{short_name(model)}\n{setting}", fontsize=11)
        column[-1].set_xlabel(f"step\n{unusual_arms(seeds, shown, usual)}", fontsize=8)
        if any(max(line.get_ydata()) > 1e-8 for line in column[-1].lines):
            column[-1].set_yscale("log")
        else:                                          # nothing but rounding
            column[-1].set_ylim(-1e-4, 1e-4)
    for axis, label in zip(axes[:, 0], CURVES.values()):
        axis.set(ylabel=label)
    arms = [arm for arm in ARMS if arm in lines]
    figure.legend([lines[arm] for arm in arms], map(arm_name, arms), frameon=False,
                  loc="outside lower center", ncols=1 + len(models))
    return figure


def compared_rates(rows):
    """The models of which two arms or more were tried at several learning rates."""
    models = [model for model, _ in best_rates(rows)]
    return sorted({model for model in models if models.count(model) > 1})


def plot_rates(rows, plt):
    """pass@1 after the training by learning rate, a panel a model, a line an arm of ARMS.

    Arms stand 3 % of a rate apart, so that their error bars can be told from each other.
    """
    models = compared_rates(rows)
    columns = min(2, len(models))
    lines = math.ceil(len(models) / columns)
    figure, axes = plt.subplots(lines, columns, figsize=(7 * columns, 4 * lines),
                                layout="constrained", squeeze=False)
    for axis in axes.flat[len(models):]:
        axis.remove()
    for axis, model in zip(axes.flat, models):
        for i, arm in enumerate(ARMS):
            own = [r for r in rows if (r["model"], r["arm"]) == (model, arm)]
            rates = sorted({r["lr"] for r in own})
            reached = [[100 * r["accuracy_after"] for r in own if r["lr"] == lr] for lr in rates]
            errors = [standard_error(values) or 0 for values in reached]
            seeds = ", ".join(str(len(values)) for values in reached)
            if rates:
                places = [lr * (1 + 0.03 * (i - len(ARMS) // 2)) for lr in rates]
                axis.errorbar(places, [mean(values) for values in reached], errors, marker="o",
                              markersize=4, capsize=3, linewidth=1, label=f"{arm_name(arm)} ({seeds})",
                              **style_of(arm))
        tried = sorted({r["lr"] for r in rows if r["model"] == model})
        axis.set(title=short_name(model), xlabel="learning rate", ylabel="held-out pass@1 after, %",
                 xscale="log")
        axis.set_xticks(tried, [rate_text(lr) for lr in tried], fontsize=8, rotation=30)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8, title="arm (seeds at each rate)",
                    loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


# What differences.png asks: a question of QUESTIONS, and its title.
ASKED = {
    "4 bits": "NVFP4 minus BF16\n(mean of both, with\nAQN and without)",
    "noise": "with AQN minus without\n(mean of both,\nNVFP4 and BF16)",
    "both": "NVFP4 + AQN\nminus BF16\nwithout AQN",
    "4 bits by GPTQ": "NVFP4 by GPTQ\nminus BF16 (mean of\nboth, as on the left)",
    "both, 4 bits by AWQ": "NVFP4 by AWQ + AQN\nminus BF16\nwithout AQN",
}
# Student's t: so many standard errors to either side of a mean hold 95 %; of 2 to 31 seeds.
T95 = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13,
       2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04]


def interval(values):
    """Half the width of the 95 % interval of the mean of two values or more."""
    return T95[min(len(values), 31) - 2] * standard_error(values)


def points(by, pairs, measure):
    """The differences by seed of a question's pairs of arms, in points."""
    return [100 * d for d in differences_by_seed(by, pairs, measure).values()]


def compared_settings(rows):
    """[(model, rate, {(arm, seed): row})] of those of which two seeds answer one of ASKED."""
    rows = with_gains(rows)
    found = []
    for model, lr in sorted({(r["model"], r["lr"]) for r in rows}):
        by = by_arm_and_seed(rows, model, lr)
        if any(len(points(by, QUESTIONS[what], "accuracy_after")) > 1 for what in ASKED):
            found.append((model, lr, by))
    return found


def plot_differences(rows, plt):
    """ASKED of pass@1, in points: a line a model and learning rate of compared_settings.

    Real models and small policies, whose seeds differ more, have axes of their own. Each seed is a
    dot, the mean difference before the training a black bar. Three seeds or more have their mean
    and its 95 % interval, too.
    """
    settings = compared_settings(rows)
    groups = [[s for s in settings if s[0] not in SMALL], [s for s in settings if s[0] in SMALL]]
    groups = [group for group in groups if group]
    figure, axes = plt.subplots(
        len(groups), len(ASKED), figsize=(2 + 2.2 * len(ASKED), 2 + 0.4 * len(settings)),
        layout="constrained", sharex="row", sharey="row", squeeze=False,
        height_ratios=[len(group) + 1 for group in groups])
    for row, group in zip(axes, groups):
        for axis, what in zip(row, ASKED):
            for place, (_, _, by) in enumerate(group):
                after = points(by, QUESTIONS[what], "accuracy_after")
                gained = points(by, QUESTIONS[what], "gained")
                if after:
                    axis.plot(mean(after) - mean(gained), place, "|", color="black", markersize=16)
                plot_seeds(axis, place, after)
            axis.axvline(0, color="black", linewidth=0.8, linestyle=":")
            axis.grid(alpha=0.3)
            axis.locator_params(axis="x", nbins=5)
        row[0].set_yticks(range(len(group)), [setting_name(model, lr) for model, lr, _ in group])
        row[0].set_ylim(len(group) - 0.5, -0.5)
    for axis, title in zip(axes[0], ASKED.values()):
        axis.set_title(title, fontsize=10)
    figure.supxlabel("points of pass@1: left of 0 what is named first ends lower, right of it higher",
                     fontsize=10)
    return figure


def plot_seeds(axis, place, values):
    """A dot a seed; of three or more their mean and its 95 % interval, too."""
    axis.plot(values, [place] * len(values), "o", color="tab:blue", markersize=5, alpha=0.4,
              markeredgewidth=0)
    if len(values) > 2:
        axis.errorbar(mean(values), place, xerr=interval(values), fmt="D", markersize=5, capsize=4,
                      color="tab:red")


def compared_changes(rows):
    """[(model, rate, {arm: differences by seed})] of those that have ABLATIONS of five seeds.

    The differences are to NVFP4 + AQN, in points of pass@1.
    """
    found = []
    for model, lr in sorted({(r["model"], r["lr"]) for r in rows}):
        by = by_arm_and_seed(rows, model, lr)
        changes = {arm: points(by, pairs, "accuracy_after") for arm, pairs in CHANGES.items()}
        if any(len(values) > 4 for values in changes.values()):
            found.append((model, lr, changes))
    return found


def plot_changes(rows, plt):
    """What each of ABLATIONS changes: a column a model and learning rate of compared_changes.

    Those that change ten points and more have axes of their own, below, on another scale.
    """
    settings = compared_changes(rows)
    largest = {arm: max((abs(mean(changes[arm])) for _, _, changes in settings if changes[arm]), default=-1)
               for arm in ABLATIONS}
    groups = [[arm for arm in ABLATIONS if 0 <= largest[arm] < 10],
              [arm for arm in ABLATIONS if largest[arm] >= 10]]
    groups = [group for group in groups if group]
    shown = sum(map(len, groups))
    figure, axes = plt.subplots(
        len(groups), len(settings), figsize=(1.5 + 5 * len(settings), 1.6 + 0.35 * shown),
        layout="constrained", sharex="row", sharey="row", squeeze=False,
        height_ratios=[len(group) + 1 for group in groups])
    for row, group in zip(axes, groups):
        for axis, (_, _, changes) in zip(row, settings):
            for place, arm in enumerate(group):
                plot_seeds(axis, place, changes[arm])
            axis.axvline(0, color="black", linewidth=0.8, linestyle=":")
            axis.grid(alpha=0.3)
        row[0].set_yticks(range(len(group)), group)
        row[0].set_ylim(len(group) - 0.5, -0.5)
    for axis, (model, lr, _) in zip(axes[0], settings):
        axis.set(title=setting_name(model, lr))
    figure.supxlabel("points of pass@1: left of 0 the change ends lower, right of it higher", fontsize=10)
    return figure
