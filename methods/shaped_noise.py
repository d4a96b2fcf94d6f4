"""AQN in some of the norms: our own ablations.

    python train_gsm8k.py --method shaped_noise:VARIANT

The problem. AQN adds noise to the scales of all RMSNorms. Which of them explore? The paper does not
say.

The formula. w + sigma z as in QeRL (Eq. 7-10), with the same draw z, but only

    attention, mlp     in the norms before attention, or before the MLP
    first, last        in the norms of the first or last third of the blocks

[all our inference: no paper]. What differs from QeRL: `adaptive_quantization_noise`.

Results: none; we have not trained with it.

When would you use it? To find out where AQN works, at a sigma that causes the same divergence: the
table of `python -m methods` shows how far one sigma moves a policy from each place.
"""
import contextlib
import math

import qerl
from methods import Method


def places(model):
    """{variant: the modules whose norms are noisy}"""
    third = math.ceil(len(model.blocks) / 3)
    return {
        "attention": [block.attention_norm for block in model.blocks],
        "mlp": [block.mlp_norm for block in model.blocks],
        "first": model.blocks[:third],
        "last": model.blocks[-third:],
    }


class Neighbour(Method):
    """QeRL with noise in the norms of the variant."""
    variants = ("attention", "mlp", "first", "last")

    def check(self):
        self.require_noise()

    @contextlib.contextmanager
    def adaptive_quantization_noise(self, model, sigma, generator):
        noisy = {m for part in places(model)[self.variant] for m in part.modules()}
        with qerl.adaptive_quantization_noise(model, sigma, generator):
            for module in model.modules():
                if isinstance(module, qerl.RMSNorm) and module not in noisy:
                    module.noisy_weight = None
            yield
