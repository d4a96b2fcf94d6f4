"""QuRL: an 8-bit rollout whose clipping follows the truncation, and whose steps show in the codes.

    python train_gsm8k.py --method qurl:acr            ACR alone, with QeRL's rollout
    python train_gsm8k.py --method qurl                both, all weights, on an INT8 rollout; qurl:fp8: FP8

The problem (arXiv 2602.13953, abstract; the formulas are from secondary notes, two of which agree).
FlashRL's truncated weights make long runs collapse. And steps of RL are so small that rounding
swallows them: the 8-bit policy that samples stands still while the 16-bit one is trained.

ACR (adaptive clipping range). Let ρ = π_old / π_rollout and R = π / π_old at a token. The whole
weight ρ is truncated to w = min(ρ, C) = ρ r with r = min(1, C / ρ). Then

    w min(R A, clip(R, 1-ε, 1+ε) A) = ρ min(r R A, clip(r R, r (1-ε), r (1+ε)) A):

where r < 1 the upper bound of what ρ weights fell from 1+ε to r (1+ε). ACR puts it back:

    w min(R A, clip(R, 1-ε, (1+ε) / r) A).

So a bound moves only at tokens whose weight was truncated. (One note has r = π_old / π_rollout,
which moves nearly all bounds, and inwards where ρ is large. That contradicts the derivation. We
follow the derivation: an inference.)

UAQ (update-aware quantisation). Once, before training, the norms' scales γ become s γ, and the weights
W that read them W / s, with s = 1.5. The function stays, and an optimiser's step in W is s times
larger against the quantisation step. Our inference: as the quantiser's scales are maxima, codes and
relative rounding errors stay as well. Only the larger step is gained, as by a learning rate times s,
and only for the weights that read a norm; the norm's own scales, which are trained, too, move 1/s as
far. So frozen weights gain nothing: NVFP4's codes and block scales do not change, and --method qurl
refuses them. (A note counts s², since it measures the rounding error in the units of the smaller
weights.)

What differs from QeRL: QeRL does not change the clipping, and its LoRA is never rounded.

The paper's result (secondary; 0.5B, PPO, GSM8K): BF16 55.4, FlashRL INT8 51.4, QuRL INT8 53.6, QuRL
FP8 54.3. Ours: on the small policy acr never reaches its cap, so that its runs are those of token-tis
to the last bit; accuracy: methods/README.md.

When would you use it? Where FlashRL's rollout is right, all weights are trained with small steps, and
the log has tokens beyond the cap (capped_fraction). If it has none, ACR changes nothing.
"""
import qerl
from methods import flashrl
from harness.errors import require

UAQ_SCALE = 1.5


def scale_for_updates(model, s):
    """UAQ, in place: norm scales times s, the trained weights that read them divided by s."""
    for block in model.blocks:
        readers = (block.attention_norm, block.attention.qkv), (block.mlp_norm, block.mlp.gate_up)
        for norm, layer in readers:
            norm.weight.data *= s
            layer.master.data /= s


def kept_of_weight(old_logprobs, rollout_logprobs, cap):
    """r = min(1, C π_rollout / π_old) [B, C]: the fraction of a weight that truncation leaves."""
    return (cap * (rollout_logprobs - old_logprobs).exp()).clamp(max=1)


class Neighbour(flashrl.Neighbour):
    variants = ("int8", "fp8", "acr")

    @classmethod
    def defaults(cls, variant):
        if variant == "acr":
            return dict(tis=2.0)
        return dict(**super().defaults(variant), lora_rank=0, beta=0.0, lr=1e-6)

    def check(self):
        settings = self.settings
        name = f"--method {settings.method}"
        require(settings.tis, f"{name}: ACR undoes what truncation does to clipping; use --tis 2")
        if self.variant != "acr":
            super().check()
            require(settings.lora_rank == 0,
                    f"{name}: UAQ is for weights that are trained; use --lora-rank 0, or --method qurl:acr")

    def prepare(self, model, *_):
        if self.variant != "acr":
            scale_for_updates(model, UAQ_SCALE)

    def adaptive_quantization_noise(self, model, sigma, generator):
        sampled_by = qerl if self.variant == "acr" else super()
        return sampled_by.adaptive_quantization_noise(model, sigma, generator)

    def policy_loss(self, logprobs, old_logprobs, advantages, weights, clip_low, clip_high,
                    ref_logprobs, beta, rollout_logprobs, tis, **_):
        r = kept_of_weight(old_logprobs, rollout_logprobs, tis)
        return qerl.policy_loss(
            logprobs, old_logprobs, advantages, weights,
            clip_low + 0 * r, (1 + clip_high) / r - 1,
            ref_logprobs, beta, rollout_logprobs, tis)

    def mismatch(self, old_logprobs, rollout_logprobs, mask):
        """qerl.mismatch, with which the loop ends a step."""
        r = kept_of_weight(old_logprobs, rollout_logprobs, self.settings.tis)
        self.measured["capped_fraction"] = (r < 1)[mask].float().mean().item()
        return qerl.mismatch(old_logprobs, rollout_logprobs, mask)
