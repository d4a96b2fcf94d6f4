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

from harness.report import save_figure
from studies.claims_pictures import LINES, compared, plot_curves, plot_differences
from studies.factorial import ARMS, CHANGES, FLAGS, QUESTIONS
from studies.factorial import at_rate, best_rates, by_model, differences, measured_starts, rates_of
from studies.study import arguments, grouped, rate_text, run_study, start_of, table, with_error
from studies.study import write_lines

MEASURES = ["accuracy_after", "greedy_after", "training_accuracy"]
REACHED = ["pass@1", "greedy", "training accuracy"]
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


# --------------------------------------------------------------------------------------------------
# What each arm reaches

def reached(rows):
    return [with_error([row[measure] for row in rows]) for measure in MEASURES]


def arms_table(rows):
    """A line for each model, arm and learning rate: means and standard errors over the seeds."""
    starts = [measured_starts(rows, measure) for measure in ("accuracy_before", "greedy_before")]
    lines = []
    for (model, arm, lr), same in sorted(grouped(rows, "model", "arm", "lr").items()):
        own = {start_of(row) for row in same}
        before = [[found[start] for start in own & found.keys()] for found in starts]
        lines.append([
            model, arm, rate_text(lr), len(same),
            ", ".join(sorted({str(row["steps"]) for row in same})),
            ", ".join(with_error(values) for values in before if values) or "-",
            *reached(same),
            with_error([row["entropy"] for row in same], scale=1, digits=3),
        ])
    return table(["model", "arm", "lr", "seeds", "steps", "before: pass@1, greedy", *REACHED,
                  "entropy, nats"], lines)


def best_table(rows):
    """A line for each model and arm at its own best rate; see best_rates."""
    lines = []
    for (model,), of_model in sorted(grouped(rows, "model").items()):
        tried = grouped(of_model, "arm", "lr")
        for arm, lr in best_rates(of_model).items():
            rates = sorted(rate for name, rate in tried if name == arm)
            same = tried[arm, lr]
            lines.append([model, arm, ", ".join(map(rate_text, rates)), rate_text(lr), len(same),
                          *reached(same)])
    return table(["model", "arm", "rates tried", "best", "seeds", *REACHED], lines)


# --------------------------------------------------------------------------------------------------
# Differences by seed. A question is (learning rates as text, what, pairs of settings).

def answers(by, questions, measures, scale=100, digits=1):
    """A line a question that a seed answers: the mean difference, a column a measure."""
    for rates, what, pairs in questions:
        found = [differences(by, pairs, measure) for measure in measures]
        if found[0]:
            yield [rates, what, len(found[0]), *(with_error(values, scale, digits) for values in found)]


def differences_table(rows, questions_of):
    """The answers of each model to questions_of({(setting, seed): row})."""
    lines = []
    for model, by in by_model(rows).items():
        lines += [[model, *line] for line in answers(by, questions_of(by), [*MEASURES, "gained"])]
    return table(["model", "lr", "what", "seeds", *REACHED, "pass@1 gained"], lines)


def at_equal_rates(by, questions):
    for lr in rates_of(by):
        for what, pairs in questions.items():
            yield rate_text(lr), what, at_rate(pairs, lr)


def paired(by):
    """QUESTIONS at equal learning rates, then with each arm at its own best."""
    yield from at_equal_rates(by, QUESTIONS)
    best = best_rates(by.values())
    for what, pairs in QUESTIONS.items():
        yield "own best", what, [((a, best.get(a)), (b, best.get(b))) for a, b in pairs]


def ablations(by):
    return at_equal_rates(by, CHANGES)


def over_rates(by):
    """QUESTIONS in the mean of the learning rates at which most seeds answer."""
    for what, pairs in QUESTIONS.items():
        seeds = {lr: len(differences(by, at_rate(pairs, lr), MEASURES[0])) for lr in rates_of(by)}
        most = max(seeds.values())
        rates = [lr for lr in seeds if seeds[lr] == most > 1]
        if len(rates) > 1:
            at_all = [pair for lr in rates for pair in at_rate(pairs, lr)]
            yield ", ".join(map(rate_text, rates)), what, at_all


def larger_rates(by):
    """What a larger one of an arm's learning rates changes, and in NVFP4 + AQN alone.

    The latter, "both", is as in the paper, whose 16 bit has the smaller rate.
    """
    for low, high in combinations(rates_of(by), 2):
        rates = f"{rate_text(low)} to {rate_text(high)}"
        for arm in ARMS:
            yield rates, arm, [((arm, high), (arm, low))]
        yield rates, "both, 16 bit at the smaller", [(("nvfp4+aqn", high), ("bf16", low))]


# --------------------------------------------------------------------------------------------------
# Measures of the steps

def phase_means(metrics, measure):
    """{phase: the mean of a measure over its steps, nan where it has none}; metrics: a run's steps."""
    values = [step[measure] for step in metrics]
    means = {}
    for phase, (begin, end) in PHASES.items():
        some = values[round(begin * len(values)):round(end * len(values)) or 1]
        means[phase] = mean(some) if some else math.nan
    return means


def phase_table(runs, measure, scale, digits):
    """A measure of the steps by phase: each arm's mean, then differences by seed.

    runs: rows with their steps as "metrics"; those that did not log the measure are left out.
    """
    means = [
        {**run, **phase_means(run["metrics"], measure)} for run in runs
        if all(step.get(measure) is not None for step in run["metrics"])
    ]
    own = {arm: [(arm, None)] for arm in ARMS}
    asked = {what: QUESTIONS[what] for what in ASKED_OF_STEPS}
    lines = []
    for model, by in by_model(means).items():
        questions = at_equal_rates(by, own | asked)
        lines += [[model, *line] for line in answers(by, questions, PHASES, scale, digits)]
    return table(["model", "lr", "what", "seeds", *PHASES], lines)


# --------------------------------------------------------------------------------------------------
# Files

MADE_BY = "Made by `bench.py claims` or `bench.py tables`: means ± standard errors of seeds."


def write_tables(path, rows):
    write_lines(path, [
        MADE_BY, "", *arms_table(rows), "",
        "Differences by seed in points (with what is named minus without), at equal learning rates and,",
        "where several were tried, with each arm at its own best. Gained is pass@1 after minus before:",
        "", *differences_table(rows, paired), "",
        "The same in the mean of the learning rates named:", "",
        *differences_table(rows, over_rates), "",
        "Ablations: NVFP4 + AQN with one change, minus without it, by seed, in points:", "",
        *differences_table(rows, ablations), "",
        "Each arm at the learning rate with the highest training accuracy:", "",
        *best_table(rows), "",
        "The larger learning rate minus the smaller, by seed, in points:", "",
        *differences_table(rows, larger_rates)])


def write_phases(path, runs):
    """runs: rows with their steps as "metrics", of ARMS alone."""
    lines = [MADE_BY]
    for measure, (title, scale, digits) in OVER_TIME.items():
        lines += ["", f"{title}, by part of the run, then differences by seed:", "",
                  *phase_table(runs, measure, scale, digits)]
    write_lines(path, lines)


def make_tables(out, rows, steps):
    """tables.md from the rows of a study; phases.md and the pictures from its steps, too.

    rows, steps: see study.finished_runs and steps_of.
    """
    write_tables(f"{out}/tables.md", rows)
    runs = [{**row, "metrics": steps[row["name"]]} for row in rows if row["arm"] in ARMS]
    if runs:
        write_phases(f"{out}/phases.md", runs)
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
