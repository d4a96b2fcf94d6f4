"""Triton's kernels beside their twins."""
import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fp4_kernels
import qerl
from common import have_capability
from methods import merged
from studies import cross_compile
from studies.random_models import random_model
from test_qerl import CUDA, HERE, KERNEL_DEVICE, PROMPTS, gpu, make_folder, relative, runs_kernels
from test_qerl import with_lora


def test_the_interpreter_runs_the_kernels():
    """Runs the kernel tests below in Triton's interpreter, which must be on before Triton is imported."""
    if CUDA or fp4_kernels.INTERPRETED or fp4_kernels.triton is None:
        pytest.skip("the kernel tests run by themselves, or there is no Triton")
    if fp4_kernels.triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton 3.6's interpreter fails with numpy from 2.4 on: pip install 'numpy<2.4'")
    result = subprocess.run([sys.executable, "-m", "pytest", "-q", "-k", "kernel and not interpreter and not compile"], cwd=HERE,
                            capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert result.returncode == 0 and "skipped" not in result.stdout.splitlines()[-1], result.stdout[-2000:]

TILED_FORMATS = [name for name, format in qerl.FORMATS.items() if format.tile]


def tiled_weight(name, out_features, in_features, seed=0):
    """(TiledWeight, its weight float64): random, with rows of very different size and stacked global scales."""
    torch.manual_seed(seed)
    format = qerl.FORMATS[name]
    weight = torch.randn(out_features, in_features) * torch.exp2(torch.randint(-6, 7, (out_features, 1)).float())
    parts = [torch.cat(p) for p in zip(*((p, s, g.view(1, -1).expand(len(p), -1)) for p, s, g in map(format.quantize, weight.split(128))))]
    dense = format.dequantize(*parts, torch.float64)
    if name == "nf4":                                                                     # its scales become bfloat16
        dense = format.dequantize(parts[0], parts[1].bfloat16().float(), parts[2], torch.float64)
    return format.tile(*(p.to(KERNEL_DEVICE) for p in parts)), dense


@pytest.mark.parametrize("name", TILED_FORMATS)
def test_tiles_hold_the_weight_exactly(name):
    tiled, dense = tiled_weight(name, 256, 192)
    torch.testing.assert_close(fp4_kernels.untile_torch(tiled, torch.float64).cpu(), dense, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", TILED_FORMATS)
def test_tiles_multiply_as_the_weight(name):
    """The kernel's twin in float64, with bias, residual and LoRA of three pieces whose rank is not a power of two."""
    tiled, dense = tiled_weight(name, 256, 192)
    x, bias, residual, A, B = (torch.randn(*shape).double() for shape in ((5, 192), (256,), (5, 256), (3 * 6, 192), (256, 6)))
    sizes = [128, 64, 64]
    h = (x @ A.T).split(6, -1)
    expected = x @ dense.T + bias + residual + 2 * torch.cat([h_i @ B_i.T for h_i, B_i in zip(h, B.split(sizes))], -1)
    x, bias, residual, A, B = (t.to(KERNEL_DEVICE) for t in (fp4_kernels.interleave(x), bias, residual, A, B))
    lora = tiled.prepare_lora(A, B, sizes, 2.0, torch.float64)
    assert lora.A.shape == (3 * 16, 192) and lora.B.shape == (256, 16)
    y = fp4_kernels.linear_torch(x, tiled, bias, residual, lora)
    assert relative(y.cpu(), expected) < 1e-6


@pytest.mark.parametrize("nf4", [False, True])
def test_words_hold_every_code_in_every_place(nf4):
    codes = torch.stack([torch.arange(16, dtype=torch.uint8).roll(i) for i in range(8)], -1)
    words = fp4_kernels.pack_words(codes, nf4)
    assert words.dtype == torch.int32 and torch.equal(fp4_kernels.unpack_words(words, nf4), codes.int())


def test_interleave_puts_a_threads_columns_side_by_side():
    """Columns 2t, 2t+1, 2t+8, 2t+9 of four steps of 16, as a tensor core counts them, are the 16 of block t."""
    order = fp4_kernels.interleave(torch.arange(128))
    for tile in order.view(2, 4, 16):
        for t in range(4):
            block = tile[:, [2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9]].flatten().tolist()
            assert block == list(range(block[0], block[0] + 16)) and block[0] % 64 == 16 * t


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [16, 32])
def test_kernel_encode(monkeypatch, dtype, block):
    """Byte for byte as the twin, at ties too, for an odd number of rows."""
    torch.manual_seed(0)
    weight = torch.cat([torch.randn(30, 96) * torch.exp2(torch.randint(-9, 9, (30, 1)).float()), torch.randint(-26, 27, (5, 96)) / 4]).to(dtype)
    scale = weight.float().unflatten(1, (-1, block)).abs().amax(-1).clamp_min(0.1) / 6
    scale[30:] = 1
    packed = fp4_kernels.encode_e2m1(weight.to(KERNEL_DEVICE), scale.to(KERNEL_DEVICE)).cpu()
    monkeypatch.setattr(fp4_kernels, "use_triton", lambda x: False)
    assert torch.equal(packed, qerl.encode_e2m1(weight, scale))


@runs_kernels
@pytest.mark.parametrize("name", TILED_FORMATS)
def test_kernel_untile(name):
    tiled, dense = tiled_weight(name, 192, 384)
    tolerance = 3e-3 if name == "nf4" and CUDA else 1e-6                                  # its table, too, is bfloat16 there
    weight = tiled.dequantize(torch.float32)
    assert relative(weight.cpu().double(), dense) < tolerance
    assert torch.equal(tiled.dequantize(torch.float32, interleaved=True), fp4_kernels.interleave(weight))


def configs_here(group):
    """A group of CONFIGS, as far as the GPU here has room for them."""
    groups = fp4_kernels.configs_on(torch.device(KERNEL_DEVICE))
    if group >= len(groups):
        pytest.skip("only Hopper has room for tiles of more than 64 rows")
    return groups[group]


@runs_kernels
@pytest.mark.parametrize("name,rows,columns,configs", [("nvfp4", 1, 1024, 0), ("nvfp4", 21, 256, 1), ("nvfp4", 70, 1024, 2), ("nvfp4", 70, 384, 2),
                                                      ("nvfp4", 130, 256, 3), ("nvfp4", 300, 256, 4), ("mxfp4", 21, 256, 0), ("nf4", 21, 256, 3)])
def test_kernel_linear(name, rows, columns, configs):
    """Against float64 of the dequantised weight, in each config for about so many rows; then with other inputs, counters back at zero.

    The interpreter, which is slow, takes half of 1024 columns, and the sign of x changes from config to config only.
    """
    group = configs_here(configs)
    if not CUDA:
        columns = min(columns, 512)
    piece = 64 * max(config.R for config in group)                             # a tile lies in one piece
    out = 3 * piece
    tiled, dense = tiled_weight(name, out, columns)
    x, residual = torch.randn(rows, columns).bfloat16(), torch.randn(rows, out).bfloat16() * 64
    bias, A, B = torch.randn(out) * 64, torch.randn(3 * 8, columns) / 16, torch.randn(out, 8) * 8
    h = (x.double() @ A.double().T).split(8, -1)
    plain = x.double() @ dense.T
    with_lora = plain + 2 * torch.cat([h_i @ B_i.double().T for h_i, B_i in zip(h, B.split(piece))], -1)
    x, bias_there, residual_there = (t.to(KERNEL_DEVICE) for t in (fp4_kernels.interleave(x).contiguous(), bias, residual))
    lora = tiled.prepare_lora(A.to(KERNEL_DEVICE), B.to(KERNEL_DEVICE), [piece] * 3, 2.0, torch.bfloat16)
    for number, config in enumerate((None, *group)):
        if CUDA or config is None:                                            # else test_kernel_linear_adds_parts does it
            assert relative(tiled.multiply(x, config=config).cpu().double(), plain) < 5e-3
        for sign in (1, -1) if CUDA else [(-1) ** number]:
            y = tiled.multiply(sign * x, bias_there, residual_there, lora, config)
            assert relative(y.cpu().double(), sign * with_lora + bias + residual) < 5e-3
        assert not fp4_kernels.scratch(x.device).counters.any()
    twin = fp4_kernels.linear_torch(x, tiled, bias_there, residual_there, lora)
    assert relative(twin.cpu().double(), with_lora + bias + residual) < 5e-3


@pytest.mark.parametrize("R", [1, 2, 4])
def test_kernel_configs_fit(monkeypatch, R):
    """A layer is whole tiles of its pieces and whole steps of its columns, also where those are odd multiples of 128."""
    monkeypatch.setattr(fp4_kernels, "CONFIGS", [(*configs[:-1], configs[-1]._replace(R=R)) for configs in fp4_kernels.CONFIGS])
    layers = [(37888, 3584, (18944, 37888)), (37888 + 256, 3584, (18944 + 128, 37888 + 256)), (4608, 3584, (3584, 4096)), (3584, 18944, (3584, 3584)),
              (128 * 301, 128 * 27, (128 * 301,) * 2), (384, 384, (128, 256))]
    for M, (N, columns, bounds), rank in itertools.product((1, 16, 17, 32, 64, 65, 128, 129, 256, 257, 1024), layers, (0, 16, 128)):
        config = fp4_kernels.config_for(M, N, columns, bounds, rank)
        assert all(n % (64 * config.R) == 0 for n in (N, *bounds)) and columns % (64 * config.C) == 0
        assert config.rows >= min(M, 256)


@pytest.mark.skipif(fp4_kernels.triton is None, reason="needs Triton")
def test_kernel_linear_plans_fit():
    """All programs of a plan run at once, have work, and leave no more sums than there is room for."""
    layers = [(37888, 3584, (18944, 37888), 2), (4608, 3584, (3584, 4096), 3), (3584, 18944, (3584, 3584), 1), (128, 128, (128, 128), 1)]
    groups = fp4_kernels.CONFIGS, fp4_kernels.CONFIGS_WITHOUT_WGMMA, fp4_kernels.CONFIGS_IN_100_KB
    for M, (N, columns, bounds, pieces), rank, sms, configs in itertools.product((1, 16, 17, 64, 128, 129, 1024), layers, (0, 16, 128), (3, 132), groups):
        plan = fp4_kernels.plan_linear(M, N, columns, bounds, pieces, rank, sms, groups=configs)
        config = plan.config
        assert plan.tiles * 64 * config.R * config.rows >= M * N > (plan.tiles - N // (64 * config.R)) * 64 * config.R * config.rows
        assert 1 <= plan.programs <= min(config.programs * sms, plan.tiles * columns // (64 * config.C))
        assert plan.ranks == pieces * rank and (plan.lora_programs > 0) == (rank > 0 and M <= 128)
        if sms == 132:                                                                    # 3 SMs may have fewer programs than h has tiles
            assert plan.lora_programs + plan.programs <= config.programs * sms


@pytest.mark.skipif(fp4_kernels.triton is None, reason="needs Triton")
def test_kernel_linear_refuses_what_is_not_whole_tiles():
    with pytest.raises(ValueError, match="not divisible by 128"):
        fp4_kernels.plan_linear(1, 160, 256, (160, 160), 0, 0, 132)
    for out, config in ((192, None), (384, fp4_kernels.CONFIGS[0][2])):
        with pytest.raises(ValueError, match="not whole steps"):
            fp4_kernels.plan_linear(1, out, 256, (out, out), 0, 0, 132, config)


@runs_kernels
@pytest.mark.parametrize("version", [(8, 0), (8, 6)])
def test_kernel_linear_without_wgmma(monkeypatch, version):
    """As GPUs other than Hopper multiply: in the order of mma.sync, with bias, residual and LoRA; NF4 and many rows decode first."""
    if CUDA and torch.cuda.get_device_capability()[0] == 9:
        monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm80")                                # Triton compiles as for Ampere; see bench.py mma
    have_capability(monkeypatch, *version)
    columns = 512 if CUDA else 256
    launches = []
    launch = fp4_kernels.launch_linear
    monkeypatch.setattr(fp4_kernels, "launch_linear", lambda *args: launches.append(args) or launch(*args))
    for name, rows, by_kernel in (("nvfp4", 5, True), ("nvfp4", 40, True), ("mxfp4", 20, True), ("nvfp4", 65, False), ("nf4", 5, False)):
        tiled, dense = tiled_weight(name, 384, columns)
        x, residual = torch.randn(rows, columns).bfloat16(), torch.randn(rows, 384).bfloat16() * 64
        bias, A, B = torch.randn(384) * 64, torch.randn(3 * 8, columns) / 16, torch.randn(384, 8) * 8
        h = (x.double() @ A.double().T).split(8, -1)
        expected = x.double() @ dense.T + bias + residual + 2 * torch.cat([h_i @ B_i.double().T for h_i, B_i in zip(h, B.split(128))], -1)
        lora = tiled.prepare_lora(A.to(KERNEL_DEVICE), B.to(KERNEL_DEVICE), [128] * 3, 2.0, torch.bfloat16)
        x, bias, residual = (t.to(KERNEL_DEVICE) for t in (fp4_kernels.interleave(x).contiguous(), bias, residual))
        assert relative(tiled.multiply(x, bias, residual, lora).cpu().double(), expected) < 5e-3
        assert bool(launches) == by_kernel
        launches.clear()
    tiled, dense = tiled_weight("nvfp4", 192, 384)
    assert relative(tiled.dequantize(torch.float32, interleaved=True).cpu().double(), fp4_kernels.interleave(dense)) < 1e-6


def test_kernels_run_where_they_can(monkeypatch):
    """What is chosen for each kind of GPU, none of which has to be here."""
    if fp4_kernels.triton is None:
        pytest.skip("needs Triton")
    gpu = torch.device("cuda")
    for version, in_bfloat16, in_float16, dtype in (((9, 0), True, True, torch.bfloat16), ((8, 6), True, True, torch.bfloat16),
                                                    ((7, 5), False, True, torch.float16), ((7, 0), False, False, torch.float16)):
        have_capability(monkeypatch, *version)
        assert fp4_kernels.runs_on(gpu, torch.bfloat16) == fp4_kernels.tiles_fit(gpu, torch.bfloat16, 256, [128]) == in_bfloat16
        assert fp4_kernels.runs_on(gpu, torch.float16) == in_float16
        assert not fp4_kernels.tiles_fit(gpu, torch.float16, 256, [128]) and not fp4_kernels.tiles_fit(gpu, torch.bfloat16, 256, [100])
        assert fp4_kernels.default_dtype(gpu) == dtype
    assert fp4_kernels.default_dtype(torch.device("cpu")) == torch.float32


def test_kernels_are_left_out_on_amd():
    """There PyTorch calls GPUs "cuda", too; their capabilities are 9.x, as Hopper's."""
    code = "import torch; torch.version.hip = '7.0'; import fp4_kernels as k; print(k.triton, k.tiles_fit(torch.device('cuda'), torch.bfloat16, 128, [128]))"
    result = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert result.stdout.split() == ["None", "False"] and result.stderr.count("AMD GPU") == (fp4_kernels.triton is not None)


@pytest.mark.parametrize("target", [75, 80, 86, 89, 90, 100, 120])
def test_kernels_compile_for(monkeypatch, target):
    """Compiled, not run, for a GPU that is not here: they fit, and linear_kernel keeps weights in the threads that decode them."""
    if fp4_kernels.triton is None:
        pytest.skip("needs Triton")
    try:
        cross_compile.ptxas_path(target)
    except RuntimeError as e:
        pytest.skip(f"needs NVIDIA's assembler: {e}")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-m", "studies.cross_compile", str(target)], cwd=HERE, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    kernels = [json.loads(line) for line in result.stdout.splitlines()]
    linear = [kernel for kernel in kernels if kernel["kernel"] == "linear_kernel"]
    assert not [kernel for kernel in kernels if "error" in kernel]
    assert len(kernels) - len(linear) == (12 if target == 75 else 14) and bool(linear) == (target > 75)
    have_capability(monkeypatch, *divmod(target, 10))
    configs = [config for group in fp4_kernels.configs_on(None) for config in group]
    for kernel in kernels:
        assert kernel["shared"] <= 1024 * (cross_compile.SHARED[target] - 1), kernel
        assert kernel["spilled"] < 128 or target == 75 or kernel.get("config", [0])[0] > 64, kernel
    for kernel in linear:
        programs = max(config.programs for config in configs if [config.rows, config.R, config.C] == kernel["config"])
        assert programs * (kernel["shared"] + 1024) <= 1024 * cross_compile.SHARED[target], kernel
        assert kernel["weights_moved"] == 0 or target == 100, kernel
        assert ("wgmma.mma_async" in kernel["instructions"]) == (target == 90)


@runs_kernels
@pytest.mark.parametrize("rows,configs", [(5, 0), (20, 1), (50, 2), (100, 3), (200, 4)])
def test_kernel_linear_adds_parts(rows, configs):
    """One or two tiles of W, cut among three programs."""
    x = torch.randn(rows, 384).bfloat16()
    for config in configs_here(configs):
        tiled, dense = tiled_weight("nvfp4", 64 * max(2, config.R), 384)
        config = config._replace(C=1, programs=1)
        y = tiled.multiply(fp4_kernels.interleave(x).contiguous().to(KERNEL_DEVICE), config=config)
        assert relative(y.cpu().double(), x.double() @ dense.T) < 5e-3
        assert not fp4_kernels.scratch(y.device).counters.any()


@runs_kernels
@pytest.mark.parametrize("out", [128, 4480 if CUDA else 640])
def test_kernel_linear_cuts_its_work(out):
    """2 tiles: less work than programs; 70 on a GPU, 10 on the interpreter's three SMs: programs with parts of two tiles."""
    tiled, dense = tiled_weight("nvfp4", out, 256)
    x = torch.randn(5, 256).bfloat16()
    config = fp4_kernels.CONFIGS[0][0]._replace(programs=1 if out > 128 else 3)
    y = tiled.multiply(fp4_kernels.interleave(x).contiguous().to(KERNEL_DEVICE), config=config)
    assert relative(y.cpu().double(), x.double() @ dense.T) < 5e-3


@runs_kernels
@pytest.mark.parametrize("interleaved", [False, True])
def test_kernel_norm_and_silu(interleaved):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 2 * 192).to(KERNEL_DEVICE), torch.randn(2 * 192).to(KERNEL_DEVICE)
    torch.testing.assert_close(fp4_kernels.rms_norm(x, weight, 1e-6, interleaved), fp4_kernels.rms_norm_torch(x, weight, 1e-6, interleaved))
    torch.testing.assert_close(fp4_kernels.silu_mul(x, interleaved), fp4_kernels.silu_mul_torch(x, interleaved))


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["rms_norm", "silu_mul", "rotary", "output_logprobs"])
def test_kernel_gradients(name, dtype):
    """What stands between the linear layers in training, and its gradients, against float64: odd sizes, views of larger tensors."""
    torch.manual_seed(0)
    angles, chosen = torch.rand(7, 20).repeat(1, 2) * 6, torch.randint(0, 4500, (14,))
    kernel, exact, whole, view, *others = {
        "rms_norm": (lambda x, w: fp4_kernels.rms_norm(x, w, 1e-3), lambda x, w: F.rms_norm(x, (600,), w, 1e-3),
                     torch.randn(2, 7, 700), lambda x: x[..., 50:650], torch.randn(600)),
        "silu_mul": (fp4_kernels.silu_mul, fp4_kernels.silu_mul_torch, 3 * torch.randn(4, 7, 2200), lambda x: x[::2]),
        "rotary": (fp4_kernels.rotary, lambda x, c, s: fp4_kernels.rotate(x, c[:, None], s[:, None]),
                   torch.randn(2, 7, 8 * 40), lambda x: x.unflatten(-1, (8, 40))[:, :, 2:7], angles.cos(), angles.sin()),
        "output_logprobs": (lambda h, w, t: fp4_kernels.output_logprobs(h, w, t, 5),
                            lambda h, w, t: (h @ w.T).log_softmax(-1).gather(1, t[:, None])[:, 0],
                            torch.randn(14, 40), lambda h: h[:, 4:36], torch.randn(4500, 32).to(dtype), chosen)}[name]
    inputs = [t.to(KERNEL_DEVICE).requires_grad_(t.is_floating_point()) for t in (whole.to(dtype), *others)]
    exact_inputs = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in inputs]
    y, z = kernel(view(inputs[0]), *inputs[1:]), exact(view(exact_inputs[0]), *exact_inputs[1:])
    as_attentions = torch.randn(z.transpose(-2, -3).shape).transpose(-2, -3) if z.dim() > 2 else torch.randn(2 * len(z))[::2]
    for grad in (as_attentions, torch.tensor(0.5).expand(z.shape)):                       # neither is dense
        y.backward(grad.to(y.dtype).to(KERNEL_DEVICE), retain_graph=True)
        z.backward(grad.to(y.dtype).to(KERNEL_DEVICE).double(), retain_graph=True)
    pairs = [(y, z), *((a.grad, b.grad) for a, b in zip(inputs, exact_inputs) if a.grad is not None)]
    assert len(pairs) == (3 if name == "rms_norm" else 2) and y.dtype == (torch.float32 if name == "output_logprobs" else dtype)
    for a, b in pairs:
        assert relative(a.double(), b) < (2e-5 if dtype == torch.float32 else 1e-2)       # the interpreter cuts bfloat16 off


@runs_kernels
@pytest.mark.parametrize("name, recomputed", [("qwen2", True), ("qwen2", False), ("qwen3", True)])
def test_kernels_train_as_their_twins(tmp_path, monkeypatch, name, recomputed):
    """Log-probabilities and gradients of LoRA and norms, with kernels and without them."""
    model = with_lora(make_folder(tmp_path, name)[0], train_norms=recomputed, device=KERNEL_DEVICE)
    if recomputed:
        model.recompute_in_backward()
    prompts, length = [[5, 6, 7], [8], [5, 6, 7]], torch.tensor([5, 2, 3], device=KERNEL_DEVICE)
    completions = torch.randint(0, 250, (3, 5), device=KERNEL_DEVICE)
    found = []
    for kernels in (True, False):
        with monkeypatch.context() as patch:
            if not kernels:
                patch.setattr(fp4_kernels, "use_triton", lambda x: False)
            logprobs = qerl.token_logprobs(model, prompts, completions, length, chunk=4)
            logprobs.square().sum().backward()
        found.append({"logprobs": logprobs.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}})
        model.zero_grad()
    assert len(found[0]) == 1 + len(qerl.trainable(model)) and found[0].keys() == found[1].keys()
    for n, a in found[0].items():
        assert relative(a, found[1][n]) < (1e-4 if KERNEL_DEVICE == "cpu" else 0.05), n


@runs_kernels
@pytest.mark.parametrize("heads,kv_heads,dim,interleaved,parts", [(6, 2, 48, False, None), (4, 4, 64, False, 2), (7, 1, 128, True, 3)])
def test_kernel_decode_attention(monkeypatch, heads, kv_heads, dim, interleaved, parts):
    torch.manual_seed(0)
    monkeypatch.setattr(fp4_kernels, "CACHE_PIECE", 256)
    split, longest = 128, 2 * 256 + 9                                                     # three pieces, the last one short
    filled = torch.tensor([0, 64, 65, longest - 1, 255, split - 1, 256])
    heads = heads if not interleaved else 7 * 2                                           # whole tiles of columns
    kv_heads = kv_heads if not interleaved else 2
    qkv, cos, sin = torch.randn(7, (heads + 2 * kv_heads) * dim), torch.randn(7, dim), torch.randn(7, dim)
    cache = torch.randn(2, 7, kv_heads, longest, dim)
    for b, n in enumerate(filled):                                                        # what lies behind must not matter
        cache[:, b, :, n:] = float("nan")
    pieces = [piece.contiguous().to(KERNEL_DEVICE) for piece in cache.split(256, 3)]
    addresses = torch.tensor([piece.data_ptr() for piece in pieces], device=KERNEL_DEVICE)
    twins = [piece.nan_to_num().double() for piece in cache.split(256, 3)]
    kernel = fp4_kernels.decode_attention(*(t.to(KERNEL_DEVICE) for t in (qkv, cos, sin)), pieces, addresses, longest, filled.to(KERNEL_DEVICE), interleaved, split, parts)
    twin = fp4_kernels.decode_attention_torch(qkv.double(), cos.double(), sin.double(), twins, filled, interleaved)
    assert relative(kernel.cpu().double(), twin) < 1e-5
    for piece, expected in zip(pieces, twins):
        assert relative(piece.cpu().nan_to_num().double(), expected) < 1e-6


def test_the_cache_grows_in_pieces(family, monkeypatch):
    """Pieces of 8 positions give the rollout of a single piece, also where slots are given back and taken anew."""
    model = with_lora(family[0])
    prompts = [[5, 6, 7], [8], [9] * 19, [5, 6, 7, 8]] * 12
    grown = []

    class Watched(qerl.Sampler):
        def steps(self, count):
            super().steps(count)
            grown.append((int(self.cache.filled.max()), len(self.cache.pieces[0]), len(self.cache.filled)))

    def rollout():
        generator = torch.Generator().manual_seed(3)
        return qerl.generate(model, prompts, 40, 1, eos={11, 12, 13}, slots=36, generator=generator, sampler_class=Watched)
    whole = rollout()
    assert {pieces for _, pieces, _ in grown} == {1}
    grown.clear()
    monkeypatch.setattr(fp4_kernels, "CACHE_PIECE", 8)
    monkeypatch.setattr(qerl, "CACHE_PIECE", 8)
    cut = rollout()
    for field in fields(qerl.Rollout):
        torch.testing.assert_close(getattr(cut, field.name), getattr(whole, field.name), rtol=1e-4, atol=1e-4)
    assert grown[0][1] == 3 and grown[-1][1] == max(-(-filled // 8) for filled, _, _ in grown) > 3      # as many as needed
    assert {slots for _, _, slots in grown} >= {36, 18}                                   # it shrank


@runs_kernels
def test_kernel_sample():
    """Log-probability and entropy against PyTorch's; the tokens' frequencies against the probabilities (chi-squared)."""
    torch.manual_seed(0)
    logits = torch.randn(3, 5000).to(KERNEL_DEVICE)
    token, logprob, entropy = fp4_kernels.sample(logits, 0.7, torch.tensor([5], device=KERNEL_DEVICE))
    expected = (logits / 0.7).log_softmax(-1)
    torch.testing.assert_close(logprob, expected.gather(1, token[:, None])[:, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(1), rtol=1e-4, atol=1e-4)
    again = fp4_kernels.sample(logits, 0.7, torch.tensor([5], device=KERNEL_DEVICE))[0]
    assert torch.equal(token, again) and not torch.equal(token, fp4_kernels.sample(logits, 0.7, torch.tensor([6], device=KERNEL_DEVICE))[0])
    draws = 20000 if CUDA else 160
    logits = torch.tensor([0.0, 1.0, 1.5, -0.5, 0.5]).to(KERNEL_DEVICE).expand(draws, 5).contiguous()
    counts = fp4_kernels.sample(logits, 1.0, torch.tensor([1], device=KERNEL_DEVICE))[0].bincount(minlength=5)
    wanted = draws * logits[0].softmax(0)
    assert ((counts - wanted) ** 2 / wanted).sum() < 18.5                                 # 4 degrees of freedom: 1 in 1,000


@runs_kernels
def test_kernel_decode_of_a_layer_is_its_forward():
    """QuantLinear in tiles: decode (fused, interleaved) against forward (dequantised), with LoRA, bias and residual."""
    torch.manual_seed(0)
    format = qerl.FORMATS["nvfp4"]
    parts = [torch.cat(p) for p in zip(*((a, b, c.view(1, 1).expand(128, 1)) for a, b, c in map(format.quantize, torch.randn(3, 128, 256))))]
    weight = format.tile(*(p.to(KERNEL_DEVICE) for p in parts))
    bias = torch.randn(384).to(KERNEL_DEVICE).bfloat16()
    layer = qerl.QuantLinear(["q", "k", "v"], [128] * 3, 256, weight, bias, lora_rank=4, lora_alpha=8).to(KERNEL_DEVICE)
    layer.lora_B.data.normal_()
    x, residual = torch.randn(5, 256).to(KERNEL_DEVICE).bfloat16(), torch.randn(5, 384).to(KERNEL_DEVICE).bfloat16()
    with torch.no_grad():
        layer.prepare_decoding(torch.bfloat16)
        y = layer.decode(fp4_kernels.interleave(x).contiguous(), residual)
        assert relative(y.float(), (layer(x) + residual).float()) < 1e-2


@runs_kernels
def test_kernel_gradient_through_tiles():
    """dL/dx of a frozen layer in tiles; on a GPU the weight is decoded in autograd's thread, which like any new one has no context."""
    tiled, dense = tiled_weight("nvfp4", 384, 256)
    with ThreadPoolExecutor(1) as new_thread:
        weight = new_thread.submit(tiled.dequantize).result()
    assert relative(weight.cpu().double(), dense) < 5e-3
    x = torch.randn(40, 256).bfloat16()
    interleaved = fp4_kernels.interleave(x).contiguous().to(KERNEL_DEVICE)
    with ThreadPoolExecutor(1) as new_thread:                                             # 40 rows: x by TMA, too
        y = new_thread.submit(tiled.multiply, interleaved).result()
    assert relative(y.cpu().double(), x.double() @ dense.T) < 5e-3
    layer = qerl.QuantLinear(["a"], [384], 256, tiled, None)
    x = torch.randn(5, 256, device=KERNEL_DEVICE, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(5, 384).bfloat16()
    layer(x).backward(grad.to(KERNEL_DEVICE))
    assert relative(x.grad.cpu().double(), grad.double() @ dense) < 5e-3


@gpu
@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "nf4", "bf16"])
def test_gpu_rollout_is_the_policy_that_is_trained(tmp_path, weights):
    """Log-probabilities from decoding (tiles, fused kernels, CUDA graph) against those of training, with LoRA and refilled slots."""
    model = with_lora(make_folder(tmp_path, "wide")[0], weights=weights, device="cuda")
    assert isinstance(model.blocks[0].mlp.down.weight, fp4_kernels.TiledWeight) == (weights != "bf16")
    prompts = [[5 + i] * (1 + i % 7) for i in range(60)]
    rollout = qerl.generate(model, prompts, 40, 2, slots=70)
    repeated = [p for p in prompts for _ in range(2)]
    with torch.no_grad():
        logprobs = qerl.token_logprobs(model, repeated, rollout.tokens, rollout.length)
    assert (logprobs - rollout.logprobs).abs()[rollout.mask].mean() < 0.03


@gpu
def test_gpu_generates_what_the_cpu_does(qwen):
    rollouts = []
    for device in ("cpu", "cuda"):
        model = qerl.load_model(qwen[0], lora_rank=2, device=device, dtype=torch.float32)
        rollouts.append(qerl.generate(model, PROMPTS, 24, 2, temperature=0, slots=4))
    assert torch.equal(rollouts[0].tokens, rollouts[1].tokens.cpu())
    torch.testing.assert_close(rollouts[0].logprobs, rollouts[1].logprobs.cpu(), rtol=1e-3, atol=1e-3)


@gpu
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_gpu_rollouts_with_one_seed_are_equal(tmp_path, top_p):
    """Bit for bit, with the step as a graph or, for top-p, half of it; 128 slots take the path of many rows."""
    model = with_lora(make_folder(tmp_path, "wide")[0], device="cuda")
    rollouts = [qerl.generate(model, [[5 + i] for i in range(100)], 60, 2, top_p=top_p, slots=128,
                              generator=torch.Generator("cuda").manual_seed(0)) for _ in range(4)]
    for other in rollouts[1:]:
        assert torch.equal(rollouts[0].tokens, other.tokens) and torch.equal(rollouts[0].logprobs, other.logprobs)


def test_merged_weights_hold_lora_unless_rounding_would_lose_it():
    torch.manual_seed(0)
    for name in ("nvfp4", "nf4", "mxfp4"):
        format = qerl.FORMATS[name]
        tiled = format.tile(*format.quantize(torch.randn(128, 128)))
        layer = qerl.QuantLinear(["a", "b"], [64, 64], 128, tiled, None, lora_rank=4, lora_alpha=8)
        layer.lora_B.data.normal_()
        found = merged.merged_weight(layer, torch.bfloat16)
        if name == "mxfp4":                                                               # its values are bfloat16 numbers
            assert found is None
            continue
        A, B = layer.lora_A.split(4), layer.lora_B.split(64)
        expected = tiled.dequantize(torch.float32) + 2 * torch.cat([b @ a for a, b in zip(A, B)])
        assert relative(found.dequantize(torch.float32), expected) < 3e-3


def test_a_merging_sampler_leaves_the_layers_as_they_were(monkeypatch):
    monkeypatch.setattr(merged, "MERGED_ABOVE", 4)
    model = random_model("tiny", "nvfp4", 16, "cpu")
    model.embedding, model.lm_head = model.embedding.bfloat16(), model.lm_head.bfloat16()
    for layer in model.quantized_layers():
        layer.weight = qerl.tile_nvfp4(*layer.weight.parts)
        layer.bias = None
    before = [layer.weight for layer in model.quantized_layers()]
    sizes = []
    monkeypatch.setattr(merged.MergingSampler, "merge", lambda self, layers, merge=merged.MergingSampler.merge: (
        sizes.append(len(self.completion)), merge(self, layers)))
    prompts = [[1, 2, 3], [4], [5, 6]]
    rollouts = [qerl.generate(model, prompts, 4, 2, temperature=0, sampler_class=sampler_class)
                for sampler_class in (qerl.Sampler, merged.MergingSampler)]
    assert sizes == [6] and [layer.weight for layer in model.quantized_layers()] == before
    assert all(layer.use_adapter for layer in model.quantized_layers())
    first = [rollout.logprobs[:, 0] for rollout in rollouts]
    assert 0 < (first[0] - first[1]).abs().max() < 0.1


@gpu
def test_flash_attention_of_a_packed_line_is_its_twin():
    """Prompts of 5, 70 and 1 tokens, shared by three, one and one completion; and the gradients."""
    torch.manual_seed(0)
    packing = qerl.pack([[1] * 5] * 3 + [[2] * 70, [3]], torch.tensor([4, 1, 130, 7, 3], device="cuda"))
    found = [torch.randn(sum(packing.sizes), heads, 64, device="cuda").bfloat16().requires_grad_() for heads in (6, 2, 2)]
    exact = [t.detach().float().requires_grad_() for t in found]
    y, z = fp4_kernels.packed_attention(*found, packing), fp4_kernels.packed_attention_torch(*exact, packing)
    grad = torch.randn_like(y)
    y.backward(grad)
    z.backward(grad.float())
    for a, b in [(y, z), *((a.grad, b.grad) for a, b in zip(found, exact))]:
        assert relative(a.float(), b) < 2e-2
