"""The paper's claims, tested with seeds: which runs there are, which are missing, what came of it.

    python bench.py claims                                       the small policy, on this machine
    python bench.py claims --own-starts                          each seed trains a policy of its own
    python bench.py claims --model FOLDER --data FOLDER          a real model, one run a GPU
    python bench.py claims --tables                              only the tables and the pictures

How runs are made, stopped and resumed: studies/study.py. Beside the runs stand tables.md, phases.md
and the pictures made of them; flags that are not named here go to train_gsm8k.py.
--arms takes those of the factorial (ARMS, the default) and of the ablations (ABLATIONS).
"""
from statistics import fmean as mean

from harness.report import save_figure
from studies.claims_pictures import LINES, compared, plot_curves, plot_differences
from studies.factorial import ARMS, FLAGS, QUESTIONS
from studies.factorial import at_rate, best_rates, by_model, differences, questions_of, rates_of
from studies.study import arguments, rate_text, run_study, table, with_error, write_lines

MEASURES = {
    "accuracy_after": "pass@1",
    "greedy_after": "greedy",
    "training_accuracy": "training accuracy",
}
BEFORE = {"accuracy_before": "before: pass@1", "greedy_before": "greedy"}
# Parts of a run, as fractions of its steps; the first step alone is one, too. The first tenth has no
# noise; in the next two its sigma is largest.
PHASES = {"first step": (0, 0), "10 to 30 %": (0.1, 0.3), "second half": (0.5, 1)}
# What is asked of the steps, beside each arm's mean.
ASKED_OF_STEPS = ["noise in NVFP4", "noise in BF16", "4 bits without noise", "both"]
# What phases.md shows of the steps: title, scale and digits.
OVER_TIME = {
    "entropy": ("Entropy in nats a token", 1, 3),
    "mismatch_kl": ("KL(rollout || trained) in 1e-4 nats a token", 1e4, 2),
    "effective_completions": ("Effective sample size of completions, 1 being all of them", 1, 2),
}
MADE_BY = "Made by `bench.py claims` or `bench.py tables`: means ± standard errors of seeds."


def means(seeds, measures, *scale):
    """[number of rows, a cell for each measure]. seeds: {seed: row}; scale: as with_error takes it."""
    return [len(seeds), *(with_error([row[measure] for row in seeds.values()], *scale)
                          for measure in measures)]


def mean_differences(by, pairs, measures, *scale):
    """[number of seeds, a cell for each measure] of what factorial.differences finds."""
    found = [differences(by, pairs, measure) for measure in measures]
    return [len(found[0]), *(with_error(values, *scale) for values in found)]


def arms_table(rows):
    """A line for each model, arm and learning rate: means and standard errors over the seeds."""
    lines = []
    for model, by in by_model(rows).items():
        best = best_rates(by)
        for (arm, lr), seeds in sorted(by.items()):
            rate = rate_text(lr) + " (best)" * (best.get(arm) == lr)
            steps = ", ".join(sorted({str(row["steps"]) for row in seeds.values()}))
            entropy = means(seeds, ["entropy"], 1, 3)[1]
            lines.append([model, arm, rate, steps, *means(seeds, BEFORE | MEASURES), entropy])
    titles = [*BEFORE.values(), *MEASURES.values()]
    return table(["model", "arm", "lr", "steps", "seeds", *titles, "entropy, nats"], lines)


def differences_table(rows):
    """A line a model and question that a seed answers: the mean difference by seed, in points."""
    lines = [[model, what, rates, *mean_differences(by, pairs, [*MEASURES, "gained"])]
             for model, by in by_model(rows).items() for rates, what, pairs in questions_of(by)]
    return table(["model", "what", "lr", "seeds", *MEASURES.values(), "pass@1 gained"],
                 [line for line in lines if line[3]])


def phase_means(steps, measure):
    """{phase: the mean of a measure over its steps}."""
    values = [step[measure] for step in steps]
    count = len(values)
    return {phase: mean(values[round(begin * count):round(end * count) or 1])
            for phase, (begin, end) in PHASES.items()}


def phase_table(runs, measure, *scale):
    """A measure of the steps by phase: each arm's mean, then differences by seed.

    runs: rows with their steps as "metrics"; those that did not log the measure are left out.
    """
    logged = [{**run, **phase_means(run["metrics"], measure)} for run in runs
              if all(step.get(measure) is not None for step in run["metrics"])]
    lines = []
    for model, by in by_model(logged).items():
        for lr in rates_of(by):
            named = [model, rate_text(lr)]
            lines += [[*named, arm, *means(by.get((arm, lr), {}), PHASES, *scale)] for arm in ARMS]
            lines += [[*named, what,
                       *mean_differences(by, at_rate(QUESTIONS[what], lr), PHASES, *scale)]
                      for what in ASKED_OF_STEPS]
    return table(["model", "lr", "what", "seeds", *PHASES], [line for line in lines if line[3]])


def make_tables(out, rows, steps):
    """tables.md from the rows of a study; phases.md and the pictures from its steps, too.

    rows, steps: see study.finished_runs and steps_of.
    """
    write_lines(f"{out}/tables.md", [
        MADE_BY, "(best): of several learning rates the one with the highest training accuracy.",
        "", *arms_table(rows), "",
        "Differences by seed in points (with what is named minus without): at equal learning rates,",
        "with each arm at its own best, and in the mean of several rates. Last, the larger learning",
        "rate minus the smaller. Gained is pass@1 after minus before:", "", *differences_table(rows)])
    runs = [{**row, "metrics": steps[row["name"]]} for row in rows if row["arm"] in ARMS]
    if runs:
        lines = [MADE_BY]
        for measure, (title, *scale) in OVER_TIME.items():
            lines += ["", f"{title}, by part of the run, then differences by seed:", "",
                      *phase_table(runs, measure, *scale)]
        write_lines(f"{out}/phases.md", lines)
    four = [run for run in runs if run["arm"] in LINES]
    if four:
        save_figure(f"{out}/curves.png", plot_curves, four)
    if compared(rows):
        save_figure(f"{out}/differences.png", plot_differences, rows)
    print("\n".join(arms_table(rows)))
    print(f"{out}/tables.md has the differences between arms, too, and stands beside the pictures")


def main(argv):
    """The exit status: 1 if a run failed."""
    args = arguments(argv, __doc__, list(FLAGS), list(ARMS), seeds=(10, 4), out="runs/claims")
    return run_study(FLAGS, args, make_tables)
