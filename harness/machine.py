"""The machine: what its memory has room for; what a run will take of it, and what it takes."""
import contextlib
import math
import os
import platform
import time
from dataclasses import replace

import torch
import transformers

import qerl
from harness import loading
from harness.ranks import Ranks

try:
    import triton
except ImportError:                            # macOS, Windows
    triton = None

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
    with open(HOST, "rb") as f:
        available = next(int(line.split()[1]) * 1024 for line in f if b"MemAvailable" in line)
    return available // Ranks().here


def keep_decoded(model, engine, small=1e8):
    """Replace 4-bit weights that no kernel multiplies by their values, if there is room.

    They may take half of the free memory. The values, and so all results, are the same to the last
    bit. A PackedWeight that stays is decoded anew for each token of a rollout; those of a small model
    stay, so that one can watch them being decoded.
    """
    dtype = model.embedding.dtype
    layers = [
        layer for layer in model.quantized_layers() if isinstance(layer.weight, qerl.PackedWeight)]
    # As many weights as scales times those that share one.
    size = dtype.itemsize * sum(
        layer.weight.parts[1].numel() * layer.weight.format.block for layer in layers)
    if size < small:
        return
    free = free_memory(model.device)
    fits = 2 * size <= free
    what = "are kept decoded" if fits else "are decoded anew for each token, which is slow:"
    print(f"the 4-bit weights {what}, {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    for layer in layers if fits else []:
        in_16_bits = engine.FORMATS["bf16"]
        values = in_16_bits.quantize(layer.weight.dequantize(dtype))
        layer.weight = engine.PackedWeight(in_16_bits, *values)


def keep_values(model, engine):
    """Keep bfloat16 values beside the codes that a kernel multiplies, in a quarter of the free memory.

    Training, exact sampling and rollouts of many slots use them (fp4_kernels.TiledWeight.for_rows).
    With many rows a product takes longer than reading 16 bits a weight, and decoding would only add to
    it. On a GPU values, also those of --weights bf16, get room for LoRA beside them (fast.with_room).
    """
    if engine is qerl:                         # which multiplies by codes alone
        return
    dtype = model.embedding.dtype
    layers = []
    for layer in model.quantized_layers():
        if not isinstance(layer.weight, qerl.PackedWeight):
            layers.append(layer)
        elif model.device.type == "cuda" and layer.use_adapter and layer.weight.format.table is None:
            layer.weight = engine.with_room(layer, dtype)
    size = 16 * sum(layer.weight.words.numel() for layer in layers)    # bytes; a word has 8 weights
    free = free_memory(model.device)
    if not layers or 4 * size > free:
        return
    print(f"the 4-bit weights are kept in bfloat16, too, {size / 1e9:.1f} of {free / 1e9:.1f} GB free, for "
          "training and for rollouts of more than 128 slots")
    for layer in layers:
        layer.weight.values = engine.with_room(layer, dtype)


def plan(settings, config, free, sequence, completions, recomputed, itemsize=2):
    """What `free` bytes hold -> (slots, micro_tokens, bytes for activations, whether the cache stays).

    free: beside the weights and all that is trained; sequence: bytes of the longest completion's cache;
    completions: of a step; recomputed: blocks; itemsize: bytes of an activation. Flags win. By default
    all completions of a step are decoded at once, and 256 of an evaluation if a step has fewer; or as
    many as 0.7 of the memory holds. If a step's cache takes at most a quarter, it stays during the
    updates, so that a rollout's recorded graphs serve the next one, too. A pass has up to 16,384
    tokens, or up to 32,768 if no block need be recomputed.
    """
    slots = settings.slots or max(1, min(max(256, completions), int(0.7 * free / sequence)))
    cache = sequence * min(slots, completions)
    stays = 4 * cache <= free
    logits = 3 * 2048 * config.vocab_size * itemsize                             # of 2,048 tokens
    room = 0.8 * (free - logits) - stays * cache

    def fit(most, recomputed):
        values = activations(config, config.num_hidden_layers, recomputed)
        if settings.engine == "plain":
            # Rows are padded, at most to four times the tokens (batches.cut_rows). Whole logits are
            # there, some four times in float32.
            values = 4 * (values + 8 * config.vocab_size)
        return min(most, int(room / itemsize / values))
    micro_tokens = settings.micro_tokens or max(512, fit(16384, recomputed), fit(32768, 0))
    return slots, micro_tokens, room, stays


def fitted(settings, model, longest, completions, engine):
    """The settings with the slots and micro_tokens that memory holds, where no flag gave them: see plan.

    longest: tokens of a prompt and its completion; completions: of a step, in this process. A resumed
    run keeps its own: on the first number the random numbers depend, on the second the order of sums.
    This also chooses the blocks whose activations are kept, and whether the sampler is.
    """
    # The optimiser's two moments and the gradients are still to come.
    trained = 3 * sum(p.nbytes for p in qerl.trainable(model).values())
    free = free_memory(model.device) - trained
    sequence = longest * sum(kv.nbytes for kv in engine.KVCache(model, 1, 1).layers)
    itemsize = model.embedding.dtype.itemsize
    recomputed = getattr(model, "recompute_blocks", 0)                 # qerl.py recomputes none
    slots, micro_tokens, room, stays = plan(
        settings, model.config, free, sequence, completions, recomputed, itemsize)
    print(f"--slots {slots} --micro-tokens {micro_tokens}, with {free / 1e9:.1f} GB free")
    if recomputed and not settings.shard:
        keep_activations(model, micro_tokens, room / itemsize)
    model.keep_sampler = stays and not settings.shard
    return replace(settings, slots=slots, micro_tokens=micro_tokens)


def activations(config, blocks, recomputed):
    """How many an update takes a token if so many of the blocks are recomputed in backward.

    Fitted to measured peaks of 1.5B, 3B, 7B and 32B: each block's input, what the blocks that are
    not recomputed keep for backward, and what one recomputed block does.
    """
    d = config.hidden_size
    wide = config.intermediate_size
    kept = (blocks - recomputed) * (5 * d + 3 * wide)
    return kept + blocks * d + (10 * d + 5 * wide if recomputed else 0)


def keep_activations(model, tokens, room):
    """Recompute in backward only as many blocks as memory asks for.

    tokens: of a pass; room: for how many activations.
    """
    blocks = len(model.blocks)
    recomputed = 0
    while recomputed < blocks and tokens * activations(model.config, blocks, recomputed) > room:
        recomputed += 1
    model.recompute_in_backward(recomputed)


# --------------------------------------------------------------------------------------------------
# What a run will take, by its model's config alone
#
# The formulas count the large parts. The constants are fitted: DECODE and the shares of bandwidth
# and FLOP/s to results/h200/rollout.json and the rollouts of 7B on an H100 (results/README.md),
# TOUCHED to log-probabilities of 1.5B, 3B and 7B there, PASS to runs of 0.5B (results/learning).

GPUS = {                       # bytes; bytes/s, 0.8 of the data sheet's; 16-bit FLOP/s, 0.7 of it
    "H100": (80e9, 2.7e12, 690e12),
    "H200": (141e9, 3.8e12, 690e12),
    "A100": (80e9, 1.6e12, 218e12),            # this one and the next: the same shares, unmeasured
    "RTX 4090": (24e9, 0.8e12, 115e12),
}
DECODE = 45e-6                 # seconds of a block in a decode step, beside reading and multiplying
PASS = 1.8e-3                  # seconds in which the host starts, or records, a block of a pass
TOUCHED = 4                    # times that a pass reads or writes an activation
PROMPT = 128                   # tokens of a prompt


def estimate(config, settings, gpu, length, taught=1.0):
    """(bytes of memory, seconds of a step) that a run takes of a GPU, one of GPUS.

    The bytes are the least, with all blocks recomputed; the step is as fast as the memory allows.
    length: tokens of a completion on average; taught: the fraction of the groups that is trained on.
    Not counted: attention's products, which are few up to some thousand tokens, evaluations, and that
    exact steps need no log-probabilities before.
    """
    memory, bandwidth, speed = gpu
    d = config.hidden_size
    wide = config.intermediate_size
    blocks = config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or d // config.num_attention_heads
    q = config.num_attention_heads * head_dim
    kv = config.num_key_value_heads * head_dim
    block = 2 * d * (q + kv) + 3 * d * wide                  # weights: q and o, k and v, the MLP's
    lora = settings.lora_rank * (4 * d + 2 * (q + kv) + 3 * (d + wide))
    output = config.vocab_size * d
    # 4 bits, and in the kernels' tiles 8 more for each 16 weights' scale; NF4 is decoded, see keep_decoded
    frozen = blocks * block * (9 / 16 if settings.weights in ("nvfp4", "mxfp4") else 2)
    multiplied = 2 * (blocks * (block + lora) + output) / speed                # seconds a token

    # Memory: what is trained has float32, a gradient and AdamW's two moments.
    lasting = frozen + 2 * output * (2 - config.tie_word_embeddings) + 16 * blocks * (lora or block)
    completions = settings.prompts * settings.group
    cached = 4 * blocks * kv                                 # a token's keys and values
    sequence = cached * (PROMPT + settings.max_new_tokens)
    slots, micro_tokens, room, _ = plan(
        settings, config, memory - lasting, sequence, completions, blocks)
    slots = min(completions, max(settings.group, slots))
    # In a pass: a block's decoded weights and 2,048 tokens' logits; the activations of its tokens.
    in_pass = lasting + 2 * block + 4096 * config.vocab_size
    most = 2 * activations(config, blocks, 0)
    least = 2 * activations(config, blocks, blocks)
    tokens = completions * length + settings.prompts * PROMPT
    update = in_pass + least * min(micro_tokens, tokens / settings.updates)
    needed = max(lasting + slots * sequence, update)

    # Rollout: until all have had their slots, then with ever fewer slots until the longest ends.
    full = completions * length / slots                      # decode steps
    last = settings.max_new_tokens - length
    a_step = (frozen + 2 * output) / bandwidth + blocks * DECODE
    a_token = multiplied + cached * (PROMPT + length / 2) / bandwidth
    rollout = (full + last) * a_step + (full + last / 4) * slots * a_token
    rollout += math.log2(slots) / 2 * blocks * PASS          # a CUDA graph each time half are idle
    # Passes: log-probabilities before, of the reference; forward, backward, forward again.
    kept = min(1, room / micro_tokens / most)                # of the activations
    passes = 4 - 1 / settings.updates + (settings.beta > 0) - kept
    one_pass = taught * tokens * (multiplied + TOUCHED * most / bandwidth)
    return needed, rollout + passes * (one_pass + settings.updates * blocks * PASS)


def forecast(settings, processes):
    """The line that says what a run will take of --gpu, or of the GPU here, or else of an H100."""
    model = settings.model
    config = loading.read_config(model)
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    name = settings.gpu or next((name for name in GPUS if name in here), "H100")
    memory, *speeds = GPUS[name]
    if here and not settings.gpu:
        memory = free_memory(torch.device("cuda"))
    length = settings.max_new_tokens // 2
    taught = 1 if settings.beta else 0.5
    share = replace(settings, prompts=settings.prompts / processes)
    needed, step = estimate(config, share, (memory, *speeds), length, taught)
    minutes = settings.steps * step / 60
    return (f"{model} needs {needed / 1e9:.1f} of {memory / 1e9:.0f} GB and uses more if it can. "
            f"{settings.steps} steps of {step:.1f} s take about {minutes:.0f} minutes on an {name}, if "
            f"completions have {length} tokens, half of --max-new-tokens, and {taught:.0%} of the groups are "
            "trained on")


# --------------------------------------------------------------------------------------------------
# What a run takes

class Clock:
    """Seconds spent in each phase of a step: `with clock("rollout"): ...`."""

    def __init__(self, device):
        self.device = device
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


def environment(device):
    """Date, hardware and versions, as every file of results states them."""
    hardware = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if torch.device(device).type == "cuda":
        hardware = torch.cuda.get_device_name()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": triton and triton.__version__,
    }
