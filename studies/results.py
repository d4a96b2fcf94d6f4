"""The recorded runs of results/: means and differences of a study, and the pages' pictures.

    python bench.py tables                     draws the pictures again
    python bench.py tables claims              prints a study's tables
    python bench.py tables runs/mine           those of a folder of runs, made by studies/arms.sh
                                               and runs.sh

    runs.csv                a row a run; its column study names the study
    steps.csv.gz            the steps of these runs
    learning/runs.json      {name: what summary.json says} of runs that are no study's
    learning/steps.csv.gz   the steps of these
    claims/experiment.json  the runs of studies/decide.py

A setting is an arm at a learning rate, (arm, lr). The runs of a model are a wide table: a row a seed,
a column a measure and setting.
"""
import re
from pathlib import Path

import pandas as pd

from harness.command import Parser
from harness.errors import require
from harness.folders import read_json, read_jsonl
from harness.report import learning_curve, save_figure
from studies import decide
from studies.plots import table, with_error

ARMS = pd.read_csv(Path(__file__).with_name("arms.tsv"), sep="\t", index_col="arm")
# The runs of learning/ whose curve a page shows.
SHOWN = ["gsm8k-0.5b", "paper-reward-0.5b"]

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


# --------------------------------------------------------------------------------------------------
# The runs

def row_of(folder):
    """What a study keeps of a finished run of studies/arms.sh."""
    summary = read_json(f"{folder}/summary.json")
    steps = pd.DataFrame(read_jsonl(f"{folder}/metrics.jsonl"))
    settings = summary["settings"]
    slugs = {re.sub("[ :/]+", "-", arm): arm for arm in ARMS.index}
    return {
        "name": folder.name,
        "model": Path(settings["model"] or "small").name,
        "arm": slugs[folder.name.rpartition("-lr")[0]],
        **{name: settings[name] for name in ("lr", "seed")},
        **{name: value for name, value in summary.items() if name.endswith(("_before", "_after"))},
        **{name: summary[name] for name in ("steps", "seconds", "hardware")},
        "training_accuracy": steps.accuracy[-10:].mean(),
        "entropy": steps.entropy.mean(),
        "mismatch_kl": steps.mismatch_kl.mean(),
        "peak_memory_gb": steps.peak_memory_gb.max(),
        "seconds_a_step": steps.seconds.str["step"].median(),
    }


def read_csv(path):
    """A packed file as it was written."""
    return pd.read_csv(path, float_precision="round_trip", dtype={"commit": str})


def runs_of(study):
    """The rows of a study in results/runs.csv, or of the finished runs of studies/arms.sh in a folder."""
    recorded = read_csv("results/runs.csv")
    rows = recorded[recorded.study == study]
    if rows.empty:
        folders = [path.parent for path in sorted(Path(study).glob("*-lr*-seed*/summary.json"))]
        require(folders, f"{study}: is neither a study of results/runs.csv nor a folder with finished "
                "runs of studies/arms.sh; name one of these")
        rows = pd.DataFrame(map(row_of, folders)).reindex(columns=recorded.columns)
    return rows


# --------------------------------------------------------------------------------------------------
# Means and differences

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


def at_rate(pairs, lr):
    """Pairs of arms as pairs of settings."""
    return [((arm, lr), (other, lr)) for arm, other in pairs]


def rates_of(wide):
    return sorted({lr for _, lr in settings_of(wide)})


def questions_of(wide):
    """(what, learning rates as text, pairs of settings) of what the runs of a model are asked.

    At each rate, and in the mean of the rates at which most seeds answer.
    """
    for what, pairs in QUESTIONS.items():
        seeds = {lr: len(differences(wide, at_rate(pairs, lr), "accuracy_after"))
                 for lr in rates_of(wide)}
        top = max(seeds.values())
        most = [lr for lr in seeds if top > 1 and seeds[lr] == top]
        yield from ((what, rate_text(lr), at_rate(pairs, lr)) for lr in seeds)
        if len(most) > 1:
            yield what, ", ".join(map(rate_text, most)), [
                pair for lr in most for pair in at_rate(pairs, lr)]


# --------------------------------------------------------------------------------------------------
# Tables

def columns_table(what, columns, lines):
    """lines: (model, what, learning rates, values for each column), shown if there are any."""
    titles = [title for title, *_ in columns.values()]
    forms = [form for _, *form in columns.values()]
    return table(["model", what, "lr", "seeds", *titles], [
        [*names, len(found[0]),
         *(with_error(values, *form) if len(values) else "" for values, form in zip(found, forms))]
        for *names, found in lines if len(found[0])])


def arms_table(rows):
    """A line for each model, arm and learning rate: means and standard errors over the seeds."""
    return columns_table("arm", MEASURES, [
        (model, arm, rate_text(lr), [wide[name][arm, lr].dropna() for name in MEASURES])
        for model, wide in wide_tables(rows, MEASURES)
        for arm, lr in sorted(settings_of(wide))])


def differences_table(rows):
    """A line for each model and question: the mean difference and its error by seed."""
    rows = rows.assign(gained=rows.accuracy_after - rows.accuracy_before)
    columns = REACHED | {"gained": ("pass@1 gained", 100, 1)}
    return columns_table("what", columns, [
        (model, what, rates, [differences(wide, pairs, measure) for measure in columns])
        for model, wide in wide_tables(rows, columns)
        for what, rates, pairs in questions_of(wide)])


def print_tables(rows):
    print("\n".join([
        "Means ± standard errors of seeds:", "", *arms_table(rows), "",
        "Differences by seed in points, with what is named minus without, at equal learning rates; an",
        "ablation or a method is compared with nvfp4+aqn. Gained is pass@1 after minus before:", "",
        *differences_table(rows)]))


# --------------------------------------------------------------------------------------------------
# Pictures

def draw_all(folder, plots):
    """The pages' pictures from the files that the docstring names.

    plots: {name of a .json: the function that draws it}, of the files that bench.py writes.
    """
    plots = plots | {"experiment": decide.draw}
    for path in Path(folder).glob("*/*.json"):
        if path.stem in plots:
            save_figure(path.with_suffix(".png"), plots[path.stem], read_json(path))
    summaries = read_json(f"{folder}/learning/runs.json")
    for name, steps in read_csv(f"{folder}/learning/steps.csv.gz").groupby("run"):
        if name in SHOWN:
            metrics = steps.dropna(axis="columns").to_dict("records")
            save_figure(f"{folder}/learning/{name}.png", learning_curve, metrics, summaries[name])


def main(argv, plots):
    """plots: as draw_all takes them."""
    p = Parser(__doc__)
    p.add_argument("study", nargs="?", help="in results/runs.csv, or a folder of finished runs")
    args = p.parse_args(argv)
    if args.study:
        print_tables(runs_of(args.study))
    else:
        draw_all("results", plots)
