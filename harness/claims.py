"""The paper's claims, tested with seeds: which runs there are, which are missing, what came of it.

    python bench.py claims                                       the small policy, on this machine
    python bench.py claims --model FOLDER --data FOLDER          a real model, one run a GPU
    python bench.py claims --tables                              only the tables and the picture

A run is an arm, a model, a learning rate and a seed. Runs of the same seed see the same questions
in the same order. Each is a process of train_gsm8k.py, and is resumed if it was stopped. One that
ends becomes a line of runs.jsonl, and its metrics are kept beside it; tables.md and curves.png
are made from these files alone. Flags that this program does not know go to train_gsm8k.py.
--arms takes those of the factorial (ARMS, the default) and of the ablations (ABLATIONS).

pass@1 is the mean of four answers to each question. Before the training only seed 0 is measured:
the other seeds start from the same policy.
"""
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from statistics import fmean as mean
from statistics import stdev
from typing import NamedTuple

import torch

from harness.figures import save_figure
from harness.flags import Parser, require
from harness.run_folder import append_jsonl, atomic_write, read_jsonl
from harness.small_policy import warm_start

NO_NOISE = ["--sigma-start", "0", "--sigma-end", "0"]
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
TRAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "train_gsm8k.py")


class Run(NamedTuple):
    """One training run of the study."""
    arm: str
    model: str | None              # a Hugging Face name or folder; None: the small policy
    lr: float
    seed: int

    @property
    def model_name(self):
        return os.path.basename(os.path.normpath(self.model)) if self.model else "small"

    @property
    def name(self):
        arm = self.arm.replace(" ", "").replace("/", "over")
        return f"{self.model_name}-{arm}-lr{self.lr:g}-seed{self.seed}"

    def command(self, folder, data, more):
        """The process of this run: `more` are flags of train_gsm8k.py for all runs."""
        model = ["--model", self.model] if self.model else []
        data = ["--data", data] if data else []
        resume = ["--resume"] if os.path.isdir(folder) else []
        own = ["--lr", str(self.lr), "--seed", str(self.seed), "--out", folder]
        measured = ["--eval-samples", "4", *(["--skip-eval-before"] if self.seed else [])]
        return [sys.executable, TRAIN, *model, *data, *FLAGS[self.arm], *own, *measured, *more, *resume]


def standard_error(values):
    """Of the mean, from the spread of the values; None for a single one."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def visible_devices():
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them, or "cpu"."""
    gpus = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(i) for i in range(gpus)]
    return names[:gpus] or ["cpu"]


def commit():
    """The commit that the code stands at, or None outside a checkout."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                           cwd=os.path.dirname(TRAIN))
    return found.stdout.strip() or None


def row_of(run, folder):
    """What runs.jsonl says of a finished run."""
    with open(f"{folder}/summary.json") as f:
        summary = json.load(f)
    metrics = read_jsonl(f"{folder}/metrics.jsonl")
    accuracies = {k: v for k, v in summary.items() if k.endswith(("_before", "_after"))}
    return {
        "name": run.name,
        "model": run.model_name,
        "arm": run.arm,
        "weights": summary["settings"]["weights"],
        "aqn": summary["settings"]["sigma_start"] > 0,
        "algo": summary["settings"]["algo"],
        "lr": run.lr,
        "seed": run.seed,
        "steps": summary["steps"],
        **accuracies,
        "training_accuracy": mean([m["accuracy"] for m in metrics[-10:]]),
        "entropy": mean([m["entropy"] for m in metrics]),
        "seconds": summary["seconds"],
        "hardware": summary["hardware"],
        "commit": commit(),
    }


def work(device, missing, args, failed):
    """Run what is in the queue, one after the other, on a device: "cpu" or the number of a GPU."""
    environment = dict(os.environ)
    if device == "cpu":
        environment["OMP_NUM_THREADS"] = str(max(1, os.cpu_count() // args.jobs))
    else:
        environment["CUDA_VISIBLE_DEVICES"] = device
    while True:
        try:
            run = missing.get_nowait()
        except queue.Empty:
            return
        folder = f"{args.runs}/{run.name}"
        os.makedirs(args.runs, exist_ok=True)
        print(f"{device}: {run.name}", flush=True)
        with open(f"{folder}.log", "a") as log:
            code = subprocess.call(run.command(folder, args.data, args.more), env=environment,
                                   stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        if code:
            failed.append(run.name)
            print(f"{run.name} ended with status {code}; {folder}.log says why", flush=True)
            continue
        shutil.copy(f"{folder}/metrics.jsonl", f"{args.out}/{run.name}.metrics.jsonl")
        append_jsonl(f"{args.out}/runs.jsonl", row_of(run, folder))      # one short write: whole


def run_missing(args):
    """Start a worker on each device; returns the names of the runs that failed."""
    done = {row["name"] for row in read_jsonl(f"{args.out}/runs.jsonl")}
    # The first learning rate has all its arms and seeds before the next begins.
    wanted = [
        Run(arm, model, lr, seed)
        for lr in args.lrs
        for model in args.model
        for seed in args.seeds
        for arm in args.arms
    ]
    missing = queue.Queue()
    for run in wanted:
        if run.name not in done:
            missing.put(run)
    print(f"{len(wanted)} runs, {missing.qsize()} missing")
    if None in args.model:
        warm_start()                   # once, before several runs ask for it at the same time
    failed = []
    workers = []
    for device in visible_devices() * args.jobs:
        workers.append(threading.Thread(target=work, args=(device, missing, args, failed)))
        workers[-1].start()
    for worker in workers:
        worker.join()
    return failed


def with_error(values, scale=100, digits=1):
    """"mean ± standard error" of fractions, in percent."""
    error = standard_error(values)
    text = f"{scale * mean(values):.{digits}f}"
    return text if error is None else f"{text} ± {scale * error:.{digits}f}"


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


def make_tables(out):
    """tables.md and curves.png from runs.jsonl and the metrics beside it."""
    rows = read_jsonl(f"{out}/runs.jsonl")
    if not rows:
        print(f"{out}/runs.jsonl holds no finished run yet")
        return
    lines = ["Made by `python bench.py claims --tables` from runs.jsonl: means ± standard errors of seeds.",
             "", *arms_table(rows), "",
             "Differences at equal learning rates, by seed (with what is named minus without):",
             "", *paired_table(rows)]
    atomic_write(f"{out}/tables.md", "\n".join(lines) + "\n")
    runs = [(row, read_jsonl(f"{out}/{row['name']}.metrics.jsonl")) for row in rows]
    save_figure(f"{out}/curves.png", plot_curves, runs)
    print("\n".join(lines))


def arguments(argv):
    p = Parser(__doc__)
    p.add_argument("--model", nargs="+", default=[None],
                   help="names or folders (default: the small policy)")
    p.add_argument("--data", help="folder of train*.jsonl and test*.jsonl")
    p.add_argument("--arms", nargs="+", choices=list(FLAGS), default=list(ARMS),
                   help="default: the factorial's")
    p.add_argument("--lrs", nargs="+", type=float,
                   help="learning rates (default 5e-5; small policy 3e-3)")
    p.add_argument("--seeds", nargs="+", type=int, help="default 0 to 3; small policy 0 to 9")
    p.add_argument("--jobs", type=int, default=1, help="processes on each GPU, or on the CPU (default 1)")
    p.add_argument("--out", default="results/claims", help="results (default results/claims)")
    p.add_argument("--runs", default="runs/claims", help="folders of runs (default runs/claims)")
    p.add_argument("--tables", action="store_true", help="run nothing, only make the tables")
    args, args.more = p.parse_known_args(argv)
    small = args.model == [None]
    args.lrs = args.lrs or [3e-3 if small else 5e-5]
    require(args.jobs >= 1, "jobs", args.jobs, "must be at least 1")
    args.seeds = args.seeds or list(range(10 if small else 4))
    return args


def main(argv):
    """The exit status: 1 if a run failed."""
    args = arguments(argv)
    os.makedirs(args.out, exist_ok=True)
    failed = [] if args.tables else run_missing(args)
    make_tables(args.out)
    return 1 if failed else 0
