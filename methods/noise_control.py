"""AQN whose sigma is steered by what the noise does; QeRL follows a schedule.

    python train_gsm8k.py --method noise_control       or noise_control:plappert, noise_control:entropy

The problem. QeRL schedules sigma (Eq. 8). But the divergence that sigma causes is what explores, and
how far one sigma moves a policy depends on the model, its layers and the time.

The formulas. Marks: [P] a paper or its code was read, [I] our inference. mu is the noisy policy
that sampled, pi_old the same without noise, l = log pi_old - log mu of a sampled token.

    divergence  K = EMA(mean(e^l - 1 - l)) - K_0; the last step is half of the EMA, and K_0 is the
                mean of the last step at sigma 0 (rounding);
                sigma <- sigma * clip(sqrt(delta / K), 0.8, 1.25), as K grows with sigma^2       [I]
                delta = 3e-3 * (Eq. 8's sigma / its first)^2: QeRL's curve, in nats              [I]
    plappert    sigma <- 1.01 sigma if mean(-l) <= 0.003, else sigma / 1.01: Plappert et al.
                (arXiv 1706.01905); mean(-l) and 0.003 are PSN-RLVR's (2602.02555) [P]; sigma
                from 1e-4 to 0.2 is ours, theirs 0.001 to 0.004                                  [I]
    entropy     sigma <- sigma +- a 50th of its range by whether the entropy, mean(-log mu), is
                below 0.2: the rule of Skywork-OR1 for its entropy bonus [P], here for sigma     [I]

What differs from QeRL: the sigma of the noise. The first stage stays without noise. PSN-RLVR truncates
importance weights at 10; --tis 10 does so here.

The papers' results: none compares these rules with QeRL's schedule, so that we quote none. Ours:
methods/README.md; we did not run plappert. The step of the entropy rule is large beside sigma: in our
runs sigma fell to its smallest value within three noisy steps.

When would you use it? Use `divergence` where no good sigma is known: for a new model, format or number
of layers. It works if the noise adds more to K than K_0, which is not small in bfloat16. It cost our
small policy accuracy (methods/README.md). The other rules are for ablations.
"""
import math

import qerl
from harness.command import require_flag
from methods import Method

SMALLEST = 1e-4                # sigma stays between these: our choice
LARGEST = 0.2
FIRST_DIVERGENCE = 3e-3        # nats a token
PLAPPERT_DIVERGENCE = 3e-3
TARGET_ENTROPY = 0.2           # nats a token


def clip(x, low, high):
    return max(low, min(x, high))


class Neighbour(Method):
    """QeRL with noise that the variant's rule steers.

    state: "sigma" of the next step, "divergence" (the EMA) and "rounding" (K_0) in nats a token.
    """
    variants = ("divergence", "plappert", "entropy")

    def __init__(self, settings, variant=None):
        super().__init__(settings, variant)
        self.state = {"sigma": settings.sigma_start, "divergence": None, "rounding": 0.0}

    def check(self):
        self.require_noise()
        require_flag(self.settings.sigma_start > 0, "sigma_start", 0,
                     f"--method {self.settings.method} begins with that; use 0.01")

    def adaptive_quantization_noise(self, model, sigma, generator):
        """sigma: that of QeRL's schedule, 0 in the first stage."""
        self.scheduled = sigma
        sigma = self.state["sigma"] if sigma > 0 else 0.0
        self.measured["sigma"] = sigma
        return qerl.adaptive_quantization_noise(model, sigma, generator)

    def mismatch(self, old_logprobs, rollout_logprobs, mask):
        """qerl.mismatch, by which sigma is steered for the next step."""
        k3, largest_ratio = qerl.mismatch(old_logprobs, rollout_logprobs, mask)
        if self.scheduled == 0:
            self.state["rounding"] = k3
        else:
            k1 = (rollout_logprobs - old_logprobs)[mask].mean().item()
            entropy = -rollout_logprobs[mask].mean().item()
            sigma = self.steer(self.state["sigma"], k1, k3, entropy)
            self.state["sigma"] = clip(sigma, SMALLEST, LARGEST)
        return k3, largest_ratio

    def steer(self, sigma, k1, k3, entropy):
        """The next sigma; k1, k3, entropy: this step's mean(-l), mean(e^l - 1 - l), mean(-log mu)."""
        if self.variant == "plappert":
            return sigma * 1.01 if k1 <= PLAPPERT_DIVERGENCE else sigma / 1.01
        if self.variant == "entropy":
            step = LARGEST / 50
            return sigma + (step if entropy < TARGET_ENTROPY else -step)
        before = self.state["divergence"]
        self.state["divergence"] = k3 if before is None else (before + k3) / 2
        target = FIRST_DIVERGENCE * (self.scheduled / self.settings.sigma_start) ** 2
        divergence = max(1e-12, self.state["divergence"] - self.state["rounding"])
        # It grows with sigma². At most a factor of 1.25 is taken at once.
        return sigma * clip(math.sqrt(target / divergence), 0.8, 1.25)
