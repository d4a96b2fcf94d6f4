"""Rollout correction: what to do about completions that another policy sampled.

    python train_gsm8k.py --method rollout_correction:token-tis         train with one of `variants`

The problem ("On the Rollout-Training Mismatch in Modern RL Systems", openreview.net 8MHqvb4lK9):
sampler and trainer compute one policy in different arithmetic, or with and without AQN's noise.
Completions come from π_rollout, but the gradient treats them as π_old's.

The formulas are those of the algorithm notes and the helper of the library verl (primary). With
ρ = π_old / π_rollout and R = π / π_old at a token, and the gain G(R) =
min(R A, clip(R, 1-ε, 1+ε) A):

    decoupled         -E[ w G(R) ]         three policies; w is made of ρ
    bypass            -E[ G(π/π_rollout) ] π_old is π_rollout. There is no w: the ratio contains the
                                           correction (verl saves π_old's pass; here the log needs it)

    token-tis      w = min(ρ, C)             C = --tis, else 2
    sequence-tis   w = min(Π ρ, C)           the product over a completion
    sequence-mis   w = Π ρ, but 0 unless it is in [0.5, 2]
    icepop         w = ρ, but 0 unless ρ is in [0.5, 5]

A weight of 0 takes a token out of the sum, but the divisor still counts it, as in TRL. In verl the
divisor does not count it, so that steps are larger.

Variants: each of these weights, decoupled; and bypass, which has no weight. The notes have more: the
mean of log ρ and the K3 of a completion as masks, and bypass without clipping.

What differs from QeRL: QeRL corrects nothing; with --tis it has token-tis. The paper's result: we have
read the library's notes and code, not the paper's tables, and quote none. Ours: methods/README.md.

When would you use it? First make the two policies alike; a correction of the rest costs variance or
bias. token-tis is cheap and safe while few tokens have large ratios. sequence-tis and -mis weight
whole completions rightly, but they leave few effective samples of long ones. The masks are for a
rollout that sometimes goes wrong altogether. bypass is for a mismatch that is small against the clip
range.
"""
import torch

import qerl
from methods import Method
from harness.errors import require


def within(ratio, low, high):
    """The ratio, or 0 where it does not lie between low and high."""
    return ratio * ((ratio >= low) & (ratio <= high))


# The weights by ρ [B, C], their product over a completion [B, 1], and the cap C.
WEIGHTS = {
    "token-tis": lambda rho, product, cap: rho.clamp(max=cap),
    "sequence-tis": lambda rho, product, cap: product.clamp(max=cap),
    "sequence-mis": lambda rho, product, cap: within(product, 0.5, 2),
    "icepop": lambda rho, product, cap: within(rho, 0.5, 5),
}


class Neighbour(Method):
    variants = (*WEIGHTS, "bypass")

    def check(self):
        require(not self.settings.tis or self.variant.endswith("-tis"),
                f"--method {self.settings.method}: it has no cap that --tis could set; leave out --tis")

    @torch.no_grad()
    def importance(self, old_logprobs, rollout_logprobs, mask):
        """The weights w, float32 [B, C], 0 at padding; constants, without gradient."""
        log_ratio = (old_logprobs - rollout_logprobs).masked_fill(~mask, 0)
        rho = qerl.bounded(log_ratio).exp()
        product = qerl.bounded(log_ratio.sum(1, keepdim=True)).exp()
        return WEIGHTS[self.variant](rho, product, self.settings.tis or 2.0) * mask

    def policy_loss(self, logprobs, old_logprobs, advantages, weights, rollout_logprobs, tis, **others):
        advantages = advantages[:, None]
        if self.variant == "bypass":
            old_logprobs = rollout_logprobs
        else:
            advantages = advantages * self.importance(old_logprobs, rollout_logprobs, weights > 0)
        return qerl.policy_loss(logprobs, old_logprobs, advantages, weights, **others)

    def mismatch(self, old_logprobs, rollout_logprobs, mask):
        """qerl.mismatch, with which the loop ends a step."""
        if self.variant != "bypass":
            left_out = self.importance(old_logprobs, rollout_logprobs, mask) == 0
            self.measured["masked_fraction"] = left_out[mask].float().mean().item()
        return qerl.mismatch(old_logprobs, rollout_logprobs, mask)
