"""NVFP4 with noise, and 16 bits at half the rate: record and test of results/claims/contrast.md.

    python -m studies.contrast RECORD.jsonl RUNS/1 RUNS/2    add a row a start, with a finished run's measures
    python -m studies.contrast RECORD.jsonl                  which runs do not count
    python -m studies.contrast RECORD.jsonl --final          and the test: once, at the end

Folders are those of studies/contrast.sh, one a machine. Nothing that the record has is taken away.
"""
from pathlib import Path

import pandas as pd
from scipy import stats

from harness.command import Parser, one_line
from harness.errors import require
from harness.folders import read_jsonl, write_jsonl
from studies.results import row_of

ARMS = {("gptq+aqn", 1e-4): "P", ("gptq", 1e-4): "N", ("bf16", 1e-4): "B", ("bf16", 5e-5): "H"}
SEEDS = range(1, 13)
# The runs of a block have one value of each.
BLOCK = ["seed", "machine", "inputs", "hardware", "torch", "triton"]
ASKED = ["P - H", "P - B", "P - N"]
SECONDARY = ["N - B", "B - H", "2 * B - H - P"]
# The first decides.
MEASURES = {
    "accuracy_after": "pass@1 after training, %",
    "greedy_after": "greedy accuracy after training, %",
    "accuracy_validation": "pass@1 in validation, mean of steps 25, 50, 75 and 100, %",
    "entropy": "entropy of the rollouts, 0.01 nats",
    "one_right": "questions with one right answer in eight, %",
    "mismatch_kl": "mismatch of the policies that sample and are trained, 0.01 nats",
}


# --------------------------------------------------------------------------------------------------
# The record

def measures_of(run):
    """What the record keeps of a finished run; right_*: a question's right answers, in a list."""
    row = row_of(run)
    steps = pd.DataFrame(read_jsonl(run / "metrics.jsonl"))
    answers = pd.DataFrame(read_jsonl(run / "answers_after.jsonl"))
    right = {f"right_{name}": answers[name].str["right"].tolist() for name in ("accuracy", "greedy")}
    means = steps[["accuracy_validation", "one_right"]].mean()
    return {**row, **means, **right, "arm": ARMS[row["arm"], row["lr"]]}


def rows_of(folder):
    """A row for each start in a folder of studies/contrast.sh; a run's last start has its measures."""
    starts = []
    lines = read_jsonl(f"{folder}/starts.jsonl")
    require(lines and "commit" in lines[0],
            f"{folder}: has no starts.jsonl of studies/contrast.sh; name a folder that this made")
    for line in lines:
        if "commit" in line:                   # of those that follow
            machine = line
        else:
            starts.append(machine | line)
    last = {start["name"]: start for start in starts}
    for summary in Path(folder).glob("*/summary.json"):
        run = summary.parent
        require(run.name in last, f"{run}: starts.jsonl has no start of it; move it away")
        last[run.name].update(measures_of(run))
    return starts


def merged(rows):
    """A row a start. Of a start that is there twice the later row adds to the first; nothing goes.

    A run that was begun anew, not gone on with, is named.
    """
    starts, runs = {}, set()
    for row in rows:
        run = row["machine"], row["name"]
        start = *run, row["started"]
        if run in runs and start not in starts and not row["resumed"]:
            print("begun anew:", *start)
        starts[start] = starts.get(start, {}) | row
        runs.add(run)
    return list(starts.values())


def counted(rows):
    """The runs of the seeds that have all four arms in one block; the other finished ones are named.

    All have the inputs of the first complete block. Of a seed's blocks the first counts. The first is
    that with the run of the earliest start.
    """
    finished = [row for row in rows if "accuracy_after" in row]
    if not finished:
        return finished
    runs = pd.DataFrame(finished).sort_values("started").drop_duplicates(["machine", "name"])
    complete = runs[(runs.groupby(BLOCK, dropna=False).arm.transform("size") == 4) & runs.seed.isin(SEEDS)]
    alike = complete[complete.inputs.isin(complete.inputs[:1])]
    counts = alike[alike.machine == alike.groupby("seed").machine.transform("first")]
    others = runs.drop(counts.index)
    print("finished, not counted:", *others.machine + "/" + others["name"])
    return counts


# --------------------------------------------------------------------------------------------------
# The test

def comparisons(values):
    """Differences of arms, a row each: mean and Student's 95 % interval; Holm's p of those ASKED.

    values: a row a seed, a column an arm.
    """
    differences = pd.DataFrame({name: values.eval(name) for name in ASKED + SECONDARY})
    test = stats.ttest_1samp(differences, 0)
    low, high = test.confidence_interval(0.95)
    found = pd.DataFrame({"mean": differences.mean(), "low": low, "high": high, "p": test.pvalue})
    ordered = found.p[ASKED].sort_values() * [3, 2, 1]
    found["p"] = ordered.cummax().clip(upper=1)
    return found


def report(runs):
    """Print of each measure the arms' means, their standard errors, and the differences.

    The first measure has Holm's p if all SEEDS are complete.
    """
    for measure, title in MEASURES.items():
        values = 100 * runs.pivot(index="seed", columns="arm", values=measure)
        found = comparisons(values)
        if measure != "accuracy_after" or len(values) < len(SEEDS):
            del found["p"]
        print(f"\n{title}, {len(values)} seeds\n")
        for shown in values.agg(["mean", "sem"]), found:
            print(shown.round(3).to_string(na_rep=""), "\n")


def main(argv=None):
    p = Parser(__doc__)
    p.add_argument("record", help="file of all starts; the first call makes it")
    p.add_argument("runs", nargs="*", help="folders of studies/contrast.sh: their starts are added to it")
    p.add_argument("--final", action="store_true",
                   help="no run will follow: print intervals, and with twelve seeds the test")
    args = p.parse_args(argv)
    rows = read_jsonl(args.record)
    for folder in args.runs:
        rows += rows_of(folder)
    rows = merged(rows)
    if args.runs:
        write_jsonl(args.record, rows)
    runs = counted(rows)
    print(f"{len(rows)} starts; {len(runs) // 4} seeds are complete")
    if args.final:
        require(len(runs) >= 4 * 8, "--final: needs eight complete seeds, and twelve for the test; make more")
        report(runs)


if __name__ == "__main__":
    with one_line():
        main()
