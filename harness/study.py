"""Many runs of train_gsm8k.py, one after the other on each GPU: what studies have in common.

A run is an arm, a model, a learning rate and a seed. Runs of one seed see the same questions in the
same order. Each is a process of its own, and is resumed if it was stopped. One that ends becomes a
line of runs.jsonl, and its metrics are kept in the folder metrics; tables and pictures are made
from these files alone. Flags that a study does not know go to train_gsm8k.py.
"""
import json
import math
import os
import shutil
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from statistics import StatisticsError
from statistics import fmean as mean
from statistics import median, stdev
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from harness.cache import one_at_a_time
from harness.flags import Parser, full_name, parse_flags, require_flag, require_value
from harness.keeper import lasting
from harness.math_data import source_name
from harness.questions import load_questions
from harness.run_folder import append_jsonl, atomic_write, creating, read_jsonl
from harness.small_policy import warm_start
from qerl import UserError, model_folder
from train_gsm8k import Settings, read_settings

NO_NOISE = ["--sigma-start", "0", "--sigma-end", "0"]
TRAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "train_gsm8k.py")


def name_in_rows(model, own_start=False):
    """What runs.jsonl calls a model: a Hugging Face name or folder, or None, the small policy."""
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
        too; a stopped run goes on as it began. Weights round to the nearest code, unless the arm has
        another --quantizer.
        """
        model = ["--model", self.model] if self.model else []
        data = ["--data", data] if data else []
        resume = ["--resume"] if os.path.isdir(folder) else []
        own = ["--lr", str(self.lr), "--seed", str(self.seed), "--out", folder, "--quantizer", "rtn"]
        if self.own_start:
            own += ["--start-seed", str(self.seed)]
        measured = ["--eval-samples", "4"]
        skipped = began_with(folder, "skip_eval_before")
        if not measure_start if skipped is None else skipped:
            measured.append("--skip-eval-before")
        return [sys.executable, TRAIN, *model, *data, *own, *measured, *more, *flags, *resume]


def began_with(folder, name):
    """A setting of a stopped run, which its resumption must repeat; None without a checkpoint.

    None, too, of one that cannot be read: that train_gsm8k.py says.
    """
    try:
        with safe_open(f"{folder}/checkpoint.safetensors", framework="pt") as f:
            return json.loads(f.metadata()["settings"])[name]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


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


def commit():
    """The commit that the code stands at, "-dirty" if code has changed since; None outside a checkout."""
    if shutil.which("git") is None:
        return None
    git = partial(subprocess.run, capture_output=True, text=True, cwd=os.path.dirname(TRAIN))
    found = git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip()
    changed = git(["git", "status", "--porcelain", "--", "*.py"]).stdout.strip()
    return f"{found}-dirty" if found and changed else found or None


def require_all_steps(path, metrics, steps):
    """Refuse the metrics of a run of which a step is missing, or stands there twice."""
    found = [entry.get("step") if isinstance(entry, dict) else None for entry in metrics]
    if found != list(range(1, steps + 1)):
        raise UserError(f"{path}: does not hold the steps 1 to {steps}, each once; remove the run from "
                        "runs.jsonl, and its folder from --runs, and it is made again")


def row_of(run, folder, code, shared):
    """What runs.jsonl says of a finished run.

    code: the commit at which its process began; shared: its settings_of.
    """
    with open(f"{folder}/summary.json") as f:
        summary = json.load(f)
    metrics = read_jsonl(f"{folder}/metrics.jsonl")
    require_all_steps(f"{folder}/metrics.jsonl", metrics, summary["steps"])
    settings = summary["settings"]
    accuracies = {k: v for k, v in summary.items() if k.endswith(("_before", "_after"))}
    return {
        "name": run.name,
        "model": run.model_name,
        "arm": run.arm,
        "weights": settings["weights"],
        "aqn": max(settings["sigma_start"], settings["sigma_end"]) > 0,
        "lora": settings["lora_rank"],                     # 0: full fine-tuning
        "algo": settings["algo"],
        "lr": settings["lr"],
        "seed": run.seed,
        "start_seed": settings.get("start_seed", 0),
        "steps": summary["steps"],
        **accuracies,
        "training_accuracy": mean([m["accuracy"] for m in metrics[-10:]]),
        "entropy": mean([m["entropy"] for m in metrics]),
        "mismatch_kl": mean([m["mismatch_kl"] for m in metrics]),
        "peak_memory_gb": max(m["peak_memory_gb"] for m in metrics),
        "seconds_a_step": median([m["seconds"]["step"] for m in metrics]),
        "seconds": summary["seconds"],
        "hardware": summary["hardware"],
        "commit": code,
        "settings": shared,
    }


# What tables and pictures read of a row: texts, and finite numbers.
TEXTS = {"name", "model", "arm", "hardware"}
NUMBERS = {"lr", "seed", "steps", "accuracy_after", "greedy_after", "entropy", "training_accuracy",
           "mismatch_kl", "peak_memory_gb", "seconds_a_step", "seconds"}
NOT_OF_EVERY_RUN = {"accuracy_before", "greedy_before", "start_seed"}        # numbers, too


def is_number(value):
    return type(value) in (int, float) and math.isfinite(value)


def is_row(row):
    """Whether an object of runs.jsonl says what tables and pictures read."""
    if not isinstance(row, dict) or not TEXTS | NUMBERS <= row.keys():
        return False
    numbers = NUMBERS | (NOT_OF_EVERY_RUN & row.keys())
    return (isinstance(row.get("settings", {}), dict)
            and all(isinstance(row[column], str) for column in TEXTS)
            and all(is_number(row[column]) for column in numbers))


def finished_runs(out):
    """The rows of a study's runs.jsonl; raises UserError where a line is none, or stands twice.

    A line that a kill has torn is left out, and its run made again.
    """
    path = f"{out}/runs.jsonl"
    rows = read_jsonl(path)
    names = set()
    for row in rows:
        if not is_row(row):
            raise UserError(f"{path}: a line is no run's: {str(row)[:60]}; remove it")
        if row["name"] in names:
            raise UserError(f"{path}: {row['name']} stands there twice; remove one of the lines")
        names.add(row["name"])
    return rows


def is_finished(run, out):
    return any(row["name"] == run.name for row in finished_runs(out))


def run_one(run, measure_start, environment, flags, args):
    """Make a run and note its row -> None, or what went wrong, in a line.

    None, too, if another study has made it meanwhile.
    """
    folder = f"{args.runs}/{run.name}"
    code = commit()
    command = run.command(folder, args.data, flags[run.arm], args.more, measure_start)
    try:
        if is_finished(run, args.out):
            return None
        with open(f"{folder}.log", "a") as log:
            status = subprocess.call(command, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                                     stderr=log)
        if status:
            return f"ended with status {status}; {folder}.log says why"
        row = row_of(run, folder, code, settings_of(run, flags, args))
        with one_at_a_time(args.out), open(f"{folder}/metrics.jsonl", "rb") as metrics:
            if is_finished(run, args.out):
                return None
            atomic_write(f"{args.out}/metrics/{run.name}.jsonl", metrics.read())
            append_jsonl(f"{args.out}/runs.jsonl", row)                  # one short write: whole
    except (OSError, UserError) as e:
        return str(e)
    except (KeyError, TypeError, ValueError, StatisticsError) as e:
        problem = f"{type(e).__name__}: {e}"
        return f"left no summary or metrics to read ({problem}); {folder}.log says more"
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


# Settings that a study's runs may have otherwise, each for itself.
OWN_SETTINGS = {"model", "device", "lr", "seed", "start_seed", "skip_eval_before"}


def settings_of(run, flags, args):
    """What all runs of an arm must have alike, {name: value}: its lasting settings but OWN_SETTINGS.

    Data and held-out questions are called by their names: elsewhere they may lie in another folder.
    Raises UserError if the run would refuse its flags.
    """
    command = run.command(f"{args.runs}/{run.name}", args.data, flags[run.arm], args.more,
                          measure_start=True)
    settings = lasting(read_settings(command[2:]))
    shared = {name: value for name, value in settings.items() if name not in OWN_SETTINGS}
    data = data_in_rows(run.model, args.data)
    if data:
        shared["data"] = data
    if args.eval:
        shared["eval"] = [source_name(source) for source in args.eval]
    return shared


def settings_by_arm(flags, args):
    """{(model's name in rows, arm): settings_of its runs}.

    An arm that these flags do not suit is left out, unless the study is to run it.
    """
    found = {}
    for model in args.model:
        for arm in flags:
            run = Run(arm, model, args.lrs[0], args.seeds[0], args.own_starts)
            try:
                found[run.model_name, arm] = settings_of(run, flags, args)
            except UserError:
                if arm in args.arms:
                    raise
    return found


def require_same_settings(rows, flags, args):
    """Refuse to go on with a study whose finished runs other settings have made.

    rows: of runs.jsonl; those of other models are left alone. Of rows of older versions the steps
    count, and what else they say.
    """
    wanted = settings_by_arm(flags, args)
    for row in rows:
        ours = wanted.get((row["model"], row["arm"]), {})
        theirs = {"steps": row["steps"], **row.get("settings", {})}
        for name in sorted(theirs.keys() & ours.keys()):
            if theirs[name] != ours[name]:
                raise UserError(f"{args.out}/runs.jsonl has {row['name']} with --{name.replace('_', '-')} "
                                f"{theirs[name]}, not {ours[name]}; give another --out")


def missing_runs(flags, args):
    """What runs.jsonl lacks of a study -> [(Run, whether it measures its policy before training)].

    flags: {arm: flags of train_gsm8k.py}. The first learning rate has all its arms and seeds before
    the next begins. Of the runs that begin with the same policy one measures it, the first that is
    missing if none has.
    """
    done = {row["name"]: row for row in finished_runs(args.out)}
    require_same_settings(done.values(), flags, args)
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
    models = list(dict.fromkeys(run.model for run, _ in missing))
    load_questions(args.data, args.eval, models[0])
    for model in models:
        if model:
            model_folder(full_name(model))
    for seed in dict.fromkeys(run.start_seed for run, _ in missing if run.model is None):
        warm_start(seed)


def run_all(missing, flags, args):
    """Start a worker on each device; returns the names of the runs that failed.

    missing: see missing_runs. Ctrl-C reaches the runs, too: they stop, and no other is begun.
    """
    with creating(args.runs, "--runs"):
        os.makedirs(args.runs, exist_ok=True)
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
    p.add_argument("--out", default=out, help=f"results (default {out})")
    p.add_argument("--runs", help="folders of runs (default: runs in --out)")
    p.add_argument("--tables", action="store_true", help="run nothing, only make the tables")
    args, args.more = p.parse_known_args(argv)
    for name in ("model", "data", "out", "runs"):
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
                     "runs.jsonl; rename a folder")
    small = args.model == [None]
    for name in ("small", "small-own-starts"):
        require_flag(small or name not in names, "model", name, "is what the built-in policy is "
                     "called in runs.jsonl; rename the folder")
    args.lrs = args.lrs or [3e-3 if small else 5e-5]
    args.seeds = args.seeds or list(range(seeds[0] if small else seeds[1]))
    args.runs = args.runs or f"{args.out}/runs"
    return args


def write_lines(path, lines):
    atomic_write(path, "\n".join(lines) + "\n")


def run_study(flags, args, make_tables):
    """Run what is missing, unless --tables is given -> exit status.

    flags: see missing_runs. Then make_tables(folder, rows of its runs.jsonl), if there are any.
    """
    if args.tables and not os.path.exists(f"{args.out}/runs.jsonl"):
        raise UserError(f"--tables --out {args.out}: there is no runs.jsonl; give a study's folder")
    failed = []
    missing = [] if args.tables else missing_runs(flags, args)
    if missing:
        with creating(args.out):
            os.makedirs(f"{args.out}/metrics", exist_ok=True)
        prepare(missing, args)
        failed = run_all(missing, flags, args)
    rows = finished_runs(args.out)
    if rows:
        make_tables(args.out, rows)
    else:
        print(f"{args.out}/runs.jsonl holds no finished run yet")
    return 1 if failed else 0
