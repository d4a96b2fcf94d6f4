"""An RL step on random weights: its seconds and its memory by phase, on one GPU or several.

The step is that of train_gsm8k.train, but with random prompts and rewards, one update and no
reference policy. All memory is in 10^9 bytes; on a CPU there is none to measure.
"""
from dataclasses import replace

import torch

import qerl
from harness import fast
from harness.batches import make_batch
from harness.machine import Clock, fitted, keep_values
from harness.ranks import Ranks
from studies.random_models import random_model, random_prompts
from train_gsm8k import Samples, Settings, make_optimizer, update


def take_peak():
    """The most memory in use since it was last asked for."""
    peak = torch.cuda.max_memory_allocated() / 1e9
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return peak


def device_memory_gb():
    """Memory of the GPU in use now, by the driver's count, with what PyTorch keeps; 0 without one."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


# --------------------------------------------------------------------------------------------------
# A step

def cut_lengths(longest, ranks):
    """Lengths like those of GSM8K solutions, 212 tokens of at most 512 on average, int64 [count].

    All ranks draw those of all and take their own, so that one rank has longer ones than another,
    and all processes together have the same lengths, whatever their number.
    """
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(len(longest) * ranks.count, generator=generator).chunk(ranks.count)[ranks.rank]
    share = normal.mul(0.35).add(5.3).exp().clamp(max=512) / 512
    return (share * longest).long()


def take_step(model, optimizer, scaler, settings, lengths):
    """One step of train_gsm8k.train -> {phase: seconds, "step": their sum, PHASE_gb: its peak ...}.

    The rewards are random and there is one update, for which the step needs no log-probabilities
    before. lengths: int64, at which this process's completions are cut, as random weights end none. Of
    several processes the figures are means, and the step's seconds are those of the slowest.
    """
    asked = random_prompts(model.config.vocab_size, len(lengths) // settings.group,
                           prompt_tokens(settings))
    clock = Clock(model.device)
    ranks = Ranks()
    ranks.total(torch.zeros(1, device=model.device))                     # wait for all
    with clock("rollout"), qerl.adaptive_quantization_noise(model, settings.sigma_start, None):
        rollout = fast.generate(model, asked, settings.max_new_tokens, settings.group,
                                slots=settings.slots, limits=lengths)
    rollout_gb = take_peak()
    with clock("reward"):
        rewards = torch.rand(len(asked), settings.group, device=model.device)
        samples = Samples([{"prompt": prompt} for prompt in asked], rollout, None, rewards, rewards)
        batch = make_batch(samples, qerl.group_advantages(rewards), fast, settings, ranks)
    with clock("update"):
        update(fast, model, batch, optimizer, scaler, settings, ranks)
    return ranks.join({
        **clock.seconds,
        "step": sum(clock.seconds.values()),
        "length": rollout.length.float().mean().item(),
        "rollout_gb": rollout_gb,
        "update_gb": take_peak(),
    })


def median_step(steps):
    """The step, a dict, whose seconds are the median; of an even number the slower of the two."""
    return sorted(steps, key=lambda step: step["step"])[len(steps) // 2]


def prompt_tokens(settings):
    return 128 if settings.device == "cuda" else 8


def settings_for(device):
    """The Settings of the steps that are measured; completions are short on a CPU."""
    usual = Settings(updates=1, lr=1e-6, device=device)
    return usual if device == "cuda" else replace(usual, max_new_tokens=12)


def step_rows(name, weights, sizes, settings, repeats=1, cut=True):
    """A row for each size (prompts of all processes, completions of each).

    repeats: the step is timed so often, and the median one counts. cut: completions have lengths like
    those of GSM8K's solutions; else all have settings.max_new_tokens.
    """
    ranks = Ranks()
    model = random_model(name, weights, settings.lora_rank, settings.device)
    keep_values(model, fast)
    optimizer, scaler = make_optimizer(model, settings)
    for prompts, group in sizes:
        model.recompute_in_backward()
        model.sampler = None                       # of another size
        completions = prompts // ranks.count * group
        own = fitted(replace(settings, group=group), model,
                     prompt_tokens(settings) + settings.max_new_tokens, completions, fast)
        torch.manual_seed(ranks.rank)              # the ranks have prompts and samples of their own
        longest = torch.full((completions,), settings.max_new_tokens)
        lengths = cut_lengths(longest, ranks) if cut else longest
        # The first step of a size compiles its kernels.
        steps = [take_step(model, optimizer, scaler, own, lengths) for _ in range(repeats + 1)]
        yield {"model": name, "weights": weights, "processes": ranks.count, "prompts": prompts,
               "group": group, **median_step(steps[1:]), "device_memory_gb": device_memory_gb()}
