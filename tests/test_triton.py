"""Triton's kernels against the PyTorch that they replace, on a GPU or in Triton's interpreter."""
import itertools
import math
import random
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.testing import assert_close

import qerl
from harness import fast, loading, machine
from common import run_python
from methods import gptq
from studies import random_models
from harness.fast import kernels
from test_qerl import CUDA, KERNEL_DEVICE, NEAR, gpu, gradient_of, make_folder, relative
from test_qerl import runs_kernels, stacked_layer, with_lora

needs_triton = pytest.mark.skipif(kernels is None, reason="needs Triton")
NEW_NUMPY = np.lib.NumpyVersion(np.__version__) >= "2.4.0"
needs_interpreter = pytest.mark.skipif(
    kernels is None or (NEW_NUMPY and kernels.triton.__version__.startswith("3.6.")),
    reason="Triton 3.6's interpreter fails with numpy from 2.4 on: pip install 'numpy<2.4'")


@needs_interpreter
def test_the_interpreter_runs_the_kernels():
    """The kernel tests below in Triton's interpreter, which must be on before Triton is imported."""
    if CUDA or kernels.INTERPRETED:
        pytest.skip("the kernel tests run by themselves")
    chosen = "kernel and not interpreter and not compile"
    files = ("tests/test_triton.py", "tests/test_jetrl.py")
    result = run_python("-m", "pytest", "-q", *files, "-k", chosen, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-2000:]
    assert "skipped" not in result.stdout.splitlines()[-1]


def pytorch_alone():
    """Inside, qerl computes without kernels."""
    return mock.patch.object(fast, "kernels", None)


@pytest.fixture
def tiles(monkeypatch):
    """In the interpreter, too, weights lie in tiles if their sizes fit."""
    if not CUDA:
        monkeypatch.setattr(
            kernels, "tiles_fit",
            lambda device, dtype, columns, sizes: all(n % 128 == 0 for n in (columns, *sizes)))


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
    assert (loading.default_dtype(device) == torch.bfloat16) == in_bfloat16


def test_pytorch_computes_all_on_an_amd_gpu():
    """PyTorch calls it "cuda", too."""
    program = "import torch; torch.version.hip = '7.0'; from harness import fast; print(fast.kernels)"
    result = run_python("-c", program)
    assert result.stdout.split() == ["None"]
    assert result.stderr.count("AMD GPU") == (kernels is not None)


# Shared memory of an SM in kB; a program can have 1 kB less, which the system keeps for each.
# (CUDA C++ Programming Guide, technical specifications per compute capability)
SHARED = {
    75: 64,
    80: 164,
    86: 100,
    89: 100,
    90: 228,
    100: 228,
    120: 100,
}


def compiled_for(target):
    """(name, shared memory, tile's sizes if it is linear_kernel) of each kernel, compiled for a GPU."""
    from triton.backends.nvidia import compiler
    try:
        compiler.get_ptxas(target)
    except RuntimeError as e:
        pytest.skip(f"needs NVIDIA's assembler: {e}")
    done = run_python("-m", "studies.cross_compile", target, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    return [(name, *map(int, numbers)) for name, *numbers in lines]


@needs_triton
@pytest.mark.parametrize("target", SHARED)
def test_kernels_compile_for(monkeypatch, target):
    """Compiled, not run, for a GPU that is not here: all of a step, GPTQ's, FP8's of methods/, and
    linear_kernel's every tile, but for Hopper's, which the kernel tests run.

    They fit into its memory, and as many programs of linear_kernel as are meant to run at once do.
    """
    compiled = compiled_for(target)
    assert len({name for name, *_ in compiled}) == 12 + 2 * (target >= 80) + (target >= 89) + 2 * (target == 90)
    monkeypatch.setattr(kernels, "capability", lambda device: divmod(target, 10))
    programs = {(config.rows, config.R, config.C): config.programs
                for config in kernels.configs_on(None)}
    for name, shared, *tile in compiled:
        at_once = programs[tuple(tile)] if tile else 1
        assert at_once * (shared + 1024) <= 1024 * SHARED[target], (name, tile)
    tiles = {tuple(tile) for _, _, *tile in compiled if tile}
    assert target in (75, 90) or tiles == set(programs)


# --------------------------------------------------------------------------------------------------
# The plain product

@runs_kernels
@pytest.mark.parametrize("dtype,largest", [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("name,rows,columns", [
    ("nvfp4", 70, 80),
    ("mxfp4", 1, 96),
])
def test_kernel_plain_product(dtype, largest, name, rows, columns):
    """Of sizes that are no multiples of the tile's."""
    format = fast.FORMATS[name]
    packed, block_scale, global_scale = format.quantize(torch.randn(70, columns))
    x = torch.randn(rows, columns).to(dtype)
    expected = x.double() @ format.dequantize(packed, block_scale, global_scale, torch.float64).T
    y = kernels.fp4_matmul(*there(x, packed, format.scale(block_scale), global_scale))
    assert y.dtype == dtype
    assert relative(y.cpu().double(), expected) < largest


# --------------------------------------------------------------------------------------------------
# Quantising

@runs_kernels
def test_kernel_rounds_columns_for_gptq():
    """As PyTorch's loop, but for near ties; sizes are no multiples of a tile's."""
    W = torch.randn(35, 24)
    scale = torch.rand(35, 24) / 4 + 0.1
    U = torch.eye(24) + torch.randn(24, 24).triu() / 10
    found = kernels.round_columns(*there(W, scale, U))
    with pytorch_alone():
        expected = gptq.round_columns(W, scale, U)
    for ours, theirs in zip(found, expected):
        assert torch.isclose(ours.cpu(), theirs, rtol=1e-4, atol=1e-5).all(1).float().mean() > 0.9


# --------------------------------------------------------------------------------------------------
# Weights in tiles, and their products

def tiled_weight(name, out, columns):
    """(TiledWeight, its values float64) of rows of very different size, 128 of each stacked layer."""
    size_of_row = 2.0 ** torch.randint(-6, 7, (out, 1))
    weight = size_of_row * torch.randn(out, columns)
    weight = stacked_layer(name, weight.split(128)).weight
    dense = weight.format.dequantize(*weight.parts, torch.float64)
    return weight.format.tile(*there(*weight.parts)), dense


def assert_linear(name, rows, columns, piece=128, rank=8):
    """TiledWeight.multiply by three stacked layers of `piece` rows is Eq. 2 in float64.

    Without and with bias and LoRA. The counters that programs share are zero afterwards.
    """
    out = 3 * piece
    tiled, dense = tiled_weight(name, out, columns)
    decoded = tiled.dequantize(torch.float32).cpu().double()
    assert relative(decoded, dense) < 1e-6
    x = torch.randn(rows, columns).bfloat16()
    bias = (torch.randn(out) * 64).bfloat16()
    A = torch.randn(3 * rank, columns) / 16
    B = torch.randn(out, rank) * 8
    product = x.double() @ dense.T
    delta = torch.block_diag(*B.split(piece)) @ A
    added = 2 * x.double() @ delta.double().T + bias
    in_tiles, bias = there(kernels.interleave(x), bias)
    lora = tiled.prepare_lora(*there(A, B), [piece] * 3, 2.0, torch.bfloat16)
    for y, expected in (
            (tiled.multiply(in_tiles), product),
            (tiled.multiply(in_tiles, bias, lora), product + added)):
        assert relative(y.cpu().double(), expected) < 5e-3
    assert not kernels.scratch(y.device)[-1].any()


@runs_kernels
@pytest.mark.parametrize("name,rows,columns,tile_rows", [
    ("nvfp4", 1, 512, 16),
    ("nvfp4", 21, 256, 32),
    ("nvfp4", 70, 256, 64),
    ("nvfp4", 130, 256, 128),
    ("nvfp4", 300, 256, 256),
    ("mxfp4", 5, 256, 16),
])
def test_kernel_linear(monkeypatch, name, rows, columns, tile_rows):
    """In each config with such tiles; with one program an SM several share a tile."""
    configs = [config for config in kernels.configs_on(torch.device(KERNEL_DEVICE))
               if config.rows == tile_rows]
    if not configs:
        pytest.skip("only Hopper has room for tiles of more than 64 rows")
    one_program = configs[0]._replace(C=1, programs=1)
    for config in (*configs, one_program):
        monkeypatch.setattr(kernels, "config_for", lambda *_: config)
        assert_linear(name, rows, columns, piece=max(128, 64 * config.R))


@runs_kernels
@pytest.mark.parametrize("rows,rank", [
    (5, 24),
    (5, 160),
    (513, 8),
])
def test_kernel_linear_of_any_rank_and_many_rows(rows, rank):
    """A rank that is no power of two is padded; LoRA above 128 and 513 rows take PyTorch's product."""
    assert_linear("nvfp4", rows, 256, rank=rank)


@runs_kernels
@pytest.mark.parametrize("name,rows", [
    ("nvfp4", 5),
    ("mxfp4", 40),
    ("nvfp4", 65),
])
def test_kernel_linear_without_wgmma(monkeypatch, name, rows):
    """As other GPUs than Hopper's multiply: by mma.sync; many rows decode first."""
    if CUDA and torch.cuda.get_device_capability()[0] == 9:
        monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm80")
    monkeypatch.setattr(kernels, "capability", lambda device: (8, 6))
    assert_linear(name, rows, 256)


@needs_triton
@pytest.mark.parametrize("rows", [1, 17, 64, 129, 1024])
def test_kernel_linear_plans_fit(rows):
    """Of Qwen2.5-7B's layers on 132 SMs: whole tiles, and all programs run at once."""
    layers = (37888, 3584, (18944, 37888)), (4608, 3584, (3584, 4096))
    choices = kernels.CONFIGS, kernels.CONFIGS_WITHOUT_WGMMA, kernels.CONFIGS_IN_100_KB
    for layer, rank, configs in itertools.product(layers, (0, 16, 128), choices):
        config = kernels.config_for(rows, *layer, rank, configs)
        programs, _ = kernels.plan_linear(config, rows, *layer[:2], 3 * rank, 132)
        assert programs <= config.programs * 132


# --------------------------------------------------------------------------------------------------
# One order of sums

DTYPE = torch.bfloat16 if CUDA else torch.float32


@runs_kernels
def test_kernel_products_are_those_of_any_number_of_rows():
    """A row's sum is that of its columns in order, in LoRA's case in parts, whatever stands beside it.

    (The interpreter's products are numpy's, whose last bits depend on the tile.)
    """
    x, weight, A = (t.to(DTYPE) for t in there(
        torch.randn(300, 2176), torch.randn(40, 2200), torch.randn(24, 2176)))
    weight = weight[:, :2176]                          # LoRA's B may lie beside it
    for multiply, other in ((kernels.in_order, weight), (kernels.linear, weight), (kernels.lora_down, A)):
        arguments = () if multiply is kernels.lora_down else (None,)
        found = multiply(x, other, *arguments)
        assert relative(found.double(), x.double() @ other.double().T) < (5e-3 if CUDA else 1e-6)
        for rows in (1, 20, 70) if CUDA else ():
            assert multiply(x[:rows], other, *arguments).equal(found[:rows])


@runs_kernels
@pytest.mark.parametrize("prompt,own", [(3, 1), (250, 30), (40, 300)])
def test_kernel_attends_in_decoding_as_in_a_line(prompt, own):
    """A completion's last token, by decode_attention from a cache and in the line: on a GPU equal bits."""
    heads, kv_heads, D = 4, 2, 48
    length = prompt + own
    qkv = torch.randn(length, heads + 2 * kv_heads, D).to(KERNEL_DEVICE, DTYPE)
    angles = torch.randn(length, D // 2).repeat(1, 2).to(KERNEL_DEVICE)
    cos, sin = angles.cos().to(DTYPE), angles.sin().to(DTYPE)
    raw_q, raw_k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    q, k = (kernels.FusedRotary.apply(part[None], cos, sin)[0] for part in (raw_q, raw_k))
    ends, prefix = (t.int() for t in there(
        torch.tensor([0, prompt, length]), torch.tensor([[0, 0], [0, prompt]])))
    y, log_sums = kernels.attend_in_line(q, k, v, ends, prefix, max(prompt, own))

    assert relative(y.float(), qerl.attention(q[None].float(), k[None].float(), v[None].float())[0]) < 5e-3
    score = torch.einsum("hd,thd->ht", q[-1].double(), k.double().repeat_interleave(2, 1)) * D ** -0.5
    rounding = 2 ** -9 if CUDA else 1e-5               # of a term of the sum, in bfloat16
    assert_close(log_sums[:, -1].double(), score.logsumexp(1), rtol=0, atol=rounding)
    cache = torch.zeros(2, 1, kv_heads, length + 20, D, device=KERNEL_DEVICE, dtype=DTYPE)
    cache[:, 0, :, :length - 1] = torch.stack([k, v]).transpose(1, 2)[:, :, :-1]
    filled = torch.tensor([length - 1], device=KERNEL_DEVICE)
    decoded = kernels.decode_attention(qkv[-1].flatten()[None], cos[-1:], sin[-1:], cache, filled)
    decoded = decoded.view(heads, D)
    assert decoded.equal(y[-1]) if CUDA else relative(decoded, y[-1]) < 1e-6


# --------------------------------------------------------------------------------------------------
# Output

@runs_kernels
def test_kernel_sample(monkeypatch):
    """Log-probability and entropy against PyTorch's; the tokens' frequencies by chi-squared."""
    logits, seed = there(torch.randn(3, 5000), torch.tensor([5]))
    token, logprob, entropy = kernels.sample(logits, 0.7, seed)
    expected = torch.distributions.Categorical(logits=logits / 0.7)
    assert_close(logprob, expected.log_prob(token), **NEAR)
    assert_close(entropy, expected.entropy(), **NEAR)
    assert not token.equal(kernels.sample(logits, 0.7, seed + 1)[0])
    draws = 20000 if CUDA else 160
    monkeypatch.setattr(kernels, "LOGITS", 4)          # so that five logits are two parts
    logits = torch.tensor([0.0, 1.0, 1.5, -0.5, 0.5], device=KERNEL_DEVICE)
    drawn = kernels.sample(logits.repeat(draws, 1), 1.0, seed)[0]
    wanted = draws * logits.softmax(0)
    difference = drawn.bincount(minlength=5) - wanted
    assert (difference ** 2 / wanted).sum() < 18.5     # 4 degrees of freedom: 1 in 1,000
    token, logprob, _ = kernels.sample(logits[None] * math.nan, 1.0, seed)
    assert 0 <= token < 5 and logprob.isnan()          # which the loop refuses, by name


@runs_kernels
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.95, 0.999999])
def test_kernel_samples_from_the_nucleus(top_p):
    """Also where it is one token or nearly all, and where logits are equal."""
    logits = torch.stack([
        torch.randn(5000), 20 * torch.randn(5000), torch.full((5000,), -3.0), torch.randn(5000) - 1000,
        F.pad(torch.tensor([5.0, 5.0, 4.0]), (0, 4997), value=-1e9),
    ])
    kept = qerl.nucleus((logits / 0.7).softmax(-1), max(top_p, 1e-9)) > 0
    lowest = logits.masked_fill(~kept, math.inf).amin(1)
    logits, seed = there(logits, torch.tensor([5]))
    for _ in range(20 if CUDA else 2):
        token, logprob, _ = kernels.sample(logits, 0.7, seed, top_p)
        drawn = logits.gather(1, token[:, None])[:, 0].cpu()
        assert (drawn >= lowest - 1e-4).all()
        expected = torch.distributions.Categorical(logits=logits / 0.7).log_prob(token)
        assert_close(logprob, expected, rtol=1e-5, atol=1e-4)
        seed += 1
    if CUDA:                           # and all of it is drawn
        token = kernels.sample(logits[:1, :40].repeat(60000, 1), 0.7, seed, top_p)[0]
        few = qerl.nucleus((logits[:1, :40] / 0.7).softmax(-1), max(top_p, 1e-9))[0]
        frequency = token.bincount(minlength=40) / len(token)
        assert_close(frequency, few / few.sum(), rtol=0, atol=0.01)


@gpu
def test_gpu_search_of_a_flat_nucleus_ends():
    """Where one token more or less is a rounding of the sum, all threads leave it at the same pass."""
    logits = torch.randn(20000, 5000, device="cuda", dtype=torch.bfloat16)
    token = kernels.sample(logits, 1.0, torch.tensor([5], device="cuda"), top_p=0.9)[0]
    assert token.unique().numel() > 4000


# --------------------------------------------------------------------------------------------------
# All together

def one_block(tmp_path, name, **options):
    """The embedding, first block and output layer of a model: two blocks take twice the time."""
    model = with_lora(make_folder(tmp_path, name)[0], device=KERNEL_DEVICE, **options)
    del model.blocks[1:]
    return model


@runs_kernels
@pytest.mark.parametrize("name,recomputed", [
    ("qwen2", False),
    ("qwen3", True),
    ("wide", False),
])
def test_kernels_train_as_pytorch(tmp_path, monkeypatch, tiles, name, recomputed):
    """Log-probabilities and the gradient of LoRA and norms."""
    monkeypatch.setattr(kernels, "COLUMNS", 128)
    monkeypatch.setattr(kernels, "LOGITS", 128)
    prompts = [[5, 6, 7], [8], [5, 6, 7]]
    completions, length = there(torch.randint(250, (3, 5)), torch.tensor([5, 2, 3]))

    def trained():
        model = one_block(tmp_path, name, train_norms=True)
        if recomputed:
            model.recompute_in_backward()
        logprobs = fast.token_logprobs(model, prompts, completions, length, chunk=4)
        return logprobs.detach(), gradient_of(model, logprobs.square().sum())

    found = trained()
    with pytorch_alone():
        expected = trained()
    for ours, right in zip(found, expected):
        assert relative(ours, right) < (0.05 if CUDA else 1e-4)


@runs_kernels
@pytest.mark.parametrize("name", ["qwen3", "wide"])
def test_kernels_decode_as_pytorch(tmp_path, monkeypatch, tiles, name):
    """Greedily in float32."""
    monkeypatch.setattr(kernels, "PART", 64)           # so that the longer rows have several
    prompts = [[5, 6] * n for n in (1, 32, 127, 150)]
    admit = fast.Sampler.admit

    def prefill(*args):                    # which would take the interpreter minutes
        with pytorch_alone():
            admit(*args)

    def generated():
        model = one_block(tmp_path, name, dtype=torch.float32)
        return fast.generate(model, prompts, 2, temperature=0)

    with pytorch_alone():
        expected = generated()
    monkeypatch.setattr(fast.Sampler, "admit", prefill)
    found = generated()
    assert_close(vars(found), vars(expected), **NEAR)


@runs_kernels
def test_kernels_leave_many_rows_to_kept_values(tmp_path, monkeypatch, tiles):
    """They take a quarter of the free memory at most."""
    model = one_block(tmp_path, "wide")
    layers = [layer for layer in model.quantized_layers() if layer.weight.interleaved]
    assert layers
    size = 2 * sum(layer.weight.dequantize(torch.float32).numel() for layer in layers)
    for free, kept in ((4 * size - 1, False), (4 * size, True)):
        monkeypatch.setattr(machine, "free_memory", lambda device: free)
        machine.keep_values(model, fast)
        assert all(layer.interleaved(129) != kept for layer in layers)
    for layer in layers:
        assert layer.interleaved(128)
        layer.prepare_decoding(model.embedding.dtype)
        x = torch.randn(129, layer.lora_A.shape[1]).to(model.embedding)
        with torch.no_grad():
            assert relative(layer.decode(x), layer(x)) < (0.02 if CUDA else 1e-5)


@gpu
@pytest.mark.parametrize("weights,top_p", [*((name, 1.0) for name in fast.FORMATS), ("nvfp4", 0.9)])
def test_gpu_rollout_is_the_policy_that_is_trained(tmp_path, weights, top_p):
    """Log-probabilities of decoding against those of training, with LoRA and refilled slots.

    Decoding has tiles, fused kernels and a CUDA graph. Rollouts with one seed are equal bit for bit.
    """
    model = with_lora(make_folder(tmp_path, "wide")[0], weights=weights, device="cuda")
    prompts = [[5 + i] * (1 + i % 7) for i in range(100)] * 2
    model.keep_sampler = True
    generator = torch.Generator("cuda")
    first, again = (
        fast.generate(model, prompts, 40, 1, top_p=top_p, slots=128, generator=generator.manual_seed(0))
        for _ in range(2))
    with torch.no_grad():
        logprobs = fast.token_logprobs(model, prompts, first.tokens, first.length)
    errors = (logprobs - first.logprobs).abs()
    assert errors[first.mask].mean() < 0.03
    assert model.blocks[0].mlp.down.weight.interleaved == (fast.FORMATS[weights].table is qerl.E2M1)
    assert first.logprobs.equal(again.logprobs)


def random_policy(choose):
    """A model of one of Qwen2.5's widths with random weights and LoRA, whose values are kept."""
    size = choose(["Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen2.5-7B"])
    sizes = dict(zip(loading.SIZES, random_models.SHAPES[size])) | {
        "num_hidden_layers": choose([2, 3]), "vocab_size": choose([5000, 32000])}
    make = choose([transformers.Qwen2Config, transformers.Qwen3Config, transformers.LlamaConfig])
    weights = choose(["nvfp4", "mxfp4", "nf4", "bf16"])
    rank = choose([8, 32, 64, 128]) * choose([weights == "bf16", True])
    reader = random_models.RandomWeights({}, weights, rank, device="cuda", dtype=torch.bfloat16)
    model = fast.Transformer(make(**sizes, tie_word_embeddings=choose([False, True])), reader)
    for name, p in qerl.trainable(model).items():
        p.data.normal_(0, 0.02)
    machine.keep_decoded(model, fast, small=0)
    machine.keep_values(model, fast)
    return model


@gpu
@pytest.mark.parametrize("seed", range(20))
def test_gpu_sampling_is_training_to_the_last_bit(monkeypatch, seed):
    """Of all that a run may choose: sizes, formats, ranks, slots, prompts, cuts, and a graph or none."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    torch.manual_seed(seed)
    choose = random.Random(seed).choice
    model = random_policy(choose)
    assert model.decode_exactly()
    if choose([False, True]):
        model.recompute_in_backward()
    if choose([False, False, True]):                   # without a graph
        monkeypatch.setattr(fast.Sampler, "record", lambda sampler: setattr(sampler, "replay", None))
    longest = choose([1, 40, 300, 700])
    prompts = [[choose(range(5000)) for _ in range(choose([1, longest]))] for _ in range(choose([1, 5, 40]))]
    group = choose([1, 2, 8])
    temperature = choose([1.0, 0.7])
    rollout = fast.generate(model, prompts, choose([1, 40, 300]), group, temperature, choose([1.0, 0.9]),
                            range(choose([5, 50])), choose([1, 3, 31, 64, 512]))
    repeated = [prompt for prompt in prompts for _ in range(group)]
    cut = choose([1, 7, 1000])
    for i in range(0, min(len(repeated), 20 * cut), cut):
        rows = slice(i, i + cut)
        logprobs = fast.token_logprobs(
            model, repeated[rows], rollout.tokens[rows], rollout.length[rows], temperature)
        there = rollout.mask[rows]
        assert logprobs[there].equal(rollout.logprobs[rows][there])
