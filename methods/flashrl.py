"""FlashRL: sample with 8-bit weights and activations, train in 16 bits, weight the tokens.

    python train_gsm8k.py --method flashrl                           INT8; flashrl:fp8 for FP8
    python train_gsm8k.py --method flashrl --lora-rank 0 --beta 0 --lr 1e-4    trains all weights

The problem (github.com/yaof20/Flash-RL, README: primary; fengyao.notion.site/flash-rl): sampling takes
most of the time, and 8-bit products make it faster. But then the policy that samples is not the one
that is trained, and without a correction the training suffers.

The formulas (README, primary). Before each rollout the current weights W [out, in] are quantised:

    s_o = max_i |W_oi| / M      q = round(W / s)     a scale for each output channel
    t_n = max_i |x_ni| / M      p = round(x / t)     a scale for each token, at its product
    y_no = t_n s_o Σ_i p_ni q_oi

INT8 has M = 127 and integer sums, FP8 M = 448, E4M3 codes and float sums; methods/parts/eight_bit.py
has the layers. The update weights each token by truncated importance sampling,
min(π_old / π_rollout, C) with C = --tis: 2 for 0.5B on GSM8K, 8 for 32B with DAPO.

What differs from QeRL: QeRL trains on the very weights that sample, 4 bits and frozen, so that the
noise is the only mismatch, and it is wanted. Here W is trained, or has LoRA. LoRA is merged into W
before W is quantised, so that the rollout's LoRA has 8 bits, too. During a rollout the 16-bit and
the 8-bit weights are both in memory. The 16-bit policy answers the held-out questions. --tis 0 shows
the method without its correction.

What differs from the authors' code: its INT8 scales come from a calibration at the start. Here every
scale is a maximum of the current weights. (compressed-tensors has amax / 127.5 for INT8.)

The paper's result: the README recommends it from 14B on, with long completions; users saw no
gain at 32B and 70B (issues 28 and 37). Ours: methods/README.md.

When would you use it? To train all weights, or LoRA on 16-bit weights, of a model whose decoding
mostly reads weights. If LoRA on frozen weights is enough, 4 bits are half as much to read and need
no correction.
"""
import contextlib

import qerl
from harness.errors import require
from methods import Method
from methods.parts.eight_bit import eight_bit, require_fp8_products


class Neighbour(Method):
    variants = ("int8", "fp8")

    @classmethod
    def defaults(cls, variant):
        return dict(weights="bf16", sigma_start=0.0, sigma_end=0.0, tis=2.0)

    def check(self):
        settings = self.settings
        require(settings.weights == "bf16",
                     f"--method {settings.method}: quantises 16-bit weights for the rollout, and "
                     f"{settings.weights} is smaller already; use --weights bf16")
        if self.variant == "fp8":
            require_fp8_products(settings)

    @contextlib.contextmanager
    def adaptive_quantization_noise(self, model, sigma, generator):
        noise = qerl.adaptive_quantization_noise(model, sigma, generator)
        with noise, eight_bit(model, self.variant):
            yield
