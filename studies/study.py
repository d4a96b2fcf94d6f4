"""Many runs of train_gsm8k.py, one after the other on each GPU: what studies have in common.

A run is an arm, a model, a learning rate and a seed. Runs of one seed see the same questions in the
same order. Each is a process with a folder of its own in the study's folder, and is resumed if it was
stopped. When it ends, row.json in its folder says what came of it; tables and pictures are made from
the folders that have one. Flags that a study does not know go to train_gsm8k.py.
"""
import glob
import json
import os
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor, as_completed
from statistics import fmean as mean
from statistics import median, stdev
from typing import NamedTuple

import torch
from filelock import FileLock, Timeout

from harness.flags import Parser, full_name, parse_flags, require_flag, require_value
from harness.keeper import lasting
from harness.questions import load_questions
from harness.run_folder import atomic_write, creating, read_jsonl
from harness.small_policy import warm_start
from qerl import UserError, model_folder
from train_gsm8k import Settings, read_settings

NO_NOISE = ["--sigma-start", "0", "--sigma-end", "0"]
TRAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "train_gsm8k.py")


def name_in_rows(model, own_start=False):
    """What rows call a model: a Hugging Face name or folder, or None, the small policy."""
    if own_start:
        return "small-own-starts"
    return os.path.basename(os.path.normpath(model)) if model else "small"


def data_in_rows(model, data):
    """What the results call the questions; None, the small policy's made-up ones."""
    given = data or (model and "gsm8k")
    return os.path.basename(os.path.normpath(given)) if given else None


class Run(NamedTuple):
    """One training run of a study."""
    arm: str
    model: str | None              # a Hugging Face name or folder; None: the small policy
    lr: float
    seed: int
    own_start: bool = False        # whether each seed begins with a small policy of its own making

    @property
    def model_name(self):
        return name_in_rows(self.model, self.own_start)

    @property
    def name(self):
        arm = self.arm.replace(" ", "").replace("/", "over").replace(":", "-")
        return f"{self.model_name}-{arm}-lr{self.lr:g}-seed{self.seed}"

    @property
    def start_seed(self):
        """The seed of the small policy's making."""
        return self.seed if self.own_start else 0

    @property
    def start(self):
        """Which policy it begins with, as start_of says it of a finished run."""
        return self.model_name, self.arm, self.start_seed

    def command(self, folder, data, flags, more, measure_start):
        """The command line of this run: `flags` are the arm's, `more` those of all runs.

        Of a flag that stands there twice the last counts: an arm's wins. pass@1 is the mean of four
        answers to each question. measure_start: whether the policy is measured before its training,
        too. Weights round to the nearest code, unless the arm has another --quantizer. A stopped run
        has its settings in its checkpoint.
        """
        if os.path.exists(f"{folder}/checkpoint.safetensors"):
            return [sys.executable, TRAIN, "--resume", "--out", folder, *more]
        model = ["--model", self.model] if self.model else []
        data = ["--data", data] if data else []
        resume = ["--resume"] if os.path.isdir(folder) else []
        own = ["--lr", str(self.lr), "--seed", str(self.seed), "--out", folder, "--quantizer", "rtn"]
        if self.own_start:
            own += ["--start-seed", str(self.seed)]
        measured = ["--eval-samples", "4", *([] if measure_start else ["--skip-eval-before"])]
        return [sys.executable, TRAIN, *model, *data, *own, *measured, *more, *flags, *resume]


def start_of(row):
    """Which policy a row's run began with: its model, its arm, the seed of the policy's making."""
    return row["model"], row["arm"], row.get("start_seed", 0)


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


def visible_devices():
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them, or "cpu"."""
    gpus = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(i) for i in range(gpus)]
    return names[:gpus] or ["cpu"]


def row_of(run, folder, settings):
    """What a study keeps of a finished run; raises UserError if its log lacks a step.

    settings: see shared_settings.
    """
    with open(f"{folder}/summary.json", encoding="utf-8") as f:
        summary = json.load(f)
    metrics = read_jsonl(f"{folder}/metrics.jsonl")
    if [step["step"] for step in metrics] != list(range(1, summary["steps"] + 1)):
        raise UserError(f"{folder}/metrics.jsonl: does not hold the steps 1 to {summary['steps']}, each "
                        "once; remove the folder, and the run is made again")
    own = summary["settings"]
    accuracies = {k: v for k, v in summary.items() if k.endswith(("_before", "_after"))}
    return {
        "name": run.name,
        "model": run.model_name,
        "arm": run.arm,
        "weights": own["weights"],
        "aqn": max(own["sigma_start"], own["sigma_end"]) > 0,
        "lora": own["lora_rank"],                          # 0: full fine-tuning
        "algo": own["algo"],
        "lr": own["lr"],
        "seed": run.seed,
        "start_seed": run.start_seed,
        "steps": summary["steps"],
        **accuracies,
        "training_accuracy": mean([m["accuracy"] for m in metrics[-10:]]),
        "entropy": mean([m["entropy"] for m in metrics]),
        "mismatch_kl": mean([m["mismatch_kl"] for m in metrics]),
        "peak_memory_gb": max(m["peak_memory_gb"] for m in metrics),
        "seconds_a_step": median([m["seconds"]["step"] for m in metrics]),
        "seconds": summary["seconds"],
        "hardware": summary["hardware"],
        "settings": settings,
    }


def finished_runs(out):
    """The rows of a study's finished runs, in the order of their names."""
    rows = []
    for path in sorted(glob.glob(f"{glob.escape(out)}/*/row.json")):
        with open(path, encoding="utf-8") as f:
            rows.append(json.load(f))
    return rows


def steps_of(out, rows):
    """{run's name: its steps, as metrics.jsonl has them} of finished runs."""
    return {row["name"]: read_jsonl(f"{out}/{row['name']}/metrics.jsonl") for row in rows}


def run_one(run, measure_start, environment, flags, args):
    """Make a run and its row -> None, or what went wrong, in a line."""
    folder = f"{args.out}/{run.name}"
    command = run.command(folder, args.data, flags[run.arm], args.more, measure_start)
    with open(f"{folder}.log", "ab") as log:
        status = subprocess.call(command, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                                 stderr=log)
    if status:
        return f"ended with status {status}; {folder}.log says why"
    try:
        row = row_of(run, folder, shared_settings(run.model, args))
    except UserError as e:
        return str(e)
    atomic_write(f"{folder}/row.json", json.dumps(row, indent=1))
    return None


def run_on(device, missing, flags, args, failed):
    """Run what is missing, one after the other, on a device: "cpu" or the number of a GPU."""
    environment = dict(os.environ)
    if device == "cpu":
        environment.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // args.jobs)))
    else:
        environment["CUDA_VISIBLE_DEVICES"] = device
    while True:
        try:
            run, measure_start = missing.popleft()     # which no other worker then has
        except IndexError:
            return
        print(f"{device}: {run.name}", flush=True)
        problem = run_one(run, measure_start, environment, flags, args)
        if problem:
            failed.append(run.name)
            print(f"{run.name}: {problem}", flush=True)


# Settings that the runs of one model may have otherwise, beside those of their arms.
OWN_SETTINGS = {"model", "device", "lr", "seed", "start_seed", "skip_eval_before"}


def shared_settings(model, args):
    """{name: value} of the settings that all runs of a model share, apart from what arms change.

    Raises UserError if a run would refuse its flags.
    """
    run = Run("any", model, args.lrs[0], args.seeds[0], args.own_starts)
    command = run.command(f"{args.out}/any", args.data, [], args.more, measure_start=True)
    settings = lasting(read_settings(command[2:]))
    return {name: value for name, value in settings.items() if name not in OWN_SETTINGS}


def require_same_settings(rows, args):
    """Refuse to go on with a study whose finished runs had other settings than these flags give."""
    for model in args.model:
        settings = shared_settings(model, args)
        for row in rows:
            theirs = row["settings"] if row["model"] == name_in_rows(model, args.own_starts) else {}
            for name in sorted(theirs.keys() & settings.keys()):
                require_flag(theirs[name] == settings[name], name, settings[name],
                             f"{row['name']} in {args.out} has {theirs[name]}; give another --out")


def missing_runs(args):
    """What a study's folder lacks -> [(Run, whether it measures its policy before training)].

    The first learning rate has all its arms and seeds before the next begins. Of the runs that begin
    with the same policy one measures it, the first that is missing if none has.
    """
    done = {row["name"]: row for row in finished_runs(args.out)}
    require_same_settings(done.values(), args)
    wanted = [
        Run(arm, model, lr, seed, args.own_starts)
        for lr in args.lrs
        for model in args.model
        for seed in args.seeds
        for arm in args.arms
    ]
    missing = []
    measured = {start_of(row) for row in done.values() if "accuracy_before" in row}
    for run in wanted:
        if run.name not in done:
            missing.append((run, run.start not in measured))
            measured.add(run.start)
    print(f"{len(wanted)} runs, {len(missing)} missing")
    return missing


def prepare(missing, args):
    """Find or make what the runs begin with, before several of them ask for it at the same time.

    A model or questions that cannot be had are named here, not by one run after the other.
    """
    for model in dict.fromkeys(run.model for run, _ in missing):
        load_questions(args.data, args.eval, model)
        if model:
            model_folder(full_name(model))
    for seed in dict.fromkeys(run.start_seed for run, _ in missing if run.model is None):
        warm_start(seed)


def run_all(missing, flags, args):
    """Start a worker on each device; returns the names of the runs that failed.

    missing: see missing_runs; flags: {arm: flags of train_gsm8k.py}. Ctrl-C reaches the runs, too:
    they stop, and no other is begun.
    """
    waiting = deque(missing)
    failed = []
    devices = (["cpu"] if args.device == "cpu" else visible_devices()) * args.jobs
    with ThreadPoolExecutor(len(devices)) as pool:
        workers = [pool.submit(run_on, device, waiting, flags, args, failed) for device in devices]
        try:
            for worker in as_completed(workers):
                worker.result()
        except BaseException:
            waiting.clear()            # then the pool waits for what is running
            print("no other run is begun; the same command goes on", flush=True)
            raise
    return failed


# Flags of train_gsm8k.py that a study sets itself, and what to use instead.
OWN_FLAGS = {
    "--lr": "use --lrs",
    "--seed": "use --seeds",
    "--start-seed": "use --own-starts",
    "--resume": "what was stopped is resumed by itself",
    "--eval-only": "leave it out",
    "--save-quantized": "leave it out",
    "--eval-samples": "pass@1 is the mean of four",
    "--skip-eval-before": "the study measures each start once",
    "--weights": "use --arms",
    "--method": "use --arms",
    "--quantizer": "use --arms",
}


def check_more(args):
    """Check the flags that go to train_gsm8k.py, args.more, and keep its --eval and --device.

    A flag that train_gsm8k.py does not know is refused here, not by one run after the other.
    """
    for text in args.more:
        flag = text.partition("=")[0]
        if flag in OWN_FLAGS:
            raise UserError(f"{flag}: the study sets it for each run; {OWN_FLAGS[flag]}")
    given = parse_flags(Settings, "", {}, args.more)
    args.eval = given.get("eval")
    args.device = given.get("device", "cuda")
    require_flag(args.device in ("cuda", "cpu"), "device", args.device, "a study takes all GPUs that it "
                 "sees, or the CPU; choose some by CUDA_VISIBLE_DEVICES")


def arguments(argv, description, arms, default_arms, seeds, out):
    """The command line of a study. seeds: by default so many, (of the small policy, of a model)."""
    p = Parser(description)
    p.add_argument("--model", nargs="+", default=[None],
                   help="names or folders (default: the small policy)")
    p.add_argument("--data", help="folder of train*.jsonl and test*.jsonl, a dataset's name or file")
    p.add_argument("--arms", nargs="+", choices=arms, default=default_arms,
                   help=f"of {', '.join(arms)} (default {', '.join(default_arms)})", metavar="ARM")
    p.add_argument("--lrs", nargs="+", type=float,
                   help="learning rates (default 5e-5; small policy 3e-3)")
    p.add_argument("--seeds", nargs="+", type=int,
                   help=f"default 0 to {seeds[1] - 1}; small policy 0 to {seeds[0] - 1}")
    p.add_argument("--own-starts", action="store_true",
                   help="small policy: each seed begins with a policy of its own making")
    p.add_argument("--jobs", type=int, default=1,
                   help="processes on each GPU, or on the CPU (default 1)")
    p.add_argument("--out", default=out, help=f"folder of the runs, tables and pictures (default {out})")
    p.add_argument("--tables", action="store_true", help="run nothing, only make the tables")
    args, args.more = p.parse_known_args(argv)
    for name in ("model", "data", "out"):
        require_value(name, getattr(args, name))
    check_more(args)
    require_flag(args.jobs >= 1, "jobs", args.jobs, "must be at least 1")
    for lr in args.lrs or []:
        require_flag(0 < lr < 1, "lrs", lr, "a learning rate is above 0 and below 1")
        require_flag(lr == float(f"{lr:g}"), "lrs", lr, "names of runs have six digits; round it")
    for seed in args.seeds or []:
        require_flag(0 <= seed < 2 ** 63, "seeds", seed, "must be at least 0 and below 2 ** 63")
    if args.own_starts and args.model != [None]:
        raise UserError("--own-starts: is for the small policy; leave it out with --model")
    for name in ("model", "arms", "lrs", "seeds"):                # what is named twice is run once
        if getattr(args, name):
            setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    names = [name_in_rows(model) for model in args.model]
    for name in names:
        require_flag(names.count(name) == 1, "model", name, "is what two of them are called in "
                     "the tables; rename a folder")
    small = args.model == [None]
    for name in ("small", "small-own-starts"):
        require_flag(small or name not in names, "model", name, "is what the built-in policy is "
                     "called in the tables; rename the folder")
    args.lrs = args.lrs or [3e-3 if small else 5e-5]
    args.seeds = args.seeds or list(range(seeds[0] if small else seeds[1]))
    return args


def write_lines(path, lines):
    atomic_write(path, "\n".join(lines) + "\n")


def run_study(flags, args, make_tables):
    """Run what is missing, unless --tables is given -> exit status.

    flags: {arm: flags of train_gsm8k.py}. Then make_tables(folder, rows, steps) of finished_runs and
    steps_of, if there are any.
    """
    failed = []
    missing = [] if args.tables else missing_runs(args)
    if missing:
        with creating(args.out):
            os.makedirs(args.out, exist_ok=True)
        try:
            with FileLock(f"{args.out}/lock", timeout=0):
                prepare(missing, args)
                failed = run_all(missing, flags, args)
        except Timeout:
            raise UserError(f"--out {args.out}: another study runs here; wait for it or choose another folder")
    rows = finished_runs(args.out)
    require_flag(rows or failed, "out", args.out, "holds no finished run; name the folder of a study")
    if rows:
        make_tables(args.out, rows, steps_of(args.out, rows))
    return 1 if failed else 0
