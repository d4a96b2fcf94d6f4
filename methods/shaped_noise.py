"""AQN in some of the norms alone, or of another distribution: ablations of our own.

    python train_gsm8k.py --method shaped_noise:VARIANT

The problem. AQN adds Gaussian noise to the scales of all RMSNorms. Which of them explore, and does
the shape of the noise matter, or its variance alone? The paper does not say.

The formula. w + sigma z with E z = 0 and E z^2 = 1, as in QeRL (Eq. 7-10), but

    attention, mlp, first, last    in these norms alone: before attention, before the MLP, in the
                                   first or last third of the blocks; z is QeRL's own draw
    uniform, laplace               in all norms; z has lighter or heavier tails than Gaussian noise

[all our inference: no paper]. What differs from QeRL: `noise` alone.

No result of ours: we have not trained with it.

When would you use it? To find out where AQN works, at a sigma that causes the same divergence: the
table of `python -m methods` shows how differently the same sigma moves a policy, depending on where it is.
"""
import contextlib
import math

import torch

import qerl
from methods import Method

PLACES = ("attention", "mlp", "first", "last")
UNIT_VARIANCE = {
    "uniform": torch.distributions.Uniform(-math.sqrt(3), math.sqrt(3)),
    "laplace": torch.distributions.Laplace(0.0, math.sqrt(0.5)),
}


def chosen_norms(model, place):
    """The RMSNorms that a place names; for other names all."""
    if place == "attention":
        return [block.attention_norm for block in model.blocks]
    if place == "mlp":
        return [block.mlp_norm for block in model.blocks]
    part = model
    if place in PLACES:
        third = math.ceil(len(model.blocks) / 3)
        part = model.blocks[:third] if place == "first" else model.blocks[-third:]
    return [m for m in part.modules() if isinstance(m, qerl.RMSNorm)]


class Neighbour(Method):
    """QeRL with the noise of the variant."""
    variants = (*PLACES, *UNIT_VARIANCE)

    def check(self):
        self.require_noise()

    @contextlib.contextmanager
    def adaptive_quantization_noise(self, model, sigma, generator):
        noisy = chosen_norms(model, self.variant)
        with qerl.adaptive_quantization_noise(model, sigma, generator):
            for norm in chosen_norms(model, "all"):
                if norm not in noisy:
                    norm.noisy_weight = None
                elif self.variant in UNIT_VARIANCE:
                    # u > 0: Laplace's 0 lies at minus infinity.
                    u = torch.rand(norm.weight.shape, generator=generator).clamp_min(2 ** -25)
                    z = UNIT_VARIANCE[self.variant].icdf(u).to(norm.weight.device)
                    norm.noisy_weight = norm.weight.detach() + sigma * z
            yield
