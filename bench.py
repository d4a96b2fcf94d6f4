"""Measure this project. Each command prints its tables and writes them under results/, most with a
picture.

    python bench.py formats [--model FOLDER_OR_NAME]   relative error of each 4-bit format
    python bench.py kernels [--model Qwen2.5-7B ...]   one linear layer, by rows of x: NVFP4 and NF4
                                                       against cuBLAS BF16
    python bench.py rollout [--model Qwen2.5-7B ...]   decoded tokens per second with LoRA,
                                                       by sequences decoded at once; vLLM's, too
    python bench.py step [--model Qwen2.5-7B ...]      an RL step: rollout, reward,
                                                       log-probabilities, update
    python bench.py scaling [--model Qwen2.5-7B ...]   an RL step by the number of GPUs
    python bench.py memory [--model Qwen2.5-7B ...]    what an RL step's memory consists of, and its
                                                       peak by phase, each model under a cap
    python bench.py claims [--model FOLDER ...]        the paper's claims about learning, with seeds
    python bench.py entropy [--model FOLDER ...]       entropy before training, by format and noise
    python bench.py methods [--model FOLDER ...]       the methods of methods/ side by side
    python bench.py tables                             every table and picture of results/ again, from
                                                       the files beside them

kernels, rollout, step, scaling and memory make random weights of the given shapes on the GPU. On a
CPU all but kernels run a tiny shape, to step through; its times, and memory, mean nothing.
step may be started by torchrun, too: each process then has its share of the prompts. claims, entropy
and methods write to runs/. `python bench.py COMMAND --help` has the flags of each.
"""
import copy
import glob
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial

import torch
import torch.nn.functional as F

import qerl
from harness.command import Parser, check_device, command_line, end, full_name, one_line
from harness.command import require_flag
from harness.folders import atomic_write, writing
from harness.machine import Clock, environment, is_out_of_memory
from harness.ranks import Ranks
from harness.report import save_figure
from harness.small_policy import warm_start
from studies import claims, compare, peers, results
from studies.entropy import SIGMAS, bench_entropy, plot_entropy
from studies.plots import plot_lines
from studies.random_models import SHAPES, config_of, random_model, random_prompts
from studies.step import CAPS, limit_memory, memory_row, plot_memory, plot_scaling, plot_step
from studies.step import release_memory, settings_for, speed_ups, step_rows
from studies.study import grouped, positive, read_json, table


# --------------------------------------------------------------------------------------------------
# Relative error of the formats

def gaussian_layers(count=8, size=2048):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.randn(size, size, generator=generator)


def model_layers(folder):
    """The weight, float32, of every linear layer of a Hugging Face folder; stacked ones are one, and
    those in NVFP4 are decoded.
    """
    for layer in qerl.load_model(folder, "bf16", device="cpu").quantized_layers():
        yield layer.weight.dequantize(torch.float32)


def relative_errors(layers, device):
    """{format: (‖Ŵ - W‖ / ‖W‖ over all layers, stored bits a weight)}."""
    error = dict.fromkeys(qerl.FORMATS, 0.0)
    bits = dict.fromkeys(qerl.FORMATS, 0)
    norm = 0.0
    count = 0
    for weight in layers:
        weight = weight.to(device)
        norm += weight.double().square().sum().item()
        count += weight.numel()
        for name, format in qerl.FORMATS.items():
            stored = format.quantize(weight.bfloat16() if name == "bf16" else weight)
            difference = format.dequantize(*stored, torch.float32) - weight
            error[name] += difference.double().square().sum().item()
            bits[name] += 8 * sum(t.nbytes for t in stored)
    return {name: ((error[name] / norm) ** 0.5, bits[name] / count) for name in qerl.FORMATS}


def bench_formats(args):
    folder = qerl.model_folder(full_name(args.model)) if args.model else warm_start()
    gaussian = relative_errors(gaussian_layers(), args.device)
    real = relative_errors(model_layers(folder), args.device)
    for name, (error, bits) in gaussian.items():
        yield {"format": name, "bits": bits, "gaussian": error, "model": real[name][0]}


# --------------------------------------------------------------------------------------------------
# One linear layer

def replay_seconds(run):
    """Seconds of one call of `run` (a CUDA graph's replay) under its own load.

    It runs back to back in chunks of 20 ms, and after 0.2 s the median of five counts, because the
    clock seems to follow the power drawn in the last 0.2 s.
    """
    def chunk_seconds(chunks, repeats):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(chunks + 1)]
        for event in events:
            event.record()
            for _ in range(repeats):
                run()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 / repeats for a, b in itertools.pairwise(events)]

    once = chunk_seconds(2, 1)[-1]
    repeats = max(1, round(0.02 / once))
    warm_up = round(0.18 / (repeats * once))
    return statistics.median(chunk_seconds(warm_up + 5, repeats)[-5:])


def run_all(calls):
    """Their results, all alive at once, so that each has memory of its own, as in a model."""
    return [call() for call in calls]


def replay_times(contenders):
    """{name: seconds a call} of each contender's list of calls, repeated to the longest's length.

    The list is one CUDA graph, and the median of three rounds counts: now and then the clock drops
    for a third of a second, and whoever had its turn then seemed up to a quarter slower.
    """
    longest = max(map(len, contenders.values()))
    graphs = {}
    for name, calls in contenders.items():
        repeated = list(itertools.islice(itertools.cycle(calls), longest))
        graphs[name] = qerl.kernels.record_graph(partial(run_all, repeated))
    rounds = [{name: replay_seconds(graph) for name, graph in graphs.items()} for _ in range(3)]
    return {name: statistics.median(r[name] for r in rounds) / longest for name in graphs}


def layers_of(name):
    """{layer: (out_features, in_features)} of the four stacked linear layers of a block."""
    config = config_of(name)
    hidden = config.hidden_size
    shared = config.num_attention_heads // config.num_key_value_heads
    return {
        "qkv": (hidden + 2 * hidden // shared, hidden),
        "o": (hidden, hidden),
        "gate_up": (2 * config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
    }


def multiply(weight, x):
    """x Ŵᵀ as decoding computes it, and from 4,096 rows on as training does."""
    if len(x) < 4096:
        return weight.multiply(x)
    return F.linear(x, weight.dequantize(x.dtype))


def copies(nbytes):
    """How many weights of so many bytes lie together well beyond a GPU's L2 cache."""
    return max(2, math.ceil(2e8 / nbytes))


def layer_rows(model, layer):
    """A row for each number of rows of x: the seconds of cuBLAS in BF16, NVFP4 and NF4."""
    out, columns = layers_of(model)[layer]
    weight = torch.randn(out, columns, device="cuda", dtype=torch.bfloat16) * 0.02
    dense = [weight.clone() for _ in range(copies(2 * out * columns))]
    linears = {"bf16": [partial(F.linear, weight=weight) for weight in dense]}
    for name in ("nvfp4", "nf4"):
        format = qerl.FORMATS[name]
        tiled = format.tile(*format.quantize(weight))
        linears[name] = [partial(multiply, copy.deepcopy(tiled))
                         for _ in range(copies(out * columns * 9 / 16))]
    for M in (1, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384):
        x = torch.randn(M, columns, device="cuda", dtype=torch.bfloat16)
        calls = {name: [partial(linear, x) for linear in same] for name, same in linears.items()}
        shape = {"model": model, "layer": layer, "out": out, "in": columns, "M": M}
        yield {**shape, **replay_times(calls)}


def bench_kernels(args):
    require_flag(args.device == "cuda", "device", args.device, "the kernels run on a GPU alone")
    for model in args.model or ["Qwen2.5-7B", "Qwen2.5-32B"]:
        for layer in layers_of(model):
            yield from layer_rows(model, layer)
            release_memory("cuda")


OTHERS = ("bf16", "marlin", "nf4")            # which NVFP4 is compared with; Marlin in older results


def kernel_means(rows):
    """How many times as fast as the others NVFP4 is, geometric means over the layers of a block."""
    for (model, M), same in grouped(rows, "model", "M").items():
        mean = {"model": model, "M": M}
        for name in OTHERS:
            if all(name in row for row in same):
                mean[name] = statistics.geometric_mean(row[name] / row["nvfp4"] for row in same)
        yield mean


def plot_kernels(result, plt):
    points = [(f"{mean['model']}, geometric mean of four layers", f"over {name}", mean["M"], mean[name])
              for mean in kernel_means(result["rows"]) for name in OTHERS if name in mean]
    return plot_lines(plt, points, "rows of x", "speed of NVFP4, relative")


# --------------------------------------------------------------------------------------------------
# Rollout

def rank_of(name):
    """The LoRA rank with which a model's rollout is measured; 14B's and 32B's are the paper's."""
    return 16 if name in ("Qwen2.5-14B", "Qwen2.5-32B") else 32


@torch.no_grad()
def decode_seconds(model, batch, tokens):
    """{"prefill", "decode": seconds} of `batch` prompts of so many tokens and as many new ones."""
    clock = Clock(model.device)
    sampler = qerl.Sampler(model, batch, batch, 2 * tokens, tokens, 1.0, 1.0, set(), None)
    prompts = random_prompts(model.config.vocab_size, batch, tokens)
    numbers = torch.arange(batch, device=model.device)
    with clock("prefill"):
        sampler.admit(prompts, numbers, numbers)
    with clock("decode"):
        sampler.steps(tokens)
    assert sampler.length[:batch].eq(tokens).all()
    return clock.seconds


def bench_rollout(args):
    cuda = args.device == "cuda"
    batches = (1, 8, 32, 128) if cuda else (1, 4)
    tokens = 256 if cuda else 8
    models = args.model or (["Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B"] if cuda else ["tiny"])
    for name in models:
        own = rank_of(name)
        best = {}                                                  # {batch: vLLM's tokens per second}
        for row in peers.vllm_rows(name, own, batches, tokens) if cuda else []:
            best[row["batch"]] = max(row["tokens_per_s"], best.get(row["batch"], 0.0))
            yield row
        variants = [(own, weights) for weights in args.weights]
        if name == models[0]:
            variants += [(rank, "nvfp4") for rank in args.ranks if rank != own]
        for rank, weights in variants:
            model = random_model(name, weights, rank, args.device)
            decode_seconds(model, 1, tokens)                       # compiles what prefill needs
            for batch in batches:
                seconds = decode_seconds(model, batch, tokens)
                row = {"model": name, "rank": rank, "weights": weights, "batch": batch,
                       "tokens_per_s": batch * tokens / seconds["decode"],
                       "prefill_s": seconds["prefill"]}
                yield {**row, "vllm": best[batch]} if best and rank == own else row
            del model
            release_memory(args.device)


def plot_rollout(result, plt):
    points = []
    for row in result["rows"]:
        if row["rank"] == rank_of(row["model"]) and "vLLM" not in row["weights"]:
            title = f"{row['model']}, LoRA rank {row['rank']}"
            points.append((title, row["weights"], row["batch"], row["tokens_per_s"]))
            if "vllm" in row and row["weights"] == "nvfp4":
                points.append((title, "vLLM's best", row["batch"], row["vllm"]))
    return plot_lines(plt, points, "sequences decoded at once", "decoded tokens per second",
                      yscale="log")


# --------------------------------------------------------------------------------------------------
# RL step

def bench_step(args):
    cuda = args.device == "cuda"
    processes = Ranks().count
    default = [(1, 2), (1, 4), (1, 8), (32, 8)] if cuda else [(1, 2)]
    sizes = args.sizes or [(prompts * processes, group) for prompts, group in default]
    for prompts, group in sizes:
        require_flag(prompts % processes == 0, "sizes", f"{prompts}x{group}",
                     f"{processes} processes cannot share {prompts} prompts")
    if args.shard and processes == 1:
        raise qerl.UserError("--shard: start by torchrun with --nproc_per_node=2 or more")
    limit_memory(args.cap, args.device)
    settings = settings_for(args.device)
    if args.peers:
        settings = peers.equal_lengths(settings, sizes)
    for name in args.model or (["Qwen2.5-7B", "Qwen2.5-14B"] if cuda else ["tiny"]):
        if args.peers:
            yield from peers.trl_rows(name, sizes, settings, args.repeats)
        for weights in args.weights:
            yield from step_rows(
                name, weights, sizes, settings, args.repeats, args.shard, cut=not args.peers)
            release_memory(args.device)


def bench_scaling(args):
    """`bench.py step` under torchrun for each number of processes."""
    cuda = args.device == "cuda"
    prompts, group = (32, 8) if cuda else (2, 2)
    counts = [n for n in (1, 2, 4, 8) if n <= (torch.cuda.device_count() if cuda else 2)]
    for count in args.processes or counts:
        sizes = dict.fromkeys([f"{prompts * count}x{group}", f"{prompts}x{group}"])
        yield from measure_processes(args, count, sizes)


def measure_processes(args, count, sizes):
    """The rows of `bench.py step` in so many processes; raises UserError if one of them fails."""
    models = args.model or ["Qwen2.5-7B" if args.device == "cuda" else "tiny"]
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc_per_node={count}", os.path.abspath(__file__), "step",
            "--model", *models,
            "--weights", *args.weights,
            "--sizes", *sizes,
            "--repeats", str(args.repeats),
            "--device", args.device,
            "--out", out,
        ]
        # torchrun gives several processes a thread each; so has the one with which they compare.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        require_flag(done.returncode == 0, "processes", count, "a step failed; its error stands above")
        [path] = glob.glob(f"{glob.escape(out)}/*/step*.json")
        return read_json(path)["rows"]


def bench_memory(args):
    settings = settings_for(args.device, lora_rank=16, max_new_tokens=1024, micro_tokens=1152)
    for name in args.model or (CAPS if args.device == "cuda" else ["tiny"]):
        yield memory_row(name, settings)
        release_memory(args.device)


# --------------------------------------------------------------------------------------------------
# Command line

# What each measures, what else it prints of its rows, its picture.
COMMANDS = {
    "formats": (bench_formats, None, None),
    "kernels": (bench_kernels, kernel_means, plot_kernels),
    "rollout": (bench_rollout, None, plot_rollout),
    "step": (bench_step, None, plot_step),
    "scaling": (bench_scaling, speed_ups, plot_scaling),
    "memory": (bench_memory, None, plot_memory),
    "entropy": (bench_entropy, None, plot_entropy),
}
# Of the .json files in results/: what draws their pictures.
PLOTS = {what: plot for what, (_, _, plot) in COMMANDS.items() if plot}


def size(text):
    """"32x8" -> (32, 8): prompts and completions of each, of which advantages need two."""
    prompts, group = map(int, text.split("x"))
    if prompts < 1 or group < 2:
        raise ValueError
    return prompts, group


def arguments():
    p = Parser(__doc__)
    commands = p.add_subparsers(dest="what", required=True, metavar="COMMAND")
    of = {what: commands.add_parser(what, description=None) for what in COMMANDS}
    of["formats"].add_argument("--model", help="folder or name (default: the small policy)")
    for what in ("kernels", "rollout", "step", "scaling", "memory"):
        of[what].add_argument("--model", nargs="+", choices=SHAPES, help="shapes")
    formats = ["nvfp4", "bf16", "nf4", "mxfp4"]
    for what, default in (("rollout", formats[:3]), ("step", formats[:3]), ("scaling", formats[:1]),
                          ("entropy", formats)):
        choices = [*formats, "nvfp4-fp8"] if what in ("step", "scaling") else formats
        of[what].add_argument("--weights", nargs="+", choices=choices, default=default,
                              help="of frozen weights; nvfp4-fp8, of a step: --method jetrl:training")
    of["rollout"].add_argument("--ranks", nargs="*", type=positive, default=[16, 128],
                               help="other LoRA ranks for the first model, NVFP4 (default 16 128)")
    of["step"].add_argument("--sizes", nargs="+", type=size, metavar="PxG",
                            help="prompts of all processes x completions of each (default 1x2 1x4 "
                                 "1x8 32x8, times the processes)")
    of["step"].add_argument("--shard", action="store_true",
                            help="under torchrun: cut the frozen weights over the processes")
    of["step"].add_argument("--peers", action="store_true",
                            help="TRL + vLLM, too; completions of 256 tokens (studies/peers.py)")
    of["step"].add_argument("--cap", type=float, metavar="GB",
                            help="let each process take so many 10^9 bytes of its GPU at most")
    for what, default in (("step", 1), ("scaling", 3)):
        of[what].add_argument("--repeats", type=positive, default=default,
                              help=f"timed steps, of which the median counts (default {default})")
    of["scaling"].add_argument("--processes", nargs="+", type=positive,
                               help="their numbers, each with a GPU of its own (default 1 2 4 8)")
    of["entropy"].add_argument("--sigmas", nargs="+", type=float, default=SIGMAS)
    for flag, default, remark in (("--draws", 3, "rollouts, each with its noise"),
                                  ("--prompts", 64, "questions")):
        of["entropy"].add_argument(flag, type=positive, default=default,
                                   help=f"{remark} (default {default}); other flags: train_gsm8k.py's")
    for what, parser in of.items():
        out = "runs/entropy" if what == "entropy" else "results"
        parser.add_argument("--device", choices=["cuda", "cpu"],
                            default="cuda" if torch.cuda.is_available() else "cpu")
        parser.add_argument("--out", default=out, help=f"folder (default {out})")
    args, args.more = p.parse_known_args()
    if args.more and args.what != "entropy":
        p.error(f"unrecognized arguments: {' '.join(args.more)}")
    check_device(args.device)
    return args


def results_path(args):
    """Where a command's files go, without their endings: by GPU, but entropy and a model's formats are
    the same everywhere; what several processes measured of a step stands apart.
    """
    if args.what == "entropy" or args.what == "formats" and args.model:
        return f"{args.out}/{args.what}"
    hardware = "cpu"
    if args.device == "cuda":
        hardware = torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")
    processes = Ranks().count
    name = f"{args.what}-{processes}-processes" if processes > 1 else args.what
    for flag, apart in (("shard", "-sharded"), ("peers", "-peers")):
        if getattr(args, flag, False):
            name += apart
    return f"{args.out}/{hardware}/{name}"


def print_rows(rows):
    """Rows as a table, a column a key; what is a dictionary is left to the .json."""
    keys = dict.fromkeys(key for row in rows for key, v in row.items() if not isinstance(v, dict))
    texts = [[f"{v:.4g}" if isinstance(v, float) else v for v in (row.get(k, "") for k in keys)]
             for row in rows]
    print("\n".join(["", *table(keys, texts)]), flush=True)


def run(args):
    """Measure, and write the files each time there is more, so that a stop loses little."""
    bench, summary, plot = COMMANDS[args.what]
    ranks = Ranks()
    ranks.start(args.device)
    if args.what not in ("formats", "entropy") and args.device == "cpu":
        print("on a CPU: these figures mean nothing")
    path = results_path(args)
    with writing(f"--out {args.out}"):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    result = {"command": command_line(), "rows": [], **environment(args.device)}
    for row in bench(args):
        result["rows"].append(row)
        if ranks.main:
            print(row, file=sys.stderr, flush=True)
            atomic_write(f"{path}.json", json.dumps(result, indent=1))
    if ranks.main:
        print_rows(result["rows"])
        if summary:
            print_rows(list(summary(result["rows"])))
        if plot:
            save_figure(f"{path}.png", plot, result)
        print(f"\nwritten to {path}.json" + (" and .png" if plot else ""))
    ranks.stop()


def main():
    with one_line():
        studies = {"claims": claims.main, "methods": compare.main,
                   "tables": partial(results.main, plots=PLOTS)}
        if sys.argv[1:2] and sys.argv[1] in studies:
            sys.exit(studies[sys.argv[1]](sys.argv[2:]))
        args = arguments()
        try:
            run(args)
        except RuntimeError as e:
            if not is_out_of_memory(e):
                raise
            end(f"{qerl.reason(e)} Choose a smaller --model, or of step smaller --sizes")


if __name__ == "__main__":
    main()
