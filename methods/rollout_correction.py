"""Rollout correction: what to do about completions that another policy sampled.

    python train_gsm8k.py --method rollout_correction:token-tis         train with one of `variants`

The problem ("On the Rollout-Training Mismatch in Modern RL Systems", openreview.net 8MHqvb4lK9):
sampler and trainer compute one policy in different arithmetic or, with AQN, with and without noise.
Completions come from π_rollout, and the gradient takes them for π_old's.

The formulas are those of the algorithm notes and the helper of the library verl (primary). With
ρ = π_old / π_rollout and R = π / π_old at a token, and the gain G(R) =
min(R A, clip(R, 1-ε, 1+ε) A):

    decoupled         -E[ w G(R) ]         three policies; w is made of ρ
    bypass            -E[ G(π/π_rollout) ] π_old is π_rollout. No w: the ratio already holds the
                                           correction (verl saves π_old's pass; here the log needs it)

    token-tis      w = min(ρ, C)             C = --tis, else 2
    sequence-tis   w = min(Π ρ, C)           the product over a completion
    sequence-mis   w = min(Π ρ, C), but 0 unless Π ρ is in [0.5, 2]
    icepop         w = ρ, but 0 unless ρ is in [0.5, 5]

A weight of 0 leaves a token out of the sum and not out of the number that it is divided by, as in
TRL; verl shortens that number, too, and so takes larger steps.

Variants: each of these weights, decoupled; and bypass, which has no weight. The notes have more: the
mean of log ρ and the K3 of a completion as masks, and bypass without clipping.

What differs from QeRL: it corrects nothing, or token-tis by --tis. The paper's result: we have read
the library's notes and code, not the paper's tables, and quote none. Ours: methods/README.md.

When would you use it? First make the two policies alike; a correction pays with variance or bias
for what is left. token-tis is cheap and safe while few tokens stick out. sequence-tis and -mis are
right about prefixes, but of long completions few effective samples are left. The masks are for a
rollout that sometimes goes wrong altogether. bypass is for a mismatch that is small against the
clip range.
"""
import math

import torch

import qerl
from methods import Method
from qerl import require

CAPPED = ("token-tis", "sequence-tis", "sequence-mis")
# Where the ratio, or its product, must lie; elsewhere the weight is 0.
KEPT = {"token-tis": (0, math.inf), "sequence-tis": (0, math.inf), "sequence-mis": (0.5, 2),
        "icepop": (0.5, 5)}


@torch.no_grad()
def correction(log_ratio, mask, kind, cap=2.0):
    """The weights w, float32 [B, C], 0 at padding; constants, without gradient.

    log_ratio float32 [B, C]: log ρ; mask bool [B, C]; kind: a name in KEPT. In this order: clamp,
    exponential, mask, truncate.
    """
    log_ratio = log_ratio.masked_fill(~mask, 0)
    if kind.startswith("sequence"):
        log_ratio = log_ratio.sum(1, keepdim=True)                                 # [B, 1]
    ratio = qerl.bounded(log_ratio).exp()
    low, high = KEPT[kind]
    kept = (ratio >= low) & (ratio <= high) & mask                                 # [B, C]
    if kind in CAPPED:
        ratio = ratio.clamp(max=cap)
    return ratio * kept


class Neighbour(Method):
    variants = (*KEPT, "bypass")

    def check(self):
        require(not self.settings.tis or self.variant in CAPPED,
                f"--method rollout_correction:{self.variant}: it has no cap that --tis could set; leave "
                "out --tis")

    def adaptive_quantization_noise(self, model, sigma, generator):
        self.seen = []                         # the weights of the step's tokens, by micro-batch
        return qerl.adaptive_quantization_noise(model, sigma, generator)

    def policy_loss(self, logprobs, old_logprobs, advantages, weights, clip_low, clip_high,
                    ref_logprobs, beta, rollout_logprobs, tis, *_):
        advantages = advantages[:, None]
        if self.variant == "bypass":
            old_logprobs = rollout_logprobs
        else:
            mask = weights > 0
            importance = correction(
                old_logprobs - rollout_logprobs, mask, self.variant, tis or 2.0)
            advantages = advantages * importance
            self.measure(importance[mask])
        return qerl.policy_loss(
            logprobs, old_logprobs, advantages, weights, clip_low, clip_high, ref_logprobs, beta)

    def measure(self, importance):
        """The mean of the step's weights so far, and how many are 0."""
        self.seen.append(importance)
        importance = torch.cat(self.seen)
        if len(importance):            # DAPO may leave out every completion
            self.measured = {"importance_mean": importance.mean().item(),
                             "masked_fraction": (importance == 0).float().mean().item()}
