"""The paper's claims, tested with seeds: which runs there are, which are missing, what came of it.

    python bench.py claims                                       the small policy, on this machine
    python bench.py claims --model FOLDER --data FOLDER          a real model, one run a GPU
    python bench.py claims --tables                              only the tables and the picture

How runs are made, stopped and resumed: harness/study.py. tables.md, phases.md, curves.png and
rates.png are made from runs.jsonl and the metrics beside it; flags that are not named here go to
train_gsm8k.py.
--arms takes those of the factorial (ARMS, the default) and of the ablations (ABLATIONS).
"""
import math
from collections import Counter
from itertools import pairwise
from statistics import fmean as mean
from statistics import mode

from harness.figures import save_figure
from harness.run_folder import read_jsonl
from harness.study import NO_NOISE, arguments, conduct, is_number, standard_error, with_error
from harness.study import write_lines
from qerl import UserError

ARMS = {
    "nvfp4+aqn": ["--weights", "nvfp4"],
    "nvfp4": ["--weights", "nvfp4", *NO_NOISE],
    "bf16+aqn": ["--weights", "bf16"],
    "bf16": ["--weights", "bf16", *NO_NOISE],
    "nf4": ["--weights", "nf4", *NO_NOISE],
    "mxfp4": ["--weights", "mxfp4", *NO_NOISE],
    # Without LoRA there is no reference policy to stay near.
    "full": ["--weights", "bf16", "--lora-rank", "0", "--beta", "0", *NO_NOISE],
}
# One change each to NVFP4 with AQN; the figures named are the paper's.
ABLATIONS = {
    "linear": ["--schedule", "linear"],                                          # Fig. 9
    "cosine": ["--schedule", "cosine"],
    "logarithmic": ["--schedule", "logarithmic"],
    "sigma x4": ["--sigma-start", "4e-2", "--sigma-end", "2e-3"],
    "sigma / 4": ["--sigma-start", "2.5e-3", "--sigma-end", "1.25e-4"],
    "four draws": ["--method", "pooled_noise"],       # of noise a group instead of one a batch
    "rank 16": ["--lora-rank", "16"],                                            # Fig. 10
    "rank 64": ["--lora-rank", "64"],
    "rank 128": ["--lora-rank", "128"],
    "dapo": ["--algo", "dapo"],
    "tis": ["--tis", "2"],
    "gptq": ["--quantizer", "gptq"],                  # instead of rounding to nearest
    "awq": ["--quantizer", "awq"],                                     # as the paper, section 4.1
    "random reward": ["--reward", "random"],
}
FLAGS = {**ARMS, **ABLATIONS}
# Each question of the factorial: the arms with what is asked about, and the arms without, in
# pairs.
QUESTIONS = {
    "noise": [("nvfp4+aqn", "nvfp4"), ("bf16+aqn", "bf16")],
    "noise in NVFP4": [("nvfp4+aqn", "nvfp4")],
    "noise in BF16": [("bf16+aqn", "bf16")],
    "4 bits": [("nvfp4+aqn", "bf16+aqn"), ("nvfp4", "bf16")],
    "4 bits without noise": [("nvfp4", "bf16")],
    "4 bits under noise": [("nvfp4+aqn", "bf16+aqn")],
    "both": [("nvfp4+aqn", "bf16")],
    "NF4 for NVFP4": [("nf4", "nvfp4")],
    "MXFP4 for NVFP4": [("mxfp4", "nvfp4")],
    "all weights for LoRA": [("full", "bf16")],
}
CHANGES = {arm: [(arm, "nvfp4+aqn")] for arm in ABLATIONS}
# What is asked of the steps of a run, beside what came of it.
ASKED_OF_STEPS = ["noise in NVFP4", "noise in BF16", "4 bits without noise", "both"]
MEASURES = ["accuracy_after", "greedy_after", "training_accuracy", "entropy"]
COMPARED = [*MEASURES[:3], "gained"]
# Parts of a run, as slices of its steps. The first tenth has no noise; in the next two its sigma is
# largest.
PHASES = {
    "first step": lambda count: slice(0, 1),
    "10 to 30 %": lambda count: slice(round(0.1 * count), round(0.3 * count)),
    "second half": lambda count: slice(round(0.5 * count), count),
}


def arms_table(rows):
    """A line for each model, arm and learning rate: means and standard errors over the seeds."""
    lines = ["| model | arm | lr | seeds | steps | before: pass@1, greedy | pass@1 | greedy "
             "| training accuracy | entropy, nats |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    for key in sorted({(r["model"], r["arm"], r["lr"]) for r in rows}):
        same = [r for r in rows if (r["model"], r["arm"], r["lr"]) == key]
        cells = [with_error([r[measure] for r in same]) for measure in MEASURES[:3]]
        cells.append(with_error([r["entropy"] for r in same], scale=1, digits=3))
        model, arm, lr = key
        steps = ", ".join(sorted({str(r["steps"]) for r in same}))
        measured = [r for r in same if "accuracy_before" in r]
        before = [with_error([r[measure] for r in measured])
                  for measure in ("accuracy_before", "greedy_before") if measured]
        cells = [str(len(same)), steps, ", ".join(before) or "-", *cells]
        lines.append(f"| {model} | {arm} | {lr:g} | {' | '.join(cells)} |")
    return lines


def best_rates(rows):
    """{(model, arm): the learning rate with the highest mean training accuracy at the end}.

    Only of arms that were tried at two rates or more. Training questions decide, never those of the
    test. Two rates are compared by the seeds that both have, beginning with those of most seeds.
    """
    best = {}
    for key in sorted({(r["model"], r["arm"]) for r in rows}):
        reached = {}                                           # {lr: {seed: training accuracy}}
        for r in rows:
            if (r["model"], r["arm"]) == key:
                reached.setdefault(r["lr"], {})[r["seed"]] = r["training_accuracy"]
        first, *others = sorted(reached, key=lambda lr: (-len(reached[lr]), lr))
        for lr in others:
            leader = best.get(key, first)
            common = reached[lr].keys() & reached[leader].keys()
            lead = [reached[lr][seed] - reached[leader][seed] for seed in common]
            if lead:
                best[key] = lr if mean(lead) > 0 else leader
    return best


def best_table(rows):
    """A line for each model and arm at its own best rate; see best_rates."""
    lines = ["| model | arm | rates tried | best | seeds | pass@1 | greedy | training accuracy |",
             "|---|---|---|---|---|---|---|---|"]
    for (model, arm), lr in best_rates(rows).items():
        own = [r for r in rows if (r["model"], r["arm"]) == (model, arm)]
        tried = ", ".join(f"{rate:g}" for rate in sorted({r["lr"] for r in own}))
        same = [r for r in own if r["lr"] == lr]
        cells = [with_error([r[measure] for r in same]) for measure in MEASURES[:3]]
        lines.append(f"| {model} | {arm} | {tried} | {lr:g} | {len(same)} | {' | '.join(cells)} |")
    return lines


def with_gains(rows):
    """The rows with "gained": pass@1 after minus before.

    Before is measured by one seed of those that begin with the same policy.
    """
    def start(row):
        return row["model"], row["arm"], row.get("start_seed", 0)
    before = {start(r): r["accuracy_before"] for r in rows if "accuracy_before" in r}
    return [{**r, "gained": r["accuracy_after"] - before.get(start(r), math.nan)} for r in rows]


def cell(values, scale=100, digits=1):
    """with_error of values; "-" if there is one that was not measured (nan)."""
    return "-" if any(map(math.isnan, values)) else with_error(values, scale, digits)


def differences(by, label, questions, measures=COMPARED, scale=100, digits=1):
    """Lines of a table: the mean difference by seed of each question, a column a measure.

    by: {(arm, seed): {measure: value}}, for COMPARED rows of with_gains.
    """
    lines = []
    for what, pairs in questions.items():
        seeds = [s for s in sorted({seed for _, seed in by})
                 if all((arm, s) in by for pair in pairs for arm in pair)]
        if not seeds:
            continue
        cells = []
        for measure in measures:
            values = [mean([by[a, seed][measure] - by[b, seed][measure] for a, b in pairs])
                      for seed in seeds]
            cells.append(cell(values, scale, digits))
        lines.append(f"| {label} | {what} | {len(seeds)} | {' | '.join(cells)} |")
    return lines


PAIRED_HEAD = ["| model | lr | what | seeds | pass@1 | greedy | training accuracy | pass@1 gained |",
               "|---|---|---|---|---|---|---|---|"]


def by_arm_and_seed(rows, model, lr):
    """{(arm, seed): row} of a model at a learning rate."""
    return {(r["arm"], r["seed"]): r for r in rows if (r["model"], r["lr"]) == (model, lr)}


def paired_table(rows):
    """The differences of each model at equal learning rates, then with each arm at its own best."""
    lines = list(PAIRED_HEAD)
    rows = with_gains(rows)
    best = best_rates(rows)
    for model in sorted({r["model"] for r in rows}):
        own = [r for r in rows if r["model"] == model]
        for lr in sorted({r["lr"] for r in own}):
            by = by_arm_and_seed(own, model, lr)
            lines += differences(by, f"{model} | {lr:g}", QUESTIONS)
        by = {(r["arm"], r["seed"]): r for r in own if r["lr"] == best.get((model, r["arm"]))}
        lines += differences(by, f"{model} | own best", QUESTIONS)
    return lines


def rates_table(rows):
    """What the next larger learning rate changes in each arm, and in NVFP4 + AQN alone."""
    lines = list(PAIRED_HEAD)
    rows = with_gains(rows)
    for model in sorted({r["model"] for r in rows}):
        by = {((r["arm"], r["lr"]), r["seed"]): r for r in rows if r["model"] == model}
        for low, high in pairwise(sorted({lr for (_, lr), _ in by})):
            questions = {arm: [((arm, high), (arm, low))] for arm in ARMS}
            # As in the paper, whose 16 bit has the smaller rate.
            questions["both, 16 bit at the smaller"] = [(("nvfp4+aqn", high), ("bf16", low))]
            lines += differences(by, f"{model} | {low:g} to {high:g}", questions)
    return lines


def phase_means(metrics, measure):
    """{phase: the mean of a measure of metrics.jsonl over its steps, nan where it has none}."""
    values = [step[measure] for step in metrics]
    chosen = {phase: values[part(len(values))] for phase, part in PHASES.items()}
    return {phase: mean(some) if some else math.nan for phase, some in chosen.items()}


def phase_table(runs, measure, scale, digits):
    """A measure of metrics.jsonl by phase: each arm's mean, then differences by seed.

    runs: pairs of a row of runs.jsonl and its metrics; those that did not log the measure are left
    out.
    """
    lines = [f"| model | lr | what | seeds | {' | '.join(PHASES)} |",
             "|---" * (4 + len(PHASES)) + "|"]
    questions = {what: QUESTIONS[what] for what in ASKED_OF_STEPS}
    runs = [(row, metrics) for row, metrics in runs
            if all(is_number(step.get(measure)) for step in metrics)]
    for model, lr in sorted({(row["model"], row["lr"]) for row, _ in runs}):
        by = {(row["arm"], row["seed"]): phase_means(metrics, measure) for row, metrics in runs
              if (row["model"], row["lr"]) == (model, lr)}
        for arm in ARMS:
            own = [means for (name, _), means in by.items() if name == arm]
            if own:
                cells = [cell([means[phase] for means in own], scale, digits) for phase in PHASES]
                lines.append(f"| {model} | {lr:g} | {arm} | {len(own)} | {' | '.join(cells)} |")
        lines += differences(by, f"{model} | {lr:g}", questions, PHASES, scale, digits)
    return lines


def ablation_table(rows):
    """What each of ABLATIONS changes, by seed."""
    lines = list(PAIRED_HEAD)
    rows = with_gains(rows)
    for model, lr in sorted({(r["model"], r["lr"]) for r in rows}):
        lines += differences(by_arm_and_seed(rows, model, lr), f"{model} | {lr:g}", CHANGES)
    return lines


def running_mean(values, width=5):
    """The mean of each value and those before it, `width` in all."""
    return [mean(values[max(0, i + 1 - width):i + 1]) for i in range(len(values))]


# Of metrics.jsonl: title, scale and digits of what phases.md shows.
OVER_TIME = {
    "entropy": ("Entropy in nats a token", 1, 3),
    "mismatch_kl": ("KL(rollout || trained) in 1e-4 nats a token", 1e4, 2),
    "effective_completions": ("Effective sample size of completions, 1 being all of them", 1, 2),
}
# Of metrics.jsonl: what curves.png shows, a row of panels each.
CURVES = {
    "accuracy": "training accuracy (temperature 1)",
    "entropy": "entropy, nats a token",
    "mismatch_kl": "KL(rollout || trained), nats a token",
}


def shown_rates(rows):
    """{arm: learning rate} of a model: one for all arms, as far as they have several seeds of it.

    An arm's own is its best if that has several seeds, else the one with most. The one for all is
    the own of most arms, and of those the one that most arms have. Full fine-tuning, for which
    LoRA's rates are too large, keeps its own.
    """
    own = {}
    seeds = {arm: Counter(r["lr"] for r in rows if r["arm"] == arm) for arm in ARMS}
    best = {arm: lr for (_, arm), lr in best_rates(rows).items()}
    for arm in ARMS:
        if seeds[arm]:
            most = mode(sorted(seeds[arm].elements()))
            lr = best.get(arm, most)
            own[arm] = lr if seeds[arm][lr] > 1 else most
    rates = sorted(own.values())
    common = max(rates, key=lambda lr: (rates.count(lr), sum(seeds[arm][lr] > 1 for arm in own)))
    return {arm: common if seeds[arm][common] > 1 and arm != "full" else lr
            for arm, lr in own.items()}


def plot_band(axis, curves, label):
    """The mean of curves of several seeds (lists of numbers), in a band of its standard error."""
    curves = [running_mean(curve) for curve in curves]
    steps = range(1, min(map(len, curves)) + 1)
    columns = [[curve[i - 1] for curve in curves] for i in steps]
    middle = [mean(column) for column in columns]
    errors = [standard_error(column) or 0 for column in columns]
    line, = axis.plot(steps, middle, label=label, linewidth=1.2)
    low = [m - e for m, e in zip(middle, errors)]
    high = [m + e for m, e in zip(middle, errors)]
    axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.15)


def plot_curves(runs, plt):
    """CURVES over the steps, a column a model, a line an arm of ARMS.

    runs: pairs of a row of runs.jsonl and its metrics, of ARMS alone. An arm's learning rate is
    that of shown_rates; most arms' is in the title. A curve is a running mean of five steps.
    """
    models = sorted({row["model"] for row, _ in runs})
    figure, axes = plt.subplots(len(CURVES), len(models), figsize=(7 * len(models), 9),
                                layout="constrained", squeeze=False, sharex="col")
    for column, model in zip(axes.T, models):
        shown = shown_rates([row for row, _ in runs if row["model"] == model])
        usual = mode(shown.values())
        for axis, (measure, label) in zip(column, CURVES.items()):
            for arm, lr in shown.items():
                curves = [[m[measure] for m in metrics] for row, metrics in runs
                          if (row["model"], row["arm"], row["lr"]) == (model, arm, lr)]
                other = "" if lr == usual else f", rate {lr:g}"
                plot_band(axis, curves, f"{arm} ({len(curves)}{other})")
            axis.set(ylabel=label)
            axis.grid(alpha=0.3)
        column[0].set(title=f"{model}, learning rate {usual:g}")
        column[0].legend(frameon=False, title="arm (seeds)", fontsize=8, loc="upper left",
                         bbox_to_anchor=(1, 1))
        mismatched = any(max(line.get_ydata()) > 0 for line in column[-1].lines)
        column[-1].set(xlabel="step", yscale="log" if mismatched else "linear")
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
    figure, axes = plt.subplots(1, len(models), figsize=(8 * len(models), 4.5),
                                layout="constrained", squeeze=False)
    for axis, model in zip(axes[0], models):
        for i, arm in enumerate(ARMS):
            own = [r for r in rows if (r["model"], r["arm"]) == (model, arm)]
            rates = sorted({r["lr"] for r in own})
            reached = [[100 * r["accuracy_after"] for r in own if r["lr"] == lr] for lr in rates]
            errors = [standard_error(values) or 0 for values in reached]
            seeds = ", ".join(str(len(values)) for values in reached)
            if rates:
                places = [lr * (1 + 0.03 * (i - len(ARMS) // 2)) for lr in rates]
                axis.errorbar(places, [mean(values) for values in reached], errors, marker="o",
                              markersize=4, capsize=3, linewidth=1, label=f"{arm} ({seeds})")
        tried = sorted({r["lr"] for r in rows if r["model"] == model})
        axis.set(title=model, xlabel="learning rate", ylabel="held-out pass@1 after, %",
                 xscale="log")
        axis.set_xticks(tried, [f"{lr:g}" for lr in tried], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8, title="arm (seeds at each rate)",
                    loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def metrics_of(out, row):
    """The steps of a finished run; raises UserError where they are not beside its row."""
    path = f"{out}/metrics/{row['name']}.jsonl"
    metrics = read_jsonl(path)
    if not metrics:
        raise UserError(f"{path}: is missing or empty; copy it, too, or remove the run from runs.jsonl")
    for step in metrics:
        if not isinstance(step, dict) or not all(is_number(step.get(key)) for key in CURVES):
            raise UserError(f"{path}: a step lacks one of {', '.join(CURVES)}; remove the run from "
                            "runs.jsonl, and it is made again")
    return metrics


def make_tables(out, rows):
    """tables.md from runs.jsonl; phases.md and the pictures, if there is something to show.

    Raises UserError where a run's metrics are missing; tables.md does without them.
    """
    lines = ["Made by `python bench.py claims --tables` from runs.jsonl: means ± standard errors of seeds.",
             "", *arms_table(rows), "",
             "Differences by seed in points (with what is named minus without), at equal learning rates and,",
             "where several were tried, with each arm at its own best. Gained is pass@1 after minus before:",
             "", *paired_table(rows), "",
             "Ablations: NVFP4 + AQN with one change, minus without it, by seed, in points:",
             "", *ablation_table(rows), "",
             "Each arm at the learning rate with the highest training accuracy:",
             "", *best_table(rows), "",
             "The larger learning rate minus the smaller, by seed, in points:", "", *rates_table(rows)]
    write_lines(f"{out}/tables.md", lines)
    factorial = [row for row in rows if row["arm"] in ARMS]
    if factorial:
        runs = [(row, metrics_of(out, row)) for row in factorial]
        lines = ["Made by `python bench.py claims --tables` from metrics/: means ± standard errors of seeds."]
        for measure, (title, scale, digits) in OVER_TIME.items():
            lines += ["", f"{title}, by part of the run, then differences by seed:", "",
                      *phase_table(runs, measure, scale, digits)]
        write_lines(f"{out}/phases.md", lines)
        save_figure(f"{out}/curves.png", plot_curves, runs)
    if compared_rates(factorial):
        save_figure(f"{out}/rates.png", plot_rates, factorial)


def main(argv):
    """The exit status: 1 if a run failed."""
    args = arguments(argv, __doc__, list(FLAGS), list(ARMS), seeds=(10, 4), out="results/claims")
    return conduct(FLAGS, args, make_tables)
