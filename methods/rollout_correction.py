"""Rollout correction: what to do about completions that another policy sampled.

    python train_gsm8k.py --method rollout_correction:token-tis         train with one of `variants`

The problem ("On the Rollout-Training Mismatch in Modern RL Systems", openreview.net 8MHqvb4lK9):
sampler and trainer compute one policy in different arithmetic or, with AQN, with and without noise.
Completions come from π_rollout, and the gradient takes them for π_old's.

The formulas are those of the algorithm notes and the helper of the library verl (primary). With
ρ = π_old / π_rollout and R = π / π_old at a token, l = log ρ, and the gain G(R) =
min(R A, clip(R, 1-ε, 1+ε) A):

    decoupled         -E[ w G(R) ]         three policies; w is made of ρ
    bypass            -E[ G(π/π_rollout) ] π_old is π_rollout. No w: the ratio already holds the
                                           correction (verl saves π_old's pass; here the log needs it)
    policy gradient   -E[ w log π A ]      bypass without clipping; w is made of π/π_rollout

    token-tis      w = min(ρ, C)             C = --tis, else 2
    sequence-tis   w = min(Π ρ, C)           the product over a completion
    sequence-mis   w = min(Π ρ, C), but 0 unless Π ρ is in [0.5, 2]
    icepop         w = ρ, but 0 unless ρ is in [0.5, 5]
    geometric      w = 1, but 0 unless exp(mean l) of the completion is in [0.999, 1.001]
    k3             w = 1, but 0 unless mean(eˡ - 1 - l) of the completion is at most 0.01

A weight of 0 leaves a token out of the sum and not out of the number that it is divided by, as in
TRL; verl shortens that number, too, and so takes larger steps.

Variants: NAME, one of these weights, is decoupled; pg-NAME is the policy gradient; bypass has no
weight.

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
# Where the ratio, the geometric mean or the K3 must lie; elsewhere the weight is 0.
KEPT = {"token-tis": (0, math.inf), "sequence-tis": (0, math.inf), "sequence-mis": (0.5, 2),
        "icepop": (0.5, 5), "geometric": (0.999, 1.001), "k3": (0, 0.01)}
VARIANTS = {kind: ("decoupled", kind) for kind in KEPT}            # name -> mode, kind of weight
VARIANTS |= {"bypass": ("bypass", None)}
VARIANTS |= {f"pg-{kind}": ("policy gradient", kind) for kind in KEPT}


@torch.no_grad()
def correction(log_ratio, mask, kind, cap=2.0):
    """The weights w, float32 [B, C], 0 at padding; constants, without gradient.

    log_ratio float32 [B, C]: log of the policy to correct for over π_rollout; mask bool [B, C]. In
    this order: clamp, exponential, mask, truncate.
    """
    log_ratio = log_ratio.masked_fill(~mask, 0)
    length = mask.sum(1, keepdim=True).clamp_min(1)
    if kind.startswith("sequence"):
        log_ratio = log_ratio.sum(1, keepdim=True)                                 # [B, 1]
    if kind == "geometric":
        log_ratio = log_ratio.sum(1, keepdim=True) / length
    log_ratio = qerl.bounded(log_ratio)
    value = log_ratio.exp()
    if kind == "k3":
        value = (value - 1 - log_ratio).sum(1, keepdim=True) / length
    low, high = KEPT[kind]
    kept = (value >= low) & (value <= high) & mask                                 # [B, C]
    if kind in CAPPED:
        value = value.clamp(max=cap)
    weight = torch.ones_like(value) if kind in ("geometric", "k3") else value
    return weight * kept


class Neighbour(Method):
    variants = tuple(VARIANTS)

    def __init__(self, settings, variant=None):
        super().__init__(settings, variant)
        self.mode, self.kind = VARIANTS[self.variant]

    def check(self):
        name = f"--method rollout_correction:{self.variant}"
        require(not self.settings.tis or self.mode != "bypass",
                f"{name}: its ratio already corrects for the rollout, and --tis would count that "
                "twice; leave out --tis")
        require(not self.settings.tis or self.kind in CAPPED,
                f"{name}: it has no cap that --tis could set; leave out --tis")

    def adaptive_quantization_noise(self, model, sigma, generator):
        self.seen = []                         # the weights of the step's tokens, by micro-batch
        return qerl.adaptive_quantization_noise(model, sigma, generator)

    def policy_loss(self, logprobs, old_logprobs, advantages, weights, clip_low, clip_high,
                    ref_logprobs, beta, rollout_logprobs, tis, *_):
        advantages = advantages[:, None]
        if self.kind:
            mask = weights > 0
            corrected = old_logprobs if self.mode == "decoupled" else logprobs.detach()
            importance = correction(corrected - rollout_logprobs, mask, self.kind, tis or 2.0)
            advantages = advantages * importance
            self.measure(importance[mask])
        if self.mode == "bypass":
            old_logprobs = rollout_logprobs
        if self.mode == "policy gradient":
            # π / π has the value 1, so that nothing is clipped, and the gradient of log π.
            old_logprobs = logprobs.detach()
        return qerl.policy_loss(
            logprobs, old_logprobs, advantages, weights, clip_low, clip_high, ref_logprobs, beta)

    def measure(self, importance):
        """The mean of the step's weights so far, and how many are 0."""
        self.seen.append(importance)
        importance = torch.cat(self.seen)
        if len(importance):            # DAPO may leave out every completion
            self.measured = {"importance_mean": importance.mean().item(),
                             "masked_fraction": (importance == 0).float().mean().item()}
