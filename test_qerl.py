"""What qerl.py has to do, section by section, against oracles that no one here wrote.

They are transformers, compressed-tensors, bitsandbytes and TRL; elsewhere figures are by hand.
tests/test_fast.py holds harness/fast.py to qerl.py. The lab's recorded results and the second loop of
tests/test_run.py hold what is not here: noise, sampling, log-probabilities, GRPO's advantages.

    python -m pytest -n auto                          all tests; those marked `gpu` need a GPU
    python -m pytest test_qerl.py                     these alone
    TRITON_INTERPRET=1 python -m pytest -k kernel     the kernels in Triton's interpreter, on a CPU
"""
import copy
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:        # of several processes each takes one thread
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.testing import assert_close

import qerl
from harness import fast

HERE = Path(__file__).resolve().parent
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


def run_python(*args, cwd=HERE, **environment):
    """A finished process of python with these arguments."""
    return subprocess.run([sys.executable, *map(str, args)], cwd=cwd, capture_output=True, text=True,
                          env={**os.environ, **environment})


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
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(path)
    return str(path), model.eval()


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama"])
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


def with_lora(folder, engine=fast, **options):
    """A model whose LoRA is not zero, so that it matters."""
    torch.manual_seed(1)
    model = engine.load_model(folder, lora_rank=4, **options)
    for p in qerl.trainable(model).values():
        p.data += 0.05 * torch.randn_like(p)
    return model


@pytest.fixture
def model(qwen):
    """qwen with such a LoRA."""
    return with_lora(qwen)


def gradient_of(model, loss):
    """The gradient of all that is trained, as one vector."""
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in qerl.trainable(model).values()])


BEFORE = """
import sys
sys.modules["fp4_kernels"] = None                      # not even one that is installed
import torch, qerl

model = qerl.load_model(sys.argv[1], weights="nvfp4", lora_rank=4)
optimizer = torch.optim.AdamW(qerl.trainable(model).values(), lr=1e-2)
step, steps, prompts, eos = 1, 2, [[1, 2, 3], [4, 5]], {256}

def score(rollout):
    return (rollout.tokens < 128).float().mean(1).view(2, 8)
"""
AFTER = """
after = qerl.token_logprobs(model, repeated, rollout.tokens, rollout.length)
print(sigma > 0, ((after - logprobs) * weights * advantages[:, None]).sum().item() > 0)
"""


def test_qerl_works_alone(qwen, tmp_path):
    """The README's step, in an empty folder and without kernels, is one that helps."""
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    step, = re.findall(r"run by the tests -->\n```python\n(.*?)```", readme, re.DOTALL)
    shutil.copy(f"{HERE}/qerl.py", tmp_path)
    (tmp_path / "try.py").write_text(BEFORE + step + AFTER, encoding="utf-8")
    result = run_python("try.py", qwen, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
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
    compressors = pytest.importorskip("compressed_tensors.compressors")
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
    packed, scale, global_scale = qerl.FORMATS[name].quantize(weight)
    weight = weight.float() if dtype == torch.float16 else weight
    state, decompressed = compressed_tensors(weight, name.upper())
    assert packed.equal(state["weight_packed"])
    if name == "nvfp4":                                # the library's MXFP4 has other scales of zeros
        assert scale.view(torch.uint8).equal(state["weight_scale"].view(torch.uint8))
        assert global_scale.equal(state["weight_global_scale"])
    decoded = qerl.FORMATS[name].dequantize(packed, scale, global_scale, torch.float32)
    # The library decodes NVFP4 in 16 bit.
    assert_close(decoded, decompressed.float(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_nf4_equals_bitsandbytes(kind):
    bnb = pytest.importorskip("bitsandbytes.functional")
    weight = WEIGHTS[kind]()
    format = qerl.FORMATS["nf4"]
    decoded = format.dequantize(*format.quantize(weight), torch.float32)
    assert_close(decoded, bnb.dequantize_nf4(*bnb.quantize_nf4(weight, blocksize=64)))


# --------------------------------------------------------------------------------------------------
# 2. Quantised linear with LoRA               (tests/test_options.py and test_serving.py have PEFT)

def stacked_layer(weights, dense):
    """A QuantLinear of dense layers over one input, each quantised by itself."""
    format = fast.FORMATS[weights]
    sizes = list(map(len, dense))
    weight = fast.PackedWeight(format, *qerl.stack_parts(map(format.quantize, dense)))
    return fast.QuantLinear(list("abc"[:len(sizes)]), sizes, dense[0].shape[1], weight, None)


# --------------------------------------------------------------------------------------------------
# 3. RMSNorm with Adaptive Quantization Noise

def scales(model):
    """All RMSNorms of a model."""
    return [m for m in model.modules() if isinstance(m, qerl.RMSNorm)]


def test_every_scale_has_noise(family):
    """Qwen3's q_norm and k_norm, too."""
    folder, theirs = family
    channels = sum(p.numel() for name, p in theirs.named_parameters() if "norm" in name)
    model = qerl.load_model(folder)
    with qerl.adaptive_quantization_noise(model, 0.02):
        assert sum((norm.noisy_weight != norm.weight).sum() for norm in scales(model)) == channels


@pytest.mark.parametrize("schedule,expected", {
    "cosine": [16, 13.803, 8.5, 3.197, 1],
    "logarithmic": [16, 9.540, 5.761, 3.080, 1],
}.items())
def test_noise_schedules(schedule, expected):
    """Five noisy stages from 16 to 1, two steps each, after one without noise (Figure 9).

    test_run.py has two more, exponential (Eq. 8) and linear.
    """
    sigma = [qerl.noise_sigma(step, 12, 6, 16, 1, schedule) for step in range(12)]
    assert sigma[::2] == sigma[1::2] == pytest.approx([0, *expected], rel=1e-3)
    assert qerl.noise_sigma(1, 2, 2, 0.1, 0.01, schedule) == pytest.approx(0.1)


# --------------------------------------------------------------------------------------------------
# 4. Transformer

@pytest.mark.parametrize("weights", qerl.FORMATS)
@torch.no_grad()
def test_logits_equal_transformers_with_the_decoded_weights(family, weights):
    folder, theirs = family
    format = qerl.FORMATS[weights]
    decoded = copy.deepcopy(theirs)
    for name, weight in decoded.named_parameters():
        if name.endswith("_proj.weight"):
            weight.copy_(format.dequantize(*format.quantize(weight), torch.float32))
    tokens = torch.arange(450).view(3, 150) % 262
    assert relative(qerl.load_model(folder, weights)(tokens), decoded(tokens).logits) < 1e-4


# --------------------------------------------------------------------------------------------------
# 5. Sampler

def test_greedy_completions_equal_transformers(family):
    """Two of each prompt, a prompt at a time."""
    folder, theirs = family
    model = qerl.load_model(folder, weights="bf16")
    rollout = qerl.generate(model, PROMPTS, 12, group_size=2, temperature=0, slots=3)
    assert not rollout.finished.any()
    for prompt, completion in zip(TWICE, rollout.tokens.tolist()):
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert prompt + completion == expected[0].tolist()


@pytest.mark.parametrize("message,call", {
    "generate: prompts": lambda: fast.generate(None, [[1], []], 2),
    "generate: temperature": lambda: fast.generate(None, [[1]], 2, temperature=1e-45),
    "generate: top_p": lambda: fast.generate(None, [[1]], 2, top_p=0.0),
    "temperature 0": lambda: qerl.token_logprobs(None, [], TOKENS, None, temperature=0),
    "temperature -1": lambda: fast.token_logprobs(None, [], TOKENS, None, temperature=-1),
    "200 input features, not divisible by nvfp4's block of 16":
        lambda: qerl.WeightReader({}).quantize("mlp.down_proj", torch.ones(128, 200), "nvfp4"),
    "step 4 is none of the 4": lambda: qerl.noise_sigma(4, 4),
}.items())
def test_nonsense_is_refused(message, call):
    with pytest.raises(AssertionError, match=message):
        call()


# --------------------------------------------------------------------------------------------------
# 6. Objectives

def test_advantages_without_the_deviation():
    """RLOO compares with the mean of the others. GRPO's are among the lab's recorded results."""
    rewards = torch.tensor([[1.0, 0, 0, 1]])
    assert_close(qerl.group_advantages(rewards, "dr-grpo"), rewards - 0.5)
    assert_close(qerl.group_advantages(rewards, "rloo"), rewards - (2 - rewards) / 3)


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
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    config = getattr(trl, f"{kind}Config")(
        output_dir=tmp_path, bf16=False, use_cpu=True, max_completion_length=20,
        **{"epsilon_high": 0.28} | options)
    trainer = getattr(trl, f"{kind}Trainer")(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=len,                              # never called
        args=config,
        train_dataset=Dataset.from_dict({}),
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
    ours = qerl.load_model(qwen, weights="bf16", lora_rank=2, train_norms=True)
    logprobs = qerl.token_logprobs(ours, prompts, completions, length, trainer.temperature)
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
