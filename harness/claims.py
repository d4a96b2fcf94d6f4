"""The paper's claims, tested with seeds: which runs there are, which are missing, what came of it.

    python bench.py claims                                       the small policy, on this machine
    python bench.py claims --model FOLDER --data FOLDER          a real model, one run a GPU
    python bench.py claims --tables                              only the tables and the picture

How runs are made, stopped and resumed: harness/study.py. tables.md and curves.png are made from
runs.jsonl and the metrics beside it; flags that are not named here go to train_gsm8k.py.
--arms takes those of the factorial (ARMS, the default) and of the ablations (ABLATIONS).
"""
from statistics import fmean as mean

from harness.figures import save_figure
from harness.run_folder import read_jsonl
from harness.study import NO_NOISE, arguments, conduct, standard_error, with_error
from harness.study import write_lines

ARMS = {
    "nvfp4+aqn": ["--weights", "nvfp4"],
    "nvfp4": ["--weights", "nvfp4", *NO_NOISE],
    "bf16+aqn": ["--weights", "bf16"],
    "bf16": ["--weights", "bf16", *NO_NOISE],
    "nf4": ["--weights", "nf4", *NO_NOISE],
    "mxfp4": ["--weights", "mxfp4", *NO_NOISE],
    # Without LoRA there is no reference policy to stay near.
    "full": ["--weights", "bf16", "--lora-rank", "0", "--beta", "0", *NO_NOISE],
}
# One change each to NVFP4 with AQN; the figures named are the paper's.
ABLATIONS = {
    "linear": ["--schedule", "linear"],                                          # Fig. 9
    "cosine": ["--schedule", "cosine"],
    "logarithmic": ["--schedule", "logarithmic"],
    "sigma x4": ["--sigma-start", "4e-2", "--sigma-end", "2e-3"],
    "sigma / 4": ["--sigma-start", "2.5e-3", "--sigma-end", "1.25e-4"],
    "rank 16": ["--lora-rank", "16"],                                            # Fig. 10
    "rank 64": ["--lora-rank", "64"],
    "rank 128": ["--lora-rank", "128"],
    "dapo": ["--algo", "dapo"],
    "tis": ["--tis", "2"],
    "random reward": ["--reward", "random"],
}
FLAGS = {**ARMS, **ABLATIONS}
# Each question of the factorial: the arms with what is asked about, and the arms without, in
# pairs.
QUESTIONS = {
    "noise": [("nvfp4+aqn", "nvfp4"), ("bf16+aqn", "bf16")],
    "4 bits": [("nvfp4+aqn", "bf16+aqn"), ("nvfp4", "bf16")],
    "both": [("nvfp4+aqn", "bf16")],
}
MEASURES = ["accuracy_after", "greedy_after", "training_accuracy", "entropy"]


def arms_table(rows):
    """A line for each model, arm and learning rate: means and standard errors over the seeds."""
    lines = ["| model | arm | lr | seeds | steps | before: pass@1, greedy | pass@1 | greedy "
             "| training accuracy | entropy, nats |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    for key in sorted({(r["model"], r["arm"], r["lr"]) for r in rows}):
        same = [r for r in rows if (r["model"], r["arm"], r["lr"]) == key]
        cells = [with_error([r[measure] for r in same]) for measure in MEASURES[:3]]
        cells.append(with_error([r["entropy"] for r in same], scale=1, digits=3))
        model, arm, lr = key
        steps = ", ".join(sorted({str(r["steps"]) for r in same}))
        before = [f"{100 * r['accuracy_before']:.1f}, {100 * r['greedy_before']:.1f}"
                  for r in same if "accuracy_before" in r]
        cells = [str(len(same)), steps, before[0] if before else "-", *cells]
        lines.append(f"| {model} | {arm} | {lr:g} | {' | '.join(cells)} |")
    return lines


def paired_table(rows):
    """For each question of the factorial, at equal learning rates: the mean difference by seed."""
    lines = ["| model | lr | what | seeds | pass@1 | greedy | training accuracy, all in points |",
             "|---|---|---|---|---|---|---|"]
    for model, lr in sorted({(r["model"], r["lr"]) for r in rows}):
        by = {(r["arm"], r["seed"]): r for r in rows if (r["model"], r["lr"]) == (model, lr)}
        for what, pairs in QUESTIONS.items():
            seeds = [s for s in sorted({seed for _, seed in by})
                     if all((arm, s) in by for pair in pairs for arm in pair)]
            if not seeds:
                continue
            cells = []
            for measure in MEASURES[:3]:
                def gain(seed):
                    return mean([by[a, seed][measure] - by[b, seed][measure] for a, b in pairs])
                cells.append(with_error([gain(seed) for seed in seeds]))
            lines.append(f"| {model} | {lr:g} | {what} | {len(seeds)} | {' | '.join(cells)} |")
    return lines


def running_mean(values, width=5):
    """The mean of each value and those before it, `width` in all."""
    return [mean(values[max(0, i + 1 - width):i + 1]) for i in range(len(values))]


def plot_curves(runs, plt):
    """Training accuracy over the steps: mean and standard error over seeds, a panel a model and rate.

    runs: pairs of a row of runs.jsonl and its metrics. Each curve is a running mean of five steps.
    """
    panels = sorted({(row["model"], row["lr"]) for row, _ in runs})
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4), layout="constrained",
                                squeeze=False)
    for axis, panel in zip(axes[0], panels):
        for arm in FLAGS:
            curves = [running_mean([m["accuracy"] for m in metrics]) for row, metrics in runs
                      if (row["model"], row["lr"]) == panel and row["arm"] == arm]
            if not curves:
                continue
            steps = range(1, min(map(len, curves)) + 1)
            middle = [mean([c[i - 1] for c in curves]) for i in steps]
            errors = [standard_error([c[i - 1] for c in curves]) or 0 for i in steps]
            line, = axis.plot(steps, middle, label=f"{arm} ({len(curves)})", linewidth=1.2)
            low = [m - e for m, e in zip(middle, errors)]
            high = [m + e for m, e in zip(middle, errors)]
            axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.15)
        axis.set(title=f"{panel[0]}, learning rate {panel[1]:g}", xlabel="step",
                 ylabel="training accuracy (temperature 1)")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, title="arm (seeds)")
    return figure


def make_tables(out, rows):
    """tables.md and curves.png from the rows of runs.jsonl and the metrics beside it."""
    lines = ["Made by `python bench.py claims --tables` from runs.jsonl: means ± standard errors of seeds.",
             "", *arms_table(rows), "",
             "Differences at equal learning rates, by seed (with what is named minus without):",
             "", *paired_table(rows)]
    runs = [(row, read_jsonl(f"{out}/{row['name']}.metrics.jsonl")) for row in rows]
    save_figure(f"{out}/curves.png", plot_curves, runs)
    write_lines(f"{out}/tables.md", lines)


def main(argv):
    """The exit status: 1 if a run failed."""
    args = arguments(argv, __doc__, list(FLAGS), list(ARMS), seeds=(10, 4), out="results/claims")
    return conduct(FLAGS, args, make_tables)
