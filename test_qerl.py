"""What qerl.py has to do, section by section, against oracles that no one here wrote.

They are transformers, compressed-tensors, bitsandbytes and TRL; where there is none, figures by hand.

    python -m pytest -n auto                          all tests; those marked `gpu` skip without a GPU
    python -m pytest test_qerl.py                     these alone
    TRITON_INTERPRET=1 python -m pytest -k kernel     the kernels in Triton's interpreter, on a CPU
"""
import copy
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
from torch.testing import assert_close

import qerl

HERE = os.path.dirname(os.path.abspath(__file__))
CUDA = torch.cuda.is_available()
KERNEL_DEVICE = "cuda" if CUDA else "cpu"
gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
runs_kernels = pytest.mark.skipif(
    qerl.kernels is None or not (CUDA or qerl.kernels.INTERPRETED),
    reason="needs a GPU or TRITON_INTERPRET=1")

SIZES = dict(
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=262,
    max_position_embeddings=512,
    eos_token_id=256,
    bos_token_id=257,
    pad_token_id=256,
)
WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 512}
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=128,
)
CONFIGS = {
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=48, rope_parameters=YARN),
    "llama": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters=LLAMA3_ROPE, attention_bias=True, mlp_bias=True),
    "wide": lambda: transformers.Qwen2Config(**WIDE, tie_word_embeddings=True),
}
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17]]
TWICE = [prompt for prompt in PROMPTS for _ in range(2)]
TOKENS = torch.arange(60).view(2, 30)
NEAR = dict(rtol=1e-4, atol=1e-4)


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
    """(folder, transformers' model) of each architecture."""
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


def gradient_of(model, loss):
    model.zero_grad()
    loss.backward()
    return gradient(model)


def sample_two_each(model):
    """A Rollout of two completions for each of PROMPTS, of which some end early."""
    return qerl.generate(model, PROMPTS, 16, group_size=2, temperature=0.7, eos=range(20), slots=5,
                         generator=seeded(1))


@pytest.fixture
def sampled(qwen):
    """(model, its rollout)"""
    model = with_lora(qwen[0])
    return model, sample_two_each(model)


def scored(model, rollout, **options):
    """qerl.token_logprobs of sample_two_each."""
    return qerl.token_logprobs(model, TWICE, rollout.tokens, rollout.length, 0.7, **options)


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

HALFWAY = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
WEIGHTS = {
    "gaussian": lambda: torch.randn(48, 192),
    "odd rows": lambda: torch.randn(37, 320) * 0.02,
    "zeros": lambda: torch.zeros(5, 64),
    "zero blocks": lambda: torch.randn(6, 128) * (torch.arange(128) // 64),
    "wide range": lambda: torch.randn(16, 128) * 10.0 ** torch.randint(-6, 4, (16, 128)),
    "ties": lambda: torch.cat([HALFWAY, -HALFWAY]).repeat(4, 4),
}


def compressed_tensors(weight, format):
    """(packed bytes and scales by name, decompressed weight), all by the library."""
    from compressed_tensors import compressors
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    scheme = preset_name_to_scheme(f"{format}A16", ["Linear"])
    compressor = getattr(compressors, f"{format}PackedCompressor")
    global_scale = generate_gparam(weight.amin(), weight.amax()) if format == "NVFP4" else None
    blocks = weight.unflatten(1, (-1, scheme.weights.group_size))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
    state = compressor.compress(state, scheme)
    return state, compressor.decompress(state, scheme)["weight"]


def compressed_tensors_nvfp4(weight):
    return compressed_tensors(weight, "NVFP4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_fp4_bytes_equal_compressed_tensors(name, kind, dtype):
    torch.manual_seed(0)
    weight = WEIGHTS[kind]().to(dtype)
    format = qerl.FORMATS[name]
    packed, scale, global_scale = format.quantize(weight)
    state, decompressed = compressed_tensors(weight, name.upper())
    assert torch.equal(packed, state["weight_packed"])
    decoded = format.dequantize(packed, scale, global_scale, torch.float32)
    # The library decodes NVFP4 in 16 bit.
    assert_close(decoded, decompressed.float(), rtol=1e-2, atol=0)
    if name == "nvfp4":
        assert torch.equal(scale.view(torch.uint8), state["weight_scale"].view(torch.uint8))
        assert torch.equal(global_scale, state["weight_global_scale"])


def test_nvfp4_of_small_float16_weights():
    """Their global scale, 6 * 448 over the largest, is beyond float16."""
    weight = torch.randn(64, 128, generator=seeded(0)).mul(0.008).half()
    decoded = qerl.dequantize_nvfp4(*qerl.quantize_nvfp4(weight), torch.float32)
    assert relative(decoded, weight) < 0.1


@pytest.mark.parametrize("kind", WEIGHTS)
def test_nf4_equals_bitsandbytes(kind):
    import bitsandbytes.functional as bnb
    torch.manual_seed(0)
    weight = WEIGHTS[kind]()
    packed, absmax, _ = qerl.quantize_nf4(weight)
    theirs, state = bnb.quantize_nf4(weight, blocksize=64)
    assert torch.equal(absmax.flatten(), state.absmax)
    decoded = qerl.dequantize_nf4(packed, absmax, None, torch.float32)
    assert_close(decoded, bnb.dequantize_nf4(theirs, state))


# --------------------------------------------------------------------------------------------------
# 2. Quantised linear with LoRA

def stacked_layer(weights, dense, bias=None, **lora):
    """A QuantLinear of dense layers over one input, each quantised by itself."""
    format = qerl.FORMATS[weights]
    parts = []
    for weight in dense:
        packed, scale, global_scale = format.quantize(weight)
        parts.append((packed, scale, global_scale.expand(len(weight), 1)))
    weight = qerl.PackedWeight(format, *(torch.cat(part) for part in zip(*parts)))
    sizes = [len(w) for w in dense]
    names = list("abc"[:len(sizes)])
    return qerl.QuantLinear(names, sizes, dense[0].shape[1], weight, bias, **lora)


@pytest.mark.parametrize("first,second", [(48, 16), (160, 96)])
def test_linear_and_its_gradients(first, second):
    """Eq. 2 of two stacked layers, together narrower and wider than their input."""
    torch.manual_seed(0)
    dense = [torch.randn(first, 128), torch.randn(second, 128)]
    bias = torch.randn(first + second)
    layer = stacked_layer("nvfp4", dense, bias, lora_rank=4, lora_alpha=8)
    x = torch.randn(3, 5, 128, requires_grad=True)
    A, B = layer.lora_A, layer.lora_B
    B.data.normal_()
    delta = torch.cat([B[:first] @ A[:4], B[first:] @ A[4:]])
    weight = layer.weight.dequantize(torch.float32) + 8 / 4 * delta
    expected = F.linear(x, weight, bias)
    y = layer(x)
    assert_close(y, expected, **NEAR)
    upstream = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, A, B], upstream)
    right = torch.autograd.grad(expected, [x, A, B], upstream)
    assert_close(found, right, rtol=1e-4, atol=1e-3)


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
        factor = norm.noisy_weight / norm.weight
    weight = qkv.weight.dequantize(torch.float32) * factor
    assert_close(noisy, F.linear(norm(x), weight, qkv.bias), **NEAR)


@pytest.mark.parametrize("name,channels", [
    ("qwen2", 2 * (128 + 128) + 128),
    ("qwen3", 2 * (128 + 48 + 48 + 128) + 128),
])
def test_noise_is_normal_around_every_scale_and_ends_with_the_rollout(tmp_path, name, channels):
    """w + sigma z with z ~ N(0, 1), whatever w is; Qwen3's q_norm and k_norm have it, too."""
    model = qerl.load_model(make_folder(tmp_path, name)[0], lora_rank=2, train_norms=True)
    for norm in scales(model):
        norm.weight.data = torch.linspace(-1, 9, len(norm.weight))     # not as loaded
    weight = torch.cat([norm.weight.detach() for norm in scales(model)])

    def draw(generator):
        with pytest.raises(KeyError), qerl.adaptive_quantization_noise(model, 0.02, generator):
            noisy = torch.cat([norm.noisy_weight for norm in scales(model)])
            raise KeyError                             # which ends the noise like all else
        assert all(norm.noisy_weight is None for norm in scales(model))
        return (noisy - weight) / 0.02

    generator = seeded(0)
    z = torch.stack([draw(generator) for _ in range(400)])
    assert z.shape == (400, channels)
    assert not z.requires_grad
    assert torch.equal(draw(seeded(0)), z[0])
    assert len(z[0].unique()) > 0.98 * channels        # no norm and no channel shares another's
    # Six standard errors are allowed.
    assert z.mean(0).abs().max() < 6 / 400 ** 0.5
    assert (z.std(0) - 1).abs().max() < 6 / 800 ** 0.5
    assert abs((z ** 4).mean() - 3) < 6 * (96 / z.numel()) ** 0.5
    for dim in (0, 1):                                 # of one draw or channel and the next
        product = z * z.roll(1, dim)
        assert product.mean().abs() < 6 / z.numel() ** 0.5


@pytest.mark.parametrize("schedule,expected", [
    ("exponential", [16, 8, 4, 2, 1]),                                                   # Eq. 8
    ("linear", [16, 12.25, 8.5, 4.75, 1]),
    ("cosine", [16, 13.803, 8.5, 3.197, 1]),
    ("logarithmic", [16, 9.540, 5.761, 3.080, 1]),
])
def test_noise_schedules(schedule, expected):
    """Five noisy stages from 16 to 1, two steps each, after one without noise (Figure 9)."""
    def sigmas(steps, *stages):
        return [qerl.noise_sigma(step, steps, *stages, schedule=schedule) for step in range(steps)]

    sigma = sigmas(12, 6, 16, 1)
    assert sigma[::2] == sigma[1::2] == pytest.approx([0, *expected], rel=1e-3)
    assert sigmas(3, 1) == [0, 0, 0]
    assert sigmas(2, 2, 0.1, 0.01) == [0, pytest.approx(0.1)]
    with pytest.raises(KeyError):
        qerl.noise_sigma(0, 12, schedule="quadratic")


# --------------------------------------------------------------------------------------------------
# 4. Transformer

@torch.no_grad()
def test_logits_equal_transformers(family):
    folder, theirs = family
    tokens = torch.randint(0, 262, (3, 150))
    ours = qerl.load_model(folder, weights="bf16", lora_rank=2)
    assert relative(ours(tokens), theirs(tokens).logits) < 1e-4


def quantize_int8(weight):
    """A format of a reader's own takes two functions; here one scale a row."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale, torch.ones(1)


def dequantize_int8(codes, scale, _global_scale, dtype):
    return (codes * scale).to(dtype)


INT8 = qerl.Format(quantize_int8, dequantize_int8, block=1)


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "nf4", "int8"])
@torch.no_grad()
def test_quantised_model_equals_transformers_with_the_decoded_weights(qwen, monkeypatch, weights):
    folder, theirs = qwen
    monkeypatch.setitem(qerl.FORMATS, "int8", INT8)
    format = qerl.FORMATS[weights]
    decoded = copy.deepcopy(theirs)
    for name, weight in decoded.named_parameters():
        if name.endswith("_proj.weight"):
            weight.copy_(format.dequantize(*format.quantize(weight), torch.float32))
    assert relative(qerl.load_model(folder, weights)(TOKENS), decoded(TOKENS).logits) < 1e-4


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_blocks_give_the_same_gradient(qwen, monkeypatch, recompute):
    """Each weight is decoded once forward and once backward, and none is kept between the two."""
    model = with_lora(qwen[0])
    expected = gradient_of(model, model(TOKENS).square().mean())
    if recompute:
        model.recompute_in_backward()
    decoded = []
    dequantize = qerl.PackedWeight.dequantize

    def recorded(packed, dtype):
        weight = dequantize(packed, dtype)
        decoded.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(qerl.PackedWeight, "dequantize", recorded)
    loss = model(TOKENS).square().mean()
    layers = len(model.quantized_layers())
    assert [weight() for weight in decoded] == [None] * layers
    assert torch.equal(gradient_of(model, loss), expected)
    assert len(decoded) == 2 * layers


def test_reference_policy_is_the_model_without_adapters(qwen):
    plain = qerl.load_model(qwen[0])(TOKENS)
    fresh = qerl.load_model(qwen[0], lora_rank=4)
    assert torch.equal(fresh(TOKENS), plain)           # where training starts
    tuned = with_lora(qwen[0], train_norms=True)
    with qerl.adapters_off(tuned):
        assert torch.equal(tuned(TOKENS), plain)
    assert not torch.allclose(tuned(TOKENS), plain)


# --------------------------------------------------------------------------------------------------
# 5. Sampler

@pytest.mark.parametrize("options", [dict(temperature=0, slots=3), dict(top_p=1e-6)])
def test_greedy_completions_equal_transformers(family, options):
    """Two of each prompt; with 3 slots a prompt waits until two of them are idle."""
    folder, theirs = family
    model = qerl.load_model(folder, weights="bf16")
    rollout = qerl.generate(model, PROMPTS, 12, group_size=2, **options)
    assert not rollout.finished.any()
    for prompt, completion in zip(TWICE, rollout.tokens.tolist()):
        line = torch.tensor([prompt])
        expected = theirs.generate(
            line, attention_mask=torch.ones_like(line), max_new_tokens=12, do_sample=False,
            eos_token_id=None)
        assert prompt + completion == expected[0].tolist()


def logits_after(model, prompt, completion):
    """logits [n, V] of which the n tokens of a completion are drawn."""
    line = torch.tensor([[*prompt, *completion]])
    # Those at a token are of the next one: the prompt's last gives the completion's first.
    return model(line)[0, len(prompt) - 1:-1]


@torch.no_grad()
def test_a_completion_ends_at_its_first_eos_or_at_the_limit(sampled):
    """And the entropy at each of its tokens is the policy's, at the sampling temperature."""
    model, rollout = sampled
    assert rollout.finished.any()
    for i, prompt in enumerate(TWICE):
        n = int(rollout.length[i])
        finished = bool(rollout.finished[i])
        completion = rollout.tokens[i, :n].tolist()
        assert [token < 20 for token in completion] == [False] * (n - 1) + [finished]
        assert finished or n == 16
        policy = torch.distributions.Categorical(
            logits=logits_after(model, prompt, completion) / 0.7)
        assert_close(rollout.entropy[i, :n], policy.entropy(), **NEAR)


@pytest.mark.parametrize("temperature,top_p,expected", [
    (1.0, 1.0, [0.644, 0.237, 0.087, 0.032, 0]),
    (0.5, 1.0, [0.865, 0.117, 0.016, 0.002, 0]),
    (1.0, 0.7, [0.731, 0.269, 0, 0, 0]),
])
def test_samples_follow_the_distribution(temperature, top_p, expected):
    """And their log-probabilities are of all tokens, before top-p cuts some."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -20.0]).repeat(40000, 1)
    token, logprob, _ = qerl.sample(logits, temperature, top_p, seeded(0))
    frequency = token.bincount(minlength=5) / 40000
    assert_close(frequency, torch.tensor(expected), rtol=0, atol=0.01)
    assert_close(logprob, (logits / temperature).log_softmax(-1)[range(40000), token])


@pytest.mark.parametrize("top_p,kept", [(0.5, [2]), (0.51, [0, 2]), (0.81, [0, 2, 3])])
def test_nucleus_is_the_smallest_set_that_reaches_top_p(top_p, kept):
    probs = torch.tensor([[0.3, 0.05, 0.5, 0.15]])
    cut = qerl.nucleus(probs, top_p)[0]
    assert cut.nonzero()[:, 0].tolist() == kept
    assert torch.equal(cut[kept], probs[0, kept])


@pytest.mark.parametrize("name,value", [
    ("top_p", 0.0),
    ("top_p", math.nan),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("group_size", 0),
    ("max_new_tokens", 0),
    ("prompts", []),
    ("prompts", [[1], []]),
])
def test_generate_names_an_argument_out_of_range(qwen, name, value):
    model = qerl.load_model(qwen[0])
    with pytest.raises(ValueError, match=f"generate: {name} is out of range"):
        qerl.generate(model, **{"prompts": [[1]], "max_new_tokens": 2, name: value})


def test_the_cache_in_pieces_and_fewer_slots_at_the_end_change_nothing(qwen, monkeypatch):
    """40 slots, of which half are given up once as many are idle, against 4 and a single piece."""
    seen = []

    class Watched(qerl.Sampler):
        def step(self):
            super().step()
            seen.append((len(self.completion), len(self.cache.pieces[0])))

    model = with_lora(qwen[0])
    prompts = [[i, 3, 2 * i + 1] * (1 + i % 5) for i in range(40)]
    # 24 completions or more end at their fourth token or before.
    eos = set(qerl.generate(model, prompts, 24, temperature=0).tokens[:24, 3].tolist())

    def rollout(slots):
        seen.clear()
        return qerl.generate(
            model, prompts, 24, temperature=0, eos=eos, slots=slots, sampler_class=Watched)

    expected = rollout(slots=4)
    assert set(seen) == {(4, 1)}
    monkeypatch.setattr(qerl, "CACHE_PIECE", 8)
    found = rollout(slots=40)
    assert seen[0] == (40, 2)                          # the longest prompt has 15 tokens
    assert seen[-1] == (20, math.ceil((15 + 24) / 8))
    for name, tensor in vars(expected).items():
        assert_close(getattr(found, name), tensor, **NEAR)


def test_no_completion_is_lost_with_an_odd_number_of_slots(qwen):
    """33 slots, of which 16 idle at once: 17 completions cannot go on in 16."""
    class Cut(qerl.Sampler):
        def __init__(self, *args):
            super().__init__(*args)
            self.limit[:16] = 2

    model = qerl.load_model(qwen[0])
    rollout = qerl.generate(model, [[i, 3] for i in range(33)], 8, slots=33, sampler_class=Cut)
    assert rollout.length.tolist() == [2] * 16 + [8] * 17


# --------------------------------------------------------------------------------------------------
# 6. Objectives

def test_advantages_are_group_relative():
    """RLOO compares with the mean of the others."""
    rewards = torch.tensor([[1.0, 0, 0, 1]])
    centred = rewards - 0.5
    assert_close(qerl.group_advantages(rewards), centred / (3 ** -0.5 + 1e-4))
    assert_close(qerl.group_advantages(rewards, "dr-grpo"), centred)
    assert_close(qerl.group_advantages(rewards, "rloo"), rewards - (2 - rewards) / 3)
    # Exactly 0, whatever the mean rounds to.
    assert (qerl.group_advantages(torch.full((1, 10), 0.1)) == 0).all()


def test_token_weights_by_hand():
    """Four tokens, two tokens, and a completion of which none counts."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    own_length = torch.tensor([[4], [2], [1]])
    assert_close(qerl.token_weights(mask, "grpo"), mask / own_length / 3)
    assert_close(qerl.token_weights(mask, "dapo"), mask / 6)
    assert_close(qerl.token_weights(mask, "dr-grpo", limit=10), mask / 10 / 3)
    assert (qerl.token_weights(mask[2:], "dapo") == 0).all()           # and not NaN


def test_kl_by_hand():
    """e^x - x - 1 with x = log 2, for π_ref twice π_θ; importance weighs the gain alone."""
    logprobs = torch.tensor([[-2.0]], requires_grad=True)
    old = logprobs.detach()
    likelier = old + math.log(2)
    loss, kl = qerl.policy_loss(
        logprobs, old, torch.tensor([3.0]), torch.tensor([[0.5]]), ref_logprobs=likelier, beta=0.1,
        rollout_logprobs=likelier, tis=2.0)
    loss.backward()
    gain = 3 / 2
    expected = 1 - math.log(2)
    assert kl.item() == pytest.approx(expected / 2)
    assert loss.item() == pytest.approx((0.1 * expected - gain) / 2)
    assert logprobs.grad.item() == pytest.approx((-0.1 - gain) / 2)


@pytest.mark.parametrize("log_ratio,advantage", [
    (99.9, 1.0),
    (200.0, 1.0),
    (200.0, 0.0),
    (-99.9, -1.0),
])
def test_a_token_that_is_clipped_has_gradient_zero_whatever_the_ratio(log_ratio, advantage):
    """Where the ratio is infinite or 0, and the KL's exponential infinite; the last is masked."""
    logprobs = torch.tensor([[-0.1, -1.0, -0.1]], requires_grad=True)
    away = torch.tensor([[log_ratio, 0.0, log_ratio]])
    loss, kl = qerl.policy_loss(
        logprobs, logprobs.detach() - away, torch.tensor([advantage]),
        torch.tensor([[0.5, 0.5, 0.0]]), ref_logprobs=logprobs.detach() + away, beta=0.1)
    loss.backward()
    assert logprobs.grad.tolist() == [[0.0, -0.5 * advantage, 0.0]]
    assert loss.isfinite()
    assert kl.isfinite()


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
    trainer = trl_trainer(qwen[0], tmp_path, beta=beta, max_completion_length=20,
                          temperature=temperature, **{"epsilon_high": 0.28} | options)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    torch.manual_seed(0)
    prompts = [[5, 6, 7, 8]] * 4
    length = torch.tensor([9, 4, 7, 1])
    mask = qerl.length_mask(length, 9)
    completions = torch.randint(20, 250, (4, 9)) * mask
    ours = qerl.load_model(qwen[0], weights="bf16", lora_rank=2, train_norms=True)
    logprobs = qerl.token_logprobs(ours, prompts, completions, length, temperature)
    # So far apart that some ratios are clipped.
    old, reference = ((logprobs.detach() + 0.3 * torch.randn(4, 9)) * mask for _ in range(2))
    advantages = torch.tensor([1.1, -1.0, -0.9, 0.8])
    weights = qerl.token_weights(mask, algorithm, 20)
    clip_low = 1.0 if algorithm == "cispo" else 0.2
    loss, _ = qerl.policy_loss(
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
        their_norm = trainer.model.get_parameter(f"{norm.name}.weight")
        assert relative(norm.weight.grad, their_norm.grad) < 1e-3


def test_mismatch_and_its_correction_by_hand():
    """Ratios π_old / π_rollout of 2, 1/3 and 1, and padding that counts nowhere."""
    rollout = torch.full((2, 2), -1.5)
    old = rollout + torch.tensor([[2.0, 1 / 3], [1.0, 1e9]]).log()
    mask = torch.tensor([[True, True], [True, False]])
    expected = (2 - 1 - math.log(2) + 1 / 3 - 1 + math.log(3)) / 3
    assert qerl.mismatch(old, rollout, mask) == pytest.approx((expected, 3), rel=1e-5)
    weights = qerl.truncated_importance(old, rollout, 1.5)
    assert_close(weights, torch.tensor([[1.5, 1 / 3], [1.0, 1.5]]))


# --------------------------------------------------------------------------------------------------
# 7. Log-probabilities of a batch

def one_by_one(model, prompts, completions, length, temperature):
    """What token_logprobs gives, a completion at a time."""
    rows = []
    for prompt, completion, n in zip(prompts, completions, length.tolist()):
        tokens = completion[:n]
        logprobs = (logits_after(model, prompt, tokens) / temperature).log_softmax(-1)
        rows.append(F.pad(logprobs[range(n), tokens], (0, len(completion) - n)))
    return torch.stack(rows)


def test_training_logprobs_equal_the_samplers(sampled):
    """And their gradients those of a completion at a time, with padding."""
    model, rollout = sampled
    logprobs = scored(model, rollout, chunk=7)
    assert_close(logprobs, rollout.logprobs, **NEAR)
    kl, ratio = qerl.mismatch(logprobs, rollout.logprobs, rollout.mask)
    assert abs(kl) < 1e-6
    assert 1 <= ratio < 1.001
    expected = one_by_one(model, TWICE, rollout.tokens, rollout.length, 0.7)
    assert_close(gradient_of(model, logprobs.square().sum()),
                 gradient_of(model, expected.square().sum()), rtol=1e-4, atol=1e-5)


def test_noise_shows_as_mismatch(sampled):
    """The sampler reads the noisy scales."""
    model, _ = sampled
    with qerl.adaptive_quantization_noise(model, 0.05, seeded(0)):
        rollout = sample_two_each(model)
    kl, ratio = qerl.mismatch(scored(model, rollout), rollout.logprobs, rollout.mask)
    assert kl > 1e-4
    assert ratio > 1.05


def test_packing_holds_each_prompt_once():
    """The line "p q r a, b c" of two completions, and "s d" of the prompt s, which has one."""
    packing = qerl.pack([[1, 2, 3], [1, 2, 3], [4]], torch.tensor([1, 2, 1]))
    assert packing.sizes == [3, 1, 1, 2, 1]            # p q r, s, a, b c, d
    assert packing.owner == [0, 0, 1]
    assert packing.ends.tolist() == [0, 3, 4, 5, 7, 8]
    assert packing.group_ends.tolist() == [0, 3, 4]


def test_output_layer_runs_in_chunks(sampled, monkeypatch):
    """Logits of more than `chunk` tokens never exist, and each is computed once."""
    model, rollout = sampled
    rows = []
    token_logprob = qerl.token_logprob

    def recorded(logits, *args):
        rows.append(len(logits))
        return token_logprob(logits, *args)

    monkeypatch.setattr(qerl, "token_logprob", recorded)
    gradient_of(model, scored(model, rollout, chunk=8).sum())
    assert max(rows) == 8
    assert sum(rows) == rollout.length.sum()


# --------------------------------------------------------------------------------------------------
# 8. Loading

INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
STORED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}


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


def refused(folder, message):
    """qerl.load_model refuses a folder with one line."""
    with pytest.raises(qerl.UserError, match=message) as error:
        qerl.load_model(folder)
    assert "\n" not in str(error.value)


def equals(folder, other):
    return torch.equal(qerl.load_model(folder)(TOKENS), qerl.load_model(other)(TOKENS))


@pytest.mark.parametrize("sharding", [{}, dict(max_shard_size="200KB")])
def test_a_tensor_comes_from_the_file_that_the_index_says(qwen, tmp_path, sharding):
    """In every other file, a shard or one that does not belong here, the tensor is wrong."""
    folder, theirs = make_folder(tmp_path, **sharding)
    state = theirs.state_dict()
    wrong = {name: torch.full_like(state[name], 9) for name in state if name != "lm_head.weight"}
    for shard in tmp_path.glob("*.safetensors"):
        save_file(wrong | load_file(shard), shard)
    for stray in ("a", "z", *["model"] * len(sharding)):
        save_file(wrong, tmp_path / f"{stray}.safetensors")
    assert equals(folder, qwen[0])


@pytest.mark.parametrize("damage,message", [
    (lambda index: index | {NORM: "gone.safetensors"}, "gone.safetensors: cannot be read"),
    (lambda index: index | {NORM: index[EMBEDDING]}, f"tensor {NORM} is missing"),
])
def test_a_damaged_index_is_named(tmp_path, damage, message):
    folder, _ = make_folder(tmp_path, max_shard_size="200KB")
    path = tmp_path / INDEX
    index = json.loads(path.read_text())["weight_map"]
    path.write_text(json.dumps({"weight_map": damage(index)}))
    refused(folder, f"{message}.*fetch the model again")


def test_compressed_tensors_folder_is_read_as_it_is(qwen, tmp_path):
    """NVFP4A16 made with the library: each layer with its own global scale, one left in 16 bit."""
    folder, theirs = qwen
    decoded = copy.deepcopy(theirs)

    def compress(tensors):
        for name, weight in decoded.named_parameters():
            if name.endswith("_proj.weight") and name != DOWN:
                state, weight.data = compressed_tensors_nvfp4(tensors.pop(name))
                prefix = name.removesuffix("weight")
                tensors.update({prefix + part: state[part] for part in state if part != "weight"})

    break_tensor(folder, tmp_path, compress, lambda c: c.update(quantization_config=STORED))
    model = qerl.load_model(str(tmp_path))
    codes, _, _ = model.blocks[0].attention.qkv.weight.parts
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(codes[:128], stored["model.layers.0.self_attn.q_proj.weight_packed"])
    assert model.blocks[1].mlp.down.weight.format is qerl.FORMATS["bf16"]
    with torch.no_grad():
        # The library decodes in 16 bit.
        assert relative(model(TOKENS), decoded.float()(TOKENS).logits) < 5e-3


@pytest.mark.parametrize("name,edit,message", [
    (UP, lambda weight: weight / 0, "holds NaN, infinity"),
    (UP, lambda weight: weight * 1e30, "holds .* a number above 1e"),
    (NORM, torch.zeros_like, "holds .* zeros alone"),
    (UP, lambda weight: weight[:, :64], r"is .*\[192, 64\].*\[192, 128\]"),
    (UP, torch.Tensor.char, "is torch.int8"),
])
def test_a_damaged_tensor_is_named(qwen, tmp_path, name, edit, message):
    def damage(tensors):
        tensors[name] = edit(tensors[name])

    refused(break_tensor(qwen[0], tmp_path, damage), f"tensor {name} {message}")


def negative(part):
    return (-part.float()).to(part.dtype)


@pytest.mark.parametrize("part,edit,message", [
    (0, torch.Tensor.float, "weight_packed is torch.float32"),
    (1, torch.Tensor.float, "weight_scale is torch.float32"),
    (1, negative, "block scales are at least 0"),
    (2, negative, "global scale is above 1e-9"),
    (2, lambda scale: scale * 1e-30, "global scale is above 1e-9"),
])
def test_impossible_nvfp4_is_named(qwen, tmp_path, part, edit, message):
    refused(break_tensor(qwen[0], tmp_path, lambda t: packed_layer(t, part, edit)), message)


def test_a_stack_of_which_one_layer_is_in_4_bits_is_refused(qwen, tmp_path):
    folder = break_tensor(qwen[0], tmp_path, lambda t: packed_layer(t, names=[UP]))
    refused(folder, f"{GATE[:-7]}, {UP[:-7]}: some are in 4 bits and some are not")


@pytest.mark.parametrize("name", [
    UP.replace("weight", "bias"),
    "lm_head.bias",
    "model.norm.bias",
    "lm_head.weight",
    "model.layers.0.self_attn.q_norm.weight",
])
def test_a_tensor_too_many_is_named(qwen, tmp_path, name):
    """The output layer is the embedding here, which an lm_head.weight may only repeat."""
    folder = break_tensor(qwen[0], tmp_path, lambda t: t.update({name: torch.ones(128)}))
    refused(folder, f"tensor {name} is not one that config.json asks for")


def test_tensors_that_change_nothing_may_be_there(qwen, tmp_path):
    def add(tensors):
        tensors["lm_head.weight"] = tensors[EMBEDDING].clone()
        for name in ("self_attn.rotary_emb.inv_freq", "self_attn.k_scale"):
            tensors[f"model.layers.0.{name}"] = torch.ones(1)

    assert equals(break_tensor(qwen[0], tmp_path, add), qwen[0])


ROTATED = {"apply": [{"location": "input", "targets": ["re:.*down_proj$"]}], "type": "hadamard"}


@pytest.mark.parametrize("config,message", [
    (dict(model_type="gpt2"), "architecture gpt2, which is not supported"),
    (dict(quantization_config={"quant_method": "gptq"}), "quantisation gptq"),
    (dict(quantization_config={**STORED, "transform_config": ROTATED}), "transform_config"),
    (dict(use_sliding_window=True, sliding_window=8), "sliding-window"),
    (dict(hidden_act="gelu"), "activation gelu"),
])
def test_unusable_configs_are_named(qwen, tmp_path, config, message):
    refused(break_tensor(qwen[0], tmp_path, lambda t: None, lambda c: c.update(config)), message)


def test_features_that_no_block_divides_are_named(tmp_path, monkeypatch):
    sizes = {**SIZES, "intermediate_size": 200}
    monkeypatch.setitem(CONFIGS, "odd", lambda: transformers.Qwen2Config(**sizes))
    folder, _ = make_folder(tmp_path, "odd")
    refused(folder, "down_proj has 200 input features, not divisible by nvfp4's block of 16")


def test_pickles_are_never_loaded(qwen, tmp_path):
    refused(str(tmp_path), "config.json cannot be used")
    shutil.copy(f"{qwen[0]}/config.json", tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    refused(str(tmp_path), "never loaded")
