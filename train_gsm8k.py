"""Train a 4-bit policy on word problems by reinforcement learning with annealed quantisation noise
(QeRL, arXiv 2510.11696).

    python train_gsm8k.py                                 a small policy, made-up problems: minutes
    python train_gsm8k.py --model Qwen2.5-3B              Qwen/Qwen2.5-3B-Instruct on GSM8K, one GPU
    python train_gsm8k.py --model FOLDER --data FOLDER    a Hugging Face folder, local jsonl files
    python train_gsm8k.py --resume --out FOLDER           go on where a run stopped, with its settings
    python train_gsm8k.py --resume --out FOLDER --steps 600        for more steps than planned
    torchrun --nproc_per_node=4 train_gsm8k.py ...        on four GPUs
"""
# Read from top to bottom: the settings, the loop (`train`) and its `update`, then the loop's parts:
# loading, sampling and scoring, the optimiser, evaluation. What a run needs and the story does not,
# such as checkpoints and plots, is in the folder harness/. `method` in the loop is harness.fast, which
# computes what qerl.py does, faster; with --plain it is the module qerl itself. With --method it is a
# neighbour in the folder methods/, which has some functions of its own and the others of harness.fast.
# Letters in shapes: P questions, G completions of each, N = P * G, and C tokens, the longest
# completion.
import inspect
import math
import re
import runpy
import zlib
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

import torch

from harness.answers import is_right, own_reward, terms
from harness.batches import effective_size, make_batch, pick_groups
from harness.command import check_settings, full_name, one_line, parse_flags, require_flag
from harness.data import ChatText, by_set, load_questions, next_questions, write_prompts
from harness.data import with_prompts               # docs/course.md takes it from here
from harness.export import adapter_settings, load_adapter, save_packed
from harness.folders import write_json, write_jsonl
from harness.loading import default_dtype, model_folder
from harness.machine import GPUS, Clock, fitted, forecast, keep_decoded, keep_values
from harness.ranks import Ranks
from harness.run import Run, fingerprints, lasting, require_finite_rollout, restore_policy, resumed
from harness.run import run_folder
from harness.small_policy import WordText, warm_start
from harness.errors import UserError, reason
import qerl                            # behind harness, which refuses python -O in one line


@dataclass(frozen=True)
class Settings:
    """What a run depends on. Each is a flag: lora_rank is --lora-rank; --help prints these remarks.

    The defaults are for a real model; the presets small and paper have others (PRESETS). Brackets
    tell where a default comes from, if it is not our own choice. T4: Table 4 of the paper (GSM8K);
    §, E (its appendix), Eq., Fig.: the paper's; code: the authors' public code; DAPO: arXiv
    2503.14476.
    """
    model: str = None               # Hugging Face name or folder; by default the built-in policy
    data: str = None                # folder of train*.jsonl and test*.jsonl, or a dataset's file,
                                    # NAME or NAME:CONFIG:SPLIT; with --model GSM8K is fetched
    eval: list = None               # held-out questions from elsewhere: names or files of datasets
    start_seed: int = 0             # the built-in policy's; another seed makes another policy
    chat_template_kwargs: dict = None           # what the chat template gets, such as
                                    # '{"enable_thinking": false}' for Qwen3
    preset: str = None              # other defaults; without --model: small

    # The policy: frozen weights, trained LoRA.
    weights: str = "nvfp4"          # format of the frozen weights
    quantizer: str = "gptq"         # how the codes of nvfp4 are chosen: methods/gptq.py and so on,
                                    # once; rtn: the nearest, the default with --shard and other
                                    # formats
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
    top_p: float = 1.0              # sample among the likeliest tokens that reach this;
                                    # log-probabilities are of all
    slots: int = None               # sequences decoded at once; by default the completions of a step,
                                    # at least 256, or what memory holds

    # Adaptive Quantization Noise
    sigma_start: float = 1e-2       # noise of the first noisy stage [T4; §4.1: 5e-2]; 0 here and
                                    # below: none
    sigma_end: float = 5e-4         # noise of the last stage [T4]
    stages: int = 10                # stages of the noise, the first without any [§3.3]
    schedule: str = "exponential"   # noise decay [Eq. 8, Fig. 9]

    # The objective
    algo: str = "grpo"              # objective: qerl.OBJECTIVES
    method: str = "qerl"            # qerl, or a neighbour: FILE or FILE:VARIANT of the folder methods;
                                    # with --plain FILE.py, whose functions take the place of qerl.py's
    reward: str = "answer"          # 1 if right; paper: 2, and 0.2 for format [code; its format is a
                                    # search, ours a full match]; random: 0 or 1 whatever it says;
                                    # FILE.py:FUNCTION: your own, of (completion, question), a dict
                                    # of question, answer and right; or a sum, such as
                                    # answer+0.1*FILE.py:FUNCTION
    overlong: float = 0.0           # fraction of max_new_tokens, at its end, in which a completion earns
                                    # ever less, up to 1 [DAPO, Eq. 13: 0.2]; 0: none, and --algo dapo
                                    # leaves out what was cut off
    beta: float = 0.0               # weight of the KL to the reference [E; code: 0.04 with grpo]
    clip_low: float = 0.2           # the ratio is clipped at 1 minus this [T4]
    clip_high: float = 0.28         # the ratio is clipped at 1 plus this [T4, DAPO]
    tis: float = 0.0                # cap of truncated importance weights; FlashRL's is 2; 0: none

    # The optimiser
    steps: int = 300                # rollouts, each followed by its updates
    updates: int = 4                # minibatches a rollout, an optimiser step each; a completion is
                                    # in one [T4]
    lr: float = 1e-4                # learning rate; paper with --weights bf16: 5e-6
    warm_up: float = 0.1            # fraction of the steps in which the learning rate rises [code]
    weight_decay: float = 0.1       # weight decay of AdamW, for matrices alone [code]
    gradient_clip: float = 0.2      # largest norm of a gradient [code]
    micro_tokens: int = None        # tokens in one pass of an update, in which a shared prompt
                                    # counts once; by default 16384, or what memory holds

    # The run
    shard: bool = False             # cut the frozen weights over torchrun's processes, for models
                                    # that one GPU cannot hold; slower
    seed: int = 0                   # seeds LoRA, the order of the questions, sampling and noise
    plain: bool = False             # compute by qerl.py alone, slower: to step through, or in doubt
    device: str = "cuda" if torch.cuda.is_available() else "cpu"      # cuda, cuda:1 or cpu
    dtype: str = None               # of activations; by default bfloat16, float16 on old GPUs,
                                    # float32 on a CPU
    validation: int = 0             # how many questions, from the end of training's, are kept apart
    eval_every: int = 0             # steps between evaluations on these; the best adapter is kept
                                    # in adapter-best; 0: none
    eval_questions: int = 0         # held-out questions of each set, 0: all
    eval_samples: int = 1           # answers to each of them, for pass@1, pass@2, pass@4 and so on
    eval_temperature: float = 0.6   # of these answers [E]
    eval_top_p: float = 0.95        # of these answers [E]
    skip_eval_before: bool = False  # do not measure the policy before its training
    eval_only: bool = False         # only measure accuracy; with --resume, of the run's adapter
    save_every: int = 25            # steps between checkpoints
    dry_run: bool = False           # only say what memory and time the run will take, by
                                    # config.json alone
    gpu: str = None                 # the GPU that --dry-run describes; by default the one here or an H100
    out: str = None                 # folder of the run; by default a new one under runs/
    save_quantized: str = None      # only write the model in NVFP4 to this new folder, for vLLM and
                                    # transformers: docs/serving.md
    resume: bool = False            # go on from --out's last checkpoint, by default the newest run's


CHOICES = {
    "preset": ["small", "paper"],
    "weights": qerl.FORMATS,
    "quantizer": ["rtn", "four-over-six", "awq", "gptq"],
    "schedule": qerl.SCHEDULES,
    "algo": qerl.OBJECTIVES,
    "dtype": ["bfloat16", "float16", "float32"],
    "gpu": GPUS,
}
PRESETS = {
    # What the built-in policy learns from within minutes.
    "small": dict(prompts=16, max_new_tokens=64, lora_rank=16, reward="paper", beta=0.04,
                  lr=3e-3, steps=50, eval_questions=256, save_every=5, quantizer="rtn"),
    # Table 4, whose batch of 128 is read as questions, and 4 updates as minibatches (Algorithm 1 has
    # passes over all completions). AWQ: section 4.1, which has it for MXFP4, too. Appendix E has no
    # KL loss, the authors' code --beta 0.04.
    "paper": dict(prompts=128, max_new_tokens=4096, reward="paper", lr=1e-5, quantizer="awq"),
}


def train(settings, ranks=None):
    """Run Algorithm 1 of the paper, and around it resume, evaluate, log and save."""
    ranks = ranks or Ranks()                           # as many processes as torchrun started, or one
    method = find_method(settings)                     # harness.fast, qerl or a neighbour
    model, tokenizer, data, settings = load_all(settings, method, ranks)
    optimizer, scaler = make_optimizer(model, settings)
    sampling_rng = torch.Generator(model.device).manual_seed(settings.seed)
    noise_rng = torch.Generator().manual_seed(settings.seed + 1)
    run = Run(settings, ranks, model, optimizer, scaler, [sampling_rng, noise_rng], method)
    state = run.state                                  # with --resume that of the checkpoint
    if not state["step"] and not settings.skip_eval_before:
        state.update(evaluate(model, tokenizer, data.held_out, settings, "before", ranks))
    clock = Clock(model.device)

    def complete(asked, phase="rollout", **options):
        """Sample a group of completions for each of these questions, and score them."""
        with clock(phase):
            rollout = method.generate(
                model, [q["prompt"] for q in asked], settings.max_new_tokens, settings.group,
                temperature=settings.temperature, top_p=settings.top_p, eos=tokenizer.eos,
                slots=settings.slots, generator=sampling_rng, **options)
        with clock("reward"):
            require_finite_rollout(rollout)
            samples = score(asked, rollout, decode_all(tokenizer, rollout), settings.reward)
            samples.rewards += overlong_punishment(rollout.length, settings).view_as(samples.rewards)
            return samples

    def draw():
        """Complete and score this process's share of the next questions."""
        asked = next_questions(data.train, state["drawn"], settings.prompts, settings.seed)
        state["drawn"] += len(asked)
        return complete(ranks.share(asked, settings.updates))

    if hasattr(method, "sampling"):
        draw = method.sampling(draw, complete, noise_rng)

    def write_logprobs(into, batch, chosen):
        """Write the log-probabilities of these rows of a batch into a tensor [N, C]."""
        for rows in batch.micro_batches(chosen, settings.micro_tokens):
            into[rows.index] = method.token_logprobs(
                model, rows.prompts, rows.tokens, rows.length, settings.temperature)

    for step in run.steps(clock):
        # Sample and score. The sampling policy is noisy: w + N(0, sigma²) in RMSNorm (Eq. 7-10).
        sigma = qerl.noise_sigma(step, settings.steps, settings.stages, settings.sigma_start,
                                 settings.sigma_end, settings.schedule)
        with method.adaptive_quantization_noise(model, sigma, noise_rng):
            samples = draw()                    # questions -> completions -> rewards
            if qerl.OBJECTIVES[settings.algo].redraw:         # further draws share this step's noise
                samples = dynamic_sampling(samples, draw, ranks, settings.updates)

        # Advantages: how much better a completion did than the others of its question (Eq. 4).
        advantages = method.group_advantages(samples.rewards, settings.algo)              # [P, G]
        batch = make_batch(samples, advantages, method, settings, ranks)

        # Log-probabilities under the policy before its updates and under the reference policy. The first
        # minibatch needs no old ones: its own forward pass gives them.
        with clock("logprobs"), torch.no_grad():
            write_logprobs(batch.old_logprobs, batch, batch.trained_rows(first=1))
            if settings.beta:
                with method.reference_policy(model):
                    write_logprobs(batch.ref_logprobs, batch, batch.trained_rows())

        # Update: an optimiser step for each minibatch.
        set_learning_rate(optimizer, step, settings)
        with clock("update"):
            update_metrics = update(method, model, batch, optimizer, scaler, settings, ranks)

        # Log, evaluate and save.
        metrics = {"step": step + 1, "sigma": sigma, **update_metrics,
                   **describe(samples, batch, clock, method), **getattr(method, "measured", {})}
        if settings.eval_every and (step + 1) % settings.eval_every == 0:
            metrics |= evaluate(model, tokenizer, data.validation, settings, "validation", ranks)
        run.log(metrics, samples, batch, tokenizer)

    state.update(evaluate(model, tokenizer, data.held_out, settings, "after", ranks))
    run.finish(len(data.held_out))


def update(method, model, batch, optimizer, scaler, settings, ranks):
    """An optimiser step for each minibatch of a batches.Batch -> {name: number} for metrics.jsonl.

    Gradients add up over micro-batches that fit memory; a token's weight is that in the whole minibatch.
    The first minibatch takes its own log-probabilities as the old ones. `train` has computed those of
    the others.
    """
    kls = []
    trained = qerl.trainable(model).values()
    for number, minibatch in enumerate(batch.minibatches):
        for rows in batch.micro_batches(minibatch, settings.micro_tokens):
            logprobs = method.token_logprobs(
                model, rows.prompts, rows.tokens, rows.length, settings.temperature)
            if number == 0:                    # no update has come yet in this step
                rows.old_logprobs = logprobs.detach()
                batch.old_logprobs[rows.index] = rows.old_logprobs
            loss, kl = method.policy_loss(                                                # Eq. 3
                logprobs, rows.old_logprobs, rows.advantages, rows.weights,
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
# The model, the questions, the text

# The system's message. "paper" asks for the tags of the paper's appendix E, in our words.
SYSTEM = {
    "answer": "Please reason step by step, and put your final answer within \\boxed{}.",
    "paper": "Please reason step by step, and put your final answer within \\boxed{}. Write the "
             "reasoning between <think> and </think> and the boxed answer between <answer> and "
             "</answer>.",
}


def instruction(scheme):
    """The message of a --reward, which asks for the format that the reward looks for."""
    return SYSTEM["paper" if "paper" in [name for _, name in terms(scheme)] else "answer"]


def find_engine(settings):
    """The module that computes: harness.fast or, with --plain, qerl itself."""
    if settings.plain:
        return qerl
    from harness import fast                   # without which a plain run does
    return fast


def find_method(settings):
    """The engine or, with --method, a neighbour: an object whose other functions are the engine's."""
    if settings.method == "qerl":
        return find_engine(settings)
    if settings.method.endswith(".py"):
        return with_functions_of(settings.method)
    import methods                             # which other runs do without
    return methods.find(settings.method, settings)


def with_functions_of(path):
    """The module qerl, in which the functions of a file take the place of its own (docs/lab).

    A function in which NotImplementedError still stands is not written yet; qerl's stays.
    """
    try:
        found = runpy.run_path(path)
    except (Exception, SystemExit) as e:
        raise UserError(f"--method {path}: cannot be run ({reason(e)}); mend the file")
    taken = []
    for name, function in found.items():
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        written = code and code.co_filename == path and "NotImplementedError" not in code.co_names
        if written and hasattr(qerl, name):
            setattr(qerl, name, function)
            taken.append(name)
    print(f"of {path}: {', '.join(taken) or 'no function is written yet'}; qerl.py's others")
    return qerl


def find_model(settings):
    """(folder, tokenizer) of --model or, without it, of the built-in policy."""
    if not settings.model:
        return warm_start(settings.start_seed), WordText()
    folder = model_folder(settings.model)
    return folder, ChatText(folder, instruction(settings.reward), settings.chat_template_kwargs)


def load_all(settings, method, ranks):
    """(model, tokenizer, data.Data, the settings with what memory holds: machine.fitted).

    The order counts: --quantizer fits codes to the questions, a neighbour changes the loaded model,
    and the free memory is measured last.
    """
    engine = find_engine(settings)
    data = load_questions(settings)
    folder, tokenizer = find_model(settings)
    stored = stored_folder(settings, method, folder, data.train, tokenizer)
    model = load_model(settings, engine, stored, ranks)
    # What the adapter says it belongs to.
    model.name_or_path = (settings.model or folder) if stored == folder else stored
    data = write_prompts(data, tokenizer, model.config, settings.max_new_tokens, ranks.count)
    model.fingerprints = fingerprints(settings, stored, tokenizer.eos, data)
    find_reward(settings.reward)("", data.train[0])    # one that fails does so before the first step
    if hasattr(method, "prepare"):
        method.prepare(model, folder, data.train, tokenizer)
    longest = max(len(q["prompt"]) for q in sum(data, [])) + settings.max_new_tokens
    completions = settings.prompts // ranks.count * settings.group
    return model, tokenizer, data, fitted(settings, model, longest, completions, engine)


def stored_folder(settings, method, folder, questions, tokenizer):
    """The folder whose weights are loaded: the model's, or one with the codes of --quantizer."""
    stored = folder
    if settings.quantizer != "rtn":
        from methods.parts.quantizers import quantized_folder
        stored = quantized_folder(folder, settings.quantizer, questions, tokenizer, settings.device)
    if hasattr(method, "stored_model"):
        stored = method.stored_model(stored, folder, questions, tokenizer)
    return stored


def load_model(settings, engine, stored, ranks):
    """The model with what is trained: LoRA on frozen weights or, with --lora-rank 0, the weights."""
    torch.manual_seed(settings.seed)                           # LoRA's A is drawn at random
    reader_class = engine.WeightReader
    if settings.shard:
        from harness.layers import ShardedReader as reader_class
    model = engine.load_model(
        stored, settings.weights, settings.lora_rank, settings.device,
        dtype=getattr(torch, settings.dtype), lora_alpha=settings.lora_alpha,
        train_norms=settings.train_norms or settings.lora_rank == 0, reader_class=reader_class)
    if settings.shard:
        from harness.layers import SharedPasses
        ranks.serve = SharedPasses(model, ranks.count).serve
    if settings.device != "cpu" and not settings.plain:
        model.recompute_in_backward()
    if settings.lora_rank == 0:
        from harness.layers import TrainedLinear, replace_layers
        replace_layers(model, TrainedLinear)
    if settings.adapter:
        load_adapter(model, settings.adapter)
    if not settings.shard:
        keep_decoded(model, engine)
        keep_values(model, engine)
    return model


# --------------------------------------------------------------------------------------------------
# Sampling and scoring

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


def decode_all(tokenizer, rollout):
    """The texts of a rollout's completions."""
    rows = zip(rollout.tokens.cpu(), rollout.length.tolist())
    return [tokenizer.decode(row[:length].tolist()) for row, length in rows]


def score(questions, rollout, texts, scheme):
    """Samples, with the reward of each completion.

    A prompt or a method may begin the completions (with_prompts, methods.Method.sampling). What they
    go on from stands in question["begun"], and is scored with them.
    """
    earned = find_reward(scheme)
    graded = [(earned(*answer), grade(*answer)) for answer in answers_to(questions, texts)]
    scores = [(reward, bool(right)) for reward, right in graded]
    scores = torch.tensor(scores, dtype=torch.float32, device=rollout.tokens.device)
    rewards, correct = scores.view(len(questions), -1, 2).unbind(-1)
    timeouts = sum(right is None for _, right in graded)
    return Samples(questions, rollout, texts, rewards, correct, timeouts)


def answers_to(questions, texts):
    """[(a whole completion, its question)] of the texts, of which each question has as many."""
    group = len(texts) // len(questions)
    asked = [question for question in questions for _ in range(group)]
    return [(question.get("begun", "") + text, question) for question, text in zip(asked, texts)]


# In the paper's format the reasoning and the answer stand between tags, each of which comes once.
FORMAT = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>\s*"
                    r"<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL)


def grade(completion, question, anywhere=False):
    """answers.is_right: True, False, or None if it is too much work to tell."""
    return is_right(completion, question["right"], question.get("question", ""), anywhere)


def answer_reward(completion, question):
    """1 if the answer is right."""
    return float(bool(grade(completion, question)))


def paper_reward(completion, question):
    """2 if the answer is right, and 0.2 for the format.

    The 0.2 are small, but not after the division by a group's standard deviation: where few answers
    are right they are most of the advantage, and a short wrong answer in the right format wins.
    """
    return 2 * answer_reward(completion, question) + 0.2 * bool(FORMAT.fullmatch(completion))


def overlong_punishment(length, settings):
    """DAPO's soft overlong punishment (Eq. 13): length int64 [N] -> what to add, from 0 to -1, [N]."""
    interval = settings.overlong * settings.max_new_tokens
    begins = settings.max_new_tokens - interval
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


def dynamic_sampling(samples, draw, ranks, updates):
    """DAPO's way: draw until enough groups have rewards that differ; keep as many as `samples` has.

    Groups whose rewards are all equal teach nothing. After four draws they fill the rest. (DAPO itself
    asks for right and wrong answers; --reward paper tells formats apart, too.) Each process keeps its
    share of the groups that all processes have drawn.
    """
    own_draws = [samples]
    draws = [ranks.pool(samples, updates)]
    wanted = len(draws[0].questions)
    while True:
        signal = torch.cat([qerl.has_signal(s.rewards) for s in draws])
        if signal.sum() >= wanted or len(draws) == 4:
            break
        own_draws.append(draw())
        draws.append(ranks.pool(own_draws[-1], updates))
    # Groups with a signal first, each kind in the order in which it was drawn.
    kept = (~signal).int().argsort(stable=True)[:wanted].tolist()
    samples = pick_groups(draws, ranks.share(kept, updates))
    samples.draws = own_draws
    return samples


# --------------------------------------------------------------------------------------------------
# The update's parts

def make_optimizer(model, settings):
    """AdamW for what is trained, and the scaler of the loss; the norms' scales do not decay.

    The betas are the authors' code's. Table 4 keeps AdamW's moments in 8 bits, for memory; here they
    are float32. In float16 small gradients would vanish: they are computed from a loss that is scaled
    up. Where a gradient overflows, the step is left out and the scale halved.
    """
    parameters = qerl.trainable(model).values()
    groups = [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
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


# --------------------------------------------------------------------------------------------------
# Evaluation, log, command line

def answer_all(model, tokenizer, questions, settings, ranks, samples, temperature, top_p):
    """The texts of `samples` answers to each question, to which each process gives its part."""
    first = len(questions) * ranks.rank // ranks.count
    last = len(questions) * (ranks.rank + 1) // ranks.count
    prompts = [question["prompt"] for question in questions[first:last]]
    rng = torch.Generator(model.device).manual_seed(settings.seed)
    ranks.differ(rng, settings.seed, 0)
    rollout = find_engine(settings).generate(
        model, prompts, settings.max_new_tokens, samples, temperature, top_p,
        eos=tokenizer.eos, slots=settings.slots, generator=rng,
    )
    require_finite_rollout(rollout)
    return ranks.collect(decode_all(tokenizer, rollout))


def pass_at(k, correct, samples):
    """Probability that one of k answers is right, where `correct` of `samples` were: the unbiased
    estimate (arXiv 2107.03374, Eq. 1)."""
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def evaluate(model, tokenizer, questions, settings, when, ranks):
    """Accuracies as fractions: pass@1 (at the paper's temperature 0.6 and top-p 0.95) and greedy.

    pass@1 is the mean over questions and `eval_samples` answers to each, from which pass@2, pass@4 and
    so on are estimated, too; of several sets of questions (--eval) it is the mean of the sets' own.
    The first of the answers and the greedy ones go to answers_WHEN.jsonl in the run's folder.
    """
    answers = [{"question": q["question"], "number": str(q["right"])} for q in questions]
    result = {}
    measures = {               # samples, temperature and top-p
        "accuracy": (settings.eval_samples, settings.eval_temperature, settings.eval_top_p),
        "greedy": (1, 0.0, 1.0),
    }
    for name, (samples, *drawn_how) in measures.items():
        texts = answer_all(model, tokenizer, questions, settings, ranks, samples, *drawn_how)
        right = [bool(grade(*answer, anywhere=True)) for answer in answers_to(questions, texts)]
        for answer, text, correct in zip(answers, texts[::samples], right[::samples]):
            answer[name] = {"text": text, "correct": correct}
        counts = [sum(right[i:i + samples]) for i in range(0, len(right), samples)]
        for k in (2 ** i for i in range(samples.bit_length())):
            label = name if k == 1 else f"pass@{k}"
            chances = [pass_at(k, count, samples) for count in counts]
            shares = {source: fmean(of_set) for source, of_set in by_set(questions, chances).items()}
            result[f"{label}_{when}"] = fmean(shares.values())
            if len(shares) > 1:
                result |= {f"{label}_{source}_{when}": share for source, share in shares.items()}
    found = ", ".join(f"{name} {share:.1%}" for name, share in result.items())
    print(f"{found} of {len(questions)} questions")
    if settings.out and ranks.main:
        write_jsonl(f"{settings.out}/answers_{when}.jsonl", answers)
    return result


def describe(samples, batch, clock, method):
    """What metrics.jsonl says of a step's samples; reward and accuracy are of all draws.

    The accuracy is of noisy samples at --temperature, and counts answers in a box or the tags alone:
    usually lower than what `evaluate` finds. Mismatch and effective sample sizes are of the groups
    that are trained on; groups_left_out is the share of the others. Of all draws right_and_wrong is the
    share of questions with right and wrong answers, signal that of the groups whose rewards differ.
    """
    rollout = samples.rollout
    draws = samples.draws or [samples]
    drawn_tokens = sum(s.rollout.length.sum().item() for s in draws)
    rows = batch.trained_rows()
    policies = batch.old_logprobs[rows], rollout.logprobs[rows], rollout.mask[rows]
    kl, largest_ratio = method.mismatch(*policies)
    rewards = torch.cat([s.rewards for s in draws])
    correct = torch.cat([s.correct for s in draws])
    return {
        "reward": rewards.mean().item(),
        "accuracy": correct.mean().item(),
        "right_and_wrong": qerl.has_signal(correct).float().mean().item(),
        "signal": qerl.has_signal(rewards).float().mean().item(),
        "draws": len(draws),
        "timeouts": float(sum(s.timeouts for s in draws)),
        "entropy": rollout.entropy[rollout.mask].mean().item(),
        "groups_left_out": 1 - len(rows) / len(batch.prompts),
        "mismatch_kl": kl,
        "mismatch_max_ratio": largest_ratio,
        "effective_completions": effective_size(*policies),
        "length": rollout.length.float().mean().item(),
        "truncated": 1 - rollout.finished.float().mean().item(),
        "tokens_per_s": drawn_tokens / clock.seconds["rollout"],
        "seconds": clock.seconds | {"step": clock.since_restart()},
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9,
    }


def evaluate_only(settings, ranks):
    """Measure the model, or with --resume the run's policy; with --out write eval.json, too."""
    model, tokenizer, data, settings = load_all(settings, find_method(settings), ranks)
    if settings.resume:
        saved = restore_policy(model, settings.out)
        print(f"evaluating {settings.out} after step {saved['state']['step']}")
    result = evaluate(model, tokenizer, data.held_out, settings, "now", ranks)
    if settings.out and ranks.main:
        result["settings"] = lasting(settings)
        write_json(f"{settings.out}/eval.json", result)


def save_quantized(settings):
    """Write the model in NVFP4, by the codes of --quantizer, to the folder --save-quantized."""
    folder, tokenizer = find_model(settings)

    def calibrated():
        questions = load_questions(settings).train
        return stored_folder(settings, find_engine(settings), folder, questions, tokenizer)

    rounding = settings.quantizer == "rtn"
    save_packed(folder, settings.save_quantized, settings.device, None if rounding else calibrated)


def arguments(argv=None, processes=1):
    """The Settings of a command line, checked: flags win over the preset, it over the defaults.

    With --resume the settings of the run that goes on come before preset and defaults. The model has
    its full name, and the dtype is one that suits the device. processes: how many torchrun started.
    """
    given = parse_flags(Settings, __doc__, PRESETS, CHOICES, argv)
    if "model" in given:
        given["model"] = full_name(given["model"])
    if given.get("resume"):
        given = {name: value for name, value in resumed(given).items() if hasattr(Settings, name)}
    flags = Settings(**given)
    for name, known in CHOICES.items():                  # of a run of another version, too
        value = getattr(flags, name)
        require_flag(value is None or value in known, name, value, f"is none of {', '.join(known)}")
    preset = flags.preset or (None if flags.model else "small")
    values = dict(PRESETS.get(preset, {}))
    if flags.algo != "grpo":
        values["beta"] = 0.0                    # the other objectives are without a KL term
    values |= qerl.OBJECTIVES[flags.algo].defaults
    values |= method_defaults(flags.method)
    weights = (values | given).get("weights", flags.weights)
    if preset == "paper" and weights == "bf16":
        values["lr"] = 5e-6                     # Table 4: half the learning rate for 16-bit weights
    if weights != "nvfp4" or flags.shard:
        values["quantizer"] = "rtn"             # the others are for NVFP4, and take long for large models
    if flags.adapter:
        values |= adapter_settings(flags.adapter, flags.model, given)
    settings = Settings(**(values | given))
    check_settings(settings, processes)
    find_method(settings)                                # it refuses settings that it cannot use
    find_reward(settings.reward)
    usual = str(default_dtype(settings.device)).removeprefix("torch.")
    return replace(settings, dtype=settings.dtype or usual)


def method_defaults(name):
    """The settings that --method changes where no flag gives them."""
    if name == "qerl" or name.endswith(".py"):
        return {}
    import methods
    neighbour, variant = methods.look_up(name)
    return neighbour.defaults(variant)


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
