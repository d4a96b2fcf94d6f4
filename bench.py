"""Measure this project. Each command prints its tables and writes them under results/.

    python bench.py card                               what this machine does with 4 bits and with 16,
                                                       in minutes, as two lines of results/cards.md
    python bench.py formats [--model FOLDER_OR_NAME]   relative error of each 4-bit format
    python bench.py kernels [--model Qwen2.5-7B ...]   one linear layer, by rows of x: NVFP4 and BF16
    python bench.py rollout [--model Qwen2.5-7B ...]   decoded tokens per second with LoRA,
                                                       by sequences decoded at once, and what this
                                                       reads and multiplies a second
    python bench.py step [--model Qwen2.5-7B ...]      an RL step: rollout, reward, update
    python bench.py tables STUDY_OR_FOLDER             a study's means and differences: studies/results.py

All but formats make random weights of true shapes on the GPU. On a CPU all but kernels run a tiny
shape, to step through; its times, and memory, mean nothing. step may be started by torchrun, too:
each process then has its share of the prompts. `python bench.py COMMAND --help` has the flags of
each. Studies of learning are made by studies/arms.sh and runs.sh.
"""
import importlib.util
import itertools
import math
import os
import statistics
import sys

import torch

from harness import fast, loading
from harness.command import Parser, command_line, full_name, one_line
from harness.command import require_flag
from harness.errors import require
from harness.flags import check_device
from harness.folders import write_json
from harness.machine import Clock, environment
from harness.ranks import Ranks
from harness.small_policy import warm_start
from studies import peers
from studies.layer import layer_copies, layer_figures, seconds_a_call
from studies.random_models import SHAPES, random_model, random_prompts
from studies.step import settings_for, step_rows
from studies.tables import grouped, table


# --------------------------------------------------------------------------------------------------
# Relative error of the formats

def relative_error(format, weights, device):
    """(‖Ŵ - W‖ / ‖W‖ over all weights, stored bits a weight) of a name in FORMATS."""
    chosen = fast.FORMATS[format]
    error = norm = 0.0
    for weight in weights:
        weight = weight.to(device)
        stored = chosen.quantize(weight.bfloat16() if format == "bf16" else weight)
        difference = chosen.dequantize(*stored, torch.float32) - weight
        error += difference.double().square().sum()
        norm += weight.double().square().sum()
    bits = 8 * sum(t.nbytes for t in stored) / weight.numel()
    return math.sqrt(error / norm), bits


def bench_formats(args):
    """Of Gaussian matrices, and of a model's linear layers, of which stacked ones are one."""
    folder = loading.model_folder(full_name(args.model)) if args.model else warm_start()
    layers = fast.load_model(folder, "bf16").quantized_layers()
    generator = torch.Generator().manual_seed(0)
    normal = [torch.randn(2048, 2048, generator=generator) for _ in range(8)]
    for name in fast.FORMATS:
        gaussian, bits = relative_error(name, normal, args.device)
        weights = (layer.weight.dequantize(torch.float32) for layer in layers)
        real, _ = relative_error(name, weights, args.device)
        yield {"format": name, "bits": bits, "gaussian": gaussian, "model": real}


# --------------------------------------------------------------------------------------------------
# One linear layer

@torch.no_grad()
def bench_kernels(args):
    """A row for each linear layer of a block and number of rows of x: seconds by format."""
    device = args.device
    require_flag(device == "cuda", "device", device, "the kernels run on a GPU alone")
    for name, layer in itertools.product(args.model, range(4)):
        copies = {}
        for weights in ("bf16", "nvfp4"):
            copies[weights], out, columns = layer_copies(name, weights, layer, device)
        shape = {"model": name, "layer": copies["bf16"][0].names[0], "out": out, "in": columns}
        for M in (1, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384):
            x = torch.randn(M, columns, device=device, dtype=torch.bfloat16)
            times = {weights: seconds_a_call(same, x) for weights, same in copies.items()}
            yield {**shape, "M": M, **times}


def kernel_means(rows):
    """How many times as fast as BF16 NVFP4 is, geometric means over the layers of a block."""
    for (model, M), same in grouped(rows, "model", "M").items():
        mean = statistics.geometric_mean(row["bf16"] / row["nvfp4"] for row in same)
        yield {"model": model, "M": M, "times BF16": mean}


# --------------------------------------------------------------------------------------------------
# Rollout

TOKENS = {"cuda": 256, "cpu": 8}           # of a prompt, and as many new ones


@torch.no_grad()
def decode_seconds(model, batch, tokens):
    """{"prefill", "decode": seconds} of `batch` prompts of so many tokens and as many new ones."""
    clock = Clock(model.device)
    sampler = fast.Sampler(model, 2 * tokens, batch, batch, tokens, 1.0, 1.0, set(), None)
    prompts = random_prompts(model.config.vocab_size, batch, tokens)
    numbers = torch.arange(batch, device=model.device)
    with clock("prefill"):
        sampler.admit(prompts, numbers, numbers)
    with clock("decode"):
        sampler.steps(tokens)
    assert sampler.length[:batch].eq(tokens).all()
    return clock.seconds


def least_work(model, batch, filled):
    """(bytes, operations) of a decode step at least: it reads all weights, LoRA and a cache of so many
    tokens a sequence, and takes two operations for a weight and a sequence.
    """
    layers = model.quantized_layers()
    lora = sum(layer.lora_A.numel() + layer.lora_B.numel() for layer in layers)
    dense = sum(sum(layer.sizes) * layer.lora_A.shape[1] for layer in layers)
    stored = fast.tensors_of([model.lm_head, *(layer.weight for layer in layers)])
    cached = batch * sum(kv.numel() for kv in fast.KVCache(model, 1, filled).layers)
    size = model.embedding.itemsize
    return (sum(t.nbytes for t in stored) + size * (lora + cached),
            2 * batch * (dense + lora + model.lm_head.numel()))


def rollout_rows(name, weights, batches, device):
    """A row for each number of sequences."""
    tokens = TOKENS[device]
    model = random_model(name, weights, settings_for(device).lora_rank, device)
    size = sum(tensor.nbytes for tensor in fast.tensors_of(model))
    decode_seconds(model, 1, tokens)                               # compiles what prefill needs
    for batch in batches:
        seconds = decode_seconds(model, batch, tokens)
        steps = tokens / seconds["decode"]
        read, operations = least_work(model, batch, tokens * 3 // 2)
        yield {"model": name, "weights": weights, "GB": size / 1e9, "batch": batch,
               "tokens_per_s": batch * steps, "prefill_s": seconds["prefill"],
               "GB_per_s": read * steps / 1e9, "TFLOP_per_s": operations * steps / 1e12}


def bench_rollout(args):
    for name, weights in itertools.product(args.model, args.weights):
        yield from rollout_rows(name, weights, (1, 8, 32, 128), args.device)


# --------------------------------------------------------------------------------------------------
# RL step

def bench_step(args):
    processes = Ranks().count
    for prompts, group in args.sizes:
        require_flag(prompts % processes == 0, "sizes", f"{prompts}x{group}",
                     f"{processes} processes cannot share {prompts} prompts")
    settings = settings_for(args.device)
    if args.peers:
        settings = peers.equal_lengths(settings, args.peers)
    for name in args.model:
        if args.peers:
            yield from peers.trl_rows(name, args.sizes, settings, args.repeats)
        for weights in args.weights:
            yield from step_rows(
                name, weights, args.sizes, settings, args.repeats, cut=not args.peers)


# --------------------------------------------------------------------------------------------------
# A card in a minute

def bench_card(args):
    """A row for NVFP4 and one for BF16, of 0.5B's shape; on a CPU of a tiny one, without the layer."""
    on_gpu = args.device == "cuda"
    name = "Qwen2.5-0.5B" if on_gpu else "tiny"
    settings = settings_for(args.device)
    here = environment(args.device)
    for weights in ("nvfp4", "bf16"):
        layer = layer_figures(weights, args.device) if on_gpu else {}
        rollouts = list(rollout_rows(name, weights, (1, 8, 64, 512), args.device))
        step, = step_rows(name, weights, [(32, 8)], settings)
        yield {
            "hardware": here["hardware"],
            "versions": "{system}, Python {python}, PyTorch {torch}, Triton {triton}".format(**here),
            "date": here["date"],
            "weights": weights,
            **layer,
            "GB of weights": rollouts[0]["GB"],
            **{f"tokens/s x {row['batch']}": row["tokens_per_s"] for row in rollouts},
            "step, s": step["step"],
            "step, GB": max(step["rollout_gb"], step["update_gb"]),
        }


# --------------------------------------------------------------------------------------------------
# Command line

def positive(text):
    """A whole number, at least 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def size(text):
    """"32x8" -> (32, 8): prompts and completions of each, of which advantages need two."""
    prompts, group = map(int, text.split("x"))
    if prompts < 1 or group < 2:
        raise ValueError
    return prompts, group


FLAGS = {
    "device": dict(choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu"),
    "out": dict(help="the file to write, without .json (default results/GPU/COMMAND)"),
    "model": dict(nargs="+", choices=SHAPES, default=[],
                  help="shapes (default Qwen2.5-7B; on a CPU tiny)"),
    "weights": dict(nargs="+", choices=fast.FORMATS, default=["nvfp4", "bf16"],
                    help="default nvfp4 bf16"),
    "sizes": dict(nargs="+", type=size, metavar="PxG", default=[(1, 2), (1, 4), (1, 8), (32, 8)],
                  help="prompts of all processes x completions of each (default 1x2 1x4 1x8 32x8)"),
    "repeats": dict(type=positive, default=3, help="timed steps; the median counts (default 3)"),
    "peers": dict(type=positive, nargs="?", const=256, metavar="TOKENS", help="TRL + vLLM, too; all "
                  "completions have so many tokens (256; studies/peers.py)"),
}
# What each measures, what else it prints of its rows, its flags.
COMMANDS = {
    "card": (bench_card, None, []),
    "formats": (bench_formats, None, []),
    "kernels": (bench_kernels, kernel_means, ["model"]),
    "rollout": (bench_rollout, None, ["model", "weights"]),
    "step": (bench_step, None, ["model", "weights", "sizes", "repeats", "peers"]),
}


def arguments():
    p = Parser(__doc__)
    commands = p.add_subparsers(dest="what", required=True, metavar="COMMAND")
    for what, (*_, flags) in COMMANDS.items():
        parser = commands.add_parser(what, description=None)
        for flag in ("device", "out", *flags):
            parser.add_argument(f"--{flag}", **FLAGS[flag])
    commands.choices["formats"].add_argument(
        "--model", help="name or folder (default: the small policy)")
    args = p.parse_args()
    check_device(args.device)
    if vars(args).get("model") == []:
        args.model = ["Qwen2.5-7B" if args.device == "cuda" else "tiny"]
    return args


def print_rows(rows):
    """Rows as a table, a column a key."""
    keys = dict.fromkeys(itertools.chain(*rows))
    texts = [[f"{v:.4g}" if isinstance(v, float) else v for v in (row.get(k, "") for k in keys)]
             for row in rows]
    print("\n".join(["", *table(keys, texts)]), flush=True)


def run(args):
    """Measure, and write the file each time there is more, so that a stop loses little."""
    bench, summary, _ = COMMANDS[args.what]
    ranks = Ranks()
    ranks.start(args.device)
    hardware = "cpu"
    if args.device == "cuda":
        hardware = torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")
    elif args.what != "formats":
        print("on a CPU: these figures mean nothing")
    path = args.out or f"results/{hardware}/{args.what}"
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    result = {"command": command_line(), "rows": [], **environment(args.device)}
    for row in bench(args):
        result["rows"].append(row)
        if ranks.main:
            print(row, file=sys.stderr, flush=True)
            write_json(f"{path}.json", result)
    if ranks.main:
        print_rows(result["rows"])
        if summary:
            print_rows(list(summary(result["rows"])))
        print(f"\nwritten to {path}.json")
    ranks.stop()


def main():
    with one_line():
        if sys.argv[1:2] == ["tables"]:
            require(importlib.util.find_spec("pandas"), "tables: pandas is missing; pip install "
                    "-e '.[studies]'")
            from studies import results                    # which the other commands do without
            return results.main(sys.argv[2:])
        run(arguments())


if __name__ == "__main__":
    main()
