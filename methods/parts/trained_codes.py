"""Models whose weights are trained as NVFP4 has them, and back to bytes: for methods/qat.py."""
import torch

import qerl
from harness.full_weights import TrainedLinear, replace_layers
from harness.packed_folder import named_parts


class ScaledLinear(TrainedLinear):
    """A QuantLinear's layers with trained weights, and the scales of their NVFP4, which stay."""

    def __init__(self, layer, parts):
        """parts: for each of the layers what quantize_nvfp4 returned."""
        super().__init__(layer)
        self.block_scales = [block_scale for _, block_scale, _ in parts]
        self.global_scales = [global_scale for _, _, global_scale in parts]
        scales = [b.float() / g for b, g in zip(self.block_scales, self.global_scales)]
        self.scale = torch.cat(scales)                                           # [out, in/16]


def trained_codes_model(folder, layer_class, device):
    """The model of a 16-bit folder, or of one in NVFP4, with a class of ScaledLinear as layers."""
    model = qerl.load_model(folder, "bf16", device=device)
    checkpoint = qerl.Checkpoint(qerl.open_tensors(folder, device), device=device)

    def make(layer):
        in_features = layer.weight.dequantize(torch.float32).shape[1]
        parts = [checkpoint.quantized(name, size, in_features, "nvfp4")
                 for name, size in zip(layer.names, layer.sizes)]
        return layer_class(layer, [(p, b, g[:1, 0]) for p, b, g in parts])

    replace_layers(model, make)
    return model


def packed_tensors(model):
    """{tensor name: tensor} of the NVFP4 that the forward passes of its layers multiply with."""
    found = {}
    for layer in model.quantized_layers():
        packed = qerl.encode_e2m1(layer.master.detach(), layer.scale).split(layer.sizes)
        for name, *parts in zip(layer.names, packed, layer.block_scales, layer.global_scales):
            found.update(named_parts(name, *parts))
        if layer.bias is not None:
            biases = layer.bias.detach().split(layer.sizes)
            found.update((f"{name}.bias", bias) for name, bias in zip(layer.names, biases))
    return found
