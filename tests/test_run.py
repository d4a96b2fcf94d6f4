"""A run: the loop, resume, evaluation, trackers."""
import copy
import dataclasses
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
import types
from decimal import Decimal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import qerl
import train_gsm8k
from common import BOXED, LEARNING, QUICK, QUIZ_EOS, QUIZ_TOKENS, TAGGED, assert_learned
from common import command, files_below, flat_policy, recorded, refused, run_main
from common import scored_by_letters, without_times
import harness.run
from harness.answers import final_number, is_right
from harness.batches import cut_rows, make_batch
from harness.export import adapter_tensors
from harness.folders import read_jsonl
from harness.layers import train_all_weights
from harness.ranks import Ranks
from harness.run import flat, read_checkpoint
from harness.small_policy import ByteText, made_up_problems
from test_qerl import relative, scales


def test_cut_rows_covers_every_row_within_the_budget():
    rng = random.Random(0)
    prompts = [[k // 4] * (9 + k // 4) for k in range(80)]
    lengths = [rng.randint(1, 90) for _ in range(79)] + [700]
    order = rng.sample(range(80), 80)
    prompts, lengths = [prompts[i] for i in order], [lengths[i] for i in order]
    pieces = cut_rows(prompts, lengths, 400)
    assert sorted(i for piece in pieces for i in piece) == list(range(80))
    for piece in pieces:
        packing = qerl.pack([prompts[i] for i in piece], torch.tensor([lengths[i] for i in piece]))
        width = max(len(prompts[i]) + lengths[i] for i in piece)
        assert len(piece) == 1 or sum(packing.sizes) <= 400 and len(piece) * width <= 1600
    shared = sum(map(len, {tuple(prompt) for prompt in prompts}))
    assert len(pieces) < 1.3 * (sum(lengths) + shared) / 400 + 2


def test_cut_rows_by_hand():
    """A prompt of 50 tokens counts once in a piece; padded, its rows have at most four budgets."""
    prompts = [[1] * 50] * 8
    assert cut_rows(prompts, [10] * 8, 130) == [list(range(8))]
    assert cut_rows(prompts, [10] * 8, 129) == [list(range(7)), [7]]
    assert cut_rows(prompts, [10] * 8, 30) == [[i] for i in range(8)]
    assert cut_rows(prompts, [50] + [1] * 7, 150) == [list(range(6)), [6, 7]]        # 6 rows of 100


def test_dynamic_sampling_replaces_groups_without_variance():
    draws = iter([[[1, 1], [0, 1]], [[0, 0], [1, 1]], [[1, 0], [0, 0]], None])

    def draw():
        rewards = torch.tensor(next(draws)).float()
        tokens = torch.zeros(4, random.randint(1, 3), dtype=torch.long)
        rollout = qerl.Rollout(tokens, tokens.float(), tokens.float(),
                               torch.ones(4, dtype=torch.long), torch.ones(4, dtype=torch.bool))
        return train_gsm8k.Samples([{"prompt": [1]}] * 2, rollout, list("abcd"), rewards, rewards)
    samples = train_gsm8k.dynamic_sampling(draw(), draw)
    assert samples.rewards.tolist() == [[0, 1], [1, 0]] and samples.texts == ["c", "d", "a", "b"]
    assert len(samples.rollout.tokens) == 4
    assert len(samples.draws) == 3 and samples.draws[1].rewards.tolist() == [[0, 0], [1, 1]]


def test_a_completions_text_is_of_its_own_tokens():
    """Without the padding behind it, and without its end."""
    tokens = torch.tensor([[65, 66, 67], [68, 260, 69], [70, 71, 72]])
    length = torch.tensor([3, 2, 1])
    rollout = qerl.Rollout(tokens, None, None, length, None)
    assert train_gsm8k.decode_all(ByteText(), rollout) == ["ABC", "D", "F"]


def test_dynamic_sampling_gives_up_after_four_draws():
    """Groups without a signal then fill the batch, in the order in which they were drawn."""
    drawn = []

    def draw():
        rewards = torch.zeros(2, 2)
        rewards[1, 1] = float(len(drawn) == 2)                  # one group of the third draw
        drawn.append(rewards)
        rows = torch.full((4, len(drawn)), len(drawn))
        finished = torch.ones(4, dtype=torch.bool)
        rollout = qerl.Rollout(rows, rows.float(), rows.float(), rows[:, 0], finished)
        questions = [{"prompt": [len(drawn), i]} for i in range(2)]
        return train_gsm8k.Samples(questions, rollout, list("abcd"), rewards, rewards)
    samples = train_gsm8k.dynamic_sampling(draw(), draw)
    assert len(drawn) == len(samples.draws) == 4
    assert [q["prompt"] for q in samples.questions] == [[3, 1], [1, 0]]
    assert samples.rollout.tokens.tolist() == [[3, 3, 3, 0]] * 2 + [[1, 0, 0, 0]] * 2
    assert samples.rollout.length.tolist() == [3, 3, 1, 1] and samples.texts == list("cdab")
    assert samples.rewards.tolist() == samples.correct.tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize("count", [3, 10, 25])
def test_questions_come_once_a_pass_in_a_new_order_each(count):
    questions = [{"question": str(i)} for i in range(10)]

    def asked(seed, of=questions):
        draws = [train_gsm8k.next_questions(of, i, count, seed) for i in range(0, 300, count)]
        return [int(q["question"]) for draw in draws for q in draw][:300]
    order = asked(0)
    passes = [order[i:i + 10] for i in range(0, 300, 10)]
    assert all(sorted(p) == list(range(10)) for p in passes)
    assert len(set(map(tuple, passes))) == 30 and asked(0) == order and asked(1)[:10] != order[:10]


def test_the_learning_rate_rises_linearly_then_falls_as_a_cosine():
    rates = [train_gsm8k.learning_rate(step, 13, 2.0, 0.25) for step in range(13)]
    falling = [1 + math.cos(math.pi * k / 10) for k in range(10)]
    assert rates == pytest.approx([2 / 3, 4 / 3, 2.0, *falling])
    assert [train_gsm8k.learning_rate(step, 2, 1.0, 0.0) for step in range(2)] == [1.0, 1.0]
    assert train_gsm8k.learning_rate(0, 1, 1.0, 0.5) == 1.0


# The loop is held to a second one, without packing, pieces or PyTorch's optimiser, on a run in which
# each step has something to learn.

def words_of(tokens):
    """A completion of the quiz as a list of tokens, without its end."""
    return [t for t in tokens if t != QUIZ_EOS]


def quiz_verdict(tokens):
    """(the number that a completion answers, or None; whether in the paper's format), by its tokens."""
    words = words_of(tokens)
    answers = [t for t in words if t in TAGGED] or [t for t in words if t in BOXED]
    number = {**BOXED, **TAGGED}[answers[-1]] if answers else None
    return number, len(words) == 1 and words[0] in TAGGED


def quiz_stated(tokens):
    """The number that evaluation takes: without an answer, the last run of the token 1."""
    number, _ = quiz_verdict(tokens)
    runs = re.findall("1+", "".join(QUIZ_TOKENS[t] for t in words_of(tokens)))
    return number if number or not runs else int(runs[-1])


def quiz_number(prompt):
    """The right answer of a question, given as tokens."""
    return 1 + len(prompt) % 2


def policy_of(settings, policy):
    """The model of a run with these trained parameters."""
    model = qerl.load_model(
        settings.model, lora_rank=settings.lora_rank, lora_alpha=settings.lora_alpha,
        train_norms=settings.train_norms,
    )
    for name, p in qerl.trainable(model).items():
        p.data.copy_(policy[name])
    return model


def completions_of(call, settings):
    """The completions of a call of `generate`, each with its question, its verdict and its reward."""
    found = []
    for i, length in enumerate(call.rollout.length.tolist()):
        prompt = call.prompts[i // settings.group]
        tokens = call.rollout.tokens[i, :length].tolist()
        number, in_format = quiz_verdict(tokens)
        correct = number == quiz_number(prompt)
        reward = 2.0 * correct + 0.2 * in_format if settings.reward == "paper" else 1.0 * correct
        found.append(types.SimpleNamespace(
            prompt=prompt, tokens=tokens, correct=correct, reward=reward,
            finished=tokens[-1] == QUIZ_EOS, rollout_logprobs=call.rollout.logprobs[i, :length],
            entropy=call.rollout.entropy[i, :length], clipped=[],
        ))
    return found


def logits_of(model, row):
    """The logits from which a completion's tokens were drawn: of a line of its own, without padding."""
    return model(torch.tensor([row.prompt + row.tokens]))[0, len(row.prompt) - 1:-1]


def logprobs_of(model, row):
    return logits_of(model, row).log_softmax(-1)[range(len(row.tokens)), row.tokens]


def loss_of(model, row, settings):
    """(Eq. 3's loss at each token of a completion, the KL at each, which ratios were clipped)."""
    logprobs = logprobs_of(model, row)
    ratio = (logprobs - row.old).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    gain = torch.minimum(ratio * row.advantage, clipped * row.advantage)
    is_clipped = (gain < ratio * row.advantage).tolist()
    if settings.tis:
        gain = gain * (row.old - row.rollout_logprobs).exp().clamp(max=settings.tis)
    log_ratio = row.reference - logprobs
    kl = log_ratio.exp() - 1 - log_ratio
    return settings.beta * kl - gain, kl.detach(), is_clipped


def minibatch_loss(model, rows, settings):
    """(loss, KL) of a minibatch.

    GRPO's mean of means, DAPO's mean over the tokens of the finished, Dr. GRPO's sum over a constant length.
    """
    counted = [row for row in rows if row.finished or settings.algo != "dapo"]
    tokens = sum(len(row.tokens) for row in counted)
    loss = kl = 0
    for row in counted:
        losses, kls, row.clipped = loss_of(model, row, settings)
        share = {"grpo": 1 / len(row.tokens) / len(rows), "dapo": 1 / tokens,
                 "dr-grpo": 1 / settings.max_new_tokens / len(rows)}[settings.algo]
        loss = loss + losses.sum() * share
        kl += kls.sum().item() * share
    return loss, kl


def adamw(parameters, moments, lr, settings):
    """One step of AdamW as its paper has it, on the clipped gradient; returns the norm before that."""
    norm = sum(p.grad.square().sum() for p in parameters.values()).sqrt().item()
    for name, p in parameters.items():
        count, mean, square = moments.get(name, (0, torch.zeros_like(p), torch.zeros_like(p)))
        grad = p.grad * settings.gradient_clip / max(norm, settings.gradient_clip)
        count += 1
        mean = 0.9 * mean + 0.1 * grad
        square = 0.99 * square + 0.01 * grad ** 2
        moments[name] = count, mean, square
        decay = settings.weight_decay if p.dim() > 1 else 0
        step = (mean / (1 - 0.9 ** count)) / ((square / (1 - 0.99 ** count)).sqrt() + 1e-8)
        p.data = p.data - lr * decay * p.data - lr * step
        p.grad = None
    return norm


def draws_of_a_step(rollouts, settings):
    """(calls of generate, their completions in groups, of each group whether its rewards differ).

    GRPO draws once; DAPO until as many groups as there are prompts have a signal, four times at most.
    """
    draws = []
    groups = []
    teaches = []
    while not draws or (settings.algo == "dapo" and len(draws) < 4
                        and sum(teaches) < settings.prompts):
        draws.append(next(rollouts))
        rows = completions_of(draws[-1], settings)
        more = [rows[i:i + settings.group] for i in range(0, len(rows), settings.group)]
        groups += more
        teaches += [len({row.reward for row in group}) > 1 for group in more]
    return draws, groups, teaches


def assert_sampled_by(model, noise, rows):
    """A rollout's log-probabilities and entropies are the model's with this noise, at temperature 1."""
    for norm, z in zip(scales(model), noise):
        norm.noisy_weight = norm.weight.detach() + z
    for row in rows:
        distribution = logits_of(model, row).detach().log_softmax(-1)
        logprobs = distribution[range(len(row.tokens)), row.tokens]
        entropy = -(distribution.exp() * distribution).sum(-1)
        torch.testing.assert_close(row.rollout_logprobs, logprobs, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(row.entropy, entropy, rtol=1e-3, atol=1e-3)
    for norm in scales(model):
        norm.noisy_weight = None


def set_advantages(group, algo):
    """Eq. 4 of one group of completions; 0 if all have the same reward. Dr. GRPO does not divide."""
    rewards = torch.tensor([row.reward for row in group])
    for row in group:
        row.advantage = 0.0
        row.teaches = bool(rewards.min() < rewards.max())
        if row.teaches:
            divisor = 1 if algo == "dr-grpo" else rewards.std() + 1e-4
            row.advantage = ((row.reward - rewards.mean()) / divisor).item()


def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


def logged_of(rows, everything, settings):
    """What the log has to say of the rows that a step kept, and of everything that it drew.

    Without a KL term the mismatch is of the groups with a signal: the others are not scored.
    """
    scored = [row for row in rows if row.teaches or settings.beta]
    x = torch.cat([row.old - row.rollout_logprobs for row in scored])
    return {
        "reward": mean(row.reward for row in everything),
        "accuracy": mean(row.correct for row in everything),
        "entropy": torch.cat([row.entropy for row in rows]).mean().item(),
        "groups_left_out": 1 - len(scored) / len(rows),
        "mismatch_kl": (x.exp() - 1 - x).mean().item(),
        "mismatch_max_ratio": x.abs().max().exp().item(),
        "length": mean(len(row.tokens) for row in rows),
        "truncated": mean(not row.finished for row in rows),
    }

LOOP = dict(
    device="cpu", dtype="float32", prompts=4, group=4, max_new_tokens=6, lora_rank=4, steps=4,
    updates=2,
    stages=4, lr=0.03, reward="paper", sigma_start=0.3, sigma_end=0.075, micro_tokens=24,
    save_every=3,
    seed=12, quantizer="rtn",
)

GRPO_LOOP = dict(beta=0.3, tis=1.1, train_norms=True, warm_up=0.5, weight_decay=0.5,
                 gradient_clip=0.5)

DAPO_LOOP = dict(
    algo="dapo", reward="answer", warm_up=0.0, gradient_clip=1.1, max_new_tokens=12, lora_alpha=6.0,
    schedule="linear",
)

DR_GRPO_LOOP = dict(algo="dr-grpo", warm_up=0.0, gradient_clip=0.5)


@pytest.mark.parametrize("options,rates,sigmas", [
    # Two steps of warm-up, then half a cosine to zero; and without warm-up.
    (GRPO_LOOP, [0.5, 1, 1, 0.5], [0, 0.3, 0.15, 0.075]),
    (DAPO_LOOP, [1, 1, 0.75, 0.25], [0, 0.3, 0.1875, 0.075]),
    (DR_GRPO_LOOP, [1, 1, 0.75, 0.25], [0, 0.3, 0.15, 0.075]),
])
def test_a_run_is_what_the_equations_say(quiz, tmp_path, monkeypatch, options, rates, sigmas):
    """Every update of a run, computed again from its completions, each in a line of its own."""
    settings = train_gsm8k.Settings(model=quiz, data=quiz, out=str(tmp_path), **{**LOOP, **options})
    calls = recorded(monkeypatch)
    train_gsm8k.train(settings)
    rollouts = iter(calls[2:-2])                    # the others are the two of each evaluation
    log = read_jsonl(tmp_path / "metrics.jsonl")
    torch.manual_seed(settings.seed)
    model = qerl.load_model(
        quiz, lora_rank=4, lora_alpha=settings.lora_alpha, train_norms=settings.train_norms,
    )
    reference = qerl.load_model(quiz)               # without adapters
    parameters = qerl.trainable(model)
    moments = {}
    asked = []
    norms = []
    clipped = []
    importances = []
    noises = []
    for step, (sigma, rate) in enumerate(zip(sigmas, rates)):
        # Sampled at temperature 1 and without top-p, by the policy of this step with one draw of noise.
        draws, groups, teaches = draws_of_a_step(rollouts, settings)
        everything = sum(groups, [])
        noises.append(torch.cat(draws[0].noise))
        for call in draws:
            asked += call.prompts
            assert call.drawn_with == {(1.0, 1.0)}
            assert flat_policy(call.policy).equal(flat_policy(draws[0].policy))
            assert torch.cat(call.noise).equal(noises[-1])
        assert_sampled_by(model, draws[0].noise, everything)
        assert all(row.finished or len(row.tokens) == settings.max_new_tokens for row in everything)

        # What is learned from; DAPO prefers groups with a signal. The advantages.
        kept = [0, 1, 2, 3]
        if settings.algo == "dapo":
            kept = sorted(range(len(groups)), key=lambda k: not teaches[k])[:4]
        assert any(teaches[k] for k in kept)
        rows = sum((groups[k] for k in kept), [])
        for k in kept:
            set_advantages(groups[k], settings.algo)
        for row in rows:
            row.old = logprobs_of(model, row).detach()
            row.reference = logprobs_of(reference, row).detach()
            importances += (row.old - row.rollout_logprobs).exp().tolist()

        # The updates.
        before = flat_policy(parameters).detach().clone()
        kls = []
        for minibatch in (rows[:8], rows[8:]):
            loss, kl = minibatch_loss(model, minibatch, settings)
            loss.backward()
            norms.append(adamw(parameters, moments, settings.lr * rate, settings))
            kls.append(kl)
            clipped += [(row.advantage > 0, x) for row in minibatch for x in row.clipped]
        change = flat_policy(parameters).detach() - before
        following = calls[draws[-1].number + 1].policy
        assert change.norm() > 0
        assert relative(flat_policy(following) - flat_policy(draws[0].policy), change) < 5e-4

        expected = {
            "step": step + 1,
            "sigma": sigma,
            "kl": mean(kls) if settings.beta else 0,
            "gradient_norm": norms[-1],
            "lr": settings.lr * rate,
            "draws": len(draws),
            **logged_of(rows, everything, settings),
        }
        logged = {name: log[step][name] for name in expected}
        assert logged == pytest.approx(expected, rel=5e-4, abs=1e-6)
        drawn_tokens = log[step]["tokens_per_s"] * log[step]["seconds"]["rollout"]
        assert drawn_tokens == pytest.approx(sum(len(row.tokens) for row in everything))
    assert next(rollouts, None) is None and len(log) == 4

    # The noise: none, then a fresh draw in each step. Its law has a test of its own.
    assert not noises[0].any()
    for noise, sigma in zip(noises[1:], sigmas[1:]):
        assert noise.std().item() == pytest.approx(sigma, rel=0.25)
        assert noise.mean().abs() < 0.35 * sigma
    a, b, c = [noise / noise.norm() for noise in noises[1:]]
    assert max(abs(a @ b), abs(b @ c), abs(a @ c)) < 0.4
    # The questions: each of the ten once, before any comes again.
    assert len(asked) >= 16 and len(set(map(tuple, asked[:10]))) == 10
    assert all(prompt in asked[:10] for prompt in asked)
    # It was a run in which all of this mattered.
    assert min(norms) < settings.gradient_clip < max(norms)
    assert {(True, True), (False, True), (True, False)} <= set(clipped)
    assert settings.algo != "dapo" or max(m["draws"] for m in log) > 1
    assert not settings.tis or min(importances) < settings.tis < max(importances)


def made_up_step(model, rewards, settings):
    """A Batch of random completions of up to 9 tokens of P prompts, with these rewards [P, G]."""
    torch.manual_seed(3)
    rewards = torch.tensor(rewards)
    count = rewards.numel()
    length = torch.randint(1, 10, (count,))
    mask = qerl.length_mask(length, 9)
    tokens = torch.randint(20, 250, (count, 9)) * mask
    rollout = qerl.Rollout(tokens, -torch.rand(count, 9) * mask, mask.float(), length, length < 9)
    questions = [{"prompt": [5 + i] * (2 + i)} for i in range(len(rewards))]
    samples = train_gsm8k.Samples(questions, rollout, None, rewards, rewards)
    advantages = qerl.group_advantages(rewards, settings.algo)
    return make_batch(samples, advantages, qerl, settings, Ranks())


@pytest.mark.parametrize("algo", sorted(qerl.OBJECTIVES))
@pytest.mark.parametrize("rewards,left_out", [
    ([[1.0, 0, 1], [1, 1, 1], [0, 0, 0], [0, 1, 2]], 6),
    ([[0.0, 0, 0], [1, 1, 1], [0, 0, 0], [0, 1, 0]], 9),         # a minibatch without any signal
    ([[1.0, 1, 1]] * 4, 9),                                     # the first group is kept for the log
])
def test_groups_without_a_signal_leave_the_gradient_as_it_is(qwen, algo, rewards, left_out):
    """To the last bit, where each row is a micro-batch of its own."""
    settings = train_gsm8k.Settings(
        algo=algo, updates=2, max_new_tokens=9, device="cpu", dtype="float32", lr=0.01)
    trained = []
    for all_rows in (False, True):
        torch.manual_seed(0)
        model = qerl.load_model(qwen[0], lora_rank=2)
        optimizer, scaler = train_gsm8k.make_optimizer(model, settings)
        batch = made_up_step(model, rewards, settings)
        assert len(batch.prompts) - sum(map(len, batch.minibatches)) == left_out
        counted = qerl.length_mask(batch.length, 9)
        if algo == "dapo":                             # whose completions count if they ended
            counted = counted & (batch.length < 9)[:, None]
        weights = [qerl.token_weights(half, algo, 9) for half in counted.split(6)]
        assert batch.weights.equal(torch.cat(weights))
        if all_rows:
            batch.minibatches = [list(range(6)), list(range(6, 12))]
        with torch.no_grad():
            for rows in batch.micro_batches(batch.later_rows, 1):
                batch.old_logprobs[rows.index] = qerl.token_logprobs(
                    model, rows.prompts, rows.tokens, rows.length)
        train_gsm8k.update(qerl, model, batch, optimizer, scaler, settings, 1)
        trained.append(flat_policy(qerl.trainable(model)))
    assert trained[0].equal(trained[1])


def test_the_first_minibatch_needs_no_old_logprobs(qwen):
    """update() sets them: they are those of the policy before it."""
    settings = train_gsm8k.Settings(
        updates=2, max_new_tokens=9, device="cpu", dtype="float32", lr=0.01)
    model = qerl.load_model(qwen[0], lora_rank=2)
    batch = made_up_step(model, [[1.0, 0, 1], [0, 1, 2]], settings)
    with torch.no_grad():
        old = qerl.token_logprobs(model, batch.prompts, batch.tokens, batch.length)
    batch.old_logprobs[3:] = old[3:]
    optimizer, scaler = train_gsm8k.make_optimizer(model, settings)
    train_gsm8k.update(qerl, model, batch, optimizer, scaler, settings, 1000)
    torch.testing.assert_close(batch.old_logprobs, old)


def test_evaluation_is_one_sample_and_the_likeliest(quiz, tmp_path, monkeypatch):
    """Temperature 0.6 and top-p 0.95, then greedy, of the policy as trained and without its noise."""
    options = {**LOOP, "steps": 2, "stages": 2, "eval_questions": 5, "lr": 0.1, "slots": 2}
    settings = train_gsm8k.Settings(model=quiz, data=quiz, out=str(tmp_path), **options)
    calls = recorded(monkeypatch)
    train_gsm8k.train(settings)
    trained = load_file(tmp_path / "checkpoint.safetensors")
    trained = {name: trained[f"model.{name}"] for name in calls[0].policy}
    assert flat_policy(trained).norm() != flat_policy(calls[0].policy).norm()
    held_out = read_jsonl(f"{quiz}/test.jsonl")[:5]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["held_out_questions"] == 5
    for when, pair, policy in (("before", calls[:2], calls[0].policy),
                               ("after", calls[-2:], trained)):
        answers = read_jsonl(tmp_path / f"answers_{when}.jsonl")
        assert [a["question"] for a in answers] == [q["question"] for q in held_out]
        for call, kind, how in zip(pair, ("accuracy", "greedy"), ((0.6, 0.95), (0.0, 1.0))):
            assert call.drawn_with == {how} and all(noise is None for noise in call.noise)
            assert flat_policy(call.policy).equal(flat_policy(policy))
            assert call.prompts == [list(map(QUIZ_TOKENS.index, q["question"])) for q in held_out]
            generator = torch.Generator().manual_seed(settings.seed)
            expected = qerl.generate(
                policy_of(settings, policy), call.prompts, settings.max_new_tokens,
                temperature=how[0], top_p=how[1], eos=[QUIZ_EOS], slots=2, generator=generator,
            )
            assert call.rollout.tokens.equal(expected.tokens)
            rows = zip(call.rollout.tokens.tolist(), call.rollout.length, call.prompts)
            stated = [quiz_stated(tokens[:n]) == quiz_number(prompt) for tokens, n, prompt in rows]
            assert [a[kind]["correct"] for a in answers] == stated
            assert summary[f"{kind}_{when}"] == sum(stated) / 5
    # What is drawn depends on the seed alone, not on what was drawn before.
    first = calls[0].rollout.tokens
    model, tokenizer, data, fit = train_gsm8k.load_all(settings, qerl)
    for seed, same in ((settings.seed, True), (settings.seed, True), (settings.seed + 1, False)):
        seeded = dataclasses.replace(settings, seed=seed)
        train_gsm8k.evaluate(model, tokenizer, data.held_out, seeded, fit, "now")
        again = calls[-2].rollout.tokens
        assert (again.shape == first.shape and again.equal(first)) == same


def test_the_seed_decides_all_that_is_drawn(quiz, tmp_path, monkeypatch):
    """LoRA's A, questions, completions and noise: the same with the same seed, others with another."""
    calls = recorded(monkeypatch)
    drawn = []
    for i, seed in enumerate((3, 3, 4)):
        calls.clear()
        (tmp_path / str(i)).mkdir()
        options = {**LOOP, "steps": 2, "stages": 2, "eval_questions": 1, "seed": seed}
        settings = train_gsm8k.Settings(model=quiz, data=quiz, out=str(tmp_path / str(i)), **options)
        torch.manual_seed(i)                        # which decides nothing
        train_gsm8k.train(settings)
        first, second = calls[2:4]
        # Of the same policy after the same prompts.
        model = policy_of(settings, {name: torch.zeros_like(p) for name, p in first.policy.items()})
        generator = torch.Generator().manual_seed(seed)
        alike = qerl.generate(model, first.prompts, 6, 4, eos=[QUIZ_EOS], generator=generator)
        assert alike.tokens.equal(first.rollout.tokens)
        drawn.append([flat_policy(first.policy), first.prompts, torch.cat(second.noise)])
    for a, b, c in zip(*drawn):
        if isinstance(a, list):
            assert a == b and a != c
        else:
            assert a.equal(b) and not a.equal(c)


@pytest.mark.parametrize("options", [
    ("--algo", "grpo", "--train-norms", "--warm-up", 0.6), ("--algo", "dapo"),
])
def test_a_stopped_run_goes_on_with_everything(quiz, tmp_path, monkeypatch, options):
    """Adapter, AdamW's moments, both generators, the questions' order: all of it after each step."""
    options = ("--model", quiz, "--data", quiz, *QUICK, *LEARNING, "--save-every", 1, "--tis", 2,
               "--sigma-start", 0.2, "--sigma-end", 0.1, *options)
    calls = recorded(monkeypatch)
    run_main(monkeypatch, *options, "--out", tmp_path / "whole")
    assert_learned(read_jsonl(tmp_path / "whole" / "metrics.jsonl"), calls)
    whole = files_below(tmp_path / "whole")
    save = harness.run.save_checkpoint

    def stopped(*given):
        if given[-2]["step"] == step:
            raise KeyboardInterrupt
        save(*given)
    for step in range(1,
                      6):                        # in step 1 there is only the checkpoint before it
        resume = ("--resume",) if step > 1 else ()
        with monkeypatch.context() as patch:
            patch.setattr(harness.run, "save_checkpoint", stopped)
            with pytest.raises(SystemExit):
                run_main(patch, *options, "--out", tmp_path / "run", *resume)
    calls.clear()
    run_main(monkeypatch, *options, "--out", tmp_path / "run", "--resume")
    assert len({flat_policy(call.policy).norm().item()
                for call in calls}) == 2    # one step was left
    run = files_below(tmp_path / "run")
    for name in ("adapter/adapter_model.safetensors", "samples.jsonl", "answers_before.jsonl",
                 "answers_after.jsonl"):
        assert run[name] == whole[name], name
    logs = [without_times(tmp_path / name / "metrics.jsonl") for name in ("whole", "run")]
    assert logs[0] == logs[1] and len(logs[0]) == 5
    stored = load_file(tmp_path / "run" / "checkpoint.safetensors")
    expected = load_file(tmp_path / "whole" / "checkpoint.safetensors")
    assert stored.keys() == expected.keys()
    assert all(stored[name].equal(expected[name]) for name in expected)
    model = qerl.load_model(quiz, lora_rank=2, train_norms="--train-norms" in options)
    for name, p in qerl.trainable(model).items():
        p.data = stored[f"model.{name}"]
    adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    trained = adapter_tensors(model)
    assert trained.keys() == adapter.keys() and all(t.equal(adapter[name])
        for name, t in trained.items())


@pytest.mark.parametrize("algo", ["grpo", "dapo"])
def test_resume_after_kill_is_bit_for_bit(quiz, tmp_path, algo, monkeypatch):
    options = ("--model", quiz, "--data", quiz, "--algo", algo, "--tis", 2, *QUICK, *LEARNING)
    calls = recorded(monkeypatch)
    run_main(monkeypatch, *options, "--out", tmp_path / "whole")
    assert_learned(read_jsonl(tmp_path / "whole" / "metrics.jsonl"), calls)
    process = subprocess.Popen(command(*options, "--out", tmp_path / "killed"),
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "killed" / "metrics.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 3):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "summary.json").exists()
    with log.open("a") as f:
        f.write('{"step": 9, "rew')                                                     # a line torn by the kill
    run_main(monkeypatch, *options, "--out", tmp_path / "killed", "--resume")
    whole, killed = (without_times(tmp_path / name / "metrics.jsonl")
                     for name in ("whole", "killed"))
    assert [m["step"] for m in killed] == [1, 2, 3, 4, 5] and whole == killed
    for file in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "killed" / file).read_bytes()
    summary = json.loads((tmp_path / "killed" / "summary.json").read_text())
    assert 0 <= summary["accuracy_before"] <= 1 and 0 <= summary["accuracy_after"] <= 1
    assert (tmp_path / "whole" / "curve.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(SystemExit) as stop:                                              # other settings are refused by name
        run_main(monkeypatch, *options, "--lr", 2e-3, "--out", tmp_path / "killed", "--resume")
    assert stop.value.code == 2


@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_killed_before_the_first_checkpoint_starts_over(qwen, data, tmp_path, monkeypatch, resume):
    (tmp_path / "run").mkdir()
    for name in ("metrics.jsonl", ".lock"):
        (tmp_path / "run" / name).write_text("")
    run_main(monkeypatch, "--model", qwen[0], "--data", data, *QUICK, "--steps", 1, "--out",
             tmp_path / "run", *resume)
    assert [m["step"] for m in without_times(tmp_path / "run" / "metrics.jsonl")] == [1]


def test_full_fine_tuning_has_the_gradients_of_transformers(qwen):
    """All linear layers, their biases and the norms, through Eq. 2's product without LoRA."""
    folder, theirs = qwen
    model = qerl.load_model(folder, "bf16", train_norms=True)
    train_all_weights(model)
    prompts, completions = [[1, 2, 3], [4, 5]], torch.tensor([[6, 7, 8], [9, 10, 0]])
    length = torch.tensor([3, 2])
    model.recompute_in_backward()
    qerl.token_logprobs(model, prompts, completions, length).sum().backward()
    theirs = copy.deepcopy(theirs).requires_grad_(True)
    for prompt, completion, n in zip(prompts, completions, length):
        tokens = torch.tensor([prompt + completion[:n].tolist()])
        logprobs = theirs(tokens).logits[0, len(prompt) - 1:-1].log_softmax(-1)
        logprobs.gather(1, completion[:n, None]).sum().backward()
    expected = dict(theirs.named_parameters())
    for layer in model.quantized_layers():
        for name, weight, bias in zip(layer.names, layer.master.grad.split(layer.sizes),
                                      layer.bias.grad.split(layer.sizes)
                                      if layer.bias is not None else [None] * len(layer.sizes)):
            torch.testing.assert_close(weight, expected[f"{name}.weight"].grad, rtol=1e-4, atol=1e-5)
            if bias is not None:
                torch.testing.assert_close(bias, expected[f"{name}.bias"].grad, rtol=1e-4, atol=1e-5)
    for norm in (m for m in model.modules() if isinstance(m, qerl.RMSNorm)):
        torch.testing.assert_close(norm.weight.grad, expected[f"{norm.name}.weight"].grad, rtol=1e-4,
                                   atol=1e-5)
    assert len(qerl.trainable(model)) == sum(1 + (layer.bias is not None)
        for layer in model.quantized_layers()) + sum(
        isinstance(m, qerl.RMSNorm) for m in model.modules())


def test_full_fine_tuning_samples_what_it_trains(qwen, data, tmp_path, monkeypatch, capsys):
    options = ("--model", qwen[0], "--data", data, *QUICK, "--weights", "bf16", "--lora-rank", 0,
               "--lr", 1e-3,
               "--sigma-start", 0, "--sigma-end", 0)
    monkeypatch.setattr(train_gsm8k, "reward",
                        lambda text, *_: (sum(text.encode()) % 97, 0.0))     # differs within a group
    run_main(monkeypatch, *options, "--out", tmp_path / "run")
    metrics = without_times(tmp_path / "run" / "metrics.jsonl")
    assert all(m["gradient_norm"] > 0 and m["mismatch_kl"] < 1e-9
               for m in metrics)      # it sampled from the newest weights
    start = dict(qerl.load_model(qwen[0], "bf16").named_parameters())["norm.weight"]
    state, tensors = read_checkpoint(str(tmp_path / "run"), {}, must_agree=["no such setting"])
    assert state["step"] == 5 and not torch.equal(tensors["model.norm.weight"], start)
    assert not (tmp_path / "run" / "adapter").exists()
    assert "--weights bf16" in refused(monkeypatch, capsys, *options, "--weights", "nvfp4", "--out",
                                       tmp_path / "a")
    assert "--beta 0" in refused(monkeypatch, capsys, *options, "--beta", 0.1, "--out",
                                 tmp_path / "b")


def test_pass_at_1_is_the_mean_of_so_many_answers_to_each_question(qwen, data, tmp_path,
        monkeypatch):
    """The grader is replaced by one that finds two of three answers to each question right."""
    out = tmp_path / "run"
    graded = []

    def two_of_three(text, answer, anywhere=False):
        if anywhere:                                                                     # not for a reward
            graded.append(text)
        return len(graded) > 15 or len(graded) % 3 != 0

    monkeypatch.setattr(train_gsm8k, "is_right", two_of_three)
    run_main(monkeypatch, "--model", qwen[0], "--data", data, *QUICK, "--steps", 1,
             "--eval-questions", 5,
             "--eval-samples", 3, "--skip-eval-before", "--out", out)
    summary = json.loads((out / "summary.json").read_text())
    assert len(graded) == 5 * 3 + 5 and len(set(
        graded[:3])) > 1                         # three answers, then a greedy one
    assert summary["accuracy_after"] == 10 / 15
    assert "accuracy_before" not in summary and not (out / "answers_before.jsonl").exists()
    assert [a["accuracy"]["text"] for a in read_jsonl(out / "answers_after.jsonl")] == graded[:15:3]
    assert (out / "report.html").exists() and (out / "curve.png").exists()


@pytest.mark.parametrize("tracker,package",
                         [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_log_gets_each_steps_numbers_or_names_the_missing_package(qwen, data, tmp_path, monkeypatch,
        capsys, tracker, package):
    out = tmp_path / "run"
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 2, "--out", out, "--log",
               tracker)
    monkeypatch.setitem(sys.modules, package,
                        None)                                      # importing it is an ImportError
    with pytest.raises(SystemExit) as stop:
        run_main(monkeypatch, *options)
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert stop.value.code == 2 and len(error) == 1 and f"pip install {tracker}" in error[0]
    assert not out.exists()                                                              # nothing was measured before

    opened, written = [], {}

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            opened.append(folder)
            assert purge_step == 1

        def add_scalar(self, key, value, step):
            written.setdefault(step, {})[key] = value

    def init(dir, **options):
        assert options["config"]["lora_rank"] == 2
        opened.append(dir)
        return types.SimpleNamespace(log=lambda numbers, step: written.update({step: numbers}),
                                     id="a1")
    fake = types.ModuleType(package)
    fake.SummaryWriter, fake.init = SummaryWriter, init
    monkeypatch.setitem(sys.modules, package, fake)
    run_main(monkeypatch, *options)
    assert opened == [str(out)]
    assert written == {m["step"]: flat(m)
                       for m in read_jsonl(out / "metrics.jsonl")} and written.keys() == {1, 2}
    assert {"reward", "accuracy", "kl", "sigma", "seconds/rollout"} <= written[2].keys()
    assert all(isinstance(value, (int, float)) for numbers in written.values()
               for value in numbers.values())


@pytest.mark.parametrize("tracker,package",
                         [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_resumed_run_goes_on_in_its_tracker(qwen, data, tmp_path, monkeypatch, tracker, package):
    """Killed after step 3, resumed after step 2: TensorBoard forgets step 3, wandb is given the id of its run again."""
    calls = []

    class SummaryWriter:
        add_scalar = lambda self, *scalar: None

        def __init__(self, folder, purge_step):
            calls.append(purge_step)

    def init(dir, id, resume, **options):
        calls.append((id, resume))
        return types.SimpleNamespace(log=lambda numbers, step: None, id=id or f"new{len(calls)}")
    fake = types.ModuleType(package)
    fake.SummaryWriter, fake.init = SummaryWriter, init
    monkeypatch.setitem(sys.modules, package, fake)
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 4, "--out", tmp_path / "run",
               "--log", tracker)

    def log(self, logged):
        original(self, logged)
        if logged["step"] == 3:
            raise KeyboardInterrupt
    original = harness.run.Keeper.log
    with monkeypatch.context() as patch:
        patch.setattr(harness.run.Keeper, "log", log)
        with pytest.raises(SystemExit):
            run_main(monkeypatch, *options)
    run_main(monkeypatch, *options, "--resume")
    run_main(monkeypatch, *options[:-4], "--out", tmp_path / "another", "--log", tracker)
    assert calls == ([1, 3, 1]
                     if tracker == "tensorboard" else [(None, "allow"), ("new1", "allow"),
                             (None, "allow")])


def test_a_tracker_that_cannot_be_reached_is_one_line(qwen, data, tmp_path, monkeypatch, capsys):
    def init(**options):
        raise RuntimeError("no API key configured\nhere")
    fake = types.ModuleType("wandb")
    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    error = refused(monkeypatch, capsys, "--model", qwen[0], "--data", data, *QUICK, "--out",
                    tmp_path / "run", "--log", "wandb")
    assert "--log wandb: no API key configured;" in error and not (tmp_path / "run").exists()


def losses_times(monkeypatch, *factors):
    """Multiply the first losses by these factors, the others by the last."""
    policy_loss, left = qerl.policy_loss, list(factors)

    def multiplied(*args):
        loss, kl = policy_loss(*args)
        return loss * (left.pop(0) if len(left) > 1 else left[0]), kl
    monkeypatch.setattr(qerl, "policy_loss", multiplied)


def test_float16_gradients_do_not_vanish(qwen, data, tmp_path, monkeypatch):
    """A loss of a 100,000th has gradients that float16 cannot hold; after a step they are a
    100,000th of the others.
    """
    scored_by_letters(monkeypatch)
    norms = {}
    for dtype, factor in itertools.product(("float16", "float32"), (1, 1e-5)):
        with monkeypatch.context() as patch:
            losses_times(patch, factor)
            out = tmp_path / f"{dtype}-{factor}"
            run_main(monkeypatch, "--model", qwen[0], "--data", data, *QUICK, "--steps", 1,
                "--dtype", dtype, "--out", out)
        (logged,) = read_jsonl(out / "metrics.jsonl")
        norms[dtype, factor] = logged["gradient_norm"]
        assert logged.get("loss_scale") == (65536 if dtype == "float16" else None)
        assert json.loads((out / "summary.json").read_text())["settings"]["dtype"] == dtype
        trained = load_file(out / "adapter/adapter_model.safetensors")
        assert all(t.dtype == torch.float32 and t.isfinite().all() for t in trained.values())
        assert any(t.any() for name, t in trained.items() if "lora_B" in name)
    for (dtype, factor), norm in norms.items():
        assert norm == pytest.approx(factor * norms["float32", 1], rel=0.05), (dtype, factor)


def test_a_float16_gradient_that_overflows_costs_its_step_alone(qwen, data, tmp_path, monkeypatch):
    """The first gradient overflows.

    The run goes on with half the scale, and after a stop as if there had been none.
    """
    scored_by_letters(monkeypatch)
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 3, "--save-every", 1,
        "--dtype", "float16")
    save, adapters = harness.run.save_checkpoint, []

    def stopped(folder, model, optimizer, generators, state, settings):
        save(folder, model, optimizer, generators, state, settings)
        adapters.append([p.detach().clone() for p in qerl.trainable(model).values()])
        if state["step"] == stop_at:
            raise KeyboardInterrupt
    monkeypatch.setattr(harness.run, "save_checkpoint", stopped)
    for stop_at, name in ((None, "whole"), (2, "cut")):
        with monkeypatch.context() as patch:
            losses_times(patch, 1e9, 1)
            if stop_at is None:
                run_main(monkeypatch, *options, "--out", tmp_path / name)
            else:
                with pytest.raises(SystemExit):
                    run_main(monkeypatch, *options, "--out", tmp_path / name)
    run_main(monkeypatch, *options, "--out", tmp_path / "cut", "--resume")
    logged = read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    assert [m["loss_scale"] for m in logged] == [32768] * 3
    assert logged[0]["gradient_norm"] == 0 < logged[1]["gradient_norm"]
    before, first, second = adapters[:3]
    assert all(map(torch.equal, before, first)) and not all(map(torch.equal, first, second))
    logs = [without_times(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut")]
    assert logs[0] == logs[1]
    whole, cut = (load_file(tmp_path / name / "checkpoint.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)
    assert json.loads(safe_open(tmp_path / "cut/checkpoint.safetensors",
        "pt").metadata()["state"])["scaler"]["_growth_tracker"] == 2


def test_an_infinite_gradient_ends_a_run_that_scales_no_loss():
    for options in (dict(enabled=False), dict(init_scale=1.0)):
        with pytest.raises(qerl.UserError, match="gradient norm inf"):
            train_gsm8k.require_finite_update([(0.5, 0.0)], torch.tensor(math.inf),
                torch.amp.GradScaler("cpu", **options))
    train_gsm8k.require_finite_update([(0.5, 0.0)], torch.tensor(math.inf),
        torch.amp.GradScaler("cpu"))
    with pytest.raises(qerl.UserError, match="loss nan"):
        train_gsm8k.require_finite_update([(math.nan, 0.0)], torch.tensor(1.0),
            torch.amp.GradScaler("cpu"))


def test_the_dtype_that_suits_the_device(monkeypatch):
    def chosen(*argv):
        return train_gsm8k.arguments([*argv, "--device", "cpu"]).dtype
    assert chosen() == "float32" and chosen("--dtype", "bfloat16") == "bfloat16"
    monkeypatch.setattr(qerl, "default_dtype", lambda device: torch.float16)
    assert chosen() == "float16"


# A question with whatever ends a line or a record somewhere, and what JSON has to escape.
AWKWARD = ('one\ntwo\r\nthree\u2028four\u2029five\x85six\x0b\x0c\x1c\x1d\x1eseven\t---\n'
           '{"step": 9}\\ "eight" \x00 ##')


def test_samples_jsonl_holds_a_group_and_is_cut_at_resume(qwen, tmp_path, monkeypatch, capsys):
    for name, question in (("train", AWKWARD), ("test", "another")):
        problem = json.dumps({"question": question, "answer": "#### 1"}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(problem * 2)
    options = ("--model", qwen[0], "--data", tmp_path, *QUICK, "--prompts", 4, "--group", 4)
    monkeypatch.setattr(train_gsm8k, "reward",
                        lambda text, number, scheme: (float(len(text) % 2),) * 2)
    run_main(monkeypatch, *options, "--out", tmp_path / "whole")
    assert_learned(read_jsonl(tmp_path / "whole" / "metrics.jsonl"))
    stored = (tmp_path / "whole" / "samples.jsonl").read_bytes()
    samples = [json.loads(line) for line in stored.decode().splitlines()]
    assert [s["step"] for s in samples] == [1, 2, 4, 5]
    assert samples == read_jsonl(tmp_path / "whole" / "samples.jsonl")
    for sample in samples:
        assert sample["question"] == AWKWARD and sample["number"] == "1"
        assert len(sample["completions"]) == 4
        assert len({c["reward"] for c in sample["completions"]}) == 2
        for c in sample["completions"]:
            parts = ("tokens", "entropy", "rollout_logprobs", "training_logprobs")
            assert 1 <= len(c["tokens"]) <= 8 and len({len(c[part]) for part in parts}) == 1
            assert c["reward"] == float(c["correct"])
            assert all(isinstance(t, str) for t in c["tokens"])
            assert min(c["entropy"]) > 0 and max(c["rollout_logprobs"] + c["training_logprobs"]) < 0
        assert abs(sum(c["advantage"] for c in sample["completions"])) < 1e-3

    def stopped(folder, model, optimizer, generators, state, settings):
        if state["step"] == 5:
            raise KeyboardInterrupt
        save(folder, model, optimizer, generators, state, settings)
    save = harness.run.save_checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(harness.run, "save_checkpoint", stopped)
        with pytest.raises(SystemExit) as stop:
            run_main(monkeypatch, *options, "--out", tmp_path / "cut")
    assert stop.value.code == 130 and f"--resume --out {tmp_path / 'cut'}" in capsys.readouterr().err
    log = tmp_path / "cut" / "samples.jsonl"
    # the last checkpoint is of step 4
    assert [s["step"] for s in read_jsonl(log)] == [1, 2, 4, 5]
    with log.open("a") as f:
        f.write('{"step": 9, "quest')
    run_main(monkeypatch, *options, "--out", tmp_path / "cut", "--resume")
    assert log.read_bytes() == stored


def test_answers_before_and_after_and_the_report(qwen, data, tmp_path, monkeypatch):
    out = tmp_path / "run"
    reported = []
    monkeypatch.setattr(harness.run, "report_on",
        lambda folder: reported.append((folder, sorted(os.listdir(folder)))))
    run_main(monkeypatch, "--model", qwen[0], "--data", data, *QUICK, "--steps", 1,
        "--eval-questions", 5, "--out", out)
    summary = json.loads((out / "summary.json").read_text())
    held_out = made_up_problems()[1][:5]
    for when in ("before", "after"):
        answers = read_jsonl(out / f"answers_{when}.jsonl")
        assert [a["question"] for a in answers] == [p["question"] for p in held_out]
        assert [a["number"] for a in answers] == [str(final_number(p)) for p in held_out]
        for kind in ("accuracy", "greedy"):
            for answer in answers:
                assert answer[kind]["correct"] == is_right(answer[kind]["text"],
                    Decimal(answer["number"]), anywhere=True)
            assert summary[f"{kind}_{when}"] == sum(a[kind]["correct"] for a in answers) / 5
    # once, when all else is there
    (folder, files), = reported
    assert folder == str(out)
    assert {"summary.json", "answers_after.jsonl", "samples.jsonl", "metrics.jsonl"} <= set(files)
