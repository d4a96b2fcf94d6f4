"""Does RL on 4-bit weights, or noise, gain or lose? The rule of results/claims/experiment.md.

    python -m studies.decide results/claims/experiment.json         the effects and the verdicts

The record has a row a run, all measures in points of percent. A seed has a run in each of the four
arms. An effect is a difference between these, one for each seed; its error is that of their mean
(Student's t), to which a gain adds the error of the starts, which all seeds share.
"""
import numpy as np
import pandas as pd
from scipy import stats

from harness.command import Parser, one_line
from harness.folders import read_json
from studies.plots import table, with_error

MARGIN = 1.0                       # points: what is smaller does not matter to a user
QUESTIONS_ASKED = 660
ARMS = ["bf16", "bf16+noise", "gptq", "gptq+noise"]
NAMES = ["BF16", "BF16, noise", "NVFP4", "NVFP4, noise"]              # of the arms, in the picture
# How the four are added up.
EFFECTS = {
    "4 bits, without noise": (-1, 0, 1, 0),
    "4 bits and noise": (-1, 0, 0, 1),              # NVFP4 with noise minus BF16 without
    "4 bits, under noise": (0, -1, 0, 1),
    "noise in NVFP4": (0, 0, -1, 1),
    "noise in BF16": (-1, 1, 0, 0),
    "4 bits": (-0.5, -0.5, 0.5, 0.5),               # NVFP4 minus BF16, mean of both kinds
    "noise": (-0.5, 0.5, -0.5, 0.5),
    "4 bits, under noise minus without": (1, -1, -1, 1),
}
DECIDED = ["4 bits", "4 bits and noise"]      # in this order
SHOWN = {"accuracy_after": "pass@1 after training", "greedy_after": "greedy accuracy after training",
         "accuracy_training": "mean training accuracy"}
CURVES = {"accuracy": "a fraction", "entropy": "nats a token"}        # drawn over the steps; their units
# The exploratory arms, and the arm with which each is compared.
EXPLORATORY = {"control": "bf16", "round-gptq": "gptq", "round-rtn": "gptq"}


# --------------------------------------------------------------------------------------------------
# The runs

def starts_of(rows):
    """{format: (pass@1 before training, its variance)} in points, by all answers.

    The variance of one answer to a question is p(1 - p), whose mean is pass@2 - pass@1.
    """
    starts = {}
    for arm, same in rows[rows.arm.str.startswith("start")].groupby("arm"):
        p1, p2 = same["accuracy_now"].mean(), same["pass@2_now"].mean()
        variance = (p2 - p1) / (same.samples.sum() * QUESTIONS_ASKED)
        starts[arm.removeprefix("start-")] = 100 * p1, 1e4 * variance
    return starts


def by_seed(runs, measure, starts=None):
    """A table of a measure, in points: a row a seed, a column an arm. starts: what a gain begins at."""
    values = 100 * runs.pivot(index="seed", columns="arm", values=measure)[ARMS]
    return values - [starts[arm.removesuffix("+noise")][0] for arm in ARMS] if starts else values


# --------------------------------------------------------------------------------------------------
# The analysis

def effects(values, start_variance=0.0):
    """EFFECTS of a measure, a row each: estimate, error, degrees of freedom.

    values: a row a seed, a column an arm (ARMS). start_variance: that of the two starts' difference,
    which counts as often as an effect compares the formats. The sum of both variances has
    Satterthwaite's degrees of freedom; a start's are infinite.
    """
    count = len(values)
    weights = np.array(list(EFFECTS.values()))                                   # [effects, arms]
    differences = values.to_numpy() @ weights.T                                  # [seeds, effects]
    of_runs = differences.var(0, ddof=1) / count
    of_starts = start_variance * (weights[:, 2] + weights[:, 3]) ** 2
    return pd.DataFrame(index=list(EFFECTS), data={
        "estimate": differences.mean(0),
        "error": np.sqrt(of_runs + of_starts),
        "df": (count - 1) * (1 + of_starts / of_runs) ** 2,
    })


def interval(effect, level):
    """The ends of a confidence interval of a row of `effects`."""
    return stats.t.interval(level, effect.df, effect.estimate, effect.error)


def verdict(effect):
    """What the rule says of an effect on the gain."""
    low, high = interval(effect, 0.95)
    narrow_low, narrow_high = interval(effect, 0.90)           # one-sided tests at 5 %
    small = -MARGIN < narrow_low and narrow_high < MARGIN
    if low > 0:
        return "helps, by less than a point" if small else "helps"
    if high < 0:
        return "costs, by less than a point" if small else "costs"
    if small:
        return "changes less than a point"
    if narrow_high < MARGIN:
        return "undetermined, but a gain of a point is excluded"
    if narrow_low > -MARGIN:
        return "undetermined, but a loss of a point is excluded"
    return "undetermined"


def show(title, values, start_variance=0.0):
    """Print the effects on a measure, and return them."""
    found = effects(values, start_variance)
    print(f"\n{title}, {len(values)} seeds:\n")
    lines = []
    for name, effect in found.iterrows():
        low, high = interval(effect, 0.95)
        lines.append([name, f"{effect.estimate:.2f} ± {effect.error:.2f}", f"{low:.2f} to {high:.2f}"])
    print("\n".join(table(["effect", "points ± standard error", "95 % interval"], lines)))
    return found


def verdicts(gains):
    """Yield (effect, its verdict): the second question is asked only if the first is decided."""
    first, second = DECIDED
    says = verdict(gains.loc[first])
    yield first, says
    yield second, "not asked" if says.startswith("undetermined") else verdict(gains.loc[second])


def pass_1(rows):
    """pass@1 of each row: after training or, where nothing was trained, as it was measured."""
    return rows.accuracy_after.fillna(rows.accuracy_now)


def arms_table(rows):
    """A line an arm: how many runs, and their mean pass@1 and greedy accuracy in percent."""
    greedy = rows.greedy_after.fillna(rows.greedy_now)
    return table(["arm", "runs", "pass@1", "greedy"], [
        [arm, len(of_arm), *(with_error(measure[of_arm], 100, 2) for measure in (pass_1(rows), greedy))]
        for arm, of_arm in rows.groupby("arm").groups.items()])


def show_exploratory(rows):
    """Print pass@1 of the exploratory arms minus that of a trained arm of their seed."""
    values = 100 * rows.assign(reached=pass_1).pivot(index="seed", columns="arm", values="reached")
    lines = []
    for arm, other in EXPLORATORY.items():
        differences = values[arm] - values[other]
        low, high = stats.t.interval(0.95, len(differences) - 1, differences.mean(), differences.sem())
        lines.append([f"{arm} minus {other}", len(differences), with_error(differences, 1, 2),
                      f"{low:.2f} to {high:.2f}"])
    print("\nexploratory, pass@1 after training:\n")
    print("\n".join(table(["arms", "seeds", "points ± standard error", "95 % interval"], lines)))



def draw(rows, figure):
    """Panels of the trained arms: pass@1 after training, and two curves over the steps.

    rows: those of the record. A dot, or a thin line, is a run; a diamond has the 95 % interval
    of an arm's mean, a thick line is the mean. Dashed lines are the starts.
    """
    rows = pd.DataFrame(rows)
    figure.set_size_inches(14, 4.4)
    ends, *courses = figure.subplots(1, 1 + len(CURVES))
    for n, (arm, name) in enumerate(zip(ARMS, NAMES)):
        runs, color = rows[rows.arm == arm], f"C{n}"
        after = 100 * runs.accuracy_after
        half = after.sem() * stats.t.ppf(0.975, len(after) - 1)
        ends.plot([n - 0.15] * len(after), after, "o", color=color, alpha=0.5)
        ends.errorbar(n + 0.15, after.mean(), half, fmt="D", color=color, capsize=4)
        for axis, (measure, unit) in zip(courses, CURVES.items()):
            lines = np.array(runs[f"{measure}_by_ten"].tolist())                  # [seeds, tens]
            steps = 10 * np.arange(lines.shape[1]) + 5
            axis.plot(steps, lines.T, color=color, alpha=0.3, linewidth=0.7)
            axis.plot(steps, lines.mean(0), color=color, linewidth=2.5, label=name)
            axis.set(xlabel="step", ylabel=f"{measure} of the rollouts, {unit}")
    for arm, (start, _) in starts_of(rows).items():
        ends.axhline(start, color=f"C{ARMS.index(arm)}", linestyle="--", linewidth=1)
    ends.set_xticks(range(len(ARMS)), NAMES)
    ends.set(ylabel="pass@1 after training, %")
    courses[0].legend(frameon=False)


def main():
    p = Parser(__doc__)
    p.add_argument("record", metavar="FILE.json")
    rows = pd.DataFrame(read_json(p.parse_args().record))
    print("\n".join(arms_table(rows)))
    for measure, title in SHOWN.items():
        show(title, by_seed(rows, measure))
    show_exploratory(rows)
    starts = starts_of(rows)
    gains = show("gain: pass@1 after training minus the format's start",
                 by_seed(rows, "accuracy_after", starts), sum(v for _, v in starts.values()))
    for name, says in verdicts(gains):
        print(f"\n{name}: {says}")


if __name__ == "__main__":
    with one_line():
        main()
