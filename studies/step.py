"""An RL step on random weights: its seconds and its memory by phase, on one GPU or several.

The step is that of train_gsm8k.train, but with random prompts and rewards, one update and no
reference policy. `step_rows` gives the rows of bench.py step, `memory_row` one of bench.py memory.
All memory is in 10^9 bytes; on a CPU it is the process's highest so far, which says nothing.
"""
import contextlib
import gc
import math
from dataclasses import replace
from functools import partial

import torch

import qerl
from harness.batches import make_batch
from harness.layers import SharedPasses
from harness.machine import Clock, cache_bytes, keep_activations, peak_memory_gb
from harness.ranks import Ranks
from methods import jetrl
from studies.plots import plot_bars, plot_lines
from studies.random_models import RandomWeights, ShardedRandomWeights, random_model, random_prompts
from studies.study import grouped
from train_gsm8k import Samples, Settings, make_optimizer, update

# The most that a model may take in bench.py memory.
CAPS = {"Qwen2.5-7B": 12.0, "Qwen2.5-14B": 18.0, "Qwen2.5-32B": 32.0, "Qwen2.5-72B": 80.0}
PHASES = ("rollout", "logprobs", "update", "waiting", "exchange")  # the second in older results alone


class Phases(Clock):
    """A clock that also notes the most memory of each phase."""

    def __init__(self, device):
        super().__init__(device)
        self.peak = {}

    @contextlib.contextmanager
    def __call__(self, phase):
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with super().__call__(phase):
            yield
        self.peak[phase] = max(self.peak.get(phase, 0.0), peak_memory_gb(self.device))


def release_memory(device):
    """Give back what was used before, so that the next measurement starts from the same memory."""
    gc.collect()
    if qerl.kernels:
        qerl.kernels.attention_scratch.cache_clear()
    if device == "cuda":
        torch.cuda.empty_cache()


def device_memory_gb():
    """Memory of the GPU in use now, by the driver's count, with what PyTorch keeps; 0 without one."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def limit_memory(cap, device):
    """Let PyTorch take `cap` 10^9 bytes of the GPU at most; None: all there is."""
    if device == "cuda" and cap is not None:
        torch.cuda.init()
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap * 1e9 / whole))


# --------------------------------------------------------------------------------------------------
# A step

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
    """Cuts completions at these lengths, as random weights never end one."""

    def __init__(self, lengths, model, *args):
        super().__init__(model, *args)
        self.limit[:len(lengths)] = lengths.to(self.limit.device)


class TimedRanks:
    """The Ranks of an update of several processes, whose exchange has phases of its own."""

    def __init__(self, ranks, phases):
        self.ranks = ranks
        self.phases = phases

    def add_gradients(self, trained):
        with self.phases("waiting"):            # for the slowest process
            self.ranks.total(torch.zeros(1, device=self.phases.device))          # wait for all
        with self.phases("exchange"):
            self.ranks.add_gradients(trained)


def take_step(model, optimizer, scaler, lengths, settings, algo, ranks):
    """One step of train_gsm8k.train -> {phase: seconds, "step": their sum, ...}, and the Phases.

    The rewards are random and there is one update, for which the step needs no log-probabilities
    before. lengths: int64, of this process's completions. Of several processes the figures are means,
    and the step's seconds are those of the slowest.
    """
    asked = random_prompts(model.config.vocab_size, len(lengths) // settings.group,
                           prompt_tokens(settings.device))
    phases = Phases(model.device)
    ranks.total(torch.zeros(1, device=model.device))                     # wait for all
    with phases("rollout"), algo.adaptive_quantization_noise(model, settings.sigma_start, None):
        rollout = qerl.generate(model, asked, settings.max_new_tokens, settings.group,
                                slots=settings.slots, sampler_class=partial(CutSampler, lengths))
    with phases("reward"):
        rewards = torch.rand(len(asked), settings.group, device=model.device)
        samples = Samples([{"prompt": prompt} for prompt in asked], rollout, None, rewards, rewards)
        advantages = qerl.group_advantages(rewards)
        batch = make_batch(samples, advantages, algo, settings, ranks)
    timed = TimedRanks(ranks, phases) if ranks.count > 1 else ranks
    with phases("update"):
        update(algo, model, batch, optimizer, scaler, settings, timed)
    for phase in PHASES[-2:]:           # both are part of the update
        phases.seconds["update"] -= phases.seconds.get(phase, 0.0)
    return ranks.join({
        **phases.seconds,
        "step": sum(phases.seconds.values()),
        "length": rollout.length.float().mean().item(),
        "peak_memory_gb": max(phases.peak.values()),
        **getattr(algo, "measured", {}),
    }), phases


def median_step(steps):
    """The step, a dict, whose seconds are the median; of an even number the slower of the two."""
    return sorted(steps, key=lambda step: step["step"])[len(steps) // 2]


def prompt_tokens(device):
    return 128 if device == "cuda" else 8


def settings_for(device, **changed):
    """The Settings of the steps that are measured; small ones for a CPU."""
    if device != "cuda":
        changed["max_new_tokens"] = 12
    usual = {"slots": 256, "micro_tokens": 16384, "updates": 1, "lr": 1e-6, "device": device}
    return Settings(**{**usual, **changed})


def step_rows(name, weights, sizes, settings, repeats=1, shard=False, cut=True):
    """A row for each size (prompts of all processes, completions of each).

    weights: a format, or nvfp4-fp8, which is --method jetrl:training. repeats: the step is timed so
    often, and the median one counts. shard: cut the weights over the processes. cut: completions
    have lengths like those of GSM8K's solutions; else all have settings.max_new_tokens.
    """
    device = settings.device
    ranks = Ranks()                    # this model's own: with --shard it holds on to the model
    stored = ShardedRandomWeights if shard else RandomWeights
    model = random_model(name, weights.removesuffix("-fp8"), settings.lora_rank, device, stored)
    if shard:
        ranks.serve = SharedPasses(model, ranks).serve
    if device == "cuda":
        model.recompute_in_backward()
    algo = qerl
    if weights.endswith("-fp8"):
        algo = jetrl.Neighbour(settings, "training")
        algo.prepare(model, None, None, None)
    if device == "cuda" and not shard:             # blocks recompute only as memory asks for
        keep_activations(model, settings.micro_tokens)
    optimizer, scaler = make_optimizer(model, settings)
    for prompts, group in sizes:
        own = replace(settings, group=group)
        torch.manual_seed(ranks.rank)              # the ranks have prompts and samples of their own
        lengths = torch.full((prompts // ranks.count * group,), settings.max_new_tokens)
        if cut:
            lengths = cut_lengths(len(lengths), settings.max_new_tokens, ranks)
        step = partial(take_step, model, optimizer, scaler, lengths, own, algo, ranks)
        if device == "cuda":
            step()                                 # the first step of a size compiles its kernels
        median = median_step([step()[0] for _ in range(repeats)])
        yield {"model": name, "weights": weights, "processes": ranks.count, "prompts": prompts,
               "group": group, **median, "device_memory_gb": device_memory_gb()}


def plot_step(result, plt):
    """Seconds by phase of the two largest sizes, a bar a model and format."""
    contents = {}
    for (prompts, group), rows in list(grouped(result["rows"], "prompts", "group").items())[-2:]:
        bars = contents[f"one RL step: {prompts * group} completions"] = {}
        for row in sorted(rows, key=lambda row: len(row["model"])):
            name = f"{row['model'].split('-')[-1]}\n{row['weights']}"
            bars[name] = {phase: row[phase] for phase in PHASES if row.get(phase, 0.0) > 1e-3}
    return plot_bars(plt, contents, "seconds")


# --------------------------------------------------------------------------------------------------
# Several processes

def speed_ups(rows):
    """A line a row: completions a second, and how many times those of one process (None without one).

    shared: "each" has as many prompts for every process, "all" as many for all together.
    """
    for (model, weights), same in grouped(rows, "model", "weights").items():
        fewest = min(row["prompts"] for row in same)
        alone = [row["prompts"] / row["step"] for row in same if row["processes"] == 1]
        for row in same:
            speed = row["prompts"] / row["step"]
            yield {
                "model": f"{model}, {weights}",
                "processes": row["processes"],
                "completions": row["prompts"] * row["group"],
                "shared": "each" if row["prompts"] == fewest * row["processes"] else "all",
                "completions/s": speed * row["group"],
                "times one": speed / alone[0] if alone else None,
            }


def plot_scaling(result, plt):
    points = []
    for line in speed_ups(result["rows"]):
        title = f"{line['model']}: an RL step"
        count = line["processes"]
        points.append((title, "ideal", count, count))
        for shared in [line["shared"]] if count > 1 else ("each", "all"):
            points.append((title, f"as many completions for {shared}", count,
                           line["times one"] or math.nan))
    return plot_lines(plt, points, "GPUs", "completions per second, over one GPU's")


# --------------------------------------------------------------------------------------------------
# Memory

def total_gb(tensors):
    return sum(t.nbytes for t in tensors) / 1e9


def memory_row(name, settings):
    """What a step takes on one prompt, whose completions all have their full length.

    A step of few tokens goes before: it compiles the kernels, and the optimiser makes its state.
    rest_gb: activations and temporary tensors.
    """
    device = settings.device
    limit_memory(CAPS.get(name), device)
    model = random_model(name, settings.weights, settings.lora_rank, device)
    model.recompute_in_backward()
    release_memory(device)
    taken = torch.cuda.memory_allocated() / 1e9 if device == "cuda" else peak_memory_gb(device)
    trained = list(qerl.trainable(model).values())
    optimizer, scaler = make_optimizer(model, settings)

    def measure(length):
        release_memory(device)
        lengths = torch.full((settings.group,), length)
        return take_step(model, optimizer, scaler, lengths, settings, qerl, Ranks())

    measure(8)
    moments = [t for state in optimizer.state.values() for t in state.values()]
    tokens = prompt_tokens(device) + settings.max_new_tokens
    row = {
        "model": name,
        "cap_gb": CAPS.get(name),
        "weights_gb": taken - total_gb(trained),
        "embeddings_gb": total_gb([model.embedding, model.lm_head]),       # part of the weights
        "lora_gb": total_gb(trained),
        "optimizer_gb": total_gb(moments),
        "gradients_gb": total_gb(trained),
        "cache_gb": settings.group * tokens * cache_bytes(model) / 1e9,
    }
    step, phases = measure(settings.max_new_tokens)
    row["peak_gb"] = {phase: phases.peak[phase] for phase in ("rollout", "update")}
    row["rest_gb"] = {phase: peak - sum(parts_of(row, phase).values())
                      for phase, peak in row["peak_gb"].items()}
    return {**row, "reserved_gb": torch.cuda.memory_reserved() / 1e9, "seconds": step["step"]}


def parts_of(row, phase):
    """{what: 10^9 bytes} of what is known to lie in memory in a phase."""
    return {
        "4-bit weights": row["weights_gb"] - row["embeddings_gb"],
        "embeddings and output layer, BF16": row["embeddings_gb"],
        "LoRA": row["lora_gb"],
        "optimiser": row["optimizer_gb"],
        "gradients": row["gradients_gb"] if phase == "update" else 0.0,
        "KV cache": row["cache_gb"] if phase == "rollout" else 0.0,
    }


def plot_memory(result, plt):
    """A bar a model and phase."""
    bars = {}
    for row in sorted(result["rows"], key=lambda row: row["weights_gb"]):
        model = f"{row['model'].split('-')[-1]}\ncap {row['cap_gb']:g}" if row["cap_gb"] else row["model"]
        for phase in row["rest_gb"]:
            rest = {"activations and the rest": max(0.0, row["rest_gb"][phase])}
            bars[f"{model}\n{phase}"] = parts_of(row, phase) | rest
    return plot_bars(plt, {"peak of a GRPO step, by phase": bars}, "GB (10⁹ bytes)")
