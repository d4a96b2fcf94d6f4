"""Float16 instead of bfloat16, in the sampler and in training (arXiv 2510.26788).

    python -m methods.fp16                             the demonstration, on a CPU
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
import types

import torch

import qerl
from harness.demonstration import adapted_policy, gradient, relative, sample_step
from methods import Method
from qerl import require


class Neighbour(Method):
    """QeRL in float16."""
    loss_scale_growth = 400

    @classmethod
    def defaults(cls, variant):
        return dict(dtype="float16")

    def check(self):
        given = self.settings.dtype
        require(given == "float16",
                f"--method fp16: computes in float16, not in {given}; leave --dtype {given} out")


# --------------------------------------------------------------------------------------------------
# The demonstration

def main():
    settings = types.SimpleNamespace(micro_tokens=16384)
    print("1. Decoding against training: the same policy twice, without noise. l should be 0.\n\n"
          "  dtype           K3   mean |l|   largest ratio   off by over 1 %   10 %")
    policies = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        policies[dtype], text, prompts = adapted_policy(8, lora_rank=8, dtype=dtype)
        _, batch = sample_step(Method(settings), policies[dtype], text, prompts)
        log_ratio = (batch.old_logprobs - batch.rollout_logprobs)[batch.mask]
        k3, largest = qerl.mismatch(batch.old_logprobs, batch.rollout_logprobs, batch.mask)
        off = [(log_ratio.expm1().abs() > limit).float().mean() for limit in (0.01, 0.1)]
        print(f"  {str(dtype)[6:]:9} {max(k3, 0):8.1e}   {log_ratio.abs().mean():8.1e} "
              f"{largest:15.3f} {off[0]:17.2%} {off[1]:6.2%}")

    batch.weights = qerl.token_weights(batch.mask)             # of float32, the last
    batch.advantages[::2] = -1
    exact = gradient(policies[torch.float32], batch)
    print("\n2. What loss scaling is for: LoRA's gradient of one minibatch, against float32's. A\n"
          "token's share falls with the size of the minibatch: a scale of 2^-6 stands for one of 64\n"
          "times as many tokens. vanished: elements that became 0. An infinite one is left out.\n\n"
          "  dtype     loss scale   relative error   vanished")
    cases = [(torch.bfloat16, 0)] + [(torch.float16, k) for k in (-12, -6, 0, 16, 32)]
    for dtype, k in cases:
        found = gradient(policies[dtype], batch, 2.0 ** k)
        shown = f"{relative(found, exact):.2%}" if found.isfinite().all() else "infinite"
        vanished = ((found == 0) & (exact != 0)).float().mean()
        print(f"  {str(dtype)[6:]:9} {f'2^{k}':>10} {shown:>16} {vanished:10.2%}")


if __name__ == "__main__":
    main()
