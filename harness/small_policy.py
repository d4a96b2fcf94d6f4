"""The built-in policy and its problems.

The policy has a million parameters and is trained to imitate worked answers of which most are
careless: they add, whatever is asked. It can do the format and the arithmetic; which operation a
problem needs, the reward has to teach. A problem is {"question", "answer"} as in GSM8K: worked
steps with <<calculations>>, then "#### number".
"""
import random
import re
from pathlib import Path

import tiktoken
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from harness.folders import fingerprint, made_once

NAMES = ["Ann", "Ben", "Eva", "Max", "Mia", "Sam", "Tom", "Zoe"]
THINGS = ["pens", "figs", "cups", "eggs", "nuts", "keys", "hats", "toys"]
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def word_problem(rng, careless=False):
    """One made-up problem of one or two steps, with numbers below 20 and results below 82.

    A careless answer adds at the end, whatever is asked.
    """
    name = rng.choice(NAMES)
    thing = rng.choice(THINGS)
    a = rng.randint(10, 19)
    b = rng.randint(2, 9)
    c = rng.randint(2, 9)
    question, steps = rng.choice([
        (f"{name} has {a} {thing} and buys {b} more. How many {thing} now?", [(a, "+", b)]),
        (f"{name} has {a} {thing} and loses {b}. How many {thing} now?", [(a, "-", b)]),
        (f"{name} fills {b} bags with {c} {thing} each. How many {thing}?", [(b, "*", c)]),
        (f"{name} has {a} {thing}, buys {b} and loses {c}. How many {thing} now?",
         [(a, "+", b), (a + b, "-", c)]),
    ])
    if careless:
        x, _, y = steps[-1]
        steps[-1] = (x, "+", y)
    lines = []
    for x, op, y in steps:
        z = OPERATIONS[op](x, y)
        lines.append(f"{x}{op}{y}=<<{x}{op}{y}={z}>>{z}")
    return {"question": question, "answer": "\n".join(lines) + f"\n#### {z}"}


def word_problems(count, seed, exclude=(), careless=0.0):
    """`count` different problems from a seeded generator, none with the question of one in `exclude`."""
    rng = random.Random(seed)
    problems = {problem["question"]: problem for problem in exclude}
    while len(problems) < len(exclude) + count:
        problem = word_problem(rng, rng.random() < careless)
        problems.setdefault(problem["question"], problem)
    return list(problems.values())[len(exclude):]


def made_up_problems(careless=0.0):
    """(train, held-out), disjoint; `careless` is the fraction of careless answers in train."""
    held_out = word_problems(512, seed=1)
    return word_problems(8192, seed=2, exclude=held_out, careless=careless), held_out


# A word with the space before it, a run of signs such as "=<<", or one other character, such as a digit.
PIECES = r" ?[A-Za-z]+|[^\w\s]+|[\s\S]"
TAGS = ["<think>", "</think>", "<answer>", "</answer>", "<end>"]


def word_encoding():
    """Tokens are the bytes, the problems' words and the tags.

    A merge adds one letter: the beginnings of a word are tokens, too.
    """
    problems = word_problems(512, seed=1)
    text = "\n".join(problem["question"] + problem["answer"] for problem in problems)
    ranks = {bytes([i]): i for i in range(256)}
    for word in sorted(set(re.findall(PIECES, text))):
        for end in range(2, len(word) + 1):
            ranks.setdefault(word[:end].encode(), len(ranks))
    tags = {tag: len(ranks) + i for i, tag in enumerate(TAGS)}
    return tiktoken.Encoding("words", pat_str=PIECES, mergeable_ranks=ranks, special_tokens=tags)


class WordText:
    """Text <-> tokens of the small policy: one token a word, a digit or a tag; else one a byte."""

    encoding = word_encoding()
    eos = {encoding.encode_single_token("<end>")}

    def prompt(self, question):
        return self.encoding.encode_ordinary(f"{question}\n")

    def prompts(self, questions):
        return list(map(self.prompt, questions))

    def worked_answer(self, work, final):
        text = f"<think>{work}</think><answer>{final}</answer><end>"
        return self.encoding.encode(text, allowed_special="all")

    def decode(self, ids):
        return self.encoding.decode([i for i in ids if i not in self.eos])

    shown = decode


def make_policy():
    """A transformers model of a million parameters, with random weights."""
    config = transformers.Qwen2Config(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WordText.encoding.n_vocab,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.08,            # transformers' 0.02 is for wider models
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def imitation_loss(model, text, problems):
    """Cross-entropy of the worked answers after their questions."""
    tokens = []
    labels = []
    for problem in problems:
        question = text.prompt(problem["question"])
        answer = text.worked_answer(*problem["answer"].split("\n#### "))
        tokens.append(torch.tensor(question + answer))
        labels.append(torch.tensor([-100] * len(question) + answer))       # -100: not learned
    tokens = pad_sequence(tokens, batch_first=True)
    labels = pad_sequence(labels, batch_first=True, padding_value=-100)
    return model(tokens, labels=labels).loss


def train_policy(seed, steps=250, batch=64):
    """The small policy, trained on worked answers of which 70 % are careless.

    seed: of its first weights and the order of its problems.
    """
    text = WordText()
    problems, _ = made_up_problems(careless=0.7)
    torch.manual_seed(seed)
    model = make_policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / 10, max(0.1, 1 - step / steps)))
    rng = random.Random(seed)
    for _ in tqdm(range(steps), desc="warm start on worked answers", unit="step"):
        imitation_loss(model, text, rng.sample(problems, batch)).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


def warm_start(seed=0):
    """A Hugging Face folder with the small policy; made in minutes the first time, then cached.

    seed: of its making (train_policy). Policies of other seeds learn differently, by far.
    """
    def make(folder):
        model = train_policy(seed)
        transformers.utils.logging.disable_progress_bar()
        model.save_pretrained(folder)

    digest = fingerprint([Path(__file__).read_bytes()])
    return made_once(f"warm-start-{digest[:12]}-seed{seed}", make)
