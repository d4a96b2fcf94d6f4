"""Train a 4-bit policy by reinforcement learning with annealed quantisation noise (QeRL, 2510.11696).

    python train_gsm8k.py                                 a small policy, made-up problems: minutes
    python train_gsm8k.py --model Qwen2.5-3B              Qwen/Qwen2.5-3B-Instruct on GSM8K, one GPU
    python train_gsm8k.py --model FOLDER --data FOLDER    a Hugging Face folder, local jsonl files
    python train_gsm8k.py --resume --out FOLDER           go on where a run stopped, or for more --steps
    torchrun --nproc_per_node=4 train_gsm8k.py ...        on four GPUs

Where this differs from the paper:

    noise       on every RMSNorm; the text has two of a block          qerl.adaptive_quantization_noise
    stages      K counts the noisy ones; line 7 of Algorithm 1 all     qerl.noise_sigma
    ratio       divides by the policy without noise, as the authors'   `old` in update
                code does; Algorithm 1 by the one that sampled
    clipping    0.2 below and 0.28 above; Eq. 3 has one epsilon        Settings.clip_low, clip_high
    updates     each has a part of the completions; Algorithm 1 all    batches.make_batch
    moments     of AdamW in float32; Table 4 has 8 bits                make_optimizer
    norms       frozen; the authors' code trains those of a block      Settings.train_norms
    defaults    are ours; --preset paper has Table 4's                 PRESETS

Letters in shapes: P questions, G completions of each, N = P * G, C tokens of the longest completion.
"""
import math
import re
import zlib
from dataclasses import dataclass, replace
from functools import cache

import torch

from harness.answers import answers_to, grade, own_reward, terms
from harness.batches import make_batch, pick_groups
from harness.command import one_line
from harness.data import decode_all, next_questions
from harness.engines import find_engine, find_method
from harness.evaluation import evaluate, evaluate_only
from harness.flags import settings_of
from harness.machine import GPUS, Clock, forecast
from harness.policy import load_all, save_quantized
from harness.ranks import Ranks
from harness.run import Run, describe, require_finite_rollout, run_folder
import qerl                            # behind harness, which refuses python -O in one line


@dataclass(frozen=True)
class Settings:
    """What a run depends on. Each is a flag: lora_rank is --lora-rank; --help prints these remarks.

    The defaults are for a real model; PRESETS have others. Brackets tell where one comes from: T4 is the
    paper's Table 4, E its appendix E; §, Eq., Fig. are its, too; code: the authors'; DAPO: 2503.14476.
    """
    model: str = None               # Hugging Face name or folder; by default the built-in policy
    data: str = None                # folder of train*.jsonl and test*.jsonl, or a dataset's file,
                                    # NAME or NAME:CONFIG:SPLIT; with --model GSM8K is fetched
    eval: list = None               # held-out questions from elsewhere: names or files of datasets
    start_seed: int = 0             # the built-in policy's; another seed makes another policy
    chat_template_kwargs: dict = None           # for Qwen3 such as '{"enable_thinking": false}'
    preset: str = None              # other defaults; without --model: small

    # The policy: frozen weights, trained LoRA.
    weights: str = "nvfp4"          # format of the frozen weights
    quantizer: str = "gptq"         # how the codes of nvfp4 are chosen: methods/gptq.py and so on;
                                    # rtn: the nearest, the default with --shard and other formats
    adapter: str = None             # folder of an adapter in PEFT's format to start from; it sets
                                    # rank and alpha, and is what --beta compares with
    lora_rank: int = 32             # rank of LoRA [§4.1]; 0 with bf16: all weights are trained
    lora_alpha: float = None        # LoRA is scaled by this over the rank; by default the rank
    train_norms: bool = False       # train the RMSNorm scales, too [code: on, the two of a block]

    # The rollout
    prompts: int = 64               # questions a step
    group: int = 8                  # completions a question [T4]
    max_new_tokens: int = 512       # tokens of a completion at most
    temperature: float = 1.0        # of the sampling, and of all log-probabilities of the training
    top_p: float = 1.0              # sample among the likeliest tokens that reach this probability
    slots: int = None               # sequences decoded at once; by default a step's, or what fits
    exact: bool = None              # without noise sample what is trained, to the last bit: by default where
                                    # it can be, on Hopper; --no-exact: nowhere

    # Adaptive Quantization Noise
    sigma_start: float = 1e-2       # noise of the first noisy stage [T4; §4.1: 5e-2]; both 0: none
    sigma_end: float = 5e-4         # noise of the last stage [T4]
    stages: int = 10                # stages of the noise, the first without any [§3.3]
    schedule: str = "exponential"   # noise decay [Eq. 8, Fig. 9]

    # The objective
    algo: str = "grpo"              # objective: qerl.OBJECTIVES
    method: str = "qerl"            # qerl, or a neighbour: FILE or FILE:VARIANT of the folder methods;
                                    # or FILE.py, whose functions take the place of qerl.py's
    reward: str = "answer"          # 1 if right; paper: 2, and 0.2 for the format [code]; random: 0 or 1;
                                    # FILE.py:FUNCTION: your own, of (completion, question), a dict;
                                    # or a sum, such as answer+0.1*FILE.py:FUNCTION
    overlong: float = 0.0           # last fraction of max_new_tokens in which a completion earns ever
                                    # less [DAPO: 0.2]; 0: none, dapo leaves out what was cut off
    beta: float = 0.0               # weight of the KL to the reference [E; code: 0.04 with grpo]
    clip_low: float = 0.2           # the ratio is clipped at 1 minus this [T4]
    clip_high: float = 0.28         # the ratio is clipped at 1 plus this [T4, DAPO]
    tis: float = 0.0                # cap of truncated importance weights; FlashRL's is 2; 0: none

    # The optimiser
    steps: int = 300                # rollouts, each followed by its updates
    updates: int = 4                # minibatches of a rollout, an optimiser step each [T4]
    lr: float = 1e-4                # learning rate; paper with --weights bf16: 5e-6
    warm_up: float = 0.1            # fraction of the steps in which the learning rate rises [code]
    weight_decay: float = 0.1       # weight decay of AdamW, for matrices alone [code]
    gradient_clip: float = 0.2      # largest norm of a gradient [code]
    micro_tokens: int = None        # tokens in one pass of an update; by default what fits, to 32768

    # The run
    shard: bool = False             # cut the frozen weights over torchrun's processes; slower
    seed: int = 0                   # seeds LoRA, the questions of --quantizer and of the training in
                                    # their order, sampling and noise
    engine: str = None              # plain: qerl.py computes; fast: harness/fast.py, the same, faster;
                                    # by default plain for the built-in policy, fast with --model
    device: str = "cuda" if torch.cuda.is_available() else "cpu"      # cuda, cuda:1 or cpu
    dtype: str = None               # of activations: bfloat16, float16 on old GPUs, float32 on a CPU
    validation: int = 0             # how many questions, from the end of training's, are kept apart
    eval_every: int = 0             # steps between evaluations on these, which make adapter-best
    validation_samples: int = 0     # answers to each of these, 0: as many as eval_samples
    eval_questions: int = 0         # held-out questions of each set, 0: all
    eval_samples: int = 1           # answers to each of them, for pass@1, pass@2, pass@4 and so on
    eval_temperature: float = 0.6   # of these answers [E]
    eval_top_p: float = 0.95        # of these answers [E]
    skip_eval_before: bool = False  # do not measure the policy before its training
    eval_only: bool = False         # only measure accuracy; with --resume, of the run's adapter
    save_every: int = 25            # steps between checkpoints
    dry_run: bool = False           # only say what memory and time the run will take
    gpu: str = None                 # the GPU that --dry-run describes; by default the one here or an H100
    out: str = None                 # folder of the run; by default a new one under runs/
    save_quantized: str = None      # only write the model in NVFP4 to this folder: docs/serving.md
    resume: bool = False            # go on from --out's last checkpoint, by default the newest run's


CHOICES = {
    "preset": ["small", "paper"],
    "weights": qerl.FORMATS,
    "quantizer": ["rtn", "four-over-six", "awq", "gptq"],
    "schedule": qerl.SCHEDULES,
    "algo": qerl.OBJECTIVES,
    "engine": ["plain", "fast"],
    "dtype": ["bfloat16", "float16", "float32"],
    "gpu": GPUS,
}
PRESETS = {
    "small": dict(prompts=16, max_new_tokens=64, lora_rank=16, reward="paper", lr=1.5e-3, steps=30,
                  eval_questions=256, save_every=5, quantizer="rtn"),
    # Table 4, whose batch of 128 is read as questions. AWQ: section 4.1, which has it for MXFP4, too.
    # Appendix E has no KL loss, the authors' code --beta 0.04.
    "paper": dict(prompts=128, max_new_tokens=4096, reward="paper", lr=1e-5, quantizer="awq"),
}


def train(settings, ranks=None):
    """Run Algorithm 1 of the paper, and around it resume, evaluate, log and save."""
    ranks = ranks or Ranks()                           # as many processes as torchrun started, or one
    method = find_method(settings)                     # a neighbour from methods/, or None
    engine = method or find_engine(settings)           # what computes: qerl, harness.fast or that
    resample = getattr(method, "resample", dynamic_sampling)
    model, tokenizer, data, settings = load_all(settings, method, ranks)
    find_reward(settings.reward)("", data.train[0])    # one that fails does so before the first step
    optimizer, scaler = make_optimizer(model, settings)
    sampling_rng = torch.Generator(model.device).manual_seed(settings.seed)
    noise_rng = torch.Generator().manual_seed(settings.seed + 1)
    run = Run(settings, ranks, model, optimizer, scaler, [sampling_rng, noise_rng], method)
    state = run.state                                  # with --resume that of the checkpoint
    if not state["step"] and not settings.skip_eval_before:
        state.update(evaluate(model, tokenizer, data.held_out, settings, "before", ranks))
    clock = Clock(model.device)
    shares = next_shares(data.train, state, settings, ranks)

    def complete(questions):
        """Sample a group of completions for each of these questions, and score them -> Samples."""
        with clock("rollout"):
            rollout = engine.generate(
                model, [q["prompt"] for q in questions], settings.max_new_tokens, settings.group,
                temperature=settings.temperature, top_p=settings.top_p, eos=tokenizer.eos,
                slots=settings.slots, generator=sampling_rng)
        with clock("reward"):
            require_finite_rollout(rollout)
            samples = score(questions, rollout, decode_all(tokenizer, rollout), settings.reward)
            punishment = overlong_punishment(rollout.length, settings.overlong, settings.max_new_tokens)
            samples.rewards += punishment.view_as(samples.rewards)
            return samples

    for step in run.steps(clock):
        # Sample and score. The sampling policy is noisy: w + N(0, sigma²) in RMSNorm (Eq. 7-10).
        sigma = qerl.noise_sigma(step, settings.steps, settings.stages, settings.sigma_start,
                                 settings.sigma_end, settings.schedule)
        with engine.adaptive_quantization_noise(model, sigma, noise_rng):
            samples = complete(next(shares))    # questions -> completions -> rewards
            samples = resample(samples, complete, shares, settings, ranks, noise_rng)

        # Advantages: how much better a completion did than the others of its question (Eq. 4).
        advantages = engine.group_advantages(samples.rewards, settings.algo)              # [P, G]
        batch = make_batch(samples, advantages, engine, settings, ranks)

        # Log-probabilities under the policy before its updates and under the reference policy. Those of
        # the first minibatch come from its own pass, in `update`; an exact sampler gave all.
        with clock("logprobs"), torch.no_grad():
            exact = run.samples_exactly(sigma, batch)
            if exact:
                batch.old_logprobs.copy_(batch.rollout_logprobs)
            else:
                fill(batch.old_logprobs, engine, model, batch, batch.trained_rows(first=1), settings)
            if settings.beta:
                with engine.reference_policy(model):
                    fill(batch.ref_logprobs, engine, model, batch, batch.trained_rows(), settings)

        # Update: an optimiser step for each minibatch.
        set_learning_rate(optimizer, step, settings)
        with clock("update"):
            update_metrics = update(engine, model, batch, optimizer, scaler, settings, ranks)
        if exact:
            run.check_exact(batch)

        # Log, evaluate and save.
        metrics = {"step": step + 1, "sigma": sigma, **update_metrics,
                   **describe(samples, batch, clock, engine.mismatch, exact)}
        if method:
            metrics |= method.measured
        if settings.eval_every and (step + 1) % settings.eval_every == 0:
            fewer = replace(settings, eval_samples=settings.validation_samples or settings.eval_samples)
            metrics |= evaluate(model, tokenizer, data.validation, fewer, "validation", ranks)
        run.log(metrics, samples, batch, tokenizer)

    state.update(evaluate(model, tokenizer, data.held_out, settings, "after", ranks))
    run.finish(len(data.held_out))


def forward(engine, model, batch, chosen, settings):
    """Yield the chosen rows of a Batch in pieces that fit memory, with their log-probabilities."""
    for rows in batch.micro_batches(chosen, settings.micro_tokens):
        yield rows, engine.token_logprobs(
            model, rows.prompts, rows.tokens, rows.length, settings.temperature)


def fill(into, engine, model, batch, chosen, settings):
    """Write the log-probabilities of the chosen rows of a Batch into a tensor [N, C]."""
    for rows, logprobs in forward(engine, model, batch, chosen, settings):
        into[rows.index] = logprobs


def update(engine, model, batch, optimizer, scaler, settings, ranks):
    """An optimiser step for each minibatch of a batches.Batch -> {name: number} for metrics.jsonl.

    Gradients add up over the pieces of a minibatch; a token's weight is that in the whole minibatch.
    """
    kls = []
    trained = qerl.trainable(model).values()
    old = batch.old_logprobs           # [N, C], of the policy without noise, before the step's updates
    for number, minibatch in enumerate(batch.minibatches):
        for rows, logprobs in forward(engine, model, batch, minibatch, settings):
            if number == 0:                                    # no update has come yet in this step
                old[rows.index] = logprobs.detach()
            loss, kl = engine.policy_loss(                                                # Eq. 3
                logprobs, old[rows.index], rows.advantages, rows.weights,
                clip_low=settings.clip_low, clip_high=settings.clip_high,
                ref_logprobs=rows.ref_logprobs, beta=settings.beta,
                rollout_logprobs=rows.rollout_logprobs, tis=settings.tis, objective=settings.algo)
            scaler.scale(loss).backward()
            kls.append(kl)
        ranks.add_gradients(trained)
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(trained, settings.gradient_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    metrics = {
        "kl": sum(kl.item() for kl in kls) / len(batch.minibatches),
        # Of the last minibatch; 0 where float16 overflowed: the step is left out, the scale halved.
        "gradient_norm": norm.item() if math.isfinite(norm) or scaler.get_scale() <= 1 else 0.0,
        "lr": optimizer.param_groups[0]["lr"],
    }
    if scaler.is_enabled():
        metrics["loss_scale"] = scaler.get_scale()
    return metrics


# --------------------------------------------------------------------------------------------------
# Sampling, scoring and rewards

@dataclass
class Samples:
    """The completions of P questions, G each, N = P * G in all, and what they earned."""
    questions: list                # P dicts with "question", "prompt" and "right"
    rollout: qerl.Rollout          # of the N completions
    texts: list                    # N strings
    rewards: torch.Tensor          # float32 [P, G]
    correct: torch.Tensor          # float32 [P, G], 1 where the answer is right
    timeouts: int = 0              # answers that are too much work to grade: answers.is_equal
    draws: list = None             # of Samples: everything drawn, of which DAPO kept these


def next_shares(questions, state, settings, ranks):
    """Yield this process's share of a step's questions, each time of the next ones."""
    while True:
        asked = next_questions(questions, state["drawn"], settings.prompts, settings.seed)
        state["drawn"] += len(asked)
        yield ranks.share(asked, settings.updates)


def score(questions, rollout, texts, scheme):
    """Samples, with the reward of each completion by --reward."""
    earned = find_reward(scheme)
    graded = [(earned(*answer), grade(*answer)) for answer in answers_to(questions, texts)]
    scores = [(reward, bool(right)) for reward, right in graded]
    scores = torch.tensor(scores, dtype=torch.float32, device=rollout.tokens.device)
    rewards, correct = scores.view(len(questions), -1, 2).unbind(-1)
    timeouts = sum(right is None for _, right in graded)
    return Samples(questions, rollout, texts, rewards, correct, timeouts)


# The paper's format: reasoning and answer between tags, each once. (The authors' code searches for it.)
FORMAT = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>\s*"
                    r"<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL)


def answer_reward(completion, question):
    """1 if the answer is right."""
    return float(bool(grade(completion, question)))


def paper_reward(completion, question):
    """2 if the answer is right, and 0.2 for the format.

    The 0.2 are small, but not after the division by a group's standard deviation: where few answers
    are right they are most of the advantage, and a short wrong answer in the right format wins.
    """
    return 2 * answer_reward(completion, question) + 0.2 * bool(FORMAT.fullmatch(completion))


def overlong_punishment(length, overlong, max_new_tokens):
    """DAPO's soft overlong punishment (Eq. 13): length int64 [N] -> what to add, from 0 to -1, [N]."""
    interval = overlong * max_new_tokens
    begins = max_new_tokens - interval
    return ((begins - length) / max(interval, 1)).clamp(-1, 0)


def random_reward(completion, question):
    """A control that knows nothing: the last bit of a text's checksum."""
    return float(zlib.crc32(completion.encode()) % 2)


REWARDS = {"answer": answer_reward, "paper": paper_reward, "random": random_reward}


@cache                             # so that a user's file is run once, not at each step
def find_reward(scheme):
    """The function (completion, question) -> float of --reward: a sum of [WEIGHT*]NAME."""
    earned = [(weight, REWARDS.get(name) or own_reward(name)) for weight, name in terms(scheme)]
    return lambda completion, question: sum(w * reward(completion, question) for w, reward in earned)


def dynamic_sampling(samples, complete, shares, settings, ranks, generator):
    """DAPO's way: draw until enough groups have rewards that differ; keep as many as `samples` has.

    Groups whose rewards are all equal teach nothing. After four draws they fill the rest. (DAPO itself
    asks for right and wrong answers.) Each process keeps its share of the groups that all have drawn.
    Other objectives keep `samples`. A method may have another such function, `resample`.
    """
    if not qerl.OBJECTIVES[settings.algo].redraw:
        return samples
    own_draws = [samples]
    draws = [ranks.pool(samples, settings.updates)]
    wanted = len(draws[0].questions)
    while True:
        signal = torch.cat([qerl.has_signal(s.rewards) for s in draws])
        if signal.sum() >= wanted or len(draws) == 4:
            break
        own_draws.append(complete(next(shares)))
        draws.append(ranks.pool(own_draws[-1], settings.updates))
    # Groups with a signal first, each kind in the order in which it was drawn.
    kept = (~signal).int().argsort(stable=True)[:wanted].tolist()
    samples = pick_groups(draws, ranks.share(kept, settings.updates))
    samples.draws = own_draws
    return samples


# --------------------------------------------------------------------------------------------------
# The optimiser

def make_optimizer(model, settings):
    """AdamW for what is trained, and the scaler of the loss; the norms' scales do not decay.

    The betas are the authors' code's. Table 4 keeps the moments in 8 bits, here they are float32. In
    float16 the loss is scaled up, as small gradients would vanish; a step that overflows is left out.
    """
    parameters = qerl.trainable(model).values()
    groups = [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, settings.lr, betas=(0.9, 0.99), weight_decay=settings.weight_decay)
    scaler = torch.amp.GradScaler(
        model.device.type, growth_interval=400, enabled=settings.dtype == "float16")
    # PyTorch makes the scale at the first loss; a minibatch that teaches nothing has none.
    scaler.scale(torch.zeros((), device=model.device))
    return optimizer, scaler


def set_learning_rate(optimizer, step, settings):
    """Linear warm-up over the first fraction `warm_up` of the steps, then a cosine towards zero."""
    rising = max(1, round(settings.warm_up * settings.steps))
    if step < rising:
        lr = settings.lr * (step + 1) / rising
    else:
        angle = math.pi * (step - rising) / (settings.steps - rising)
        lr = settings.lr * (1 + math.cos(angle)) / 2
    for group in optimizer.param_groups:
        group["lr"] = lr


def arguments(argv=None, processes=1):
    """The Settings of a command line, checked: flags.settings_of."""
    settings = settings_of(Settings, __doc__, PRESETS, CHOICES, argv, processes)
    find_reward(settings.reward)
    return settings


def main():
    with one_line() as ranks:                   # an error that the user can mend is one line
        settings = arguments(processes=ranks.count)
        if settings.dry_run:
            print(forecast(settings, ranks.count))
            return
        settings = replace(settings, device=ranks.start(settings.device))
        if settings.save_quantized:
            return save_quantized(settings)
        with run_folder(settings, ranks) as settings:
            if settings.eval_only:
                evaluate_only(settings, ranks)
            else:
                if settings.device != "cpu" and settings.model and not settings.shard:
                    print(forecast(settings, ranks.count))
                train(settings, ranks)
        ranks.stop()


if __name__ == "__main__":
    main()
