"""Models of random weights and true shapes, for measuring speed and memory without a download."""
import gc

import torch
import transformers

import qerl
from harness import fast, loading
from harness.machine import keep_decoded

SHAPES = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064),
    "Qwen2.5-14B": (5120, 13824, 48, 40, 8, 152064),
    "Qwen2.5-32B": (5120, 27648, 64, 40, 8, 152064),
    "Qwen2.5-72B": (8192, 29568, 80, 64, 8, 152064),
    "tiny": (256, 512, 2, 4, 2, 512),
}


class RandomWeights(fast.WeightReader):
    """Normal weights of any shape."""
    quantize = qerl.WeightReader.quantize          # without a check of what it gives

    def read(self, name, shape):
        scale = 0.02 if len(shape) > 1 else 0.1
        tensor = torch.randn(shape, device=self.device, dtype=self.dtype) * scale
        return tensor + 1 if name.endswith("norm.weight") else tensor


def config_of(name, **changed):
    sizes = dict(zip(loading.SIZES, SHAPES[name]), **changed)
    return transformers.Qwen2Config(**sizes, tie_word_embeddings=False)


def random_model(name, weights, lora_rank, device, dtype=None, **changed):
    """weights: a format, which stays decoded where a run would keep it so; changed: as config_of's."""
    # What was used before is given back, so that each measurement starts from the same memory.
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    dtype = dtype or loading.default_dtype(device)
    checkpoint = RandomWeights({}, weights, lora_rank, device=device, dtype=dtype)
    model = fast.Transformer(config_of(name, **changed), checkpoint)
    keep_decoded(model, fast)
    return model


def random_prompts(vocabulary, count, length):
    return torch.randint(0, vocabulary, (count, length)).tolist()
