"""Triton's kernels against the PyTorch that they replace, on a GPU or in Triton's interpreter."""
import contextlib
import itertools
import os
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import qerl
from common import compiled_for
from methods import merged
from qerl import kernels
from studies.random_models import random_model
from test_qerl import CUDA, HERE, KERNEL_DEVICE, PROMPTS, gpu, make_folder, relative, runs_kernels
from test_qerl import with_lora

needs_triton = pytest.mark.skipif(kernels is None, reason="needs Triton")
TILED_FORMATS = [name for name, format in qerl.FORMATS.items() if format.tile]


def test_the_interpreter_runs_the_kernels():
    """The kernel tests below in Triton's interpreter, which must be on before Triton is imported."""
    if CUDA or kernels is None or kernels.INTERPRETED:
        pytest.skip("the kernel tests run by themselves, or there is no Triton")
    new_numpy = np.lib.NumpyVersion(np.__version__) >= "2.4.0"
    if kernels.triton.__version__.startswith("3.6.") and new_numpy:
        pytest.skip("Triton 3.6's interpreter fails with numpy from 2.4 on: pip install 'numpy<2.4'")
    chosen = "kernel and not interpreter and not compile"
    command = [sys.executable, "-m", "pytest", "-q", "-k", chosen]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=HERE, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout[-2000:]
    assert "skipped" not in result.stdout.splitlines()[-1]


@contextlib.contextmanager
def pytorch_alone():
    """Inside, qerl computes without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qerl, "use_kernels", lambda x: False)
        yield


def there(*tensors):
    """The tensors on the device that runs the kernels."""
    return [t.to(KERNEL_DEVICE) for t in tensors]


# --------------------------------------------------------------------------------------------------
# What runs where

def have_capability(monkeypatch, *version):
    """Kernels are chosen as on a GPU of this compute capability; the one that is here runs them."""
    monkeypatch.setattr(kernels, "capability", lambda device: version)


@needs_triton
@pytest.mark.parametrize("version,in_bfloat16,in_float16,dtype", [
    ((9, 0), True, True, torch.bfloat16),
    ((8, 6), True, True, torch.bfloat16),
    ((7, 5), False, True, torch.float16),
    ((7, 0), False, False, torch.float16),
])
def test_kernels_run_where_they_can(monkeypatch, version, in_bfloat16, in_float16, dtype):
    """What is chosen for each kind of GPU, none of which has to be here."""
    have_capability(monkeypatch, *version)
    device = torch.device("cuda")
    assert kernels.runs_on(device, torch.bfloat16) == in_bfloat16
    assert kernels.runs_on(device, torch.float16) == in_float16
    assert kernels.tiles_fit(device, torch.bfloat16, 256, [128]) == in_bfloat16
    assert not kernels.tiles_fit(device, torch.float16, 256, [128])
    assert not kernels.tiles_fit(device, torch.bfloat16, 256, [100])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: version)
    assert qerl.default_dtype(device) == dtype
    assert qerl.default_dtype(torch.device("cpu")) == torch.float32


@pytest.mark.parametrize("system,warnings", [
    ("torch.version.hip = '7.0'", 0 if kernels is None else 1),
    ("sys.modules['triton'] = None", 0),
])
def test_pytorch_computes_all_where_no_kernels_run(system, warnings):
    """On AMD's GPUs, which PyTorch calls "cuda", too, and on systems without Triton."""
    code = f"import sys, torch; {system}; import qerl; print(qerl.kernels)"
    result = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert result.stdout.split() == ["None"]
    assert result.stderr.count("AMD GPU") == warnings


# Shared memory of an SM in kB; a program can have 1 kB less, which the system keeps for each.
# (CUDA C++ Programming Guide, technical specifications per compute capability)
SHARED = {75: 64, 80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}


@needs_triton
@pytest.mark.parametrize("target", SHARED)
def test_kernels_compile_for(monkeypatch, target):
    """Compiled, not run, for a GPU that is not here: all of a step, and linear_kernel's every
    tile, but for Hopper's, which the kernel tests run.

    They fit into its memory, and as many programs of linear_kernel as are meant to run at once do.
    """
    compiled = compiled_for(target, "-m", "studies.cross_compile", str(target))
    names = {name for name, *_ in compiled}
    assert len(names) == (11 if target == 75 else 13)
    assert ("linear_kernel" in names) == (target > 75)
    have_capability(monkeypatch, *divmod(target, 10))
    programs = {(config.rows, config.R, config.C): config.programs
                for configs in kernels.configs_on(None) for config in configs}
    for name, shared, *tile in compiled:
        at_once = programs[tuple(tile)] if tile else 1
        assert at_once * (shared + 1024) <= 1024 * SHARED[target], (name, tile)
    tiles = {tuple(tile) for _, _, *tile in compiled if tile}
    assert target in (75, 90) or tiles == set(programs)


# --------------------------------------------------------------------------------------------------
# 1. Quantising

@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [16, 32])
def test_kernel_encode(dtype, block):
    """Byte for byte as PyTorch, at ties too, for an odd number of rows."""
    torch.manual_seed(0)
    of_any_size = torch.randn(30, 96) * torch.exp2(torch.randint(-9, 9, (30, 1)).float())
    ties = torch.randint(-26, 27, (5, 96)) / 4
    weight = torch.cat([of_any_size, ties]).to(dtype)
    scale = weight.float().unflatten(1, (-1, block)).abs().amax(-1).clamp_min(0.1) / 6
    scale[30:] = 1
    packed = kernels.encode_e2m1(*there(weight, scale)).cpu()
    with pytorch_alone():
        assert torch.equal(packed, qerl.encode_e2m1(weight, scale))


# --------------------------------------------------------------------------------------------------
# 2. Tiles

def tiled_weight(name, out_features, in_features):
    """(TiledWeight, its values float64) of random rows of very different size."""
    torch.manual_seed(0)
    format = qerl.FORMATS[name]
    rows = torch.exp2(torch.randint(-6, 7, (out_features, 1)).float())
    weight = torch.randn(out_features, in_features) * rows
    parts = []
    for piece in weight.split(128):                    # layers that are stacked, each with its own
        packed, scale, global_scale = format.quantize(piece)
        parts.append((packed, scale, global_scale.expand(len(piece)).reshape(-1, 1)))
    packed, scale, global_scale = (torch.cat(part) for part in zip(*parts))
    kept = scale.bfloat16().float() if name == "nf4" else scale        # as tile keeps them
    dense = format.dequantize(packed, kept, global_scale, torch.float64)
    return format.tile(*there(packed, scale, global_scale)), dense


def interleaved(x):
    """x as TiledWeight.multiply takes it."""
    return kernels.interleave(x).contiguous().to(KERNEL_DEVICE)


@needs_triton
def test_interleave_puts_a_threads_columns_side_by_side():
    """A tensor core's thread t takes the columns 2t, 2t + 1, 2t + 8, 2t + 9 of four steps of 16.

    Interleaved, these are the 16 neighbours of block t.
    """
    order = kernels.interleave(torch.arange(128))
    for tile in order.view(2, 4, 16):
        for t in range(4):
            block = tile[:, [2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9]].flatten().tolist()
            assert block == list(range(block[0], block[0] + 16))
            assert block[0] % 64 == 16 * t


@runs_kernels
@pytest.mark.parametrize("name", TILED_FORMATS)
def test_kernel_untile(name):
    tiled, dense = tiled_weight(name, 192, 384)
    # On a GPU NF4's table, too, is bfloat16.
    tolerance = 3e-3 if name == "nf4" and CUDA else 1e-6
    weight = tiled.dequantize(torch.float32)
    assert relative(weight.cpu().double(), dense) < tolerance
    in_order_of_tiles = tiled.dequantize(torch.float32, interleaved=True)
    assert torch.equal(in_order_of_tiles, kernels.interleave(weight))


# --------------------------------------------------------------------------------------------------
# 3. Linear

def linear_case(name, rows, columns, piece, rank=8):
    """Three stacked layers of `piece` rows: what multiply takes, and the results in float64."""
    out = 3 * piece
    tiled, dense = tiled_weight(name, out, columns)
    x = torch.randn(rows, columns).bfloat16()
    bias = torch.randn(out) * 64
    residual = torch.randn(rows, out).bfloat16() * 64
    A = torch.randn(3 * rank, columns) / 16
    B = torch.randn(out, rank) * 8
    product = x.double() @ dense.T
    h = (x.double() @ A.double().T).split(rank, -1)
    lora = torch.cat([h_i @ B_i.double().T for h_i, B_i in zip(h, B.split(piece))], -1)
    return types.SimpleNamespace(
        tiled=tiled, x=interleaved(x), product=product, added=bias + residual,
        with_lora=product + 2 * lora, others=[
            *there(bias, residual),
            tiled.prepare_lora(*there(A, B), [piece] * 3, 2.0, torch.bfloat16)])


def is_close(y, expected):
    return relative(y.cpu().double(), expected) < 5e-3


def configs_here(group):
    """A group of CONFIGS, as far as the GPU here has room for them."""
    groups = kernels.configs_on(torch.device(KERNEL_DEVICE))
    if group >= len(groups):
        pytest.skip("only Hopper has room for tiles of more than 64 rows")
    return groups[group]


@runs_kernels
@pytest.mark.parametrize("name,rows,columns,group", [
    ("nvfp4", 1, 1024, 0), ("nvfp4", 21, 256, 1), ("nvfp4", 70, 1024, 2), ("nvfp4", 70, 384, 2),
    ("nvfp4", 130, 256, 3), ("nvfp4", 300, 256, 4), ("mxfp4", 21, 256, 0), ("nf4", 21, 256, 3),
])
def test_kernel_linear(name, rows, columns, group):
    """Against float64, in each config for about so many rows; all counters are zero afterwards.

    The interpreter, which is slow, takes half of 1024 columns. There the sign of x changes from
    config to config only, and LoRA's configs are not tried without it.
    """
    configs = configs_here(group)
    columns = columns if CUDA else min(columns, 512)
    case = linear_case(name, rows, columns, 64 * max(config.R for config in configs))
    for number, config in enumerate((None, *configs)):
        if CUDA or config is None:
            assert is_close(case.tiled.multiply(case.x, config=config), case.product)
        for sign in (1, -1) if CUDA else [(-1) ** number]:
            y = case.tiled.multiply(sign * case.x, *case.others, config)
            assert is_close(y, sign * case.with_lora + case.added)
        assert not kernels.scratch(y.device).counters.any()


@runs_kernels
@pytest.mark.parametrize("rank", [6, 160])
def test_kernel_linear_takes_any_rank(rank):
    """One that is no power of two is padded; one above 128 has a product of its own."""
    case = linear_case("nvfp4", 5, 256, 128, rank)
    assert is_close(case.tiled.multiply(case.x, *case.others), case.with_lora + case.added)


@runs_kernels
def test_kernel_linear_decodes_first_for_many_rows():
    case = linear_case("nvfp4", 513, 128, 128)
    assert is_close(case.tiled.multiply(case.x, *case.others), case.with_lora + case.added)


@runs_kernels
@pytest.mark.parametrize("version", [(8, 0), (8, 6)])
def test_kernel_linear_without_wgmma(monkeypatch, version):
    """As other GPUs than Hopper's multiply: by mma.sync; NF4 and many rows decode first."""
    if CUDA and torch.cuda.get_device_capability()[0] == 9:
        monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm80")
    have_capability(monkeypatch, *version)
    launches = []
    launch = kernels.launch_linear
    monkeypatch.setattr(
        kernels, "launch_linear", lambda *args: launches.append(args) or launch(*args))
    for name, rows, by_kernel in (("nvfp4", 5, True), ("nvfp4", 40, True), ("mxfp4", 20, True),
                                  ("nvfp4", 65, False), ("nf4", 5, False)):
        case = linear_case(name, rows, 512 if CUDA else 256, 128)
        assert is_close(case.tiled.multiply(case.x, *case.others), case.with_lora + case.added)
        assert bool(launches) == by_kernel
        launches.clear()
    tiled, dense = tiled_weight("nvfp4", 192, 384)
    decoded = tiled.dequantize(torch.float32, interleaved=True).cpu().double()
    assert relative(decoded, kernels.interleave(dense)) < 1e-6


@runs_kernels
@pytest.mark.parametrize("rows,group", [(5, 0), (20, 1), (50, 2), (100, 3), (200, 4)])
def test_kernel_linear_adds_parts(rows, group):
    """One or two tiles of W, cut among three programs."""
    x = torch.randn(rows, 384).bfloat16()
    for config in configs_here(group):
        tiled, dense = tiled_weight("nvfp4", 64 * max(2, config.R), 384)
        config = config._replace(C=1, programs=1)
        y = tiled.multiply(interleaved(x), config=config)
        assert is_close(y, x.double() @ dense.T)
        assert not kernels.scratch(y.device).counters.any()


@runs_kernels
@pytest.mark.parametrize("out", [128, 4480 if CUDA else 640])
def test_kernel_linear_cuts_its_work(out):
    """2 tiles are less work than programs; with 70, or 10 in the interpreter, all have two parts."""
    tiled, dense = tiled_weight("nvfp4", out, 256)
    x = torch.randn(5, 256).bfloat16()
    config = kernels.CONFIGS[0][0]._replace(programs=1 if out > 128 else 3)
    assert is_close(tiled.multiply(interleaved(x), config=config), x.double() @ dense.T)


# Layers of Qwen2.5-7B, and small ones: (out, in, where the second and the third piece begin)
LAYERS = [
    (37888, 3584, (18944, 37888)), (4608, 3584, (3584, 4096)), (3584, 18944, (3584, 3584)),
    (128, 128, (128, 128)),
]
ODD_LAYERS = [
    (37888 + 256, 3584, (18944 + 128, 37888 + 256)), (128 * 301, 128 * 27, (128 * 301,) * 2),
    (384, 384, (128, 256)),
]


@needs_triton
@pytest.mark.parametrize("R", [1, 2, 4])
def test_kernel_configs_fit(monkeypatch, R):
    """A layer is whole tiles of its pieces and whole steps of its columns."""
    groups = [(*configs[:-1], configs[-1]._replace(R=R)) for configs in kernels.CONFIGS]
    monkeypatch.setattr(kernels, "CONFIGS", groups)
    rows = 1, 16, 17, 32, 64, 65, 128, 129, 256, 257, 1024
    for M, layer, rank in itertools.product(rows, LAYERS[:3] + ODD_LAYERS, (0, 16, 128)):
        out, columns, bounds = layer
        config = kernels.config_for(M, *layer, rank)
        assert all(n % (64 * config.R) == 0 for n in (out, *bounds))
        assert columns % (64 * config.C) == 0
        assert config.rows >= min(M, 256)


@needs_triton
@pytest.mark.parametrize("group", ["CONFIGS", "CONFIGS_WITHOUT_WGMMA", "CONFIGS_IN_100_KB"])
def test_kernel_linear_plans_fit(group):
    """All programs run at once, have work, and leave no more sums than there is room for."""
    groups = getattr(kernels, group)
    cases = itertools.product(
        (1, 16, 17, 64, 128, 129, 1024), zip(LAYERS, (2, 3, 1, 1)), (0, 16, 128), (3, 132))
    for M, ((out, columns, bounds), pieces), rank, sms in cases:
        plan = kernels.plan_linear(M, out, columns, bounds, pieces, rank, sms, groups=groups)
        config = plan.config
        of_a_tile = 64 * config.R * config.rows
        a_row_fewer = plan.tiles - out // (64 * config.R)
        assert plan.tiles * of_a_tile >= M * out > a_row_fewer * of_a_tile
        steps = plan.tiles * columns // (64 * config.C)
        assert 1 <= plan.programs <= min(config.programs * sms, steps)
        assert plan.ranks == pieces * rank
        assert (plan.lora_programs > 0) == (rank > 0 and M <= 128)
        if sms == 132:                     # 3 SMs may have fewer programs than h has tiles
            assert plan.lora_programs + plan.programs <= config.programs * sms


@needs_triton
def test_kernel_linear_refuses_what_is_not_whole_tiles():
    with pytest.raises(ValueError, match="not divisible by 128"):
        kernels.plan_linear(1, 160, 256, (160, 160), 0, 0, 132)
    for out, config in ((192, None), (384, kernels.CONFIGS[0][2])):
        with pytest.raises(ValueError, match="not whole steps"):
            kernels.plan_linear(1, out, 256, (out, out), 0, 0, 132, config)


def tiled_layer(sizes, in_features, **options):
    """(A QuantLinear in tiles, its weight float64)"""
    tiled, dense = tiled_weight("nvfp4", sum(sizes), in_features)
    bias = torch.randn(sum(sizes)).bfloat16().to(KERNEL_DEVICE)
    names = list("abc"[:len(sizes)])
    layer = qerl.QuantLinear(names, sizes, in_features, tiled, bias, **options)
    return layer.to(KERNEL_DEVICE), dense


@runs_kernels
def test_kernel_decode_of_a_layer_is_its_forward():
    """decode (fused, interleaved) against forward (dequantised), with LoRA, bias and residual."""
    layer, _ = tiled_layer([128] * 3, 256, lora_rank=4, lora_alpha=8)
    layer.lora_B.data.normal_()
    x = torch.randn(5, 256).bfloat16()
    residual = torch.randn(5, 384).bfloat16().to(KERNEL_DEVICE)
    with torch.no_grad():
        layer.prepare_decoding(torch.bfloat16)
        y = layer.decode(interleaved(x), residual)
        expected = layer(x.to(KERNEL_DEVICE)) + residual
    assert relative(y.float(), expected.float()) < 1e-2


@runs_kernels
def test_kernel_gradient_through_tiles():
    """dL/dx of a frozen layer in tiles, and calls from threads that have no CUDA context yet.

    Autograd's is one, and decodes the weight.
    """
    tiled, dense = tiled_weight("nvfp4", 384, 256)
    with ThreadPoolExecutor(1) as new_thread:
        weight = new_thread.submit(tiled.dequantize).result()
    assert is_close(weight, dense)
    x = torch.randn(40, 256).bfloat16()
    with ThreadPoolExecutor(1) as new_thread:          # 40 rows: x by TMA, too
        y = new_thread.submit(tiled.multiply, interleaved(x)).result()
    assert is_close(y, x.double() @ dense.T)
    layer, dense = tiled_layer([384], 256)
    x = torch.randn(5, 256, device=KERNEL_DEVICE, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(5, 384).bfloat16()
    layer(x).backward(grad.to(KERNEL_DEVICE))
    assert is_close(x.grad, grad.double() @ dense)


# --------------------------------------------------------------------------------------------------
# 4. In between

@runs_kernels
@pytest.mark.parametrize("order", [lambda x: x, lambda x: kernels.interleave(x)])
def test_kernel_norm_and_silu(order):
    torch.manual_seed(0)
    x, weight = there(torch.randn(5, 384), torch.randn(384))
    in_tiles = bool(order(torch.arange(384))[2] != 2)
    normed = kernels.rms_norm(x, weight, 1e-6, in_tiles)
    torch.testing.assert_close(normed, order(F.rms_norm(x, (384,), weight, 1e-6)))
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(kernels.silu_mul(x, in_tiles), order(F.silu(gate) * up))


def exact_logprobs(hidden, lm_head, tokens):
    return (hidden @ lm_head.T).log_softmax(-1).gather(1, tokens[:, None])[:, 0]


# name: (with kernels, exactly, the first input, a view of it, the other inputs). Sizes are odd.
torch.manual_seed(0)
ANGLES = torch.rand(7, 20).repeat(1, 2) * 6
BETWEEN = {
    "rms_norm": (
        lambda x, w: kernels.rms_norm(x, w, 1e-3), lambda x, w: F.rms_norm(x, (600,), w, 1e-3),
        (2, 7, 700), lambda x: x[..., 50:650], [torch.randn(600)]),
    "silu_mul": (
        lambda x: kernels.silu_mul(x), lambda x: F.silu(x[..., :1100]) * x[..., 1100:],
        (4, 7, 2200), lambda x: x[::2], []),
    "rotary": (
        lambda x, c, s: kernels.rotary(x, c, s),
        lambda x, c, s: qerl.rotate(x, c[:, None], s[:, None]),
        (2, 7, 8 * 40), lambda x: x.unflatten(-1, (8, 40))[:, :, 2:7],
        [ANGLES.cos(), ANGLES.sin()]),
    "output_logprobs": (
        lambda h, w, t: qerl.OutputLogprobs.apply(h, w.to(h.dtype).detach(), t, 5), exact_logprobs,
        (14, 40), lambda h: h[:, 4:36], [torch.randn(4500, 32), torch.randint(0, 4500, (14,))]),
}


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BETWEEN)
def test_kernel_gradients(name, dtype):
    """Results and gradients against float64, of views, and of gradients that are not dense."""
    torch.manual_seed(0)
    kernel, exact, shape, view, others = BETWEEN[name]
    others = [t.to(dtype).float().clone() if t.is_floating_point() else t for t in others]
    inputs = there(torch.randn(shape).to(dtype), *others)
    exact_inputs = [t.double() if t.is_floating_point() else t for t in inputs]
    for first in (inputs[0], exact_inputs[0]):
        first.requires_grad_()
    if name == "rms_norm":
        inputs[1].requires_grad_()
        exact_inputs[1].requires_grad_()
    y = kernel(view(inputs[0]), *inputs[1:])
    z = exact(view(exact_inputs[0]), *exact_inputs[1:])
    assert y.dtype == (torch.float32 if name == "output_logprobs" else dtype)
    if z.dim() > 2:
        strided = torch.randn(z.transpose(-2, -3).shape).transpose(-2, -3)
    else:
        strided = torch.randn(2 * len(z))[::2]
    for grad in (strided, torch.tensor(0.5).expand(z.shape)):
        grad = grad.to(y.dtype).to(KERNEL_DEVICE)
        y.backward(grad, retain_graph=True)
        z.backward(grad.double(), retain_graph=True)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2               # the interpreter truncates
    assert relative(y.double(), z) < tolerance
    for ours, right in zip(inputs, exact_inputs):
        if right.requires_grad:
            assert relative(ours.grad.double(), right.grad) < tolerance


@runs_kernels
@pytest.mark.parametrize("name,recomputed", [("qwen2", True), ("qwen2", False), ("qwen3", True)])
def test_kernels_train_as_pytorch(tmp_path, name, recomputed):
    """Log-probabilities and gradients of LoRA and norms, with kernels and without them."""
    folder, _ = make_folder(tmp_path, name)
    model = with_lora(folder, train_norms=recomputed, device=KERNEL_DEVICE)
    if recomputed:
        model.recompute_in_backward()
    prompts = [[5, 6, 7], [8], [5, 6, 7]]
    length = torch.tensor([5, 2, 3], device=KERNEL_DEVICE)
    completions = torch.randint(0, 250, (3, 5), device=KERNEL_DEVICE)

    def trained():
        model.zero_grad()
        logprobs = qerl.token_logprobs(model, prompts, completions, length, chunk=4)
        logprobs.square().sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return {"logprobs": logprobs.detach(), **gradients}
    with_kernels = trained()
    with pytorch_alone():
        without = trained()
    assert len(with_kernels) == 1 + len(qerl.trainable(model))
    assert with_kernels.keys() == without.keys()
    for found, tensor in with_kernels.items():
        assert relative(tensor, without[found]) < (0.05 if CUDA else 1e-4), found


@runs_kernels
@pytest.mark.parametrize("heads,kv_heads,dim,in_tiles,parts", [
    (6, 2, 48, False, None), (4, 4, 64, False, 2), (14, 2, 128, True, 3),
])
def test_kernel_decode_attention(monkeypatch, heads, kv_heads, dim, in_tiles, parts):
    """Three pieces of the cache, the last one short; what lies behind `filled` does not matter."""
    torch.manual_seed(0)
    monkeypatch.setattr(qerl, "CACHE_PIECE", 256)
    longest = 2 * 256 + 9
    filled = torch.tensor([0, 64, 65, longest - 1, 255, 127, 256])
    qkv = torch.randn(7, (heads + 2 * kv_heads) * dim)
    cos = torch.randn(7, dim)
    sin = torch.randn(7, dim)
    whole = torch.randn(2, 7, kv_heads, longest, dim)
    for b, n in enumerate(filled):
        whole[:, b, :, n:] = float("nan")
    pieces = there(*(piece.contiguous() for piece in whole.split(256, 3)))
    addresses = torch.tensor([piece.data_ptr() for piece in pieces], device=KERNEL_DEVICE)
    y = kernels.decode_attention(*there(qkv, cos, sin), pieces, addresses, longest,
                                 filled.to(KERNEL_DEVICE), 256, in_tiles, 128, parts)
    exact = [piece.nan_to_num().double() for piece in whole.split(256, 3)]
    with pytorch_alone():
        cache = types.SimpleNamespace(pieces=[exact], filled=filled)
        expected = qerl.decode_attention(qkv.double(), cos.double(), sin.double(), cache, 0)
    expected = kernels.interleave(expected) if in_tiles else expected
    assert relative(y.cpu().double(), expected) < 1e-5
    for piece, right in zip(pieces, exact):
        assert relative(piece.cpu().nan_to_num().double(), right) < 1e-6


@gpu
def test_flash_attention_of_a_packed_line_is_pytorchs():
    """Prompts of 5, 70 and 1 tokens, shared by three, one and one completion; and the gradients."""
    torch.manual_seed(0)
    length = torch.tensor([4, 1, 130, 7, 3], device="cuda")
    packing = qerl.pack([[1] * 5] * 3 + [[2] * 70, [3]], length)
    shapes = [(sum(packing.sizes), heads, 64) for heads in (6, 2, 2)]
    found = [torch.randn(s, device="cuda").bfloat16().requires_grad_() for s in shapes]
    exact = [t.detach().float().requires_grad_() for t in found]
    y = kernels.packed_attention(*found, packing)
    z = qerl.packed_attention(*exact, packing)         # float32, which FlashAttention does not take
    grad = torch.randn_like(y)
    y.backward(grad)
    z.backward(grad.float())
    for ours, right in [(y, z), *((a.grad, b.grad) for a, b in zip(found, exact))]:
        assert relative(ours.float(), right) < 2e-2


# --------------------------------------------------------------------------------------------------
# 5. Output

@runs_kernels
def test_kernel_sample():
    """Log-probability and entropy against PyTorch's; the tokens' frequencies by chi-squared."""
    torch.manual_seed(0)
    seeds = torch.tensor([[5], [5], [6], [1]], device=KERNEL_DEVICE)
    logits = torch.randn(3, 5000).to(KERNEL_DEVICE)
    token, logprob, entropy = kernels.sample(logits, 0.7, seeds[0])
    expected = (logits / 0.7).log_softmax(-1)
    chosen = expected.gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(logprob, chosen, rtol=1e-4, atol=1e-4)
    nats = -(expected.exp() * expected).sum(1)
    torch.testing.assert_close(entropy, nats, rtol=1e-4, atol=1e-4)
    assert torch.equal(token, kernels.sample(logits, 0.7, seeds[1])[0])
    assert not torch.equal(token, kernels.sample(logits, 0.7, seeds[2])[0])
    draws = 20000 if CUDA else 160
    logits = torch.tensor([0.0, 1.0, 1.5, -0.5, 0.5], device=KERNEL_DEVICE)
    drawn = kernels.sample(logits.expand(draws, 5).contiguous(), 1.0, seeds[3])[0]
    wanted = draws * logits.softmax(0)
    difference = drawn.bincount(minlength=5) - wanted
    assert (difference ** 2 / wanted).sum() < 18.5     # 4 degrees of freedom: 1 in 1,000


# --------------------------------------------------------------------------------------------------
# All together

@gpu
@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "nf4", "bf16"])
def test_gpu_rollout_is_the_policy_that_is_trained(tmp_path, weights):
    """Log-probabilities of decoding against those of training, with LoRA and refilled slots.

    Decoding has tiles, fused kernels and a CUDA graph.
    """
    model = with_lora(make_folder(tmp_path, "wide")[0], weights=weights, device="cuda")
    assert model.blocks[0].mlp.down.weight.interleaved == (weights != "bf16")
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
    ours, theirs = rollouts
    assert torch.equal(ours.tokens, theirs.tokens.cpu())
    torch.testing.assert_close(ours.logprobs, theirs.logprobs.cpu(), rtol=1e-3, atol=1e-3)


@gpu
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_gpu_rollouts_with_one_seed_are_equal(tmp_path, top_p):
    """Bit for bit, with the step as a graph or, for top-p, half of it; 128 slots: many rows."""
    model = with_lora(make_folder(tmp_path, "wide")[0], device="cuda")
    prompts = [[5 + i] for i in range(100)]

    def rollout():
        generator = torch.Generator("cuda").manual_seed(0)
        return qerl.generate(model, prompts, 60, 2, top_p=top_p, slots=128, generator=generator)
    first = rollout()
    for _ in range(3):
        other = rollout()
        assert torch.equal(first.tokens, other.tokens)
        assert torch.equal(first.logprobs, other.logprobs)


# methods/merged.py, whose layers lie in tiles

@runs_kernels
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_kernel_weights_merged_with_lora_unless_rounding_would_lose_it(name):
    torch.manual_seed(0)
    format = qerl.FORMATS[name]
    tiled = format.tile(*there(*format.quantize(torch.randn(128, 128))))
    layer = qerl.QuantLinear(["a", "b"], [64, 64], 128, tiled, None, lora_rank=4, lora_alpha=8)
    layer = layer.to(KERNEL_DEVICE)
    layer.lora_B.data.normal_()
    found = merged.merged_weight(layer, torch.bfloat16)
    if name == "mxfp4":                                # its values are bfloat16 numbers
        assert found is None
        return
    pairs = zip(layer.lora_A.split(4), layer.lora_B.split(64))
    expected = tiled.dequantize(torch.float32) + 2 * torch.cat([B @ A for A, B in pairs])
    assert relative(found.dequantize(torch.float32), expected) < 3e-3


@runs_kernels
def test_kernel_layers_are_as_before_after_a_merging_sampler(monkeypatch):
    monkeypatch.setattr(merged, "MERGED_ABOVE", 4)
    model = random_model("tiny", "nvfp4", 16, "cpu").to(KERNEL_DEVICE)
    model.embedding = model.embedding.bfloat16()
    model.lm_head = model.lm_head.bfloat16()
    layers = model.quantized_layers()
    for layer in layers:
        layer.weight = qerl.tile_nvfp4(*there(*layer.weight.parts))
        layer.bias = None
    before = [layer.weight for layer in layers]
    sizes = []
    merge = merged.MergingSampler.merge
    monkeypatch.setattr(merged.MergingSampler, "merge", lambda self, layers: (
        sizes.append(len(self.completion)), merge(self, layers)))
    prompts = [[1, 2, 3], [4], [5, 6]]
    plain, merging = (
        qerl.generate(model, prompts, 2, 2, temperature=0, sampler_class=sampler_class)
        for sampler_class in (qerl.Sampler, merged.MergingSampler))
    assert sizes == [6]
    assert [layer.weight for layer in layers] == before
    assert all(layer.use_adapter for layer in layers)
    assert 0 < (plain.logprobs[:, 0] - merging.logprobs[:, 0]).abs().max() < 0.1
