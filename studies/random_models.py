"""Models of random weights and true shapes, for measuring speed and memory without a download."""
import copy

import torch
import transformers

import qerl
from harness.layers import ShardedCheckpoint


# Of Qwen2Config: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
# num_key_value_heads, vocab_size.
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


class RandomWeights(qerl.Checkpoint):
    """Normal weights of any shape. Layers of a kind are equal, but each lies in its own memory."""

    def __init__(self, weights, lora_rank, device):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        super().__init__({}, weights, lora_rank, device=device, dtype=dtype)
        self.first = {}

    def read(self, name, shape):
        scale = 0.02 if len(shape) > 1 else 0.1
        tensor = torch.randn(shape, device=self.device, dtype=self.dtype) * scale
        return tensor + 1 if name.endswith("norm.weight") else tensor

    def linear(self, prefix, leaves, sizes, in_features, bias):
        """As Checkpoint.linear, but only the first layer of a kind is quantised; others copy it."""
        kind = leaves[0]
        if kind not in self.first:
            self.first[kind] = super().linear(prefix, leaves, sizes, in_features, bias)
        layer = copy.deepcopy(self.first[kind])
        layer.names = [f"{prefix}.{leaf}" for leaf in leaves]
        if layer.rank:
            layer.lora_B.data.normal_(std=0.01)
        return layer


class ShardedRandomWeights(ShardedCheckpoint, RandomWeights):
    """The same random weights on all ranks, of which each keeps its piece."""


def config_of(name):
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[name]
    return transformers.Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
    )


def random_model(name, weights, lora_rank, device, checkpoint_class=RandomWeights):
    torch.manual_seed(0)
    return qerl.Transformer(config_of(name), checkpoint_class(weights, lora_rank, device))


def random_prompts(vocabulary, count, length):
    return torch.randint(0, vocabulary, (count, length)).tolist()
