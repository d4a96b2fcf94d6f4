"""What qerl.py has to do, section by section, against oracles that no one here wrote.

They are transformers, compressed-tensors, bitsandbytes and TRL; elsewhere figures are by hand.

    python -m pytest -n auto                          all tests; those marked `gpu` need a GPU
    python -m pytest test_qerl.py                     these alone
    TRITON_INTERPRET=1 python -m pytest -k kernel     the kernels in Triton's interpreter, on a CPU
"""
import copy
import json
import math
import os
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from unittest import mock

if "PYTEST_XDIST_WORKER" in os.environ:        # of several processes each takes one thread
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close

import qerl
from harness import fast
from harness.errors import UserError

HERE = os.path.dirname(os.path.abspath(__file__))
CUDA = torch.cuda.is_available()
KERNEL_DEVICE = "cuda" if CUDA else "cpu"
gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
runs_kernels = pytest.mark.skipif(
    fast.kernels is None or not (CUDA or fast.kernels.INTERPRETED),
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


@pytest.fixture(autouse=True)
def same_random_numbers():
    """In each test, whatever ran before it."""
    torch.manual_seed(0)


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
def made_qwen(tmp_path_factory):
    """(folder, transformers' model) of one of them."""
    return make_folder(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def qwen(made_qwen):
    """Its folder."""
    return made_qwen[0]


def with_lora(folder, **options):
    """A model whose LoRA is not zero, so that it matters."""
    torch.manual_seed(1)
    model = fast.load_model(folder, lora_rank=4, **options)
    for p in qerl.trainable(model).values():
        p.data += 0.05 * torch.randn_like(p)
    return model


@pytest.fixture
def model(qwen):
    """qwen with such a LoRA."""
    return with_lora(qwen)


def gradient(model):
    """The gradient of all that is trained, as one vector."""
    return torch.cat([p.grad.flatten() for p in qerl.trainable(model).values()])


def gradient_of(model, loss):
    model.zero_grad()
    loss.backward()
    return gradient(model)


def sample_two_each(model):
    """A Rollout of two completions for each of PROMPTS, of which some end early."""
    return fast.generate(model, PROMPTS, 16, group_size=2, temperature=0.7, eos=range(20), slots=5,
                         generator=seeded(1))


@pytest.fixture
def sampled(model):
    """(model, its rollout)"""
    return model, sample_two_each(model)


def scored(model, rollout, **options):
    """fast.token_logprobs of sample_two_each."""
    return fast.token_logprobs(model, TWICE, rollout.tokens, rollout.length, 0.7, **options)


BEFORE = """
import sys
sys.modules["fp4_kernels"] = None                      # not even one that is installed
import torch, qerl

model = fast.load_model(sys.argv[1], weights="nvfp4", lora_rank=4)
optimizer = torch.optim.AdamW(qerl.trainable(model).values(), lr=1e-2)
step, steps, prompts, eos = 1, 2, [[1, 2, 3], [4, 5]], {256}

def score(rollout):
    return (rollout.tokens < 128).float().mean(1).view(2, 8)
"""
AFTER = """
after = fast.token_logprobs(model, repeated, rollout.tokens, rollout.length)
print(sigma > 0, ((after - logprobs) * weights * advantages[:, None]).sum().item() > 0)
"""


def test_qerl_works_alone(qwen, tmp_path):
    """The README's step, in an empty folder and without kernels, is one that helps."""
    readme = Path(HERE, "README.md").read_text(encoding="utf-8")
    step, = re.findall(r"run by the tests -->\n```python\n(.*?)```", readme, re.DOTALL)
    shutil.copy(f"{HERE}/qerl.py", tmp_path)
    (tmp_path / "try.py").write_text(BEFORE + step + AFTER, encoding="utf-8")
    result = subprocess.run([sys.executable, "try.py", qwen], cwd=tmp_path, capture_output=True,
                            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, text=True)
    assert result.stdout.strip() == "True True", result.stderr


# --------------------------------------------------------------------------------------------------
# 1. Formats

HALFWAY = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
WEIGHTS = {
    "odd rows": lambda: torch.randn(37, 320) * 0.008,
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_fp4_bytes_equal_compressed_tensors(name, kind, dtype):
    """Float16 counts as float32: it cannot hold the global scale of small weights."""
    weight = WEIGHTS[kind]().to(dtype)
    packed, scale, global_scale = fast.FORMATS[name].quantize(weight)
    weight = weight.float() if dtype == torch.float16 else weight
    state, decompressed = compressed_tensors(weight, name.upper())
    assert packed.equal(state["weight_packed"])
    if name == "nvfp4":                                # the library's MXFP4 has other scales of zeros
        assert scale.view(torch.uint8).equal(state["weight_scale"].view(torch.uint8))
        assert global_scale.equal(state["weight_global_scale"])
    decoded = fast.FORMATS[name].dequantize(packed, scale, global_scale, torch.float32)
    # The library decodes NVFP4 in 16 bit.
    assert_close(decoded, decompressed.float(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_nf4_equals_bitsandbytes(kind):
    import bitsandbytes.functional as bnb
    weight = WEIGHTS[kind]()
    format = fast.FORMATS["nf4"]
    decoded = format.dequantize(*format.quantize(weight), torch.float32)
    assert_close(decoded, bnb.dequantize_nf4(*bnb.quantize_nf4(weight, blocksize=64)))


# --------------------------------------------------------------------------------------------------
# 2. Quantised linear with LoRA

def stacked_layer(weights, dense, bias=None, **lora):
    """A QuantLinear of dense layers over one input, each quantised by itself."""
    format = fast.FORMATS[weights]
    sizes = [len(weight) for weight in dense]
    packed, scale, global_scale = zip(*map(format.quantize, dense))
    global_scale = [one.expand(size, 1) for one, size in zip(global_scale, sizes)]
    weight = fast.PackedWeight(format, *map(torch.cat, (packed, scale, global_scale)))
    names = list("abc"[:len(sizes)])
    return fast.QuantLinear(names, sizes, dense[0].shape[1], weight, bias, **lora)


@pytest.mark.parametrize("first,second", [(48, 16), (160, 96)])
def test_linear_and_its_gradients(first, second):
    """Eq. 2 of two stacked layers, together narrower and wider than their input."""
    dense = [torch.randn(first, 128), torch.randn(second, 128)]
    bias = torch.randn(first + second)
    layer = stacked_layer("nvfp4", dense, bias, lora_rank=4, lora_alpha=8)
    x = torch.randn(3, 5, 128, requires_grad=True)
    A, B = layer.lora_A, layer.lora_B
    B.data.normal_()
    delta = torch.cat([B[:first] @ A[:4], B[first:] @ A[4:]])
    y = layer(x)
    expected = F.linear(x, layer.weight.dequantize(torch.float32) + 8 / 4 * delta, bias)
    assert_close(y, expected, **NEAR)
    upstream = torch.randn_like(y)
    found, right = (torch.autograd.grad(out, [x, A, B], upstream) for out in (y, expected))
    assert_close(found, right, rtol=1e-4, atol=1e-3)


# --------------------------------------------------------------------------------------------------
# 3. RMSNorm with Adaptive Quantization Noise

def scales(model):
    """All RMSNorms of a model."""
    return [m for m in model.modules() if isinstance(m, qerl.RMSNorm)]


def test_noise_equals_multiplicative_noise_on_weights():
    """Appendix G: w + Z is 1 + Z/w on the input channels of the layers that read the norm."""
    norm = qerl.RMSNorm("a norm", 1 + torch.rand(128), eps=1e-6)
    x = torch.randn(4, 128)
    weight = torch.randn(192, 128)
    with qerl.adaptive_quantization_noise(norm, 0.1, seeded(3)):
        noisy = norm(x) @ weight.T
        factor = norm.noisy_weight / norm.weight
    assert_close(noisy, norm(x) @ (weight * factor).T, **NEAR)


def test_noise_is_normal_around_every_scale_and_ends_with_the_rollout(family):
    """w + sigma z with z ~ N(0, 1), whatever w is; Qwen3's q_norm and k_norm have it, too."""
    folder, theirs = family
    channels = sum(p.numel() for name, p in theirs.named_parameters() if "norm" in name)
    model = fast.load_model(folder, train_norms=True)
    for norm in scales(model):
        norm.weight.data = torch.linspace(-1, 9, len(norm.weight))     # not as loaded

    def draw(generator):
        with pytest.raises(KeyError), qerl.adaptive_quantization_noise(model, 0.02, generator):
            z = torch.cat([(norm.noisy_weight - norm.weight) / 0.02 for norm in scales(model)])
            raise KeyError                             # which ends the noise like all else
        assert all(norm.noisy_weight is None for norm in scales(model))
        return z.detach()

    generator = seeded(0)
    z = torch.stack([draw(generator) for _ in range(100)])
    assert draw(seeded(0)).equal(z[0])
    assert z.shape == (100, channels)
    assert len(z[0].unique()) > 0.98 * channels        # no norm and no channel shares another's
    # Kolmogorov and Smirnov's distance to N(0, 1) of all draws together, repetitions included.
    cdf = torch.distributions.Normal(0, 1).cdf(z.flatten().sort()[0])
    assert (cdf - torch.linspace(0, 1, len(cdf))).abs().max() < 2 / len(cdf) ** 0.5


@pytest.mark.parametrize("schedule,expected", {
    "exponential": [16, 8, 4, 2, 1],                                                     # Eq. 8
    "linear": [16, 12.25, 8.5, 4.75, 1],
    "cosine": [16, 13.803, 8.5, 3.197, 1],
    "logarithmic": [16, 9.540, 5.761, 3.080, 1],
}.items())
def test_noise_schedules(schedule, expected):
    """Five noisy stages from 16 to 1, two steps each, after one without noise (Figure 9)."""
    sigma = [qerl.noise_sigma(step, 12, 6, 16, 1, schedule) for step in range(12)]
    assert sigma[::2] == sigma[1::2] == pytest.approx([0, *expected], rel=1e-3)
    assert qerl.noise_sigma(1, 2, 2, 0.1, 0.01, schedule) == pytest.approx(0.1)


# --------------------------------------------------------------------------------------------------
# 4. Transformer

@pytest.mark.parametrize("weights", fast.FORMATS)
@torch.no_grad()
def test_logits_equal_transformers_with_the_decoded_weights(family, weights):
    folder, theirs = family
    format = fast.FORMATS[weights]
    decoded = copy.deepcopy(theirs)
    for name, weight in decoded.named_parameters():
        if name.endswith("_proj.weight"):
            weight.copy_(format.dequantize(*format.quantize(weight), torch.float32))
    tokens = torch.arange(450).view(3, 150) % 262
    assert relative(fast.load_model(folder, weights)(tokens), decoded(tokens).logits) < 1e-4


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_blocks_give_the_same_gradient(model, monkeypatch, recompute):
    """Each weight is decoded once forward and once backward, and none is kept between the two."""
    expected = gradient_of(model, model(TOKENS).square().mean())
    if recompute:
        model.recompute_in_backward()
    decoded = []
    dequantize = fast.PackedWeight.dequantize

    def recorded(packed, dtype):
        weight = dequantize(packed, dtype)
        decoded.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(fast.PackedWeight, "dequantize", recorded)
    loss = model(TOKENS).square().mean()
    layers = len(model.quantized_layers())
    assert [weight() for weight in decoded] == [None] * layers
    assert gradient_of(model, loss).equal(expected)
    assert len(decoded) == 2 * layers


def test_reference_policy_is_the_model_without_adapters(qwen):
    plain = fast.load_model(qwen)(TOKENS)
    fresh = fast.load_model(qwen, lora_rank=4)
    assert fresh(TOKENS).equal(plain)                  # where training starts
    tuned = with_lora(qwen, train_norms=True)
    with qerl.adapters_off(tuned):
        assert tuned(TOKENS).equal(plain)
    assert not torch.allclose(tuned(TOKENS), plain)


# --------------------------------------------------------------------------------------------------
# 5. Sampler

@pytest.mark.parametrize("options", [dict(temperature=0, slots=3), dict(top_p=1e-6)])
def test_greedy_completions_equal_transformers(family, options):
    """Two of each prompt; with 3 slots a prompt waits until two of them are idle."""
    folder, theirs = family
    model = fast.load_model(folder, weights="bf16")
    rollout = fast.generate(model, PROMPTS, 12, group_size=2, **options)
    assert not rollout.finished.any()
    for prompt, completion in zip(TWICE, rollout.tokens.tolist()):
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert prompt + completion == expected[0].tolist()


def test_a_completion_ends_at_its_first_eos_or_at_the_limit(sampled):
    _, rollout = sampled
    assert rollout.finished.any()
    ends = rollout.tokens < 20                         # as is padding
    assert ends.any(1).equal(rollout.finished)
    assert rollout.length.equal(torch.where(rollout.finished, ends.int().argmax(1) + 1, 16))


@pytest.mark.parametrize("temperature,top_p", [(0.5, 1.0), (1.0, 0.7)])
def test_samples_follow_the_distribution(temperature, top_p):
    """And their log-probabilities are of all tokens, before top-p cuts some."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -20.0]])
    token, logprob, _ = fast.sample(logits.repeat(40000, 1), temperature, top_p, seeded(0))
    probs = (logits / temperature).softmax(-1)
    likely = fast.nucleus(probs, top_p)[0]
    assert_close(token.bincount(minlength=5) / 40000, likely / likely.sum(), rtol=0, atol=0.01)
    assert_close(logprob, probs[0].log()[token])


@pytest.mark.parametrize("top_p,kept", {
    0.5: [0, 0, 0.5, 0],
    0.51: [0.3, 0, 0.5, 0],
    0.81: [0.3, 0, 0.5, 0.15],
}.items())
def test_nucleus_is_the_smallest_set_that_reaches_top_p(top_p, kept):
    """Also if it has more tokens than are sorted at first."""
    probs = torch.tensor([[0.3, 0.05, 0.5, 0.15]])
    for count in (1, 2, 4, 1024):
        assert_close(fast.nucleus(probs, top_p, count), torch.tensor([kept]))


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
def test_generate_names_an_argument_out_of_range(model, name, value):
    with pytest.raises(ValueError, match=f"generate: {name} is out of range"):
        fast.generate(model, **{"prompts": [[1]], "max_new_tokens": 2, name: value})


def test_fewer_slots_at_the_end_change_nothing(model):
    """33 slots against 4. 16 completions end first, 17 need over half."""
    seen = []

    class Uneven(fast.Sampler):
        def __init__(self, *args):
            super().__init__(*args)
            self.limit[:16] = 2
            self.limit[16] = 9

        def rollout(self):
            seen.append(len(self.completion))
            return super().rollout()

    prompts = [[i, 3, 2 * i + 1] * (1 + i % 5) for i in range(33)]

    def rollout(slots):
        return vars(fast.generate(
            model, prompts, 24, temperature=0, slots=slots, sampler_class=Uneven))

    expected = rollout(slots=4)
    found = rollout(slots=33)
    assert seen == [4, 16]
    assert found["length"].tolist() == [2] * 16 + [9] + [24] * 16
    for name, tensor in expected.items():
        assert_close(found[name], tensor, **NEAR)


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


@pytest.mark.parametrize("log_ratio,advantage", [(200.0, 1.0), (200.0, 0.0), (-200.0, -1.0)])
def test_a_token_that_is_clipped_has_gradient_zero_whatever_the_ratio(log_ratio, advantage):
    """Where the ratio is infinite or 0, and the KL's exponential infinite; the last is masked."""
    logprobs = torch.tensor([[-0.1, -1.0, -0.1]], requires_grad=True)
    away = torch.tensor([[log_ratio, 0.0, log_ratio]])
    loss, kl = qerl.policy_loss(
        logprobs, logprobs.detach() - away, torch.tensor([advantage]),
        torch.tensor([[0.5, 0.5, 0.0]]), ref_logprobs=logprobs.detach() + away, beta=0.1)
    loss.backward()
    assert logprobs.grad.tolist() == [[0.0, -0.5 * advantage, 0.0]]
    assert (loss + kl).isfinite()


def test_no_token_that_counts_is_no_nan():
    assert qerl.token_weights(torch.zeros(2, 3).bool(), "dapo").sum() == 0


def trl_trainer(folder, tmp_path, kind="GRPO", **options):
    import trl
    from datasets import Dataset
    config = getattr(trl, f"{kind}Config")(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, bf16=False,
        use_cpu=True, max_completion_length=20, **{"epsilon_high": 0.28} | options)
    trainer = getattr(trl, f"{kind}Trainer")(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


@pytest.mark.parametrize("objective,options", {
    "grpo": dict(loss_type="grpo"),
    "dapo": dict(loss_type="dapo", beta=0.04, use_bias_correction_kl=False, temperature=0.7),
    "dr-grpo": dict(loss_type="dr_grpo"),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence"),
    # Their cap is the ratio itself, ours what is above 1.
    "cispo": dict(loss_type="cispo", epsilon_high=1.28),
    "rloo": dict(kind="RLOO", beta=0.0),
}.items())
def test_loss_and_gradient_equal_trl(qwen, tmp_path, objective, options):
    """The gradients compared are those of the norms. No token of the last completion counts."""
    trainer = trl_trainer(qwen, tmp_path, **options)
    prompts = [[5, 6, 7, 8]] * 4
    length = torch.tensor([9, 4, 7, 1])
    mask = qerl.length_mask(length, 9)
    completions = torch.randint(20, 250, (4, 9)) * mask
    ours = fast.load_model(qwen, weights="bf16", lora_rank=2, train_norms=True)
    logprobs = fast.token_logprobs(ours, prompts, completions, length, trainer.temperature)
    # So far apart that some ratios are clipped.
    old, reference = ((logprobs.detach() + 0.3 * torch.randn(4, 9)) * mask for _ in range(2))
    mask[3] = False
    advantages = torch.tensor([1.1, -1.0, -0.9, 0.0])
    weights = qerl.token_weights(mask, objective, 20)
    clip_low = 1.0 if objective == "cispo" else 0.2
    loss, kl = qerl.policy_loss(
        logprobs, old, advantages, weights, clip_low, 0.28, reference if trainer.beta else None,
        trainer.beta, objective=objective)
    loss.backward()
    theirs = trainer._compute_loss(trainer.model, {
        "prompt_ids": torch.tensor(prompts),
        "prompt_mask": torch.ones(4, 4).long(),
        "completion_ids": completions,
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "old_logps": (old * mask).sum(1),
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    })
    theirs.backward()
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-4, abs=1e-6)
    assert kl.item() == pytest.approx(*trainer._metrics["train"]["kl"] or [0], rel=1e-4)
    for norm in scales(ours):
        their_norm = trainer.model.get_parameter(f"{norm.name}.weight")
        assert relative(norm.weight.grad, their_norm.grad) < 1e-3


def test_mismatch_and_its_correction_by_hand():
    """Ratios π_old / π_rollout of 2, 1/3 and 1, and padding that counts nowhere."""
    rollout = torch.full((2, 2), -1.5)
    ratio = torch.tensor([[2.0, 1 / 3], [1.0, 1e9]])
    old = rollout + ratio.log()
    mask = torch.tensor([[True, True], [True, False]])
    expected = (2 - 1 - math.log(2) + 1 / 3 - 1 + math.log(3)) / 3
    assert qerl.mismatch(old, rollout, mask) == pytest.approx((expected, 3), rel=1e-5)
    # The gain alone is corrected, not the KL.
    loss, kl = qerl.policy_loss(old, old, torch.ones(2), mask / 3, ref_logprobs=rollout, beta=0.1,
                                rollout_logprobs=rollout, tis=1.5)
    assert loss == pytest.approx(0.1 * kl - (1.5 + 1 / 3 + 1) / 3)


# --------------------------------------------------------------------------------------------------
# 7. Log-probabilities of a batch

def one_by_one(model, rollout):
    """What token_logprobs gives, a completion at a time, and the entropy at each of its tokens."""
    logprobs, entropy = [], []
    for prompt, tokens, n in zip(TWICE, rollout.tokens, rollout.length):
        logits = model(torch.cat([torch.tensor(prompt), tokens[:n]])[None])[0] / 0.7
        # The logits at a token are of the next one.
        policy = torch.distributions.Categorical(logits=logits[len(prompt) - 1:-1])
        logprobs.append(policy.log_prob(tokens[:n]))
        entropy.append(policy.entropy())
    return pad_sequence(logprobs, True), pad_sequence(entropy, True)


def test_training_logprobs_equal_the_samplers(sampled):
    """And their gradients those of a completion at a time. Noise in the sampler shows."""
    model, rollout = sampled
    logprobs = scored(model, rollout, chunk=7)
    assert_close(logprobs, rollout.logprobs, **NEAR)
    kl, ratio = qerl.mismatch(logprobs, rollout.logprobs, rollout.mask)
    assert abs(kl) < 1e-6
    assert 1 <= ratio < 1.001
    expected, entropy = one_by_one(model, rollout)
    assert_close(rollout.entropy * rollout.mask, entropy, **NEAR)
    found, right = (gradient_of(model, x.square().sum()) for x in (logprobs, expected))
    assert relative(found, right) < 1e-4
    with qerl.adaptive_quantization_noise(model, 0.05, seeded(0)):
        rollout = sample_two_each(model)
    kl, ratio = qerl.mismatch(scored(model, rollout), rollout.logprobs, rollout.mask)
    assert kl > 1e-4
    assert ratio > 1.05


def test_packing_holds_each_prompt_once():
    """The line "p q r a, b c" of two completions, and "s d" of the prompt s, which has one."""
    packing = fast.pack([[1, 2, 3], [1, 2, 3], [4]], torch.tensor([1, 2, 1]))
    assert packing.sizes == [3, 1, 1, 2, 1]            # p q r, s, a, b c, d


def test_output_layer_runs_in_chunks(sampled):
    """Logits of more than `chunk` tokens never exist, and each is computed once."""
    model, rollout = sampled
    with mock.patch.object(qerl, "token_logprob", wraps=fast.token_logprob) as spy:
        gradient_of(model, scored(model, rollout, chunk=8).sum())
    rows = [len(call.args[0]) for call in spy.call_args_list]
    assert max(rows) == 8
    assert sum(rows) == rollout.length.sum()


# --------------------------------------------------------------------------------------------------
# 8. Loading

UP = "model.layers.1.mlp.up_proj.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
STORED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}


def break_tensor(folder, tmp_path, edit, **settings):
    """A copy of a model folder in tmp_path, with its tensors and its config edited."""
    tensors = load_file(f"{folder}/model.safetensors")
    edit(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads(Path(folder, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    return str(tmp_path)


def packed_layer(tensors):
    """Store two layers that are stacked as NVFP4."""
    for name in (GATE, UP):
        parts = fast.quantize_nvfp4(tensors.pop(name))
        tensors.update(zip((f"{name}_packed", f"{name}_scale", f"{name}_global_scale"), parts))


def refused(folder, message):
    """fast.load_model refuses a folder with one line."""
    with pytest.raises(UserError, match=message) as error:
        fast.load_model(folder)
    assert "\n" not in str(error.value)


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
    assert fast.load_model(folder)(TOKENS).equal(fast.load_model(qwen)(TOKENS))
    shard.unlink()
    torch.save(wrong, tmp_path / "pytorch_model.bin")
    refused(folder, f"{shard}: cannot be read.*fetch the model again.*pickled.*never loaded")


def test_compressed_tensors_folder_is_read_as_it_is(made_qwen, tmp_path):
    """NVFP4A16 made with the library: each layer with its own global scale, two left in 16 bit.

    One of them, UP, is stacked with GATE in 4 bits. Among them stand tensors that change nothing.
    """
    folder, theirs = made_qwen
    decoded = copy.deepcopy(theirs)

    def compress(tensors):
        tensors["lm_head.weight"] = tensors[EMBEDDING].clone()
        for name in ("rotary_emb.inv_freq", "k_scale"):
            tensors[f"model.layers.0.self_attn.{name}"] = torch.ones(1)
        for name, weight in decoded.named_parameters():
            if name.endswith("_proj.weight") and name not in (DOWN, UP):
                state, weight.data = compressed_tensors(tensors.pop(name), "NVFP4")
                prefix = name.removesuffix("weight")
                tensors.update({prefix + part: state[part] for part in state if part != "weight"})

    break_tensor(folder, tmp_path, compress, quantization_config=STORED)
    model = fast.load_model(str(tmp_path))
    codes, _, _ = model.blocks[0].attention.qkv.weight.parts
    stored = load_file(tmp_path / "model.safetensors")
    assert codes[:128].equal(stored["model.layers.0.self_attn.q_proj.weight_packed"])
    with torch.no_grad():
        # The library decodes in 16 bit.
        assert relative(model(TOKENS), decoded.float()(TOKENS).logits) < 5e-3


@pytest.mark.parametrize("name,edit,message", [
    (DOWN, lambda t: t / 0, "holds NaN, infinity"),
    (DOWN, lambda t: t * 1e30, "holds .* a number above 1e"),
    (NORM, None, "is missing"),
    (NORM, torch.zeros_like, "holds .* zeros alone"),
    (DOWN, lambda t: t[:, :64], r"is .*\[128, 64\].*\[128, 192\]"),
    (DOWN, torch.Tensor.char, "is torch.int8"),
    # of what is stored as NVFP4
    (f"{UP}_packed", torch.Tensor.float, "is torch.float32"),
    (f"{UP}_scale", torch.Tensor.float, "is torch.float32"),
    (f"{UP}_scale", lambda t: (-t.float()).to(t.dtype), "block scales are at least 0"),
    (f"{UP}_global_scale", lambda t: t * 1e-30, "global scale is above 1e-9"),
    (f"{UP}_packed", None, "is missing"),
    # too many: the output layer is the embedding here, which an lm_head.weight may only repeat
    *((name, lambda _: torch.ones(128), "is not one that config.json asks for") for name in (
        UP.replace("weight", "bias"), "lm_head.bias", "model.norm.bias", "lm_head.weight",
        "model.layers.0.self_attn.q_norm.weight")),
])
def test_a_tensor_that_cannot_be_right_is_named(qwen, tmp_path, name, edit, message):
    def damage(tensors):
        packed_layer(tensors)
        tensor = tensors.pop(name, None)
        if edit:
            tensors[name] = edit(tensor)

    layer, _, _ = name.partition(".weight")
    refused(break_tensor(qwen, tmp_path, damage), f"{layer}.* {message}")


@pytest.mark.parametrize("message,config", {
    "config.json cannot be used": dict(model_type="own"),
    "architecture gpt2, which is not supported": dict(model_type="gpt2"),
    "quantisation gptq": dict(quantization_config={"quant_method": "gptq"}),
    "transform_config": dict(quantization_config={**STORED, "transform_config": {"R4": {}}}),
    "sliding-window": dict(use_sliding_window=True, sliding_window=8),
    "activation gelu": dict(hidden_act="gelu"),
}.items())
def test_unusable_configs_are_named(qwen, tmp_path, message, config):
    refused(break_tensor(qwen, tmp_path, lambda t: None, **config), message)


def test_features_that_no_block_divides_are_named():
    message = "mlp.down_proj has 200 input features, not divisible by nvfp4's block of 16"
    with pytest.raises(UserError, match=message):
        fast.WeightReader({}).linear("mlp", ["down_proj"], [128], 200, bias=False)
