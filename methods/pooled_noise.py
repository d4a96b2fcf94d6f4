"""Pooled noise: a group has four draws of noise, and completions far from the policy are left out.

    python train_gsm8k.py --method pooled_noise

The problem (3PO, arXiv 2608.09805). All completions of a step share one draw of the noise, so that
a group compares answers of a single perturbed policy. Whether this one is better or worse than the
policy cancels in the advantages, and the step depends on one draw.

The formula [from a secondary note, which does not say how many draws the paper takes]. A group has
four draws, each for a quarter of it. The policy that sampled, mu, is noisy and pi_old is not.
Sequence-MIS corrects for this: with l = log pi_old - log mu of a sampled token, the weight of a
completion is

    w = exp(sum of l) if that is in [0.5, 2], else 0.

What differs from QeRL: the noise and `generate`. rollout_correction.py has the weights.

The paper's results: with one draw a step its authors found no gain over GRPO on average; with pooled
draws and sequence-MIS they found 0.9 points, three seeds [secondary]. Ours: methods/README.md.

When would you use it? Where rewards within a group hardly differ. It starts the sampler four times.
With long completions w leaves its range: look at masked_fraction.
"""
import contextlib

import torch

import qerl
from harness import fast
from harness.batches import join_rollouts
from methods import rollout_correction
from harness.errors import require

DRAWS = 4                      # in a group


class Neighbour(rollout_correction.Neighbour):
    """Sequence-MIS with pooled noise."""
    variants = ()

    def __init__(self, settings, variant=None):
        super().__init__(settings, "sequence-mis")

    def check(self):
        super().check()
        self.require_noise()
        require(self.settings.group % DRAWS == 0,
                f"--method pooled_noise: {DRAWS} draws share a group of {self.settings.group} "
                f"unequally; use a --group divisible by {DRAWS}")

    @contextlib.contextmanager
    def adaptive_quantization_noise(self, model, sigma, generator):
        """`generate` draws the noise."""
        self.noise = sigma, generator
        yield

    def generate(self, model, prompts, max_new_tokens, group_size, **options):
        """Call the sampler once for each draw, and put the rows back in the order of the prompts."""
        share = group_size // DRAWS
        rollouts = []
        for _ in range(DRAWS):
            with qerl.adaptive_quantization_noise(model, *self.noise):
                rollouts.append(fast.generate(model, prompts, max_new_tokens, share, **options))
        rows = torch.arange(DRAWS * len(prompts) * share).view(DRAWS, len(prompts), share)
        return join_rollouts(rollouts, rows.transpose(0, 1).flatten())
