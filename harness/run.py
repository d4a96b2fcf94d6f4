"""What lasts of a run: its checkpoint, which --resume goes on from, log, samples, summary."""
import contextlib
import hashlib
import json
import os
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

import safetensors.torch
import torch
from tqdm import tqdm

import qerl
from harness.answers import reward_fingerprint
from harness.batches import effective_size
from harness.command import command_line, require_flag
from harness.export import save_adapter, save_trained, shapes
from harness.folders import CHECKPOINT, LOCK, append_jsonl, atomic_write, cut_log, fingerprint
from harness.folders import new_run, newest_run, open_folder, policy_fingerprints, weight_pieces
from harness.folders import write_json
from harness.machine import environment
from harness.report import one_group, write_report
from harness.errors import UserError, require


# Settings that are a process's own: where a run lives, what is done with it.
FREE = {"out", "resume", "eval_only", "shard", "save_quantized", "dry_run", "gpu"}
# Others that flags may change for the rest of a run.
CHANGEABLE = {"steps", "save_every", "slots", "micro_tokens", "exact", "device"}
# What an adapter belongs to, with the questions that codes are fitted to, and the reward, which goes
# with the instruction.
POLICY = {"model", "start_seed", "weights", "quantizer", "method", "lora_rank", "lora_alpha",
          "train_norms", "reward", "chat_template_kwargs", "data", "adapter", "seed"}


def lasting(settings):
    """What a checkpoint stores of the settings, and --resume restores: all but FREE."""
    return {name: value for name, value in asdict(settings).items() if name not in FREE}


@contextlib.contextmanager
def run_folder(settings, ranks):
    """Create and lock a run's folder, and give all ranks the settings of rank 0, with its name.

    After an error: a folder in which nothing but the lock is goes. If there is a checkpoint, and the
    error is not the user's mistake, its attribute `go_on` says how to go on.
    """
    lock = None
    if ranks.main and (settings.out or not settings.eval_only):
        name = os.path.basename(os.path.normpath(settings.model or "small"))
        out = settings.out or new_run(f"runs/{name}-{settings.weights}-{settings.algo}")
        lock = open_folder(out, settings.resume)
        settings = replace(settings, out=out)
    try:
        settings = ranks.settings_of_first(settings)
        yield settings
    except BaseException as e:
        out = settings.out
        if lock and os.path.isdir(out) and os.listdir(out) == [LOCK]:      # rank 0's alone to remove
            lock.release()                  # Windows removes no open file
            shutil.rmtree(out, ignore_errors=True)             # "." or a link stays
        elif (out and os.path.exists(f"{out}/{CHECKPOINT}")
              and not isinstance(e, (UserError, AssertionError))):
            e.go_on = f"; go on with --resume --out {out}"
        raise
    finally:
        if lock:
            lock.release()


PROGRESS = ("reward {reward:.2f}, accuracy {accuracy:.2f}, entropy {entropy:.3f}, sigma {sigma:.1e}, "
            "length {length:.0f}, {tokens_per_s:.0f} tok/s")


class Run:
    """Writes what lasts of a run in the folder settings.out, and reads it back with --resume.

    state is what else a checkpoint holds besides tensors: the steps done, the questions drawn so
    far, seconds, accuracies. machine is what its last bits depend on.
    """

    def __init__(self, settings, ranks, model, optimizer, scaler, generators, method):
        """Take charge of these and, with --resume, put them where the checkpoint had them.

        settings: with what memory holds; generators: list of torch.Generator.
        """
        self.settings = settings
        self.ranks = ranks
        self.folder = settings.out
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.generators = generators
        self.method = method
        self.state = {"step": 0, "drawn": 0, "seconds": 0.0, "best": None}
        self.steps_without_signal = 0
        self.machine = "{hardware}, PyTorch {torch}".format(**environment(settings.device))
        planned = self.restore() if settings.resume else None
        ranks.agree({"checkpoint's step": self.state["step"], **model.fingerprints})
        ranks.differ(generators[0], settings.seed, self.state["step"])
        self.started = time.perf_counter() - self.state["seconds"]
        if planned != settings.steps:       # a new run, or one that becomes longer
            self.save()                     # so that --resume knows these settings from now on

    def restore(self):
        """Go on from what `save` has stored -> the steps that were planned then."""
        saved = restore_policy(self.model, self.folder)
        self.state = saved["state"]
        optimizer = saved["optimizer"]
        # JSON made texts of the parameters' numbers.
        optimizer["state"] = {int(number): values for number, values in optimizer["state"].items()}
        self.optimizer.load_state_dict(optimizer)
        self.scaler.load_state_dict(saved["scaler"])
        for generator, stored in zip(self.generators, saved["generators"]):
            generator.set_state(stored)
        if saved["method_state"]:
            self.method.state = saved["method_state"]
        done = self.state["step"]
        steps = self.settings.steps
        planned = saved["settings"]["steps"]
        require_flag(done <= steps, "steps", steps, f"{self.folder} has done {done}; give more")
        print(f"resumed {self.folder} after step {done}")
        if steps != planned:
            print(f"{planned} steps become {steps}: learning rate and noise are now those of a run "
                  f"of {steps} steps, after its step {done}")
        if saved["machine"] != self.machine:
            print(f"it was begun on {saved['machine']}, and is now on {self.machine}: results may "
                  "differ in the last bits from those of a run without this change")
        if self.ranks.main:
            cut_log(self.folder, done)
            self.save_adapter()
        return planned

    def steps(self, clock):
        """Yield the numbers of the steps that are left, and show a bar; each step restarts the clock."""
        total = self.settings.steps
        self.bar = tqdm(range(self.state["step"], total), initial=self.state["step"], total=total,
                        unit="step", disable=not self.ranks.main)
        for step in self.bar:
            clock.restart()
            yield step

    def samples_exactly(self, sigma, batch):
        """Whether a rollout's log-probabilities are those of π_old: of an exact model, without noise.

        Not without a first minibatch, which check_exact needs.
        """
        return self.settings.exact and sigma == 0 and bool(batch.minibatches[0])

    def check_exact(self, batch):
        """Compare what the sampler and the first minibatch's own pass found; a difference ends it."""
        rows = batch.minibatches[0]
        there = qerl.length_mask(batch.length[rows], batch.tokens.shape[1])
        differ = (batch.old_logprobs[rows] != batch.rollout_logprobs[rows]).cpu()[there]
        if differ.any():
            self.model.exact = False
            self.settings = replace(self.settings, exact=False)            # also when the run is resumed
            print(f"{differ.sum()} of {len(differ)} tokens have another log-probability in training than "
                  "in sampling; from now on training computes those of the old policy, too")

    def save(self):
        """Write the adapter, if there is one, then all that the next step depends on."""
        if not self.ranks.main:
            return
        self.state["seconds"] = time.perf_counter() - self.started
        self.save_adapter()
        write_checkpoint(self.folder, {
            "settings": lasting(self.settings),
            "made_of": self.model.fingerprints,
            "machine": self.machine,
            "state": self.state,
            "model": {name: p.detach() for name, p in qerl.trainable(self.model).items()},
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "generators": [generator.get_state() for generator in self.generators],
            "method_state": getattr(self.method, "state", {}),
        })

    def save_adapter(self, name="adapter"):
        """Write LoRA to a folder of the run's, if it is trained.

        Not before the first step: an adapter without a checkpoint is one that lost it.
        """
        if self.settings.lora_rank and self.state["step"]:
            save_adapter(self.model, f"{self.folder}/{name}", self.model.name_or_path)

    def log(self, metrics, samples, batch, tokenizer):
        """Add a step's figures, of all ranks, to metrics.jsonl.

        Each --save-every steps: a checkpoint, and a group in samples.jsonl, which the first has, too. A
        best adapter comes with a checkpoint.
        """
        logged = self.ranks.join(metrics)
        self.state["step"] = step = logged["step"]
        for name, value in logged.items():
            if isinstance(value, float):
                require_finite(f"step {step}: the values of {name}", value)
        due = step % self.settings.save_every == 0 or step == self.settings.steps
        if due:                            # else the next rollout finds a NaN
            require_finite_policy(self.model, batch.prompts[0])
        if not self.ranks.main:
            return
        self.bar.set_postfix_str(PROGRESS.format(**logged))
        self.say_what_teaches(logged)
        append_jsonl(f"{self.folder}/metrics.jsonl", logged)
        if due or step == 1:
            group = one_group(samples, batch, tokenizer)
            append_jsonl(f"{self.folder}/samples.jsonl", {"step": step, **group})
        better = self.keep_best(logged.get("accuracy_validation", 0.0))
        if due or better:
            self.save()

    def keep_best(self, accuracy):
        """Is it the highest so far? Then its adapter is kept as adapter-best."""
        best = self.state["best"] or {"accuracy": 0.0}
        if accuracy <= best["accuracy"]:
            return False
        self.state["best"] = {"accuracy": accuracy, "step": self.state["step"]}
        self.save_adapter("adapter-best")
        print("this is the best policy so far")
        return True

    def say_what_teaches(self, logged):
        """Say how many questions are answered rightly and wrongly, and if three steps taught nothing."""
        if logged["step"] == 1:
            print("first rollout: {right_and_wrong:.0%} of the questions have right and wrong answers, "
                  "{accuracy:.0%} of the answers are right".format(**logged))
        self.steps_without_signal = 0 if logged["signal"] else self.steps_without_signal + 1
        if self.steps_without_signal == 3:
            print("warning: for three steps all answers to a question had the same reward, which teaches "
                  "nothing: do the answers have the format that --reward looks for (samples.jsonl), are the "
                  "questions too hard or too easy, does --max-new-tokens cut the answers off?")

    def finish(self, held_out_questions):
        """Write summary.json, model/ and the report; say what came of the run."""
        if not self.ranks.main:
            return
        self.state["seconds"] = time.perf_counter() - self.started
        summary = {
            "command": command_line(),
            **self.state,
            "held_out_questions": held_out_questions,
            "steps": self.settings.steps,
            "settings": lasting(self.settings),
            **environment(self.settings.device),
        }
        write_json(f"{self.folder}/summary.json", summary)
        if not self.settings.lora_rank:
            save_trained(self.model, f"{self.folder}/model")

        if self.state["best"]:
            print("best in validation: step {step}, {accuracy:.1%} right".format(**self.state["best"]))
        changes = [" -> ".join(f"{summary[key]:.1%}" for key in (f"{name}_before", f"{name}_after")
                               if key in summary) for name in ("accuracy", "greedy")]
        print("held-out pass@1 {}, greedy {}, in {seconds:.0f} s; look at {out}/report.html".format(
            *changes, **self.state, out=self.folder))
        write_report(self.folder)


# --------------------------------------------------------------------------------------------------
# A line of metrics.jsonl

def describe(samples, batch, clock, mismatch, exact):
    """What metrics.jsonl says of a step's samples; reward and accuracy are of all draws.

    The accuracy is of noisy samples at --temperature, and counts answers in a box or the tags alone:
    usually lower than what `evaluate` finds. Mismatch and effective sample sizes are of the groups
    that are trained on; groups_left_out is the share of the others. Of all draws one_right is the share of
    questions with one right answer, right_and_wrong that with right and wrong ones, signal that of the
    groups whose rewards differ.
    mismatch: qerl's, or a method's own; exact: only the first minibatch's own pass has computed π_old.
    """
    rollout = samples.rollout
    draws = samples.draws or [samples]
    drawn_tokens = sum(s.rollout.length.sum().item() for s in draws)
    rows = batch.trained_rows()
    computed = batch.minibatches[0] if exact else rows
    policies = batch.old_logprobs[computed], rollout.logprobs[computed], rollout.mask[computed]
    kl, largest_ratio = mismatch(*policies)
    rewards = torch.cat([s.rewards for s in draws])
    correct = torch.cat([s.correct for s in draws])
    return {
        "reward": rewards.mean().item(),
        "accuracy": correct.mean().item(),
        "one_right": (correct.sum(-1) == 1).float().mean().item(),
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


# --------------------------------------------------------------------------------------------------
# The checkpoint

PARTS = {"settings", "made_of", "machine", "state", "model", "optimizer", "scaler", "generators",
         "method_state"}


def write_checkpoint(folder, content):
    """Write a nested dict of tensors and plain values: a safetensors file, then its SHA-256 (32 bytes).

    The tensor "content" is the dict in JSON, in which {"@tensor": NAME} stands for another tensor.
    """
    tensors = {}

    def name(tensor):
        tensors[str(len(tensors))] = tensor.cpu().contiguous()
        return {"@tensor": str(len(tensors) - 1)}

    text = json.dumps(content, default=name, allow_nan=False)
    tensors["content"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    stored = safetensors.torch.save(tensors)
    atomic_write(f"{folder}/{CHECKPOINT}", stored + hashlib.sha256(stored).digest())


def read_checkpoint(folder):
    """The dict that write_checkpoint has stored, on the CPU."""
    path = f"{folder}/{CHECKPOINT}"
    require(os.path.exists(path), f"--resume --out {folder}: no checkpoint is there; name another run's "
                                  "folder or start without --resume")
    content = Path(path).read_bytes()
    stored, digest = content[:-32], content[-32:]
    require_checkpoint(hashlib.sha256(stored).digest() == digest, folder)
    tensors = safetensors.torch.load(stored)

    def place(found):
        return tensors[found["@tensor"]] if "@tensor" in found else found

    content = json.loads(bytes(tensors["content"].tolist()), object_hook=place)
    require_checkpoint(content.keys() >= PARTS, folder)        # older code stored the best adapter, too
    return content


def require_checkpoint(ok, folder):
    require(ok, f"{folder}/{CHECKPOINT}: is damaged, or of another version; start a new run in another "
                "--out, and keep this folder's adapter")


def fingerprints(settings, stored, eos, data):
    """{what a run is made of: its SHA-256}, which must stay the same for --resume.

    stored: the folder of the weights; eos: the token ids that end a completion; data: a data.Data.
    """
    found = policy_fingerprints(stored, eos)
    found["file of --reward"] = reward_fingerprint(settings.reward)
    if settings.method.endswith(".py"):
        found["file of --method"] = fingerprint([Path(settings.method).read_bytes()])
    if settings.adapter:
        found["adapter"] = fingerprint(weight_pieces(settings.adapter))
    if not settings.eval_only:                 # which may ask other questions, anywhere
        asked = [(q["question"], q["answer"], q["prompt"]) for q in sum(data, [])]
        found["questions, answers or prompts"] = fingerprint([json.dumps(asked).encode()])
        found["kind of --device"] = torch.device(settings.device).type         # of its generators
    return found


def restore_policy(model, folder):
    """Put a checkpoint's tensors into the model; its fingerprints must be ours -> the checkpoint."""
    saved = read_checkpoint(folder)
    then = saved["made_of"]
    for part, ours in model.fingerprints.items():
        require(then.get(part) == ours,
                f"--resume: since {folder} was begun, the {part} changed; bring back the files or "
                "the cache of that time, or start a new run")
    require_checkpoint(shapes(saved["model"]) == shapes(qerl.trainable(model)), folder)
    model.load_state_dict(saved["model"], strict=False)
    return saved


def resumed(given):
    """The flags of a run that goes on: those given, and the others as it was begun with.

    A setting that is newer than the checkpoint, or that it alone knows, does not count.
    """
    out = given.get("out") or newest_run()
    then = read_checkpoint(out)["settings"]
    if "plain" in then:                                # of the time before --engine
        then["engine"] = "plain" if then.pop("plain") else "fast"
    fixed = POLICY if given.get("eval_only") else then.keys() - CHANGEABLE
    for name in sorted(fixed & given.keys() & then.keys()):
        require(given[name] == then[name],
                f"--resume: {out} was started with {name} = {then[name]}, now it is {given[name]}; give the "
                "same settings or another --out")
    return {"out": out, "exact": False, **then, **given}         # a run of a version without it has none


# --------------------------------------------------------------------------------------------------
# What ends a run before NaN or infinity reach its policy, its checkpoint or its log

def require_finite(name, values):
    """Refuse a tensor or a number with NaN or infinity in it."""
    require(torch.isfinite(torch.as_tensor(values)).all(),
            f"{name} are NaN or infinite: stopped, the last checkpoint is kept; start again with a lower --lr "
            "or less noise (--sigma-start), or use an undamaged model")


def require_finite_rollout(rollout):
    require_finite("the policy's logits", torch.stack([rollout.logprobs, rollout.entropy]))


@torch.no_grad()
def require_finite_policy(model, prompt):
    """Refuse logits that are NaN or infinite, as such parameters make them."""
    tokens = torch.tensor([prompt], device=model.device)
    require_finite("after this update the logits", model(tokens)[:, -1])
