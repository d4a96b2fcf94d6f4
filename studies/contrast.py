"""NVFP4 with noise, and 16 bits at half the rate: record and test of results/claims/contrast.md.

    python -m studies.contrast RUNS/1 RUNS/2 --record FILE.jsonl      a row a start, in a file
    python -m studies.contrast FILE.jsonl RUNS/3 --record FILE.jsonl  and those of a third machine
    python -m studies.contrast FILE.jsonl                             which seeds are complete
    python -m studies.contrast FILE.jsonl --final                     and the test: once, at the end

Folders are those of studies/contrast.sh, one a machine.
"""
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats
from scipy.optimize import brentq

from harness.command import Parser, one_line
from harness.errors import require
from harness.folders import read_jsonl, write_jsonl
from studies.results import row_of

ARMS = {("gptq+aqn", 1e-4): "P", ("gptq", 1e-4): "N", ("bf16", 1e-4): "B", ("bf16", 5e-5): "H"}
SEEDS = range(1, 13)
ASKED = ["P-H", "P-B", "P-N"]
SECONDARY = ["N-B", "B-H"]
# The first decides. Those that have a value for each 25 steps count by their mean.
MEASURES = {
    "accuracy_after": "pass@1 after training, %",
    "greedy_after": "greedy accuracy after training, %",
    "accuracy_validation": "pass@1 in validation, mean of steps 25, 50, 75 and 100, %",
    "entropy": "entropy of the rollouts, 0.01 nats",
    "one_right": "questions with one right answer in eight, %",
}


# --------------------------------------------------------------------------------------------------
# The record

def measures_of(run):
    """What the record keeps of a finished run; right_*: a question's right answers, in a list."""
    row = row_of(run)
    steps = pd.DataFrame(read_jsonl(run / "metrics.jsonl"))
    quarters = steps.groupby(np.ceil(steps.step / 25))
    courses = quarters[["accuracy_validation", "entropy", "one_right"]].mean()
    answers = pd.DataFrame(read_jsonl(run / "answers_after.jsonl"))
    right = {f"right_{name}": answers[name].str["right"].tolist() for name in ("accuracy", "greedy")}
    return {**row, **courses.to_dict("list"), **right, "arm": ARMS[row["arm"], row["lr"]]}


def rows_of(folder):
    """A row for each start in a folder of studies/contrast.sh; the last start of a run has its measures."""
    starts = []
    for line in read_jsonl(f"{folder}/starts.jsonl"):
        if "commit" in line:                           # of those that follow
            machine = {"machine": Path(folder).name, **line}
        else:
            starts.append({**machine, **line})
    last = {start["name"]: start for start in starts}
    for run in Path(folder).glob("*/summary.json"):
        last[run.parent.name].update(measures_of(run.parent))
    return starts


def complete_seeds(rows):
    """The runs of the seeds that have all four arms on one machine; what does not count is named.

    Of a seed that is complete on two machines the first counts.
    """
    finished = [row for row in rows if "accuracy_after" in row]
    if not finished:
        return finished
    runs = pd.DataFrame(finished).sort_values("started")
    arms = runs.groupby(["machine", "seed"]).arm.transform("nunique")
    counts = (arms == 4) & runs.seed.isin(SEEDS)
    for (machine, seed), others in runs[~counts].groupby(["machine", "seed"]):
        print(f"seed {seed:g} of {machine} does not count: {', '.join(others.arm)}")
    return runs[counts].drop_duplicates(["seed", "arm"])


# --------------------------------------------------------------------------------------------------
# The test

def comparisons(values):
    """The differences of two arms by seed, a row each: mean, Student's 95 % interval and p, Holm's p of
    those ASKED, and what would be found with 80 %: alone, and at Holm's first step.

    values: a row a seed, a column an arm.
    """
    differences = pd.DataFrame({name: values[name[0]] - values[name[-1]] for name in ASKED + SECONDARY})
    test = stats.ttest_1samp(differences, 0)
    low, high = test.confidence_interval(0.95)
    found = pd.DataFrame({"mean": differences.mean(), "low": low, "high": high, "p": test.pvalue})
    ordered = found.p[ASKED].sort_values()
    found["by Holm"] = (ordered * [3, 2, 1]).cummax().clip(upper=1)
    found["found alone"] = detectable(differences.std(), len(values), 0.05)
    found["found first"] = detectable(differences.std(), len(values), 0.05 / 3)
    return found


def detectable(spread, seeds, level):
    """The difference that a two-sided test finds with 80 %; spread: the standard deviation over seeds."""
    limit = stats.t.ppf(1 - level / 2, seeds - 1)
    standardised = brentq(lambda d: stats.nct.sf(limit, seeds - 1, d) - 0.8, 1, 5)
    return standardised * spread / seeds ** 0.5


def report(runs):
    """Print of each measure the arms' means, their standard errors, and the differences."""
    for measure, title in MEASURES.items():
        values = 100 * runs.pivot(index="seed", columns="arm", values=measure).map(np.mean)
        print(f"\n{title}, {len(values)} seeds\n")
        for shown in values.agg(["mean", "sem"]), comparisons(values):
            print(shown.to_string(float_format="{:.3f}".format, na_rep=""), "\n")


def main(argv=None):
    p = Parser(__doc__)
    p.add_argument("runs", nargs="+", help="folders of studies/contrast.sh, or a file of --record")
    p.add_argument("--record", metavar="FILE", help="write the rows to this file")
    p.add_argument("--final", action="store_true", help="no run will follow: print the test")
    args = p.parse_args(argv)
    rows = []
    for path in args.runs:
        rows += read_jsonl(path) if path.endswith(".jsonl") else rows_of(path)
    if args.record:
        write_jsonl(args.record, rows)
    runs = complete_seeds(rows)
    print(f"{len(rows)} starts; {len(runs) // 4} seeds are complete")
    if args.final:
        require(len(runs) >= 4 * 8, "--final: the test needs eight complete seeds; make more")
        report(runs)


if __name__ == "__main__":
    with one_line():
        main()
