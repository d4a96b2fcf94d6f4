"""The recorded runs of results/: means and differences of a study.

    python bench.py tables claims              prints a study's tables; --base: the arm with which
                                               the others are compared
    python bench.py tables runs/mine           those of a folder of runs, made by studies/arms.sh
                                               and runs.sh

    runs.csv                a row a run; its column study names the study
    steps.csv.gz            the steps of these runs
"""
from pathlib import Path
from statistics import fmean

import pandas as pd

from harness.command import Parser
from harness.errors import require
from harness.folders import read_json, read_jsonl
from studies.tables import table

# Columns of tables: {measure: (title, scale, digits)}.
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


# --------------------------------------------------------------------------------------------------
# The runs

def row_of(folder):
    """What a study keeps of a finished run of studies/arms.sh."""
    summary = read_json(f"{folder}/summary.json")
    steps = pd.DataFrame(read_jsonl(f"{folder}/metrics.jsonl"))
    settings = summary["settings"]
    return {
        "name": folder.name,
        "model": Path(settings["model"] or "small").name,
        "arm": folder.name.rpartition("-lr")[0],
        **{name: settings[name] for name in ("lr", "seed")},
        **{name: value for name, value in summary.items() if name.endswith(("_before", "_after"))},
        **{name: summary[name] for name in ("steps", "seconds", "hardware")},
        "training_accuracy": steps.accuracy[-10:].mean(),
        "entropy": steps.entropy.mean(),
        "mismatch_kl": steps.mismatch_kl.mean(),
        "peak_memory_gb": steps.peak_memory_gb.max(),
        "seconds_a_step": steps.seconds.str["step"].median(),
    }


def runs_of(study):
    """The rows of a study in results/runs.csv, or of the finished runs of studies/arms.sh in a folder."""
    recorded = pd.read_csv("results/runs.csv")
    rows = recorded[recorded.study == study]
    if rows.empty:
        folders = [path.parent for path in sorted(Path(study).glob("*-lr*-seed*/summary.json"))]
        require(folders, f"{study}: is neither a study of results/runs.csv nor a folder with finished "
                "runs of studies/arms.sh; name one of these")
        rows = pd.DataFrame(map(row_of, folders)).reindex(columns=recorded.columns)
    return rows


# --------------------------------------------------------------------------------------------------
# Tables

def with_error(values, scale, digits):
    """"mean ± standard error" of a Series times scale; without ± if its values are all the same, or one."""
    text = f"{round(scale * fmean(values), digits) + 0.0:.{digits}f}"            # never -0.0
    return text + (f" ± {scale * values.sem():.{digits}f}" if values.nunique() > 1 else "")


def columns_table(columns, settings):
    """A line for each setting: means and standard errors over the seeds at which it was measured.

    settings: {(model, arm, lr): a table with a row a seed, a column a measure}.
    """
    titles = [title for title, _, _ in columns.values()]
    lines = []
    for setting, seeds in settings.items():
        shown = [with_error(seeds[name].dropna(), scale, digits) if seeds[name].count() else ""
                 for name, (_, scale, digits) in columns.items()]
        lines.append([*setting, len(seeds), *shown])
    return table(["model", "arm", "lr", "seeds", *titles], lines)


def print_tables(rows, base):
    """base: the arm with which the others are compared, at the same learning rate. A run that is there
    twice counts once.
    """
    rows = rows.assign(gained=rows.accuracy_after - rows.accuracy_before)
    settings = {setting: runs.groupby("seed")[[*MEASURES, "gained"]].last()
                for setting, runs in rows.groupby(["model", "arm", "lr"])}
    columns = REACHED | {"gained": ("pass@1 gained", 100, 1)}
    differences = {}
    for (model, arm, lr), seeds in settings.items():
        if arm != base and (model, base, lr) in settings:
            minus = seeds - settings[model, base, lr]
            differences[model, arm, lr] = minus.dropna(subset=["accuracy_after"])
    print("\n".join([
        "Means ± standard errors of seeds:", "", *columns_table(MEASURES, settings), "",
        f"Differences by seed in points, each arm minus {base}, at equal learning rates. Gained is pass@1",
        "after minus before:", "", *columns_table(columns, differences)]))


def main(argv):
    p = Parser(__doc__)
    p.add_argument("study", help="in results/runs.csv, or a folder of finished runs")
    p.add_argument("--base", default="nvfp4+aqn", help="the arm with which the others are compared")
    args = p.parse_args(argv)
    print_tables(runs_of(args.study), args.base)
