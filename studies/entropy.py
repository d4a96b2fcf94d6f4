"""Entropy of the policy before any training, by format and by noise (Fig. 5 and 14 of the paper).

The paper's first claim: quantisation raises the entropy, and noise raises it further. Each format
answers the same questions, without noise and with more and more of it; a draw of noise serves one
rollout, so several are taken. `bench.py entropy` prints the rows of bench_entropy.
"""
from itertools import product

import torch

import qerl
import train_gsm8k
from harness.batches import make_batch
from harness.ranks import Ranks
from studies.plots import plot_lines
from studies.study import name_in_rows

SIGMAS = [0.0, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2]
QUESTIONS = 64
DRAWS = 3                   # of noise, and rollouts, at each sigma
PANELS = {
    "entropy": "entropy, nats",
    "accuracy": "accuracy, temperature 1",
    "mismatch_kl": "KL to the clean policy",
}


@torch.no_grad()
def measure(model, tokenizer, questions, settings, sigma, draw):
    """One rollout under one draw of noise: means over its tokens, and over its completions."""
    sampling_rng = torch.Generator(model.device).manual_seed(draw)
    noise_rng = torch.Generator().manual_seed(1000 + draw)
    with qerl.adaptive_quantization_noise(model, sigma, noise_rng):
        rollout = qerl.generate(
            model, [q["prompt"] for q in questions], settings.max_new_tokens, settings.group,
            eos=tokenizer.eos, slots=settings.slots, generator=sampling_rng,
        )
    texts = train_gsm8k.decode_all(tokenizer, rollout)
    samples = train_gsm8k.score(questions, rollout, texts, settings.reward)
    batch = make_batch(samples, samples.rewards, qerl, settings, Ranks())
    for rows in batch.micro_batches(range(len(texts)), settings.micro_tokens):
        batch.old_logprobs[rows.index] = qerl.token_logprobs(
            model, rows.prompts, rows.tokens, rows.length)
    kl, _ = qerl.mismatch(batch.old_logprobs, rollout.logprobs, rollout.mask)
    return {
        "sigma": sigma,
        "draw": draw,
        "entropy": rollout.entropy[rollout.mask].mean().item(),
        "accuracy": samples.correct.mean().item(),
        "mismatch_kl": kl,
    }


def bench_entropy(args):
    """A row for each format, sigma and draw."""
    for weights in args.weights:
        settings = train_gsm8k.arguments(
            [*args.more, "--device", args.device, "--weights", weights, "--quantizer", "rtn"])
        model, tokenizer, data, settings = train_gsm8k.load_all(settings, qerl)
        questions = data.train[:QUESTIONS]
        asked = {"model": name_in_rows(settings.model), "prompts": len(questions), "weights": weights}
        for sigma, draw in product(args.sigmas, range(DRAWS)):
            yield asked | measure(model, tokenizer, questions, settings, sigma, draw)


def plot_entropy(result, plt):
    """PANELS of each model against sigma, a line a format through the means of the draws (dashes)."""
    points = [(f"{row['model']}: {label}", row["weights"], row["sigma"], row[key])
              for row in result["rows"] for key, label in PANELS.items()]
    return plot_lines(plt, points, "sigma", "")
