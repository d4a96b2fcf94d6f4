"""Measure this project. Each command prints its tables and writes them, all but the first with a picture, under results/.

    python bench.py formats [--model FOLDER_OR_NAME]     relative error of each 4-bit format
    python bench.py kernels [--model Qwen2.5-7B ...]     one linear layer, by rows of x: NVFP4 and NF4 against cuBLAS BF16, Marlin
    python bench.py rollout [--model Qwen2.5-7B ...]     decoded tokens per second with LoRA, by sequences decoded at once
    python bench.py step [--model Qwen2.5-7B ...]        an RL step: rollout, reward, log-probabilities, update

The last three make random weights of the given shapes on the GPU. On a CPU they run a tiny shape, so that one can step
through them; its times mean nothing.
"""
import copy
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import types
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

import qerl
import train_gsm8k
from train_gsm8k import Parser, command_line, environment, fail, save_figure, warm_start

# hidden size, intermediate size, layers, heads, kv heads, vocabulary
SHAPES = {"Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936), "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936),
          "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936), "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064),
          "Qwen2.5-14B": (5120, 13824, 48, 40, 8, 152064), "Qwen2.5-32B": (5120, 27648, 64, 40, 8, 152064),
          "tiny": (256, 512, 2, 4, 2, 512)}
LABELS = {"nvfp4": "NVFP4", "mxfp4": "MXFP4", "nf4": "NF4", "nf4 double": "NF4, double quantisation", "bf16": "BF16"}
COLORS = {"nvfp4": "tab:green", "nf4": "tab:orange", "bf16": "tab:blue", "mxfp4": "tab:red", "marlin": "black"}


# ---------------------------------------------------------------------------------------------------------------------
# Relative error of the formats

def quantize_nf4_double(weight):
    """NF4 with QLoRA's double quantisation (section 3; here with one second-level block a row): block_scale float8_e4m3fn
    [out, in/64], global_scale float32 [out, 2] of each row's offset and scale."""
    packed, absmax, _ = qerl.quantize_nf4(weight)
    offset = absmax.mean(1, keepdim=True)
    second = ((absmax - offset).abs().amax(1, keepdim=True) / qerl.E4M3_MAX).clamp_min(1e-38)
    return packed, ((absmax - offset) / second).to(torch.float8_e4m3fn), torch.cat([offset, second], 1)


def dequantize_nf4_double(packed, block_scale, global_scale, dtype=torch.bfloat16):
    return qerl.dequantize_nf4(packed, block_scale.float() * global_scale[:, 1:] + global_scale[:, :1], None, dtype)


FORMATS = {**{name: (format.quantize, format.dequantize) for name, format in qerl.FORMATS.items()},
           "nf4 double": (quantize_nf4_double, dequantize_nf4_double)}


def gaussian_layers(count=8, size=2048):
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        yield f"layer {i}", torch.randn(size, size, generator=generator)


def model_layers(folder):
    """(name, weight float32) of every linear layer of a Hugging Face folder."""
    files = qerl.Checkpoint(folder).files
    for name in files:
        if name.endswith("_proj.weight"):
            yield name, files[name].get_tensor(name).float()


def relative_errors(layers, device):
    """{format: (‖Ŵ - W‖ / ‖W‖ over all layers, stored bits a weight)}."""
    error, norm, bits, weights = dict.fromkeys(FORMATS, 0.0), 0.0, dict.fromkeys(FORMATS, 0), 0
    for _, weight in layers:
        weight = weight.to(device)
        norm, weights = norm + weight.double().square().sum().item(), weights + weight.numel()
        for name, (quantize, dequantize) in FORMATS.items():
            stored = quantize(weight.bfloat16() if name == "bf16" else weight)
            error[name] += (dequantize(*stored, torch.float32) - weight).double().square().sum().item()
            bits[name] += 8 * sum(t.nbytes for t in stored)
    return {name: ((error[name] / norm) ** 0.5, bits[name] / weights) for name in FORMATS}


def bench_formats(args):
    model = train_gsm8k.full_name(args.model[0]) if args.model else None
    folder = qerl.model_folder(model) if model else warm_start()
    label = os.path.basename(os.path.normpath(model)) if model else "the built-in policy"
    gaussian, real = relative_errors(gaussian_layers(), args.device), relative_errors(model_layers(folder), args.device)
    rows = [{"format": name, "bits": gaussian[name][1], "gaussian": gaussian[name][0], "model": real[name][0]} for name in LABELS]
    print(f"| format | bits a weight | Gaussian | {label} |\n|---|---|---|---|")
    for row in rows:
        print(f"| {LABELS[row['format']]} | {row['bits']:.2f} | {row['gaussian']:.4f} | {row['model']:.4f} |")
    command = f"python bench.py formats --model {label}" if model else "python bench.py formats"
    yield {"what": "relative error of quantised weights", "command": command, "model": label, "rows": rows}


# ---------------------------------------------------------------------------------------------------------------------
# Random models

class RandomWeights(qerl.Checkpoint):
    """Normal weights of any shape. Layers of one kind hold the same values, each in its own memory."""

    def __init__(self, weights, lora_rank, device):
        super().__init__(None, weights, lora_rank, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
        self.first = {}

    def has(self, name):
        return name.endswith((".weight", ".bias"))

    def read(self, name, shape):
        scale = 0.02 if len(shape) > 1 else 0.1
        return torch.randn(shape, device=self.device, dtype=self.dtype) * scale + name.endswith("norm.weight")

    def linear(self, prefix, leaves, sizes, in_features, bias):
        if leaves[0] not in self.first:
            self.first[leaves[0]] = super().linear(prefix, leaves, sizes, in_features, bias)
        layer = self.first[leaves[0]]
        layer_copy = qerl.QuantLinear([f"{prefix}.{leaf}" for leaf in leaves], sizes, in_features,
                                      copy.deepcopy(layer.weight), layer.bias, layer.format, layer.rank)
        if layer.rank:
            layer_copy.lora_B.data.normal_(std=0.01)
        return layer_copy


def config_of(name):
    d, inner, layers, heads, kv_heads, vocabulary = SHAPES[name]
    return transformers.Qwen2Config(hidden_size=d, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
                                    num_key_value_heads=kv_heads, vocab_size=vocabulary, tie_word_embeddings=False)


def random_model(name, weights, lora_rank, device):
    torch.manual_seed(0)
    return qerl.Transformer(config_of(name), RandomWeights(weights, lora_rank, device))


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------------------------------------------------------------
# One linear layer

def replay_seconds(run):
    """Seconds of one call of `run` (a CUDA graph's replay) under its own load: it runs back to back in chunks of 20 ms, and after 0.2 s
    the median of five counts, because the clock seems to follow the power drawn in the last 0.2 s."""
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
    return statistics.median(chunk_seconds(5 + round(0.18 / (repeats * once)), repeats)[-5:])


def replay_times(contenders, device):
    """{name: seconds a call} of each contender's list of calls, repeated to the length of the longest. On a GPU the list is one CUDA
    graph, and the median of three rounds counts: now and then the clock drops for a third of a second, and whoever had its turn then
    seemed up to a quarter slower. On a CPU the list runs once."""
    longest = max(map(len, contenders.values()))
    contenders = {name: [calls[i % len(calls)] for i in range(longest)] for name, calls in contenders.items()}
    if device == "cuda":
        graphs = {name: qerl.record_graph(lambda calls=calls: [call() for call in calls]) for name, calls in contenders.items()}
        rounds = [{name: replay_seconds(graph) for name, graph in graphs.items()} for _ in range(3)]
        return {name: statistics.median(r[name] for r in rounds) / longest for name in contenders}
    times = {}
    for name, calls in contenders.items():
        began = time.perf_counter()
        for call in calls:
            call()
        times[name] = (time.perf_counter() - began) / longest
    return times


def ceilings(device):
    """(bytes per second of an elementwise kernel over gigabytes, read + written; BF16 FLOP per second of a large matrix product)."""
    n, side = (2 ** 31, 8192) if device == "cuda" else (2 ** 24, 256)
    a = torch.rand(n // 4, device=device)
    b, m = torch.empty_like(a), torch.randn(side, side, device=device, dtype=torch.bfloat16)
    times = replay_times({"copy": [lambda: torch.neg(a, out=b)] * 3, "product": [lambda: m @ m] * 3}, device)
    return 2 * n / times["copy"], 2 * side ** 3 / times["product"]


def layers_of(name):
    """{layer: (out_features, in_features)} of the four stacked linear layers of a block."""
    d, inner, _, heads, kv_heads, _ = SHAPES[name]
    head_dim = d // heads
    return {"qkv": ((heads + 2 * kv_heads) * head_dim, d), "o": (d, heads * head_dim), "gate_up": (2 * inner, d), "down": (d, inner)}


def bitsandbytes_linears(weights):
    """bitsandbytes' NF4 linear, x -> y, for each weight, or none where it cannot be imported."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)                 # on a CPU it asks for a package that it can do without
    try:
        import bitsandbytes
    except ImportError:
        return []
    stored = [bitsandbytes.functional.quantize_nf4(weight, blocksize=64) for weight in weights]
    return [lambda x, packed=packed, state=state: bitsandbytes.matmul_4bit(x, packed.t(), state) for packed, state in stored]


def marlin_linears(weight, copies):
    """vLLM's Marlin NVFP4 linear, x -> y, for each of so many copies of a weight, or none where vLLM cannot be had."""
    if importlib.util.find_spec("vllm") is None:
        return []
    try:
        from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as marlin
        torch.ops._C.marlin_gemm
    except (ImportError, AttributeError) as e:
        print(f"vLLM is installed, but without a Marlin kernel that can be called: {qerl.reason(e)}")
        return []
    calls, (out, columns) = [], weight.shape
    packed, block_scale, global_scale = qerl.quantize_nvfp4(weight)
    for _ in range(copies):
        w = types.SimpleNamespace(weight=packed.clone(), weight_scale=block_scale.clone(), weight_global_scale=1 / global_scale, params_dtype=weight.dtype,
                                  output_size_per_partition=out, input_size_per_partition=columns)
        marlin.prepare_fp4_layer_for_marlin(w)
        calls.append(lambda x, w=w: marlin.apply_fp4_marlin_linear(x, w.weight, w.weight_scale, w.weight_global_scale, w.workspace, out, columns))
    x = torch.randn(16, columns, device=weight.device, dtype=weight.dtype)
    right = F.linear(x, qerl.dequantize_nvfp4(packed, block_scale, global_scale))
    assert (calls[0](x) - right).norm() < 0.01 * right.norm(), "this vLLM takes NVFP4 weights in another form"
    return calls


def bench_layer(model, layer, shape, rows, device, bandwidth, flops):
    """One line of the table for each number of rows."""
    out, columns = shape
    cuda = device == "cuda"
    copies = max(2, math.ceil(2e8 / (out * columns * 9 / 16))) if cuda else 2          # together well beyond the L2 cache
    dtype = torch.bfloat16 if cuda else torch.float32
    dense = [torch.randn(out, columns, device=device, dtype=dtype) * 0.02 for _ in range(max(2, math.ceil(2e8 / (2 * out * columns))) if cuda else 2)]
    tiled = {}
    for name in ("nvfp4", "nf4"):
        format = qerl.FORMATS[name]
        first = format.tile(*format.quantize(dense[0]))
        tiled[name] = [copy.deepcopy(first) for _ in range(copies)]
    theirs = {"bitsandbytes": bitsandbytes_linears(dense * 4)}                # each a quarter of the size
    if cuda:
        theirs["marlin"] = marlin_linears(dense[0], copies)
    for M in rows:
        x = torch.randn(M, columns, device=device, dtype=dtype)
        contenders = {"bf16": [lambda w=w: F.linear(x, w) for w in dense]}
        for name, weights in tiled.items():
            if M < 4096:
                contenders[name] = [lambda w=w: w.multiply(x) for w in weights]
            else:                                                             # as training does it
                contenders[name] = [lambda w=w: F.linear(x, w.dequantize(dtype)) for w in weights]
        for name, calls in theirs.items():
            if calls:
                contenders[name] = [lambda call=call: call(x) for call in calls]
        times = replay_times(contenders, device)
        floor = max(out * columns * 9 / 16 / bandwidth, 2 * M * out * columns / flops)
        yield {"model": model, "layer": layer, "out": out, "in": columns, "M": M, "floor": floor, **times}


def bench_kernels(args):
    cuda = args.device == "cuda"
    bandwidth, flops = ceilings(args.device)
    print(f"ceilings measured here: {bandwidth / 1e12:.2f} TB/s read and written, {flops / 1e12:.0f} TFLOP/s; they make the floor. M: rows of x")
    rows = (1, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384) if cuda else (1, 16)
    results, means = [], []
    for model in args.model or (["Qwen2.5-7B", "Qwen2.5-32B"] if cuda else ["tiny"]):
        for layer, shape in layers_of(model).items():
            for r in bench_layer(model, layer, shape, rows, args.device, bandwidth, flops):
                results.append(r)
                if cuda:
                    torch.cuda.empty_cache()
        means += [{"model": model, "M": M, **geometric_means([r for r in results if r["model"] == model and r["M"] == M])} for M in rows]
        yield {"what": "seconds of one linear layer, medians of CUDA-graph replays under the layer's own load, over weights that together exceed L2",
               "vllm_version": importlib.metadata.version("vllm") if any("marlin" in r for r in results) else None,
               "bandwidth": bandwidth, "flops": flops, "rows": results, "means": means}
    names = [n for n in ("bf16", "marlin", "bitsandbytes", "nf4", "nvfp4", "floor") if any(n in r for r in results)]
    print("| layer | M | " + " | ".join(f"{n}, us" for n in names) + " | of the floor |\n|" + "---|" * (len(names) + 3))
    for r in results:
        cells = [f"{r[n] * 1e6:.1f}" if n in r else "" for n in names]
        print(f"| {r['model']} {r['layer']} | {r['M']} | " + " | ".join(cells) + f" | {r['floor'] / r['nvfp4']:.0%} |")
    peers_there = [n for n in ("bf16", "marlin", "bitsandbytes", "nf4") if any(n in m for m in means)]
    print("\n| model | M | " + " | ".join(f"NVFP4 over {n}" for n in peers_there) + " | of the floor |\n|" + "---|" * (len(peers_there) + 3))
    for m in means:
        print(f"| {m['model']} | {m['M']} | " + " | ".join(f"{m[n]:.2f}x" if n in m else "" for n in peers_there) + f" | {m['floor']:.0%} |")


def geometric_means(rows):
    """How many times faster NVFP4 is than each other column, geometric mean over the layers."""
    names = [n for n in ("bf16", "marlin", "nf4", "bitsandbytes", "floor") if all(n in r for r in rows)]
    return {n: math.exp(sum(math.log(r[n] / r["nvfp4"]) for r in rows) / len(rows)) for n in names}


def plot_kernels(result, plt):
    models = list(dict.fromkeys(m["model"] for m in result["means"]))
    figure, axes = plt.subplots(1, len(models), figsize=(5.5 * len(models), 4.2), layout="constrained", sharey=True, squeeze=False)
    for axis, model in zip(axes[0], models):
        means = [m for m in result["means"] if m["model"] == model]
        axis.axhline(1, color="gray", linewidth=1)
        for name, label in (("bf16", "cuBLAS BF16"), ("marlin", "Marlin NVFP4"), ("nf4", "our NF4")):
            points = [(m["M"], m[name]) for m in means if name in m]
            axis.plot(*zip(*points), "o-", color=COLORS[name], label=f"over {label}") if points else None
        axis.set(title=f"{model}, geometric mean of four layers", xlabel="rows of x", xscale="log")
        axis.set_xticks([m["M"] for m in means], [str(m["M"]) for m in means], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set(ylabel="speed of NVFP4, relative", ylim=(0, 1.05 * max(m.get(n, 0) for m in result["means"] for n in ("bf16", "marlin", "nf4"))))
    axes[0][0].legend(frameon=False)
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# Rollout

RANKS = {"Qwen2.5-7B": 32, "Qwen2.5-14B": 16, "Qwen2.5-32B": 16}


@torch.no_grad()
def decode_seconds(model, batch, prompt_tokens, new_tokens):
    """(seconds of prefill, seconds of decoding new_tokens for each of `batch` prompts)."""
    device = model.device.type
    sampler = qerl.Sampler(model, batch, batch, prompt_tokens + new_tokens, new_tokens, 1.0, 1.0, set(), None)
    prompts = torch.randint(0, model.config.vocab_size, (batch, prompt_tokens)).tolist()
    wait(device)
    began = time.perf_counter()
    sampler.admit(prompts, torch.arange(batch, device=device), torch.arange(batch, device=device))
    wait(device)
    prefilled = time.perf_counter()
    sampler.steps(new_tokens)
    wait(device)
    assert sampler.length[:batch].eq(new_tokens).all()
    return prefilled - began, time.perf_counter() - prefilled


class CutSampler(qerl.Sampler):
    """Cuts completions at lengths like those of GSM8K solutions (random weights never end one), and counts slots x steps."""

    def __init__(self, model, n, slots, max_len, max_new_tokens, *args):
        super().__init__(model, n, slots, max_len, max_new_tokens, *args)
        lengths = torch.randn(n, generator=torch.Generator().manual_seed(0)).mul(0.35).add(5.3).exp()             # mean 212
        self.limit[:n] = (lengths.clamp(max=512) * max_new_tokens / 512).long().to(self.limit.device)
        CutSampler.slot_steps = 0

    def steps(self, count):
        CutSampler.slot_steps += count * len(self.row)
        super().steps(count)


def busy_slots(name, model, slots, prompts, group):
    """How many of the slots `generate` keeps busy while they are refilled, and its tokens per second."""
    qerl.Sampler, sampler = CutSampler, qerl.Sampler
    prompt_tokens, new_tokens = (128, 512) if slots > 4 else (8, 12)
    tokens = torch.randint(0, model.config.vocab_size, (prompts, prompt_tokens)).tolist()
    qerl.generate(model, tokens[:slots // group], new_tokens // 4, group, slots=slots)           # compiles, for each number of slots
    wait(model.device.type)
    began = time.perf_counter()
    rollout = qerl.generate(model, tokens, new_tokens, group, slots=slots)
    wait(model.device.type)
    seconds, total = time.perf_counter() - began, rollout.length.sum().item()
    qerl.Sampler = sampler
    return {"model": name, "completions": prompts * group, "slots": slots, "length": total / (prompts * group), "busy": total / CutSampler.slot_steps,
            "tokens_per_s": total / seconds}


def write_vllm_config(name, weights, folder):
    """A config.json from which vLLM makes the model."""
    config = config_of(name)
    config.architectures, config.dtype = ["Qwen2ForCausalLM"], "bfloat16"
    if weights == "nvfp4":
        codes = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True, "dynamic": False}
        config.quantization_config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
                                      "config_groups": {"group_0": {"targets": ["Linear"], "weights": codes}}}
    config.save_pretrained(folder)


def write_adapter(name, rank, folder):
    """Random LoRA for all seven projections, as PEFT stores it."""
    d, inner, layers, heads, kv_heads, _ = SHAPES[name]
    kv, tensors = d // heads * kv_heads, {}
    shapes = {"self_attn.q_proj": (d, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d), "self_attn.o_proj": (d, d),
              "mlp.gate_proj": (inner, d), "mlp.up_proj": (inner, d), "mlp.down_proj": (d, inner)}
    for i in range(layers):
        for leaf, (out, columns) in shapes.items():
            prefix = f"base_model.model.model.layers.{i}.{leaf}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, columns, dtype=torch.bfloat16) * 0.01
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, rank, dtype=torch.bfloat16) * 0.01
    os.makedirs(folder)
    save_file(tensors, os.path.join(folder, "adapter_model.safetensors"))
    with open(os.path.join(folder, "adapter_config.json"), "w") as f:
        json.dump({"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": [leaf.split(".")[1] for leaf in shapes]}, f)


def vllm_rollout(folder, adapter, vocabulary, rank, batches, tokens):
    """{batch: tokens per second} as decode_seconds measures ours, by vLLM on random weights, at its best of two: with its defaults
    (CUDA graphs, torch.compile), CUDA graphs of these very batches, prefill in one go, and no text made of the tokens."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"                        # else its engine is a fork of this process, and hung
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
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
                    p.data.fill_(4e4)                                         # stored as its inverse: weights of about 0.02
                elif p.dim() > 1 or key.endswith("bias"):                     # norms stay one
                    p.data.normal_(std=0.02)

    lora = LoRARequest("adapter", 1, adapter)
    llm = LLM(folder, load_format="random", skip_tokenizer_init=True, enable_lora=True, max_lora_rank=rank, max_model_len=2 * tokens,
              max_num_seqs=max(batches), max_num_batched_tokens=max(batches) * tokens, enable_prefix_caching=False,
              compilation_config={"cudagraph_capture_sizes": list(batches)})

    def seconds(batch, new):
        prompts = [{"prompt_token_ids": row} for row in torch.randint(0, vocabulary, (batch, tokens)).tolist()]
        settings = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = llm.generate(prompts, settings, lora_request=lora, use_tqdm=False)
        assert all(len(o.outputs[0].token_ids) == new for o in outputs)
        return time.perf_counter() - began
    result = {}
    for batch in batches:
        seconds(batch, 2)                                                     # warms up
        prefill, whole = (min(seconds(batch, new) for _ in range(2)) for new in (1, tokens))
        result[batch] = batch * (tokens - 1) / (whole - prefill)
    return result


def vllm_tokens_per_s(name, rank, batches, tokens):
    """[{weights, batch, tokens_per_s, ...}] of vLLM with NVFP4 and with BF16 weights, each in a process of its own, or [] without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        return []
    rows, version = [], importlib.metadata.version("vllm")
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(name, rank, f"{folder}/adapter")
        for weights in ("nvfp4", "bf16"):
            write_vllm_config(name, weights, f"{folder}/{weights}")
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                try:
                    rates = process.submit(vllm_rollout, f"{folder}/{weights}", f"{folder}/adapter", SHAPES[name][-1], rank, batches, tokens).result()
                except Exception as e:
                    print(f"vLLM's {LABELS[weights]} could not be measured: {qerl.reason(e)}")
                    continue
            rows += [{"model": name, "version": version, "rank": rank, "weights": weights, "batch": batch, "tokens_per_s": rate}
                     for batch, rate in rates.items()]
    return rows


def bench_rollout(args):
    cuda = args.device == "cuda"
    batches, tokens = ((1, 8, 32, 128), 256) if cuda else ((1, 4), 8)
    models = args.model or (["Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B"] if cuda else ["tiny"])
    results, theirs, busy = [], [], []
    print("| model | LoRA rank | weights | batch | decode tok/s | ms a step | prefill s | over vLLM's best |\n|---|---|---|---|---|---|---|---|")
    for name in models:
        own, others = RANKS.get(name, 32), args.ranks if name == models[0] else []
        vllm = vllm_tokens_per_s(name, own, batches, tokens) if cuda else []
        theirs += vllm
        for r in vllm:
            print(f"| {name} | {own} | vLLM, {LABELS[r['weights']]} | {r['batch']} | {r['tokens_per_s']:.0f} | | | |", flush=True)
        for rank in dict.fromkeys((own, *others)):
            for weights in args.weights if rank == own else ["nvfp4"]:
                model = random_model(name, weights, rank, args.device)
                decode_seconds(model, 1, tokens, 2)                           # compiles what prefill needs
                for batch in batches:
                    prefill, seconds = decode_seconds(model, batch, tokens, tokens)
                    r = {"model": name, "rank": rank, "weights": weights, "batch": batch, "tokens_per_s": batch * tokens / seconds,
                         "step_ms": seconds / tokens * 1e3, "prefill_s": prefill}
                    best = max((v["tokens_per_s"] for v in vllm if (v["rank"], v["batch"]) == (rank, batch)), default=0)
                    if best:
                        r["vllm"] = best
                    results.append(r)
                    ratio = f"{r['tokens_per_s'] / best:.2f}x" if best else ""
                    print(f"| {name} | {rank} | {LABELS[weights]} | {batch} | {r['tokens_per_s']:.0f} | {r['step_ms']:.2f} | {prefill:.3f} | {ratio} |", flush=True)
                if weights == "nvfp4" and rank == own and others:
                    busy = [busy_slots(name, model, slots, *((128, 8) if cuda else (4, 2))) for slots in ((128, 256) if cuda else (4,))]
                del model
                if cuda:
                    torch.cuda.empty_cache()
                yield {"what": f"decoded tokens per second, LoRA on all seven projections, {tokens} prompt and {tokens} new tokens, temperature 1, "
                       "sampling included, prefill not (nor in vLLM's figures); vllm: its best of NVFP4 and BF16",
                       "busy": busy, "vllm": theirs, "rows": results}
    for r in busy:
        print(f"{r['model']}: {r['completions']} completions of {r['length']:.0f} tokens on average through {r['slots']} slots: "
              f"{r['busy']:.0%} of the slots busy, {r['tokens_per_s']:.0f} tokens/s, prefill and all")


def plot_rollout(result, plt):
    models = list(dict.fromkeys(r["model"] for r in result["rows"]))
    figure, axes = plt.subplots(1, len(models), figsize=(4.6 * len(models), 4.2), layout="constrained", sharey=True, squeeze=False)
    for axis, model in zip(axes[0], models):
        rows = [r for r in result["rows"] if r["model"] == model and r["rank"] == RANKS.get(model, 32)]
        for weights in COLORS:
            points = [(r["batch"], r["tokens_per_s"]) for r in rows if r["weights"] == weights]
            axis.plot(*zip(*points), "o-", color=COLORS[weights], label=LABELS[weights]) if points else None
        points = [(r["batch"], r["vllm"]) for r in rows if "vllm" in r and r["weights"] == "nvfp4"]
        axis.plot(*zip(*points), "k*", markersize=9, label="vLLM's best") if points else None
        axis.set(title=f"{model}, LoRA rank {RANKS.get(model, 32)}", xlabel="sequences decoded at once", xscale="log", yscale="log")
        axis.set_xticks(sorted({r["batch"] for r in rows}), sorted({r["batch"] for r in rows}))
        axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("decoded tokens per second")
    axes[0][0].legend(frameon=False)
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# RL step

def step_seconds(model, optimizer, prompts, group, args):
    """Seconds by phase of one RL step on random prompts, the completions' mean length and the fraction of slots kept busy."""
    vocabulary, clock = model.config.vocab_size, train_gsm8k.Clock(model.device)
    problems = [{"prompt": torch.randint(0, vocabulary, (args.prompt_tokens,)).tolist(), "number": 1} for _ in range(prompts)]
    with clock("rollout"), qerl.adaptive_quantization_noise(model, 1e-2):
        rollout = qerl.generate(model, [p["prompt"] for p in problems], args.max_new_tokens, group, slots=args.slots)
    with clock("reward"):
        rewards = torch.rand(prompts, group, device=model.device)
        batch = train_gsm8k.Batch(problems, rollout, None, rewards, None)
        advantages = qerl.group_advantages(rewards).flatten()
    with clock("logprobs"):
        old_logprobs = train_gsm8k.all_logprobs(model, batch, args)
    with clock("update"):
        train_gsm8k.policy_update(model, optimizer, batch, list(range(prompts * group)), advantages, old_logprobs, None, rollout.mask, args)
    busy = rollout.length.sum().item() / CutSampler.slot_steps
    return {**clock.seconds, "step": sum(clock.seconds.values()), "length": rollout.length.float().mean().item(), "busy": busy}


def bench_step(args):
    cuda = args.device == "cuda"
    qerl.Sampler = CutSampler
    settings = types.SimpleNamespace(algo="grpo", micro_tokens=16384, tis=0.0, clip_low=0.2, clip_high=0.28, beta=0.0, slots=256,
                                     prompt_tokens=128 if cuda else 8, max_new_tokens=512 if cuda else 12)
    sizes = [(1, 2), (1, 4), (1, 8), (32, 8)] if cuda else [(1, 2)]
    results = []
    for name in args.model or (["Qwen2.5-7B", "Qwen2.5-14B"] if cuda else ["tiny"]):
        for weights in args.weights:
            model = random_model(name, weights, 32, args.device)
            if cuda:
                model.recompute_in_backward()
            optimizer = torch.optim.AdamW(qerl.trainable(model).values(), 1e-6)
            for prompts, group in sizes:
                torch.manual_seed(0)
                if cuda:                                                      # the first compiles and warms up
                    step_seconds(model, optimizer, prompts, group, settings)
                    torch.cuda.reset_peak_memory_stats()
                seconds = step_seconds(model, optimizer, prompts, group, settings)
                results.append({"model": name, "weights": weights, "prompts": prompts, "group": group, **seconds,
                                "peak_memory_gb": train_gsm8k.peak_memory_gb(args.device)})
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in results[-1].items()}, flush=True)
            del model, optimizer
            if cuda:
                torch.cuda.empty_cache()
            yield {"what": "seconds of one RL step on random weights, LoRA rank 32, by phase", "settings": vars(settings), "rows": results}
    print("\n| model | completions | " + " | ".join(f"{LABELS[w]}, s" for w in args.weights) + " | NVFP4 over BF16 | over NF4 | busy slots |\n|" + "---|" * (len(args.weights) + 5))
    for name in dict.fromkeys(r["model"] for r in results):
        for prompts, group in sizes:
            by = {r["weights"]: r for r in results if (r["model"], r["prompts"], r["group"]) == (name, prompts, group)}
            ratios = [f"{by[w]['step'] / by['nvfp4']['step']:.2f}x" if {w, "nvfp4"} <= set(by) else "" for w in ("bf16", "nf4")]
            cells = " | ".join(f"{by[w]['step']:.2f}" if w in by else "" for w in args.weights)
            print(f"| {name} | {prompts} x {group} | {cells} | {' | '.join(ratios)} | {next(iter(by.values()))['busy']:.0%} |")


def plot_step(result, plt):
    sizes = list(dict.fromkeys((r["prompts"], r["group"]) for r in result["rows"]))[-2:]
    figure, axes = plt.subplots(1, len(sizes), figsize=(5.5 * len(sizes), 4.2), layout="constrained", squeeze=False)
    for axis, (prompts, group) in zip(axes[0], sizes):
        rows = sorted((r for r in result["rows"] if (r["prompts"], r["group"]) == (prompts, group)), key=lambda r: len(r["model"]))
        bottom = [0.0] * len(rows)
        for phase, color in (("rollout", "tab:purple"), ("logprobs", "tab:cyan"), ("update", "tab:gray")):           # a random reward takes no time
            axis.bar(range(len(rows)), [r[phase] for r in rows], bottom=bottom, label=phase, color=color)
            bottom = [b + r[phase] for b, r in zip(bottom, rows)]
        axis.set_xticks(range(len(rows)), [f"{r['model'].split('-')[-1]}\n{LABELS[r['weights']]}" for r in rows])
        axis.set(title=f"one RL step: {prompts * group} completions of {rows[0]['length']:.0f} tokens", ylabel="seconds")
    axes[0][0].legend(frameon=False)
    return figure


def main():
    p = Parser(__doc__)
    p.add_argument("what", choices=["formats", "kernels", "rollout", "step"])
    p.add_argument("--model", nargs="+", help="formats: a model's folder or name; else shapes: " + ", ".join(SHAPES))
    p.add_argument("--weights", nargs="+", choices=["nvfp4", "bf16", "nf4", "mxfp4"], help="rollout, step: default nvfp4 bf16 nf4")
    p.add_argument("--ranks", nargs="*", type=int, help="rollout: other LoRA ranks for the first model, NVFP4 (default 16 128); given none, no busy slots either")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu", help="default: a GPU if there is one")
    p.add_argument("--out", default="results", help="folder for the results (default results)")
    try:
        args = p.parse_args()
        train_gsm8k.check_device(args.device)
        for option, takers in (("weights", ("rollout", "step")), ("ranks", ("rollout",))):
            if getattr(args, option) is not None and args.what not in takers:
                raise qerl.UserError(f"--{option}: {args.what} does not take it, only {' and '.join(takers)}")
        args.weights, args.ranks = args.weights or ["nvfp4", "bf16", "nf4"], [16, 128] if args.ranks is None else args.ranks
        for name in args.model or []:
            if args.what != "formats" and name not in SHAPES:
                raise qerl.UserError(f"--model {name}: no such shape; choose from {', '.join(SHAPES)}")
        bench, plot = {"formats": (bench_formats, None), "kernels": (bench_kernels, plot_kernels), "rollout": (bench_rollout, plot_rollout),
                       "step": (bench_step, plot_step)}[args.what]
        if args.what != "formats" and args.device != "cuda":
            print(f"on a CPU{'' if args.model else ', a tiny shape'}: these times mean nothing")
        gpu = torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-") if args.device == "cuda" else "cpu"
        folder = args.out if args.what == "formats" and args.model else f"{args.out}/{gpu}"       # formats: the same everywhere
        with train_gsm8k.creating(args.out):                                  # before the work, in case it cannot be
            os.makedirs(folder, exist_ok=True)
        for result in bench(args):                                            # each time there is more of it
            result = {"command": command_line(), **result, **environment(args.device)}
            if plot:
                keep_other_models(f"{folder}/{args.what}.json", result)
            train_gsm8k.atomic_write(f"{folder}/{args.what}.json", json.dumps(result, indent=1))
        if plot:
            save_figure(f"{folder}/{args.what}.png", plot, result)
        print(f"\nwritten to {folder}/{args.what}.json" + (" and .png" if plot else ""))
    except (qerl.UserError, OSError) as e:
        sys.exit(fail(str(e)))


def keep_other_models(path, result):
    """Add to a result what an earlier call measured of models that this call did not."""
    if os.path.exists(path):
        with open(path) as f:
            earlier = json.load(f)
        for key in {"rows", "means", "vllm", "busy"} & set(result):
            measured = {r["model"] for r in result[key]}
            result[key] = [r for r in earlier.get(key, []) if r.get("model") not in measured] + result[key]


if __name__ == "__main__":
    main()
