"""What the demonstrations of methods/ share: the small policy, and a step without its update."""
import torch

import qerl
from harness.batches import Batch
from harness.small_policy import ByteText, made_up_problems, warm_start


def small_policy(count, weights="nvfp4", **options):
    """(model, text, `count` prompts as lists of token ids) of the built-in policy on a CPU."""
    text = ByteText()
    problems, _ = made_up_problems()
    prompts = [text.prompt(p["question"]) for p in problems[:count]]
    return qerl.load_model(warm_start(), weights, **options), text, prompts


def sample_step(method, model, text, prompts, sigma=0.0, group=4, seed=0):
    """A step's rollout by a methods.Method, with noise, and its log pi_old -> (Rollout, Batch).

    group completions a prompt of at most 64 tokens; every advantage is 1.
    """
    sampling_rng = torch.Generator().manual_seed(seed)
    noise_rng = torch.Generator().manual_seed(seed)
    with method.noise(model, sigma, noise_rng):
        rollout = method.generate(
            model, prompts, 64, group, eos=text.eos, slots=256, generator=sampling_rng)
    repeated = [p for p in prompts for _ in range(group)]
    advantages = torch.ones(len(repeated))
    batch = Batch(
        repeated, rollout.tokens, rollout.length, rollout.logprobs, advantages, rollout.mask)
    batch.old_logprobs = method.old_logprobs(model, batch)
    return rollout, batch
