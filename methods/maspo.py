"""MASPO: soft bounds instead of clipping (arXiv 2602.17550).

    python train_gsm8k.py --method maspo

Marks: [P] the authors' code or README was read, [I] our inference.

The problem: clipping drops the gradient of a token all at once, and at the same ratio for a likely
and an unlikely token.

The formula. With rho = pi/pi_old the loss is -w rho A, where w has no gradient [P]:

    w = exp(-(rho - 1)^2 / (2 s^2)) where A > 0 and rho > 1, or A < 0 and rho < 1; else 1
    s = clamp(pi_old^-0.3, 1, 10) * clamp(c, 0.1, 10)
    c = 1 + 0.03 A for A > 0, else 1 / (1 - 0.03 A)

A token's gradient shrinks as updates move the token in the direction of its advantage. s says how far
it may move, which is farther for tokens that were unlikely.

What differs from QeRL: this replaces Eq. 3's clipping, so that --clip-low and --clip-high do nothing.
AQN stays; --sigma-start 0 --sigma-end 0 compares without it.

The paper's result: the mean of 32 answers on six mathematical benchmarks rises from GRPO's 48.4 to
51.4 with 1.5B parameters, and from 58.9 to 61.8 with 7B [P]. Ours: methods/README.md.

When would you use it? With several updates a rollout and much clipping. With one update rho is 1 and
nothing would happen, so that one update is refused.
"""
import torch

import qerl
from methods import Method
from harness.errors import require


def maspo_weights(ratio, old_logprobs, advantages):
    """w of ratio and old_logprobs [B, C] and advantages [B, 1] -> float32 [B, C]."""
    confidence = torch.where(advantages > 0, 1 + 0.03 * advantages, 1 / (1 - 0.03 * advantages))
    width = (-0.3 * old_logprobs).exp().clamp(1, 10) * confidence.clamp(0.1, 10)
    leaving = (ratio - 1) * advantages > 0
    return torch.where(leaving, (-((ratio - 1) / width) ** 2 / 2).exp(), 1)


class Neighbour(Method):
    """QeRL with w rho A instead of Eq. 3's clipped gain."""

    def check(self):
        require(self.settings.updates > 1,
                "--method maspo: with one update a rollout the ratio is 1 and nothing bounds it; use "
                "--updates 2 or more")
        require(self.settings.tis == 0,
                "--method maspo: is defined without importance weights; use --tis 0")

    def policy_loss(self, logprobs, old_logprobs, advantages, weights, **others):
        advantage = advantages[:, None]
        ratio = qerl.bounded(logprobs - old_logprobs).exp()
        w = maspo_weights(ratio.detach(), old_logprobs, advantage)
        # Without advantages Eq. 3 is its KL term.
        kl_loss, kl = qerl.policy_loss(logprobs, old_logprobs, 0 * advantages, weights, **others)
        return kl_loss - (w * ratio * advantage * weights).sum(), kl
