"""The machine: what its memory has room for; what a run takes of it, in seconds and bytes."""
import contextlib
import os
import platform
import re
import sys
import time
from dataclasses import dataclass

import torch
import transformers

import qerl

try:
    import resource
except ImportError:                         # Windows knows it, too, by another name
    resource = None


HOST = "/proc/meminfo"                         # of Linux: "MemAvailable:   123 kB"
UNKNOWN = 4e9                                  # bytes taken to be free where nobody says


def free_memory(device):
    """Bytes that this process may still take on a device (a torch.device): of a GPU or the host.

    Processes that torchrun has started share the host's equally.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if not os.path.exists(HOST):               # macOS, Windows
        return UNKNOWN
    with open(HOST) as f:
        available = next(int(line.split()[1]) * 1024 for line in f if "MemAvailable" in line)
    return available // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def is_out_of_memory(error):
    """Is this RuntimeError PyTorch's way to say that memory ran out, on a GPU or a CPU?"""
    return bool(re.search("out of memory|can't allocate memory", str(error)))


def keep_decoded(model, collect=list, share=0.5, small=1e8):
    """Replace 4-bit weights that no kernel multiplies by their values, if these take `share` at most.

    `share` is of the free memory. The values, and so all results, are the same to the last bit. A
    PackedWeight that stays is decoded anew for each token of a rollout; those of a small model stay,
    so that one can watch them being decoded. collect: Ranks.collect, so that all ranks do the same.
    """
    dtype = model.embedding.dtype
    layers = [
        layer for layer in model.quantized_layers()
        if isinstance(layer.weight, qerl.PackedWeight)
        and layer.weight.format is not qerl.FORMATS["bf16"]
    ]
    # As many weights as scales times those that share one.
    count = sum(layer.weight.parts[1].numel() * layer.weight.format.block for layer in layers)
    size = count * dtype.itemsize
    free = free_memory(model.device)
    if size < small:
        return
    fits = all(collect([size <= share * free]))
    what = "are kept decoded" if fits else "are decoded anew for each token, which is slow:"
    print(f"the 4-bit weights {what}, {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    for layer in layers if fits else []:
        weight = layer.weight.dequantize(dtype)
        layer.weight = qerl.PackedWeight(qerl.FORMATS["bf16"], *qerl.keep_16_bit(weight))


@dataclass(frozen=True)
class Fit:
    """How much is computed at once. What the flags leave open was found by the free memory."""
    slots: int                     # sequences decoded at once
    micro_tokens: int              # tokens in one pass of an update


def find_fit(model, settings, longest, saved):
    """The Fit of a run; longest: tokens of a prompt and its completion.

    A resumed run (saved: run.read_saved, or None) keeps its own unless the flags are given: on the
    first number the random numbers depend, on the second the order of sums. On a GPU it also chooses
    the blocks whose activations are kept.
    """
    before = saved[0] if saved else {}
    slots = settings.slots or before.get("slots") or slots_that_fit(model, longest)
    micro_tokens = (
        settings.micro_tokens or before.get("micro_tokens") or micro_tokens_that_fit(model))
    if model.recompute_blocks and not settings.shard:
        keep_activations(model, micro_tokens)
    return Fit(slots, micro_tokens)


def cache_bytes(model):
    """Bytes of one token's keys and values in the KV cache, those of all layers."""
    heads = model.config.num_key_value_heads
    values = 2 * len(model.blocks) * heads * model.blocks[0].attention.head_dim
    return values * model.embedding.dtype.itemsize


def slots_that_fit(model, longest, most=256, share=0.7):
    """How many sequences of up to `longest` tokens the KV cache may hold at once, `most` at most.

    If all grow to that length the cache takes `share` of the free memory.
    """
    sequence = longest * cache_bytes(model)
    free = free_memory(model.device)
    slots = max(1, min(most, int(share * free / sequence)))
    if slots < most:
        print(f"--slots {slots}: so many sequences of {longest} tokens, {sequence / 1e9:.2g} GB each, "
              f"fit into {share:.0%} of {free / 1e9:.1f} GB of free memory")
    return slots


def room_for_updates(model, share=0.8):
    """How many activations there is room for in `share` of the free memory.

    The optimiser's two moments, the gradients and 2,048 tokens' logits have to fit, too.
    """
    itemsize = model.embedding.dtype.itemsize
    trained = 3 * sum(p.nbytes for p in qerl.trainable(model).values())
    free = free_memory(model.device) - trained - 3 * 2048 * model.config.vocab_size * itemsize
    return share * free / itemsize


def activations(model, recomputed):
    """How many an update takes a token if so many blocks are recomputed in backward.

    Fitted to measured peaks of 1.5B, 3B, 7B and 32B: each block's input, what the blocks that are
    not recomputed keep for backward, and what one recomputed block does.
    """
    d = model.config.hidden_size
    wide = model.config.intermediate_size
    blocks = len(model.blocks)
    kept = (blocks - recomputed) * (5 * d + 3 * wide)
    return kept + blocks * d + (10 * d + 5 * wide if recomputed else 0)


def micro_tokens_that_fit(model, most=16384, least=512, share=0.8):
    """How many tokens a pass of an update may have, `most` at most."""
    values = activations(model, model.recompute_blocks)
    room = room_for_updates(model, share)
    tokens = max(least, min(most, int(room / values)))
    if tokens < most:
        itemsize = model.embedding.dtype.itemsize
        print(f"--micro-tokens {tokens}: so many tokens, {values * itemsize / 1e6:.2g} MB each, fit into "
              f"{max(room, 0) * itemsize / 1e9:.1f} GB")
    return tokens


def keep_activations(model, tokens):
    """Recompute in backward only as many blocks as memory asks for, with `tokens` tokens a pass."""
    room = room_for_updates(model)
    recomputed = 0
    while recomputed < len(model.blocks) and tokens * activations(model, recomputed) > room:
        recomputed += 1
    model.recompute_in_backward(recomputed)


# --------------------------------------------------------------------------------------------------
# What a run takes

class Clock:
    """Seconds spent in each phase of a step: `with clock("rollout"): ...`."""

    def __init__(self, device):
        self.device = torch.device(device)
        self.restart()

    def restart(self):
        self.seconds = {}
        self.began = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, phase):
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def since_restart(self):
        return time.perf_counter() - self.began


def peak_memory_gb(device):
    """The most memory in use so far, in 10^9 bytes: of the GPU, or of the process on a CPU.

    0 on Windows, which Python does not ask.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    if resource is None:
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def environment(device):
    """Date, hardware and versions, as every file of results states them."""
    hardware = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if torch.device(device).type == "cuda":
        hardware = torch.cuda.get_device_name()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": qerl.kernels and qerl.kernels.triton.__version__,
    }
