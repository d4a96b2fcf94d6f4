"""Measure this project. Each command prints its tables and writes them under results/, all but the
first and mma with a picture.

    python bench.py formats [--model FOLDER_OR_NAME]   relative error of each 4-bit format
    python bench.py kernels [--model Qwen2.5-7B ...]   one linear layer, by rows of x: NVFP4 and NF4
                                                       against cuBLAS BF16, Marlin, bitsandbytes
    python bench.py mma [--model Qwen2.5-7B ...]       on a Hopper GPU: the same layers as other GPUs
                                                       multiply them, by mma.sync instead of wgmma
    python bench.py rollout [--model Qwen2.5-7B ...]   decoded tokens per second with LoRA,
                                                       by sequences decoded at once
    python bench.py step [--model Qwen2.5-7B ...]      an RL step: rollout, reward,
                                                       log-probabilities, update; with --weights
                                                       nvfp4-fp8, too, trained in FP8
    python bench.py scaling [--model Qwen2.5-7B ...]   an RL step by the number of GPUs
    python bench.py memory [--model Qwen2.5-7B ...]    what an RL step's memory consists of, and its
                                                       peak by phase, each model under a cap
    python bench.py claims [--model FOLDER ...]        the paper's claims about learning, with seeds
                                                       (see studies/claims.py)
    python bench.py entropy [--model FOLDER ...]       entropy before training, by format and noise
    python bench.py methods [--model FOLDER ...]       the methods of methods/ side by side
    python bench.py tables                             every table and picture of results/ again, from
                                                       the files beside them

kernels, mma, rollout, step, scaling and memory make random weights of the given shapes on the GPU.
mma needs a Hopper GPU. On a CPU the others run a tiny shape, so that one can step through them; its
times, and memory, mean nothing. step may be started by torchrun, too: each process then has its
share of the prompts. claims, entropy, methods and tables come first on the line and have flags of
their own; the first three write to runs/.
"""
import argparse
import copy
import glob
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import qerl
from harness.batches import Batch
from harness.figures import save_figure
from harness.flags import Parser, check_device, full_name, require_flag
from harness.instruments import Clock, command_line, environment, peak_memory_gb
from harness.memory import is_out_of_memory
from harness.ranks import Ranks
from harness.run_folder import atomic_write, creating
from harness.sharded import SharedPasses
from harness.small_policy import warm_start
from harness.stops import end, one_line
from methods import Method, jetrl
from studies import claims, compare, entropy, memory_bench, results, scaling_bench
from studies.memory_bench import release_memory
from studies.random_models import SHAPES, RandomWeights, ShardedRandomWeights
from studies.random_models import config_of, random_model, random_prompts


LABELS = {"nvfp4": "NVFP4", "mxfp4": "MXFP4", "nf4": "NF4", "bf16": "BF16"}
COLORS = {"nvfp4": "tab:green", "nf4": "tab:orange", "bf16": "tab:blue", "mxfp4": "tab:red",
          "marlin": "black"}


def print_row(*cells):
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def print_head(*titles):
    print_row(*titles)
    print("|" + "---|" * len(titles))


# --------------------------------------------------------------------------------------------------
# Relative error of the formats

def gaussian_layers(count=8, size=2048):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.randn(size, size, generator=generator)


def model_layers(folder):
    """The weight, float32, of every linear layer of a Hugging Face folder."""
    checkpoint = qerl.Checkpoint(qerl.open_tensors(folder, "cpu"))
    block = max(format.block for format in qerl.FORMATS.values())
    names = [name for name in checkpoint.files if name.endswith("_proj.weight")]
    if not names or any(name.endswith(".weight_packed") for name in checkpoint.files):
        raise qerl.UserError(
            f"{folder}: its linear layers are not in 16 bit; give the model before it was quantised"
        )
    for name in names:
        shape = tuple(checkpoint.files[name].get_slice(name).get_shape())
        if len(shape) != 2 or shape[1] % block:
            raise qerl.UserError(
                f"{folder}: {name} has shape {shape}, not divisible by a block of {block}; "
                "give another model"
            )
        yield checkpoint.read(name, shape).float()


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
    if args.model:
        model = full_name(args.model[0])
        folder = qerl.model_folder(model)
        label = os.path.basename(os.path.normpath(model))
        command = f"python bench.py formats --model {label}"
    else:
        folder = warm_start()
        label = "the built-in policy"
        command = "python bench.py formats"
    gaussian = relative_errors(gaussian_layers(), args.device)
    real = relative_errors(model_layers(folder), args.device)
    rows = []
    print_head("format", "bits a weight", "Gaussian", label)
    for name in LABELS:
        error, bits = gaussian[name]
        real_error, _ = real[name]
        rows.append({"format": name, "bits": bits, "gaussian": error, "model": real_error})
        print_row(LABELS[name], f"{bits:.2f}", f"{error:.4f}", f"{real_error:.4f}")
    what = "relative error of quantised weights"
    yield {"what": what, "command": command, "model": label, "rows": rows}


# --------------------------------------------------------------------------------------------------
# GPU

def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


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


def replay_times(contenders, device):
    """{name: seconds a call} of each contender's list of calls, repeated to the longest's length.

    On a GPU the list is one CUDA graph, and the median of three rounds counts: now and then the
    clock drops for a third of a second, and whoever had its turn then seemed up to a quarter
    slower. On a CPU the list runs once.
    """
    longest = max(map(len, contenders.values()))
    runs = {}
    for name, calls in contenders.items():
        repeated = itertools.islice(itertools.cycle(calls), longest)
        runs[name] = partial(run_all, list(repeated))
    if device == "cuda":
        graphs = {name: qerl.kernels.record_graph(run) for name, run in runs.items()}
        rounds = [{name: replay_seconds(graph) for name, graph in graphs.items()} for _ in range(3)]
        return {name: statistics.median(r[name] for r in rounds) / longest for name in graphs}
    times = {}
    for name, run in runs.items():
        began = time.perf_counter()
        run()
        times[name] = (time.perf_counter() - began) / longest
    return times


def ceilings(device):
    """What the GPU reaches: (bytes per second, read and written; BF16 FLOP per second).

    The one is of an elementwise kernel over gigabytes, the other of a large matrix product.
    """
    size = 2 ** 31 if device == "cuda" else 2 ** 24
    side = 8192 if device == "cuda" else 256
    a = torch.rand(size // 4, device=device)
    b = torch.empty_like(a)
    m = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    negate = partial(torch.neg, a, out=b)
    product = partial(torch.mm, m, m)
    times = replay_times({"copy": [negate] * 3, "product": [product] * 3}, device)
    return 2 * size / times["copy"], 2 * side ** 3 / times["product"]


def layers_of(name):
    """{layer: (out_features, in_features)} of the four stacked linear layers of a block."""
    shape = SHAPES[name]
    head_dim = shape.hidden // shape.heads
    return {
        "qkv": ((shape.heads + 2 * shape.kv_heads) * head_dim, shape.hidden),
        "o": (shape.hidden, shape.heads * head_dim),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }


def bitsandbytes_linears(weights):
    """bitsandbytes' NF4 linear, x -> y, for each weight, or none where it cannot be imported."""
    # On a CPU it asks for a package that it can do without.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        import bitsandbytes
    except ImportError:
        return []

    def linear(packed, state, x):
        return bitsandbytes.matmul_4bit(x, packed.t(), state)
    stored = [bitsandbytes.functional.quantize_nf4(weight, blocksize=64) for weight in weights]
    return [partial(linear, packed, state) for packed, state in stored]


def marlin_linears(weight, copies):
    """vLLM's Marlin NVFP4 linear, x -> y, for so many copies of a weight; none without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        return []
    try:
        from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as marlin
        torch.ops._C.marlin_gemm
    except (ImportError, AttributeError) as e:
        print("vLLM is installed, but without a Marlin kernel that can be called: "
              + qerl.reason(e))
        return []
    out, columns = weight.shape
    packed, block_scale, global_scale = qerl.quantize_nvfp4(weight)

    def stored():
        layer = types.SimpleNamespace(
            weight=packed.clone(),
            weight_scale=block_scale.clone(),
            weight_global_scale=1 / global_scale,
            params_dtype=weight.dtype,
            output_size_per_partition=out,
            input_size_per_partition=columns,
        )
        marlin.prepare_fp4_layer_for_marlin(layer)
        return layer

    def linear(layer, x):
        return marlin.apply_fp4_marlin_linear(
            x, layer.weight, layer.weight_scale, layer.weight_global_scale, layer.workspace,
            out, columns)

    linears = [partial(linear, stored()) for _ in range(copies)]
    x = torch.randn(16, columns, device=weight.device, dtype=weight.dtype)
    right = F.linear(x, qerl.dequantize_nvfp4(packed, block_scale, global_scale, weight.dtype))
    error = (linears[0](x) - right).norm() / right.norm()
    assert error < 0.01, "this vLLM takes NVFP4 weights in another form"
    return linears


def tiled_copies(name, weight, copies):
    """A weight in a format, as the kernels take it, so many times in different memory."""
    format = qerl.FORMATS[name]
    tiled = format.tile(*format.quantize(weight))
    return [copy.deepcopy(tiled) for _ in range(copies)]


def multiply(weight, x):
    """x Ŵᵀ as decoding computes it, and from 4,096 rows on as training does."""
    if len(x) < 4096:
        return weight.multiply(x)
    return F.linear(x, weight.dequantize(x.dtype))


def copies(nbytes, device):
    """How many weights of so many bytes lie together well beyond a GPU's L2 cache; two on a CPU."""
    return max(2, math.ceil(2e8 / nbytes)) if device == "cuda" else 2


def bench_layer(model, layer, rows, device, bandwidth, flops):
    """One line of the table for each number of rows."""
    out, columns = layers_of(model)[layer]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    packed_bytes = out * columns * 9 / 16
    dense = [
        torch.randn(out, columns, device=device, dtype=dtype) * 0.02
        for _ in range(copies(2 * out * columns, device))
    ]
    linears = {"bf16": [partial(F.linear, weight=weight) for weight in dense]}
    for name in ("nvfp4", "nf4"):
        tiled = tiled_copies(name, dense[0], copies(packed_bytes, device))
        linears[name] = [partial(multiply, weight) for weight in tiled]
    # In NF4 a weight takes a quarter of the memory, so that four times as many exceed the cache.
    linears["bitsandbytes"] = bitsandbytes_linears(dense * 4)
    if device == "cuda":
        linears["marlin"] = marlin_linears(dense[0], copies(packed_bytes, device))
    for M in rows:
        x = torch.randn(M, columns, device=device, dtype=dtype)
        contenders = {}
        for name, functions in linears.items():
            if functions:
                contenders[name] = [partial(linear, x) for linear in functions]
        times = replay_times(contenders, device)
        floor = max(packed_bytes / bandwidth, 2 * M * out * columns / flops)
        shape = {"model": model, "layer": layer, "out": out, "in": columns, "M": M}
        yield {**shape, "floor": floor, **times}


def bench_kernels(args):
    cuda = args.device == "cuda"
    bandwidth, flops = ceilings(args.device)
    print(f"ceilings measured here: {bandwidth / 1e12:.2f} TB/s read and written, "
          f"{flops / 1e12:.0f} TFLOP/s; they make the floor. M: rows of x")
    rows = (1, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384) if cuda else (1, 16)
    results = []
    means = []
    for model in args.model or (["Qwen2.5-7B", "Qwen2.5-32B"] if cuda else ["tiny"]):
        for layer in layers_of(model):
            for result in bench_layer(model, layer, rows, args.device, bandwidth, flops):
                results.append(result)
                release_memory(args.device)
        for M in rows:
            same = [r for r in results if r["model"] == model and r["M"] == M]
            means.append({"model": model, "M": M, **geometric_means(same)})
        with_marlin = any("marlin" in r for r in results)
        yield {
            "what": "seconds of one linear layer, medians of CUDA-graph replays under the layer's "
                    "own load, over weights that together exceed L2",
            "vllm_version": importlib.metadata.version("vllm") if with_marlin else None,
            "bandwidth": bandwidth,
            "flops": flops,
            "rows": results,
            "means": means,
        }
    print_kernels(results, means)


def geometric_means(rows):
    """How many times faster NVFP4 is than each other column, geometric mean over the layers."""
    means = {}
    for name in ("bf16", "marlin", "nf4", "bitsandbytes", "floor"):
        if all(name in r for r in rows):
            means[name] = statistics.geometric_mean(r[name] / r["nvfp4"] for r in rows)
    return means


def print_kernels(results, means):
    columns = ("bf16", "marlin", "bitsandbytes", "nf4", "nvfp4", "floor")
    names = [name for name in columns if any(name in r for r in results)]
    print_head("layer", "M", *(f"{name}, us" for name in names), "of the floor")
    for r in results:
        times = [f"{r[name] * 1e6:.1f}" if name in r else "" for name in names]
        print_row(f"{r['model']} {r['layer']}", r["M"], *times, f"{r['floor'] / r['nvfp4']:.0%}")
    print()
    peers = [name for name in columns[:4] if any(name in mean for mean in means)]
    print_head("model", "M", *(f"NVFP4 over {name}" for name in peers), "of the floor")
    for mean in means:
        ratios = [f"{mean[name]:.2f}x" if name in mean else "" for name in peers]
        print_row(mean["model"], mean["M"], *ratios, f"{mean['floor']:.0%}")


def panels(plt, count, width, sharey=True):
    """A figure and its axes, side by side."""
    figure, axes = plt.subplots(1, count, figsize=(width * count, 4.2), layout="constrained",
                                sharey=sharey, squeeze=False)
    return figure, axes[0]


def plot_kernels(result, plt):
    peers = {"bf16": "cuBLAS BF16", "marlin": "Marlin NVFP4", "nf4": "our NF4"}
    models = list(dict.fromkeys(mean["model"] for mean in result["means"]))
    figure, axes = panels(plt, len(models), 5.5)
    highest = 0
    for axis, model in zip(axes, models):
        means = [mean for mean in result["means"] if mean["model"] == model]
        axis.axhline(1, color="gray", linewidth=1)
        for name, label in peers.items():
            points = [(mean["M"], mean[name]) for mean in means if name in mean]
            if points:
                rows, ratios = zip(*points)
                axis.plot(rows, ratios, "o-", color=COLORS[name], label=f"over {label}")
                highest = max(highest, *ratios)
        axis.set(title=f"{model}, geometric mean of four layers", xlabel="rows of x", xscale="log")
        rows = [mean["M"] for mean in means]
        axis.set_xticks(rows, [str(M) for M in rows], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="speed of NVFP4, relative", ylim=(0, 1.05 * highest))
    axes[0].legend(frameon=False)
    return figure


# --------------------------------------------------------------------------------------------------
# One linear layer by mma.sync
#
# How GPUs without wgmma multiply, run on a Hopper GPU: Triton compiles as for an A100 (sm_80), and
# fp4_kernels chooses as on one. It shows what the instructions cost, not what another GPU's memory,
# clock and number of SMs make of them.

def bench_mma(args):
    os.environ["TRITON_OVERRIDE_ARCH"] = "sm80"        # Triton reads it each time that it compiles
    qerl.kernels.capability = lambda device: (8, 0)
    what = "seconds of one linear layer on a Hopper GPU that runs Ampere's instructions (mma.sync)"
    print(what)
    print_head("layer", "M", "bf16, us", "decode, then cuBLAS, us", "mma.sync, us", "over bf16",
               "relative error")
    results = []
    for model in args.model or ["Qwen2.5-7B"]:
        for layer in layers_of(model):
            for row in mma_rows(model, layer):
                results.append(row)
                times = [f"{row[name] * 1e6:.1f}" for name in ("bf16", "decode", "mma")]
                ratio = f"{row['bf16'] / row['mma']:.2f}x"
                print_row(f"{model} {layer}", row["M"], *times, ratio, f"{row['error']:.4f}")
            release_memory(args.device)
        yield {"what": what, "rows": results}


def mma_rows(model, layer):
    """One line of the table for each number of rows that linear_kernel takes without wgmma."""
    out, columns = layers_of(model)[layer]
    weight = torch.randn(out, columns, device="cuda", dtype=torch.bfloat16) * 0.02
    tiled = tiled_copies("nvfp4", weight, copies(out * columns * 9 / 16, "cuda"))
    dense = [weight.clone() for _ in range(copies(2 * out * columns, "cuda"))]
    for M in (1, 8, 16, 32, 64):
        x = torch.randn(M, columns, device="cuda", dtype=torch.bfloat16)
        right = decode_and_multiply(tiled[0], x)
        times = replay_times({
            "bf16": [partial(F.linear, x, w) for w in dense],
            "decode": [partial(decode_and_multiply, w, x) for w in tiled],
            "mma": [partial(w.multiply, x) for w in tiled],
        }, "cuda")
        error = (tiled[0].multiply(x) - right).norm() / right.norm()
        yield {"model": model, "layer": layer, "M": M, "error": error.item(), **times}


def decode_and_multiply(weight, x):
    return F.linear(x, weight.dequantize(x.dtype, interleaved=True))


# --------------------------------------------------------------------------------------------------
# Rollout

def rank_of(name):
    """The LoRA rank with which a model's rollout is measured; 14B's and 32B's are the paper's."""
    return 16 if name in ("Qwen2.5-14B", "Qwen2.5-32B") else 32


@torch.no_grad()
def decode_seconds(model, batch, prompt_tokens, new_tokens):
    """(seconds of prefill, seconds of decoding new_tokens for each of `batch` prompts)."""
    device = model.device.type
    max_len = prompt_tokens + new_tokens
    sampler = qerl.Sampler(model, batch, batch, max_len, new_tokens, 1.0, 1.0, set(), None)
    prompts = random_prompts(model.config.vocab_size, batch, prompt_tokens)
    numbers = torch.arange(batch, device=device)
    wait(device)
    began = time.perf_counter()
    sampler.admit(prompts, numbers, numbers)
    wait(device)
    prefilled = time.perf_counter()
    sampler.steps(new_tokens)
    wait(device)
    ended = time.perf_counter()
    assert sampler.length[:batch].eq(new_tokens).all()
    return prefilled - began, ended - prefilled


@dataclass
class Work:
    """What a CutSampler counts: slots x decode steps, with those of idle slots."""
    slot_steps: int = 0


def cut_lengths(count, max_new_tokens, ranks):
    """Lengths like those of GSM8K solutions, 212 tokens of at most 512 on average, int64 [count].

    All ranks draw those of all and take their own, so that one rank has longer ones than another,
    and as many processes as one likes have the same lengths in all.
    """
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(count * ranks.count, generator=generator).chunk(ranks.count)[ranks.rank]
    lengths = normal.mul(0.35).add(5.3).exp().clamp(max=512)
    return (lengths * max_new_tokens / 512).long()


class CutSampler(qerl.Sampler):
    """Cuts completions at these lengths, as random weights never end one.

    work: a Work to count in, because whoever calls `generate` never sees its sampler.
    """

    def __init__(self, work, lengths, model, *args):
        super().__init__(model, *args)
        self.work = work
        self.limit[:len(lengths)] = lengths.to(self.limit.device)

    def steps(self, count):
        self.work.slot_steps += count * len(self.completion)
        super().steps(count)


def generate_cut(model, prompts, max_new_tokens, group, slots, ranks=Ranks()):
    """qerl.generate by a CutSampler -> (Rollout, fraction of slots x steps that gave a token)."""
    work = Work()
    lengths = cut_lengths(len(prompts) * group, max_new_tokens, ranks)
    sampler_class = partial(CutSampler, work, lengths)
    rollout = qerl.generate(
        model, prompts, max_new_tokens, group, slots=slots, sampler_class=sampler_class)
    return rollout, rollout.length.sum().item() / work.slot_steps


def write_vllm_config(name, weights, folder):
    """A config.json from which vLLM makes the model."""
    config = config_of(name)
    config.architectures = ["Qwen2ForCausalLM"]
    config.dtype = "bfloat16"
    if weights == "nvfp4":
        codes = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                 "symmetric": True, "dynamic": False}
        config.quantization_config = {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": codes}},
        }
    config.save_pretrained(folder)


def write_adapter(name, rank, folder):
    """Random LoRA for all seven projections, as PEFT stores it."""
    shape = SHAPES[name]
    d = shape.hidden
    kv = d // shape.heads * shape.kv_heads
    layers = {
        "self_attn.q_proj": (d, d),
        "self_attn.k_proj": (kv, d),
        "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, d),
        "mlp.gate_proj": (shape.intermediate, d),
        "mlp.up_proj": (shape.intermediate, d),
        "mlp.down_proj": (d, shape.intermediate),
    }
    tensors = {}
    for i in range(shape.layers):
        for layer, (out, columns) in layers.items():
            prefix = f"base_model.model.model.layers.{i}.{layer}"
            for matrix, size in (("A", (rank, columns)), ("B", (out, rank))):
                values = torch.randn(size, dtype=torch.bfloat16) * 0.01
                tensors[f"{prefix}.lora_{matrix}.weight"] = values
    targets = [layer.split(".")[1] for layer in layers]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none",
              "target_modules": targets}
    os.makedirs(folder)
    save_file(tensors, f"{folder}/adapter_model.safetensors")
    with open(f"{folder}/adapter_config.json", "w", encoding="utf-8") as f:
        json.dump(config, f)


def register_random_loader():
    """Teach vLLM the load format "random": weights of such sizes that activations stay finite."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("random")
    class RandomLoader(DummyModelLoader):
        def load_weights(self, model, model_config):
            for key, p in model.named_parameters():
                if p.dtype == torch.uint8:
                    p.data.random_(0, 256)
                elif p.dtype == torch.float8_e4m3fn:
                    p.data.copy_(torch.rand(p.shape, device=p.device) * 448)
                elif key.endswith("global_scale"):
                    # Stored as its inverse, it makes weights of about 0.02.
                    p.data.fill_(4e4)
                elif p.dim() > 1 or key.endswith("bias"):
                    # Only the norms are left then; they stay 1.
                    p.data.normal_(std=0.02)


def vllm_rollout(folder, adapter, vocabulary, rank, batches, tokens):
    """{batch: tokens per second} of vLLM on random weights, as decode_seconds measures ours.

    vLLM has its defaults (CUDA graphs, torch.compile) but for the engine's process, CUDA graphs of
    these very batches, prefill in one go, and no text made of the tokens. The faster of two runs
    counts.
    """
    # The engine runs in this process: by default it would be a fork of this one, which hung.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    register_random_loader()
    lora = LoRARequest("adapter", 1, adapter)
    llm = LLM(
        folder,
        load_format="random",
        skip_tokenizer_init=True,
        enable_lora=True,
        max_lora_rank=rank,
        max_model_len=2 * tokens,
        max_num_seqs=max(batches),
        max_num_batched_tokens=max(batches) * tokens,
        enable_prefix_caching=False,
        compilation_config={"cudagraph_capture_sizes": list(batches)},
    )

    def seconds(batch, new):
        rows = random_prompts(vocabulary, batch, tokens)
        prompts = [{"prompt_token_ids": row} for row in rows]
        settings = SamplingParams(
            temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = llm.generate(prompts, settings, lora_request=lora, use_tqdm=False)
        assert all(len(o.outputs[0].token_ids) == new for o in outputs)
        return time.perf_counter() - began

    rates = {}
    for batch in batches:
        seconds(batch, 2)                                              # warms up
        prefill = min(seconds(batch, 1) for _ in range(2))
        whole = min(seconds(batch, tokens) for _ in range(2))
        rates[batch] = batch * (tokens - 1) / (whole - prefill)
    return rates


VLLM_WEIGHTS = ("nvfp4", "bf16")


def vllm_rows(name, rank, batches, tokens):
    """One line of vLLM's table for each of NVFP4 and BF16 and each batch, or none without vLLM.

    Each of the two has a process of its own, whose end gives the GPU's memory back.
    """
    if importlib.util.find_spec("vllm") is None:
        return []
    rows = []
    constant = {"model": name, "version": importlib.metadata.version("vllm"), "rank": rank}
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        adapter = f"{folder}/adapter"
        write_adapter(name, rank, adapter)
        for weights in VLLM_WEIGHTS:
            model = f"{folder}/{weights}"
            write_vllm_config(name, weights, model)
            work = (model, adapter, SHAPES[name].vocabulary, rank, batches, tokens)
            with ProcessPoolExecutor(1, spawn) as process:
                try:
                    rates = process.submit(vllm_rollout, *work).result()
                except Exception as e:
                    print(f"vLLM's {LABELS[weights]} could not be measured: {qerl.reason(e)}")
                    continue
            for batch, rate in rates.items():
                rows.append({**constant, "weights": weights, "batch": batch, "tokens_per_s": rate})
                print_row(name, rank, f"vLLM, {LABELS[weights]}", batch, f"{rate:.0f}", "", "", "")
    return rows


def rollout_rows(name, model, weights, rank, batches, tokens, vllm):
    """One line of the table for each batch. vllm: this model's vllm_rows."""
    decode_seconds(model, 1, tokens, 2)                                # compiles what prefill needs
    for batch in batches:
        prefill, seconds = decode_seconds(model, batch, tokens, tokens)
        row = {
            "model": name,
            "rank": rank,
            "weights": weights,
            "batch": batch,
            "tokens_per_s": batch * tokens / seconds,
            "step_ms": seconds / tokens * 1e3,
            "prefill_s": prefill,
        }
        ratio = ""
        rates = [v["tokens_per_s"] for v in vllm if v["rank"] == rank and v["batch"] == batch]
        if len(rates) == len(VLLM_WEIGHTS):                # the faster of one would not be its best
            row["vllm"] = max(rates)
            ratio = f"{row['tokens_per_s'] / row['vllm']:.2f}x"
        print_row(name, rank, LABELS[weights], batch, f"{row['tokens_per_s']:.0f}",
                  f"{row['step_ms']:.2f}", f"{prefill:.3f}", ratio)
        yield row


def bench_rollout(args):
    cuda = args.device == "cuda"
    batches = (1, 8, 32, 128) if cuda else (1, 4)
    tokens = 256 if cuda else 8
    models = args.model or (["Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B"] if cuda else ["tiny"])
    rows = []
    theirs = []
    print_head("model", "LoRA rank", "weights", "batch", "decode tok/s", "ms a step", "prefill s",
               "over vLLM's best")
    for name in models:
        own = rank_of(name)
        other_ranks = args.ranks if name == models[0] else []
        vllm = vllm_rows(name, own, batches, tokens) if cuda else []
        theirs += vllm
        variants = [(own, weights) for weights in args.weights]
        variants += [(rank, "nvfp4") for rank in dict.fromkeys(other_ranks) if rank != own]
        for rank, weights in variants:
            model = random_model(name, weights, rank, args.device)
            rows.extend(rollout_rows(name, model, weights, rank, batches, tokens, vllm))
            del model
            release_memory(args.device)
            yield {
                "what": "decoded tokens per second, LoRA on all seven projections, "
                        f"{tokens} prompt and {tokens} new tokens, temperature 1, "
                        "sampling included, prefill not (nor in vLLM's figures); "
                        "vllm: its best of NVFP4 and BF16",
                "vllm": theirs,
                "rows": rows,
            }


def plot_rollout(result, plt):
    models = list(dict.fromkeys(r["model"] for r in result["rows"]))
    figure, axes = panels(plt, len(models), 4.6)
    for axis, model in zip(axes, models):
        rank = rank_of(model)
        rows = [r for r in result["rows"] if r["model"] == model and r["rank"] == rank]
        for weights, color in COLORS.items():
            points = [(r["batch"], r["tokens_per_s"]) for r in rows if r["weights"] == weights]
            if points:
                axis.plot(*zip(*points), "o-", color=color, label=LABELS[weights])
        points = [(r["batch"], r["vllm"]) for r in rows if "vllm" in r and r["weights"] == "nvfp4"]
        if points:
            axis.plot(*zip(*points), "k*", markersize=9, label="vLLM's best")
        axis.set(title=f"{model}, LoRA rank {rank}", xlabel="sequences decoded at once")
        axis.set(xscale="log", yscale="log")
        batches = sorted({r["batch"] for r in rows})
        axis.set_xticks(batches, batches)
        axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("decoded tokens per second")
    axes[0].legend(frameon=False)
    return figure


# --------------------------------------------------------------------------------------------------
# RL step

STEP_LABELS = {**LABELS, "nvfp4-fp8": "NVFP4, FP8"}     # FP8: of training, by methods/jetrl.py


@dataclass
class StepSettings:
    """What an RL step depends on; the result files state it as it is here."""
    algo: str = "grpo"
    micro_tokens: int = 16384           # tokens in one pass forward and backward
    tis: float = 0.0                    # no importance weights
    clip_low: float = 0.2
    clip_high: float = 0.28
    beta: float = 0.0                   # no reference policy
    slots: int = 256                    # sequences decoded at once
    prompt_tokens: int = 128
    max_new_tokens: int = 512


def step_seconds(model, optimizer, prompts, group, settings, method, ranks=Ranks()):
    """An RL step as train_gsm8k.train does it, but with random prompts and rewards and one update.

    prompts: of this process; method: a methods.Method. Returns the seconds of each phase, the
    completions' mean length, the slots' busy fraction and what the method measures. Of several
    processes these are means, and the step's seconds are those of the slowest.
    """
    clock = Clock(model.device)
    asked = random_prompts(model.config.vocab_size, prompts, settings.prompt_tokens)
    ranks.barrier(model.device)
    wait(model.device.type)
    with clock("rollout"), method.noise(model, 1e-2, None):
        rollout, busy = generate_cut(
            model, asked, settings.max_new_tokens, group, settings.slots, ranks)

    with clock("reward"):
        rewards = torch.rand(prompts, group, device=model.device)
        advantages = qerl.group_advantages(rewards).flatten()
        repeated = [prompt for prompt in asked for _ in range(group)]
        batch = Batch(repeated, rollout.tokens, rollout.length, rollout.logprobs, advantages,
                      rollout.mask)

    with clock("logprobs"):
        batch.old_logprobs = method.old_logprobs(model, batch)

    total_loss = 0.0
    with clock("update"):
        measured = method.before_updates(batch)
        batch.weights = qerl.token_weights(batch.mask, settings.algo) / ranks.count
        for micro_batch in batch.micro_batches(settings.micro_tokens):
            logprobs = qerl.token_logprobs(
                model, micro_batch.prompts, micro_batch.tokens, micro_batch.length)
            loss, _ = qerl.policy_loss(
                logprobs, micro_batch.old_logprobs, micro_batch.advantages, micro_batch.weights,
                settings.clip_low, settings.clip_high)
            loss.backward()
            total_loss += loss.item()
    trained = qerl.trainable(model).values()
    with clock("waiting"):             # for the slowest process
        ranks.barrier(model.device)
    with clock("exchange"):            # of gradients
        ranks.add_gradients(trained)
    with clock("update"):
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.2)
        assert math.isfinite(total_loss) and math.isfinite(norm)
        optimizer.step()
        optimizer.zero_grad()
        method.after_updates()

    whole = sum(clock.seconds.values())
    length = rollout.length.float().mean().item()
    return ranks.join({
        **clock.seconds,
        "step": whole,
        "length": length,
        "busy": busy,
        "peak_memory_gb": peak_memory_gb(model.device),
        **measured,
    })


def step_rows(name, weights, sizes, settings, device, repeats=1, shard=False):
    """One line of the results for each size (prompts of all processes, group).

    weights: of STEP_LABELS; repeats: the step is timed so often, and the median one counts; shard:
    cut the weights over the processes.
    """
    ranks = Ranks()                    # this model's own: with --shard it holds on to the model
    stored = ShardedRandomWeights if shard else RandomWeights
    model = random_model(name, weights.removesuffix("-fp8"), 32, device, stored)
    if shard:
        ranks.serve = SharedPasses(model, ranks).serve
    if device == "cuda":
        model.recompute_in_backward()
    method = jetrl.Neighbour(settings, "training") if weights.endswith("-fp8") else Method(settings)
    method.prepare(model, None, None, None)
    optimizer = torch.optim.AdamW(qerl.trainable(model).values(), 1e-6)
    for prompts, group in sizes:
        torch.manual_seed(ranks.rank)              # the ranks have prompts and samples of their own
        take_step = partial(step_seconds, model, optimizer, prompts // ranks.count, group, settings,
                            method, ranks)
        if device == "cuda":
            take_step()                            # the first step of a size compiles its kernels
            torch.cuda.reset_peak_memory_stats()
        steps = sorted((take_step() for _ in range(repeats)), key=lambda step: step["step"])
        row = {"model": name, "weights": weights, "processes": ranks.count, "prompts": prompts,
               "group": group, **steps[repeats // 2]}
        rounded = {key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}
        print(rounded, flush=True)
        yield row


def step_settings(device):
    return StepSettings() if device == "cuda" else StepSettings(prompt_tokens=8, max_new_tokens=12)


def bench_step(args):
    cuda = args.device == "cuda"
    settings = step_settings(args.device)
    processes = Ranks().count
    default = [(1, 2), (1, 4), (1, 8), (32, 8)] if cuda else [(1, 2)]
    sizes = args.sizes or [(prompts * processes, group) for prompts, group in default]
    models = args.model or (["Qwen2.5-7B", "Qwen2.5-14B"] if cuda else ["tiny"])
    memory_bench.limit_memory(args.cap, args.device)
    rows = []
    for name in models:
        for weights in args.weights:
            rows.extend(step_rows(
                name, weights, sizes, settings, args.device, args.repeats or 1, args.shard))
            release_memory(args.device)
            yield {
                "what": "seconds of one RL step on random weights, LoRA rank 32, by phase",
                "settings": asdict(settings) | {"shard": bool(args.shard), "cap_gb": args.cap},
                "rows": rows,
            }
    print_steps(rows, models, sizes, args.weights)


def print_steps(rows, models, sizes, weights):
    def ratio(by_weights, other, ours="nvfp4"):
        if not {other, ours} <= set(by_weights):
            return ""
        return f"{by_weights[other]['step'] / by_weights[ours]['step']:.2f}x"

    print()
    print_head("model", "completions", *(f"{STEP_LABELS[w]}, s" for w in weights),
               "NVFP4 over BF16", "over NF4", "FP8 over BF16", "busy slots")
    for name, (prompts, group) in itertools.product(dict.fromkeys(models), sizes):
        by_weights = {}
        for row in rows:
            if (row["model"], row["prompts"], row["group"]) == (name, prompts, group):
                by_weights[row["weights"]] = row
        times = [f"{by_weights[w]['step']:.2f}" for w in weights]
        busy = by_weights[weights[0]]["busy"]
        print_row(name, f"{prompts} x {group}", *times,
                  ratio(by_weights, "bf16"), ratio(by_weights, "nf4"),
                  ratio(by_weights, "bf16", "nvfp4-fp8"), f"{busy:.0%}")


def plot_step(result, plt):
    # A random reward takes no time; nor do the last two with one process.
    phases = {"rollout": "tab:purple", "logprobs": "tab:cyan", "update": "tab:gray",
              "waiting": "lightgray", "exchange": "tab:olive"}
    sizes = list(dict.fromkeys((r["prompts"], r["group"]) for r in result["rows"]))[-2:]
    figure, axes = panels(plt, len(sizes), 5.5, sharey=False)
    for axis, (prompts, group) in zip(axes, sizes):
        rows = [r for r in result["rows"] if (r["prompts"], r["group"]) == (prompts, group)]
        rows.sort(key=lambda r: len(r["model"]))
        places = range(len(rows))
        bottom = [0.0] * len(rows)
        for phase, color in phases.items():
            seconds = [r.get(phase, 0.0) for r in rows]        # older rows know three
            if any(seconds):
                axis.bar(places, seconds, bottom=bottom, label=phase, color=color)
            bottom = [b + s for b, s in zip(bottom, seconds)]
        names = [f"{r['model'].split('-')[-1]}\n{STEP_LABELS[r['weights']]}" for r in rows]
        axis.set_xticks(places, names)
        completions = f"{prompts * group} completions of {rows[0]['length']:.0f} tokens"
        axis.set(title=f"one RL step: {completions}", ylabel="seconds")
    axes[0].legend(frameon=False)
    return figure


# --------------------------------------------------------------------------------------------------
# An RL step by the number of GPUs

def bench_scaling(args):
    """`bench.py step` under torchrun for each number of processes."""
    cuda = args.device == "cuda"
    prompts, group = (32, 8) if cuda else (2, 2)
    counts = [1, 2, 4, 8] if cuda else [1, 2]
    if args.processes is None:
        args.processes = [n for n in counts if not cuda or n <= torch.cuda.device_count()]
    for count in args.processes:
        require_flag(count in counts, "processes", count,
                     f"cannot share {prompts} prompts; use " + ", ".join(map(str, counts)))
        require_flag(not cuda or count <= torch.cuda.device_count(), "processes", count,
                     f"only {torch.cuda.device_count()} GPUs are here; use fewer")
    rows = []
    what = (f"seconds of one RL step on random weights by processes, one a GPU, {prompts} x {group} "
            f"completions for each of them and {prompts} x {group} in all: of the phases the "
            "processes' mean, of the step the slowest's; medians of several steps")
    settings = asdict(step_settings(args.device))
    for count in args.processes:
        sizes = dict.fromkeys([(prompts * count, group), (prompts, group)])
        for name in args.model or ["Qwen2.5-7B" if cuda else "tiny"]:
            rows += measure_processes(args, count, name, sizes)
            yield {"what": what, "settings": settings, "rows": rows}
    print()
    print_head(*scaling_bench.HEAD)
    for cells in scaling_bench.cells_of(rows):
        print_row(*cells)
    yield {"what": what, "settings": settings, "rows": rows}


def measure_processes(args, count, name, sizes):
    """The rows of `bench.py step` in so many processes; raises UserError if one of them fails."""
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc_per_node={count}", os.path.abspath(__file__), "step",
            "--model", name,
            "--weights", *args.weights,
            "--sizes", *(f"{prompts}x{group}" for prompts, group in sizes),
            "--repeats", str(args.repeats or 3),
            "--device", args.device,
            "--out", out,
        ]
        # torchrun gives several processes a thread each; so has the one with which they compare.
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL)
        require_flag(done.returncode == 0, "processes", count, "a step failed; its error stands above")
        [path] = glob.glob(f"{glob.escape(out)}/*/step*.json")
        with open(path, encoding="utf-8") as f:
            rows = json.load(f)["rows"]
    for row in rows:
        print(f"{name}, {STEP_LABELS[row['weights']]}, {row['prompts']} x {row['group']}, "
              f"{count} process{'es' if count > 1 else ''}: {row['step']:.2f} s a step", flush=True)
    return rows


# --------------------------------------------------------------------------------------------------
# Memory of an RL step

def bench_memory(args):
    """A whole step of each model, a row each."""
    cuda = args.device == "cuda"
    small = {} if cuda else memory_bench.SMALL
    settings = memory_bench.MemorySettings(**small)
    result = {
        "what": "10^9 bytes of one GRPO step on random weights, all completions at full length, "
                "LoRA on all seven projections; rest_gb: activations and temporary tensors",
        "settings": asdict(settings),
        "rows": [],
    }
    for name in args.model or (list(memory_bench.CAPS) if cuda else ["tiny"]):
        cap = memory_bench.CAPS.get(name)
        work = memory_bench.step_rows, name, cap, settings, args.device
        # On a CPU in this process, so that a debugger can step through it.
        rows = memory_bench.in_own_process(*work) if cuda else work[0](*work[1:])
        for row in rows:
            result["rows"].append({"model": name, "cap_gb": cap, **row})
            print(memory_bench.progress(result["rows"][-1]), flush=True)
            yield dict(result)
    print_memory(result)


def print_memory(result):
    print("\nmemory in 10^9 bytes")
    print_head(*memory_bench.STEP_HEAD)
    for row in result["rows"]:
        print_row(*memory_bench.step_cells(row))


# --------------------------------------------------------------------------------------------------
# Command line

COMMANDS = {
    "formats": (bench_formats, None),
    "kernels": (bench_kernels, plot_kernels),
    "mma": (bench_mma, None),
    "rollout": (bench_rollout, plot_rollout),
    "step": (bench_step, plot_step),
    "scaling": (bench_scaling, scaling_bench.plot_scaling),
    "memory": (bench_memory, memory_bench.plot_memory),
}


# Of the .json files in results/ that tables draws: what draws their pictures.
PLOTS = {what: plot for what, (_, plot) in COMMANDS.items() if plot} | {"entropy": entropy.plot_entropy}


def size(text):
    """"32x8" -> (32, 8): prompts and completions of each."""
    prompts, _, group = text.partition("x")
    if not (prompts.isdecimal() and group.isdecimal() and int(prompts) >= 1 and int(group) >= 2):
        raise argparse.ArgumentTypeError(f"{text}: give prompts x completions, at least 1x2")
    return int(prompts), int(group)


def arguments():
    p = Parser(__doc__)
    p.add_argument("what", choices=list(COMMANDS))
    p.add_argument("--model", nargs="+",
                   help="formats: a model's folder or name; else shapes: " + ", ".join(SHAPES))
    p.add_argument("--weights", nargs="+", choices=["nvfp4", "bf16", "nf4", "mxfp4", "nvfp4-fp8"],
                   help="rollout, step: default nvfp4 bf16 nf4; for step nvfp4-fp8, too, which is "
                        "--method jetrl:training; scaling: default nvfp4")
    p.add_argument("--ranks", nargs="*", type=int,
                   help="rollout: other LoRA ranks for the first model, NVFP4 (default 16 128)")
    p.add_argument("--sizes", nargs="+", type=size, metavar="PxG",
                   help="step: prompts of all processes x completions of each (default 1x2 1x4 1x8 "
                        "32x8, times the processes)")
    p.add_argument("--shard", action="store_const", const=True,
                   help="step, under torchrun: cut the frozen weights over the processes")
    p.add_argument("--cap", type=float, metavar="GB",
                   help="step: let each process take so many 10^9 bytes of its GPU at most")
    p.add_argument("--repeats", type=int,
                   help="step, scaling: timed steps, of which the median counts, of an even number "
                        "the slower of the middle two (default 1 and 3)")
    p.add_argument("--processes", nargs="+", type=int,
                   help="scaling: numbers of processes, each with a GPU of its own (default 1 2 4 8 as "
                        "far as there are GPUs)")
    p.add_argument("--device", choices=["cuda", "cpu"],
                   default="cuda" if torch.cuda.is_available() else "cpu",
                   help="default: a GPU if there is one")
    p.add_argument("--out", default="results", help="folder for the results (default results)")
    args = p.parse_args()
    check_arguments(args)
    args.weights = args.weights or ["nvfp4", "bf16", "nf4"][:1 if args.what == "scaling" else 3]
    if args.ranks is None:
        args.ranks = [16, 128] if "nvfp4" in args.weights else []
    return args


# Options that only some commands take: {option: those commands}.
TAKERS = {
    "weights": ["rollout", "step", "scaling"],
    "ranks": ["rollout"],
    "sizes": ["step"],
    "shard": ["step"],
    "cap": ["step"],
    "repeats": ["step", "scaling"],
    "processes": ["scaling"],
}


def check_arguments(args):
    """Raise the one line of a UserError if they make no sense."""
    check_device(args.device)
    for option, takers in TAKERS.items():
        if getattr(args, option) is not None and args.what not in takers:
            known = " and ".join(takers)
            raise qerl.UserError(f"--{option}: {args.what} does not take it, only {known}")
    if args.what == "mma":
        hopper = args.device == "cuda" and torch.cuda.get_device_capability()[0] == 9
        require_flag(hopper, "device", args.device,
                     "mma needs a Hopper GPU; on others `kernels` measures the same")
    if args.what != "formats":
        known = ", ".join(SHAPES)
        for name in args.model or []:
            require_flag(name in SHAPES, "model", name, f"no such shape; choose from {known}")
    if args.what == "formats":
        require_flag(len(args.model or []) < 2, "model", " ".join(args.model or []),
                     "formats takes one; call it once for each")
    if args.what == "rollout" and "nvfp4-fp8" in (args.weights or []):
        raise qerl.UserError("--weights nvfp4-fp8: its rollout is that of nvfp4; use --weights nvfp4")
    for rank in args.ranks or []:
        require_flag(rank >= 1, "ranks", rank, "must be at least 1")
    require_flag(args.repeats is None or args.repeats >= 1, "repeats", args.repeats,
                 "must be at least 1")
    require_flag(args.cap is None or args.cap > 0, "cap", args.cap, "must be above 0")
    require_flag(args.cap is None or args.device == "cuda", "cap", args.cap,
                 "only a GPU's memory has a cap")
    processes = Ranks().count
    if args.shard and processes == 1:
        raise qerl.UserError("--shard: start by torchrun with --nproc_per_node=2 or more")
    if args.shard and "nvfp4-fp8" in (args.weights or []):
        raise qerl.UserError("--shard: not with --weights nvfp4-fp8, whose codes are not cut")
    require_flag(processes == 1 or args.what == "step", "nproc-per-node", processes,
                 f"{args.what} is started without torchrun, which only step knows")
    for prompts, group in args.sizes or []:
        require_flag(prompts % processes == 0, "sizes", f"{prompts}x{group}",
                     f"{processes} processes cannot share {prompts} prompts")


def results_folder(args):
    """Where a command's files go: by GPU, but a model's formats are the same everywhere."""
    if args.what == "formats" and args.model:
        return args.out
    if args.device == "cpu":
        return f"{args.out}/cpu"
    gpu = torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")
    return f"{args.out}/{gpu}"


def results_name(args):
    """A command's name in its files; what several processes measured of a step stands apart."""
    processes = Ranks().count
    several = f"-{processes}-processes" if processes > 1 else ""
    return args.what + several + ("-sharded" if args.shard else "")


def run(args):
    """Measure, and write the files each time there is more, so that a stop loses little."""
    bench, plot = COMMANDS[args.what]
    ranks = Ranks()
    ranks.start(args.device)
    if args.what != "formats" and args.device == "cpu":
        print(f"on a CPU{'' if args.model else ', a tiny shape'}: these figures mean nothing")
    path = f"{results_folder(args)}/{results_name(args)}"
    with creating(args.out):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    for result in bench(args):
        if not ranks.main:
            continue
        result = {"command": command_line(), **result, **environment(args.device)}
        atomic_write(f"{path}.json", json.dumps(result, indent=1))
        if plot:
            save_figure(f"{path}.png", plot, result)
    print(f"\nwritten to {path}.json" + (" and .png" if plot else ""))
    ranks.stop()


def main():
    with one_line():
        studies = {"claims": claims.main, "entropy": entropy.main, "methods": compare.main,
                   "tables": partial(results.main, plots=PLOTS)}
        if sys.argv[1:2] and sys.argv[1] in studies:
            sys.exit(studies[sys.argv[1]](sys.argv[2:]))
        args = arguments()
        try:
            run(args)
        except RuntimeError as e:
            if not is_out_of_memory(e):
                raise
            fewer = ", smaller --sizes or a larger --cap" if args.what == "step" else ""
            end(f"{qerl.reason(e)} Choose a smaller --model{fewer}")


if __name__ == "__main__":
    main()
