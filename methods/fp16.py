"""Float16 instead of bfloat16, in the sampler and in training (arXiv 2510.26788).

    python train_gsm8k.py --method fp16

The problem. Decoding and training compute the same policy, but add in different orders, and so
round differently. The ratio of the two at a token should be 1 and is not: every update is a little
off-policy, and over long completions such small errors multiply. The usual remedy are importance
weights (--tis). This one goes to the cause: bfloat16 has few digits.

                 sign  exponent  mantissa   relative rounding   smallest above 0   largest
    bfloat16        1         8         7   2^-8  = 0.4 %       9e-41              3e38
    float16         1         5        10   2^-11 = 0.05 %      6e-8               65504

Rounding errors are 8 times smaller in float16 and, as a KL grows with their square, the mismatch

    K3 = mean(e^l - 1 - l),   l = log pi_old - log pi_rollout of a sampled token

is to be expected 64 times smaller (our inference, from the number formats). The price is the range:
a gradient below 6e-8 becomes 0. The formula against it is S⁻¹ ∇(S loss): the loss is multiplied by
a scale S, backward computes S times the gradient, and before clipping it is divided by S again, in
float32. S begins at 65536; where a gradient overflows, that optimiser step is left out and S
halved, and after 400 steps without overflow it is doubled (torch.amp.GradScaler; 400 instead of
PyTorch's 2000, and unscaling before clipping, are the paper's by a secondary note).

What differs from QeRL: the dtype of activations and the growth interval of S, nothing else. LoRA
stays in float32. On a GPU the 4-bit kernels compute in bfloat16 alone: in float16 each 4-bit layer
is decoded and then multiplied, so a step takes longer; compare accuracies at equal steps, or use
--weights bf16 (16-bit weights, here as float16) on both sides. The comparison is --dtype bfloat16.

The paper's result (by secondary notes): a mismatch of 0.32 against 7.64 with bfloat16, in their
units; training stays stable for longer, and float16 beats all bfloat16 baselines. Ours: on 0.5B
a K3 of 5.5e-5 with noise, where bfloat16 has 4.6e-4; accuracy: methods/README.md.

When would you use it? Where mismatch_kl without noise is large, that is with long completions, deep
models or 16-bit weights, and where the GPU has no bfloat16 anyway (T4). What QeRL's noise adds to
the mismatch stays. Not for models whose activations pass 65504, which then are infinite: the run
stops with a message.
"""
from methods import Method
from qerl import require


class Neighbour(Method):
    """QeRL in float16."""
    @classmethod
    def defaults(cls, variant):
        return dict(dtype="float16")

    def check(self):
        given = self.settings.dtype
        require(given == "float16",
                f"--method fp16: computes in float16, not in {given}; leave --dtype {given} out")
