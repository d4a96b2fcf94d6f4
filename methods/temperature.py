"""A rollout at a higher temperature in the place of noise: a control for AQN.

    python train_gsm8k.py --method temperature --sigma-start 0.1 --sigma-end 0.005

The problem. If noise does not help, either noise is the wrong way to explore, or this task does not need
more exploration. A temperature raises the entropy of a rollout, too, and without any error in the
weights. If it does not help either, the task cannot tell what noise is good for.

The formula. The rollout samples from softmax(logits / (T (1 + sigma))), where T is --temperature and
sigma follows Eq. 8's schedule, that of the noise. Training keeps T, as it keeps the weights without
noise in QeRL. All of this is ours.

What differs from QeRL: the weights carry no noise; log-probabilities of the rollout are of the higher
temperature, so that the mismatch with training shows it.

Results. On ten small policies it harms, by 4 points of pass@1 if T begins at 1.1
(results/claims/README.md). On 0.5B a first T of 1.0096, which raises the entropy as GPTQ's codes do,
changes 0.1 points (1.4 less to 1.6 more; results/claims/experiment.md).

When would you use it? As a control beside a run with noise whose first entropy is the same.
"""
import contextlib

from harness import fast
from methods import Method


class Neighbour(Method):
    """QeRL whose sigma raises the temperature of the rollout."""

    def check(self):
        self.require_noise()

    def adaptive_quantization_noise(self, model, sigma, generator):
        """sigma: that of QeRL's schedule; nothing is added to the model."""
        self.rise = sigma
        return contextlib.nullcontext()

    def generate(self, *args, temperature=1.0, **options):
        """fast.generate, hotter by this step's sigma."""
        return fast.generate(*args, temperature=temperature * (1 + self.rise), **options)
