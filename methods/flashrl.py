"""FlashRL: sample with 8-bit weights and activations, train in 16 bits, weight the tokens.

    python -m methods.flashrl                                        what 8 bits change in a rollout
    python train_gsm8k.py --method flashrl                           INT8; flashrl:fp8 for FP8
    python train_gsm8k.py --method flashrl --lora-rank 0 --beta 0 --lr 1e-4    trains all weights

The problem (github.com/yaof20/Flash-RL, README: primary; fengyao.notion.site/flash-rl): most of the
time goes into sampling, which 8-bit products make faster. But then another policy samples than is
trained, and uncorrected the training suffers.

The formulas (README, primary). Before each rollout, of the current weights W [out, in]:

    s_o = max_i |W_oi| / M      q = round(W / s)     a scale for each output channel
    t_n = max_i |x_ni| / M      p = round(x / t)     a scale for each token, when it comes
    y_no = t_n s_o Σ_i p_ni q_oi

M = 127 and integer sums (INT8), or M = 448 and E4M3 with float sums (FP8); harness/eight_bit.py has
the layers. The update weights each
token by truncated importance sampling, min(π_old / π_rollout, C) with C = --tis: 2 for 0.5B on
GSM8K, 8 for 32B with DAPO.

What differs from QeRL: it trains on the very weights that sample, so that noise is the only
mismatch and is wanted; they have 4 bits and are frozen. Here W is trained, or has LoRA, which is
merged into it before it is quantised, so that the rollout's LoRA has 8 bits, too. And from the
authors' code: theirs quantises for INT8 with what a calibration found once, at the start, here
every scale is a maximum of the current weights; compressed-tensors has amax / 127.5 for INT8.
During a rollout the 16-bit and the 8-bit weights are both in memory. Held-out questions are
answered by the 16-bit policy. --tis 0 shows the method without its correction.

The paper's result: the README recommends it from 14B on, with long completions; users saw no
gain at 32B and 70B (issues 28 and 37). Ours: methods/README.md.

When would you use it? To train all weights, or LoRA on 16-bit weights, of a model whose decoding
mostly reads weights. If LoRA on frozen weights is enough, 4 bits are half as much to read, and need
no correction.
"""
import contextlib
import copy

import torch

import qerl
from harness.eight_bit import eight_bit, require_fp8_products
from harness.full_weights import train_all_weights
from harness.mismatch import describe_mismatch
from harness.small_policy import ByteText, made_up_problems, warm_start
from methods import Method
from qerl import UserError


class Neighbour(Method):
    variants = ("int8", "fp8")

    @classmethod
    def defaults(cls, variant):
        return dict(weights="bf16", sigma_start=0.0, sigma_end=0.0, tis=2.0)

    def check(self):
        if self.settings.weights != "bf16":
            raise UserError(f"--method flashrl: quantises 16-bit weights for the rollout, and "
                            f"{self.settings.weights} is smaller already; use --weights bf16")
        if self.variant == "fp8":
            require_fp8_products(
                self.settings.device, "flashrl:fp8", "use --method flashrl:int8")

    @contextlib.contextmanager
    def noise(self, model, sigma, generator):
        with super().noise(model, sigma, generator), eight_bit(model, self.variant):
            yield


def main():
    text = ByteText()
    prompts = [text.prompt(p["question"]) for p in made_up_problems()[1][:32]]
    repeated = [prompt for prompt in prompts for _ in range(4)]
    model = qerl.load_model(warm_start(), "bf16")
    train_all_weights(model)
    four_bits = qerl.load_model(warm_start(), "nvfp4")
    updated = copy.deepcopy(model)             # as by a step of Adam with a learning rate of 1e-3
    generator = torch.Generator().manual_seed(0)
    for layer in updated.quantized_layers():
        sign = torch.randn(layer.master.shape, generator=generator).sign()
        layer.master.data += 1e-3 * sign

    print("128 completions of the built-in policy (float32), and what weighting them would leave\n"
          f"{'sampled with':34} {'trained':8} {'bits':>6} {'KL/token':>9} "
          f"{'eff. tokens':>12} {'eff. completions':>17}")

    def compare(name, trained_name, bits, sampler, trained, format=None):
        context = eight_bit(sampler, format) if format else contextlib.nullcontext()
        with context:
            rollout = qerl.generate(sampler, prompts, 64, 4, eos=text.eos,
                                    generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            logprobs = qerl.token_logprobs(trained, repeated, rollout.tokens, rollout.length)
        seen = describe_mismatch(logprobs, rollout.logprobs, rollout.mask)
        print(f"{name:34} {trained_name:8} {bits:6} {abs(seen['mismatch_kl']):9.5f} "
              f"{seen['effective_tokens']:12.1%} {seen['effective_completions']:17.1%}", flush=True)

    compare("the weights that are trained", "float32", 32, model, model)
    compare("INT8, quantised now", "float32", 8, model, model, "int8")
    compare("FP8, quantised now", "float32", 8, model, model, "fp8")
    compare("INT8, quantised before an update", "float32", 8, model, updated, "int8")
    compare("NVFP4, quantised now", "float32", 4.5, four_bits, model)
    compare("NVFP4, as QeRL: trained as sampled", "NVFP4", 4.5, four_bits, four_bits)
    print("\n8 bits cost little, INT8 less than FP8, whose codes have 3 bits behind the leading one.\n"
          "TIS is to correct that. Codes must follow the policy: those from before an update are\n"
          "farther away. 4 bits are farther still, unless, as in QeRL, they are what is trained.")


if __name__ == "__main__":
    main()
