"""What lasts of a run: checkpoint.safetensors, which --resume goes on from, log, samples, summary."""
import hashlib
import json
import os
import time
from dataclasses import asdict

import safetensors.torch
import torch
from safetensors import safe_open
from tqdm import tqdm

import qerl
from harness.command import command_line, require_flag
from harness.export import save_adapter
from harness.folders import append_jsonl, atomic_write, cut_log, new_run, open_folder
from harness.machine import environment
from harness.report import one_group, write_report
from qerl import require


# Settings of where a run lives and how its work is cut, which another part of it may have otherwise.
FREE = ("out", "resume", "eval_only", "slots", "micro_tokens", "keep_activations", "shard", "preset",
        "save_quantized", "dry_run", "gpu")
# Others that flags may change for the rest of a run.
CHANGEABLE = {"steps", "save_every"}


def lasting(settings):
    """What --resume restores, and a checkpoint must agree with but for CHANGEABLE: all but FREE."""
    kept = {name: value for name, value in sorted(asdict(settings).items()) if name not in FREE}
    return kept | {"device": settings.device.partition(":")[0]}            # any GPU will do


def read_saved(settings, must_agree=None):
    """(state, tensors) of the run's last checkpoint; see read_checkpoint."""
    return read_checkpoint(settings.out, lasting(settings), must_agree)


def require_same(state, fingerprints, folder):
    """Refuse to go on with another model, other questions and so on than the run in `folder` had."""
    for part, ours in fingerprints.items():
        require(state[part] == ours,
                f"--resume: since {folder} was begun, the {part} changed; bring back the files or the cache "
                "of that time, or start a new run")


def open_run(settings):
    """Choose, create and lock the run's folder -> (folder, lock)."""
    name = os.path.basename(os.path.normpath(settings.model or "small"))
    folder = settings.out or new_run(f"runs/{name}-{settings.weights}-{settings.algo}")
    return folder, open_folder(folder, settings.resume)


PROGRESS = ("reward {reward:.2f}, accuracy {accuracy:.2f}, entropy {entropy:.3f}, sigma {sigma:.1e}, "
            "length {length:.0f}, {tokens_per_s:.0f} tok/s")


class Keeper:
    """Writes what lasts of a run in the folder settings.out, and reads it back with --resume.

    state is what else a checkpoint holds besides tensors: the steps done, the questions drawn so
    far, seconds, accuracies.
    """

    def __init__(self, settings, ranks):
        self.settings = settings
        self.ranks = ranks
        self.folder = settings.out
        self.saved = read_saved(settings) if settings.resume else None
        new = {"step": 0, "drawn": 0, "seconds": 0.0, "best": None}
        self.state = self.saved[0] if self.saved else new

    def begin(self, model, optimizer, scaler, generators, algo, fitted, questions):
        """Take charge of these and put them where the saved checkpoint had them -> state.

        generators: list of torch.Generator; fitted: settings whose slots and micro_tokens a resumed
        run keeps; questions: all, whose content it must share.
        """
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.generators = generators
        self.algo = algo
        begun_with = model.fingerprints | {"questions, answers or prompts": fingerprint(questions)}
        self.ranks.agree({"checkpoint's step": self.state["step"], **begun_with})
        if self.saved:
            require_same(self.state, begun_with, self.folder)
            restore(self.saved[1], model, optimizer, generators)
            scaler.load_state_dict(self.state["scaler"])
            if self.state["method"]:
                algo.state = self.state["method"]
            done, planned, steps = self.state["step"], self.state["steps"], self.settings.steps
            require_flag(done <= steps, "steps", steps, f"{self.folder} has done {done}; give more")
            print(f"resumed {self.folder} after step {done}")
            if steps != planned:
                print(f"{planned} steps become {steps}: learning rate and noise are now those of a run of "
                      f"{steps} steps, after its step {done}")
            if self.ranks.main:
                cut_log(self.folder, self.state["step"])
        self.state |= begun_with
        self.state.update(slots=fitted.slots, micro_tokens=fitted.micro_tokens)
        self.ranks.differ(generators[0], self.settings.seed, self.state["step"])
        self.started = time.perf_counter() - self.state["seconds"]
        if self.state.get("steps") != self.settings.steps:     # a new run, or one that becomes longer
            self.save()                     # so that --resume knows these settings from now on
        return self.state

    def steps(self, clock):
        """The numbers of the steps that are left, behind a bar on stderr; each restarts the clock."""
        total = self.settings.steps
        self.bar = tqdm(range(self.state["step"], total), initial=self.state["step"], total=total,
                        unit="step", disable=not self.ranks.main)
        for step in self.bar:
            clock.restart()
            yield step

    def save(self):
        self.state.update(
            seconds=time.perf_counter() - self.started,
            steps=self.settings.steps,
            scaler=self.scaler.state_dict(),
            method=getattr(self.algo, "state", {}),
        )
        if self.ranks.main:
            save_checkpoint(self.folder, self.model, self.optimizer, self.generators, self.state,
                            lasting(self.settings))

    def log(self, metrics, samples, batch, tokenizer):
        """Add a step's figures, of all ranks, to metrics.jsonl.

        Each --save-every steps: a checkpoint, and a group in samples.jsonl, which the first has, too.
        """
        logged = self.ranks.join(metrics)
        self.state["step"] = step = logged["step"]
        require_finite({f"step {step}: the values of {name}": value
                        for name, value in logged.items() if isinstance(value, float)})
        due = step % self.settings.save_every == 0 or step == self.settings.steps
        if self.ranks.main:
            self.write(logged)
            if due or step == 1:
                group = one_group(samples, batch, tokenizer)
                append_jsonl(f"{self.folder}/samples.jsonl", {"step": step, **group})
        if due:
            self.save()

    def write(self, logged):
        self.bar.set_postfix_str(PROGRESS.format(**logged))
        append_jsonl(f"{self.folder}/metrics.jsonl", logged)
        accuracy = logged.get("accuracy_validation")
        best = self.state["best"]
        if accuracy is not None and (best is None or accuracy > best["accuracy"]):
            self.state["best"] = {"accuracy": accuracy, "step": logged["step"]}
            if self.model.quantized_layers()[0].rank:
                save_adapter(self.model, f"{self.folder}/adapter-best", self.model.name_or_path)
                print("this is the best policy so far: it is kept in adapter-best")

    def finish(self, held_out_questions):
        """Write summary.json, report.html and curve.png, say what came of the run."""
        if not self.ranks.main:
            return
        seconds = time.perf_counter() - self.started
        found = {k: v for k, v in self.state.items() if k.endswith(("_before", "_after"))}
        summary = {
            "command": command_line(),
            **found,
            "best": self.state["best"],
            "held_out_questions": held_out_questions,
            "steps": self.settings.steps,
            "seconds": seconds,
            "settings": lasting(self.settings),
            **environment(self.settings.device),
        }
        atomic_write(f"{self.folder}/summary.json", json.dumps(summary, indent=1))

        def change(name):
            known = (f"{name}_before", f"{name}_after")
            return " -> ".join(f"{found[k]:.1%}" for k in known if k in found)

        best = self.state["best"]
        if best:
            print(f"best in validation: step {best['step']}, {best['accuracy']:.1%} right")
        print(f"held-out pass@1 {change('accuracy')}, greedy {change('greedy')}, in {seconds:.0f} s; "
              f"look at {self.folder}/report.html")
        write_report(self.folder)


# --------------------------------------------------------------------------------------------------
# The checkpoint

def content_hash(metadata, tensors):
    """SHA-256 of all that a checkpoint holds, so that a single flipped bit is noticed."""
    digest = hashlib.sha256(safetensors.torch.save(tensors))
    digest.update(f"{metadata['state']} {metadata['settings']}".encode())
    return digest.hexdigest()


def fingerprint(questions):
    """SHA-256 of the questions, their answers and their prompts, in their order."""
    asked = [(q["question"], q["answer"], q["prompt"]) for q in questions]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def save_checkpoint(folder, model, optimizer, generators, state, settings):
    """Write the adapter, if there is one, then all that the next step depends on, as one file.

    generators: list of torch.Generator; state and settings: what JSON can hold.
    """
    tensors = {f"rng.{i}": generator.get_state() for i, generator in enumerate(generators)}
    for name, p in qerl.trainable(model).items():
        tensors[f"model.{name}"] = p.detach()
        for key, value in optimizer.state[p].items():
            tensors[f"optimizer.{name}.{key}"] = value
    tensors = {name: t.cpu().contiguous() for name, t in tensors.items()}
    metadata = {
        "state": json.dumps(state, allow_nan=False),
        "settings": json.dumps(settings, allow_nan=False),
    }
    metadata["sha256"] = content_hash(metadata, tensors)
    # Not before the first step: an adapter without a checkpoint is one that lost it.
    if state["step"] and model.quantized_layers()[0].rank:
        save_adapter(model, f"{folder}/adapter", model.name_or_path)
    stored = safetensors.torch.save(tensors, metadata=metadata)
    atomic_write(f"{folder}/checkpoint.safetensors", stored)


def stored_settings(folder):
    """The settings that the run in `folder` was begun with; none if its checkpoint is not sound."""
    path = f"{folder}/checkpoint.safetensors"
    require(os.path.exists(path), f"--resume --out {folder}: no checkpoint is there; name another run's "
                                  "folder or start without --resume")
    try:
        with safe_open(path, framework="pt") as f:
            return json.loads(f.metadata()["settings"])
    except Exception:                   # read_checkpoint will say what is wrong
        return {}


def read_checkpoint(folder, settings, must_agree=None):
    """(state, tensors) of the last checkpoint.

    Refuses one that was made with other settings; must_agree: the names that count (default: all).
    A setting that is newer than the checkpoint, or that it alone knows, does not count, nor do those
    that are CHANGEABLE.
    """
    path = f"{folder}/checkpoint.safetensors"
    try:
        with safe_open(path, framework="pt") as f:
            metadata = f.metadata()
            # Copies, because Windows replaces no file from which tensors are still mapped.
            tensors = {name: f.get_tensor(name).clone() for name in f.keys()}
        sound = metadata["sha256"] == content_hash(metadata, tensors)
    except Exception:                   # whatever a damaged header may lead to
        sound = False
    require(sound, f"{path}: cannot be read, is damaged or of an earlier version; start a new run in "
                   "another --out, and keep this folder's adapter")
    then = json.loads(metadata["settings"])
    counted = set(must_agree or settings) & settings.keys() & then.keys() - CHANGEABLE
    for name in sorted(counted):
        require(settings[name] == then[name],
                f"--resume: {folder} was started with {name} = {then[name]}, now it is "
                f"{settings[name]}; give the same settings or another --out")
    return json.loads(metadata["state"]), tensors


@torch.no_grad()
def restore(tensors, model, optimizer=None, generators=()):
    """Put a checkpoint's tensors where save_checkpoint took them from."""
    for i, generator in enumerate(generators):
        generator.set_state(tensors[f"rng.{i}"])
    trained = qerl.trainable(model)
    for name, p in trained.items():
        p.copy_(tensors[f"model.{name}"])
    for place, value in tensors.items():
        kind, _, key = place.partition(".")
        if optimizer and kind == "optimizer":
            name, _, key = key.rpartition(".")
            p = trained[name]               # AdamW's count of steps stays on the CPU
            optimizer.state[p][key] = value.to(p.device) if value.dim() else value


# --------------------------------------------------------------------------------------------------
# What ends a run before NaN or infinity reach its policy, its checkpoint or its log

def require_finite(values):
    """Refuse {name: tensor or number} if a value is NaN or infinite."""
    for name, value in values.items():
        require(torch.isfinite(torch.as_tensor(value)).all(),
                f"{name} are NaN or infinite: stopped, the last checkpoint is kept; start again with a lower "
                "--lr or less noise (--sigma-start), or use an undamaged model")


def require_finite_rollout(rollout):
    require_finite({"the policy's logits": torch.stack([rollout.logprobs, rollout.entropy])})


@torch.no_grad()
def require_finite_policy(model, prompt):
    """After an update: refuse parameters, or logits after a prompt, that are NaN or infinite."""
    tokens = torch.tensor([prompt], device=model.device)
    logits = model(tokens)[:, -1]
    values = {f"the values of {name}": p for name, p in qerl.trainable(model).items()}
    require_finite({**values, "after this update the logits": logits})
