"""Many runs of train_gsm8k.py, one after the other on each GPU: what studies have in common.

A run is an arm, a model, a learning rate and a seed. Runs of one seed see the same questions in the
same order. Each is a process with a folder of its own in the study's folder, and is resumed if it was
stopped. When it ends, row.json in its folder says what came of it; tables and pictures are made from
the folders that have one. Flags that a study does not know go to train_gsm8k.py.
"""
import glob
import json
import os
import queue
import subprocess
import sys
from argparse import ArgumentTypeError
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from statistics import fmean as mean
from statistics import median, stdev
from typing import NamedTuple

import torch
from filelock import FileLock, Timeout

from harness.command import Parser, full_name, require_flag, require_value
from harness.data import load_questions
from harness.folders import atomic_write, creating, read_jsonl
from harness.run import lasting
from harness.small_policy import warm_start
from qerl import UserError, model_folder
from train_gsm8k import read_settings

NO_NOISE = ["--sigma-start", "0", "--sigma-end", "0"]
TRAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "train_gsm8k.py")
# Flags of train_gsm8k.py that a study sets for each run.
OWN_FLAGS = {"--lr", "--seed", "--start-seed", "--resume", "--eval-only", "--save-quantized",
             "--eval-samples", "--skip-eval-before", "--weights", "--method", "--quantizer"}


# --------------------------------------------------------------------------------------------------
# Text

def name_in_rows(model, own_start=False):
    """What rows call a model: a Hugging Face name or folder, or None, the small policy."""
    if own_start:
        return "small-own-starts"
    return os.path.basename(os.path.normpath(model)) if model else "small"


def rate_text(lr):
    """A learning rate as one writes it: 0.00015 -> "1.5e-4"."""
    mantissa, exponent = f"{lr:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def standard_error(values):
    """Of the mean, from the spread of the values; None for a single one."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def with_error(values, scale=100, digits=1):
    """"mean ± standard error" of the values times scale; by default of fractions, in percent."""
    error = standard_error(values)
    rounded = round(scale * mean(values), digits) + 0.0             # never -0.0
    text = f"{rounded:.{digits}f}"
    return text if error is None else f"{text} ± {scale * error:.{digits}f}"


def table(titles, rows):
    """The lines of a Markdown table. rows: lists of cells."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (titles, *rows)]
    return [lines[0], "|" + "---|" * len(titles), *lines[1:]]


def positive(text):
    """A flag's whole number, at least 1."""
    if int(text) < 1:
        raise ArgumentTypeError(f"{text}: must be at least 1")
    return int(text)


def read_json(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def write_lines(path, lines):
    atomic_write(path, "\n".join(lines) + "\n")


# --------------------------------------------------------------------------------------------------
# A run

class Run(NamedTuple):
    """One training run of a study."""
    arm: str
    model: str | None              # a Hugging Face name or folder; None: the small policy
    lr: float
    seed: int
    own_start: bool = False        # whether each seed begins with a small policy of its own making

    @property
    def labels(self):
        """What its row says of it, beside settings and results."""
        model = name_in_rows(self.model, self.own_start)
        arm = self.arm.replace(" ", "").replace("/", "over").replace(":", "-")
        return {
            "name": f"{model}-{arm}-lr{self.lr}-seed{self.seed}",
            "model": model,
            "arm": self.arm,
            "seed": self.seed,
            "start_seed": self.seed if self.own_start else 0,      # of the small policy's making
        }

    def command(self, folder, flags, more, measure_start):
        """The command line of this run: `flags` are the arm's, `more` those of all runs.

        Of a flag that stands there twice the last counts: an arm's wins. pass@1 is the mean of four
        answers to each question. measure_start: whether the policy is measured before its training,
        too. Weights round to the nearest code, unless the arm has another --quantizer. A stopped run
        has its settings in its checkpoint.
        """
        if os.path.exists(f"{folder}/checkpoint.safetensors"):
            return [sys.executable, TRAIN, "--resume", "--out", folder, *more]
        own = ["--lr", str(self.lr), "--seed", str(self.seed), "--out", folder]
        own += ["--quantizer", "rtn", "--eval-samples", "4"]
        if self.model:
            own += ["--model", self.model]
        if self.own_start:
            own += ["--start-seed", str(self.seed)]
        if not measure_start:
            own.append("--skip-eval-before")
        if os.path.isdir(folder):
            own.append("--resume")
        return [sys.executable, TRAIN, *own, *more, *flags]


def start_of(row):
    """Which policy a row's run began with: its model, its arm, the seed of the policy's making."""
    return row["model"], row["arm"], row.get("start_seed", 0)


def row_of(run, folder):
    """What a study keeps of a finished run; raises UserError if its log lacks a step."""
    summary = read_json(f"{folder}/summary.json")
    metrics = read_jsonl(f"{folder}/metrics.jsonl")
    if [step["step"] for step in metrics] != list(range(1, summary["steps"] + 1)):
        raise UserError(f"{folder}/metrics.jsonl: does not hold the steps 1 to {summary['steps']}, each "
                        "once; remove the folder, and the run is made again")
    settings = summary["settings"]
    return {
        **run.labels,
        "weights": settings["weights"],
        "aqn": max(settings["sigma_start"], settings["sigma_end"]) > 0,
        "lora": settings["lora_rank"],                     # 0: full fine-tuning
        "algo": settings["algo"],
        "lr": settings["lr"],
        "steps": summary["steps"],
        **{k: v for k, v in summary.items() if k.endswith(("_before", "_after"))},
        "training_accuracy": mean(m["accuracy"] for m in metrics[-10:]),
        "entropy": mean(m["entropy"] for m in metrics),
        "mismatch_kl": mean(m["mismatch_kl"] for m in metrics),
        "peak_memory_gb": max(m["peak_memory_gb"] for m in metrics),
        "seconds_a_step": median(m["seconds"]["step"] for m in metrics),
        "seconds": summary["seconds"],
        "hardware": summary["hardware"],
    }


def finished_runs(out):
    """The rows of a study's finished runs, in the order of their names."""
    return [read_json(path) for path in sorted(glob.glob(f"{glob.escape(out)}/*/row.json"))]


def steps_of(out, rows):
    """{run's name: its steps, as metrics.jsonl has them} of finished runs."""
    return {row["name"]: read_jsonl(f"{out}/{row['name']}/metrics.jsonl") for row in rows}


# --------------------------------------------------------------------------------------------------
# A study

def visible_devices():
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them, or "cpu"."""
    gpus = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(i) for i in range(gpus)]
    return names[:gpus] or ["cpu"]


def missing_runs(args):
    """What a study's folder lacks -> [(Run, whether it measures its policy before training)].

    The first learning rate has all its arms and seeds before the next begins. Of the runs that begin
    with the same policy one measures it, the first that is missing if none has.
    """
    done = {row["name"]: row for row in finished_runs(args.out)}
    measured = {start_of(row) for row in done.values() if "accuracy_before" in row}
    wanted = [Run(arm, model, lr, seed, args.own_starts)
              for lr, model, seed, arm in product(args.lrs, args.model, args.seeds, args.arms)]
    missing = []
    for run in wanted:
        if run.labels["name"] not in done:
            missing.append((run, start_of(run.labels) not in measured))
            measured.add(start_of(run.labels))
    print(f"{len(wanted)} runs, {len(missing)} missing")
    return missing


def require_same_settings(args, same=()):
    """Refuse to add to a study whose runs of a model had other settings than these flags give."""
    for model in args.model:
        path = f"{args.out}/{name_in_rows(model, args.own_starts)}.json"
        given = ["--model", model] if model else []
        settings = lasting(read_settings([*given, *same, *args.more]))
        if os.path.exists(path):
            theirs = read_json(path)
            for name in sorted(settings.keys() & theirs.keys() - {"model"}):
                require_flag(theirs[name] == settings[name], name, settings[name],
                             f"the runs in {args.out} have {theirs[name]}; give another --out")
        atomic_write(path, json.dumps(settings, indent=1))


def prepare(missing, args):
    """Find or make what the runs begin with; what cannot be had is named here, once."""
    for model in {run.model for run, _ in missing}:
        load_questions(args.settings.data, args.settings.eval, model)
        if model:
            model_folder(full_name(model))
    for seed in {run.labels["start_seed"] for run, _ in missing if run.model is None}:
        warm_start(seed)


def run_one(run, measure_start, device, flags, args):
    """Make a run and its row on "cpu" or the GPU of this number -> whether it failed."""
    folder = f"{args.out}/{run.labels['name']}"
    environment = dict(os.environ)
    if device == "cpu":
        environment.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // args.jobs)))
    else:
        environment["CUDA_VISIBLE_DEVICES"] = device
    print(f"{device}: {run.labels['name']}", flush=True)
    command = run.command(folder, flags[run.arm], args.more, measure_start)
    with open(f"{folder}.log", "ab") as log:
        status = subprocess.call(command, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                                 stderr=log)
    try:
        if status:
            raise UserError(f"ended with status {status}; {folder}.log says why")
        atomic_write(f"{folder}/row.json", json.dumps(row_of(run, folder), indent=1))
    except UserError as e:
        print(f"{run.labels['name']}: {e}", flush=True)
        return True
    return False


def run_all(missing, flags, args):
    """Make the runs, as many at once as there are devices -> whether one of them failed.

    missing: see missing_runs; flags: {arm: flags of train_gsm8k.py}. Ctrl-C reaches the runs, too:
    they stop, and no other is begun.
    """
    devices = (["cpu"] if args.settings.device == "cpu" else visible_devices()) * args.jobs
    free = queue.SimpleQueue()
    for device in devices:
        free.put(device)

    def make(run, measure_start):
        device = free.get()
        try:
            return run_one(run, measure_start, device, flags, args)
        finally:
            free.put(device)

    with ThreadPoolExecutor(len(devices)) as pool:
        return any(list(pool.map(make, *zip(*missing))))


def arguments(argv, description, arms, default_arms, seeds, out):
    """The command line of a study. seeds: by default so many, (of the small policy, of a model)."""
    p = Parser(description)
    p.add_argument("--model", nargs="+", default=[None],
                   help="names or folders (default: the small policy)")
    p.add_argument("--arms", nargs="+", choices=arms, default=default_arms,
                   help=f"of {', '.join(arms)} (default {', '.join(default_arms)})", metavar="ARM")
    p.add_argument("--lrs", nargs="+", type=float,
                   help="learning rates (default 5e-5; small policy 3e-3)")
    p.add_argument("--seeds", nargs="+", type=int,
                   help=f"default 0 to {seeds[1] - 1}; small policy 0 to {seeds[0] - 1}")
    p.add_argument("--own-starts", action="store_true",
                   help="small policy: each seed begins with a policy of its own making")
    p.add_argument("--jobs", type=positive, default=1,
                   help="processes on each GPU, or on the CPU (default 1)")
    p.add_argument("--out", default=out, help=f"folder of the runs, tables and pictures (default {out})")
    p.add_argument("--tables", action="store_true", help="run nothing, only make the tables")
    args, args.more = p.parse_known_args(argv)
    for name in ("model", "out"):
        require_value(name, getattr(args, name))
    for flag in args.more:
        if flag.partition("=")[0] in OWN_FLAGS:
            raise UserError(f"{flag}: the study sets it for each run; use --arms, --lrs, --seeds")
    args.settings = read_settings(args.more)
    small = args.model == [None]
    require_flag(small or not args.own_starts, "own-starts", "", "is for the small policy")
    args.lrs = args.lrs or [3e-3 if small else 5e-5]
    args.seeds = args.seeds or list(range(seeds[0] if small else seeds[1]))
    for name in ("model", "arms", "lrs", "seeds"):                # what is named twice is run once
        setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    names = [name_in_rows(model) for model in args.model]
    for name in names:
        require_flag(names.count(name) == 1, "model", name, "is what two of them are called in "
                     "the tables; rename a folder")
    return args


def run_study(flags, args, make_tables, same=()):
    """Run what is missing, unless --tables is given -> exit status.

    flags: {arm: flags of train_gsm8k.py}. Then make_tables(folder, rows, steps) of finished_runs and
    steps_of, if there are any. same: what else all runs of a model share, as flags.
    """
    failed = False
    if not args.tables:
        with creating(args.out):
            os.makedirs(args.out, exist_ok=True)
        try:
            with FileLock(f"{args.out}/lock", timeout=0):
                require_same_settings(args, same)
                missing = missing_runs(args)
                if missing:
                    prepare(missing, args)
                    failed = run_all(missing, flags, args)
        except Timeout:
            raise UserError(f"--out {args.out}: another study runs here; wait for it or choose another folder")
    rows = finished_runs(args.out)
    require_flag(rows or failed, "out", args.out, "holds no finished run; name the folder of a study")
    if rows:
        make_tables(args.out, rows, steps_of(args.out, rows))
    return int(failed)
