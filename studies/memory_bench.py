"""The memory of a GRPO step: of what it consists, its peak by phase.

bench.py memory runs these. Each model has a process of its own, which may take no more of the GPU
than a cap: PyTorch refuses what goes beyond. (What CUDA itself takes, about 0.5 GB a process, is
not PyTorch's and not counted.) All figures are in 10^9 bytes. On a CPU nothing is capped, and they are
the process's highest memory so far, which says nothing of the step.
"""
import contextlib
import gc
import multiprocessing
from dataclasses import dataclass, replace

import torch

import qerl
from harness.batches import Batch
from harness.instruments import Clock, peak_memory_gb
from harness.memory import cache_bytes, is_out_of_memory
from studies.random_models import random_model, random_prompts

# The most that a model may take, and its frozen weights alone, embeddings and output layer in BF16.
CAPS = {"Qwen2.5-7B": 12.0, "Qwen2.5-14B": 18.0, "Qwen2.5-32B": 32.0, "Qwen2.5-72B": 80.0}
WEIGHTS = {"Qwen2.5-7B": 5.9, "Qwen2.5-14B": 10.6, "Qwen2.5-32B": 20.7, "Qwen2.5-72B": 44.6}
PHASES = ("rollout", "logprobs", "update")


@dataclass
class MemorySettings:
    """What the memory of a step depends on; the result files state it as it is here."""
    weights: str = "nvfp4"
    lora_rank: int = 16
    group: int = 8                      # completions, all of one prompt
    prompt_tokens: int = 128
    new_tokens: int = 1024              # of each completion
    sigma: float = 1e-2                 # noise of the rollout

    @property
    def micro_tokens(self):
        """Tokens in a pass of the update: one completion's, which gives the lowest peak."""
        return self.prompt_tokens + self.new_tokens


# For a CPU, with the model "tiny".
SMALL = dict(group=2, prompt_tokens=8, new_tokens=12)


class Phases:
    """Peak memory and seconds of each phase: `with phases("rollout"): ...`."""

    def __init__(self, device):
        self.device = device
        self.clock = Clock(device)
        self.current = None             # the phase that began last
        self.peak = {}                  # 10^9 bytes that tensors took at most
        self.reserved = 0.0             # in all phases, with what PyTorch keeps for later tensors

    @contextlib.contextmanager
    def __call__(self, phase):
        self.current = phase
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with self.clock(phase):
            yield
        self.peak[phase] = peak_memory_gb(self.device)
        if self.device == "cuda":
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved() / 1e9)

    def measured(self):
        """What a row says of the phases."""
        seconds = {phase: self.clock.seconds[phase] for phase in self.peak}
        return {"peak_gb": dict(self.peak), "reserved_gb": self.reserved, "seconds": seconds}


def memory_now(device):
    """10^9 bytes of all tensors on the GPU; on a CPU the process's highest memory so far."""
    if device == "cuda":
        return torch.cuda.memory_allocated() / 1e9
    return peak_memory_gb(device)


def release_memory(device):
    """Give back what the step before has left, so that the next starts from the same memory."""
    gc.collect()
    if qerl.kernels:
        qerl.kernels.attention_scratch.cache_clear()
    if device == "cuda":
        torch.cuda.empty_cache()


def limit_memory(cap, device):
    """Let PyTorch take `cap` 10^9 bytes of the GPU at most; None: all there is.

    Comes before anything that asks for PyTorch's memory, for which CUDA must have been started.
    """
    if device == "cuda":
        torch.cuda.init()
    if device == "cuda" and cap is not None:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap * 1e9 / whole))


def under(cap):
    return "without a cap" if cap is None else f"under {cap:g} GB"


def total_gb(tensors):
    return sum(t.nbytes for t in tensors) / 1e9


def cache_gb(model, settings):
    """The KV cache of all completions at their full length."""
    tokens = settings.group * (settings.prompt_tokens + settings.new_tokens)
    return tokens * cache_bytes(model) / 1e9


def load(name, settings, device):
    """(random model of the shape `name`, its optimiser, what the two take: {part: 10^9 bytes}).

    The optimiser has made its state, and the gradients are counted, which are as large as LoRA.
    """
    model = random_model(name, settings.weights, settings.lora_rank, device)
    model.recompute_in_backward()
    release_memory(device)
    trained = list(qerl.trainable(model).values())
    lora = total_gb(trained)
    weights = memory_now(device) - lora

    optimizer = torch.optim.AdamW(trained, 1e-6, weight_decay=0.0)
    for p in trained:                   # a first step with gradients of zero, which changes nothing
        p.grad = torch.zeros_like(p)
    gradients = total_gb(p.grad for p in trained)
    optimizer.step()
    optimizer.zero_grad()
    moments = [t for state in optimizer.state.values() for t in state.values()]
    parts = {
        "weights": weights,
        "embeddings": total_gb([model.embedding, model.lm_head]),      # part of the weights
        "lora": lora,
        "optimizer": total_gb(moments),
        "gradients": gradients,
    }
    return model, optimizer, parts


def what_is_left(peaks, parts, cache):
    """{phase: its peak minus the parts that live in it}: activations and temporary tensors."""
    always = parts["weights"] + parts["lora"] + parts["optimizer"]
    more = {"rollout": cache, "logprobs": 0.0, "update": parts["gradients"]}
    return {phase: max(0.0, peak - always - more[phase]) for phase, peak in peaks.items()}


def phase_without_memory(work, phases):
    """Run work(); returns the phase in which memory ran out, or None if it sufficed."""
    try:
        work()
    except RuntimeError as e:
        if not is_out_of_memory(e):
            raise
        return phases.current
    return None


# --------------------------------------------------------------------------------------------------
# A whole step

def make_batch(model, prompt, rollout):
    """The completions of one prompt with random rewards."""
    group = len(rollout.tokens)
    rewards = torch.rand(1, group, device=model.device)
    advantages = qerl.group_advantages(rewards).flatten()
    batch = Batch([prompt] * group, rollout.tokens, rollout.length, rollout.logprobs, advantages,
                  rollout.mask)
    batch.weights = qerl.token_weights(batch.mask)
    return batch


def update(model, optimizer, batch, micro_tokens):
    """One optimiser step on all completions; returns the gradient's norm."""
    for micro_batch in batch.micro_batches(micro_tokens):
        logprobs = qerl.token_logprobs(
            model, micro_batch.prompts, micro_batch.tokens, micro_batch.length)
        loss, _ = qerl.policy_loss(
            logprobs, micro_batch.old_logprobs, micro_batch.advantages, micro_batch.weights)
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(qerl.trainable(model).values(), 0.2)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


def grpo_step(model, optimizer, settings, phases):
    """A GRPO step as train_gsm8k.train does it, on one prompt; every completion has all its tokens.

    Returns the gradient's norm.
    """
    prompt = random_prompts(model.config.vocab_size, 1, settings.prompt_tokens)[0]
    with phases("rollout"), qerl.adaptive_quantization_noise(model, settings.sigma):
        rollout = qerl.generate(model, [prompt], settings.new_tokens, settings.group)
    batch = make_batch(model, prompt, rollout)
    with phases("logprobs"):
        batch.old_logprobs = batch.logprobs_under(model, settings.micro_tokens)
    with phases("update"):
        return update(model, optimizer, batch, settings.micro_tokens)


def step_rows(name, cap, settings, device):
    """The one row of a model: what a step takes, or the phase in which the cap was too low.

    A step of few tokens goes first, which compiles the kernels.
    """
    row = {"model": name, "cap_gb": cap}
    phases = Phases(device)
    print(f"{name}: a step {under(cap)}", flush=True)

    def whole_step():
        limit_memory(cap, device)
        with phases("loading"):
            model, optimizer, parts = load(name, settings, device)
        row.update((f"{part}_gb", size) for part, size in parts.items())
        row["cache_gb"] = cache_gb(model, settings)
        few = replace(settings, new_tokens=min(16, settings.new_tokens))
        phases.current = "warm-up"
        grpo_step(model, optimizer, few, Phases(device))
        release_memory(device)
        row["gradient_norm"] = grpo_step(model, optimizer, settings, phases)
        steps = {phase: peak for phase, peak in phases.peak.items() if phase in PHASES}
        row["rest_gb"] = what_is_left(steps, parts, row["cache_gb"])

    failed = phase_without_memory(whole_step, phases)
    row.update(phases.measured())
    if failed:
        row["out_of_memory"] = failed
    yield row


# --------------------------------------------------------------------------------------------------
# A process of its own

def send_rows(sender, rows_of, *args):
    for row in rows_of(*args):
        sender.send(row)


def in_own_process(rows_of, *args):
    """Yield what the generator rows_of(*args) yields in a process of its own, row by row.

    The process's end gives its memory back. If it fails, the last row is {"failed": how}, and its
    traceback stands on stderr.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=send_rows, args=(sender, rows_of, *args), daemon=True)
    process.start()
    sender.close()
    with contextlib.suppress(EOFError):            # the process has ended
        while True:
            yield receiver.recv()
    process.join()
    if process.exitcode:
        yield {"failed": f"its process ended with status {process.exitcode}"}


# --------------------------------------------------------------------------------------------------
# Tables and pictures

def outcome(row):
    """"fits", or why not."""
    if "failed" in row:
        return row["failed"]
    if "out_of_memory" in row:
        return f"out of memory {under(row['cap_gb'])} in phase {row['out_of_memory']}"
    return "fits" if row["cap_gb"] else "no cap"


def number(value, digits=1):
    return "" if value is None else f"{value:.{digits}f}"


def progress(row):
    """One line on a row that has just been measured."""
    peaks = [f"{phase} {peak:.1f}" for phase, peak in row.get("peak_gb", {}).items()]
    return f"{row['model']}: {outcome(row)}; peaks in GB: {', '.join(peaks) or 'none'}"


STEP_HEAD = ["model", "cap", "weights", "aimed at", "LoRA", "its optimiser and gradients", "KV cache",
             *(f"peak, {phase}" for phase in PHASES), "reserved", "s, " + " / ".join(PHASES),
             "outcome"]


def step_cells(row):
    """A line of the table of whole steps, in 10^9 bytes."""
    trained = None
    if "optimizer_gb" in row:
        trained = row["optimizer_gb"] + row["gradients_gb"]
    peaks = [number(row.get("peak_gb", {}).get(phase)) for phase in PHASES]
    seconds = [number(row.get("seconds", {}).get(phase)) for phase in PHASES]
    return [
        row["model"], number(row["cap_gb"], 0), number(row.get("weights_gb"), 2),
        number(WEIGHTS.get(row["model"])), number(row.get("lora_gb"), 2), number(trained, 2),
        number(row.get("cache_gb"), 2), *peaks, number(row.get("reserved_gb")), " / ".join(seconds),
        outcome(row),
    ]


def plot_memory(result, plt):
    """Stacked bars of the whole steps."""
    figure, axis = plt.subplots(figsize=(2.5 + 1.4 * len(result["rows"]), 5.2), layout="constrained")
    draw_steps(axis, result["rows"])
    axis.set_ylim(bottom=0)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    return figure


def stack_of(row, phase):
    """{label: 10^9 bytes} of what makes a phase's peak, from below."""
    return {
        "4-bit weights": row["weights_gb"] - row["embeddings_gb"],
        "embeddings and output layer, BF16": row["embeddings_gb"],
        "LoRA": row["lora_gb"],
        "optimiser": row["optimizer_gb"],
        "gradients": row["gradients_gb"] if phase == "update" else 0.0,
        "KV cache": row["cache_gb"] if phase == "rollout" else 0.0,
        "activations and the rest": row["rest_gb"][phase],
    }


STACK = ["tab:green", "yellowgreen", "tab:orange", "tab:red", "tab:pink", "tab:purple", "lightgray"]


def draw_steps(axis, rows):
    """Three bars a model, a phase each; the cap as a line over them."""
    steps = [row for row in rows if "weights_gb" in row and row.get("rest_gb")]
    steps.sort(key=lambda row: row["weights_gb"])
    for i, row in enumerate(steps):
        for k, phase in enumerate(PHASES):
            bottom = 0.0
            for (label, size), color in zip(stack_of(row, phase).items(), STACK):
                named = {"label": label} if i == k == 0 else {}
                axis.bar(4 * i + k, size, bottom=bottom, color=color, width=0.85, **named)
                bottom += size
        if row["cap_gb"]:
            axis.plot([4 * i - 0.6, 4 * i + 2.6], [row["cap_gb"]] * 2, "k--", linewidth=1)
            axis.annotate(f"cap {row['cap_gb']:g}", (4 * i + 1, row["cap_gb"]), (0, 3), ha="center",
                          textcoords="offset points", fontsize=8)
    places = [4 * i + k for i in range(len(steps)) for k in range(3)]
    names = [phase for _ in steps for phase in PHASES]
    axis.set_xticks(places, names, fontsize=8, rotation=45, ha="right")
    for i, row in enumerate(steps):
        axis.annotate(row["model"], (4 * i + 1, 0), (0, 3), ha="center", fontsize=8, color="black",
                      textcoords="offset points", bbox={"color": "white", "alpha": 0.7, "pad": 1})
    axis.margins(y=0.1)
    missing = [row["model"] for row in rows if row not in steps]
    note = f"; not shown: {', '.join(dict.fromkeys(missing))}" if missing else ""
    axis.set(ylabel="GB (10⁹ bytes)", title=f"peak of a GRPO step, by phase{note}")
