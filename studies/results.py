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
import gzip
import json
import os
from pathlib import Path

from harness.command import Parser, require_flag
from harness.report import learning_curve, save_figure
from studies import claims
from studies.study import finished_runs, grouped, read_json, steps_of

TEXTS = {"study", "name", "run", "model", "arm", "hardware", "commit"}
# The runs of learning/ whose curve a page shows.
SHOWN = ["default", "gsm8k-0.5b", "paper-reward-0.5b"]


def opened(path, mode):
    """A packed file, plain or gzip's."""
    of_kind = gzip.open if path.endswith(".gz") else open
    return of_kind(path, mode, encoding="utf-8", newline="")


def read_csv(path):
    """The rows of a packed file, {column: value}, without the values that a row lacks."""
    with opened(path, "rt") as f:
        return [{column: text if column in TEXTS else json.loads(text)
                 for column, text in row.items() if text} for row in csv.DictReader(f)]


def append_csv(path, rows):
    """Add rows to a packed file, what they have of its columns, with six significant digits."""
    with opened(path, "rt") as f:
        columns = next(csv.reader(f))
    with opened(path, "at") as f:
        writer = csv.DictWriter(f, columns, extrasaction="ignore", lineterminator="\n")
        for row in rows:
            writer.writerow({column: f"{value:.6g}" if isinstance(value, float) else value
                             for column, value in row.items()})


def add_runs(folder, runs, study):
    """Pack the finished runs of a folder, too, as runs of a study."""
    new = finished_runs(runs)
    require_flag(new, "add", runs, "holds no finished run; name the --out of a study")
    known = {row["name"] for row in read_csv(f"{folder}/runs.csv") if row["study"] == study}
    for row in new:
        require_flag(row["name"] not in known, "add", study, f"has {row['name']} already")
    append_csv(f"{folder}/runs.csv", [{**row, "study": study} for row in new])
    for name, metrics in steps_of(runs, new).items():
        append_csv(f"{folder}/steps.csv.gz",
                   [{**step, "study": study, "run": name} for step in metrics])
    os.makedirs(f"{folder}/{study}", exist_ok=True)


def make_tables(folder, plots):
    """Every table and picture of the folder from the files that the docstring names.

    plots: {name of a .json: the function that draws it}.
    """
    steps = grouped(read_csv(f"{folder}/steps.csv.gz"), "study", "run")
    for (study,), rows in grouped(read_csv(f"{folder}/runs.csv"), "study").items():
        of_runs = {run: metrics for (of, run), metrics in steps.items() if of == study}
        claims.make_tables(f"{folder}/{study}", rows, of_runs)
    for path in Path(folder).glob("*/*.json"):
        if path.stem in plots:
            save_figure(path.with_suffix(".png"), plots[path.stem], read_json(path))
    summaries = read_json(f"{folder}/learning/runs.json")
    steps = grouped(read_csv(f"{folder}/learning/steps.csv.gz"), "run")
    for name in SHOWN:
        save_figure(f"{folder}/learning/{name}.png", learning_curve, steps[name,], summaries[name])


def main(argv, plots):
    """plots: as make_tables takes them, of the files that bench.py writes."""
    p = Parser(__doc__)
    p.add_argument("--add", nargs=2, metavar=("FOLDER", "STUDY"), help="runs to add, and their study")
    args = p.parse_args(argv)
    if args.add:
        add_runs("results", *args.add)
    make_tables("results", plots)
