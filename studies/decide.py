"""Does RL on 4-bit weights, or noise, gain or lose? The rule of results/claims/experiment.md.

    python -m studies.decide RUNS/1 RUNS/2              the verdicts, of a folder a session
    python -m studies.decide RUNS/1 RUNS/2 --record FILE.json       and a row a run, in a file
    python -m studies.decide FILE.json                  the verdicts from this file
    python -m studies.decide --power                    how often the rule finds what is there
    python -m studies.decide --before                   the same analysis of results/runs.csv

Runs are those of studies/decide.sh, all measures in points of percent. An effect is a mean over runs
with an arm's property minus that over runs without; its error has two parts, the spread of the runs
and the error of the starts, which all runs of a format share.
"""
import math
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from harness.command import Parser, one_line, require_flag
from harness.folders import atomic_write, read_jsonl
from studies.plots import read_json, table
from studies.results import with_error

MARGIN = 1.0                       # points: what is smaller does not matter to a user
QUESTIONS_ASKED = 660
# What is asked of the coefficients: mean, format, noise, their product. Properties are +1/2 or -1/2.
EFFECTS = {
    "4 bits and noise": (0, 1, 1, 0),               # NVFP4 with noise minus BF16 without
    "4 bits": (0, 1, 0, 0),                         # NVFP4 minus BF16, mean of both kinds
    "noise": (0, 0, 1, 0),
    "4 bits, without noise": (0, 1, 0, -1),
    "4 bits, under noise": (0, 1, 0, 1),
    "noise in NVFP4": (0, 0, 1, 1),
    "noise in BF16": (0, 0, 1, -1),
    "4 bits, under noise minus without": (0, 0, 0, 2),
}


# --------------------------------------------------------------------------------------------------
# The runs

def rows_of(folder, session):
    """A row for each finished run and start in a session's folder."""
    for path in sorted(Path(folder).glob("*/*.json")):
        arm, _, seed = path.parent.name.rpartition("-")
        row = {"session": session, "arm": arm, "seed": seed, **read_json(path)}
        if path.name == "eval.json":
            yield {**row, "samples": row["settings"]["eval_samples"]}
        elif path.name == "summary.json" and not arm.startswith("entropy"):
            steps = pd.DataFrame(read_jsonl(path.with_name("metrics.jsonl")))
            means = steps[["accuracy", "entropy", "length", "mismatch_kl"]].mean()
            yield row | means.rename(lambda name: f"{name}_training").to_dict()


KEPT = ["session", "arm", "seed", "samples", "accuracy_now", "pass@2_now", "greedy_now",
        "accuracy_after", "pass@2_after", "greedy_after", "accuracy_training", "entropy_training",
        "length_training", "mismatch_kl_training", "seconds", "hardware", "date"]


def read_rows(paths):
    """The rows of folders, a session each, or of a file that --record has written."""
    if len(paths) == 1 and paths[0].endswith(".json"):
        return pd.DataFrame(read_json(paths[0]))
    rows = pd.DataFrame([row for n, path in enumerate(paths, 1) for row in rows_of(path, n)])
    require_flag(len(rows), "runs", " ".join(paths), "hold no finished run")
    return rows[[name for name in KEPT if name in rows]]


def write_record(path, rows):
    """A JSON list, a line a row."""
    lines = rows.to_json(orient="records", lines=True).splitlines()
    atomic_write(path, "[\n" + ",\n".join(lines) + "\n]\n")


def starts_of(rows):
    """{(format, session that measured it): (pass@1, variance)} in points, by their answers.

    The variance of one answer to a question is p(1 - p), whose mean is pass@2 - pass@1.
    """
    starts = {}
    for (arm, session), same in rows[rows.arm.str.startswith("start")].groupby(["arm", "session"]):
        p1, p2 = same["accuracy_now"].mean(), same["pass@2_now"].mean()
        variance = (p2 - p1) / (same.samples.sum() * QUESTIONS_ASKED)
        starts[arm.removeprefix("start-"), session] = 100 * p1, 1e4 * variance
    return starts


def trained_runs(rows):
    """(a table of the runs, {start: its variance}) for `effects`; all measures are in points.

    A session that measured no start of its own has the first one's: it must have the same codes.
    """
    starts = starts_of(rows)

    def start_of(format, session):
        measured = sorted(s for f, s in starts if f == format)
        require_flag(measured, "runs", format, "has no start; make it by decide.sh start")
        return format, session if session in measured else measured[0]
    runs = rows[rows.accuracy_after.notna()].copy()
    runs["four_bits"] = runs.arm.str.startswith("gptq")
    runs["noise"] = runs.arm.str.endswith("noise")
    runs["start"] = list(map(start_of, runs.arm.str.removesuffix("+noise"), runs.session))
    for name in ("accuracy_after", "greedy_after", "accuracy_training"):
        runs[name] *= 100
    runs["gain"] = runs.accuracy_after - [starts[start][0] for start in runs.start]
    return runs, {start: variance for start, (_, variance) in starts.items()}


# --------------------------------------------------------------------------------------------------
# The analysis

def effects(runs, measure, start_variance=None):
    """EFFECTS of a measure, a row each: estimate, error, degrees of freedom.

    A linear model of two properties, their product and the session as a block, by least squares; one
    residual variance for all arms. runs: a table with four_bits, noise, session and the measure.
    start_variance: {start: its variance}, of a measure that is a gain over runs.start. The sum of
    both variances has Satterthwaite's degrees of freedom; a start's are infinite.
    """
    format = np.where(runs.four_bits, 0.5, -0.5)
    noise = np.where(runs.noise, 0.5, -0.5)
    blocks = pd.get_dummies(runs.session, dtype=float).iloc[:, 1:]
    blocks = blocks - blocks.mean()
    X = np.column_stack([np.ones(len(runs)), format, noise, 2 * format * noise, blocks])
    solve = np.linalg.pinv(X)                                  # [coefficients, runs]
    y = runs[measure].to_numpy(float)
    residual = y - X @ (solve @ y)
    df = len(y) - np.linalg.matrix_rank(X)
    variance = residual @ residual / df
    found = []
    for name, asked in EFFECTS.items():
        weights = np.array(asked) @ solve[:4]                  # of each run in the effect
        of_runs = variance * (weights @ weights)
        of_starts = 0.0
        for start, its_variance in (start_variance or {}).items():
            share = weights[[own == start for own in runs.start]].sum()
            of_starts += share ** 2 * its_variance
        error = math.sqrt(of_runs + of_starts)
        found.append({"effect": name, "estimate": weights @ y, "error": error,
                      "df": df * (1 + of_starts / of_runs) ** 2})
    return pd.DataFrame(found).set_index("effect"), math.sqrt(variance)


def interval(effect, level):
    """The ends of a confidence interval of a row of `effects`."""
    reach = stats.t.ppf((1 + level) / 2, effect.df) * effect.error
    return effect.estimate - reach, effect.estimate + reach


def verdict(effect):
    """What the rule says of an effect on the gain."""
    low, high = interval(effect, 0.95)
    narrow_low, narrow_high = interval(effect, 0.90)           # two one-sided tests at 5 %
    small = -MARGIN < narrow_low and narrow_high < MARGIN
    if low > 0:
        return "helps, by less than a point" if small else "helps"
    if high < 0:
        return "costs, by less than a point" if small else "costs"
    if small:
        return "changes less than a point"
    if high < MARGIN:
        return "undetermined, but a gain of a point is excluded"
    if low > -MARGIN:
        return "undetermined, but a loss of a point is excluded"
    return "undetermined"


def show(runs, measure, start_variance=None):
    """Print the effects on a measure; a gain's have verdicts."""
    found, residual = effects(runs, measure, start_variance)
    print(f"\n{measure}, {len(runs)} runs, residual {residual:.2f}:\n")
    lines = []
    for name, effect in found.iterrows():
        low, high = interval(effect, 0.95)
        says = [verdict(effect)] if start_variance else []
        lines.append([name, f"{effect.estimate:.2f} ± {effect.error:.2f}",
                      f"{low:.2f} to {high:.2f}", *says])
    titles = ["effect", "points ± standard error", "95 % interval", "verdict"]
    print("\n".join(table(titles[:len(lines[0])], lines)))


def arms_table(rows):
    """A line an arm: how many runs, and their mean pass@1 and greedy accuracy in percent."""
    pass_1 = rows.accuracy_after.fillna(rows.accuracy_now)
    greedy = rows.greedy_after.fillna(rows.greedy_now)
    return table(["arm", "runs", "pass@1", "greedy"], [
        [arm, len(of_arm), *(with_error(measure[of_arm], 100, 2) for measure in (pass_1, greedy))]
        for arm, of_arm in rows.groupby("arm").groups.items()])


# --------------------------------------------------------------------------------------------------
# The rule's power

def power(sessions, format_effect, noise_effect, residual=0.9, start_error=0.08, trials=1000):
    """{effect: how often each verdict comes} of simulated experiments, four seeds an arm a session.

    Errors are normal, in points; the two effects add up. The residual is that of results/runs.csv,
    with four answers a question; the start's error is that of 256 answers.
    """
    rng = np.random.default_rng(0)
    runs = pd.DataFrame(product(range(sessions), range(4), (False, True), (False, True)),
                        columns=["session", "seed", "four_bits", "noise"])
    runs["start"] = runs.four_bits
    true = format_effect * runs.four_bits + noise_effect * runs.noise
    said = {name: Counter() for name in ("4 bits and noise", "4 bits", "noise")}
    for _ in range(trials):
        starts = rng.normal(0, start_error, 2)
        runs["gain"] = true + rng.normal(0, residual, len(runs)) - starts[runs.four_bits.astype(int)]
        found, _ = effects(runs, "gain", dict.fromkeys((False, True), start_error ** 2))
        for name in said:
            said[name][verdict(found.loc[name]).split(",")[0]] += 1 / trials
    return said


def show_power():
    verdicts = ["helps", "changes less than a point", "costs", "undetermined"]
    truths = [(0, 0), (-0.5, 0), (-1, 0), (-2, 0), (0, 1), (0, 2)]
    print("\n".join(table(["seeds an arm", "truth: 4 bits, noise", "asked", *verdicts], [
        [4 * sessions, f"{four_bits:g}, {noise:g}", name, *(f"{said[v]:.0%}" for v in verdicts)]
        for sessions in (2, 1) for four_bits, noise in truths
        for name, said in power(sessions, four_bits, noise).items()])))


# --------------------------------------------------------------------------------------------------
# The same analysis of earlier runs

def runs_before(model, codes, rates):
    """The runs of results/runs.csv with these codes and in BF16; a learning rate is a block."""
    runs = pd.read_csv("results/runs.csv")
    runs = runs[(runs.study == "claims") & (runs.model == f"Qwen2.5-Coder-{model}-Instruct")]
    runs = runs[runs.lr.isin(rates) & runs.arm.str.removesuffix("+aqn").isin([codes, "bf16"])]
    steps = pd.read_csv("results/steps.csv.gz").query("study == 'claims' and step <= 3")
    begun = runs.name.map(steps.groupby("run").accuracy.mean())
    return runs.assign(**{
        "session": runs.lr,
        "four_bits": runs.arm.str.startswith(codes),
        "noise": runs.arm.str.endswith("+aqn"),
        "pass@1": 100 * runs.accuracy_after,
        "pass@1 gained": 100 * (runs.accuracy_after - runs.accuracy_before),
        "greedy": 100 * runs.greedy_after,
        "training minus test accuracy": 100 * (runs.training_accuracy - runs.accuracy_after),
        "training accuracy gained": 100 * (runs.training_accuracy - begun),
    })


def show_before():
    for model, codes, rates in (("0.5B", "nvfp4", [5e-5, 1.5e-4]), ("0.5B", "gptq", [1.5e-4]),
                                ("1.5B", "nvfp4", [5e-5, 1.5e-4])):
        runs = runs_before(model, codes, rates)
        print(f"\n{model}, NVFP4 ({codes}) and BF16 at {rates}; the starts' error is not counted")
        for measure in ("pass@1", "pass@1 gained", "greedy", "training minus test accuracy"):
            show(runs, measure)
        # Runs of one seed begin alike, whatever their noise and learning rate: a seed is one value.
        gained = runs.groupby(["four_bits", "seed"])["training accuracy gained"].mean()
        print("\ntraining accuracy of the last ten steps minus the first three, 4 bits minus 16:",
              with_error(gained[True] - gained[False], 1, 2))
    board = pd.Series({name: 100 * run["greedy_after"] for name, run in
                       read_json("results/learning/runs.json").items() if "seed" in name})
    for model in ("0.5B", "1.5B"):
        runs = board.filter(like=f"speedrun-{model.lower()}")
        rows = runs.groupby(lambda name: name.rpartition("-")[0])
        spread = math.sqrt((rows.var() * (rows.size() - 1)).sum() / (rows.size() - 1).sum())
        print(f"the board's runs of {model}: standard deviation {spread:.2f}, pooled over its rows")


def main():
    p = Parser(__doc__)
    p.add_argument("runs", nargs="*", help="folders of sessions, or a file of --record")
    p.add_argument("--record", metavar="FILE", help="write a row a run to this file")
    for name in ("power", "before"):
        p.add_argument(f"--{name}", action="store_true")
    args = p.parse_args()
    if args.power:
        return show_power()
    if args.before:
        return show_before()
    require_flag(args.runs, "runs", "", "name the folders of the sessions")
    rows = read_rows(args.runs)
    if args.record:
        write_record(args.record, rows)
    runs, start_variance = trained_runs(rows)
    print("\n".join(arms_table(rows)))
    show(runs, "gain", start_variance)
    for measure in ("accuracy_after", "greedy_after", "accuracy_training"):
        show(runs, measure)


if __name__ == "__main__":
    with one_line():
        main()
