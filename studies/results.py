"""The packed measurements in results/, and the command that makes their tables and pictures again.

    python bench.py tables                                every table and picture of results/
    python bench.py tables --add runs/claims claims/new   first adds the runs that bench.py claims, or
                                                          methods, left in a folder, to a study

    runs.csv                a row a run; its column study is the folder of the tables of that run
    steps.csv.gz            of each step of these runs, what tables and pictures read
    learning/runs.json      {name: what summary.json says} of runs that are no study's
    learning/steps.csv.gz   the steps of these
    */*.json                what other commands of bench.py measured; they stand beside their pictures
"""
import csv
import glob
import gzip
import io
import json
import os

from harness.command import Parser, require_flag
from harness.folders import atomic_write
from harness.report import learning_curve, save_figure
from studies import claims, compare
from studies.study import finished_runs, read_json, steps_of

MAKERS = {"claims": claims.make_tables, "methods": compare.make_tables}
RUN_COLUMNS = ["study", "name", "model", "arm", "weights", "aqn", "lora", "algo", "lr", "seed",
               "start_seed", "steps", "accuracy_before", "greedy_before", "accuracy_after",
               "greedy_after", "training_accuracy", "entropy", "mismatch_kl", "peak_memory_gb",
               "seconds_a_step", "seconds", "hardware", "commit"]
STEP_COLUMNS = ["study", "run", "step", "accuracy", "entropy", "mismatch_kl", "effective_completions"]
TEXTS = {"study", "name", "run", "model", "arm", "weights", "algo", "hardware", "commit"}
# The runs of learning/ whose curve a page shows.
SHOWN = ["default", "gsm8k-0.5b", "paper-reward-0.5b"]


def read_csv(path):
    """The rows of a packed file, {column: value}, without the values that a row lacks."""
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8", newline="") as f:
        return [{column: text if column in TEXTS else json.loads(text)
                 for column, text in row.items() if text} for row in csv.DictReader(f)]


def write_csv(path, columns, rows):
    """Pack rows; equal rows give equal bytes."""
    packed = io.StringIO()
    writer = csv.DictWriter(packed, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({column: value if column in TEXTS else json.dumps(value)
                         for column, value in row.items()})
    data = packed.getvalue().encode()
    atomic_write(path, gzip.compress(data, mtime=0) if path.endswith(".gz") else data)


def six_digits(step):
    """A step's numbers rounded to six significant digits, which is all that its tables show."""
    return {column: float(f"{value:.6g}") if type(value) is float else value
            for column, value in step.items()}


def read_studies(folder):
    """{study: (rows, steps)} of the packed files; for these see study.finished_runs and steps_of."""
    studies = {}
    for row in read_csv(f"{folder}/runs.csv"):
        rows, steps = studies.setdefault(row.pop("study"), ([], {}))
        rows.append(row)
        steps[row["name"]] = []
    for step in read_csv(f"{folder}/steps.csv.gz"):
        _, steps = studies[step.pop("study")]
        steps[step.pop("run")].append(step)
    return studies


def write_studies(folder, studies):
    """Pack what read_studies reads."""
    write_csv(f"{folder}/runs.csv", RUN_COLUMNS,
              ({"study": study, **row} for study, (rows, _) in studies.items() for row in rows))
    write_csv(f"{folder}/steps.csv.gz", STEP_COLUMNS,
              ({"study": study, "run": run, **six_digits(step)} for study, (_, steps) in studies.items()
               for run, of_run in steps.items() for step in of_run))


def add_runs(folder, runs, study):
    """Pack the finished runs of a folder, too, as runs of a study."""
    studies = read_studies(folder)
    rows, steps = studies.setdefault(study, ([], {}))
    new = finished_runs(runs)
    require_flag(new, "add", runs, "holds no finished run; name the --out of a study")
    require_flag(study.partition("/")[0] in MAKERS, "add", study, "must begin with claims or methods")
    for row in new:
        require_flag(row["name"] not in steps, "add", study, f"has {row['name']} already")
    rows += new
    steps |= steps_of(runs, new)
    os.makedirs(f"{folder}/{study}", exist_ok=True)
    write_studies(folder, studies)


def make_tables(folder, plots):
    """Every table and picture of the folder from the files that the docstring names.

    plots: {name of a .json: the function that draws it}.
    """
    for study, (rows, steps) in read_studies(folder).items():
        MAKERS[study.partition("/")[0]](f"{folder}/{study}", rows, steps)
    for path in glob.glob(f"{glob.escape(folder)}/*/*.json"):
        stem = path.removesuffix(".json")
        if os.path.basename(stem) in plots:
            save_figure(f"{stem}.png", plots[os.path.basename(stem)], read_json(path))
    runs = read_json(f"{folder}/learning/runs.json")
    steps = read_csv(f"{folder}/learning/steps.csv.gz")
    for name in SHOWN:
        held_out = {kind: (runs[name][f"{measure}_before"], runs[name][f"{measure}_after"])
                    for kind, measure in (("pass@1", "accuracy"), ("greedy", "greedy"))}
        of_run = [step for step in steps if step["run"] == name]
        save_figure(f"{folder}/learning/{name}.png", learning_curve, of_run, held_out)


def main(argv, plots):
    """plots: as make_tables takes them, of the files that bench.py writes."""
    p = Parser(__doc__)
    p.add_argument("--add", nargs=2, metavar=("FOLDER", "STUDY"), help="runs to add, and their study")
    p.add_argument("--out", default="results", help="the folder of packed files (default results)")
    args = p.parse_args(argv)
    require_flag(os.path.exists(f"{args.out}/runs.csv"), "out", args.out, "has no runs.csv")
    if args.add:
        add_runs(args.out, *args.add)
    make_tables(args.out, plots)
