"""Train a 4-bit policy on word problems by GRPO or DAPO with annealed quantisation noise (QeRL, arXiv 2510.11696).

    python train_gsm8k.py                                  a small policy on made-up problems: minutes on any laptop
    python train_gsm8k.py --model Qwen2.5-3B               Qwen/Qwen2.5-3B-Instruct on GSM8K, on one GPU
    python train_gsm8k.py --model FOLDER --data FOLDER     a local Hugging Face folder, local jsonl files
    python train_gsm8k.py --resume [--out FOLDER]          go on where a run stopped

The loop is in `train`: sample, score, advantage, loss, step, log.
"""
import argparse
import contextlib
import functools
import glob
import hashlib
import http.client
import inspect
import io
import json
import math
import os
import platform
import random
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, fields
from decimal import Decimal

import safetensors.torch
import tiktoken
import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from tqdm import tqdm

import qerl
from qerl import UserError

try:
    import fcntl
    import resource
except ImportError:                                    # Windows: runs are not locked, memory on a CPU is not measured
    fcntl = resource = None

CACHE = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "qerl")
GSM8K_URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/{}.jsonl"
SYSTEM = ("Please reason step by step, and put your final answer within \\boxed{}. Write the reasoning between <think> and "
          "</think> and the boxed answer between <answer> and </answer>.")

# ---------------------------------------------------------------------------------------------------------------------
# Settings. With --model: prompts to sigma_end, and the learning rate, are the paper's Table 4 (GSM8K), beta (below) and ADAM its
# public code's, clip_high DAPO's (for GRPO, too), the rest ours. Without: what a small policy learns from within minutes.

PAPER = dict(prompts=128, group=8, updates=4, lr=None, max_new_tokens=4096, lora_rank=32, sigma_start=1e-2, sigma_end=5e-4,
             steps=200, eval_questions=0, micro_tokens=16384, slots=256, save_every=10)
SMALL = dict(prompts=16, group=8, updates=4, lr=3e-3, lora_rank=16, sigma_start=1e-2, sigma_end=5e-4, steps=50,
             max_new_tokens=64, eval_questions=256, micro_tokens=16384, slots=256, save_every=5)
ADAM = dict(betas=(0.9, 0.99), weight_decay=0.1)       # the paper's code; likewise the warm-up and clipping below
WARM_UP, GRADIENT_CLIP = 0.1, 0.2


class Parser(argparse.ArgumentParser):
    def __init__(self, description):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message):
        raise UserError(f"{message}; see --help")


def arguments(argv=None):
    """Parse and check the command line; values not given come from PAPER (with --model) or SMALL."""
    p = Parser(__doc__)

    def sized(name, what, kind=int):
        key = name.replace("-", "_")
        p.add_argument(f"--{name}", type=kind, help=f"{what} (default {SMALL[key]}, with --model {PAPER[key]})")

    p.add_argument("--model", help="Hugging Face name or folder; Qwen2.5-3B means Qwen/Qwen2.5-3B-Instruct")
    p.add_argument("--data", help="folder with train*.jsonl and test*.jsonl in GSM8K's format (default with --model: download)")
    p.add_argument("--weights", choices=sorted(qerl.FORMATS), default="nvfp4", help="format of the frozen weights (default nvfp4)")
    p.add_argument("--algo", choices=["grpo", "dapo"], default="grpo", help="default grpo")
    p.add_argument("--beta", type=float, help="weight of the KL to the reference policy (grpo 0.04, dapo 0)")
    p.add_argument("--clip-low", type=float, default=0.2, help="the ratio is clipped at 1 minus this (default 0.2)")
    p.add_argument("--clip-high", type=float, default=0.28, help="and at 1 plus this (default 0.28)")
    p.add_argument("--tis", type=float, default=0.0, metavar="CAP", help="truncated importance weights, capped here (0: off)")
    sized("lora-rank", "rank of LoRA")
    p.add_argument("--lora-alpha", type=float, help="default: the rank")
    p.add_argument("--train-norms", action="store_true", help="train the RMSNorm scales too, as the paper's code does")
    p.add_argument("--lr", type=float, help="learning rate (default 3e-3; with --model 1e-5, with bf16 weights 5e-6)")
    sized("steps", "rollouts, each followed by its updates")
    sized("prompts", "questions a step")
    sized("group", "completions a question")
    sized("updates", "optimiser steps a rollout")
    sized("sigma-start", "noise of the first noisy stage; with --sigma-end 0, too: no AQN", float)
    sized("sigma-end", "noise of the last stage", float)
    p.add_argument("--stages", type=int, default=10, help="of the noise, the first without any (default 10)")
    p.add_argument("--schedule", choices=["exponential", "linear", "cosine", "logarithmic"], default="exponential",
                   help="of the noise (default exponential)")
    sized("max-new-tokens", "tokens of a completion at most")
    sized("slots", "sequences decoded at once")
    sized("micro-tokens", "tokens in one forward and backward pass, a shared prompt's once")
    sized("eval-questions", "held-out questions, 0: all")
    sized("save-every", "steps between checkpoints")
    p.add_argument("--seed", type=int, default=0, help="default 0")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, cuda:1, cpu (default: a GPU if there is one)")
    p.add_argument("--eval-only", action="store_true", help="measure accuracy (with --resume: of the run's adapter) and stop")
    p.add_argument("--out", help="folder of the run (default: a new one under runs/)")
    p.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out (default: the newest run)")
    args = p.parse_args(argv)
    for key, value in (PAPER if args.model else SMALL).items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    if args.lr is None:
        args.lr = 5e-6 if args.weights == "bf16" else 1e-5
    args.beta = args.beta if args.beta is not None else {"grpo": 0.04, "dapo": 0.0}[args.algo]
    check_arguments(args)
    return args


def check_arguments(args):
    def require(ok, key, what):
        if not ok:
            raise UserError(f"--{key.replace('_', '-')} {getattr(args, key)}: {what}")
    for key in ("steps", "prompts", "updates", "lora_rank", "stages", "max_new_tokens", "slots", "micro_tokens", "save_every"):
        require(getattr(args, key) >= 1, key, "must be at least 1")
    for key in ("beta", "tis", "sigma_start", "sigma_end", "eval_questions", "seed"):
        require(0 <= getattr(args, key) < math.inf, key, "must not be negative or infinite")
    require(args.seed < 2 ** 63, "seed", "must be below 2**63")
    require(0 < args.lr < math.inf, "lr", "must be positive")
    require(args.lora_alpha is None or args.lora_alpha > 0, "lora_alpha", "must be positive")
    require(0 <= args.clip_low < 1, "clip_low", "must be in [0, 1)")
    require(args.clip_high >= 0, "clip_high", "must not be negative")
    require(args.group >= 2, "group", "advantages compare samples of one prompt, use at least 2")
    require(args.prompts % args.updates == 0, "prompts", f"is not divisible by --updates {args.updates}; change one of them")
    require(args.schedule != "exponential" or (args.sigma_start > 0) == (args.sigma_end > 0), "sigma_end",
            "an exponential schedule needs both sigmas positive (or both 0: no noise)")
    check_device(args.device)
    args.model = full_name(args.model)


def check_device(name):
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise UserError(f"--device {name}: unknown; use cuda or cpu")
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
        raise UserError(f"--device {name}: no such CUDA GPU here; use --device cpu")


def full_name(model):
    """Qwen2.5-3B -> Qwen/Qwen2.5-3B-Instruct; other names and folders stay."""
    if not model or not model.startswith("Qwen") or "/" in model or os.path.isdir(model):
        return model
    chat = "-Instruct" if re.fullmatch(r"Qwen2\.5(-Coder|-Math)?-[\d.]+B", model) else ""
    print(f"--model {model} means Qwen/{model}{chat}")
    return f"Qwen/{model}{chat}"


# ---------------------------------------------------------------------------------------------------------------------
# Questions. A problem is {"question", "answer"} as in GSM8K: worked steps with <<calculations>>, then "#### number".

def word_problem(rng, careless=False):
    """One made-up problem of one or two steps, with numbers below 20 and results below 82; a careless answer takes the wrong last
    operation."""
    name = rng.choice(["Ann", "Ben", "Eva", "Max", "Mia", "Sam", "Tom", "Zoe"])
    thing = rng.choice(["pens", "figs", "cups", "eggs", "nuts", "keys", "hats", "toys"])
    a, b, c = rng.randint(10, 19), rng.randint(2, 9), rng.randint(2, 9)
    question, steps = rng.choice([
        (f"{name} has {a} {thing} and buys {b} more. How many {thing} now?", [(a, "+", b)]),
        (f"{name} has {a} {thing} and loses {b}. How many {thing} now?", [(a, "-", b)]),
        (f"{name} fills {b} bags with {c} {thing} each. How many {thing}?", [(b, "*", c)]),
        (f"{name} has {a} {thing}, buys {b} and loses {c}. How many {thing} now?", [(a, "+", b), (a + b, "-", c)])])
    if careless:
        x, op, y = steps[-1]
        steps[-1] = (x, {"+": "-", "-": "+", "*": "+"}[op], y)
    lines, value = [], {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    for x, op, y in steps:
        z = value[op](x, y)
        lines.append(f"{x}{op}{y}=<<{x}{op}{y}={z}>>{z}")
    return {"question": question, "answer": "\n".join(lines) + f"\n#### {z}"}


def word_problems(count, seed, exclude=(), careless=0.0):
    """`count` different problems from a seeded generator, none of whose questions is in `exclude`."""
    rng, problems, seen = random.Random(seed), [], set(exclude)
    while len(problems) < count:
        problem = word_problem(rng, rng.random() < careless)
        if problem["question"] not in seen:
            seen.add(problem["question"])
            problems.append(problem)
    return problems


def made_up_problems(careless=0.0):
    """(train, held-out), disjoint; `careless` is the fraction of wrong answers in train."""
    held_out = word_problems(512, seed=1)
    return word_problems(8192, seed=2, exclude={p["question"] for p in held_out}, careless=careless), held_out


def read_jsonl(folder, pattern):
    if not os.path.isdir(folder):
        raise UserError(f"--data {folder}: no such folder; it must hold train*.jsonl and test*.jsonl")
    paths = sorted(path for path in glob.glob(f"{glob.escape(folder)}/{pattern}") if "socratic" not in os.path.basename(path))
    problems = []
    if not paths:
        raise UserError(f"--data {folder}: no file matches {pattern}; it must hold train*.jsonl and test*.jsonl as GSM8K's "
                        "repository has them")
    for path in paths:
        with open(path, "rb") as f:
            for number, line in enumerate(f, 1):
                try:
                    problem = json.loads(line)
                    if not (isinstance(problem["question"], str) and final_number(problem) is not None):
                        raise ValueError
                except (ValueError, KeyError, IndexError, TypeError, AttributeError):
                    raise UserError(f'{path}:{number}: not a line of {{"question": ..., "answer": "... #### number"}}; '
                                    "mend or remove it")
                problems.append(problem)
    if not problems:
        raise UserError(f"{paths[0]}: holds no problem; give a file with at least one line")
    return problems


def gsm8k(folder):
    """(train, test) from a folder of jsonl files, or downloaded once into the cache."""
    if folder is None:
        folder = os.path.join(CACHE, "gsm8k")
        os.makedirs(folder, exist_ok=True)
        for split in ("train", "test"):
            path, url = f"{folder}/{split}.jsonl", GSM8K_URL.format(split)
            if not os.path.exists(path):
                try:
                    atomic_write(path, urllib.request.urlopen(url, timeout=60).read())
                except (OSError, http.client.HTTPException) as e:
                    raise UserError(f"GSM8K could not be downloaded from {url} ({e}); "
                                    "pass --data FOLDER with train.jsonl and test.jsonl")
    return read_jsonl(folder, "train*.jsonl"), read_jsonl(folder, "test*.jsonl")


# ---------------------------------------------------------------------------------------------------------------------
# Text <-> tokens: an object with prompt(question) -> ids, decode(ids) -> text and eos, a set of ids.

class ByteText:
    """One token a byte, and one for each tag of the answer format."""

    TAGS = ["<think>", "</think>", "<answer>", "</answer>", "<eos>"]

    def __init__(self):
        self.encoding = tiktoken.Encoding("bytes", pat_str=r"[\s\S]", mergeable_ranks={bytes([i]): i for i in range(256)},
                                          special_tokens={tag: 256 + i for i, tag in enumerate(self.TAGS)})
        self.eos = {self.encoding.encode_single_token("<eos>")}

    def prompt(self, question):
        return self.encoding.encode_ordinary(question + "\n")

    def worked_answer(self, answer):
        work, final = answer.split("\n#### ")
        return self.encoding.encode(f"<think>{work}</think><answer>{final}</answer><eos>", allowed_special="all")

    def decode(self, ids):
        return self.encoding.decode([i for i in ids if i not in self.eos])


class ChatText:
    """A Hugging Face tokenizer with its chat template (or plain text where it has none)."""

    def __init__(self, folder):
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            if os.path.exists(f"{folder}/generation_config.json"):
                stored = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
            else:
                stored = transformers.AutoConfig.from_pretrained(folder).eos_token_id
        except Exception as e:
            raise UserError(f"model {folder}: its tokenizer or config cannot be read ({qerl.reason(e)}); fetch the model again")
        if not self.tokenizer.encode("1"):
            raise UserError(f"model {folder}: its tokenizer is missing or empty; fetch the model again")
        self.eos = {self.tokenizer.eos_token_id, *(stored if isinstance(stored, list) else [stored])} - {None}

    def prompt(self, question):
        if self.tokenizer.chat_template is None:
            return self.tokenizer.encode(f"{SYSTEM}\n\nProblem: {question}\n\nSolution: ")
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        except Exception as e:
            raise UserError(f"the model's chat template cannot be used ({qerl.reason(e)}); mend it or use another model")

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def with_prompts(problems, text, limit):
    """Add "prompt" (token ids) and "number"; problems whose prompt is longer than `limit` tokens are counted and left out."""
    for problem in problems:
        problem["prompt"], problem["number"] = text.prompt(problem["question"]), final_number(problem)
    kept = [p for p in problems if len(p["prompt"]) <= limit]
    if len(kept) < len(problems):
        print(f"{len(problems) - len(kept)} of {len(problems)} prompts are longer than {limit} tokens and are skipped")
    if not kept:
        raise UserError(f"no prompt fits into {limit} tokens; lower --max-new-tokens")
    return kept


# ---------------------------------------------------------------------------------------------------------------------
# Rewards (the paper's: 2 for the exact answer, 0.2 for the <think>...</think><answer>...</answer> format)

FORMAT = re.compile(r"\s*<think>.*?</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL)
NUMBER = re.compile(r"(?:(?<![\w)}])-)?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\d.])\.\d+)")


def parse_number(text):
    """The last number in a text as Decimal, tolerant of $, commas, .00 and \\boxed{}; None without one, or for a fraction."""
    text = text.replace("\u2212", "-").replace("{,}", ",")                   # the typographic minus, TeX's comma
    last = None
    for last in NUMBER.finditer(text):
        pass
    if last is None or re.search(r"[\d)]\s*/\s*\(?$|\\[dt]?frac\{[^{}]*\}\{$", text[:last.start()]):
        return None
    return Decimal(last.group().replace("$", "").replace(",", ""))


def final_number(problem):
    """The right answer of a problem: the first word behind "####"."""
    return parse_number(problem["answer"].split("####")[1].split()[0])


def answered_number(completion):
    """The number between the last <answer> tags, else in the last \\boxed{}; None without either."""
    answers = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL) or re.findall(r"\\boxed\{([^{}]*)\}", completion)
    return parse_number(answers[-1]) if answers else None


def stated_number(completion):
    """What evaluation accepts: answered_number, or else the last number of the text."""
    number = answered_number(completion)
    return parse_number(completion) if number is None else number


def reward(completion, number):
    """(reward, answered correctly) of one completion."""
    correct = answered_number(completion) == number
    return 2.0 * correct + 0.2 * bool(FORMAT.fullmatch(completion)), correct


# ---------------------------------------------------------------------------------------------------------------------
# The built-in policy: a million parameters, trained to imitate worked answers of which most are careless, as text found
# anywhere may be. It can do the format and the arithmetic; which operation a problem needs, the reward has to teach.

def warm_start(steps=120, batch=64, careless=0.6, muon_lr=0.03, adam_lr=3e-3):
    """A Hugging Face folder with the small policy; made in about a minute the first time, then cached."""
    sources = [inspect.getsource(f) for f in (warm_start, word_problem, word_problems, made_up_problems, ByteText)]
    folder = os.path.join(CACHE, f"warm-start-{hashlib.sha256(''.join(sources).encode()).hexdigest()[:12]}")
    if os.path.exists(folder):
        return folder
    text, (problems, _) = ByteText(), made_up_problems(careless)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(
        hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256 + len(text.TAGS), max_position_embeddings=512, tie_word_embeddings=True), dtype=torch.float32)
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    optimizers = [torch.optim.Muon(matrices, lr=muon_lr, momentum=0.95), torch.optim.AdamW(others, lr=adam_lr)]
    rng = random.Random(0)
    for step in tqdm(range(steps), desc="warm start on worked answers", unit="step"):
        pairs = [(text.prompt(p["question"]), text.worked_answer(p["answer"])) for p in rng.sample(problems, batch)]
        tokens = [torch.tensor(q + a) for q, a in pairs]
        labels = [torch.tensor([-100] * len(q) + a) for q, a in pairs]
        tokens = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        loss = F.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        for optimizer, lr in zip(optimizers, (muon_lr, adam_lr)):
            optimizer.param_groups[0]["lr"] = lr * min((step + 1) / 10, max(0.1, 1 - step / steps))
            optimizer.step()
            optimizer.zero_grad()
    os.makedirs(CACHE, exist_ok=True)
    temporary = tempfile.mkdtemp(dir=CACHE)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(temporary)
    try:
        os.rename(temporary, folder)
    except OSError:                                   # another run was faster
        shutil.rmtree(temporary)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# One step's parts

def learning_rate(step, args):
    """Linear warm-up over the first tenth of training, then cosine to zero."""
    warm_up = max(1, round(WARM_UP * args.steps))
    if step < warm_up:
        return args.lr * (step + 1) / warm_up
    return args.lr * (1 + math.cos(math.pi * (step - warm_up) / max(1, args.steps - warm_up))) / 2


@functools.lru_cache(maxsize=2)
def epoch_order(count, seed, epoch):
    return random.Random(f"{seed}/{epoch}").sample(range(count), count)


def next_problems(problems, drawn, count, seed):
    """The `count` problems after the first `drawn`; each pass over the data has its own seeded order."""
    places = [divmod(i, len(problems)) for i in range(drawn, drawn + count)]
    return [problems[epoch_order(len(problems), seed, epoch)[position]] for epoch, position in places]


@dataclass
class Batch:
    """P problems, the Rollout of their N = P * G completions, its texts, rewards and correctness [P, G]."""
    problems: list
    rollout: qerl.Rollout
    texts: list
    rewards: torch.Tensor
    correct: torch.Tensor

    @property
    def prompts(self):
        return [p["prompt"] for p in self.problems for _ in range(self.rewards.shape[1])]


def decode_all(text, rollout):
    """The texts of a Rollout's completions."""
    return [text.decode(row[:n].tolist()) for row, n in zip(rollout.tokens.cpu(), rollout.length.tolist())]


def sample_groups(model, text, problems, args, rng, clock):
    """Sample args.group completions of each problem and score them."""
    with clock("rollout"):
        rollout = qerl.generate(model, [p["prompt"] for p in problems], args.max_new_tokens, args.group, eos=text.eos,
                                slots=args.slots, generator=rng)
    with clock("reward"):
        texts = decode_all(text, rollout)
        scores = [reward(t, problems[i // args.group]["number"]) for i, t in enumerate(texts)]
        scores = torch.tensor(scores, device=model.device).view(len(problems), args.group, 2)
    return Batch(problems, rollout, texts, scores[..., 0], scores[..., 1])


def join_rollouts(rollouts, rows):
    """These rows of rollouts that lie one below the other, padded to the longest."""
    longest = max(r.tokens.shape[1] for r in rollouts)

    def stack(name):
        parts = [getattr(r, name) for r in rollouts]
        return torch.cat([F.pad(t, (0, longest - t.shape[1])) if t.dim() == 2 else t for t in parts])[rows]
    return qerl.Rollout(*(stack(field.name) for field in fields(qerl.Rollout)))


def dynamic_sampling(draws, draw, prompts, attempts=4):
    """DAPO's: append to `draws` until `prompts` groups have rewards that differ; -> the Batch of these. Groups that are all
    right or all wrong teach nothing; after `attempts` draws the rest of the batch is filled up with such groups."""
    while len(draws) < attempts and sum(qerl.has_signal(b.rewards).sum() for b in draws) < prompts:
        draws.append(draw())
    rewards, correct = torch.cat([b.rewards for b in draws]), torch.cat([b.correct for b in draws])
    group = rewards.shape[1]
    keep = (~qerl.has_signal(rewards)).int().argsort(stable=True)[:prompts].tolist()
    rows = [k * group + g for k in keep for g in range(group)]
    problems, texts = [p for b in draws for p in b.problems], [t for b in draws for t in b.texts]
    return Batch([problems[k] for k in keep], join_rollouts([b.rollout for b in draws], rows),
                 [texts[i] for i in rows], rewards[keep], correct[keep])


def micro_batches(prompts, lengths, budget):
    """Rows (prompt, completion's length) cut into pieces of at most `budget` tokens, a prompt's counted once (qerl.pack), and at
    most four times as many when padded for attention; a longer row goes alone. Prompts with the longest rows come first."""
    longest = {}
    for prompt, n in zip(map(tuple, prompts), lengths):
        longest[prompt] = max(longest.get(prompt, 0), len(prompt) + n)
    pieces, tokens, width = [], 0, 0
    for i in sorted(range(len(prompts)), key=lambda i: (-longest[tuple(prompts[i])], prompts[i])):
        shared = len(prompts[i]) if pieces and prompts[i] == prompts[pieces[-1][-1]] else 0
        size = len(prompts[i]) + lengths[i]
        if not pieces or tokens + size - shared > budget or max(width, size) * (len(pieces[-1]) + 1) > 4 * budget:
            pieces.append([])
            tokens = width = shared = 0
        pieces[-1].append(i)
        tokens, width = tokens + size - shared, max(width, size)
    return pieces


def all_logprobs(model, batch, args):
    """Log-probabilities of a whole batch's completions under the model as it is, float32 [N, C]."""
    rollout, prompts = batch.rollout, batch.prompts
    result = torch.zeros_like(rollout.logprobs)
    with torch.no_grad():
        for i in micro_batches(prompts, rollout.length.tolist(), args.micro_tokens):
            result[i] = qerl.token_logprobs(model, [prompts[r] for r in i], rollout.tokens[i], rollout.length[i])
    return result


def policy_update(model, optimizer, batch, rows, advantages, old_logprobs, ref_logprobs, mask, args):
    """One optimiser step on the completions `rows`; returns the mean KL to the reference policy."""
    rollout, prompts = batch.rollout, batch.prompts
    weights = torch.zeros_like(old_logprobs)
    weights[rows] = qerl.token_weights(mask[rows], args.algo)
    total_loss, total_kl = 0.0, 0.0
    for micro in micro_batches([prompts[i] for i in rows], rollout.length[rows].tolist(), args.micro_tokens):
        i = [rows[m] for m in micro]
        logprobs = qerl.token_logprobs(model, [prompts[r] for r in i], rollout.tokens[i], rollout.length[i])
        importance = qerl.truncated_importance(old_logprobs[i], rollout.logprobs[i], args.tis) if args.tis else None
        loss, kl = qerl.policy_loss(logprobs, old_logprobs[i], advantages[i], weights[i], args.clip_low, args.clip_high,
                                    None if ref_logprobs is None else ref_logprobs[i], args.beta, importance)
        loss.backward()
        total_loss, total_kl = total_loss + loss.item(), total_kl + kl.item()
    norm = torch.nn.utils.clip_grad_norm_(qerl.trainable(model).values(), GRADIENT_CLIP)
    if not math.isfinite(total_loss) or not math.isfinite(norm):
        raise UserError(f"loss {total_loss}, gradient norm {norm}: stopped before the update, the last checkpoint is kept; "
                        "start again with a lower --lr")
    optimizer.step()
    optimizer.zero_grad()
    return total_kl


def evaluate(model, text, problems, args, temperature, top_p, desc):
    """pass@1: the fraction of problems whose single completion states the right number."""
    rng = torch.Generator(model.device).manual_seed(args.seed)
    rollout = qerl.generate(model, [p["prompt"] for p in problems], args.max_new_tokens, temperature=temperature,
                            top_p=top_p, eos=text.eos, slots=args.slots, generator=rng)
    texts = decode_all(text, rollout)
    accuracy = sum(stated_number(t) == p["number"] for t, p in zip(texts, problems)) / len(problems)
    print(f"{desc}: {accuracy:.1%} of {len(problems)} held-out questions, {rollout.length.float().mean():.0f} tokens on average")
    return accuracy


# ---------------------------------------------------------------------------------------------------------------------
# A run's folder: checkpoint.safetensors (one file, so that it is whole or absent), metrics.jsonl, samples.txt,
# curve.png, summary.json, adapter/

class Clock:
    """Seconds spent in each phase of a step: `with clock("rollout"): ...`."""

    def __init__(self, device):
        self.device = torch.device(device)
        self.restart()

    def restart(self):
        self.seconds, self.began = {}, time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, phase):
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def atomic_write(path, data):
    """Write str or bytes beside `path`, then rename: a reader or a kill -9 finds the old file or the new one, never half."""
    with open(f"{path}.tmp", "wb") as f:
        f.write(data.encode() if isinstance(data, str) else data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(f"{path}.tmp", path)


@contextlib.contextmanager
def creating(out):
    """Around what first writes in the folder --out, so that an OSError names it."""
    try:
        yield
    except OSError as e:
        raise UserError(f"--out {out}: cannot be written ({e.strerror}); choose another folder")


POLICY = ("model", "weights", "lora_rank", "lora_alpha", "train_norms")       # what an adapter belongs to


def settings_of(args):
    """What a checkpoint must agree with: all settings but where the run lives and how work is cut into pieces."""
    free = ("out", "resume", "eval_only", "save_every", "slots", "micro_tokens")
    return {k: v for k, v in sorted(vars(args).items()) if k not in free}


# An adapter is stored as PEFT stores it, so that any LoRA tool loads it onto the original model (or, closer to what it was
# trained on, onto its NVFP4 version).

def adapter_tensors(model):
    """PEFT's names -> float32 tensors; stacked layers are taken apart."""
    tensors = {}
    for module in model.modules():
        if isinstance(module, qerl.QuantLinear) and module.rank:
            for name, A, B in zip(module.names, module.lora_A.split(module.rank), module.lora_B.split(module.sizes)):
                tensors[f"base_model.model.{name}.lora_A.weight"] = A
                tensors[f"base_model.model.{name}.lora_B.weight"] = B
        elif isinstance(module, qerl.RMSNorm) and module.weight.requires_grad:
            tensors[f"base_model.model.{module.name}.weight"] = module.weight
    return tensors


def save_adapter(model, folder, base_model):
    """Write adapter_config.json and adapter_model.safetensors for peft.PeftModel.from_pretrained."""
    os.makedirs(folder, exist_ok=True)
    layers = model.quantized_layers()
    norms = [m for m in model.modules() if isinstance(m, qerl.RMSNorm) and m.weight.requires_grad]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model,
              "r": layers[0].rank, "lora_alpha": layers[0].alpha, "lora_dropout": 0.0, "bias": "none",
              "target_modules": sorted({name.split(".")[-1] for m in layers for name in m.names}),
              "modules_to_save": sorted({m.name.split(".")[-1] for m in norms}) or None, "inference_mode": True}
    tensors = {name: t.detach().cpu().contiguous() for name, t in adapter_tensors(model).items()}
    atomic_write(f"{folder}/adapter_model.safetensors", safetensors.torch.save(tensors, metadata={"format": "pt"}))
    atomic_write(f"{folder}/adapter_config.json", json.dumps(config, indent=1))


@torch.no_grad()
def load_adapter(model, folder):
    """The inverse of save_adapter: copy a stored adapter into a model loaded with the same rank, alpha and train_norms."""
    with open(f"{folder}/adapter_config.json") as f:
        alpha = json.load(f)["lora_alpha"]
    if alpha != (now := model.quantized_layers()[0].alpha):
        raise UserError(f"{folder}: was trained with lora_alpha {alpha}, the model has {now}; load the model with the adapter's")
    stored, ours = safetensors.torch.load_file(f"{folder}/adapter_model.safetensors"), adapter_tensors(model)
    if {name: t.shape for name, t in stored.items()} != {name: t.shape for name, t in ours.items()}:
        raise UserError(f"{folder}: its tensors are not the model's; load the model with the adapter's rank and train_norms")
    for name, tensor in ours.items():
        tensor.copy_(stored[name])


def save_checkpoint(folder, model, optimizer, rngs, state, args):
    tensors = {f"rng.{i}": rng.get_state() for i, rng in enumerate(rngs)}
    for name, p in qerl.trainable(model).items():
        tensors[f"model.{name}"] = p.detach()
        tensors.update({f"optimizer.{name}.{key}": value for key, value in optimizer.state[p].items()})
    tensors = {name: t.cpu().contiguous() for name, t in tensors.items()}
    metadata = {"state": json.dumps(state), "settings": json.dumps(settings_of(args))}
    save_adapter(model, f"{folder}/adapter", model.name_or_path)
    atomic_write(f"{folder}/checkpoint.safetensors", safetensors.torch.save(tensors, metadata=metadata))


def read_checkpoint(folder, args):
    """(state, tensors) of the last checkpoint, or None where there is none; refuses one made with other settings."""
    path = f"{folder}/checkpoint.safetensors"
    if not os.path.exists(path):
        return None
    try:
        with safe_open(path, framework="pt") as f:
            metadata, tensors = f.metadata(), {name: f.get_tensor(name) for name in f.keys()}
    except safetensors.SafetensorError as e:
        raise UserError(f"{path}: not a readable checkpoint ({qerl.reason(e)}); remove it to start over")
    if "settings" not in (metadata or {}):
        raise UserError(f"{path}: not a checkpoint of this program; remove it to start over, or choose another --out")
    now, then = settings_of(args), json.loads(metadata["settings"])
    for key in POLICY if args.eval_only else sorted(now.keys() | then.keys()):
        if now.get(key) != then.get(key):
            raise UserError(f"--resume: {folder} was started with {key} = {then.get(key)}, now it is {now.get(key)}; "
                            "give the same settings or another --out")
    return json.loads(metadata["state"]), tensors


@torch.no_grad()
def restore(tensors, model, optimizer=None, rngs=()):
    for i, rng in enumerate(rngs):
        rng.set_state(tensors[f"rng.{i}"])
    for name, p in qerl.trainable(model).items():
        p.copy_(tensors[f"model.{name}"])
        prefix = f"optimizer.{name}."
        for key in [k for k in tensors if optimizer and k.startswith(prefix)]:
            value = tensors[key]                                            # AdamW keeps its step count on the CPU
            optimizer.state[p][key[len(prefix):]] = value if value.dim() == 0 else value.to(p.device)


def open_run(args):
    """Choose, create and lock the run's folder; returns the lock, to be kept until the process ends."""
    stem = f"runs/{os.path.basename(os.path.normpath(args.model)) if args.model else 'small'}-{args.weights}-{args.algo}"
    if args.out is None:
        needed = "checkpoint.safetensors" if args.resume else ""              # a start that failed is not a run to resume
        found = glob.glob(f"{glob.escape(stem)}-[0-9]*/{needed}")
        newest = max((int(n) for path in found if (n := os.path.dirname(path).rsplit("-", 1)[1]).isdigit()), default=0)
        if args.resume and not newest:
            raise UserError(f"--resume: there is no run {stem}-N with a checkpoint; name its folder with --out or start without --resume")
        args.out = f"{stem}-{newest if args.resume else newest + 1}"
    if args.resume and not os.path.isdir(args.out):
        raise UserError(f"--resume --out {args.out}: no such folder; name a run's or start without --resume")
    with creating(args.out):
        os.makedirs(args.out, exist_ok=True)
        lock = open(f"{args.out}/lock", "w")
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"--out {args.out}: in use by a running process; wait for it or choose another folder")
    if not args.resume and any(os.path.exists(f"{args.out}/{name}") for name in ("metrics.jsonl", "checkpoint.safetensors")):
        raise UserError(f"--out {args.out}: already holds a run; add --resume to go on with it or choose another folder")
    return lock


def read_text(path):
    if not os.path.exists(path):
        return ""
    with open(path, encoding="utf-8", errors="replace") as f:
        return f.read()


def read_metrics(folder, last_step):
    """The logged steps up to last_step; what a killed process logged after its last checkpoint is dropped."""
    path = f"{folder}/metrics.jsonl"
    try:
        metrics = [json.loads(line) for line in read_text(path).splitlines()[:last_step]]
    except ValueError:
        metrics = []
    if len(metrics) < last_step:
        raise UserError(f"{path}: not the log of this run's first {last_step} steps; start again in another --out")
    return metrics


def plot(metrics, before, after, plt):
    """Accuracy, reward, entropy with the noise, and completion length over the steps, as a picture."""
    step = [m["step"] for m in metrics]
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), layout="constrained")
    panels = [("accuracy", "training accuracy (temperature 1)", "fraction correct"), ("reward", "mean reward", "reward"),
              ("entropy", "policy entropy and AQN sigma", "nats a token"), ("length", "completion length", "tokens")]
    for axis, (key, title, label) in zip(axes.flat, panels):
        axis.plot(step, [m[key] for m in metrics], color="tab:blue", linewidth=1.2)
        axis.set(title=title, xlabel="step", ylabel=label)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    axes[0, 0].set_ylim(0, 1)
    for accuracy, at, label in ((before, 0, "before"), (after, step[-1], "after")):
        axes[0, 0].plot(at, accuracy, "o" if at else "s", color="tab:orange", label=f"held-out (temperature 0.6) {label}: {accuracy:.1%}")
    axes[0, 0].legend(loc="upper left", frameon=False)
    axes[1, 0].yaxis.label.set_color("tab:blue")
    noise = axes[1, 0].twinx()
    noise.plot(step, [m["sigma"] for m in metrics], color="tab:red", linewidth=1.2, drawstyle="steps-post")
    noise.set_ylabel("sigma", color="tab:red")
    noise.set_ylim(bottom=0)
    return figure


def save_figure(path, draw, *data):
    """Write the picture draw(*data, matplotlib.pyplot) returns."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    picture = io.BytesIO()
    figure = draw(*data, plt)
    figure.savefig(picture, format="png", dpi=110)
    plt.close(figure)
    atomic_write(path, picture.getvalue())


def peak_memory_gb(device):
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9 if resource else 0.0


def command_line():
    return "python " + " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]])


def environment(device):
    cuda = torch.device(device).type == "cuda"
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {"date": time.strftime("%Y-%m-%d"), "hardware": torch.cuda.get_device_name() if cuda else cpu,
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
            "triton": getattr(qerl.fp4_kernels.triton, "__version__", None)}


# ---------------------------------------------------------------------------------------------------------------------
# The story

def load_all(args):
    """(model, text, training problems, held-out problems) of the command line."""
    data = gsm8k(args.data) if args.data else None                          # what is local is checked before any download
    folder = qerl.model_folder(args.model) if args.model else warm_start()
    problems, held_out = data or (gsm8k(None) if args.model else made_up_problems())
    text = ChatText(folder) if args.model else ByteText()
    if torch.device(args.device).type == "cuda":
        torch.cuda.set_device(torch.device(args.device).index or 0)
    torch.manual_seed(args.seed)                                            # LoRA's A
    model = qerl.load_model(folder, args.weights, args.lora_rank, args.device, lora_alpha=args.lora_alpha,
                            train_norms=args.train_norms)
    model.name_or_path = args.model or folder                               # what the adapter says it belongs to
    if model.device.type == "cuda":
        model.recompute_in_backward()
    limit = model.config.max_position_embeddings - args.max_new_tokens
    if limit < 1:
        raise UserError(f"--max-new-tokens {args.max_new_tokens}: the model has {model.config.max_position_embeddings} positions; lower it")
    held_out = held_out[:args.eval_questions or None]
    return model, text, with_prompts(problems, text, limit), with_prompts(held_out, text, limit)


def evaluate_both(model, text, held_out, args, when):
    """The paper's pass@1 (temperature 0.6, top-p 0.95) and greedy accuracy, as fractions."""
    return {f"accuracy_{when}": evaluate(model, text, held_out, args, 0.6, 0.95, f"pass@1 {when}"),
            f"greedy_{when}": evaluate(model, text, held_out, args, 0.0, 1.0, f"greedy {when}")}


def train(args):
    saved = read_checkpoint(args.out, args) if args.resume else None
    model, text, problems, held_out = load_all(args)
    parameters = qerl.trainable(model).values()
    optimizer = torch.optim.AdamW([{"params": [p for p in parameters if p.dim() > 1]},
                                   {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0}], args.lr, **ADAM)
    sampling_rng = torch.Generator(model.device).manual_seed(args.seed)
    noise_rng = torch.Generator().manual_seed(args.seed + 1)
    rngs = [sampling_rng, noise_rng]
    state, metrics = start_or_resume(saved, model, text, held_out, optimizer, rngs, args)
    started, clock = time.time() - state["seconds"], Clock(model.device)

    def draw():
        chosen = next_problems(problems, state["drawn"], args.prompts, args.seed)
        state["drawn"] += args.prompts
        return sample_groups(model, text, chosen, args, sampling_rng, clock)

    bar = tqdm(range(state["step"], args.steps), initial=state["step"], total=args.steps, unit="step")
    for step in bar:
        clock.restart()

        # sample and score: the noisy policy π_θ + N(0, σ²) draws the completions
        sigma = qerl.noise_sigma(step, args.steps, args.stages, args.sigma_start, args.sigma_end, args.schedule)
        with qerl.adaptive_quantization_noise(model, sigma, noise_rng):
            draws = [draw()]
            batch = dynamic_sampling(draws, draw, args.prompts) if args.algo == "dapo" else draws[0]

        # advantage
        rollout = batch.rollout
        advantages = qerl.group_advantages(batch.rewards).flatten()                                       # (N,)
        mask = rollout.mask                                                                               # (N, C)
        if args.algo == "dapo":
            mask = mask & rollout.finished[:, None]           # truncated completions give no gradient

        # log-probabilities of the policy before the update, and of the reference: the same model, adapters off
        with clock("logprobs"):
            old_logprobs = all_logprobs(model, batch, args)
            ref_logprobs = None
            if args.beta:
                with qerl.adapters_off(model):
                    ref_logprobs = all_logprobs(model, batch, args)

        # loss and step, once for each minibatch
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        with clock("update"):
            kls = [policy_update(model, optimizer, batch, rows.tolist(), advantages, old_logprobs, ref_logprobs, mask, args)
                   for rows in torch.arange(len(advantages)).chunk(args.updates)]

        # log
        state["step"], state["seconds"] = step + 1, time.time() - started
        metrics.append(step_metrics(step, sigma, draws, rollout, old_logprobs, kls, clock, args))
        log_step(metrics[-1], batch, bar, args)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save_checkpoint(args.out, model, optimizer, rngs, state, args)

    state.update(evaluate_both(model, text, held_out, args, "after"))
    finish(state, metrics, len(held_out), time.time() - started, args)


def start_or_resume(saved, model, text, held_out, optimizer, rngs, args):
    """(state, metrics so far): of the saved checkpoint, else fresh, with the accuracy before training."""
    if saved:
        state, tensors = saved
        restore(tensors, model, optimizer, rngs)
        print(f"resumed {args.out} after step {state['step']}")
    else:
        if args.resume:
            print(f"{args.out} has no checkpoint yet: starting over")
        state = {"step": 0, "drawn": 0, "seconds": 0.0, **evaluate_both(model, text, held_out, args, "before")}
        save_checkpoint(args.out, model, optimizer, rngs, state, args)
    metrics = read_metrics(args.out, state["step"])
    samples = read_text(f"{args.out}/samples.txt").split(f"--- step {state['step'] + 1},")[0] if saved else ""
    atomic_write(f"{args.out}/metrics.jsonl", "".join(json.dumps(m) + "\n" for m in metrics))
    atomic_write(f"{args.out}/samples.txt", samples)
    return state, metrics


def step_metrics(step, sigma, draws, rollout, old_logprobs, kls, clock, args):
    """What metrics.jsonl says of a step; reward and accuracy are of everything sampled."""
    mismatch_kl, mismatch_max_ratio = qerl.mismatch(old_logprobs, rollout.logprobs, rollout.mask)
    return {"step": step + 1, "reward": torch.cat([b.rewards for b in draws]).mean().item(),
            "accuracy": torch.cat([b.correct for b in draws]).mean().item(), "draws": len(draws),
            "entropy": rollout.entropy[rollout.mask].mean().item(), "sigma": sigma, "kl": sum(kls) / len(kls),
            "mismatch_kl": mismatch_kl, "mismatch_max_ratio": mismatch_max_ratio,
            "length": rollout.length.float().mean().item(), "truncated": 1 - rollout.finished.float().mean().item(),
            "lr": learning_rate(step, args), "seconds": clock.seconds | {"step": time.perf_counter() - clock.began},
            "tokens_per_s": sum(b.rollout.length.sum().item() for b in draws) / clock.seconds["rollout"],
            "peak_memory_gb": peak_memory_gb(args.device)}


def finish(state, metrics, held_out_questions, seconds, args):
    """Write summary.json and curve.png, say what came of it."""
    accuracies = {k: v for k, v in state.items() if k.endswith(("_before", "_after"))}
    summary = {"command": command_line(), **accuracies, "held_out_questions": held_out_questions, "steps": args.steps, "seconds": seconds,
               "settings": settings_of(args), **environment(args.device)}
    atomic_write(f"{args.out}/summary.json", json.dumps(summary, indent=1))
    save_figure(f"{args.out}/curve.png", plot, metrics, summary["accuracy_before"], summary["accuracy_after"])
    print(f"held-out pass@1 {summary['accuracy_before']:.1%} -> {summary['accuracy_after']:.1%}, "
          f"greedy {summary['greedy_before']:.1%} -> {summary['greedy_after']:.1%}, in {seconds:.0f} s; "
          f"curve, metrics, samples and adapter are in {args.out}/")


def evaluate_only(args):
    """Measure the model, or with --resume the run's policy; with --out the figures are also kept in eval.json."""
    saved = read_checkpoint(args.out, args) if args.resume else None
    if args.resume and not saved:
        raise UserError(f"--resume: {args.out} has no checkpoint to evaluate")
    model, text, _, held_out = load_all(args)
    if saved:
        print(f"evaluating {args.out} after step {saved[0]['step']}")
        restore(saved[1], model)
    result = evaluate_both(model, text, held_out, args, "now")
    if args.out:
        atomic_write(f"{args.out}/eval.json", json.dumps({**result, "settings": settings_of(args)}, indent=1))


def log_step(m, batch, bar, args):
    """Append to metrics.jsonl; one sample completion goes to samples.txt."""
    with open(f"{args.out}/metrics.jsonl", "a") as f:
        f.write(json.dumps(m) + "\n")
    with open(f"{args.out}/samples.txt", "a", encoding="utf-8", errors="replace") as f:
        f.write(f"--- step {m['step']}, reward {batch.rewards[0, 0]:.1f}, right answer {batch.problems[0]['number']}\n"
                f"{batch.problems[0]['question']}\n{batch.texts[0]}\n\n")
    bar.set_postfix_str(f"reward {m['reward']:.2f}, accuracy {m['accuracy']:.2f}, entropy {m['entropy']:.3f}, "
                        f"sigma {m['sigma']:.1e}, length {m['length']:.0f}, {m['tokens_per_s']:.0f} tok/s")


def main():
    args = lock = None
    try:
        args = arguments()
        lock = open_run(args) if args.out or args.resume or not args.eval_only else None
        if args.eval_only:
            evaluate_only(args)
        else:
            train(args)
    except UserError as e:
        if lock and os.listdir(args.out) == ["lock"]:  # nothing came of this run
            os.remove(f"{args.out}/lock")
            with contextlib.suppress(OSError):         # "." or a link stays
                os.rmdir(args.out)
        sys.exit(fail(str(e)))
    except (OSError, safetensors.SafetensorError) as e:
        sys.exit(fail(f"{e}; mend or remove what it names" + go_on(args)))
    except RuntimeError as e:                          # torch.OutOfMemoryError is one; on a CPU it is a plain one
        if not re.search("out of memory|can't allocate memory", str(e)):
            raise
        sys.exit(fail("out of memory; lower --slots (rollout), --micro-tokens (update) or, in a new run, --max-new-tokens" + go_on(args)))
    except KeyboardInterrupt:
        print(f"\nstopped{go_on(args)}", file=sys.stderr)
        sys.exit(130)


def go_on(args):
    """How to, if there is something to go on with."""
    return f"; go on with the same command and --resume --out {args.out}" if args and args.out and not args.eval_only else ""


def fail(message):
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
