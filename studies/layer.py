"""One linear layer's product: its seconds, and its share of what the GPU can do."""
import copy
import math

import torch

from harness import fast, loading
from studies.random_models import random_model


def seconds_of(call):
    """The median of ten CUDA graphs of 0.1 s, which load the GPU alone."""
    from triton.testing import do_bench_cudagraph
    return do_bench_cudagraph(call, rep=100, return_mode="median") / 1e3


def seconds_a_call(layers, x):
    """Of each of these layers: as in decoding, and from 4,096 rows on as in training.

    The results of all are alive at once, so that each has memory of its own, as in a model.
    """
    def call_all():
        return [layer(x) if len(x) >= 4096 else layer.decode(x) for layer in layers]
    return seconds_of(call_all) / len(layers)


def layer_copies(name, weights, number, device):
    """(copies of a linear layer of a shape's block, out, in).

    There are so many copies that together they lie well beyond a GPU's L2 cache.
    """
    layer = random_model(name, weights, 0, device, num_hidden_layers=1).quantized_layers()[number]
    dtype = loading.default_dtype(device)
    layer.prepare_decoding(dtype)
    out, columns = layer.weight.dequantize(dtype).shape
    count = max(2, math.ceil(2e8 / (out * columns * 9 / 16)))
    return [copy.deepcopy(layer) for _ in range(count)], out, columns


@torch.no_grad()
def layer_figures(weights, device):
    """What the card reads and multiplies a second, and the layer for gate and up of 7B.

    A layer's share is the time that reading its weights takes at least, or multiplying if that takes
    longer, of the time that it takes.
    """
    numbers = torch.ones(2**28, device=device)
    x = torch.randn(8192, 8192, device=device, dtype=loading.default_dtype(device))
    bandwidth = numbers.nbytes / seconds_of(numbers.sum)
    speed = 2 * 8192**3 / seconds_of(lambda: x @ x)
    copies, out, columns = layer_copies("Qwen2.5-7B", weights, 2, device)
    stored = sum(tensor.nbytes for tensor in fast.tensors_of(copies[0].weight))
    figures = {"GB/s": bandwidth / 1e9, "TFLOP/s": speed / 1e12}
    for rows in (1, 16, 128, 512):
        seconds = seconds_a_call(copies, x[:rows, :columns].contiguous())
        least = max(stored / bandwidth, 2 * rows * out * columns / speed)
        figures[f"layer x {rows}"] = f"{1e6 * seconds:.0f} µs, {least / seconds:.0%}"
    return figures
