"""What qerl.py has to do, section by section, against oracles that no one here wrote.

They are transformers, compressed-tensors, bitsandbytes and TRL; where there is none, figures by hand.

    python -m pytest -n auto                          all tests; those marked `gpu` skip without a GPU
    python -m pytest test_qerl.py                     these alone
    TRITON_INTERPRET=1 python -m pytest -k kernel     the kernels in Triton's interpreter, on a CPU
"""
import json
import math
import os
import shutil
import subprocess
import sys
import weakref

if "PYTEST_XDIST_WORKER" in os.environ:        # of several processes each takes one thread
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import qerl

HERE = os.path.dirname(os.path.abspath(__file__))
CUDA = torch.cuda.is_available()
KERNEL_DEVICE = "cuda" if CUDA else "cpu"
gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
runs_kernels = pytest.mark.skipif(
    qerl.kernels is None or not (CUDA or qerl.kernels.INTERPRETED),
    reason="needs a GPU or TRITON_INTERPRET=1")

SIZES = dict(
    hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=262, max_position_embeddings=512, eos_token_id=256,
    bos_token_id=257, pad_token_id=256)
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64)
YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)
WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 512}
CONFIGS = {
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=48),
    "qwen3-bias": lambda: transformers.Qwen3Config(
        **SIZES, head_dim=32, attention_bias=True, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters=LLAMA3_ROPE, attention_bias=True, mlp_bias=True),
    "wide": lambda: transformers.Qwen2Config(**WIDE, tie_word_embeddings=True),
    "llama-yarn": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
}
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17]]
TWICE = [prompt for prompt in PROMPTS for _ in range(2)]


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def make_folder(path, name="qwen2", seed=0, **save):
    """A Hugging Face folder of a random model and a byte-level tokenizer -> (path, the model)."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    for p in model.parameters():
        p.data = torch.randn_like(p) * 0.06 if p.dim() > 1 else p.data + 0.1 * torch.randn_like(p)
    model.save_pretrained(path, **save)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    fast.save_pretrained(path)
    return str(path), model.eval()


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


def gradient(model):
    """The gradient of all that is trained, as one vector."""
    return torch.cat([p.grad.flatten() for p in qerl.trainable(model).values()])


ALONE = """
import sys
sys.modules["fp4_kernels"] = None                      # not even one that is installed
import torch, transformers, qerl

config = transformers.Qwen2Config(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, vocab_size=64)
transformers.AutoModelForCausalLM.from_config(config).save_pretrained("model")
model = qerl.load_model("model", weights="nvfp4", lora_rank=4)
optimizer = torch.optim.AdamW(qerl.trainable(model).values(), lr=1e-2)
prompts = [[1, 2, 3], [4, 5]]
with qerl.adaptive_quantization_noise(model, sigma=0.01):
    rollout = qerl.generate(model, prompts, max_new_tokens=8, group_size=4)
rewards = (rollout.tokens < 32).float().mean(1)
advantages = qerl.group_advantages(rewards.view(2, 4)).flatten()
repeated = [prompt for prompt in prompts for _ in range(4)]
logprobs = qerl.token_logprobs(model, repeated, rollout.tokens, rollout.length)
weights = qerl.token_weights(rollout.mask)
loss, _ = qerl.policy_loss(logprobs, logprobs.detach(), advantages, weights)
loss.backward()
optimizer.step()
after = qerl.token_logprobs(model, repeated, rollout.tokens, rollout.length)
print(((after - logprobs) * weights * advantages[:, None]).sum().item() > 0)
"""


def test_qerl_works_alone(tmp_path):
    """In an empty folder, without kernels: load, quantise, sample, score, take a step that helps."""
    shutil.copy(f"{HERE}/qerl.py", tmp_path)
    (tmp_path / "try.py").write_text(ALONE)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "try.py"], cwd=tmp_path, env=environment,
                            capture_output=True, text=True)
    assert result.stdout.strip() == "True", result.stderr


# --------------------------------------------------------------------------------------------------
# 1. Formats

MAGNITUDES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
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
    "ties": lambda: torch.cat([MAGNITUDES, -MAGNITUDES]).repeat(4, 4),
}
FEW_KINDS = ["gaussian", "odd rows", "zero blocks", "wide range"]


def compressed_tensors_nvfp4(weight):
    """(packed bytes and scales by name, decompressed weight), all by the library."""
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    global_scale = generate_gparam(weight.amin(), weight.amax())
    blocks = weight.unflatten(1, (-1, 16))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
    state = NVFP4PackedCompressor.compress(state, scheme)
    return state, NVFP4PackedCompressor.decompress(state, scheme)["weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_nvfp4_bytes_equal_compressed_tensors(kind, dtype):
    torch.manual_seed(0)
    weight = WEIGHTS[kind]().to(dtype)
    packed, block_scale, global_scale = qerl.quantize_nvfp4(weight)
    state, decompressed = compressed_tensors_nvfp4(weight)
    assert global_scale.shape == (1,)
    assert torch.equal(global_scale, state["weight_global_scale"])
    assert block_scale.dtype == torch.float8_e4m3fn
    ours, theirs = (t.view(torch.uint8) for t in (block_scale, state["weight_scale"]))
    assert torch.equal(ours, theirs)
    assert torch.equal(packed, state["weight_packed"])
    decoded = qerl.dequantize_nvfp4(packed, block_scale, global_scale, torch.float32)
    # The library decodes in 16 bit.
    torch.testing.assert_close(decoded, decompressed.float(), rtol=1e-2, atol=0)


def test_e2m1_rounds_to_nearest_even():
    values = qerl.E2M1[:8]
    halfway = (values[1:] + values[:-1]) / 2
    x = torch.cat([torch.linspace(-7, 7, 20002), halfway, -halfway])
    packed = qerl.encode_e2m1(x[None], torch.ones(1, 1))[0].int()
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten()
    for value, code in zip(x.tolist(), codes.tolist()):
        distance = (values - abs(value)).abs()
        nearest = [c for c in range(8) if distance[c] == distance.min()]
        even = [c for c in nearest if c % 2 == 0]
        assert code & 7 == (nearest if len(nearest) == 1 else even)[0]
        assert code >> 3 == (value < 0)


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_mxfp4_equals_compressed_tensors(kind):
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
    torch.manual_seed(0)
    weight = WEIGHTS[kind]()
    packed, e8m0, _ = qerl.quantize_mxfp4(weight)
    amax = weight.unflatten(1, (-1, 32)).abs().amax(-1)
    live = amax > 0
    assert torch.equal(e8m0[live].float(), generate_mx_scales(amax)[live])
    error = qerl.dequantize_mxfp4(packed, e8m0, None, torch.float32) - weight
    largest = error.unflatten(1, (-1, 32)).abs().amax(-1)
    # At most 7, which becomes 6, or half of the way from 4 to 6.
    assert (largest <= torch.exp2(e8m0.float() - 127)).all()


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_nf4_codes_equal_bitsandbytes(kind):
    import bitsandbytes.functional as bnb
    torch.manual_seed(0)
    weight = WEIGHTS[kind]()
    packed, absmax, _ = qerl.quantize_nf4(weight)
    theirs, state = bnb.quantize_nf4(weight, blocksize=64)
    theirs = theirs.view(packed.shape)
    live = (absmax > 0).repeat_interleave(32, 1)
    even_indices_high = packed << 4 | packed >> 4
    assert torch.equal(even_indices_high[live], theirs[live])
    assert torch.equal(absmax.flatten(), state.absmax)
    decoded = qerl.dequantize_nf4(packed, absmax, None, torch.float32)
    torch.testing.assert_close(decoded, bnb.dequantize_nf4(theirs.view(-1, 1), state))


@pytest.mark.parametrize("name,low,high", [
    ("nvfp4", 0.085, 0.105), ("mxfp4", 0.1, 0.13), ("nf4", 0.085, 0.1), ("bf16", 0, 0),
])
def test_relative_error_on_gaussian_weights(name, low, high):
    torch.manual_seed(0)
    weight = torch.randn(256, 512)
    format = qerl.FORMATS[name]
    assert low <= relative(format.dequantize(*format.quantize(weight), torch.float32), weight) <= high


def test_small_float16_weights_are_quantised_as_well_as_others():
    weight = torch.randn(64, 128, generator=seeded(0)).mul(0.008).half()
    assert weight.abs().max() < 0.041                  # 6 * 448 over it is beyond float16
    decoded = qerl.dequantize_nvfp4(*qerl.quantize_nvfp4(weight), torch.float32)
    assert relative(decoded, weight) < 0.1


# --------------------------------------------------------------------------------------------------
# 2. Quantised linear with LoRA

def stacked_layer(weights, dense, bias=None, **lora):
    """A QuantLinear of dense layers over one input, each quantised by itself."""
    format = qerl.FORMATS[weights]
    parts = []
    for weight in dense:
        packed, scale, global_scale = format.quantize(weight)
        rows = global_scale.expand(len(weight), -1).reshape(len(weight), -1)
        parts.append((packed, scale, rows))
    weight = qerl.PackedWeight(format, *(torch.cat(part) for part in zip(*parts)))
    names = list("abc"[:len(dense)])
    sizes = [len(w) for w in dense]
    return qerl.QuantLinear(names, sizes, dense[0].shape[1], weight, bias, **lora)


@pytest.mark.parametrize("sizes", [(48, 16), (160, 96)])
@pytest.mark.parametrize("weights", qerl.FORMATS)
def test_linear_and_its_gradients(weights, sizes):
    """Eq. 2 of two stacked layers, together narrower and wider than their input."""
    torch.manual_seed(0)
    dense = [torch.randn(size, 128) for size in sizes]
    out = sum(sizes)
    layer = stacked_layer(weights, dense, torch.randn(out), lora_rank=4, lora_alpha=8)
    format = qerl.FORMATS[weights]
    frozen = torch.cat(
        [format.dequantize(*format.quantize(w), torch.float32) for w in dense])
    x = torch.randn(3, 5, 128, requires_grad=True)
    # B starts at zero.
    torch.testing.assert_close(layer(x), F.linear(x, frozen, layer.bias))
    layer.lora_B.data.normal_()
    ours = [x, layer.lora_A, layer.lora_B]
    z, A, B = theirs = [t.detach().clone().requires_grad_() for t in ours]
    delta = 2.0 * torch.cat([B[:sizes[0]] @ A[:4], B[sizes[0]:] @ A[4:]])
    expected = F.linear(z, frozen + delta, layer.bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    upstream = torch.randn(3, 5, out)
    layer(x).backward(upstream)
    expected.backward(upstream)
    for found, right in zip(ours, theirs):
        torch.testing.assert_close(found.grad, right.grad, rtol=1e-4, atol=1e-3)


def test_no_dequantised_weight_is_kept_for_backward():
    weight = torch.randn(96, 64)
    layer = stacked_layer("nvfp4", [weight], lora_rank=2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(3, 64, requires_grad=True)).sum().backward()
    assert kept
    assert all(t.numel() < weight.numel() for t in kept)


@pytest.mark.parametrize("weights", qerl.FORMATS)
def test_decoding_a_layer_is_its_forward(weights):
    """Stacked pieces, LoRA, with and without bias and residual."""
    torch.manual_seed(0)
    x = torch.randn(3, 128)
    residual = torch.randn(3, 64)
    for bias in (None, torch.randn(64)):
        dense = [torch.randn(48, 128), torch.randn(16, 128)]
        layer = stacked_layer(weights, dense, bias, lora_rank=4, lora_alpha=8)
        layer.lora_B.data.normal_()
        for layer.use_adapter in (True, False):
            layer.prepare_decoding(torch.float32)
            with torch.no_grad():
                expected = layer(x)
                for added, y in ((0, layer.decode(x)), (residual, layer.decode(x, residual))):
                    torch.testing.assert_close(y, expected + added, rtol=1e-4, atol=1e-4)


def quantize_int8(weight):
    """A format of a reader's own: 8 bits, the absolute maximum of each 32 weights becomes 127."""
    blocks = weight.float().unflatten(1, (-1, 32))
    scale = blocks.abs().amax(-1).clamp_min(1e-30) / 127
    codes = (blocks / scale[..., None]).round().to(torch.int8).flatten(1)
    return codes, scale, torch.ones(1, device=weight.device)


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
    logprobs = qerl.token_logprobs(model, TWICE, rollout.tokens, rollout.length)
    assert (logprobs - rollout.logprobs).abs()[rollout.mask].max() < 1e-3
    optimizer = torch.optim.AdamW(qerl.trainable(model).values(), 1e-2)
    weights = qerl.token_weights(rollout.mask)
    advantages = torch.arange(8.0, device=device) - 3.5
    loss, _ = qerl.policy_loss(logprobs, logprobs.detach(), advantages, weights)
    loss.backward()
    optimizer.step()
    after = qerl.token_logprobs(model, TWICE, rollout.tokens, rollout.length)
    gain = ((after - logprobs) * weights).sum(1).detach()
    assert gain[4:].mean() > gain[:4].mean()           # the better half became likelier


# --------------------------------------------------------------------------------------------------
# 3. RMSNorm with Adaptive Quantization Noise

def scales(model):
    """All RMSNorms of a model."""
    return [m for m in model.modules() if isinstance(m, qerl.RMSNorm)]


def test_noise_equals_multiplicative_noise_on_weights(qwen):
    """Appendix G: w + Z is 1 + Z/w on the input channels of the layers that read the norm."""
    model = qerl.load_model(qwen[0], weights="bf16")
    norm = model.blocks[0].attention_norm
    qkv = model.blocks[0].attention.qkv
    x = torch.randn(4, 128)
    with qerl.adaptive_quantization_noise(model, 0.1, seeded(3)):
        noisy = qkv(norm(x))
        z = norm.noisy_weight - norm.weight
    weight = qkv.weight.dequantize(torch.float32) * (1 + z / norm.weight)
    expected = F.linear(norm(x), weight, qkv.bias)
    torch.testing.assert_close(noisy, expected, rtol=1e-4, atol=1e-4)


def test_noise_is_normal_around_the_scale_as_it_is(qwen):
    """w + sigma z with z ~ N(0, 1), whatever w is: no factor of w, no one sign, no draw twice."""
    model = qerl.load_model(qwen[0], lora_rank=2, train_norms=True)
    trained = torch.linspace(-1, 9, 128)               # not as loaded, and some of it near 0
    for norm in scales(model):
        norm.weight.data = trained
    generator = seeded(0)
    draws = []
    for _ in range(400):
        with qerl.adaptive_quantization_noise(model, 0.02, generator):
            draws.append(torch.stack([norm.noisy_weight - trained for norm in scales(model)]))
    z = torch.stack(draws) / 0.02                      # (draws, norms, channels)
    assert z.shape == (400, 5, 128)
    assert not z.requires_grad
    # Six standard errors are allowed, of figures over many draws.
    of_a_channel = z.flatten(0, 1)                     # (2000, 128)
    assert of_a_channel.mean(0).abs().max() < 6 / 2000 ** 0.5
    assert (of_a_channel.std(0) - 1).abs().max() < 6 / 4000 ** 0.5
    for tail in (z < -1.96, z > 1.96):
        assert abs(tail.float().mean() - 0.025) < 0.002
    products = [
        z[1:] * z[:-1],                                # of one draw and the next
        z[:, 1:] * z[:, :-1],                          # of one norm and the next
        z[..., 1:] * z[..., :-1],                      # of one channel and the next
    ]
    for product in products:
        assert product.mean().abs() < 6 / product.numel() ** 0.5


@pytest.mark.parametrize("name,norms", [("qwen2", 2 * 2 + 1), ("qwen3", 2 * 4 + 1)])
def test_noise_is_on_every_norm_and_ends_with_the_rollout(tmp_path, name, norms):
    """Every norm's scale, Qwen3's q_norm and k_norm among them; it is over even after an error."""
    model = qerl.load_model(make_folder(tmp_path, name)[0])
    assert len(scales(model)) == norms
    with pytest.raises(KeyError):
        with qerl.adaptive_quantization_noise(model, 0.1, seeded(1)):
            assert all((norm.noisy_weight != norm.weight).all() for norm in scales(model))
            raise KeyError
    assert all(norm.noisy_weight is None for norm in scales(model))
    drawn = []
    for seed in (7, 7, 8):
        torch.manual_seed(len(drawn))                  # of which the noise takes nothing
        with qerl.adaptive_quantization_noise(model, 0.1, seeded(seed)):
            drawn.append(model.norm.noisy_weight)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("schedule", qerl.SCHEDULES)
def test_noise_schedules(schedule):
    sigma = [qerl.noise_sigma(step, 100, 10, 1e-2, 5e-4, schedule) for step in range(100)]
    assert sigma[:10] == [0.0] * 10
    assert len(set(sigma)) == 10
    assert sigma[10] == pytest.approx(1e-2)
    assert sigma[99] == pytest.approx(5e-4)
    assert all(a >= b for a, b in zip(sigma[10:], sigma[11:]))
    assert [qerl.noise_sigma(s, 3, 1, schedule=schedule) for s in range(3)] == [0, 0, 0]
    assert [qerl.noise_sigma(s, 20, 10, 0, 0, schedule) for s in range(20)] == [0] * 20
    assert qerl.noise_sigma(1, 2, 2, 0.1, 0.01, schedule) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule,expected", [
    ("exponential", [16, 8, 4, 2, 1]),                                                   # Eq. 8
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


# --------------------------------------------------------------------------------------------------
# 4. Transformer

def test_logits_equal_transformers(family):
    folder, theirs = family
    tokens = torch.randint(0, 262, (3, 150))
    with torch.no_grad():
        ours = qerl.load_model(folder, weights="bf16", lora_rank=2)(tokens)
        assert ours.shape == (3, 150, 262)
        assert relative(ours, theirs(tokens).logits) < 1e-4


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "nf4"])
def test_quantised_model_equals_transformers_with_the_decoded_weights(qwen, weights):
    folder, theirs = qwen
    format = qerl.FORMATS[weights]
    state = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    for name, tensor in state.items():
        if name.endswith("_proj.weight"):
            tensor.copy_(format.dequantize(*format.quantize(tensor), torch.float32))
    decoded = transformers.AutoModelForCausalLM.from_config(theirs.config)
    decoded.load_state_dict(state)
    tokens = torch.randint(0, 262, (2, 40))
    with torch.no_grad():
        ours = qerl.load_model(folder, weights=weights)(tokens)
        assert relative(ours, decoded.eval()(tokens).logits) < 1e-4


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_blocks_give_the_same_gradient(qwen, recompute):
    """And decode each weight once a pass, forward and in backward; none is kept between these.

    The product that ends a block is left out in backward, where nobody reads it.
    """
    tokens = torch.arange(60).view(2, 30)
    model = with_lora(qwen[0])
    model(tokens).square().mean().backward()
    expected = gradient(model)
    model.zero_grad()
    if recompute:
        model.recompute_in_backward()
    decoded = []
    ends = []
    dequantize = qerl.PackedWeight.dequantize

    def counted(packed, dtype):
        weight = dequantize(packed, dtype)
        decoded.append(weakref.ref(weight))
        return weight
    for block in model.blocks:
        block.mlp.down.register_forward_hook(lambda layer, x, y: ends.append(bool(y.any())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qerl.PackedWeight, "dequantize", counted)
        loss = model(tokens).square().mean()
        layers = len(model.quantized_layers())
        assert len(decoded) == layers
        assert all(ref() is None for ref in decoded)
        loss.backward()
    assert len(decoded) == 2 * layers
    assert ends == [True, True] + [False, False] * recompute
    assert torch.equal(gradient(model), expected)


def test_reference_policy_is_the_model_without_adapters(qwen):
    tokens = torch.arange(20)[None]
    plain = qerl.load_model(qwen[0])(tokens)
    tuned = with_lora(qwen[0], train_norms=True)
    fresh = qerl.load_model(qwen[0], lora_rank=4)
    assert torch.equal(fresh(tokens), plain)           # where training starts
    assert not torch.allclose(tuned(tokens), plain)
    with qerl.adapters_off(tuned):
        assert torch.equal(tuned(tokens), plain)
    assert not torch.allclose(tuned(tokens), plain)


# --------------------------------------------------------------------------------------------------
# 5. Sampler

@pytest.mark.parametrize("slots", [2, 5, 100])
def test_greedy_completions_equal_transformers(family, slots):
    folder, theirs = family
    model = qerl.load_model(folder, weights="bf16")
    rollout = qerl.generate(model, PROMPTS, 12, group_size=2, temperature=0, slots=slots)
    assert rollout.tokens.shape == (8, 12)
    assert not rollout.finished.any()
    for i, prompt in enumerate(PROMPTS):
        expected = theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12,
            do_sample=False, eos_token_id=None)[0, len(prompt):].tolist()
        assert rollout.tokens[2 * i].tolist() == expected
        assert rollout.tokens[2 * i + 1].tolist() == expected


def test_logprobs_and_entropy_are_the_policys(qwen):
    model = with_lora(qwen[0])
    rollout = qerl.generate(model, PROMPTS, 20, 3, temperature=0.7, eos=range(40), slots=4,
                            generator=seeded(0))
    assert rollout.finished.any()
    assert 1 <= rollout.length.min() and rollout.length.max() <= 20
    for i in range(12):
        prompt = PROMPTS[i // 3]
        n = int(rollout.length[i])
        completion = rollout.tokens[i, :n].tolist()
        assert all(token >= 40 for token in completion[:-1])
        assert (completion[-1] < 40) == bool(rollout.finished[i])
        assert rollout.finished[i] or n == 20
        logits = model(torch.tensor([prompt + completion]))[0, len(prompt) - 1:-1] / 0.7
        logp = logits.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        for found, right in ((rollout.logprobs, logp[range(n), completion]),
                             (rollout.entropy, entropy)):
            torch.testing.assert_close(found[i, :n], right, rtol=1e-4, atol=1e-4)
    assert (rollout.logprobs[~rollout.mask] == 0).all()
    assert rollout.mask.sum() == rollout.length.sum()


@pytest.mark.parametrize("temperature,top_p,expected", [
    (1.0, 1.0, torch.tensor([2.0, 1.0, 0.0, -1.0, -20.0]).softmax(0)),
    (0.5, 1.0, torch.tensor([4.0, 2.0, 0.0, -2.0, -40.0]).softmax(0)),
    (1.0, 0.7, torch.tensor([math.e, 1.0, 0, 0, 0]) / (math.e + 1)),
    (1.0, 1e-9, torch.eye(5)[0]),
])
def test_samples_follow_the_distribution(temperature, top_p, expected):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -20.0]).repeat(40000, 1)
    token, logprob, _ = qerl.sample(logits, temperature, top_p, seeded(0))
    frequency = torch.bincount(token, minlength=5) / len(token)
    assert (frequency - expected).abs().max() < 0.01
    of_all = (logits / temperature).log_softmax(-1)
    assert torch.allclose(logprob, of_all.gather(1, token[:, None])[:, 0])


@pytest.mark.parametrize("top_p,kept", [
    (0.3, [2]), (0.5, [2]), (0.51, [0, 2]), (0.79, [0, 2]), (0.81, [0, 2, 3]), (0.99, [0, 1, 2, 3]),
])
def test_nucleus_is_the_smallest_set_that_reaches_top_p(top_p, kept):
    probs = torch.tensor([[0.3, 0.05, 0.5, 0.15], [0.0, 1.0, 0.0, 0.0]])
    cut = qerl.nucleus(probs, top_p)
    assert cut[0].nonzero()[:, 0].tolist() == kept
    assert torch.equal(cut[0, kept], probs[0, kept])
    assert torch.equal(cut[1], probs[1])


def test_top_p_and_temperature_reach_the_sampler(qwen):
    """Only the likeliest token is left by a tiny top-p, or by a tiny temperature."""
    model = qerl.load_model(qwen[0])
    greedy = qerl.generate(model, PROMPTS, 8, temperature=0).tokens
    for options in (dict(top_p=1e-6), dict(temperature=1e-6)):
        assert torch.equal(qerl.generate(model, PROMPTS, 8, **options).tokens, greedy)
    assert not torch.equal(qerl.generate(model, PROMPTS, 8).tokens, greedy)


@pytest.mark.parametrize("name,value", [
    ("top_p", 0.0), ("top_p", math.nan), ("temperature", -0.1), ("temperature", math.nan),
    ("group_size", 0), ("max_new_tokens", 0), ("prompts", []), ("prompts", [[1], []]),
])
def test_generate_names_an_argument_out_of_range(qwen, name, value):
    model = qerl.load_model(qwen[0])
    with pytest.raises(ValueError, match=f"generate: {name} is out of range"):
        qerl.generate(model, **{"prompts": [[1]], "max_new_tokens": 2, name: value})


class Watched(qerl.Sampler):
    """Notes before each step how many slots there are, and pieces of the cache."""
    slots = []
    pieces = []

    def step(self):
        self.slots.append(len(self.completion))
        super().step()
        self.pieces.append(len(self.cache.pieces[0]))


@pytest.fixture
def watched():
    Watched.slots.clear()
    Watched.pieces.clear()
    return Watched


def test_idle_slots_are_given_up_at_the_end(qwen, watched):
    """40 completions of very different length: half of the slots go, and no token changes."""
    model = qerl.load_model(qwen[0])
    prompts = [[i, 3, 2 * i + 1] for i in range(40)]
    # 24 completions or more end here or before.
    eos = set(qerl.generate(model, prompts, 24, temperature=0).tokens[:24, 3].tolist())

    def completions(slots):
        watched.slots.clear()
        return qerl.generate(model, prompts, 24, temperature=0, eos=eos, slots=slots,
                             sampler_class=watched)
    kept = completions(4)
    assert set(watched.slots) == {4}
    given_up = completions(40)
    assert watched.slots[0] == 40
    assert watched.slots[-1] == 20
    assert kept.length.max() > 4
    assert torch.equal(kept.tokens, given_up.tokens)
    assert torch.equal(kept.length, given_up.length)


def test_no_completion_is_lost_with_an_odd_number_of_slots(qwen):
    """33 slots, of which 16 idle at once: 17 completions cannot go on in 16."""
    class Cut(qerl.Sampler):
        def __init__(self, *args):
            super().__init__(*args)
            self.limit[:16] = 2
    model = qerl.load_model(qwen[0])
    rollout = qerl.generate(model, [[i, 3] for i in range(33)], 8, slots=33, sampler_class=Cut)
    assert rollout.length.tolist() == [2] * 16 + [8] * 17


def test_the_cache_grows_in_pieces(family, monkeypatch, watched):
    """Pieces of 8 positions give the rollout of a single piece, also where slots are given back."""
    model = with_lora(family[0])
    prompts = [[5, 6, 7], [8], [9] * 19, [5, 6, 7, 8]] * 12

    def rollout():
        watched.pieces.clear()
        return qerl.generate(model, prompts, 40, eos={11, 12, 13}, slots=36, generator=seeded(3),
                             sampler_class=watched)
    whole = rollout()
    assert set(watched.pieces) == {1}
    monkeypatch.setattr(qerl, "CACHE_PIECE", 8)
    cut = rollout()
    for name, tensor in vars(whole).items():
        torch.testing.assert_close(getattr(cut, name), tensor, rtol=1e-4, atol=1e-4)
    assert watched.pieces[0] == 3                      # 19 positions
    longest = 19 + int(whole.length[2::4].max())
    assert 3 < watched.pieces[-1] <= math.ceil(longest / 8)
    assert {36, 18} <= set(watched.slots)              # it shrank


# --------------------------------------------------------------------------------------------------
# 6. Objectives

def test_advantages_are_group_relative():
    rewards = torch.tensor([[1.0, 0, 0, 1], [2, 2, 2, 2], [0, 0, 0, 5]])
    advantages = qerl.group_advantages(rewards)
    std = torch.tensor([[row.std()] for row in rewards])
    expected = (rewards - rewards.mean(1, keepdim=True)) / (std + 1e-4)
    torch.testing.assert_close(advantages, expected)
    assert (advantages[1] == 0).all()
    # Exactly 0, whatever the mean rounds to.
    assert (qerl.group_advantages(torch.full((1, 8), 0.2)) == 0).all()


def test_token_weights_by_hand():
    """Four tokens, two tokens, and a completion of which none counts."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    grpo = torch.tensor([[1 / 12] * 4, [1 / 6, 1 / 6, 0, 0], [0] * 4])
    torch.testing.assert_close(qerl.token_weights(mask, "grpo"), grpo)
    assert torch.equal(qerl.token_weights(mask, "dapo"), mask / 6)
    assert qerl.token_weights(mask[2:], "dapo").tolist() == [[0] * 4]      # and not NaN
    torch.testing.assert_close(qerl.token_weights(mask, "dr-grpo", 10), mask / 30)


@pytest.mark.parametrize("advantage,ratio,gain,slope", [
    (1.0, 1.2, 1.2, 1.2), (1.0, 1.5, 1.28, 0), (1.0, 0.5, 0.5, 0.5),
    (-2.0, 1.5, -3.0, -3.0), (-2.0, 0.9, -1.8, -1.8), (-2.0, 0.5, -1.6, 0),
])
def test_the_clipped_gain_by_hand(advantage, ratio, gain, slope):
    """Eq. 3 without KL: beyond the clip range a step that makes it worse still has a gradient."""
    logprobs = torch.tensor([[math.log(ratio) - 1]], requires_grad=True)
    loss, kl = qerl.policy_loss(
        logprobs, torch.tensor([[-1.0]]), torch.tensor([advantage]), torch.tensor([[0.5]]))
    loss.backward()
    assert loss.item() == pytest.approx(-gain / 2)
    assert kl.item() == 0
    assert logprobs.grad.item() == pytest.approx(-slope / 2)


def test_kl_by_hand():
    """e^x - x - 1 with x = log 2, for π_ref twice π_θ; importance weighs the gain alone."""
    logprobs = torch.tensor([[-2.0]], requires_grad=True)
    loss, kl = qerl.policy_loss(
        logprobs, logprobs.detach(), torch.tensor([3.0]), torch.tensor([[0.5]]),
        ref_logprobs=logprobs.detach() + math.log(2), beta=0.1,
        rollout_logprobs=logprobs.detach() + math.log(4), tis=2.0)
    loss.backward()
    expected = 1 - math.log(2)
    assert kl.item() == pytest.approx(expected / 2)
    assert not kl.requires_grad
    assert loss.item() == pytest.approx((0.1 * expected - 3 * 0.25) / 2)
    assert logprobs.grad.item() == pytest.approx((0.1 * (1 - 2) - 3 * 0.25) / 2)


@pytest.mark.parametrize("log_ratio", [99.9, 200.0, -99.9])
def test_a_token_that_is_clipped_has_gradient_zero_whatever_the_ratio(log_ratio):
    """Where the ratio is infinite or 0, and the KL's exponential infinite; the last is masked."""
    logprobs = torch.tensor([[-0.1, -1.0, -0.1]], requires_grad=True)
    old = logprobs.detach() - torch.tensor([[log_ratio, 0.0, log_ratio]])
    weights = torch.tensor([[0.5, 0.5, 0.0]])
    advantage = torch.tensor([math.copysign(1.0, log_ratio)])          # on whose side it is clipped
    qerl.policy_loss(logprobs, old, advantage, weights)[0].backward()
    assert logprobs.grad.tolist() == [[0.0, -0.5 * advantage.item(), 0.0]]
    reference = logprobs.detach() + log_ratio
    loss, kl = qerl.policy_loss(
        logprobs, old, advantage, weights, ref_logprobs=reference, beta=0.1)
    loss.backward()
    assert loss.isfinite() and kl.isfinite()
    assert logprobs.grad.isfinite().all()


def test_an_advantage_of_zero_is_no_loss_whatever_the_ratio():
    logprobs = torch.tensor([[0.0, -1.0], [-1.0, -2.0]], requires_grad=True)
    old = torch.tensor([[-200.0, -1.0], [-1.5, -2.0]])
    weights = torch.full((2, 2), 0.25)
    loss, _ = qerl.policy_loss(logprobs, old, torch.tensor([0.0, 1.0]), weights)
    loss.backward()
    assert loss.item() == pytest.approx(-(1.28 + 1) / 4)
    assert logprobs.grad.tolist() == [[0, 0], [0, -0.25]]


def trl_trainer(folder, tmp_path, kind="GRPO", **options):
    import trl
    from datasets import Dataset
    config = getattr(trl, f"{kind}Config")(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, bf16=False,
        use_cpu=True, report_to=[], gradient_checkpointing=False, epsilon=0.2,
        steps_per_generation=1, **options)
    return getattr(trl, f"{kind}Trainer")(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder))


GSPO = dict(loss_type="grpo", importance_sampling_level="sequence")
CISPO = dict(loss_type="cispo", epsilon_high=1.28)         # there the cap itself, here what is above 1


@pytest.mark.parametrize("algorithm,beta,temperature,options", [
    ("grpo", 0.0, 1.0, dict(loss_type="grpo")),
    ("grpo", 0.04, 0.7, dict(loss_type="grpo", use_bias_correction_kl=False)),
    ("dapo", 0.0, 1.0, dict(loss_type="dapo")),
    ("dr-grpo", 0.0, 1.0, dict(loss_type="dr_grpo")),
    ("gspo", 0.0, 1.0, GSPO),
    ("cispo", 0.0, 1.0, CISPO),
    ("rloo", 0.0, 1.0, dict(kind="RLOO")),
])
def test_loss_and_gradient_equal_trl(qwen, tmp_path, algorithm, beta, temperature, options):
    """The gradients compared are those of the norms."""
    folder = qwen[0]
    trainer = trl_trainer(folder, tmp_path, beta=beta, max_completion_length=20,
                          temperature=temperature, **{"epsilon_high": 0.28} | options)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    torch.manual_seed(0)
    length = torch.tensor([9, 4, 7, 1])
    prompts = [[5, 6, 7, 8]] * 4
    mask = qerl.length_mask(length, 9)
    completions = torch.randint(20, 250, (4, 9)) * mask
    ours = qerl.load_model(folder, weights="bf16", lora_rank=2, train_norms=True)
    logprobs = qerl.token_logprobs(ours, prompts, completions, length, temperature)
    # So far apart that some ratios are clipped.
    old, reference = ((logprobs.detach() + 0.3 * torch.randn(4, 9)) * mask for _ in range(2))
    rewards = torch.tensor([[2.2, 0.0, 0.2, 2.0]])
    advantages = qerl.group_advantages(rewards, algorithm)[0]
    weights = qerl.token_weights(mask, algorithm, 20)
    clip_low = 1.0 if algorithm == "cispo" else 0.2
    loss, kl = qerl.policy_loss(
        logprobs, old, advantages, weights, clip_low, 0.28, reference if beta else None, beta,
        algorithm=algorithm)
    loss.backward()
    theirs = trainer._compute_loss(trainer.model, {
        "prompt_ids": torch.tensor(prompts),
        "prompt_mask": torch.ones(4, 4, dtype=torch.long),
        "completion_ids": completions,
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "old_logps": old.sum(1),
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    })
    theirs.backward()
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-4, abs=1e-6)
    for norm in scales(ours):
        their_grad = trainer.model.get_parameter(f"{norm.name}.weight").grad
        assert relative(norm.weight.grad, their_grad) < 1e-3
    assert (kl.item() > 0) == (beta > 0)


def test_advantages_by_hand():
    """RLOO compares with the mean of the others; a group without a signal has none."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.5], [1.0] * 5])
    others = (rewards.sum(1, keepdim=True) - rewards) / 4
    torch.testing.assert_close(qerl.group_advantages(rewards, "rloo"), rewards - others)
    expected = (rewards[0] - 0.5) / (0.5 + 1e-4)               # the sample's deviation is 0.5
    torch.testing.assert_close(qerl.group_advantages(rewards)[0], expected)
    assert qerl.group_advantages(rewards)[1].tolist() == [0] * 5


def test_logprobs_at_a_temperature(qwen):
    """Those of training are those of the sampler, whose distribution is softmax(logits / T)."""
    model = with_lora(qwen[0])
    rollout = qerl.generate(model, [[5, 6, 7], [8, 9]], 12, 2, temperature=0.6,
                            generator=torch.Generator().manual_seed(0))
    prompts = [[5, 6, 7]] * 2 + [[8, 9]] * 2
    logprobs = qerl.token_logprobs(model, prompts, rollout.tokens, rollout.length, 0.6)
    assert relative(logprobs, rollout.logprobs) < 1e-4
    plain = qerl.token_logprobs(model, prompts, rollout.tokens, rollout.length)
    assert relative(plain, rollout.logprobs) > 0.01


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


def test_noise_shows_as_mismatch(qwen):
    model = with_lora(qwen[0])
    with qerl.adaptive_quantization_noise(model, 0.05, seeded(0)):
        rollout = qerl.generate(model, PROMPTS, 16, 2, generator=seeded(1))
    with torch.no_grad():
        logprobs = qerl.token_logprobs(model, TWICE, rollout.tokens, rollout.length)
    kl, ratio = qerl.mismatch(logprobs, rollout.logprobs, rollout.mask)
    assert kl > 1e-4
    assert ratio > 1.05


# --------------------------------------------------------------------------------------------------
# 7. Log-probabilities of a batch

def one_by_one(model, prompts, completions, length):
    """What token_logprobs gives, a completion at a time."""
    rows = []
    for prompt, completion, n in zip(prompts, completions, length.tolist()):
        tokens = torch.cat([torch.tensor(prompt), completion[:n]])
        logits = model(tokens[None])[0]                                  # [prompt + n, V]
        # The logits at a token are of the next one: the prompt's last gives the completion's first.
        logprobs = logits[len(prompt) - 1:-1].log_softmax(-1)            # [n, V]
        chosen = logprobs.gather(1, completion[:n, None])[:, 0]          # [n]
        rows.append(F.pad(chosen, (0, len(completion) - n)))
    return torch.stack(rows)


def test_training_logprobs_equal_the_samplers(qwen):
    """And their gradients those of a completion at a time, with padding."""
    model = with_lora(qwen[0])
    rollout = qerl.generate(model, PROMPTS, 16, 2, eos=range(20), generator=seeded(1))
    assert 1 < rollout.length.min() < rollout.length.max()
    batch = TWICE, rollout.tokens, rollout.length
    for chunk in (7, 4096):
        logprobs = qerl.token_logprobs(model, *batch, chunk=chunk)
        torch.testing.assert_close(logprobs, rollout.logprobs, rtol=1e-4, atol=1e-4)
    kl, ratio = qerl.mismatch(logprobs, rollout.logprobs, rollout.mask)
    assert abs(kl) < 1e-6
    assert 1 <= ratio < 1.001
    expected = one_by_one(model, *batch)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    gradients = []
    for t in (logprobs, expected):
        model.zero_grad()
        t.square().sum().backward()
        gradients.append(gradient(model))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_packing_holds_each_prompt_once():
    prompts = [[1, 2, 3], [1, 2, 3], [4, 5], [6], [1, 2, 3]]           # the last has no neighbour
    packing = qerl.pack(prompts, torch.tensor([2, 4, 5, 1, 3]))
    assert packing.sizes == [3, 2, 1, 3, 2, 4, 5, 1, 3]
    assert packing.owner == [0, 0, 1, 2, 3]
    assert packing.position.tolist() == [
        0, 1, 2, 0, 1, 0, 0, 1, 2, 3, 4, 3, 4, 5, 6, 2, 3, 4, 5, 6, 1, 3, 4, 5]
    assert packing.before.tolist() == [2, 9, 2, 11, 12, 13, 4, 15, 16, 17, 18, 5, 8, 21, 22]
    assert packing.ends.tolist() == [0, 3, 5, 6, 9, 11, 15, 20, 21, 24]
    assert packing.group_ends.tolist() == [0, 6, 11, 12, 15]


def test_micro_batches_add_up_to_the_batch(qwen):
    model = with_lora(qwen[0])
    rollout = qerl.generate(model, PROMPTS, 16, 2, eos=range(20), generator=seeded(1))
    advantages = torch.randn(8)
    weights = qerl.token_weights(rollout.mask, "dapo")
    gradients = []
    for micro_batches in ([list(range(8))], [[0, 5], [1, 2, 3], [4], [7, 6]]):
        model.zero_grad()
        for i in micro_batches:
            logprobs = qerl.token_logprobs(
                model, [TWICE[row] for row in i], rollout.tokens[i], rollout.length[i])
            loss, _ = qerl.policy_loss(logprobs, rollout.logprobs[i], advantages[i], weights[i])
            loss.backward()
        gradients.append(gradient(model))
    assert relative(*gradients) < 1e-4


def test_gradient_is_the_same_each_time_on_several_threads(qwen):
    model = with_lora(qwen[0])
    completions = torch.randint(0, 60, (512, 2), generator=seeded(0))
    length = torch.full((512,), 2)
    gradients = []
    for _ in range(8):
        model.zero_grad()
        logprobs = qerl.token_logprobs(model, [[1, 2, 3]] * 512, completions, length)
        logprobs.square().mean().backward()
        gradients.append(gradient(model))
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])


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
    model = with_lora(qwen[0])
    completions = torch.randint(0, 262, (8, 30))
    with Rows() as rows:
        logprobs = qerl.token_logprobs(
            model, [[1, 2]] * 8, completions, torch.full((8,), 30), chunk=8)
        logprobs.sum().backward()
    assert 0 < rows.most <= 128                        # 128: the transpose of lm_head itself


# --------------------------------------------------------------------------------------------------
# 8. Loading

TOKENS = torch.arange(30)[None]
INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.norm.weight"


def equals(folder, other):
    return torch.equal(qerl.load_model(str(folder))(TOKENS), qerl.load_model(other)(TOKENS))


@pytest.mark.parametrize("shards", [dict(max_shard_size="200KB"), {}])
def test_only_the_weights_of_the_model_are_read(qwen, tmp_path, shards):
    """Other files with the same tensor names say nothing; they lie before and behind the model's."""
    folder, theirs = make_folder(tmp_path, **shards)
    state = theirs.state_dict()
    wrong = {k: torch.full_like(v, 9) for k, v in state.items() if k != "lm_head.weight"}
    for name in ("a", "consolidated", "z", *["model"] * bool(shards)):
        save_file(wrong, tmp_path / f"{name}.safetensors")
    assert equals(folder, qwen[0])


def test_a_tensor_comes_from_the_file_that_the_index_says(qwen, tmp_path):
    """Each file has all tensors, but those that belong to others are wrong there."""
    folder, theirs = make_folder(tmp_path, max_shard_size="200KB")
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    wrong = {k: torch.full_like(v, 9) for k, v in theirs.state_dict().items() if k in index}
    for name in set(index.values()):
        save_file(wrong | load_file(tmp_path / name), tmp_path / name)
    assert equals(folder, qwen[0])


@pytest.mark.parametrize("index,message", [
    (lambda i: "{", f"{INDEX}: cannot be read"),
    (lambda i: json.dumps({"weight_map": {NORM: 3, "b": "c"}}), f"{INDEX}: cannot be read"),
    (lambda i: json.dumps({"weight_map": i | {NORM: "gone.safetensors"}}),
     "gone.safetensors: cannot be read"),
    (lambda i: json.dumps({"weight_map": i | {NORM: i["model.embed_tokens.weight"]}}),
     f"tensor {NORM} is missing"),
    (lambda i: json.dumps({"weight_map": i | {NORM: "tokenizer.json"}}),
     "tokenizer.json: cannot be read"),
])
def test_a_damaged_index_is_named(tmp_path, index, message):
    folder, _ = make_folder(tmp_path, max_shard_size="200KB")
    path = tmp_path / INDEX
    path.write_text(index(json.loads(path.read_text())["weight_map"]))
    with pytest.raises(qerl.UserError, match=message) as error:
        qerl.load_model(folder)
    assert "\n" not in str(error.value)
    assert "fetch the model again" in str(error.value)


def test_compressed_tensors_folder_is_read_as_it_is(qwen, tmp_path):
    """NVFP4A16 made with the library: each layer with its own global scale, one left in 16 bit."""
    folder, theirs = qwen
    tensors = {}
    decoded = {}
    for name, tensor in theirs.state_dict().items():
        if name.endswith("_proj.weight") and name != DOWN:
            state, decoded[name] = compressed_tensors_nvfp4(tensor)
            prefix = name.removesuffix("weight")
            tensors.update({prefix + k: v for k, v in state.items() if k.startswith("weight_")})
        elif name != "lm_head.weight":
            tensors[name] = decoded[name] = tensor

    def packed(config):
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    break_tensor(folder, tmp_path, lambda t: t.clear() or t.update(tensors), packed)
    model = qerl.load_model(str(tmp_path))
    q = tensors["model.layers.0.self_attn.q_proj.weight_packed"]
    codes, _, global_scale = model.blocks[0].attention.qkv.weight.parts
    assert torch.equal(codes[:len(q)], q)
    assert len(global_scale.unique()) == 3
    assert model.blocks[1].mlp.down.weight.format is qerl.FORMATS["bf16"]
    library = transformers.AutoModelForCausalLM.from_config(theirs.config, dtype=torch.float32)
    library.load_state_dict({k: v.float() for k, v in decoded.items()}, strict=False)
    with torch.no_grad():
        # The library decodes in 16 bit.
        assert relative(model(TOKENS), library.eval()(TOKENS).logits) < 5e-3


def break_tensor(folder, tmp_path, edit, config_edit=None):
    """A copy of a model folder in tmp_path, with its tensors and its config edited."""
    tensors = load_file(f"{folder}/model.safetensors")
    edit(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with open(f"{folder}/config.json") as f:
        config = json.load(f)
    if config_edit:
        config_edit(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def packed_layer(tensors, part=0, edit=lambda t: t, names=(GATE, UP)):
    """Store layers that are stacked as NVFP4, and edit one of the three parts of each."""
    for name in names:
        parts = list(qerl.quantize_nvfp4(tensors.pop(name)))
        parts[part] = edit(parts[part])
        tensors.update(zip((f"{name}_packed", f"{name}_scale", f"{name}_global_scale"), parts))


def first_negative(part):
    values = part.float()
    values.view(-1)[0] *= -1
    return values.to(part.dtype)


def refused(folder, message):
    """qerl.load_model refuses a folder with one line."""
    with pytest.raises(qerl.UserError, match=message) as error:
        qerl.load_model(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("edit,message", [
    (lambda t: t[UP].view(-1)[7].fill_(math.nan), f"tensor {UP} holds NaN"),
    (lambda t: t[UP].view(-1)[7].fill_(-math.inf), f"tensor {UP} holds NaN, infinity"),
    (lambda t: t[UP].view(-1)[7].fill_(1e30), f"tensor {UP} holds NaN, infinity, a number above"),
    (lambda t: t[UP].zero_(), f"tensor {UP} holds .* zeros alone"),
    (lambda t: t[NORM].zero_(), f"tensor {NORM} holds .* zeros alone"),
    (lambda t: t.pop(UP), f"tensor {UP} is missing"),
    (lambda t: t.update({UP: t[UP][:, :64]}), rf"tensor {UP} is .*\[192, 64\].*\[192, 128\]"),
    (lambda t: t.update({UP: t[UP].to(torch.int8)}), f"tensor {UP} is torch.int8"),
    (lambda t: t.update({NORM: t[NORM].to(torch.float8_e5m2)}), f"tensor {NORM} is torch.float8"),
    (lambda t: packed_layer(t, 0, torch.Tensor.float), "weight_packed is torch.float32"),
    (lambda t: packed_layer(t, 0, torch.zeros_like), "weight_packed holds .* zeros alone"),
    (lambda t: packed_layer(t, 1, torch.Tensor.float), "weight_scale is torch.float32"),
    (lambda t: packed_layer(t, 1, first_negative), "block scales are at least 0"),
    (lambda t: packed_layer(t, 2, first_negative), "block scales are at least 0"),
    (lambda t: packed_layer(t, 2, lambda scale: scale * 1e-30), "global scale is above 1e-9"),
    (lambda t: packed_layer(t, names=[UP]), f"{GATE[:-7]}, {UP[:-7]}: some are in 4 bits"),
    *[(lambda t, name=name: t.update({name: torch.ones(128)}),
       f"tensor {name} is not one that config.json asks for")
      for name in (UP.replace("weight", "bias"), "lm_head.bias", "model.norm.bias",
                   "model.layers.0.self_attn.q_norm.weight", f"{UP}_packed_too")],
    (lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].flip(0)}),
     "lm_head.weight is not one that config.json asks for"),
])
def test_unusable_tensors_are_named(qwen, tmp_path, edit, message):
    refused(break_tensor(qwen[0], tmp_path, edit), message)


STORED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
ROTATED = STORED | {"transform_config": {"config_groups": {"R4": {
    "type": "hadamard", "apply": [{"location": "input", "targets": ["re:.*down_proj$"]}]}}}}


@pytest.mark.parametrize("config,message", [
    (dict(model_type="gpt2"), "architecture gpt2, which is not supported"),
    (dict(model_type="no-such"), "config.json cannot be used"),
    (dict(quantization_config={"quant_method": "gptq"}), "quantisation gptq"),
    (dict(quantization_config=ROTATED), "transform_config"),
    (dict(use_sliding_window=True, sliding_window=8), "sliding-window"),
    (dict(hidden_act="gelu"), "activation gelu"),
    (dict(num_hidden_layers=1, layer_types=["full_attention"]),
     "model.layers.1.*is not one that config.json asks for"),
])
def test_unusable_configs_are_named(qwen, tmp_path, config, message):
    refused(break_tensor(qwen[0], tmp_path, lambda t: None, lambda c: c.update(config)), message)


def test_features_that_no_block_divides_are_named(qwen, tmp_path):
    def widen(tensors):
        for name, tensor in tensors.items():
            if "gate_proj" in name or "up_proj" in name:
                tensors[name] = F.pad(tensor, (0, 0, 0, 8))
    folder = break_tensor(qwen[0], tmp_path, widen, lambda c: c.update(intermediate_size=200))
    refused(folder, "down_proj has 200 input features, not divisible by nvfp4's block of 16")


def test_tensors_that_change_nothing_may_be_there(qwen, tmp_path):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        for name in ("self_attn.rotary_emb.inv_freq", "self_attn.k_scale",
                     "mlp.up_proj.input_global_scale"):
            tensors[f"model.layers.0.{name}"] = torch.ones(1)
    assert equals(break_tensor(qwen[0], tmp_path, add), qwen[0])


def test_a_folder_without_a_config_is_named(tmp_path):
    refused(str(tmp_path), "config.json cannot be used")


def test_pickles_are_never_loaded(qwen, tmp_path):
    shutil.copy(f"{qwen[0]}/config.json", tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    refused(str(tmp_path), "never loaded")
