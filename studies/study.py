"""Many runs of train_gsm8k.py, one after the other on each GPU: what studies have in common.

A run is an arm, a learning rate and a seed of one model. Runs of one seed see the same questions in
the same order. Each is a process with a folder of its own in the study's folder, and is resumed if it
was stopped. When it ends, row.json in its folder says what came of it; tables and pictures are made
from the folders that have one. Flags that a study does not know go to train_gsm8k.py.
"""
import glob
import json
import os
import re
import subprocess
import sys
from argparse import ArgumentTypeError
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean as mean
from statistics import median, stdev

import torch

import train_gsm8k
from harness.command import Parser, full_name, require_flag
from harness.folders import atomic_write, read_jsonl
from harness.run import lasting
from harness.errors import UserError
from harness.loading import model_folder
from studies.factorial import FLAGS, STUDIES

# Flags of train_gsm8k.py that a study sets for each run.
OWN_FLAGS = {"--lr", "--seed", "--start-seed", "--resume", "--eval-only", "--save-quantized",
             "--eval-samples", "--skip-eval-before", "--weights", "--method", "--quantizer"}


# --------------------------------------------------------------------------------------------------
# Text

def name_in_rows(model):
    """What rows call a model: a Hugging Face name or folder, or None, the small policy."""
    return Path(model).name if model else "small"


def with_error(values, scale, digits):
    """"mean ± standard error" of the values times scale.

    Without ± if they are all the same, or one.
    """
    text = f"{round(scale * mean(values), digits) + 0.0:.{digits}f}"             # never -0.0
    spread = stdev(values) if len(values) > 1 else 0
    return text + (f" ± {scale * spread / len(values) ** 0.5:.{digits}f}" if spread else "")


def table(titles, rows):
    """The lines of a Markdown table. rows: lists of cells."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (titles, *rows)]
    return [lines[0], "|" + "---|" * len(titles), *lines[1:]]


def grouped(rows, *keys):
    """{values of the keys: the rows that have them}."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


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

def wanted_runs(args):
    """{name of a run: its labels}, which its row has beside results, of a study.

    The first learning rate has all its arms and seeds before the next begins.
    """
    model = "small-own-starts" if args.own_starts else name_in_rows(args.model)
    runs = {}
    for lr, seed, arm in product(args.lrs, args.seeds, args.arms):
        name = re.sub("[ :/]+", "-", f"{model}-{arm}-lr{lr}-seed{seed}")
        runs[name] = {"name": name, "model": model, "arm": arm, "lr": lr, "seed": seed}
    return runs


def command_of(run, device, args):
    """The command line of a run, its labels.

    Of a flag that stands there twice the last counts: an arm's wins. pass@1 is the mean of four
    answers to each question. Weights round to the nearest code, unless the arm has another --quantizer.
    """
    own = f"--lr {run['lr']} --seed {run['seed']} --quantizer rtn --eval-samples 4"
    if args.own_starts:
        own += f" --start-seed {run['seed']}"
    folder = f"{args.out}/{run['name']}"
    if os.path.exists(f"{folder}/checkpoint"):
        own += " --resume"
    return [sys.executable, train_gsm8k.__file__, *own.split(), *args.more, *FLAGS[run["arm"]].split(),
            "--device", device, "--out", folder]


def row_of(run, folder):
    """What a study keeps of a finished run: its labels, and what its folder says."""
    summary = read_json(f"{folder}/summary.json")
    metrics = read_jsonl(f"{folder}/metrics.jsonl")
    return {
        **run,
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

def require_same_settings(args):
    """Refuse to add to a study whose runs of the model had other settings than these flags give."""
    path = f"{args.out}/{name_in_rows(args.model)}.json"
    settings = lasting(args.settings)
    theirs = read_json(path) if os.path.exists(path) else settings
    for name in sorted(settings.keys() & theirs.keys() - {"model", "slots", "micro_tokens"}):
        require_flag(theirs[name] == settings[name], name, settings[name],
                     f"the runs in {args.out} have {theirs[name]}; give another --out")
    atomic_write(path, json.dumps(settings, indent=1))


def run_one(run, device, args):
    """Make a run and its row on a device -> exit status."""
    folder = f"{args.out}/{run['name']}"
    os.makedirs(folder, exist_ok=True)
    print(f"{device}: {run['name']}", flush=True)
    environment = {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // args.jobs)), **os.environ}
    with open(f"{folder}.log", "ab") as log:
        status = subprocess.call(
            command_of(run, device, args), env=environment, stdout=log, stderr=log)
    if status:
        print(f"{run['name']}: ended with status {status}; {folder}.log says why", flush=True)
    else:
        atomic_write(f"{folder}/row.json", json.dumps(row_of(run, folder), indent=1))
    return status


def run_all(args):
    """Make the runs that are missing, as many at once as there are devices -> whether one failed.

    Ctrl-C reaches the runs, too: they stop, and no other is begun.
    """
    wanted = wanted_runs(args)
    missing = [run for name, run in wanted.items() if not os.path.exists(f"{args.out}/{name}/row.json")]
    print(f"{len(wanted)} runs, {len(missing)} missing")
    devices = [args.settings.device]
    if devices == ["cuda"]:
        devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    devices *= args.jobs
    runs = iter(missing)                    # the threads share it

    def work(device):
        return [run_one(run, device, args) for run in runs]

    with ThreadPoolExecutor(len(devices)) as pool:
        try:
            return any(sum(pool.map(work, devices), []))
        finally:
            list(runs)


def arguments(argv, description, study):
    """The command line of a study, one of factorial.STUDIES."""
    default_arms, seeds = STUDIES[study]
    p = Parser(description)
    p.add_argument("--model", help="name or folder (default: the small policy)")
    p.add_argument("--arms", nargs="+", choices=FLAGS, default=default_arms, metavar="ARM",
                   help=f"of {', '.join(FLAGS)} (default {', '.join(default_arms)})")
    p.add_argument("--lrs", nargs="+", type=float,
                   help="learning rates (default 5e-5; small policy 3e-3)")
    p.add_argument("--seeds", nargs="+", type=int,
                   help=f"default 0 to {seeds[1] - 1}; small policy 0 to {seeds[0] - 1}")
    p.add_argument("--own-starts", action="store_true",
                   help="small policy: each seed begins with a policy of its own making")
    p.add_argument("--jobs", type=positive, default=1,
                   help="processes on each GPU, or on the CPU (default 1)")
    p.add_argument("--out", default=f"runs/{study}",
                   help=f"folder of the runs, tables and pictures (default runs/{study})")
    p.add_argument("--tables", action="store_true", help="run nothing, only make the tables")
    args, args.more = p.parse_known_args(argv)
    for flag in args.more:
        if flag.partition("=")[0] in OWN_FLAGS:
            raise UserError(f"{flag}: the study sets it for each run; use --arms, --lrs, --seeds")
    require_flag(not (args.model and args.own_starts), "own-starts", "", "is for the small policy")
    if args.model:
        args.more += ["--model", args.model]
    args.settings = train_gsm8k.arguments(args.more)
    args.lrs = args.lrs or [5e-5 if args.model else 3e-3]
    args.seeds = args.seeds or range(seeds[1] if args.model else seeds[0])
    return args


def run_study(args, make_tables):
    """Run what is missing, unless --tables is given -> exit status.

    Then make_tables(folder, rows, steps) of finished_runs and steps_of, if there are any.
    """
    failed = False
    if not args.tables:
        if args.model:
            model_folder(full_name(args.model))            # that it is there is seen once
        os.makedirs(args.out, exist_ok=True)
        require_same_settings(args)
        failed = run_all(args)
    rows = finished_runs(args.out)
    require_flag(rows or failed, "out", args.out, "holds no finished run; name the folder of a study")
    if rows:
        make_tables(args.out, rows, steps_of(args.out, rows))
    return int(failed)
