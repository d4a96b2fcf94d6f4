"""Compile the kernels for GPUs that are not here, on a machine without any; nothing is run.

    python -m harness.cross_compile 80 86 89 90 100 120     compute capabilities, without the dot

One line a kernel: shared memory, spilled bytes, the tensor-core instruction, and how many tiles pass
through shared memory between two operations of the kernel. The test test_kernels_compile_for holds
them to each GPU's limits.
"""
import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile

import torch

import fp4_kernels

SHARED = {              # bytes of shared memory that a program can have
    75: 64 * 1024,
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}
SMS = {75: 40, 80: 108, 86: 82, 89: 128, 90: 132, 100: 148, 120: 170}
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
        return {"max_shared_mem": SHARED[self.target], "multiprocessor_count": SMS[self.target]}


def ptxas_path(target):
    from triton.backends.nvidia import compiler
    return compiler.get_ptxas(target).path


def facts(kernel, target):
    """What a compiled kernel needs and uses."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(kernel.asm["ptx"])
        ptx.flush()
        gpu = f"sm_{target}{'a' if target >= 90 else ''}"
        command = [ptxas_path(target), "-v", f"--gpu-name={gpu}", ptx.name, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True).stderr
    return {
        "shared": kernel.metadata.shared,
        "spilled": int(re.search(r"(\d+) bytes spill stores", log)[1]),
        "instructions": sorted(set(re.findall(INSTRUCTIONS, kernel.asm["ptx"]))),
        "through_shared": len(re.findall(r"ttg\.local_alloc %\S+ : \(tensor", kernel.asm["ttgir"])),
    }


def compile_for(target, launch_all):
    """Compile whatever launch_all() launches -> one dictionary a launch."""
    from triton.runtime import driver, jit
    driver.set_active(AbsentGpu(target))
    launches = []
    run = jit.JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        launch = {"kernel": self.__name__}
        launches.append(launch)
        if "ROWS" in options:
            launch["shape"] = [options[name] for name in ("ROWS", "R", "C")]
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                kernel = run(self, *args, grid=grid, warmup=True, **options)
            launch.update(facts(kernel, target))
        except Exception as e:            # of whatever kind: it is what the test looks for
            launch["error"] = f"{type(e).__name__}: {e.__cause__ or e}"[:500]

    jit.JITFunction.run = compile_only
    try:
        launch_all()
    finally:
        jit.JITFunction.run = run
    return launches


def pretend(target):
    """Have fp4_kernels choose as on the GPU, though tensors are on the CPU."""
    fp4_kernels.capability = lambda device: divmod(target, 10)
    fp4_kernels.use_triton = lambda x: True
    small = fp4_kernels.Scratch(
        SMS[target], torch.empty(2 ** 25), torch.empty(2 ** 22), torch.zeros(2 ** 16, dtype=torch.int32))
    fp4_kernels.scratch = lambda device: small


def launch_others(dtype):
    """All kernels but those of tiles, on tensors of this dtype, with gradients."""
    def empty(*shape):
        return torch.empty(*shape, dtype=dtype, requires_grad=True)

    if dtype != torch.bfloat16:
        fp4_kernels.encode_e2m1(empty(64, 512).detach(), torch.ones(64, 32))
    fp4_kernels.rms_norm(empty(64, 3584), torch.ones(3584), 1e-6).sum().backward()
    fp4_kernels.silu_mul(empty(64, 7168)).sum().backward()
    angles = torch.ones(32, 128)
    fp4_kernels.rotary(empty(2, 32, 28, 128), angles, angles).sum().backward()
    tokens = torch.zeros(64, dtype=torch.long)
    fp4_kernels.token_logprob(empty(64, 32000), tokens).sum().backward()
    qkv = empty(2, 36 * 128).detach()
    cache = empty(2, 4, 512, 128).detach()
    filled = torch.zeros(2, dtype=torch.long)
    fp4_kernels.decode_attention(qkv, qkv[:, :128], qkv[:, :128], cache, cache, filled)
    fp4_kernels.sample(empty(16, 152064).detach(), 1.0, torch.zeros(1, dtype=torch.long))


def launch_tiles(every_shape):
    """untile_kernel, and linear_kernel in the GPU's Shapes or the largest ones of each group."""
    out = 3 * 512
    columns = 1024
    words = torch.empty(out // 64, columns // 64, 512, dtype=torch.int32)
    scales = torch.empty(out // 64, columns // 64, 4, 8, 4, 2, dtype=torch.uint8)
    weight = fp4_kernels.TiledWeight(words, scales, torch.ones(out), torch.ones(16))
    nf4_scales = torch.empty(out // 64, columns // 64, 4, 8, 2, dtype=torch.bfloat16)
    nf4 = fp4_kernels.TiledWeight(words, nf4_scales, torch.ones(out), torch.ones(16))
    weight.dequantize()
    nf4.dequantize(interleaved=True)

    lora = weight.prepare_lora(torch.empty(96, columns), torch.empty(out, 32), [512] * 3, 1.0)
    for group in fp4_kernels.shapes_on(words.device):
        for shape in group if every_shape else group[-1:]:
            x = torch.empty(shape.rows, columns, dtype=torch.bfloat16)
            residual = torch.empty(shape.rows, out, dtype=torch.bfloat16)
            weight.multiply(x, torch.empty(out), residual, lora, shape)


def main():
    for target in map(int, sys.argv[1:]):
        pretend(target)

        def launch_all():
            if target < 80:
                return launch_others(torch.float16)
            launch_others(torch.bfloat16)
            launch_tiles(every_shape=target in (80, 86))
        for launch in compile_for(target, launch_all):
            print(json.dumps({"target": target, **launch}), flush=True)


if __name__ == "__main__":
    main()
