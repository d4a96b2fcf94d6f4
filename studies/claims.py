"""Arms compared with seeds: which runs there are, which are missing, what came of it.

    python bench.py claims                                       the small policy, on this machine
    python bench.py methods                                      other arms: those of methods/
    python bench.py claims --own-starts                          each seed trains a policy of its own
    python bench.py claims --model FOLDER --data FOLDER          a real model, one run a GPU
    python bench.py claims --tables                              only the tables and the pictures

studies/study.py says how runs are made, stopped and resumed. Beside the runs stand tables.md, phases.md
and the pictures made of them; flags that are not named here go to train_gsm8k.py. --arms takes all
arms of studies/factorial.py.
"""
from functools import partial
from statistics import fmean as mean

from harness.report import save_figure
from studies.claims_pictures import LINES, compared, plot_curves, plot_differences
from studies.factorial import ARMS, QUESTIONS, best_rates, by_model, differences, larger_rates
from studies.factorial import questions_of, rate_text
from studies.study import arguments, run_study, table, with_error, write_lines

# Columns of tables: {what a row has: (title, scale, digits)}.
REACHED = {
    "accuracy_after": ("pass@1", 100, 1),
    "greedy_after": ("greedy", 100, 1),
    "training_accuracy": ("training accuracy", 100, 1),
}
MEASURES = {
    "steps": ("steps", 1, 0),
    "accuracy_before": ("before: pass@1", 100, 1),
    "greedy_before": ("greedy", 100, 1),
    **REACHED,
    "entropy": ("entropy, nats", 1, 3),
    "mismatch_kl": ("mismatch, 1e-4 nats", 1e4, 2),
    "peak_memory_gb": ("memory, GB", 1, 1),
    "seconds_a_step": ("seconds a step", 1, 2),
}
# Parts of a run, as fractions of its steps; the first step alone is one, too. The first tenth has no
# noise; in the next two its sigma is largest.
PHASES = {"first step": (0, 0), "10 to 30 %": (0.1, 0.3), "second half": (0.5, 1)}
# What phases.md shows of the steps: title, scale and digits; and what it asks of them.
OVER_TIME = {
    "entropy": ("Entropy in nats a token", 1, 3),
    "mismatch_kl": ("KL(rollout || trained) in 1e-4 nats a token", 1e4, 2),
    "effective_completions": ("Effective sample size of completions, 1 being all of them", 1, 2),
}
ASKED_OF_STEPS = ["noise in NVFP4", "noise in BF16", "4 bits, without noise", "both"]
MADE_BY = "Made by `bench.py tables` or the study itself: means ± standard errors of seeds."


def columns_table(what, columns, lines):
    """lines: (model, what, learning rates, a list of values for each column), shown if there are any."""
    titles = [title for title, *_ in columns.values()]
    forms = [form for _, *form in columns.values()]
    return table(["model", what, "lr", "seeds", *titles], [
        [*names, len(found[0]), *(with_error(values, *form) for values, form in zip(found, forms))]
        for *names, found in lines if found[0]])


def arms_table(rows, columns):
    """A line for each model, arm and learning rate: means and standard errors over the seeds."""
    lines = []
    for model, by in by_model(rows).items():
        best = best_rates(by)
        arms = [arm for arm, _ in by]
        for (arm, lr), seeds in sorted(by.items()):
            rate = rate_text(lr) + " (best)" * (arms.count(arm) > 1 and best[arm] == lr)
            found = [[row[measure] for row in seeds.values()] for measure in columns]
            lines.append((model, arm, rate, found))
    return columns_table("arm", columns, lines)


def differences_table(rows, columns, *asked):
    """A line for each model and question: the mean difference and its error by seed.

    asked: functions such as factorial.questions_of.
    """
    return columns_table("what", columns, [
        (model, what, rates, [differences(by, pairs, measure) for measure in columns])
        for model, by in by_model(rows).items() for ask in asked for what, rates, pairs in ask(by)])


def with_phases(runs, measure):
    """The rows with the mean of a measure of the steps in each of PHASES; without those that lack it.

    runs: rows with their steps as "metrics".
    """
    for run in runs:
        values = [step.get(measure) for step in run["metrics"]]
        if None not in values:
            parts = {phase: values[round(begin * len(values)):round(end * len(values)) or 1]
                     for phase, (begin, end) in PHASES.items()}
            yield {**run, **{phase: mean(part) for phase, part in parts.items()}}


def make_tables(out, rows, steps):
    """tables.md from the rows of a study; phases.md and the pictures from its steps, too.

    rows, steps: see study.finished_runs and steps_of.
    """
    arms = arms_table(rows, MEASURES)
    gained = REACHED | {"gained": ("pass@1 gained", 100, 1)}
    write_lines(f"{out}/tables.md", [
        MADE_BY, "(best): of several learning rates the one with the highest training accuracy.",
        "", *arms, "",
        "Differences by seed in points (with what is named minus without; an ablation or a method",
        "minus nvfp4+aqn): at equal learning rates, with each arm at its own best where these differ,",
        "and in the mean of several rates. Last, the larger learning rate minus the smaller. Gained is",
        "pass@1 after minus before:", "",
        *differences_table(rows, gained, questions_of, larger_rates)])
    runs = [{**row, "metrics": steps[row["name"]]} for row in rows
            if row["arm"] in ARMS and row["name"] in steps]
    if runs:
        asked = partial(questions_of, asked={what: QUESTIONS[what] for what in ASKED_OF_STEPS})
        lines = [MADE_BY]
        for measure, (title, *form) in OVER_TIME.items():
            logged = list(with_phases(runs, measure))
            columns = {phase: (phase, *form) for phase in PHASES}
            lines += ["", f"{title}, by part of the run, then differences by seed:",
                      "", *arms_table(logged, columns),
                      "", *differences_table(logged, columns, asked)]
        write_lines(f"{out}/phases.md", lines)
    four = [run for run in runs if run["arm"] in LINES]
    if four:
        save_figure(f"{out}/curves.png", plot_curves, four)
    if four and compared(rows):
        save_figure(f"{out}/differences.png", plot_differences, rows)
    print("\n".join(arms))
    print(f"{out}/tables.md has the differences between arms, too, and stands beside the pictures")


def main(study, argv):
    """study: one of factorial.STUDIES -> the exit status: 1 if a run failed."""
    return run_study(arguments(argv, __doc__, study), make_tables)
