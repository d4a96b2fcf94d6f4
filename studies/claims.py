"""The paper's claims, tested with seeds: which runs there are, which are missing, what came of it.

    python bench.py claims                                       the small policy, on this machine
    python bench.py claims --own-starts                          each seed trains a policy of its own
    python bench.py claims --model FOLDER --data FOLDER          a real model, one run a GPU
    python bench.py claims --tables                              only the tables and the pictures

How runs are made, stopped and resumed: studies/study.py. Beside the runs stand tables.md, phases.md
and the pictures made of them; flags that are not named here go to train_gsm8k.py.
--arms takes those of the factorial (ARMS, the default) and of the ablations (ABLATIONS).
"""
import math
from itertools import combinations
from statistics import fmean as mean

from harness.figures import save_figure
from studies.claims_pictures import compared_changes, compared_rates, compared_settings
from studies.claims_pictures import plot_changes, plot_curves, plot_differences, plot_rates
from studies.factorial import ARMS, CHANGES, FLAGS, QUESTIONS
from studies.factorial import best_rates, by_arm_and_seed, differences_by_seed
from studies.factorial import measured_starts, with_gains
from studies.study import arguments, rate_text, run_study, start_of, with_error, write_lines

# What is asked of the steps of a run, beside what came of it.
ASKED_OF_STEPS = ["noise in NVFP4", "noise in BF16", "4 bits without noise", "both"]
MEASURES = ["accuracy_after", "greedy_after", "training_accuracy", "entropy"]
COMPARED = [*MEASURES[:3], "gained"]
# What curves.png shows; the others are in curves-others.png, beside BF16.
FOUR = ["nvfp4+aqn", "nvfp4", "bf16+aqn", "bf16"]
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
    before = [measured_starts(rows, measure) for measure in ("accuracy_before", "greedy_before")]
    for key in sorted({(r["model"], r["arm"], r["lr"]) for r in rows}):
        same = [r for r in rows if (r["model"], r["arm"], r["lr"]) == key]
        cells = [with_error([r[measure] for r in same]) for measure in MEASURES[:3]]
        cells.append(with_error([r["entropy"] for r in same], scale=1, digits=3))
        model, arm, lr = key
        steps = ", ".join(sorted({str(r["steps"]) for r in same}))
        starts = sorted({start_of(r) for r in same})
        began = [[found[start] for start in starts if start in found] for found in before]
        began = ", ".join(with_error(values) for values in began if values)
        cells = [str(len(same)), steps, began or "-", *cells]
        lines.append(f"| {model} | {arm} | {rate_text(lr)} | {' | '.join(cells)} |")
    return lines


def best_table(rows):
    """A line for each model and arm at its own best rate; see best_rates."""
    lines = ["| model | arm | rates tried | best | seeds | pass@1 | greedy | training accuracy |",
             "|---|---|---|---|---|---|---|---|"]
    for (model, arm), lr in best_rates(rows).items():
        own = [r for r in rows if (r["model"], r["arm"]) == (model, arm)]
        tried = ", ".join(rate_text(rate) for rate in sorted({r["lr"] for r in own}))
        same = [r for r in own if r["lr"] == lr]
        cells = [with_error([r[measure] for r in same]) for measure in MEASURES[:3]]
        lines.append(f"| {model} | {arm} | {tried} | {rate_text(lr)} | {len(same)} | {' | '.join(cells)} |")
    return lines


def cell(values, scale=100, digits=1):
    """with_error of values; "-" if there is one that was not measured (nan)."""
    return "-" if any(map(math.isnan, values)) else with_error(values, scale, digits)


def differences(by, label, questions, measures=COMPARED, scale=100, digits=1):
    """Lines of a table: the mean difference by seed of each question, a column a measure.

    by: {(arm, seed): {measure: value}}, for COMPARED rows of with_gains.
    """
    lines = []
    for what, pairs in questions.items():
        found = [list(differences_by_seed(by, pairs, measure).values()) for measure in measures]
        if found[0]:
            cells = [cell(values, scale, digits) for values in found]
            lines.append(f"| {label} | {what} | {len(found[0])} | {' | '.join(cells)} |")
    return lines


PAIRED_HEAD = ["| model | lr | what | seeds | pass@1 | greedy | training accuracy | pass@1 gained |",
               "|---|---|---|---|---|---|---|---|"]


def by_tried_arm_and_seed(rows, model):
    """{((arm, learning rate), seed): row} of a model: for differences, an arm is another at each rate."""
    return {((r["arm"], r["lr"]), r["seed"]): r for r in rows if r["model"] == model}


def over_rates_table(rows):
    """The differences of each model in the mean of the learning rates at which most seeds answer."""
    lines = list(PAIRED_HEAD)
    rows = with_gains(rows)
    for model in sorted({r["model"] for r in rows}):
        by = by_tried_arm_and_seed(rows, model)
        tried = sorted({lr for (_, lr), _ in by})
        for what, pairs in QUESTIONS.items():
            at_rate = {lr: [((arm, lr), (other, lr)) for arm, other in pairs] for lr in tried}
            seeds = {lr: len(differences_by_seed(by, at_rate[lr], COMPARED[0])) for lr in at_rate}
            rates = [lr for lr in seeds if seeds[lr] == max(seeds.values()) > 1]
            if len(rates) > 1:
                named = ", ".join(map(rate_text, rates))
                at_all = [pair for lr in rates for pair in at_rate[lr]]
                lines += differences(by, f"{model} | {named}", {what: at_all})
    return lines


def paired_table(rows):
    """The differences of each model at equal learning rates, then with each arm at its own best."""
    lines = list(PAIRED_HEAD)
    rows = with_gains(rows)
    best = best_rates(rows)
    for model in sorted({r["model"] for r in rows}):
        own = [r for r in rows if r["model"] == model]
        for lr in sorted({r["lr"] for r in own}):
            by = by_arm_and_seed(own, model, lr)
            lines += differences(by, f"{model} | {rate_text(lr)}", QUESTIONS)
        by = {(r["arm"], r["seed"]): r for r in own if r["lr"] == best.get((model, r["arm"]))}
        lines += differences(by, f"{model} | own best", QUESTIONS)
    return lines


def rates_table(rows):
    """What a larger one of an arm's learning rates changes, and in NVFP4 + AQN alone.

    The latter, "both", is as in the paper, whose 16 bit has the smaller rate.
    """
    lines = list(PAIRED_HEAD)
    rows = with_gains(rows)
    for model in sorted({r["model"] for r in rows}):
        by = by_tried_arm_and_seed(rows, model)
        questions = {}                                         # {(low, high): {what: pairs}}
        for arm in ARMS:
            tried = sorted({lr for (name, lr), _ in by if name == arm})
            for low, high in combinations(tried, 2):
                questions.setdefault((low, high), {})[arm] = [((arm, high), (arm, low))]
        for (low, high), asked in sorted(questions.items()):
            if "nvfp4+aqn" in asked:
                asked["both, 16 bit at the smaller"] = [(("nvfp4+aqn", high), ("bf16", low))]
            lines += differences(by, f"{model} | {rate_text(low)} to {rate_text(high)}", asked)
    return lines


def phase_means(metrics, measure):
    """{phase: the mean of a measure over its steps, nan where it has none}; metrics: a run's steps."""
    values = [step[measure] for step in metrics]
    chosen = {phase: values[part(len(values))] for phase, part in PHASES.items()}
    return {phase: mean(some) if some else math.nan for phase, some in chosen.items()}


def phase_table(runs, measure, scale, digits):
    """A measure of the steps by phase: each arm's mean, then differences by seed.

    runs: pairs of a row and its steps; those that did not log the measure are left out.
    """
    lines = [f"| model | lr | what | seeds | {' | '.join(PHASES)} |",
             "|---" * (4 + len(PHASES)) + "|"]
    questions = {what: QUESTIONS[what] for what in ASKED_OF_STEPS}
    runs = [(row, metrics) for row, metrics in runs
            if all(step.get(measure) is not None for step in metrics)]
    for model, lr in sorted({(row["model"], row["lr"]) for row, _ in runs}):
        by = {(row["arm"], row["seed"]): phase_means(metrics, measure) for row, metrics in runs
              if (row["model"], row["lr"]) == (model, lr)}
        for arm in ARMS:
            own = [means for (name, _), means in by.items() if name == arm]
            if own:
                cells = [cell([means[phase] for means in own], scale, digits) for phase in PHASES]
                lines.append(f"| {model} | {rate_text(lr)} | {arm} | {len(own)} | {' | '.join(cells)} |")
        lines += differences(by, f"{model} | {rate_text(lr)}", questions, PHASES, scale, digits)
    return lines


def ablation_table(rows):
    """What each of ABLATIONS changes, by seed."""
    lines = list(PAIRED_HEAD)
    rows = with_gains(rows)
    for model, lr in sorted({(r["model"], r["lr"]) for r in rows}):
        lines += differences(by_arm_and_seed(rows, model, lr), f"{model} | {rate_text(lr)}", CHANGES)
    return lines


# What phases.md shows of the steps: title, scale and digits.
OVER_TIME = {
    "entropy": ("Entropy in nats a token", 1, 3),
    "mismatch_kl": ("KL(rollout || trained) in 1e-4 nats a token", 1e4, 2),
    "effective_completions": ("Effective sample size of completions, 1 being all of them", 1, 2),
}


def write_tables(out, rows, arms):
    """tables.md from the rows. arms: arms_table."""
    lines = ["Made by `bench.py claims` or `bench.py tables`: means ± standard errors of seeds.",
             "", *arms, "",
             "Differences by seed in points (with what is named minus without), at equal learning rates and,",
             "where several were tried, with each arm at its own best. Gained is pass@1 after minus before:",
             "", *paired_table(rows), "",
             "The same in the mean of the learning rates named:", "", *over_rates_table(rows), "",
             "Ablations: NVFP4 + AQN with one change, minus without it, by seed, in points:",
             "", *ablation_table(rows), "",
             "Each arm at the learning rate with the highest training accuracy:",
             "", *best_table(rows), "",
             "The larger learning rate minus the smaller, by seed, in points:", "", *rates_table(rows)]
    write_lines(f"{out}/tables.md", lines)


def write_phases(out, runs):
    """phases.md. runs: pairs of a row and its steps, of ARMS alone."""
    lines = ["Made by `bench.py claims` or `bench.py tables`: means ± standard errors of seeds."]
    for measure, (title, scale, digits) in OVER_TIME.items():
        lines += ["", f"{title}, by part of the run, then differences by seed:", "",
                  *phase_table(runs, measure, scale, digits)]
    write_lines(f"{out}/phases.md", lines)


def draw(out, rows, runs):
    """The pictures for which there are rows enough. runs: see write_phases."""
    four = [(row, metrics) for row, metrics in runs if row["arm"] in FOUR]
    others = [(row, metrics) for row, metrics in runs if row["arm"] not in FOUR]
    if four:
        save_figure(f"{out}/curves.png", plot_curves, four)
    if others:
        models = {row["model"] for row, _ in others}
        bf16 = [(row, metrics) for row, metrics in runs if row["arm"] == "bf16" and row["model"] in models]
        save_figure(f"{out}/curves-others.png", plot_curves, bf16 + others)
    if compared_settings(rows):
        save_figure(f"{out}/differences.png", plot_differences, rows)
    factorial = [row for row, _ in runs]
    if compared_rates(factorial):
        save_figure(f"{out}/rates.png", plot_rates, factorial)
    if compared_changes(rows):
        save_figure(f"{out}/ablations.png", plot_changes, rows)


def make_tables(out, rows, steps):
    """tables.md from the rows of a study; phases.md and the pictures from its steps, too.

    rows, steps: see study.finished_runs and steps_of.
    """
    arms = arms_table(rows)
    write_tables(out, rows, arms)
    runs = [(row, steps[row["name"]]) for row in rows if row["arm"] in ARMS]
    if runs:
        write_phases(out, runs)
    draw(out, rows, runs)
    print("\n".join(arms))
    print(f"{out}/tables.md has the differences between arms, too, and stands beside the pictures")


def main(argv):
    """The exit status: 1 if a run failed."""
    args = arguments(argv, __doc__, list(FLAGS), list(ARMS), seeds=(10, 4), out="runs/claims")
    return run_study(FLAGS, args, make_tables)
