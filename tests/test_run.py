"""A run: the loop, held to the equations; full fine-tuning, float16."""
import copy
import itertools
from functools import partial
from statistics import fmean
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

import qerl
from harness import fast
import train_gsm8k
from common import LEARNING, QUIZ_EOS, QUIZ_TOKENS, all_trained, assert_same_run, recorded
from common import refused, run_main, stop_at
from harness.answers import is_right
from harness.batches import cut_rows
from harness.engines import find_engine
from harness.folders import read_jsonl
from harness.export import save_packed
from harness.run import read_checkpoint
from test_qerl import TOKENS, relative, scales, seeded


def test_cut_rows_by_hand():
    """A prompt of 50 tokens counts once in a piece; padded, its rows have at most four budgets."""
    prompts = [[1] * 50] * 8
    for lengths, budget, pieces in (
            ([10] * 8, 129, [7, 1]),
            ([10] * 8, 30, [1] * 8),
            ([50] + [1] * 7, 150, [6, 2])):                         # six rows of 100
        cut = cut_rows(prompts, lengths, budget)
        assert list(map(len, cut)) == pieces
        assert sum(cut, []) == list(range(8))


def test_questions_come_once_a_pass_in_a_new_order_each():
    """A step may end one pass and begin another."""
    questions = "abcdefghij"
    order = train_gsm8k.next_questions(questions, 0, 300, seed=0)
    passes = {tuple(order[i:i + 10]) for i in range(0, 300, 10)}
    assert len(passes) == 30 and all("".join(sorted(one)) == questions for one in passes)
    assert train_gsm8k.next_questions(questions, 8, 3, seed=0) == order[8:11]
    assert train_gsm8k.next_questions(questions, 0, 300, seed=1) != order


# --------------------------------------------------------------------------------------------------
# The loop is held to a second one, without packing, pieces and padding, on a run in which each step
# has something to learn.

LOOP = dict(
    device="cpu", dtype="float32",
    prompts=4, group=4, max_new_tokens=6, reward="paper",
    steps=4, updates=2, lr=0.03, warm_up=0.0, gradient_clip=0.5,
    stages=4, sigma_start=0.3, sigma_end=0.075,
    lora_rank=4, quantizer="rtn", micro_tokens=24,
    seed=12, save_every=3, eval_questions=5,
)
GRPO_LOOP = dict(
    temperature=0.8, top_p=0.9,
    beta=0.3, tis=1.1,
    train_norms=True, warm_up=0.5, weight_decay=0.5,
)
# Its first step gives up after four draws: a group without a signal fills the batch.
DAPO_LOOP = dict(
    algo="dapo", prompts=6, group=2, max_new_tokens=12, reward="answer",
    gradient_clip=1.1, lora_alpha=6.0,
    schedule="linear", seed=14,
)
# No completion is as long as it may be: the divisor is the limit and not the longest.
DR_GRPO_LOOP = dict(algo="dr-grpo", max_new_tokens=40, gradient_clip=0.1)
# By schedule; the rates by warm-up: without, or two steps of it, then half a cosine to zero.
SIGMAS = {"exponential": [0, 0.3, 0.15, 0.075], "linear": [0, 0.3, 0.1875, 0.075]}
RATES = {0.0: [1, 1, 0.75, 0.25], 0.5: [0.5, 1, 1, 0.5]}


def flat_policy(policy):
    return torch.cat([p.detach().flatten() for p in policy.values()])


def quiz_text(tokens):
    return "".join(QUIZ_TOKENS[t] for t in tokens if t != QUIZ_EOS)


def too_long(length, settings):
    """DAPO's punishment: from nothing at the interval's beginning to 1 at its end."""
    longest = settings.max_new_tokens
    interval = settings.overlong * longest
    return max(0, length - longest + interval) / interval if interval else 0


def groups_of(call, settings):
    """The completions of a call of `generate`, each a line of its own, in groups of one question."""
    rows = []
    for i, length in enumerate(call.rollout.length.tolist()):
        prompt = call.prompts[i // settings.group]
        tokens = call.rollout.tokens[i, :length].tolist()
        text = quiz_text(tokens)
        right = 1 + len(prompt) % 2                    # as the fixture `quiz` has it
        rows.append(SimpleNamespace(
            prompt=prompt,
            tokens=tokens,
            reward=train_gsm8k.find_reward(settings.reward)(text, {"right": right})
            - too_long(len(tokens), settings),
            correct=is_right(text, right),
            finished=tokens[-1] == QUIZ_EOS,
            rollout_logprobs=call.rollout.logprobs[i, :length],
            entropy=call.rollout.entropy[i, :length],
        ))
    return [rows[i:i + settings.group] for i in range(0, len(rows), settings.group)]


def teaches(group):
    return len({row.reward for row in group}) > 1


def draws_of_a_step(rollouts, settings):
    """(calls of generate, their groups).

    GRPO draws once; DAPO until as many groups as there are prompts teach, four times at most.
    """
    draws = []
    groups = []
    most = 4 if settings.algo == "dapo" else 1
    while len(draws) < most and sum(map(teaches, groups)) < settings.prompts:
        draws.append(next(rollouts))
        groups += groups_of(draws[-1], settings)
    return draws, groups


def logprobs_of(model, row, temperature):
    """log π of each token of a completion, without noise."""
    logits = model(torch.tensor([row.prompt + row.tokens])) / temperature
    distributions = logits[0, len(row.prompt) - 1:-1].log_softmax(-1)
    return distributions[range(len(row.tokens)), row.tokens]


def minibatch_loss(model, rows, settings):
    """(Eq. 3's loss, the KL, advantages of the rows that are clipped).

    By functions of qerl.py that test_qerl.py holds to TRL.
    """
    def padded(name):
        return pad_sequence([getattr(row, name) for row in rows], batch_first=True)

    length = torch.tensor([len(row.tokens) for row in rows])
    ended = torch.tensor([row.finished for row in rows])
    masks = settings.algo == "dapo" and not settings.overlong
    counted = qerl.length_mask(length, length.max()) & (ended[:, None] | (not masks))
    weights = qerl.token_weights(counted, settings.algo, settings.max_new_tokens)
    logprobs = pad_sequence([logprobs_of(model, row, settings.temperature) for row in rows], True)
    old = padded("training_logprobs")
    advantages = torch.stack([row.advantage for row in rows])
    loss, kl = qerl.policy_loss(
        logprobs, old, advantages, weights, settings.clip_low, settings.clip_high, padded("reference"),
        settings.beta, padded("rollout_logprobs"), settings.tis, settings.algo)
    change = ((logprobs - old).exp() - 1) * advantages.sign()[:, None]
    limit = torch.where(advantages > 0, settings.clip_high, settings.clip_low)
    return loss, kl.item(), advantages[(change > limit[:, None]).any(1)]


def adamw(parameters, settings):
    """PyTorch's, with the betas of the paper's code; norm scales do not decay."""
    groups = [
        dict(params=[p for p in parameters if p.dim() == n], weight_decay=decay)
        for n, decay in ((1, 0.0), (2, settings.weight_decay))]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99))


def assert_kept(sample, row):
    """What samples.jsonl says of a completion."""
    tokens = [quiz_text([token]) for token in row.tokens]
    assert (sample.pop("text"), sample.pop("tokens")) == ("".join(tokens), tokens)
    for name, value in sample.items():
        expected = torch.as_tensor(getattr(row, name)).tolist()
        assert value == pytest.approx(expected, abs=1e-3), name


def logged_of(kept, groups, settings):
    """What the log has to say of the groups that a step kept, and of all that it drew.

    Without a KL term the mismatch is of the groups with a signal: the others are not scored.
    """
    rows = sum(kept, [])
    drawn = sum(groups, [])
    scored = [row for group in kept if teaches(group) or settings.beta for row in group]
    changes = [row.training_logprobs - row.rollout_logprobs for row in scored]
    ratio = torch.stack([change.sum() for change in changes]).exp()
    x = torch.cat(changes)
    return {
        "reward": fmean(row.reward for row in drawn),
        "accuracy": fmean(row.correct for row in drawn),
        "one_right": fmean(sum(row.correct for row in group) == 1 for group in groups),
        "right_and_wrong": fmean(len({row.correct for row in group}) > 1 for group in groups),
        "signal": fmean(map(teaches, groups)),
        "entropy": torch.cat([row.entropy for row in rows]).mean().item(),
        "groups_left_out": 1 - len(scored) / len(rows),
        "effective_completions": (ratio.mean() ** 2 / ratio.square().mean()).item(),
        "mismatch_kl": (x.exp() - 1 - x).mean().item(),
        "mismatch_max_ratio": x.abs().max().exp().item(),
        "length": fmean(len(row.tokens) for row in rows),
        "truncated": fmean(not row.finished for row in rows),
    }


def assert_evaluated(calls, quiz, out, when):
    """One sample at the paper's temperature and top-p, then the likeliest, without noise."""
    questions = [q["question"] for q in read_jsonl(f"{quiz}/test.jsonl")[:5]]
    prompts = [list(map(QUIZ_TOKENS.index, question)) for question in questions]
    answers = read_jsonl(out / f"answers_{when}.jsonl")
    assert [a["question"] for a in answers] == questions
    for call, kind, how in zip(calls, ("accuracy", "greedy"), ((0.6, 0.95), (0.0, 1.0))):
        assert call.drawn_with == {how} and not call.noise and call.prompts == prompts
        ends = call.rollout.length.tolist()
        texts = [quiz_text(tokens[:n]) for tokens, n in zip(call.rollout.tokens.tolist(), ends)]
        assert [answer[kind]["text"] for answer in answers] == texts


@pytest.mark.parametrize("options", [
    GRPO_LOOP,
    GRPO_LOOP | {"engine": "plain"},
    DAPO_LOOP,
    DAPO_LOOP | {"overlong": 0.5},
    DR_GRPO_LOOP,
])
def test_a_run_is_what_the_equations_say(quiz, tmp_path, monkeypatch, options):
    """Every update of a run, computed again from its completions, each in a line of its own."""
    settings = train_gsm8k.Settings(model=quiz, data=quiz, out=str(tmp_path), **LOOP | options)
    calls = recorded(monkeypatch, find_engine(settings))
    train_gsm8k.train(settings)
    assert_evaluated(calls[:2], quiz, tmp_path, "before")
    assert_evaluated(calls[-2:], quiz, tmp_path, "after")
    rollouts = iter(calls[2:-2])
    log = read_jsonl(tmp_path / "metrics.jsonl")
    samples = {s["step"]: s["completions"] for s in read_jsonl(tmp_path / "samples.jsonl")}
    torch.manual_seed(settings.seed)
    model = fast.load_model(
        quiz, lora_rank=4, lora_alpha=settings.lora_alpha, train_norms=settings.train_norms)
    reference = fast.load_model(quiz)  # without adapters
    trained = qerl.trainable(model)
    optimizer = adamw(trained.values(), settings)
    noise_rng = seeded(settings.seed + 1)
    norms = []
    clipped = set()
    for step, (sigma, rate) in enumerate(zip(SIGMAS[settings.schedule], RATES[settings.warm_up])):
        # Sampled by the policy of this step with one draw of noise.
        draws, groups = draws_of_a_step(rollouts, settings)
        noise = [
            sigma * torch.randn(norm.weight.shape, generator=noise_rng) for norm in scales(model)]
        for call in draws:
            assert call.drawn_with == {(settings.temperature, settings.top_p)}
            assert flat_policy(call.policy).equal(flat_policy(draws[0].policy))
            torch.testing.assert_close(call.noise, noise)

        # What is learned from; DAPO prefers groups with a signal.
        kept = groups
        if settings.algo == "dapo":
            kept = sorted(groups, key=teaches, reverse=True)[:settings.prompts]
        rows = sum(kept, [])
        rewards = torch.tensor([[row.reward for row in group] for group in kept])
        for row, advantage in zip(rows, qerl.group_advantages(rewards, settings.algo).flatten()):
            row.advantage = advantage
            row.training_logprobs = logprobs_of(model, row, settings.temperature).detach()
            row.reference = logprobs_of(reference, row, settings.temperature).detach()

        # One group is kept, the first with a signal.
        for row, sample in zip(next(filter(teaches, kept)), samples.get(step + 1, [])):
            assert_kept(sample, row)

        # The updates.
        before = flat_policy(trained)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * rate
        kls = []
        half = len(rows) // 2
        for minibatch in (rows[:half], rows[half:]):
            loss, kl, of_clipped = minibatch_loss(model, minibatch, settings)
            kls.append(kl)
            clipped |= set((of_clipped > 0).tolist())
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(trained.values(), settings.gradient_clip)
            norms.append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
        change = flat_policy(trained) - before
        following = calls[draws[-1].number + 1].policy
        assert relative(flat_policy(following) - flat_policy(draws[0].policy), change) < 5e-4

        expected = {
            "step": step + 1,
            "sigma": sigma,
            "kl": fmean(kls) if settings.beta else 0,
            "gradient_norm": norms[-1],
            "lr": settings.lr * rate,
            "draws": len(draws),
            **logged_of(kept, groups, settings),
        }
        logged = {name: log[step][name] for name in expected}
        assert logged == pytest.approx(expected, rel=5e-4, abs=1e-6)
    assert next(rollouts, None) is None and len(log) == 4
    assert samples.keys() == {1, 3, 4}
    # It was a run in which all of this mattered.
    assert min(norms) < settings.gradient_clip < max(norms)
    assert clipped == {True, False}
    if options is DAPO_LOOP:
        assert log[0]["draws"] == 4 and log[0]["groups_left_out"] > 0
    assert max(m["mismatch_max_ratio"] for m in log) > settings.tis


# --------------------------------------------------------------------------------------------------
# Full fine-tuning

def test_full_fine_tuning_has_the_gradients_of_transformers(made_qwen):
    """All linear layers, their biases and the norms, through Eq. 2's product without LoRA."""
    folder, theirs = made_qwen
    model = all_trained(folder)
    model.recompute_in_backward()
    model(TOKENS).square().sum().backward()
    theirs = copy.deepcopy(theirs).requires_grad_(True)
    theirs(TOKENS).logits.square().sum().backward()
    names = {norm.weight: [f"{norm.name}.weight"] for norm in scales(model)}
    for layer in model.quantized_layers():
        names[layer.master] = [f"{name}.weight" for name in layer.names]
        names[layer.bias] = [f"{name}.bias" for name in layer.names]
    names.pop(None)                                    # of layers without a bias
    assert names.keys() == set(qerl.trainable(model).values())
    for ours, parts in names.items():
        gradient = torch.cat([theirs.get_parameter(part).grad for part in parts])
        assert relative(ours.grad, gradient) < 1e-4, parts


def test_transformers_loads_what_full_fine_tuning_has_trained(quick, qwen, tmp_path):
    """Of a model that began in 4 bits, and of a run that goes on.

    Without noise the newest weights are those that sample.
    """
    source = str(tmp_path / "source")
    save_packed(qwen, source, "cpu")
    options = (*quick, "--model", source, LEARNING,
               "--reward random --weights bf16 --lora-rank 0 --sigma-start 0 --sigma-end 0")
    run_main(*options, "--steps 1")
    run_main(*options, "--steps 2 --resume")
    for step in read_jsonl(tmp_path / "run/metrics.jsonl"):
        assert step["gradient_norm"] > 0 and step["mismatch_kl"] < 1e-9
    assert not (tmp_path / "run/adapter").exists()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/model", dtype=torch.float32)
    begun = all_trained(source)
    ours = copy.deepcopy(begun)
    ours.load_state_dict(read_checkpoint(tmp_path / "run")["model"], strict=False)
    with torch.no_grad():
        assert relative(ours(TOKENS), theirs(TOKENS).logits) < 1e-5 < relative(ours(TOKENS), begun(TOKENS))
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "run/model" / name).exists()


# --------------------------------------------------------------------------------------------------
# float16, what a run says

def losses_times(*factors):
    """A patch that multiplies the first losses by these factors, the others by 1."""
    policy_loss = qerl.policy_loss
    factors = itertools.chain(factors, itertools.repeat(1))

    def multiplied(*args, **options):
        loss, kl = policy_loss(*args, **options)
        return loss * next(factors), kl

    return mock.patch.object(fast, "policy_loss", multiplied)


def test_float16_gradients_neither_vanish_nor_end_a_run_that_overflows(quick, tmp_path):
    """An overflow costs its step alone; float16 could not hold the gradients of the second loss.

    The policy hardly moves, so that float32 has the same gradients. A stop changes nothing.
    """
    options = (*quick, "--group 4 --reward random --steps 3 --save-every 1 --lr 1e-12 --dtype")
    run_main(*options, "float32", "--out", tmp_path / "exact")
    with losses_times(1e9, 1e-5):
        run_main(*options, "float16", "--out", tmp_path / "whole")
    with losses_times(1e9, 1e-5):
        stop_at(3, *options, "float16", "--out", tmp_path / "stopped")
    run_main(*options, "float16", "--out", tmp_path / "stopped", "--resume")
    overflown, *scaled = assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    assert (overflown["gradient_norm"], overflown["loss_scale"]) == (0, 32768)
    exact = read_jsonl(tmp_path / "exact/metrics.jsonl")[1:]
    for a, b, factor in zip(exact, scaled, (1e-5, 1)):
        assert 0 < b["gradient_norm"] == pytest.approx(factor * a["gradient_norm"], rel=0.05)
        assert b["loss_scale"] == 32768


def test_an_infinite_gradient_ends_a_run_that_cannot_scale_the_loss_less(quick, monkeypatch):
    scaler = partial(torch.amp.GradScaler, init_scale=1.0)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    with losses_times(1e9):
        line = refused(*quick, LEARNING, "--reward random --dtype float16")
    assert "the values of gradient_norm are NaN" in line


def test_a_difference_ends_exact_sampling(quick, tmp_path, capsys, monkeypatch):
    """Where the sampler is said to be equal, and training's own pass finds other numbers.

    In the first step nothing computes old log-probabilities, in the second one the loop does again, and
    after --resume, too; with --no-exact it does in both. A method is not exact.
    """
    assert "--exact: is for --engine fast" in refused("--device", "cpu", "--exact")
    assert "--exact: sampling and training" in refused(*quick, "--exact")
    sampled, scored = fast.generate, fast.token_logprobs
    passes = []

    def generate(*args, **options):
        rollout = sampled(*args, **options)
        rollout.logprobs += 1e-3
        return rollout

    def token_logprobs(*args):
        passes.append("update" if torch.is_grad_enabled() else "old")
        return scored(*args)
    monkeypatch.setattr(fast, "generate", generate)
    monkeypatch.setattr(fast, "token_logprobs", token_logprobs)

    def decode_exactly(model):
        model.exact = True
        return True
    monkeypatch.setattr(fast.Transformer, "decode_exactly", decode_exactly)
    monkeypatch.setattr(fast.Transformer, "sum_in_order", lambda model: None)
    flags = "--steps 2 --updates 2 --reward random --sigma-start 0 --sigma-end 0"
    for choice, differences, expected in (
        ("", 1, ["update", "old", "update"]),
        ("--no-exact", 0, ["old", "update", "old", "update"]),
        ("--method=rollout_correction", 0, []),                # its functions are its own
    ):
        passes.clear()
        out = tmp_path / f"run{choice}"
        run_main(*quick, LEARNING, flags, *choice.split(), "--out", out)
        printed = capsys.readouterr().out
        assert printed.count("have another log-probability") == differences
        assert printed.count("one policy, to the last bit") == differences
        assert [kind for kind, _ in itertools.groupby(passes)] == expected
        assert train_gsm8k.arguments(["--resume", "--out", str(out)]).exact is False
