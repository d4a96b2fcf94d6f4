"""Float16 instead of bfloat16, in the sampler and in training (arXiv 2510.26788).

    python train_gsm8k.py --method fp16

The problem. Decoding and training compute the same policy, but they add in different orders, and so
they round differently. The ratio of the two at a token should be 1 and is not: every update is a
little off-policy, and over a long completion such small errors multiply. Importance weights (--tis)
are the usual remedy. This method goes to the cause: bfloat16 has few digits.

                 sign  exponent  mantissa   relative rounding   smallest above 0   largest
    bfloat16        1         8         7   2^-8  = 0.4 %       9e-41              3e38
    float16         1         5        10   2^-11 = 0.05 %      6e-8               65504

Rounding errors are 8 times smaller in float16. A KL grows with their square, so that we expect the
mismatch

    K3 = mean(e^l - 1 - l),   l = log pi_old - log pi_rollout of a sampled token

to be 64 times smaller (our inference, from the number formats). The price is the range: a gradient
below 6e-8 becomes 0. The formula against it is S⁻¹ ∇(S loss): the loss is multiplied by a scale S,
backward computes S times the gradient, and this is divided by S in float32 before clipping. S begins
at 65536. Where a gradient overflows, the optimiser step is left out and S is halved; after 400 steps
without overflow S is doubled (torch.amp.GradScaler). By a secondary note, the paper has these 400,
where PyTorch has 2000, and divides before clipping.

What differs from QeRL: the dtype of activations and the growth interval of S. LoRA stays in float32.
On a GPU the 4-bit kernels compute in bfloat16 alone: in float16 each 4-bit layer is decoded and then
multiplied, so that a step takes longer. Compare accuracies at equal steps, or use --weights bf16
(16-bit weights, here as float16) on both sides. The run to compare with has --dtype bfloat16.

The paper's result (by secondary notes): its mismatch is 0.32, against 7.64 with bfloat16, in the
paper's units; training stays stable for longer, and float16 beats all bfloat16 baselines. Ours: on
0.5B K3 is 5.5e-5 with noise, where bfloat16 has 4.6e-4; accuracy: methods/README.md.

When would you use it? Where mismatch_kl is large without noise, which happens with long completions,
deep models or 16-bit weights, and where the GPU has no bfloat16 (T4). What QeRL's noise adds to the
mismatch stays. It is not for models whose activations pass 65504: they become infinite, and the run
stops with a message.
"""
from methods import Method
from harness.errors import require


class Neighbour(Method):
    """QeRL in float16."""
    @classmethod
    def defaults(cls, variant):
        return dict(dtype="float16")

    def check(self):
        given = self.settings.dtype
        require(given == "float16",
                f"--method fp16: computes in float16, not in {given}; leave --dtype {given} out")
