"""AWQ: input channels that carry large activations are scaled up before rounding (arXiv 2306.00978).

    python train_gsm8k.py --quantizer awq                            works with every --method

Problem. Rounding to the nearest code (RTN) makes errors of one size in all weights of a block. But
the input multiplies the error of its weight, and a few channels have far larger inputs than the
others. QeRL's authors calibrated their own models by AWQ.

Formula. Q rounds to NVFP4; W [out, in] is a weight, X its inputs, x̄ the mean |x| of a channel:

    min over a in 0, 0.05 .. 0.95 of ‖Q(W s) s⁻¹ X - W X‖²,    s = max(x̄ᵃ, 1e-4),

divided by √(max s · min s). s⁻¹ is folded into the norm before (q, k, v; gate, up) or the layer
before (up -> down). o is rounded as it is: several heads of it read one head of v. Since
‖D X‖² = tr(D H Dᵀ) with H = Σ x xᵀ, H and x̄ are all that one has to know of the inputs.
[Eq. 4-5 of the paper; the normalisation is from the authors' code]

What differs from QeRL. Only the loaded bytes differ; methods/parts/quantizers.py finds and keeps them.
AWQ's authors measure q, k, v behind the attention, and gate, up behind the MLP, and clip weights
afterwards; we measure each layer's own output, and do not clip. The norms' scales become w / s, so
that the same σ of AQN is more noise where s is large.

Results. GSM8K as a fraction of the 16-bit model's, Qwen3-30B-A3B: RTN 0.985, AWQ 0.975, GPTQ 1.001,
where the measurement has a noise of 0.011 (llm-compressor's thread 3001). Ours: methods/README.md.

When would you use it? Where your serving stack asks for it. NVFP4's blocks have scales of their own
already, so that GPTQ comes nearer to the 16-bit model.
"""
import torch

import qerl
from harness import fast
from harness.export import stacked_parts
from methods.parts.calibration import calibrate


def awq_scale(layer, seen):
    """s float32 [in], by which a layer's input channels are multiplied before rounding."""
    weight = layer.weight.dequantize(torch.float32)
    mean = seen.magnitude / max(seen.count, 1)
    lowest = float("inf")
    for step in range(20):
        s = mean.pow(step / 20).clamp_min(1e-4)
        s = s / (s.max() * s.min()).sqrt()
        parts = qerl.quantize_nvfp4(weight * s)
        difference = fast.FORMATS["nvfp4"].dequantize(*parts, torch.float32) / s - weight
        error = ((difference @ seen.gram) * difference).sum()    # tr(D H Dᵀ)
        if error < lowest:
            lowest = error
            best = s
    return best


def fold(block, scales):
    """{tensor name: tensor} of a block that computes the same with its weights times these scales.

    scales: {layer: s [in]} of qkv, gate_up and down.
    """
    found = {}
    attention = block.attention
    mlp = block.mlp
    for layer, norm in ((attention.qkv, block.attention_norm), (mlp.gate_up, block.mlp_norm)):
        found[f"{norm.name}.weight"] = norm.weight.detach() / scales[layer]
    for layer in (attention.qkv, attention.o, mlp.gate_up, mlp.down):
        weight = layer.weight.dequantize(torch.float32) * scales.get(layer, 1)
        found |= {f"{name}.weight": part for name, part in zip(layer.names, weight.split(layer.sizes))}
    _, up = mlp.gate_up.names                              # which feeds down
    found[f"{up}.weight"] = found[f"{up}.weight"] / scales[mlp.down][:, None]
    if mlp.gate_up.bias is not None:
        _, bias = mlp.gate_up.bias.chunk(2)
        found[f"{up}.bias"] = (bias / scales[mlp.down]).to(bias.dtype)
    return found


def choose_codes(model, sequences):
    """{tensor name: tensor} in the place of a 16-bit model's; sequences: those of parts/worked.py.

    A block reads what the 16-bit blocks before it give.
    """
    found = {}
    for block, inputs in calibrate(model, sequences):
        scales = {layer: awq_scale(layer, seen) for layer, seen in inputs.items()
                  if layer is not block.attention.o}
        folded = fold(block, scales)
        for layer in inputs:
            weights = [folded.pop(f"{name}.weight") for name in layer.names]
            parts = qerl.quantize_nvfp4(torch.cat(weights))
            found.update(stacked_parts(layer.names, layer.sizes, *parts))
        found.update(folded)                       # norms and a bias
    return found
