"""Tests against oracles that no one here wrote: transformers, compressed-tensors, bitsandbytes, peft, trl.

    python -m pytest -n auto                                     CPU, minutes; tests marked `gpu` skip without a GPU
    TRITON_INTERPRET=1 python -m pytest -k kernel                the kernels in Triton's interpreter (the first also does it)
"""
import json
import math
import os
import weakref

if "PYTEST_XDIST_WORKER" in os.environ:                   # of several processes, and what they start, each takes one thread
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import qerl
from harness import checks
from harness.batches import Batch
from harness.chat_text import ChatText
from harness.checkpoint import save_adapter

HERE = os.path.dirname(os.path.abspath(__file__))
CUDA = torch.cuda.is_available()
KERNEL_DEVICE = "cuda" if CUDA else "cpu"
gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
runs_kernels = pytest.mark.skipif(qerl.kernels is None or not (CUDA or qerl.kernels.INTERPRETED), reason="needs a GPU or TRITON_INTERPRET=1")

SIZES = dict(hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=262, max_position_embeddings=512, eos_token_id=256, bos_token_id=257, pad_token_id=256)
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64)
CONFIGS = {
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=48),
    "qwen3-bias": lambda: transformers.Qwen3Config(**SIZES, head_dim=32, attention_bias=True, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, attention_bias=True, mlp_bias=True),
    "wide": lambda: transformers.Qwen2Config(**{**SIZES, "hidden_size": 256, "intermediate_size": 512}, tie_word_embeddings=True),
    "llama-yarn": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=dict(
        rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)),
}


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def make_folder(path, name="qwen2", seed=0, **save):
    """A Hugging Face folder with a random model and a byte-level tokenizer; returns (path, the model)."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    for p in model.parameters():
        p.data = torch.randn_like(p) * 0.06 if p.dim() > 1 else p.data + 0.1 * torch.randn_like(p)
    model.save_pretrained(path, **save)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(path)
    return str(path), model


@pytest.fixture(scope="module", params=CONFIGS)
def family(request, tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("qwen"))


def with_lora(folder, seed=1, **options):
    """A model whose LoRA is not zero, so that it matters."""
    torch.manual_seed(seed)
    model = qerl.load_model(folder, lora_rank=4, **options)
    for p in qerl.trainable(model).values():
        p.data += 0.05 * torch.randn_like(p)
    return model


# ------------------------------------------------------------------------------------------------- 1. number formats

WEIGHTS = {
    "gaussian": lambda: torch.randn(48, 192),
    "one row": lambda: torch.randn(1, 64),
    "odd rows": lambda: torch.randn(37, 320) * 0.02,
    "zeros": lambda: torch.zeros(5, 64),
    "zero blocks": lambda: torch.randn(6, 128) * (torch.arange(128) // 64),
    "wide range": lambda: torch.randn(16, 128) * 10.0 ** torch.randint(-6, 4, (16, 128)),
    "subnormal scales": lambda: torch.randn(8, 128) * torch.tensor([1.0] + [1e-5] * 127),
    "huge": lambda: torch.randn(8, 128) * 1e30,
    "tiny": lambda: torch.randn(8, 128) * 1e-30,
    "ties": lambda: torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0]).repeat(4, 4),
}


def compressed_tensors_nvfp4(weight):
    """The library's own observer arithmetic and compressor: its packed bytes, scales and decompressed weight."""
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    global_scale = generate_gparam(weight.amin(), weight.amax())
    blocks = weight.unflatten(1, (-1, 16))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale)
    state = NVFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}, scheme)
    return state, NVFP4PackedCompressor.decompress(state, scheme)["weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_nvfp4_bytes_equal_compressed_tensors(kind, dtype):
    torch.manual_seed(0)
    weight = WEIGHTS[kind]().to(dtype)
    packed, block_scale, global_scale = qerl.quantize_nvfp4(weight)
    state, decompressed = compressed_tensors_nvfp4(weight)
    assert packed.dtype == torch.uint8 and block_scale.dtype == torch.float8_e4m3fn and global_scale.shape == (1,)
    assert torch.equal(global_scale, state["weight_global_scale"])
    assert torch.equal(block_scale.view(torch.uint8), state["weight_scale"].view(torch.uint8))
    assert torch.equal(packed, state["weight_packed"])
    ours = qerl.dequantize_nvfp4(packed, block_scale, global_scale, torch.float32)
    torch.testing.assert_close(ours, decompressed.float(), rtol=1e-2, atol=0)          # the library decodes in 16 bit


def test_e2m1_rounds_to_nearest_even():
    values = qerl.E2M1[:8]
    x = torch.cat([torch.linspace(-7, 7, 20002), (values[1:] + values[:-1]) / 2, -(values[1:] + values[:-1]) / 2])
    packed = qerl.encode_e2m1(x[None], torch.ones(1, 1))[0].int()
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten()
    for value, code in zip(x.tolist(), codes.tolist()):
        distance = (values - abs(value)).abs()
        nearest = [c for c in range(8) if distance[c] == distance.min()]
        assert (code & 7) == next((c for c in nearest if len(nearest) == 1 or c % 2 == 0))
        assert (code >> 3) == (value < 0)


def test_packing_puts_even_indices_low():
    codes = torch.arange(16, dtype=torch.uint8)[None]
    assert qerl.pack_nibbles(codes)[0].tolist() == [low | high << 4 for low, high in zip(range(0, 16, 2), range(1, 16, 2))]
    decoded = qerl.dequantize_blocks(qerl.pack_nibbles(codes), qerl.E2M1, torch.ones(1, 1), torch.float32)
    assert torch.equal(decoded[0], qerl.E2M1)


@pytest.mark.parametrize("kind", ["gaussian", "odd rows", "zero blocks", "wide range"])
def test_mxfp4_equals_compressed_tensors(kind):
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
    torch.manual_seed(0)
    weight = WEIGHTS[kind]()
    packed, e8m0, _ = qerl.quantize_mxfp4(weight)
    amax = weight.unflatten(1, (-1, 32)).abs().amax(-1)
    live = amax > 0
    assert torch.equal(e8m0[live].float(), generate_mx_scales(amax)[live])
    error = (qerl.dequantize_mxfp4(packed, e8m0, None, torch.float32) - weight).unflatten(1, (-1, 32)).abs().amax(-1)
    assert (error <= torch.exp2(e8m0.float() - 127) * 2).all()                       # at most saturation from 7 to 6, or half of 4..6


@pytest.mark.parametrize("kind", ["gaussian", "odd rows", "zero blocks", "wide range"])
def test_nf4_codes_equal_bitsandbytes(kind):
    import bitsandbytes.functional as bnb
    torch.manual_seed(0)
    weight = WEIGHTS[kind]()
    packed, absmax, _ = qerl.quantize_nf4(weight)
    theirs, state = bnb.quantize_nf4(weight, blocksize=64)
    theirs = theirs.view(packed.shape)
    live = (absmax > 0).repeat_interleave(32, 1)
    assert torch.equal((packed << 4 | packed >> 4)[live], theirs[live])                # they put even indices in the high nibble
    assert torch.equal(absmax.flatten(), state.absmax)
    torch.testing.assert_close(qerl.dequantize_nf4(packed, absmax, None, torch.float32), bnb.dequantize_nf4(theirs.view(-1, 1), state))


@pytest.mark.parametrize("name,low,high", [("nvfp4", 0.085, 0.105), ("mxfp4", 0.1, 0.13), ("nf4", 0.085, 0.1), ("bf16", 0, 0)])
def test_relative_error_on_gaussian_weights(name, low, high):
    torch.manual_seed(0)
    weight = torch.randn(256, 512)
    format = qerl.FORMATS[name]
    assert low <= relative(format.dequantize(*format.quantize(weight), torch.float32), weight) <= high


def test_small_float16_weights_are_quantised_as_well_as_others():
    class Half(qerl.Checkpoint):
        def has(self, name):
            return name == "a.weight"

        def read(self, name, shape):
            return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(0.008).half()
    checkpoint = Half({})
    weight = checkpoint.read("a.weight", (64, 128))
    assert weight.abs().max() < 0.041                                         # 6 * 448 over it is beyond float16
    assert relative(qerl.dequantize_nvfp4(*checkpoint.quantized("a", 64, 128, "nvfp4"), torch.float32), weight) < 0.1


# ------------------------------------------------------------------------------------------ 2. quantised linear, LoRA

def stacked_layer(weights, dense, bias=None, **lora):
    """A QuantLinear of dense layers over one input, each quantised by itself."""
    format = qerl.FORMATS[weights]
    parts = [(p, s, g.expand(len(w), -1).reshape(len(w), -1)) for w in dense for p, s, g in [format.quantize(w)]]
    weight = qerl.PackedWeight(format, *(torch.cat(p) for p in zip(*parts)))
    return qerl.QuantLinear(list("abc"[:len(dense)]), [len(w) for w in dense], dense[0].shape[1], weight, bias, **lora)


@pytest.mark.parametrize("weights", qerl.FORMATS)
def test_linear_and_its_gradients(weights):
    torch.manual_seed(0)
    dense = [torch.randn(48, 128), torch.randn(16, 128)]
    layer = stacked_layer(weights, dense, torch.randn(64), lora_rank=4, lora_alpha=8)
    format = qerl.FORMATS[weights]
    frozen = torch.cat([format.dequantize(*format.quantize(w), torch.float32) for w in dense])
    x = torch.randn(3, 5, 128, requires_grad=True)
    torch.testing.assert_close(layer(x), F.linear(x, frozen, layer.bias))                # B starts at zero
    layer.lora_B.data.normal_()
    A, B = (t.detach().clone().requires_grad_() for t in (layer.lora_A, layer.lora_B))
    z = x.detach().clone().requires_grad_()
    delta = 2.0 * torch.cat([B[:48] @ A[:4], B[48:] @ A[4:]])
    expected, upstream = F.linear(z, frozen + delta, layer.bias), torch.randn(3, 5, 64)
    torch.testing.assert_close(layer(x), expected)
    layer(x).backward(upstream)
    expected.backward(upstream)
    for ours, theirs in ((x, z), (layer.lora_A, A), (layer.lora_B, B)):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_no_dequantised_weight_is_kept_for_backward():
    weight = torch.randn(96, 64)
    layer = stacked_layer("nvfp4", [weight], lora_rank=2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        layer(torch.randn(3, 64, requires_grad=True)).sum().backward()
    assert kept and all(math.prod(shape) < weight.numel() for shape in kept)


@pytest.mark.parametrize("weights", qerl.FORMATS)
def test_decoding_a_layer_is_its_forward(weights):
    """Stacked pieces, LoRA, with and without bias and residual, in plain PyTorch."""
    torch.manual_seed(0)
    x, residual = torch.randn(3, 128), torch.randn(3, 64)
    for bias in (None, torch.randn(64)):
        layer = stacked_layer(weights, [torch.randn(48, 128), torch.randn(16, 128)], bias, lora_rank=4, lora_alpha=8)
        layer.lora_B.data.normal_()
        for layer.use_adapter in (True, False):
            layer.prepare_decoding(torch.float32)
            with torch.no_grad():
                torch.testing.assert_close(layer.decode(x), layer(x), rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(layer.decode(x, residual), layer(x) + residual, rtol=1e-4, atol=1e-4)


def quantize_int8(weight):
    """A format of a reader's own: 8 bits, the absolute maximum of each 32 weights becomes 127."""
    blocks = weight.float().unflatten(1, (-1, 32))
    scale = blocks.abs().amax(-1).clamp_min(1e-30) / 127
    return (blocks / scale[..., None]).round().to(torch.int8).flatten(1), scale, torch.ones(1, device=weight.device)


def dequantize_int8(codes, scale, global_scale, dtype):
    return (codes.unflatten(1, (-1, 32)).float() * scale[..., None]).flatten(1).to(dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_a_new_format_takes_a_few_lines(tmp_path, monkeypatch, device):
    """No tiles, no kernels: it is loaded, sampled from and trained like the others."""
    monkeypatch.setitem(qerl.FORMATS, "int8", qerl.Format(quantize_int8, dequantize_int8, block=32))
    folder, theirs = make_folder(tmp_path, "wide")
    model = with_lora(folder, weights="int8", device=device, dtype=torch.float32)
    plain = qerl.load_model(folder, weights="int8", device=device, dtype=torch.float32)
    assert isinstance(model.blocks[0].mlp.down.weight, qerl.PackedWeight)
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        assert relative(plain(tokens.to(device)).cpu(), theirs(tokens).logits) < 0.05
    rollout = qerl.generate(model, PROMPTS, 8, 2)
    prompts = [p for p in PROMPTS for _ in range(2)]
    logprobs = qerl.token_logprobs(model, prompts, rollout.tokens, rollout.length)
    assert (logprobs - rollout.logprobs).abs()[rollout.mask].max() < 1e-3
    optimizer = torch.optim.AdamW(qerl.trainable(model).values(), 1e-2)
    weights = qerl.token_weights(rollout.mask)
    loss, _ = qerl.policy_loss(logprobs, logprobs.detach(), torch.arange(8.0, device=device) - 3.5, weights)
    loss.backward()
    optimizer.step()
    after = qerl.token_logprobs(model, prompts, rollout.tokens, rollout.length)
    gain = ((after - logprobs) * weights).sum(1).detach()
    assert gain[4:].mean() > gain[:4].mean()                                             # the better half became likelier


# -------------------------------------------------------------------------------------------------- 3. RMSNorm and AQN

def test_noise_equals_multiplicative_noise_on_weights(qwen):
    """Appendix G: w + Z in the norm is 1 + Z/w on the input channels of the layers that read it, shared by q, k and v."""
    model = qerl.load_model(qwen[0], weights="bf16")
    norm, qkv = model.blocks[0].attention_norm, model.blocks[0].attention.qkv
    x = torch.randn(4, 128)
    with qerl.adaptive_quantization_noise(model, 0.1, torch.Generator().manual_seed(3)):
        noisy = qkv(norm(x))
        z = norm.noisy_weight - norm.weight
    row_noise = 1 + z / norm.weight
    torch.testing.assert_close(noisy, F.linear(norm(x), qkv.weight.dequantize(torch.float32) * row_noise, qkv.bias), rtol=1e-4, atol=1e-4)
    assert 0.05 < z.std() < 0.2 and norm.noisy_weight is None


def test_noise_is_drawn_anew_and_only_inside(qwen):
    model, tokens = qerl.load_model(qwen[0]), torch.arange(20)[None]
    clean, generator, draws = model(tokens), torch.Generator().manual_seed(0), []
    for sigma in (0.0, 0.05, 0.05):
        with qerl.adaptive_quantization_noise(model, sigma, generator):
            draws.append(model(tokens))
    assert torch.equal(draws[0], clean) and torch.equal(model(tokens), clean)
    assert not torch.equal(draws[1], clean) and not torch.equal(draws[1], draws[2])


def scales(model):
    """All RMSNorms of a model."""
    return [m for m in model.modules() if isinstance(m, qerl.RMSNorm)]


def test_noise_is_normal_around_the_scale_as_it_is(qwen):
    """w + sigma z with z ~ N(0, 1), whatever w is: no factor of w, no one sign, no draw twice."""
    model = qerl.load_model(qwen[0], lora_rank=2, train_norms=True)
    trained = torch.linspace(-1, 9, 128)                        # not as loaded, and some of it near 0
    for norm in scales(model):
        norm.weight.data = trained
    generator = torch.Generator().manual_seed(0)
    draws = []
    for _ in range(400):
        with qerl.adaptive_quantization_noise(model, 0.02, generator):
            draws.append(torch.stack([norm.noisy_weight - trained for norm in scales(model)]))
    z = torch.stack(draws) / 0.02                               # (draws, norms, channels)
    assert z.shape == (400, 5, 128) and not z.requires_grad
    # Six standard errors are allowed, of figures over many draws.
    of_a_channel = z.flatten(0, 1)                              # (2000, 128)
    assert of_a_channel.mean(0).abs().max() < 6 / 2000 ** 0.5
    assert (of_a_channel.std(0) - 1).abs().max() < 6 / 4000 ** 0.5
    tails = [(z < -1.96).float().mean(), (z > 1.96).float().mean()]
    assert all(abs(tail - 0.025) < 0.002 for tail in tails) and z.abs().max() > 4
    products = [
        z[1:] * z[:-1],                                         # of one draw and the next
        z[:, 1:] * z[:, :-1],                                   # of one norm and the next
        z[..., 1:] * z[..., :-1],                               # of one channel and the next
    ]
    for product in products:
        assert product.mean().abs() < 6 / product.numel() ** 0.5


@pytest.mark.parametrize("name,norms", [("qwen2", 2 * 2 + 1), ("qwen3", 2 * 4 + 1)])
def test_noise_is_on_every_norm_and_ends_with_the_rollout(tmp_path, name, norms):
    """Every norm's scale, Qwen3's q_norm and k_norm among them; it is over even after an error."""
    model = qerl.load_model(make_folder(tmp_path, name)[0])
    assert len(scales(model)) == norms
    generator = torch.Generator().manual_seed(1)
    with pytest.raises(KeyError):
        with qerl.adaptive_quantization_noise(model, 0.1, generator):
            assert all((norm.noisy_weight != norm.weight).all() for norm in scales(model))
            raise KeyError
    assert all(norm.noisy_weight is None for norm in scales(model))
    drawn = []
    for seed in (7, 7, 8):
        torch.manual_seed(len(drawn))                           # of which the noise takes nothing
        with qerl.adaptive_quantization_noise(model, 0.1, torch.Generator().manual_seed(seed)):
            drawn.append(model.norm.noisy_weight)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("schedule", ["exponential", "linear", "cosine", "logarithmic"])
def test_noise_schedules(schedule):
    sigma = [qerl.noise_sigma(step, 100, 10, 1e-2, 5e-4, schedule) for step in range(100)]
    assert sigma[:10] == [0.0] * 10 and len(set(sigma)) == 10
    assert sigma[10] == pytest.approx(1e-2) and sigma[99] == pytest.approx(5e-4)
    assert all(a >= b for a, b in zip(sigma[10:], sigma[11:]))
    if schedule == "exponential":                                                        # Eq. 8
        assert sigma[50] == pytest.approx(1e-2 * (5e-4 / 1e-2) ** (4 / 8))
    assert [qerl.noise_sigma(s, 3, 1, schedule=schedule) for s in range(3)] == [0, 0, 0]
    assert [qerl.noise_sigma(s, 20, 10, 0, 0, schedule) for s in range(20)] == [0] * 20
    assert qerl.noise_sigma(1, 2, 2, 0.1, 0.01, schedule) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule,expected", [
    ("exponential", [16, 8, 4, 2, 1]),
    ("linear", [16, 12.25, 8.5, 4.75, 1]),
    ("cosine", [16, 16 - 15 * (1 - 0.5 ** 0.5) / 2, 8.5, 16 - 15 * (1 + 0.5 ** 0.5) / 2, 1]),
    ("logarithmic", [16] + [16 - 15 * math.log(stage, 5) for stage in (2, 3, 4)] + [1]),
])
def test_noise_schedules_by_hand(schedule, expected):
    """Five noisy stages from 16 to 1, two steps each, after one without noise (Figure 9)."""
    sigma = [qerl.noise_sigma(step, 12, 6, 16, 1, schedule) for step in range(12)]
    assert sigma[::2] == sigma[1::2] == pytest.approx([0, *expected])
    with pytest.raises(AssertionError):
        qerl.noise_sigma(0, 12, schedule="quadratic")


# ------------------------------------------------------------------------------------------------------ 4. transformer

def test_logits_equal_transformers(family):
    folder, theirs = family
    tokens = torch.randint(0, 262, (3, 150))
    with torch.no_grad():
        ours = qerl.load_model(folder, weights="bf16", lora_rank=2)(tokens)
        assert ours.shape == (3, 150, 262) and relative(ours, theirs(tokens).logits) < 1e-4


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "nf4"])
def test_quantised_model_equals_transformers_with_the_decoded_weights(qwen, weights):
    folder, theirs = qwen
    ours, state = qerl.load_model(folder, weights=weights), {k: v.clone() for k, v in theirs.state_dict().items()}
    format = qerl.FORMATS[weights]
    for name, tensor in state.items():
        if name.endswith("_proj.weight"):
            tensor.copy_(format.dequantize(*format.quantize(tensor), torch.float32))
    decoded = transformers.AutoModelForCausalLM.from_config(theirs.config)
    decoded.load_state_dict(state)
    tokens = torch.randint(0, 262, (2, 40))
    with torch.no_grad():
        assert relative(ours(tokens), decoded.eval()(tokens).logits) < 1e-4


def test_sharded_folder(qwen, tmp_path):
    folder, theirs = make_folder(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = torch.arange(30)[None]
    assert torch.equal(qerl.load_model(folder)(tokens), qerl.load_model(qwen[0])(tokens))


@pytest.mark.parametrize("shards", [dict(max_shard_size="200KB"), {}])
def test_only_the_weights_of_the_model_are_read(qwen, tmp_path, shards):
    """Other files with the same tensor names, before and behind the model's in the alphabet, say nothing."""
    folder, theirs = make_folder(tmp_path, **shards)
    names = ["a.safetensors", "consolidated.safetensors", "z.safetensors"] + ["model.safetensors"] * bool(shards)
    for name in names:
        save_file({k: torch.full_like(v, 9) for k, v in theirs.state_dict().items() if k != "lm_head.weight"}, tmp_path / name)
    tokens = torch.arange(30)[None]
    assert torch.equal(qerl.load_model(folder)(tokens), qerl.load_model(qwen[0])(tokens))


def test_a_tensor_comes_from_the_file_that_the_index_says(qwen, tmp_path):
    folder, theirs = make_folder(tmp_path, max_shard_size="200KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    for name in set(index.values()):                                    # each shard has all tensors, but the others' are wrong
        right = load_file(tmp_path / name)
        wrong = {k: torch.full_like(v, 9) for k, v in theirs.state_dict().items() if k in index}
        save_file(wrong | right, tmp_path / name)
    tokens = torch.arange(30)[None]
    assert torch.equal(qerl.load_model(folder)(tokens), qerl.load_model(qwen[0])(tokens))


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("index,message", [
    (lambda i: "{", f"{INDEX}: cannot be read"),
    (lambda i: "[]", f"{INDEX}: cannot be read"),
    (lambda i: "[" * 100_000, f"{INDEX}: cannot be read"),
    (lambda i: json.dumps({"metadata": {}}), f"{INDEX}: cannot be read"),
    (lambda i: json.dumps({"weight_map": [1]}), f"{INDEX}: cannot be read"),
    (lambda i: json.dumps({"weight_map": {"model.norm.weight": 3, "b": "c"}}), f"{INDEX}: cannot be read"),
    (lambda i: json.dumps({"weight_map": i | {"model.norm.weight": "gone.safetensors"}}), "gone.safetensors: cannot be read"),
    (lambda i: json.dumps({"weight_map": i | {"model.norm.weight": i["model.embed_tokens.weight"]}}), "tensor model.norm.weight is missing"),
    (lambda i: json.dumps({"weight_map": i | {"model.norm.weight": "tokenizer.json"}}), "tokenizer.json: cannot be read"),
])
def test_a_damaged_index_is_named(tmp_path, index, message):
    folder, _ = make_folder(tmp_path, max_shard_size="200KB")
    path = tmp_path / INDEX
    path.write_text(index(json.loads(path.read_text())["weight_map"]))
    with pytest.raises(qerl.UserError, match=message) as error:
        qerl.load_model(folder)
    assert "\n" not in str(error.value) and "fetch the model again" in str(error.value)


def test_compressed_tensors_folder_is_read_as_it_is(qwen, tmp_path):
    """NVFP4A16 made with the library, each of q, k, v and gate, up with its own global scale."""
    folder, theirs = qwen
    tensors, decoded = {}, {}
    for name, tensor in theirs.state_dict().items():
        if name.endswith("_proj.weight") and "layers.1.mlp.down" not in name:            # one layer is left in 16 bit
            state, decoded[name] = compressed_tensors_nvfp4(tensor)
            tensors.update({f"{name.removesuffix('weight')}{k}": v for k, v in state.items() if k.startswith("weight_")})
        elif name != "lm_head.weight":
            tensors[name] = decoded[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((open(f"{folder}/config.json")).read())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = qerl.load_model(str(tmp_path))
    q = tensors["model.layers.0.self_attn.q_proj.weight_packed"]
    packed, _, global_scale = model.blocks[0].attention.qkv.weight.parts
    assert torch.equal(packed[:len(q)], q)
    assert len(global_scale.unique()) == 3
    theirs = transformers.AutoModelForCausalLM.from_config(theirs.config, dtype=torch.float32).eval()
    theirs.load_state_dict({k: v.float() for k, v in decoded.items()}, strict=False)
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        assert relative(model(tokens), theirs(tokens).logits) < 5e-3                     # the library decodes in 16 bit


def break_tensor(folder, tmp_path, edit, config_edit=None):
    tensors = load_file(f"{folder}/model.safetensors")
    edit(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors")
    config = json.loads(open(f"{folder}/config.json").read())
    (config_edit or (lambda c: None))(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


UP = "model.layers.1.mlp.up_proj.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"


def packed_layer(tensors, part=0, edit=lambda p: p, names=(GATE, UP)):
    """Store layers that are stacked as NVFP4, and of each edit one of the three parts."""
    for name in names:
        parts = list(qerl.quantize_nvfp4(tensors.pop(name)))
        parts[part] = edit(parts[part])
        tensors.update(zip((f"{name}_packed", f"{name}_scale", f"{name}_global_scale"), parts))


def first_negative(part):
    values = part.float()
    values.view(-1)[0] *= -1
    return values.to(part.dtype)


ROTATED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
           "transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": [{"location": "input", "targets": ["re:.*down_proj$"]}]}}}}


@pytest.mark.parametrize("edit,config_edit,message", [
    (lambda t: t[UP].view(-1)[7].fill_(float("nan")), None, f"tensor {UP} holds NaN"),
    (lambda t: t.pop(UP), None, f"tensor {UP} is missing"),
    *[(lambda t, dtype=dtype: t.update({UP: t[UP].to(dtype)}), None, f"tensor {UP} is {dtype}")
      for dtype in (torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)],
    (lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e5m2)}), None, "tensor model.norm.weight is"),
    (lambda t: t[UP].view(-1)[7].fill_(1e30), None, f"tensor {UP} holds NaN, infinity, a number above"),
    (lambda t: t[UP].zero_(), None, f"tensor {UP} holds .* zeros alone"),
    (lambda t: t["model.norm.weight"].zero_(), None, "tensor model.norm.weight holds .* zeros alone"),
    (lambda t: packed_layer(t, 0, torch.Tensor.float), None, "weight_packed is torch.float32"),
    (lambda t: packed_layer(t, 0, torch.Tensor.char), None, "weight_packed is torch.int8"),
    (lambda t: packed_layer(t, 0, torch.zeros_like), None, "weight_packed holds .* zeros alone"),
    (lambda t: packed_layer(t, 1, torch.Tensor.float), None, "weight_scale is torch.float32"),
    (lambda t: packed_layer(t, 1, first_negative), None, "block scales are at least 0"),
    (lambda t: packed_layer(t, 2, first_negative), None, "block scales are at least 0"),
    (lambda t: packed_layer(t, 2, lambda scale: scale * 1e-30), None, "global scale is above 1e-9"),
    (lambda t: packed_layer(t, names=[UP]), None, f"{GATE[:-7]}, {UP[:-7]}: some are in 4 bits and some are not"),
    (lambda t: t.update({UP: t[UP][:, :64]}), None, rf"tensor {UP} has shape \(192, 64\)"),
    (lambda t: None, lambda c: c.update(intermediate_size=200), "down_proj has 200 input features, not divisible by nvfp4's block of 16"),
    (lambda t: None, lambda c: c.update(model_type="gpt2"), "architecture gpt2 is not supported"),
    (lambda t: None, lambda c: c.update(model_type="no-such"), "config.json cannot be used"),
    (lambda t: None, lambda c: c.update(quantization_config={"quant_method": "gptq"}), "quantised as gptq are not supported"),
    (lambda t: None, lambda c: c.update(use_sliding_window=True, sliding_window=8), "sliding-window"),
    (lambda t: None, lambda c: c.update(quantization_config=ROTATED), "rotated by transform_config, are not supported"),
    (lambda t: None, lambda c: c.update(num_hidden_layers=1, layer_types=["full_attention"]), "model.layers.1.*is not one that config.json asks for"),
    *[(lambda t, name=name, size=size: t.update({name: torch.ones(size)}), None, f"tensor {name} is not one that config.json asks for")
      for name, size in ((UP.replace("weight", "bias"), 192), ("lm_head.bias", 262), ("model.norm.bias", 128),
                         ("model.layers.0.self_attn.q_norm.weight", 32), (f"{UP}_packed_too", 3))],
    (lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].flip(0)}), None, "lm_head.weight is not one that config.json asks for"),
])
def test_unusable_models_are_named(qwen, tmp_path, edit, config_edit, message):
    def widen(tensors):
        edit(tensors)
        if config_edit and "200" in message:
            for name in list(tensors):
                if "gate_proj" in name or "up_proj" in name:
                    tensors[name] = F.pad(tensors[name], (0, 0, 0, 8))
    folder = break_tensor(qwen[0], tmp_path, widen, config_edit)
    with pytest.raises(qerl.UserError, match=message) as error:
        qerl.load_model(folder)
    assert "\n" not in str(error.value)


def test_tensors_that_change_nothing_may_be_there(qwen, tmp_path):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        for name in ("self_attn.rotary_emb.inv_freq", "self_attn.k_scale", "mlp.up_proj.input_global_scale"):
            tensors[f"model.layers.0.{name}"] = torch.ones(1)
    tokens = torch.arange(30)[None]
    assert torch.equal(qerl.load_model(break_tensor(qwen[0], tmp_path, add))(tokens), qerl.load_model(qwen[0])(tokens))


def test_code_of_a_model_never_runs(qwen, tmp_path, monkeypatch):
    """Nor does anyone ask whether it may: transformers would, for a model_type that it does not know."""
    folder = break_tensor(qwen[0], tmp_path, lambda t: None, lambda c: c.update(
        model_type="own", auto_map={"AutoConfig": "own.Config", "AutoTokenizer": ["own.Tokenizer", None]}))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for load in (qerl.load_model, lambda path: ChatText(path, "")):
        with pytest.raises(qerl.UserError, match="cannot be"):
            load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(qerl.UserError, match="config.json cannot be used") as error:
        qerl.load_model(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("activations,said", [(None, False), ({"num_bits": 4, "type": "float"}, True)])
def test_quantised_activations_are_said_to_stay(qwen, tmp_path, capsys, activations, said):
    stored = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
              "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": activations}}}
    folder = break_tensor(qwen[0], tmp_path, lambda t: packed_layer(t, 0), lambda c: c.update(quantization_config=stored))
    checks.say_what_stays(qerl.load_model(folder).config)
    assert ("activations stay 16 bit" in capsys.readouterr().out) == said


def test_pickles_are_never_loaded(qwen, tmp_path):
    (tmp_path / "config.json").write_text(open(f"{qwen[0]}/config.json").read())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(qerl.UserError, match="never loaded"):
        qerl.load_model(str(tmp_path))


@pytest.mark.parametrize("train_norms", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_adapter_loads_in_peft_with_the_same_logits(tmp_path, name, train_norms):
    from peft import PeftModel
    folder, theirs = make_folder(tmp_path / "base", name)
    ours = with_lora(folder, weights="bf16", train_norms=train_norms, lora_alpha=6)
    save_adapter(ours, str(tmp_path / "adapter"), folder)
    tokens = torch.randint(0, 262, (2, 30))
    with torch.no_grad():
        assert relative(ours(tokens), theirs(tokens).logits) > 1e-2
        peft = PeftModel.from_pretrained(theirs, str(tmp_path / "adapter"))
        assert relative(ours(tokens), peft(tokens).logits) < 1e-4


def test_reference_policy_is_the_model_without_adapters(qwen):
    tokens = torch.arange(20)[None]
    plain, tuned = qerl.load_model(qwen[0]), with_lora(qwen[0], train_norms=True)
    fresh = qerl.load_model(qwen[0], lora_rank=4)
    assert torch.equal(fresh(tokens), plain(tokens))            # where training starts
    assert not torch.allclose(tuned(tokens), plain(tokens))
    with qerl.adapters_off(tuned):
        assert torch.equal(tuned(tokens), plain(tokens))
    assert not torch.allclose(tuned(tokens), plain(tokens))


# ---------------------------------------------------------------------------------------------------------- 5. sampler

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17]]


@pytest.mark.parametrize("slots", [2, 5, 100])
def test_greedy_completions_equal_transformers(family, slots):
    folder, theirs = family
    model = qerl.load_model(folder, weights="bf16")
    rollout = qerl.generate(model, PROMPTS, 12, group_size=2, temperature=0, slots=slots)
    assert rollout.tokens.shape == (8, 12) and not rollout.finished.any()
    for i, prompt in enumerate(PROMPTS):
        expected = theirs.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12,
                                   do_sample=False, eos_token_id=None)[0, len(prompt):]
        assert rollout.tokens[2 * i].tolist() == rollout.tokens[2 * i + 1].tolist() == expected.tolist()


def test_logprobs_and_entropy_are_the_policys(qwen):
    model = with_lora(qwen[0])
    rollout = qerl.generate(model, PROMPTS, 20, 3, temperature=0.7, eos=range(40), slots=4, generator=torch.Generator().manual_seed(0))
    assert rollout.finished.any() and rollout.length.max() <= 20 and rollout.length.min() >= 1
    for i in range(12):
        prompt, n = PROMPTS[i // 3], int(rollout.length[i])
        completion = rollout.tokens[i, :n].tolist()
        assert all(t >= 40 for t in completion[:-1]) and (completion[-1] < 40) == bool(rollout.finished[i])
        assert rollout.finished[i] or n == 20
        logits = model(torch.tensor([prompt + completion]))[0, len(prompt) - 1:-1] / 0.7
        logp = logits.log_softmax(-1)
        torch.testing.assert_close(rollout.logprobs[i, :n], logp[range(n), completion], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rollout.entropy[i, :n], -(logp.exp() * logp).sum(-1), rtol=1e-4, atol=1e-4)
    assert (rollout.logprobs[~rollout.mask] == 0).all() and int(rollout.mask.sum()) == int(rollout.length.sum())


def test_training_logprobs_equal_the_samplers(qwen):
    model = with_lora(qwen[0])
    rollout = qerl.generate(model, PROMPTS, 16, 2, eos=range(20), generator=torch.Generator().manual_seed(1))
    prompts = [p for p in PROMPTS for _ in range(2)]
    for chunk in (7, 4096):
        logprobs = qerl.token_logprobs(model, prompts, rollout.tokens, rollout.length, chunk=chunk)
        torch.testing.assert_close(logprobs, rollout.logprobs, rtol=1e-4, atol=1e-4)
    kl, ratio = qerl.mismatch(logprobs, rollout.logprobs, rollout.mask)
    assert abs(kl) < 1e-6 and 1 <= ratio < 1.001
    assert 1 < rollout.length.min() < rollout.length.max()                               # with padding, and the tokens' gradients, too
    one_by_one = qerl.token_logprobs_one_by_one(model, prompts, rollout.tokens, rollout.length)
    torch.testing.assert_close(one_by_one, logprobs, rtol=1e-5, atol=1e-5)
    parameters = list(qerl.trainable(model).values())
    for expected, found in zip(*(torch.autograd.grad(t.square().sum(), parameters) for t in (one_by_one, logprobs)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_batch_is_printed_as_shapes():
    batch = Batch([[1, 2]] * 3, torch.zeros(3, 4, dtype=torch.long), *[torch.zeros(3)] * 4)
    assert repr(batch).startswith("Batch of 3 prompts: tokens torch.int64 [3, 4], length torch.float32 [3]") and "old_" not in repr(batch)


def test_packing_holds_each_prompt_once():
    prompts, length = [[1, 2, 3], [1, 2, 3], [4, 5], [6], [1, 2, 3]], torch.tensor([2, 4, 5, 1, 3])
    packing = qerl.pack(prompts, length)
    assert packing.sizes == [3, 2, 1, 3, 2, 4, 5, 1, 3] and packing.owner == [0, 0, 1, 2, 3]   # the last prompt has no neighbour
    assert packing.position.tolist() == [0, 1, 2, 0, 1, 0, 0, 1, 2, 3, 4, 3, 4, 5, 6, 2, 3, 4, 5, 6, 1, 3, 4, 5]
    assert packing.before.tolist() == [2, 9, 2, 11, 12, 13, 4, 15, 16, 17, 18, 5, 8, 21, 22]
    assert packing.ends.tolist() == [0, 3, 5, 6, 9, 11, 15, 20, 21, 24]
    assert packing.group_ends.tolist() == [0, 6, 11, 12, 15]


def test_noise_shows_as_mismatch(qwen):
    model = with_lora(qwen[0])
    with qerl.adaptive_quantization_noise(model, 0.05, torch.Generator().manual_seed(0)):
        rollout = qerl.generate(model, PROMPTS, 16, 2, generator=torch.Generator().manual_seed(1))
    logprobs = qerl.token_logprobs(model, [p for p in PROMPTS for _ in range(2)], rollout.tokens, rollout.length).detach()
    kl, ratio = qerl.mismatch(logprobs, rollout.logprobs, rollout.mask)
    assert kl > 1e-4 and ratio > 1.05
    assert qerl.truncated_importance(logprobs, rollout.logprobs, 1.02).max().item() == pytest.approx(1.02)


def test_samples_follow_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -20.0]).repeat(40000, 1)
    for temperature, top_p, expected in ((1.0, 1.0, (logits[0]).softmax(-1)), (0.5, 1.0, (logits[0] / 0.5).softmax(-1)),
                                         (1.0, 0.7, torch.tensor([math.e, 1.0, 0, 0, 0]) / (math.e + 1)), (1.0, 1e-9, torch.eye(5)[0])):
        token, logprob, _ = qerl.sample(logits, temperature, top_p, torch.Generator().manual_seed(0))
        frequency = torch.bincount(token, minlength=5) / len(token)
        assert (frequency - expected).abs().max() < 0.01
        assert torch.allclose(logprob, (logits / temperature).log_softmax(-1).gather(1, token[:, None])[:, 0])


@pytest.mark.parametrize("top_p,kept", [(0.3, [2]), (0.5, [2]), (0.51, [0, 2]), (0.79, [0, 2]),
                                        (0.81, [0, 2, 3]), (0.99, [0, 1, 2, 3])])
def test_nucleus_is_the_smallest_set_that_reaches_top_p(top_p, kept):
    probs = torch.tensor([[0.3, 0.05, 0.5, 0.15], [0.0, 1.0, 0.0, 0.0]])
    cut = qerl.nucleus(probs, top_p)
    assert cut[0].nonzero()[:, 0].tolist() == kept and torch.equal(cut[0, kept], probs[0, kept])
    assert torch.equal(cut[1], probs[1])


def test_top_p_and_temperature_reach_the_sampler(qwen):
    """Only the likeliest token is left by a tiny top-p, or by a tiny temperature."""
    model = qerl.load_model(qwen[0])
    greedy = qerl.generate(model, PROMPTS, 8, temperature=0).tokens
    for options in (dict(top_p=1e-6), dict(temperature=1e-6)):
        assert torch.equal(qerl.generate(model, PROMPTS, 8, **options).tokens, greedy)
    assert not torch.equal(qerl.generate(model, PROMPTS, 8).tokens, greedy)


# ------------------------------------------------------------------------------------------------------- 6. objectives

def trl_trainer(folder, tmp_path, **options):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    config = GRPOConfig(output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, bf16=False, use_cpu=True,
                        report_to=[], gradient_checkpointing=False, epsilon=0.2, epsilon_high=0.28, steps_per_generation=1,
                        use_bias_correction_kl=False, **options)
    return GRPOTrainer(model=transformers.AutoModelForCausalLM.from_pretrained(folder), reward_funcs=lambda completions, **_: [0.0] * len(completions),
                       args=config, train_dataset=Dataset.from_dict({"prompt": ["a"]}),
                       processing_class=transformers.AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize("algorithm,beta", [("grpo", 0.0), ("grpo", 0.04), ("dapo", 0.0), ("dr-grpo", 0.0)])
def test_loss_and_gradient_equal_trl(qwen, tmp_path, algorithm, beta):
    folder = qwen[0]
    trainer = trl_trainer(folder, tmp_path, loss_type=algorithm.replace("-", "_"), beta=beta, max_completion_length=20)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    torch.manual_seed(0)
    length, prompts = torch.tensor([9, 4, 7, 1]), [[5, 6, 7, 8]] * 4
    completions = torch.randint(20, 250, (4, 9))
    mask = torch.arange(9) < length[:, None]
    completions = completions * mask
    ours = qerl.load_model(folder, weights="bf16", lora_rank=2, train_norms=True)         # norms: gradients to compare
    logprobs = qerl.token_logprobs(ours, prompts, completions, length)
    old = (logprobs.detach() + 0.3 * torch.randn(4, 9)) * mask                           # some ratios are clipped
    reference = (logprobs.detach() + 0.3 * torch.randn(4, 9)) * mask
    advantages = qerl.group_advantages(torch.tensor([[2.2, 0.0, 0.2, 2.0]]))[0]
    loss, kl = qerl.policy_loss(logprobs, old, advantages, qerl.token_weights(mask, algorithm, 20), 0.2, 0.28,
                                reference if beta else None, beta)
    loss.backward()
    theirs = trainer._compute_loss(trainer.model, {
        "prompt_ids": torch.tensor(prompts), "prompt_mask": torch.ones(4, 4, dtype=torch.long), "completion_ids": completions,
        "completion_mask": mask.long(), "advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum()})
    theirs.backward()
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-4, abs=1e-6)
    for norm in (m for m in ours.modules() if isinstance(m, qerl.RMSNorm)):
        their_grad = trainer.model.get_parameter(f"{norm.name}.weight").grad
        assert relative(norm.weight.grad, their_grad) < 1e-3
    if beta:
        assert kl.item() > 0


def test_a_token_that_is_clipped_has_gradient_zero_whatever_the_ratio():
    """At log-ratios of ±100 the ratio is infinite or 0, and the KL's exponential infinite; a masked token counts nothing."""
    for log_ratio in (99.9, 200.0, -99.9):
        logprobs = torch.tensor([[-0.1, -1.0, -0.1]], requires_grad=True)
        old = logprobs.detach() - torch.tensor([[log_ratio, 0.0, log_ratio]])
        weights = torch.tensor([[0.5, 0.5, 0.0]])
        advantage = torch.tensor([math.copysign(1.0, log_ratio)])                   # the side on which the ratio is clipped
        qerl.policy_loss(logprobs, old, advantage, weights)[0].backward()
        assert logprobs.grad.tolist() == [[0.0, -0.5 * advantage.item(), 0.0]]
        loss, kl = qerl.policy_loss(logprobs, old, advantage, weights, ref_logprobs=logprobs.detach() + log_ratio, beta=0.1)
        loss.backward()
        assert loss.isfinite() and kl.isfinite() and logprobs.grad.isfinite().all()


def test_an_advantage_of_zero_is_no_loss_whatever_the_ratio():
    logprobs = torch.tensor([[0.0, -1.0], [-1.0, -2.0]], requires_grad=True)
    old = torch.tensor([[-200.0, -1.0], [-1.5, -2.0]])
    advantages = torch.tensor([0.0, 1.0])
    loss, _ = qerl.policy_loss(logprobs, old, advantages, torch.full((2, 2), 0.25))
    loss.backward()
    assert loss.item() == pytest.approx(-(1.28 + 1) / 4) and logprobs.grad.tolist() == [[0, 0], [0, -0.25]]


@pytest.mark.parametrize("name,value", [
    ("top_p", 0.0), ("top_p", math.nan), ("temperature", -0.1), ("temperature", math.nan), ("group_size", 0), ("max_new_tokens", 0),
    ("prompts", []), ("prompts", [[1], []])])
def test_generate_names_an_argument_out_of_range(qwen, name, value):
    with pytest.raises(ValueError, match=f"generate: {name} is out of range"):
        qerl.generate(qerl.load_model(qwen[0]), **{"prompts": [[1]], "max_new_tokens": 2, name: value})


def test_advantages_are_group_relative():
    rewards = torch.tensor([[1.0, 0, 0, 1], [2, 2, 2, 2], [0, 0, 0, 5]])
    advantages = qerl.group_advantages(rewards)
    expected = (rewards - rewards.mean(1, keepdim=True)) / (torch.tensor([[r.std()] for r in rewards]) + 1e-4)
    torch.testing.assert_close(advantages, expected)
    assert (advantages[1] == 0).all()
    assert (qerl.group_advantages(torch.full((1, 8), 0.2)) == 0).all()                   # whatever the mean rounds to


def test_token_weights_by_hand():
    """Four tokens, two tokens, and a completion of which none counts."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    grpo = torch.tensor([[1 / 12] * 4, [1 / 6, 1 / 6, 0, 0], [0] * 4])
    torch.testing.assert_close(qerl.token_weights(mask, "grpo"), grpo)
    assert torch.equal(qerl.token_weights(mask, "dapo"), mask / 6)
    assert qerl.token_weights(mask[2:], "dapo").tolist() == [[0] * 4]      # and not NaN
    torch.testing.assert_close(qerl.token_weights(mask, "dr-grpo", 10), mask / 30)


def test_mismatch_and_its_correction_by_hand():
    """Ratios π_old / π_rollout of 2, 1/3 and 1, and padding that counts nowhere."""
    old = torch.tensor([[2.0, 1 / 3], [1.0, 1e9]]).log() - 1.5
    rollout = torch.full((2, 2), -1.5)
    mask = torch.tensor([[True, True], [True, False]])
    kl, ratio = qerl.mismatch(old, rollout, mask)
    assert kl == pytest.approx((2 - 1 - math.log(2) + 1 / 3 - 1 + math.log(3)) / 3, rel=1e-5)
    assert ratio == pytest.approx(3, rel=1e-5)
    weights = qerl.truncated_importance(old, rollout, 1.5)
    torch.testing.assert_close(weights, torch.tensor([[1.5, 1 / 3], [1.0, 1.5]]))


@pytest.mark.parametrize("advantage,ratio,gain,slope", [
    (1.0, 1.2, 1.2, 1.2), (1.0, 1.5, 1.28, 0), (1.0, 0.5, 0.5, 0.5),
    (-2.0, 1.5, -3.0, -3.0), (-2.0, 0.9, -1.8, -1.8), (-2.0, 0.5, -1.6, 0),
])
def test_the_clipped_gain_by_hand(advantage, ratio, gain, slope):
    """Eq. 3 without KL: beyond the clip range a step that makes it worse still has a gradient."""
    logprobs = torch.tensor([[math.log(ratio) - 1]], requires_grad=True)
    loss, kl = qerl.policy_loss(
        logprobs, torch.tensor([[-1.0]]), torch.tensor([advantage]), torch.tensor([[0.5]]),
    )
    loss.backward()
    assert loss.item() == pytest.approx(-gain / 2) and kl.item() == 0
    assert logprobs.grad.item() == pytest.approx(-slope / 2)


def test_kl_by_hand():
    """e^x - x - 1 with x = log 2, for π_ref twice π_θ; importance weighs the gain alone."""
    logprobs = torch.tensor([[-2.0]], requires_grad=True)
    loss, kl = qerl.policy_loss(
        logprobs, logprobs.detach(), torch.tensor([3.0]), torch.tensor([[0.5]]),
        ref_logprobs=logprobs.detach() + math.log(2), beta=0.1, importance=torch.tensor([[0.25]]),
    )
    loss.backward()
    expected = 1 - math.log(2)
    assert kl.item() == pytest.approx(expected / 2) and not kl.requires_grad
    assert loss.item() == pytest.approx((0.1 * expected - 3 * 0.25) / 2)
    assert logprobs.grad.item() == pytest.approx((0.1 * (1 - 2) - 3 * 0.25) / 2)


def test_micro_batches_add_up_to_the_batch(qwen):
    model = with_lora(qwen[0])
    rollout = qerl.generate(model, PROMPTS, 16, 2, eos=range(20), generator=torch.Generator().manual_seed(1))
    prompts, advantages = [p for p in PROMPTS for _ in range(2)], torch.randn(8)
    weights, gradients = qerl.token_weights(rollout.mask, "dapo"), []
    for rows in ([range(8)], [[0, 5], [1, 2, 3], [4], [7, 6]]):
        model.zero_grad()
        for i in map(list, rows):
            logprobs = qerl.token_logprobs(model, [prompts[r] for r in i], rollout.tokens[i], rollout.length[i])
            qerl.policy_loss(logprobs, rollout.logprobs[i], advantages[i], weights[i])[0].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in qerl.trainable(model).values()]))
    assert relative(gradients[0], gradients[1]) < 1e-4


def test_recomputed_blocks_give_the_same_gradient(qwen):
    model, gradients = with_lora(qwen[0]), []
    for recompute in (False, True):
        if recompute:
            model.recompute_in_backward()
        model.zero_grad()
        model(torch.arange(60).view(2, 30)).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in qerl.trainable(model).values()]))
    assert torch.equal(*gradients)


def test_recomputed_blocks_leave_out_what_nobody_reads(qwen):
    """The product that ends a block is computed in forward and not again in backward; without recomputation it always is."""
    model = with_lora(qwen[0])
    found = []
    for block in model.blocks:
        block.mlp.down.register_forward_hook(lambda layer, x, y: found.append(bool(y.any())))
    for _ in range(2):
        model(torch.arange(60).view(2, 30)).square().mean().backward()
        model.recompute_in_backward()
    count = len(model.blocks)
    assert found == [True] * count + [True] * count + [False] * count


def test_gradient_is_the_same_each_time_on_several_threads(qwen):
    model, gradients = with_lora(qwen[0]), []
    completions = torch.randint(0, 60, (512, 2), generator=torch.Generator().manual_seed(0))
    for _ in range(8):
        model.zero_grad()
        qerl.token_logprobs(model, [[1, 2, 3]] * 512, completions, torch.full((512,), 2)).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in qerl.trainable(model).values()]))
    assert all(torch.equal(gradients[0], g) for g in gradients[1:])


def test_recomputed_blocks_decode_each_weight_once_a_pass(qwen, monkeypatch):
    """Forward, and the recomputation that backward needs: two times, and what forward decoded is not kept until then."""
    model, decoded = with_lora(qwen[0]), []
    model.recompute_in_backward()
    dequantize = qerl.PackedWeight.dequantize

    def counted(packed, dtype):
        weight = dequantize(packed, dtype)
        decoded.append(weakref.ref(weight))
        return weight
    monkeypatch.setattr(qerl.PackedWeight, "dequantize", counted)
    loss = model(torch.arange(60).view(2, 30)).square().mean()
    layers = len(model.quantized_layers())
    assert len(decoded) == layers and not any(ref() is not None for ref in decoded)
    loss.backward()
    assert len(decoded) == 2 * layers


def test_idle_slots_are_given_up_at_the_end(qwen, monkeypatch):
    """40 completions of very different length: half of the slots go once they idle, and no token changes."""
    model, rows = qerl.load_model(qwen[0]), []
    prompts = [[i, 3, 2 * i + 1] for i in range(40)]
    eos = set(qerl.generate(model, prompts, 24, temperature=0).tokens[:24, 3].tolist())   # 24 or more end here or before
    step = qerl.Sampler.step
    monkeypatch.setattr(qerl.Sampler, "step", lambda self: (rows.append(len(self.completion)), step(self)))
    kept = qerl.generate(model, prompts, 24, temperature=0, eos=eos, slots=4)
    assert set(rows) == {4}
    rows.clear()
    given_up = qerl.generate(model, prompts, 24, temperature=0, eos=eos, slots=40)
    assert rows[0] == 40 and rows[-1] == 20 and kept.length.max() > 4
    assert torch.equal(kept.tokens, given_up.tokens) and torch.equal(kept.length, given_up.length)


def test_no_completion_is_lost_with_an_odd_number_of_slots(qwen, monkeypatch):
    """33 slots, of which 16 idle at once: 17 completions cannot go on in 16."""
    model, start = qerl.load_model(qwen[0]), qerl.Sampler.__init__

    def cut(self, *args):
        start(self, *args)
        self.limit[:16] = 2
    monkeypatch.setattr(qerl.Sampler, "__init__", cut)
    rollout = qerl.generate(model, [[i, 3] for i in range(33)], 8, slots=33)
    assert rollout.length.tolist() == [2] * 16 + [8] * 17


def test_output_layer_runs_in_chunks(qwen):
    """No tensor of more than `chunk` rows of the vocabulary is ever made, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Rows(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, torch.Tensor) and t.dim() and t.shape[-1] == 262:
                    self.most = max(self.most, t.numel() // 262)
            return out
    model, length = with_lora(qwen[0]), torch.tensor([30, 20])
    with Rows() as rows:
        qerl.token_logprobs(model, [[1, 2]] * 2, torch.randint(0, 262, (2, 30)), length, chunk=8).sum().backward()
    assert 0 < rows.most <= 128                                                          # 128: the lm_head's own transpose
