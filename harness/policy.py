"""The policy of a run, its text and its questions: found by the settings, and loaded."""
import importlib
from dataclasses import replace

import torch

from harness import loading
from harness.answers import terms
from harness.data import ChatText, load_questions, write_prompts
from harness.engines import find_engine, may_be_exact
from harness.errors import require
from harness.export import load_adapter, save_packed, warn_of_another_base
from harness.machine import fitted, keep_decoded, keep_values
from harness.run import fingerprints, read_checkpoint
from harness.small_policy import WordText, warm_start

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


def find_model(settings):
    """(folder, tokenizer) of --model or, without it, of the built-in policy."""
    if not settings.model:
        return warm_start(settings.start_seed), WordText()
    folder = loading.model_folder(settings.model)
    return folder, ChatText(folder, instruction(settings.reward), settings.chat_template_kwargs)


def load_all(settings, method, ranks):
    """(model, tokenizer, data.Data, the settings with what machine and memory allow: machine.fitted).

    method: a neighbour, or None. The order counts: --quantizer fits codes to the questions, a neighbour
    changes the loaded model, and the free memory is measured last.
    """
    data = load_questions(settings)
    if settings.resume and settings.eval_only:         # the codes were fitted to the run's own questions
        then = read_checkpoint(settings.out)["settings"]
        begun = replace(settings, eval=then["eval"], validation=then["validation"])
        if begun != settings:                          # else these are they
            data = data._replace(train=load_questions(begun).train)
    folder, tokenizer = find_model(settings)
    stored = stored_folder(settings, method, folder, data.train, tokenizer)
    engine = find_engine(settings)
    model = load_policy(settings, engine, stored, ranks)
    # What the adapter says it belongs to.
    model.name_or_path = (settings.model or folder) if stored == folder else stored
    if settings.adapter:
        warn_of_another_base(settings.adapter, model.name_or_path)
    data = write_prompts(data, tokenizer, model.config, settings.max_new_tokens, ranks.count)
    model.fingerprints = fingerprints(settings, stored, tokenizer.eos, data)
    if method:
        method.prepare(model, folder, data.train, tokenizer)
    settings = replace(settings, exact=getattr(model, "exact", False))            # qerl.py's model is not
    longest = max(len(q["prompt"]) for q in sum(data, [])) + settings.max_new_tokens
    completions = settings.prompts // ranks.count * settings.group
    return model, tokenizer, data, fitted(settings, model, longest, completions, engine)


def stored_folder(settings, method, folder, questions, tokenizer):
    """The folder whose weights are loaded: the model's, or one with the codes of --quantizer."""
    stored = folder
    if settings.quantizer != "rtn":
        quantizers = importlib.import_module("methods.parts.quantizers")        # above this package, too
        stored = quantizers.quantized_folder(
            folder, settings.quantizer, questions, tokenizer, settings.device, settings.seed)
    return method.stored_model(stored, folder, questions, tokenizer) if method else stored


def load_policy(settings, engine, stored, ranks):
    """The model with what is trained: LoRA on frozen weights or, with --lora-rank 0, the weights."""
    torch.manual_seed(settings.seed)                           # LoRA's A is drawn at random
    reader_class = loading.WeightReader if settings.engine == "plain" else engine.WeightReader
    if settings.shard:
        from harness.layers import ShardedReader as reader_class
    model = engine.load_model(
        loading.model_folder(stored), settings.weights, settings.lora_rank, settings.device,
        dtype=getattr(torch, settings.dtype), lora_alpha=settings.lora_alpha,
        train_norms=settings.train_norms or settings.lora_rank == 0, reader_class=reader_class)
    if settings.shard:
        from harness.layers import SharedPasses
        ranks.serve = SharedPasses(model, ranks.count).serve
    if settings.device != "cpu" and settings.engine == "fast":
        model.recompute_in_backward()
    if settings.lora_rank == 0:
        from harness.layers import TrainedLinear, replace_layers
        replace_layers(model, TrainedLinear)
    if settings.adapter:
        load_adapter(model, settings.adapter)
    if not settings.shard:
        keep_decoded(model, engine)
        keep_values(model, engine)
    wanted = settings.exact is not False and may_be_exact(settings, ranks.count)
    if wanted and model.decode_exactly():
        print("in steps without noise sampling and training are one policy, to the last bit")
    else:
        require(not settings.exact,
                "--exact: sampling and training cannot be equal to the last bit here; that needs a Hopper "
                "GPU, bfloat16, LoRA, widths that 128 divides, and memory for all weights in 16 bits; give "
                "--no-exact")
    return model


def save_quantized(settings):
    """Write the model in NVFP4, by the codes of --quantizer, to the folder --save-quantized."""
    folder, tokenizer = find_model(settings)

    def calibrated():
        return stored_folder(settings, None, folder, load_questions(settings).train, tokenizer)

    rounding = settings.quantizer == "rtn"
    save_packed(folder, settings.save_quantized, settings.device, None if rounding else calibrated)
