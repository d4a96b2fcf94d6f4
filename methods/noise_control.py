"""AQN whose sigma is steered by what the noise does; QeRL follows a schedule.

    python train_gsm8k.py --method noise_control

The problem. QeRL schedules sigma (Eq. 8). But the divergence that sigma causes is what explores, and
how far one sigma moves a policy depends on the model, its layers and the time.

The formula. mu is the noisy policy that sampled, pi_old the same without noise. After a step with noise
sigma <- 1.01 sigma if mean(log mu - log pi_old) <= 0.003, else sigma / 1.01. The rule is that of
Plappert et al. (arXiv 1706.01905), the divergence and 0.003 are PSN-RLVR's (2602.02555) [both were
read]. That sigma stays from 1e-4 to 0.2 is ours; theirs 0.001 to 0.004.

What differs from QeRL: the sigma of the noise. The first stage stays without noise. PSN-RLVR truncates
importance weights at 10; --tis 10 does so here.

The papers' results: none compares this rule with QeRL's schedule, so that we quote none. Ours: we did not
run it. Two rules of our own, by the divergence and by the entropy, were run and were not better than the
schedule (methods/README.md); commit a173235 has them.

When would you use it? Where no good sigma is known: for a new model, format or number of layers.
"""
import qerl
from harness.errors import require
from methods import Method

SMALLEST = 1e-4                # sigma stays between these: our choice
LARGEST = 0.2
DIVERGENCE = 3e-3              # nats a token


class Neighbour(Method):
    """QeRL with noise that the rule steers. state: "sigma" of the next step."""

    def __init__(self, settings, variant=None):
        super().__init__(settings, variant)
        self.state = {"sigma": settings.sigma_start}

    def check(self):
        require(self.settings.sigma_start > 0 and self.settings.stages > 1,
                "--method noise_control: there is no noise to begin with; use --sigma-start 0.01 and "
                "--stages 10")

    def adaptive_quantization_noise(self, model, sigma, generator):
        """sigma: that of QeRL's schedule, 0 in the first stage."""
        self.noisy = sigma > 0
        self.measured["sigma"] = self.state["sigma"] if self.noisy else 0.0
        return qerl.adaptive_quantization_noise(model, self.measured["sigma"], generator)

    def mismatch(self, old_logprobs, rollout_logprobs, mask):
        """qerl.mismatch; beside it the divergence, by which sigma is steered for the next step."""
        if self.noisy:
            divergence = (rollout_logprobs - old_logprobs)[mask].mean().item()
            factor = 1.01 if divergence <= DIVERGENCE else 1 / 1.01
            self.state["sigma"] = min(max(SMALLEST, self.state["sigma"] * factor), LARGEST)
        return qerl.mismatch(old_logprobs, rollout_logprobs, mask)
