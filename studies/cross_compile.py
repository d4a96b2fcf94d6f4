"""Compile the kernels for a GPU that is not here, on a machine without any; nothing is run.

    python -m studies.cross_compile 86         a compute capability without its dot, here 8.6

One line a kernel: its name, the bytes of shared memory that a program takes, and of linear_kernel the
tile. An error of the compiler ends it. What compiles may still be slow there, or wrong: only the GPU
itself shows that.
"""
import sys
from types import SimpleNamespace

import torch

import fp4_kernels
from harness import fast
from methods.parts import eight_bit
from studies.random_models import random_model


def pretend(target):
    """From now on kernels are chosen as on this GPU, though tensors are on the CPU, and are compiled
    and printed instead of run.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit
    driver.set_active(SimpleNamespace(              # what Triton asks of a driver
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", target, 32),
    ))
    fp4_kernels.capability = lambda device: divmod(target, 10)
    fp4_kernels.runs_on = lambda device, dtype: True
    fp4_kernels.tiles_fit = lambda *_: target >= 80
    run = jit.JITFunction.run

    def compile_only(self, *args, warmup, **options):
        kernel = run(self, *args, warmup=True, **options)
        tile = [options[name] for name in ("ROWS", "R", "C") if "R" in options]
        print(self.__name__, kernel.metadata.shared, *tile, flush=True)

    jit.JITFunction.run = compile_only


def launch_model(weights, dtype):
    """What a rollout and an update launch."""
    model = random_model("tiny", weights, 32, "cpu", dtype)
    for layer in model.quantized_layers():
        layer.prepare_decoding(dtype)
    cache = fast.KVCache(model, 16, 64)
    with torch.no_grad():
        model.decode(torch.zeros(16, dtype=torch.long), cache)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    fast.token_logprobs(model, [[0] * 8], tokens, torch.tensor([8])).sum().backward()
    logits = torch.zeros(16, 9000, dtype=dtype)
    fp4_kernels.sample(logits, 1.0, torch.zeros(1, dtype=torch.long), top_p=0.9)
    fp4_kernels.round_columns(*torch.ones(3, 128, 128))
    if fp4_kernels.is_hopper(None):                    # the products of exact sampling
        x, weight = torch.empty(2, 128, 4096, dtype=dtype)
        fp4_kernels.in_order(x, weight, None)
        fp4_kernels.lora_down(x, weight)


def launch_tiles():
    """linear_kernel in all Configs of the GPU."""
    format = fast.FORMATS["nvfp4"]
    weight = format.tile(*format.quantize(torch.ones(512, 512)))
    lora = weight.prepare_lora(torch.empty(32, 512), torch.empty(512, 32), [512], 1.0, torch.bfloat16)
    for config in fp4_kernels.configs_on(weight.words.device):
        x = torch.empty(config.rows, 512, dtype=torch.bfloat16)
        fp4_kernels.config_for = lambda *_, chosen=config: chosen
        weight.multiply(x, bias=x[0], lora=lora)


if __name__ == "__main__":
    capability = int(sys.argv[1])
    pretend(capability)
    launch_model("nvfp4", torch.bfloat16 if capability >= 80 else torch.float16)
    if capability not in (75, 90):          # which have no tiles; on which the tests run them
        launch_tiles()
    if capability >= 89:                    # which have FP8
        eight_bit.quantize(torch.empty(300, 3584, dtype=torch.bfloat16), "fp8")
