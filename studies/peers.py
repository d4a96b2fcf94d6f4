"""The peers that `bench.py step --peers` measures beside this project, where they can be imported.

It measures a GRPO step of TRL with vLLM. TRL's GRPOTrainer
(https://huggingface.co/docs/trl/grpo_trainer) trains LoRA of PEFT on BF16 weights, and vLLM writes
the completions in the same process on the same GPU. vLLM sleeps while TRL trains: its weights and its
KV cache then take no memory. Model shapes, prompt and completion lengths, LoRA rank and the number of
updates (one) are those of `bench.py step`; weights and rewards are random in both.
"""
import importlib.metadata
import importlib.util
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from harness.errors import reason, require
from harness.machine import Clock
from studies.random_models import config_of, random_prompts
from studies.step import device_memory_gb, median_step, prompt_tokens

PACKAGES = ["trl", "vllm", "peft", "datasets"]
# What TRL and vLLM leave to their user; each row states it: completions of 256 tokens in one pass
# forward and backward, the share of the GPU's memory for vLLM while it is awake. The default trains 7B
# on a GPU of 80 GB without computing activations twice.
TUNED = {"Qwen2.5-1.5B": (16, 0.35), "Qwen2.5-3B": (8, 0.35)}


def in_own_process(function, *args):
    """Its result, from a process whose end gives the GPU's memory back."""
    # vLLM's engine runs in that process: by default it would be a fork of it, which hung.
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1",
                      HF_HUB_OFFLINE="1")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *args).result()


def tuning_for(name, completions, tokens):
    """What is TUNED for a shape, with a micro-batch that divides so many completions of such length."""
    most, share = TUNED.get(name, (8, 0.4))
    fitting = [n for n in range(1, max(1, most * 256 // tokens) + 1) if completions % n == 0]
    return {"micro_batch": fitting[-1], "share": share}


def equal_lengths(settings, tokens):
    """The Settings with completions of so many tokens each.

    Raises a UserError, one line, where a package of the peers is missing.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    require(not missing, f"--peers: {', '.join(missing)} cannot be imported; "
                         "pip install 'trl[vllm,peft]' into this environment")
    return replace(settings, max_new_tokens=tokens)


def write_model(name, folder):
    """Save a model of random BF16 weights and a tokenizer whose words are the tokens' numbers.

    Returns the tokenizer: read from the folder it would be the one of the model's type.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    words = {str(token): token for token in range(3, model.config.vocab_size)}
    words |= {"<unk>": 0, "<pad>": 1, "<eos>": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def trainer_arguments(folder, settings, prompts, group, steps, tuning):
    """TRL's settings. What is not named here is TRL's default."""
    return {
        "output_dir": folder,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_steps": steps,
        "lr_scheduler_type": "constant",
        "max_grad_norm": settings.gradient_clip,
        "loss_type": "grpo",
        "beta": settings.beta,
        "epsilon": settings.clip_low,
        "epsilon_high": settings.clip_high,
        "num_generations": group,
        "per_device_train_batch_size": tuning["micro_batch"],
        "gradient_accumulation_steps": prompts * group // tuning["micro_batch"],
        "gradient_checkpointing": False,
        "max_completion_length": settings.max_new_tokens,
        "generation_kwargs": {"ignore_eos": True, "detokenize": False},
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_gpu_memory_utilization": tuning["share"],
        "vllm_max_model_length": prompt_tokens(settings) + settings.max_new_tokens,
    }


def note_steps(trainer):
    """A list that will have, of each step of a GRPOTrainer, its seconds by phase and its memory."""
    from transformers import TrainerCallback
    clock = Clock(trainer.accelerator.device)
    memory = []
    steps = []

    def time_calls(owner, name, phase):
        function = getattr(owner, name)

        def timed(*args, **options):
            memory.append(device_memory_gb())
            with clock(phase):
                return function(*args, **options)

        setattr(owner, name, timed)

    class Steps(TrainerCallback):
        def on_step_begin(self, *_, **__):
            clock.restart()
            memory.clear()

        def on_step_end(self, *_, **__):
            with clock("end"):                          # waits for the GPU
                memory.append(device_memory_gb())
            step = clock.since_restart()
            rollout, scoring = (clock.seconds[name] for name in ("rollout", "scoring"))
            steps.append({"rollout": rollout, "logprobs": scoring - rollout, "update": step - scoring,
                          "step": step, "device_memory_gb": max(memory)})

    time_calls(trainer, "_generate", "rollout")
    # It holds the rollout and, beside rewards and advantages, the log-probabilities.
    time_calls(trainer, "_generate_and_score_completions", "scoring")
    # When vLLM is sent to sleep its memory still stands beside TRL's.
    time_calls(trainer.vllm_generation.llm, "sleep", "sleep")
    trainer.add_callback(Steps())
    return steps


def measure(name, prompts, group, settings, repeats, tuning):
    """The median step of TRL + vLLM."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer
    count = 1 + repeats                 # the first step compiles and records CUDA graphs
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_model(name, folder)
        torch.cuda.empty_cache()
        arguments = trainer_arguments(folder, settings, prompts, group, count, tuning)
        asked = random_prompts(
            len(tokenizer), prompts * count, prompt_tokens(settings))
        texts = [" ".join(map(str, prompt)) for prompt in asked]
        trainer = GRPOTrainer(
            folder,
            processing_class=tokenizer,
            reward_funcs=lambda completions, **_: torch.rand(len(completions)).tolist(),
            args=GRPOConfig(**arguments),
            train_dataset=Dataset.from_dict({"prompt": texts}),
            peft_config=LoraConfig(
                r=settings.lora_rank, lora_alpha=settings.lora_rank, target_modules="all-linear"),
        )
        steps = note_steps(trainer)
        trainer.train()
    return median_step(steps[1:])


def trl_rows(name, sizes, settings, repeats):
    """A row for each size (prompts, group), as studies.step.step_rows gives them."""
    versions = {package: importlib.metadata.version(package) for package in ("trl", "vllm")}
    for prompts, group in sizes:
        tuning = tuning_for(name, prompts * group, settings.max_new_tokens)
        try:
            step = in_own_process(measure, name, prompts, group, settings, repeats, tuning)
        except Exception as e:
            print(f"TRL + vLLM, {name}, {prompts} x {group}: {reason(e)}", flush=True)
            continue
        yield {"model": name, "weights": "trl", "processes": 1, "prompts": prompts, "group": group,
               **step, **tuning, **versions}
