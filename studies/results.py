"""The packed measurements in results/, and the command that makes their tables and pictures.

    python bench.py tables                                every tables.md, and pictures
    python bench.py tables --add runs/claims claims/new   first adds a folder's runs, made by
                                                          studies/arms.sh and runs.sh, to a study

    runs.csv                a row a run; its column study is the folder of the tables of that run
    steps.csv.gz            the steps of these runs
    learning/runs.json      {name: what summary.json says} of runs that are no study's
    learning/steps.csv.gz   the steps of these
    claims/experiment.json  the runs of studies/decide.py

A setting is an arm at a learning rate, (arm, lr). The runs of a model are a wide table: a row a seed,
a column a measure and setting.
"""
import os
import re
from itertools import combinations
from pathlib import Path
from statistics import fmean

import pandas as pd

from harness.command import Parser, require_flag
from harness.folders import atomic_write, read_json, read_jsonl
from harness.report import learning_curve, save_figure
from studies import decide
from studies.plots import table, with_error

ARMS = pd.read_csv(Path(__file__).with_name("arms.tsv"), sep="\t", index_col="arm")
# The runs of learning/ whose curve a page shows.
SHOWN = ["default", "gsm8k-0.5b", "paper-reward-0.5b"]

# Each question: the arms with what is asked about, and the arms without, in pairs.
QUESTIONS = {
    "noise": [("nvfp4+aqn", "nvfp4"), ("bf16+aqn", "bf16")],
    "noise in BF16": [("bf16+aqn", "bf16")],
}
for codes, by in (("nvfp4", ""), ("gptq", " by GPTQ"), ("awq", " by AWQ")):
    noisy = f"{codes}+aqn"
    QUESTIONS |= {
        f"noise in NVFP4{by}": [(noisy, codes)],
        f"4 bits{by}": [(noisy, "bf16+aqn"), (codes, "bf16")],
        f"4 bits{by}, without noise": [(codes, "bf16")],
        f"4 bits{by}, under noise": [(noisy, "bf16+aqn")],
        f"both{by}": [(noisy, "bf16")],
    }
QUESTIONS |= {
    "GPTQ for rounding": [("gptq+aqn", "nvfp4+aqn"), ("gptq", "nvfp4")],
    "AWQ for rounding": [("awq+aqn", "nvfp4+aqn"), ("awq", "nvfp4")],
    "AWQ for rounding, under noise": [("awq+aqn", "nvfp4+aqn")],
    **{f"{arm} in BF16": [(arm, "bf16")] for arm in ARMS.index if arm.startswith("temperature")},
    "NF4 for NVFP4": [("nf4", "nvfp4")],
    "MXFP4 for NVFP4": [("mxfp4", "nvfp4")],
    "all weights for LoRA": [("full", "bf16")],
    "NVFP4 + AQN with LoRA for all weights": [("nvfp4+aqn", "full")],
    **{change: [(change, "nvfp4+aqn")] for change in ARMS.index[ARMS.kind != "arm"]},
}

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
MADE_BY = "Made by `bench.py tables` from runs.csv: means ± standard errors of seeds."


# --------------------------------------------------------------------------------------------------
# Adding runs

def row_of(folder):
    """What a study keeps of a finished run of studies/arms.sh."""
    summary = read_json(f"{folder}/summary.json")
    steps = pd.DataFrame(read_jsonl(f"{folder}/metrics.jsonl"))
    settings = summary["settings"]
    slugs = {re.sub("[ :/]+", "-", arm): arm for arm in ARMS.index}
    return {
        "name": folder.name,
        "model": settings["model"] and Path(settings["model"]).name,
        "arm": slugs[folder.name.rpartition("-lr")[0]],
        **{name: settings[name] for name in ("lr", "seed", "start_seed")},
        **{name: value for name, value in summary.items() if name.endswith(("_before", "_after"))},
        **{name: summary[name] for name in ("steps", "seconds", "hardware")},
        "training_accuracy": steps.accuracy[-10:].mean(),
        "entropy": steps.entropy.mean(),
        "mismatch_kl": steps.mismatch_kl.mean(),
        "peak_memory_gb": steps.peak_memory_gb.max(),
        "seconds_a_step": steps.seconds.str["step"].median(),
    }


def add_runs(results, runs, study):
    """Pack the finished runs of a folder, too, with six digits, as runs of a study."""
    folders = [path.parent for path in sorted(Path(runs).glob("*/summary.json"))]
    require_flag(folders, "add", runs, "holds no finished run")
    rows = pd.DataFrame(map(row_of, folders)).assign(study=study)
    own_starts = rows.start_seed.nunique() > 1
    rows["model"] = rows.model.fillna("small-own-starts" if own_starts else "small")
    known = read_csv(f"{results}/runs.csv").query("study == @study").name
    for name in rows.name[rows.name.isin(known)]:
        require_flag(False, "add", study, f"has {name} already")
    steps = pd.concat(pd.DataFrame(read_jsonl(path / "metrics.jsonl")).assign(run=path.name)
                      for path in folders).assign(study=study)
    for name, frame in (("runs.csv", rows), ("steps.csv.gz", steps)):
        columns = pd.read_csv(f"{results}/{name}", nrows=0).columns
        frame.reindex(columns=columns).to_csv(
            f"{results}/{name}", mode="a", header=False, index=False, float_format="%.6g")
    os.makedirs(f"{results}/{study}", exist_ok=True)


# --------------------------------------------------------------------------------------------------
# Means and differences

def read_csv(path):
    """A packed file as it was written."""
    return pd.read_csv(path, float_precision="round_trip", dtype={"commit": str})


def rate_text(lr):
    """A learning rate as one writes it: 0.00015 -> "1.5e-4"."""
    mantissa, exponent = f"{lr:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def wide_tables(rows, measures):
    """(model, its wide table) in the order of the names; a row that is there twice counts once."""
    for model, of_model in rows.groupby("model"):
        of_model = of_model.assign(setting=list(zip(of_model.arm, of_model.lr)))
        yield model, of_model.groupby(["seed", "setting"])[list(measures)].last().unstack("setting")


def differences(wide, pairs, measure):
    """By seed, the mean over pairs (setting, other) of setting minus other; of seeds with all."""
    wide = wide[measure]
    if not set(sum(pairs, ())) <= set(wide.columns):
        return []
    return (sum(wide[one] - wide[other] for one, other in pairs) / len(pairs)).dropna().tolist()


def settings_of(wide):
    """{setting: how many seeds it has}, arm by arm."""
    return wide["accuracy_after"].count().to_dict()


def best_rates(wide):
    """{arm: its learning rate with the highest training accuracy at the end}.

    Training questions decide, never those of the test. Two rates are compared by the seeds that both
    have, beginning with those of most seeds.
    """
    best = {}
    seeds = settings_of(wide)
    for arm, lr in sorted(seeds, key=lambda setting: (-seeds[setting], setting[1])):
        lead = differences(wide, [((arm, lr), (arm, best.setdefault(arm, lr)))], "training_accuracy")
        if lead and fmean(lead) > 0:
            best[arm] = lr
    return best


def at_rate(pairs, lr):
    """Pairs of arms as pairs of settings."""
    return [((arm, lr), (other, lr)) for arm, other in pairs]


def rates_of(wide):
    return sorted({lr for _, lr in settings_of(wide)})


def questions_of(wide):
    """(what, learning rates as text, pairs of settings) of what the runs of a model are asked.

    At each rate, with each arm at its own best, if these differ, and in the mean of the rates at
    which most seeds answer.
    """
    best = best_rates(wide)
    for what, pairs in QUESTIONS.items():
        seeds = {lr: len(differences(wide, at_rate(pairs, lr), "accuracy_after"))
                 for lr in rates_of(wide)}
        top = max(seeds.values())
        most = [lr for lr in seeds if top > 1 and seeds[lr] == top]
        yield from ((what, rate_text(lr), at_rate(pairs, lr)) for lr in seeds)
        if len({best.get(arm) for pair in pairs for arm in pair}) > 1:
            yield what, "own best", [((a, best.get(a)), (b, best.get(b))) for a, b in pairs]
        if len(most) > 1:
            yield what, ", ".join(map(rate_text, most)), [
                pair for lr in most for pair in at_rate(pairs, lr)]


def larger_rates(wide):
    """As questions_of, for pairs of learning rates: an arm at the larger minus itself at the smaller.

    "both" is the paper's comparison: NVFP4 + AQN at the larger rate minus BF16 at the smaller.
    """
    for low, high in combinations(rates_of(wide), 2):
        change = f"{rate_text(low)} to {rate_text(high)}"
        for arm in ARMS.index:
            yield arm, change, [((arm, high), (arm, low))]
        yield "both, 16 bit at the smaller", change, [(("nvfp4+aqn", high), ("bf16", low))]


# --------------------------------------------------------------------------------------------------
# Tables

def columns_table(what, columns, lines):
    """lines: (model, what, learning rates, values for each column), shown if there are any."""
    titles = [title for title, *_ in columns.values()]
    forms = [form for _, *form in columns.values()]
    return table(["model", what, "lr", "seeds", *titles], [
        [*names, len(found[0]), *(with_error(values, *form) for values, form in zip(found, forms))]
        for *names, found in lines if len(found[0])])


def arms_table(rows, columns):
    """A line for each model, arm and learning rate: means and standard errors over the seeds."""
    lines = []
    for model, wide in wide_tables(rows, columns):
        best = best_rates(wide)
        arms = [arm for arm, _ in settings_of(wide)]
        for arm, lr in sorted(settings_of(wide)):
            rate = rate_text(lr) + " (best)" * (arms.count(arm) > 1 and best[arm] == lr)
            lines.append((model, arm, rate, [wide[name][arm, lr].dropna() for name in columns]))
    return columns_table("arm", columns, lines)


def differences_table(rows, columns):
    """A line for each model and question: the mean difference and its error by seed."""
    return columns_table("what", columns, [
        (model, what, rates, [differences(wide, pairs, measure) for measure in columns])
        for model, wide in wide_tables(rows, columns)
        for what, rates, pairs in [*questions_of(wide), *larger_rates(wide)]])


def make_tables(out, rows):
    """tables.md from the rows of a study."""
    rows = rows.assign(gained=rows.accuracy_after - rows.accuracy_before)
    gained = REACHED | {"gained": ("pass@1 gained", 100, 1)}
    lines = [
        MADE_BY, "(best): of several learning rates the one with the highest training accuracy.",
        "", *arms_table(rows, MEASURES), "",
        "Differences by seed in points (with what is named minus without; an ablation or a method",
        "minus nvfp4+aqn): at equal learning rates, with each arm at its own best where these differ,",
        "and in the mean of several rates. Last, the larger learning rate minus the smaller. Gained is",
        "pass@1 after minus before:", "",
        *differences_table(rows, gained)]
    atomic_write(f"{out}/tables.md", "\n".join(lines) + "\n")


# --------------------------------------------------------------------------------------------------
# All of results/

def make_all(folder, plots):
    """Every table and picture of the folder from the files that the docstring names.

    plots: {name of a .json: the function that draws it}, of the files that bench.py writes.
    """
    plots = plots | {"experiment": decide.draw}
    for study, rows in read_csv(f"{folder}/runs.csv").groupby("study"):
        make_tables(f"{folder}/{study}", rows)
    for path in Path(folder).glob("*/*.json"):
        if path.stem in plots:
            save_figure(path.with_suffix(".png"), plots[path.stem], read_json(path))
    summaries = read_json(f"{folder}/learning/runs.json")
    for name, steps in read_csv(f"{folder}/learning/steps.csv.gz").groupby("run"):
        if name in SHOWN:
            metrics = steps.dropna(axis="columns").to_dict("records")
            save_figure(f"{folder}/learning/{name}.png", learning_curve, metrics, summaries[name])


def main(argv, plots):
    """plots: as make_all takes them, of the files that bench.py writes."""
    p = Parser(__doc__)
    p.add_argument("--add", nargs=2, metavar=("FOLDER", "STUDY"), help="runs to add; their study")
    args = p.parse_args(argv)
    if args.add:
        add_runs("results", *args.add)
    make_all("results", plots)
