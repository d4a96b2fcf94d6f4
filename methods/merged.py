"""LoRA merged into 16-bit weights for the time of a rollout.

    python train_gsm8k.py --model Qwen2.5-1.5B --method merged

The problem. With more than about 128 sequences arithmetic decides how long decoding takes: 4 bits save
no time there, and LoRA's two thin products beside each layer take a quarter of a step.

The formula, for the time of a rollout:

    W' = bfloat16(Ŵ + α/r · B A)

What differs from QeRL: a rollout of more than MERGED_ABOVE sequences reads such weights, of 2 bytes
each, if half of the free memory holds them. The 4-bit codes stay beside them for the training.

How exact is it? The log-probabilities are as near to float32's as before, since training rounds Ŵ to
bfloat16, too. But the roundings differ, and without noise the KL of rollout to training grew from
1.2e-4 to 1.9e-4 nats a token (1.5B) and from 1.9e-3 to 2.7e-3 (7B, random weights). Where Ŵ is a
bfloat16 number already (BF16, MXFP4, and NF4 as the kernel decodes it) rounding would remove a small
B A: if it is 4e-5 of Ŵ, 2 % of it would be left. Such weights are not merged. NVFP4's weights lie
between the bfloat16 numbers, and there rounding keeps B A on average.

The results are ours, there is no paper. Measured on an H100 with random weights: 256 tokens of 512
sequences of 1.5B take 1.56 s instead of 2.00 s, and of 256 sequences 0.99 s instead of 1.41 s; 7B
takes 2.30 s instead of 3.19 s with 160 sequences, and 2.68 s instead of 2.86 s with 256. Runs
that were trained so are in results/speedrun.md.

When would you use it? On a GPU, with more than 128 sequences at once and memory for 16-bit weights,
if the log's mismatch_kl stays small beside that of the noise.
"""
import torch

from harness import fast
from harness.machine import free_memory
from methods import Method
from methods.parts.eight_bit import current_weight

MERGED_ABOVE = 128             # sequences; up to here linear_kernel computes LoRA itself


def merged_weight(layer, dtype):
    """Weight and LoRA of a layer as a PackedWeight of dtype; None if rounding could lose LoRA."""
    row = layer.weight.dequantize(torch.float32)[0]
    if torch.equal(row, row.to(dtype).float()):
        return None
    weight = current_weight(layer).to(dtype)
    return fast.FORMATS["bf16"].pack(weight)


class MergingSampler(fast.Sampler):
    """For fast.generate: merges the layers while many slots decode, if memory allows."""

    def record(self):
        self.restore()
        layers = [layer for layer in self.model.quantized_layers()
                  if layer.weight.interleaved]            # fp4_kernels.TiledWeight
        words = sum(layer.weight.words.numel() for layer in layers)
        size = words * 8 * 2                           # bytes: 8 weights a word, 16 bits a weight
        if len(self.completion) > MERGED_ABOVE and size < free_memory(self.model.device) / 2:
            self.merge(layers)
        super().record()

    def merge(self, layers):
        for layer in layers:
            weight = merged_weight(layer, self.model.embedding.dtype)
            if weight is not None:
                layer.unmerged = layer.weight, layer.use_adapter
                layer.weight = weight
                layer.use_adapter = False
                layer.decode_lora = {}

    def restore(self):
        """Give all layers their own weights back, also after a rollout that was stopped."""
        for layer in self.model.quantized_layers():
            if hasattr(layer, "unmerged"):
                layer.weight, layer.use_adapter = layer.unmerged
                del layer.unmerged
                layer.prepare_decoding(self.model.embedding.dtype)

    def rollout(self):
        self.restore()
        return super().rollout()


class Neighbour(Method):
    """QeRL, sampled by a MergingSampler."""

    def generate(self, model, prompts, max_new_tokens, group_size, **options):
        return fast.generate(model, prompts, max_new_tokens, group_size,
                             sampler_class=MergingSampler, **options)
