"""Triton's kernels against the PyTorch that they replace, on a GPU or in Triton's interpreter."""
import contextlib
import itertools
import math
import os
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import qerl
from common import compiled_for, neighbour
from methods import merged
from qerl import kernels
from test_qerl import CUDA, HERE, KERNEL_DEVICE, NEAR, PROMPTS, gpu, gradient_of, make_folder
from test_qerl import relative, runs_kernels, stacked_layer, with_lora

needs_triton = pytest.mark.skipif(kernels is None, reason="needs Triton")
NEW_NUMPY = np.lib.NumpyVersion(np.__version__) >= "2.4.0"
needs_interpreter = pytest.mark.skipif(
    kernels is None or (NEW_NUMPY and kernels.triton.__version__.startswith("3.6.")),
    reason="Triton 3.6's interpreter fails with numpy from 2.4 on: pip install 'numpy<2.4'")


def run_python(*args, **environment):
    return subprocess.run([sys.executable, *args], cwd=HERE, capture_output=True, text=True,
                          env={**os.environ, **environment})


@needs_interpreter
def test_the_interpreter_runs_the_kernels():
    """The kernel tests below in Triton's interpreter, which must be on before Triton is imported."""
    if CUDA or kernels.INTERPRETED:
        pytest.skip("the kernel tests run by themselves")
    chosen = "kernel and not interpreter and not compile"
    result = run_python("-m", "pytest", "-q", "-k", chosen, TRITON_INTERPRET="1")
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

@needs_triton
@pytest.mark.parametrize("version,in_bfloat16,in_float16", [
    ((8, 6), True, True),
    ((7, 5), False, True),
    ((7, 0), False, False),
])
def test_kernels_run_where_they_can(monkeypatch, version, in_bfloat16, in_float16):
    """By compute capability; no such GPU has to be here."""
    monkeypatch.setattr(kernels, "capability", lambda device: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: version)
    device = torch.device("cuda")
    assert kernels.runs_on(device, torch.float16) == in_float16
    assert kernels.runs_on(device, torch.bfloat16) == in_bfloat16
    assert kernels.tiles_fit(device, torch.bfloat16, 256, [128]) == in_bfloat16
    assert (qerl.default_dtype(device) == torch.bfloat16) == in_bfloat16


@pytest.mark.parametrize("system,warnings", [
    ("torch.version.hip = '7.0'", 0 if kernels is None else 1),
    ("sys.modules['triton'] = None", 0),
])
def test_pytorch_computes_all_where_no_kernels_run(system, warnings):
    """On AMD's GPUs, which PyTorch calls "cuda", too, and on systems without Triton."""
    result = run_python("-c", f"import sys, torch; {system}; import qerl; print(qerl.kernels)")
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
    assert len({name for name, *_ in compiled}) == (11 if target == 75 else 13)
    monkeypatch.setattr(kernels, "capability", lambda device: divmod(target, 10))
    programs = {(config.rows, config.R, config.C): config.programs
                for config in itertools.chain(*kernels.configs_on(None))}
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
    weight = (torch.randint(-29, 30, (35, 96)) / 4).to(dtype)          # half of them ties
    scale = torch.exp2(torch.randint(-3, 3, (35, 96 // block)).float())
    packed = kernels.encode_e2m1(*there(weight, scale)).cpu()
    with pytorch_alone():
        assert torch.equal(packed, qerl.encode_e2m1(weight, scale))


# --------------------------------------------------------------------------------------------------
# 2. Tiles

def tiled_weight(name, out, columns):
    """(TiledWeight, its values float64) of rows of very different size, 128 of each stacked layer."""
    torch.manual_seed(0)
    rows = torch.exp2(torch.randint(-6, 7, (out, 1)).float())
    weight = stacked_layer(name, (rows * torch.randn(out, columns)).split(128)).weight
    packed, scale, global_scale = weight.parts
    if name == "nf4":
        scale = scale.bfloat16().float()               # as tile keeps them
    dense = weight.format.dequantize(packed, scale, global_scale, torch.float64)
    return weight.format.tile(*there(packed, scale, global_scale)), dense


def interleaved(x):
    """x as TiledWeight.multiply takes it."""
    return kernels.interleave(x).contiguous().to(KERNEL_DEVICE)


@runs_kernels
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "nf4"])
def test_kernel_untile(name):
    """From a thread, too, that has no CUDA context yet, as autograd's."""
    tiled, dense = tiled_weight(name, 192, 384)
    with ThreadPoolExecutor(1) as new_thread:
        weight = new_thread.submit(tiled.dequantize, torch.float32).result()
    # On a GPU NF4's table, too, is bfloat16.
    assert relative(weight.cpu().double(), dense) < (3e-3 if name == "nf4" and CUDA else 1e-6)
    in_order_of_tiles = tiled.dequantize(torch.float32, interleaved=True)
    assert torch.equal(in_order_of_tiles, kernels.interleave(weight))


# --------------------------------------------------------------------------------------------------
# 3. Linear

def is_close(y, expected):
    return relative(y.cpu().double(), expected) < 5e-3


def assert_linear(name, rows, columns, piece=128, rank=8):
    """TiledWeight.multiply by three stacked layers of `piece` rows is Eq. 2 in float64.

    Without and with bias, residual and LoRA. The counters that programs share are zero afterwards.
    """
    tiled, dense = tiled_weight(name, 3 * piece, columns)
    x = torch.randn(rows, columns).bfloat16()
    bias = torch.randn(3 * piece) * 64
    residual = torch.randn(rows, 3 * piece).bfloat16() * 64
    A = torch.randn(3 * rank, columns) / 16
    B = torch.randn(3 * piece, rank) * 8
    h = x.double() @ A.double().T
    product = x.double() @ dense.T
    whole = product + 2 * h @ torch.block_diag(*B.double().split(piece)).T + bias + residual
    lora = tiled.prepare_lora(*there(A, B), [piece] * 3, 2.0, torch.bfloat16)
    assert is_close(tiled.multiply(interleaved(x)), product)
    y = tiled.multiply(interleaved(x), *there(bias, residual), lora)
    assert is_close(y, whole)
    assert not kernels.scratch(y.device).counters.any()


@runs_kernels
@pytest.mark.parametrize("name,rows,columns,group", [
    ("nvfp4", 1, 512, 0),
    ("nvfp4", 21, 256, 1),
    ("nvfp4", 70, 512, 2),
    ("nvfp4", 130, 256, 3),
    ("nvfp4", 300, 256, 4),
    ("mxfp4", 21, 256, 0),
    ("nf4", 21, 256, 3),
])
def test_kernel_linear(monkeypatch, name, rows, columns, group):
    """In each config for about so many rows; with one program an SM several share a tile."""
    groups = kernels.configs_on(torch.device(KERNEL_DEVICE))
    if group >= len(groups):
        pytest.skip("only Hopper has room for tiles of more than 64 rows")
    piece = 64 * max(config.R for config in groups[group])
    one_program = groups[group][0]._replace(C=1, programs=1)
    for config in (*groups[group], one_program):
        monkeypatch.setattr(kernels, "config_for", lambda *_: config)
        assert_linear(name, rows, columns, piece)


@runs_kernels
@pytest.mark.parametrize("rows,rank", [(5, 24), (5, 160), (513, 8)])
def test_kernel_linear_of_any_rank_and_many_rows(rows, rank):
    """A rank that is no power of two is padded; LoRA above 128 and 513 rows take PyTorch's product."""
    assert_linear("nvfp4", rows, 256, rank=rank)


@runs_kernels
@pytest.mark.parametrize("name,rows,by_kernel", [
    ("nvfp4", 5, True),
    ("mxfp4", 40, True),
    ("nvfp4", 65, False),
    ("nf4", 5, False),
])
def test_kernel_linear_without_wgmma(monkeypatch, name, rows, by_kernel):
    """As other GPUs than Hopper's multiply: by mma.sync; NF4 and many rows decode first."""
    if CUDA and torch.cuda.get_device_capability()[0] == 9:
        monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm80")
    monkeypatch.setattr(kernels, "capability", lambda device: (8, 6))
    launches = []
    launch = kernels.launch_linear
    monkeypatch.setattr(
        kernels, "launch_linear", lambda *args: launches.append(args) or launch(*args))
    assert_linear(name, rows, 256)
    assert bool(launches) == by_kernel


@needs_triton
def test_kernel_linear_plans_fit():
    """Of Qwen2.5-7B's layers on 132 SMs: whole tiles and steps; all programs run at once."""
    groups = kernels.CONFIGS, kernels.CONFIGS_WITHOUT_WGMMA, kernels.CONFIGS_IN_100_KB
    layers = (37888, 3584, (18944, 37888)), (4608, 3584, (3584, 4096))
    cases = itertools.product((1, 17, 64, 129, 1024), layers, (0, 16, 128), groups)
    for rows, (out, columns, bounds), rank, configs in cases:
        plan = kernels.plan_linear(rows, out, columns, bounds, rank, 3 * rank, 132, configs)
        config = plan.config
        assert math.gcd(out, *bounds) % (64 * config.R) == 0
        assert columns % (64 * config.C) == 0
        assert plan.tiles == out // (64 * config.R) * math.ceil(rows / config.rows)
        assert 1 <= plan.programs <= plan.tiles * columns // (64 * config.C)
        assert plan.programs + plan.lora_programs <= config.programs * 132
        assert (plan.lora_programs > 0) == (rank > 0 and rows <= 128)


def layer_in_tiles(name):
    """(A QuantLinear of three layers 256 -> 128 with LoRA, its weight without that in float64)"""
    tiled, dense = tiled_weight(name, 384, 256)
    bias, = there(torch.randn(384).bfloat16())
    layer = qerl.QuantLinear(["a", "b", "c"], [128] * 3, 256, tiled, bias, 4, lora_alpha=8)
    layer.lora_B.data.normal_()
    return layer.to(KERNEL_DEVICE), dense


@runs_kernels
def test_kernel_layer_in_tiles():
    """decode (fused, interleaved) is forward (dequantised), whose gradient is right, too."""
    layer, dense = layer_in_tiles("nvfp4")
    x = torch.randn(5, 256).bfloat16()
    residual, grad = there(*torch.randn(2, 5, 384).bfloat16())
    layer.prepare_decoding(torch.bfloat16)
    with torch.no_grad():
        y = layer.decode(interleaved(x), residual)
    x = x.to(KERNEL_DEVICE).requires_grad_()
    assert relative(y.float(), (layer(x) + residual).float()) < 1e-2
    layer.use_adapter = False
    layer(x).backward(grad)
    assert is_close(x.grad, grad.cpu().double() @ dense)


@runs_kernels
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_kernel_weights_merged_with_lora_unless_rounding_would_lose_it(name):
    """methods/merged.py for the time of a rollout; MXFP4's values are bfloat16 numbers."""
    layer, dense = layer_in_tiles(name)
    tiled = layer.weight
    B = torch.block_diag(*layer.lora_B.cpu().split(128))
    sampler = types.SimpleNamespace(model=types.SimpleNamespace(
        embedding=torch.empty(0, dtype=torch.bfloat16), quantized_layers=lambda: [layer]))
    merged.MergingSampler.merge(sampler, [layer])
    assert layer.use_adapter == (layer.weight is tiled) == (name == "mxfp4")
    if name == "nvfp4":
        assert is_close(layer.weight.dequantize(torch.float32), dense + 2 * B @ layer.lora_A.cpu())
    merged.MergingSampler.restore(sampler)
    assert layer.weight is tiled
    assert layer.use_adapter


# --------------------------------------------------------------------------------------------------
# 4. In between

@runs_kernels
def test_kernels_write_in_the_order_of_tiles():
    x, weight = there(torch.randn(5, 384), torch.randn(384))
    normed = kernels.rms_norm(x, weight, 1e-6, interleaved=True)
    assert_close(normed, kernels.interleave(F.rms_norm(x, (384,), weight, 1e-6)))
    gate, up = x.chunk(2, -1)
    product = kernels.silu_mul(x, interleaved=True)
    assert_close(product, kernels.interleave(F.silu(gate) * up))


def norm(x, weight):
    return qerl.RMSNorm("a norm", weight, 1e-3)(x[..., 50:650])


def silu_mul(x):
    return qerl.silu_mul(x[::2])


def rotary(x, cos, sin):
    return qerl.rotary(
        x.unflatten(-1, (8, 40))[:, :, 2:7], cos.repeat(1, 2), sin.repeat(1, 2))


def output_logprobs(x, lm_head):
    tokens = torch.arange(0, 4500, 330, device=x.device)
    return qerl.OutputLogprobs.apply(x[:, 4:36], lm_head, tokens, 5)


# (a function of qerl.py on a view, the shape of that, the shapes of the other inputs)
BETWEEN = [
    (norm, (2, 7, 700), [(600,)]),
    (silu_mul, (4, 7, 2200), []),
    (rotary, (2, 7, 320), [(7, 20), (7, 20)]),
    (output_logprobs, (14, 40), [(4500, 32)]),
]


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function,shape,others", BETWEEN)
def test_kernel_gradients(function, shape, others, dtype):
    """Values and gradients against PyTorch in float64, for gradients that are not dense, too."""
    torch.manual_seed(0)
    inputs = there(*(torch.randn(size).to(dtype) for size in (shape, *others)))

    def computed(x, *others):
        y = function(x.requires_grad_(), *others)
        torch.manual_seed(1)
        strided = torch.randn(*y.shape, 2).to(y)[..., 0]
        for grad in (strided, strided[:1].expand(y.shape)):
            y.backward(grad, retain_graph=True)
        return y.double(), x.grad.double()

    found = computed(*inputs)
    with pytorch_alone():
        expected = computed(*(t.detach().double() for t in inputs))
    for ours, right in zip(found, expected):
        # The interpreter truncates to bfloat16.
        assert relative(ours, right) < (2e-5 if dtype == torch.float32 else 2e-2)


@runs_kernels
@pytest.mark.parametrize("name,recomputed", [("qwen2", False), ("qwen3", True)])
def test_kernels_train_as_pytorch(tmp_path, name, recomputed):
    """Log-probabilities and the gradient of LoRA and norms."""
    model = with_lora(make_folder(tmp_path, name)[0], train_norms=True, device=KERNEL_DEVICE)
    if recomputed:
        model.recompute_in_backward()
    completions, length = there(torch.randint(0, 250, (3, 5)), torch.tensor([5, 2, 3]))

    def trained():
        logprobs = qerl.token_logprobs(
            model, [[5, 6, 7], [8], [5, 6, 7]], completions, length, chunk=4)
        return logprobs.detach(), gradient_of(model, logprobs.square().sum())

    found = trained()
    with pytorch_alone():
        expected = trained()
    for ours, right in zip(found, expected):
        assert relative(ours, right) < (0.05 if CUDA else 1e-4)


@runs_kernels
@pytest.mark.parametrize("heads,kv_heads,dim,in_tiles,new", [
    (6, 2, 48, False, 1),
    (14, 2, 128, True, 1),
    (6, 2, 48, False, 4),
])
def test_kernel_decode_attention(monkeypatch, heads, kv_heads, dim, in_tiles, new):
    """Three pieces of the cache, the last one short; what lies behind `filled` does not matter.

    new: tokens of a slot. Between four of them a piece ends, or a program's part of the cache.
    """
    torch.manual_seed(0)
    monkeypatch.setattr(qerl, "CACHE_PIECE", 256)
    monkeypatch.setattr(kernels, "MOST_PARTS", 3)      # each of more than 128 tokens
    cached = torch.tensor([0, 64, 65, 520, 255, 127, 256])
    filled, = there((cached + torch.arange(new)[:, None]).flatten())
    new_tokens = torch.randn(7 * new, (heads + 2 * kv_heads) * dim), *torch.rand(2, 7 * new, dim)
    kept = torch.randn(2, 7, kv_heads, 524, dim)
    behind = torch.arange(524)[:, None] >= cached[:, None, None, None]

    def attended(kept, dtype):
        pieces = there(*(piece.to(dtype).contiguous() for piece in kept.split(256, 3)))
        addresses = torch.tensor([[piece.data_ptr() for piece in pieces]], device=KERNEL_DEVICE)
        cache = types.SimpleNamespace(
            pieces=[pieces], filled=filled, max_len=524, addresses=addresses)
        inputs = (t.to(dtype) for t in there(*new_tokens))
        y = qerl.decode_attention(*inputs, cache, 0, in_tiles)
        return y.double(), torch.cat(pieces, 3).nan_to_num().double()

    y, cache = attended(kept.masked_fill(behind, math.nan), torch.float32)
    with pytorch_alone():
        expected, expected_cache = attended(kept.masked_fill(behind, 0), torch.float64)
    expected = kernels.interleave(expected) if in_tiles else expected
    assert relative(y, expected) < 1e-5
    assert relative(cache, expected_cache) < 1e-6


@gpu
def test_flash_attention_of_a_packed_line_is_pytorchs():
    """Prompts of 5, 70 and 1 tokens, shared by three, one and one completion; and the gradients."""
    torch.manual_seed(0)
    length = torch.tensor([4, 1, 130, 7, 3], device="cuda")
    packing = qerl.pack([[1] * 5] * 3 + [[2] * 70, [3]], length)
    tokens = sum(packing.sizes)
    found = [torch.randn(tokens, heads, 64).cuda().bfloat16().requires_grad_()
             for heads in (6, 2, 2)]
    exact = [t.detach().float().requires_grad_() for t in found]
    y = kernels.packed_attention(*found, packing)
    z = qerl.packed_attention(*exact, packing)         # float32, which FlashAttention does not take
    grad = torch.randn_like(y)
    ours = y, *torch.autograd.grad(y, found, grad)
    right = z, *torch.autograd.grad(z, exact, grad.float())
    for a, b in zip(ours, right):
        assert relative(a.float(), b) < 2e-2


# --------------------------------------------------------------------------------------------------
# 5. Output

@runs_kernels
def test_kernel_sample():
    """Log-probability and entropy against PyTorch's; the tokens' frequencies by chi-squared."""
    torch.manual_seed(0)
    logits, seed, other_seed = there(torch.randn(3, 5000), *torch.tensor([[5], [6]]))
    token, logprob, entropy = kernels.sample(logits, 0.7, seed)
    expected = (logits / 0.7).log_softmax(-1)
    assert_close(logprob, expected[range(3), token], **NEAR)
    assert_close(entropy, -(expected.exp() * expected).sum(1), **NEAR)
    assert torch.equal(token, kernels.sample(logits, 0.7, seed)[0])
    assert not torch.equal(token, kernels.sample(logits, 0.7, other_seed)[0])
    draws = 20000 if CUDA else 160
    logits, = there(torch.tensor([0.0, 1.0, 1.5, -0.5, 0.5]))
    drawn = kernels.sample(logits.expand(draws, 5).contiguous(), 1.0, seed)[0]
    wanted = draws * logits.softmax(0)
    difference = drawn.bincount(minlength=5) - wanted
    assert (difference ** 2 / wanted).sum() < 18.5     # 4 degrees of freedom: 1 in 1,000


# --------------------------------------------------------------------------------------------------
# All together

@gpu
@pytest.mark.parametrize("name,weights,top_p", [
    *(("qerl", weights, 1.0) for weights in qerl.FORMATS),
    ("merged", "nvfp4", 1.0),
    ("speculative", "nvfp4", 1.0),
    ("speculative", "nvfp4", 0.9),
])
def test_gpu_rollout_is_the_policy_that_is_trained(tmp_path, monkeypatch, name, weights, top_p):
    """Log-probabilities of decoding against those of training, with LoRA and refilled slots.

    Decoding has tiles, fused kernels and a CUDA graph. The second rollout has drafts of the first.
    """
    monkeypatch.setattr(merged, "MERGED_ABOVE", 64)
    model = with_lora(make_folder(tmp_path, "wide")[0], weights=weights, device="cuda")
    prompts = [[5 + i // 2] * (1 + i // 2 % 7) for i in range(120)]
    algo = neighbour(name)
    for _ in range(2):
        rollout = algo.generate(model, prompts, 40, 1, top_p=top_p, slots=70)
    with torch.no_grad():
        logprobs = qerl.token_logprobs(model, prompts, rollout.tokens, rollout.length)
    assert (logprobs - rollout.logprobs).abs()[rollout.mask].mean() < 0.03
    assert model.blocks[0].mlp.down.weight.interleaved == (weights != "bf16")
    assert name != "speculative" or algo.measured["tokens_a_pass"] > 1


@gpu
def test_gpu_generates_what_the_cpu_does(qwen):
    rollouts = []
    for device in ("cpu", "cuda"):
        model = qerl.load_model(qwen[0], lora_rank=2, device=device, dtype=torch.float32)
        rollouts.append(qerl.generate(model, PROMPTS, 24, 2, temperature=0, slots=4))
    expected, found = rollouts
    assert torch.equal(found.tokens.cpu(), expected.tokens)
    assert_close(found.logprobs.cpu(), expected.logprobs, rtol=1e-3, atol=1e-3)


@gpu
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_gpu_rollouts_with_one_seed_are_equal(tmp_path, top_p):
    """Bit for bit, with the step as a graph or, for top-p, half of it; 128 slots: many rows."""
    model = with_lora(make_folder(tmp_path, "wide")[0], device="cuda")
    prompts = [[5 + i] for i in range(100)]

    def logprobs():
        generator = torch.Generator("cuda").manual_seed(0)
        return qerl.generate(
            model, prompts, 60, 2, top_p=top_p, slots=128, generator=generator).logprobs

    first = logprobs()
    assert all(torch.equal(first, logprobs()) for _ in range(3))
