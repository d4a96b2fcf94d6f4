"""Compile the kernels for a GPU that is not here, on a machine without any; nothing is run.

    python -m studies.cross_compile 86         a compute capability without its dot, here 8.6

One line a kernel. test_kernels_compile_for holds them to the GPU's limits. What compiles may still
be slow there, or wrong: only the GPU itself shows that.
"""
import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile

import torch

import fp4_kernels

# Shared memory of an SM in kB; a program can have 1 kB less, which the system keeps for each.
# (CUDA C++ Programming Guide, technical specifications per compute capability)
SHARED = {75: 64, 80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
SMS = 128
INSTRUCTIONS = r"mma\.sync|wgmma\.mma_async|tcgen05\.mma"


class AbsentGpu:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, target):
        self.target = target
        self.utils = self

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        return GPUTarget("cuda", self.target, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_device_properties(self, device):
        return {"max_shared_mem": 1024 * SHARED[self.target], "multiprocessor_count": SMS}


def ptxas_path(target):
    from triton.backends.nvidia import compiler
    return compiler.get_ptxas(target).path


def spilled_bytes(ptx, target):
    with tempfile.NamedTemporaryFile("w", suffix=".ptx", encoding="utf-8") as file:
        file.write(ptx)
        file.flush()
        gpu = f"sm_{target}{'a' if target >= 90 else ''}"
        command = [ptxas_path(target), "-v", f"--gpu-name={gpu}", file.name, "-o", os.devnull]
        log = subprocess.run(command, capture_output=True, text=True).stderr
    return int(re.search(r"(\d+) bytes spill stores", log)[1])


def through_shared(ttgir, size):
    """How often bfloat16 tensors of so many elements are given to other threads."""
    moves = re.findall(r"ttg\.(?:local_alloc|convert_layout) %\S+ : \(?tensor<([\dx]+)xbf16", ttgir)
    return sum(math.prod(map(int, move.split("x"))) == size for move in moves)


def facts(kernel, options, target):
    """What a compiled kernel needs and uses."""
    ptx = kernel.asm["ptx"]
    found = {
        "shared": kernel.metadata.shared,
        "spilled": spilled_bytes(ptx, target),
        "instructions": sorted(set(re.findall(INSTRUCTIONS, ptx))),
    }
    if "ROWS" in options:                 # linear_kernel, which decodes 64 R x 64 C weights a step
        weights = 64 * options["R"] * 64 * options["C"]
        found["weights_moved"] = through_shared(kernel.asm["ttgir"], weights)
    return found


def compile_for(target, launch):
    """Compile whatever launch() launches -> one dictionary a kernel."""
    from triton.runtime import driver, jit
    driver.set_active(AbsentGpu(target))
    kernels = []
    run = jit.JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        found = {"kernel": self.__name__}
        kernels.append(found)
        if "ROWS" in options:
            found["config"] = [options[name] for name in ("ROWS", "R", "C")]
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                kernel = run(self, *args, grid=grid, warmup=True, **options)
            found.update(facts(kernel, options, target))
        except Exception as e:            # of whatever kind: it is what the test looks for
            found["error"] = f"{type(e).__name__}: {e.__cause__ or e}"[:500]

    jit.JITFunction.run = compile_only
    try:
        launch()
    finally:
        jit.JITFunction.run = run
    return kernels


def pretend(target):
    """Have fp4_kernels choose as on the GPU, though tensors are on the CPU."""
    fp4_kernels.capability = lambda device: divmod(target, 10)
    fp4_kernels.runs_on = lambda device, dtype: True
    scratch = fp4_kernels.Scratch(
        sms=SMS,
        partial=torch.empty(2 ** 25),
        lora_partial=torch.empty(2 ** 22),
        counters=torch.zeros(2 ** 16, dtype=torch.int32),
    )
    fp4_kernels.scratch = lambda device: scratch


def launch_others(dtype):
    """All kernels but those of tiles, on tensors of this dtype, with gradients."""
    def empty(*shape):
        return torch.empty(*shape, dtype=dtype, requires_grad=True)

    fp4_kernels.encode_e2m1(empty(64, 512).detach(), torch.ones(64, 32))
    fp4_kernels.rms_norm(empty(64, 3584), torch.ones(3584), 1e-6).sum().backward()
    fp4_kernels.silu_mul(empty(64, 7168)).sum().backward()
    angles = torch.ones(32, 128)
    fp4_kernels.rotary(empty(2, 32, 28, 128), angles, angles).sum().backward()
    tokens = torch.zeros(64, dtype=torch.long)
    fp4_kernels.token_logprob(empty(64, 32000).detach(), tokens, gradient=True)
    qkv = empty(2, 36 * 128).detach()
    pieces = [empty(2, 2, 4, 512, 128).detach()]
    addresses = torch.tensor([pieces[0].data_ptr()])
    filled = torch.zeros(2, dtype=torch.long)
    fp4_kernels.decode_attention(qkv, qkv[:, :128], qkv[:, :128], pieces, addresses, 512, filled, 512)
    fp4_kernels.sample(empty(16, 152064).detach(), 1.0, torch.zeros(1, dtype=torch.long))


def launch_tiles(every_config):
    """untile_kernel, and linear_kernel in the GPU's Configs or in the last one of each group."""
    out = 3 * 512
    columns = 1024
    words = torch.empty(out // 64, columns // 64, 512, dtype=torch.int32)
    for scales in (torch.empty(*words.shape[:2], 4, 8, 4, 2, dtype=torch.uint8),
                   torch.empty(*words.shape[:2], 4, 8, 1, 2, dtype=torch.bfloat16)):
        weight = fp4_kernels.TiledWeight(words, scales, torch.ones(out), torch.ones(16))
        weight.dequantize(interleaved=weight.nf4)
        if weight.nf4 and not fp4_kernels.is_hopper(words.device):
            continue
        lora = weight.prepare_lora(torch.empty(96, columns), torch.empty(out, 32), [512] * 3, 1.0)
        groups = fp4_kernels.configs_on(words.device)
        for group in groups[:1] if weight.nf4 else groups:
            for config in group if every_config else group[-1:]:
                x = torch.empty(config.rows, columns, dtype=torch.bfloat16)
                residual = torch.empty(config.rows, out, dtype=torch.bfloat16)
                weight.multiply(x, torch.empty(out), residual, lora, config)


def launch_all(target):
    if target < 80:
        launch_others(torch.float16)
    else:
        launch_others(torch.bfloat16)
        launch_tiles(every_config=target == 86)


def main():
    target = int(sys.argv[1])
    pretend(target)
    for kernel in compile_for(target, lambda: launch_all(target)):
        print(json.dumps(kernel))


if __name__ == "__main__":
    main()
