"""The same as qerl.py, faster: a reader may leave this file closed.

Its functions and classes have the names of those in qerl.py and compute the same. Each says which
lines it equals, and tests/test_fast.py holds the two together. What this file does not define it
imports from qerl, by name. What makes it fast:

    1. layers             the kernels of fp4_kernels.py; Ŵ and LoRA in one product; recomputation
    2. sampler            continuous batching; a decode step as one recorded CUDA graph
    3. log-probabilities  a line of tokens, in which a prompt that completions share stands once
    4. loading            weights in the kernels' tiles

In shapes S is the number of tokens packed in a line; n tokens are of any sequences, one a row.
"""
import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint as recompute        # gradient checkpointing

import qerl
from harness import loading
from harness.batches import to_device
from harness.errors import require
from qerl import E2M1, Rollout, length_mask
# The rest of what an engine has, which the loop calls.
from qerl import adaptive_quantization_noise, group_advantages, mismatch, policy_loss
from qerl import reference_policy, token_weights

try:
    import fp4_kernels as kernels
except ImportError:            # the file is not there, or Triton is not, or the GPU is not NVIDIA's
    kernels = None


def use_kernels(x):
    """Whether this tensor is for a Triton kernel; if not, PyTorch computes the same."""
    return kernels is not None and kernels.runs_on(x.device, x.dtype)


def linear(x, weight, bias=None, in_order=False):
    """F.linear of x [n, in]; in order no row of the result depends on n."""
    return (kernels if in_order else F).linear(x, weight, bias)


def lora_product(x, weight, bias, A, B, wide, in_order):
    """-> (x Ŵᵀ + b + (x Aᵀ) B'ᵀ [n, out], h = x Aᵀ), by the same products in training and sampling.

    A and B': see QuantLinear.lora, None without LoRA; wide: [Ŵ, B'] where one product is cheaper.
    """
    if A is None:
        return linear(x, weight, bias, in_order), None
    h = (kernels.lora_down if in_order else F.linear)(x, A)
    if wide is None:
        return linear(x, weight, bias, in_order).addmm_(h, B.T), h
    return linear(torch.cat([x, h], 1), wide, bias, in_order), h


# cuDNN's attention needs 0.1 s to prepare a new shape [B, T], and hardly two batches have the same one.
# PyTorch takes another of its attention kernels instead.
torch.backends.cuda.enable_cudnn_sdp(False)


# --------------------------------------------------------------------------------------------------
# 1. Layers

@dataclass(eq=False)
class Format(qerl.Format):
    """qerl.Format, whose codes a kernel knows how to multiply if they are E2M1."""

    @functools.lru_cache
    def on(self, device):
        """The format with its table on a device, copied there once: a CUDA graph may read it."""
        return replace(self, table=self.table.to(device))

    def dequantize(self, packed, block_scale, global_scale, dtype):
        """qerl.Format.dequantize, by the table that is on the device already."""
        there = self if self.table is None else self.on(packed.device)
        return qerl.Format.dequantize(there, packed, block_scale, global_scale, dtype)

    def pack(self, weight):
        """A weight [out, in] as an object that can multiply."""
        return PackedWeight(self, *self.quantize(weight))

    def tile(self, packed, block_scale, global_scale):
        """The three parts in the order in which the kernels read them (fp4_kernels.py, section 2)."""
        scale = self.scale(block_scale).repeat_interleave(self.block // 16, 1)       # one for each 16
        return kernels.tile(packed, scale, 1 / global_scale)


FORMATS = {name: Format(**vars(format)) for name, format in qerl.FORMATS.items()}


class PackedWeight(qerl.PackedWeight):
    """qerl.PackedWeight, which adds bias and LoRA to its product.

    On a GPU that computes in bfloat16 fp4_kernels.TiledWeight takes its place if the sizes fit its
    tiles: it multiplies the codes without dequantising the whole weight first.
    """
    # Only TiledWeight has True here. It stores its columns in the order in which the GPU's threads
    # take them, and so the columns of x have to be in that order, too. In decoding the kernels of norm,
    # attention and silu_mul write x "interleaved" for it. On a CPU it is always False.
    interleaved = False
    wide = None                    # [Ŵ, B'], see with_room
    in_order = False               # whether its products are, see Transformer.sum_in_order

    def for_rows(self, rows):
        """What multiplies so many rows; TiledWeight may have its values for many."""
        return self

    def multiply(self, x, bias=None, lora=None):
        """x [n, in] -> x Ŵᵀ + bias + LoRA, [n, out]; without gradient (qerl.lora_linear).

        lora: (A, B'), see QuantLinear.lora.
        """
        weight = self.dequantize(x.dtype)
        A, B = lora or (None, None)
        return lora_product(x, weight, bias, A, B, self.wide, self.in_order)[0]


def with_room(layer, dtype):
    """A layer's values [out, in] as a PackedWeight; where out > in with room for B' beside them."""
    weight = layer.weight.dequantize(dtype)
    out, columns = weight.shape
    ranks = len(layer.lora_A) if layer.use_adapter and out > columns else 0
    wide = weight.new_empty(out, columns + ranks)
    wide[:, :columns] = weight
    values = FORMATS["bf16"].pack(wide[:, :columns])
    values.wide = wide if ranks else None
    return values


def renewed(old, new):
    """Tensors `new`, in the place of `old`, which recorded graphs read, if there are such."""
    if old is None:
        return new
    for kept, tensor in zip(old[:2], new):
        kept.copy_(tensor)
    return old


class FrozenLinear(torch.autograd.Function):
    """qerl.lora_linear with its gradient: x [n, in] -> y = x Ŵᵀ + b + (x Aᵀ) B'ᵀ, [n, out].

    layer: the QuantLinear; A and B': see its lora, None without LoRA.

    Autograd alone would keep the dequantised Ŵ of every layer until backward. This dequantises it
    again there, unless the block is recomputed just before (Block.forward). Ŵ
    has no gradient.

    LoRA's products are thin: they take the time of reading and writing x and y. The wider of the two
    is therefore not written twice: LoRA joins the product with Ŵ, as [x, h] [Ŵ, B']ᵀ with h = x Aᵀ.
    """

    @staticmethod
    def forward(ctx, x, A, B, layer):
        weight = layer.weight.dequantize(x.dtype)
        # The second forward of recompute_in_backward (the first has no gradients) only saves anew what
        # backward needs. `down` is a block's last product, whose value nobody reads then.
        if layer.output_unread and ctx.needs_input_grad[0]:
            y = x.new_zeros(len(x), len(weight))
            h = None if A is None else x @ A.T                                   # [n, layers * r]
        else:
            wide = layer.beside(weight, B)
            y, h = lora_product(x, weight, layer.bias, A, B, wide, layer.values.in_order)
        ctx.layer = layer
        ctx.save_for_backward(x, h, A, B, weight if layer.keep_dequantized else None)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, h, A, B, weight = ctx.saved_tensors
        if weight is None:
            weight = ctx.layer.weight.dequantize(grad.dtype)
        if h is None:
            return grad @ weight, None, None, None
        grad_h = grad @ B
        if weight.shape[0] > weight.shape[1]:
            grad_x = (grad @ weight).addmm_(grad_h, A)
        else:
            grad_x = torch.cat([grad, grad_h], 1) @ torch.cat([weight, A])
        return grad_x, grad_h.T @ x, grad.T @ h, None


class QuantLinear(qerl.QuantLinear):
    """qerl.QuantLinear, in few products in training and in decoding."""

    # Both are set by Transformer.recompute_in_backward.
    keep_dequantized = False       # from a block's second forward to its backward
    output_unread = False          # True of the MLP's down
    decode_lora = {}               # {a weight by which `decode` multiplies: LoRA as it takes it}

    @property
    def values(self):
        """The weight that multiplies many rows, in training always: see TiledWeight.for_rows."""
        return self.weight.for_rows(math.inf)

    def lora(self, dtype):
        """(A, B') for one product (x Aᵀ) B'ᵀ; None, None without LoRA.

        A [layers * r, in] is multiplied by α/r; in B' [out, layers * r] each layer's piece of
        B [out, r] is a block on the diagonal.
        """
        if not self.use_adapter:
            return None, None
        A = self.lora_A if self.alpha == self.rank else self.alpha / self.rank * self.lora_A
        B = self.lora_B.to(dtype)
        if len(self.sizes) > 1:
            B = torch.block_diag(*B.split(self.sizes))
        return A.to(dtype), B

    def forward(self, x):
        rows = x.flatten(0, -2)
        return FrozenLinear.apply(rows, *self.lora(x.dtype), self).unflatten(0, x.shape[:-1])

    def beside(self, weight, B):
        """[Ŵ, B'] of the weight Ŵ if out > in, else None; values that are kept lie in it already."""
        out, columns = weight.shape
        if B is None or out <= columns:
            return None
        wide = self.values.wide
        if wide is None:
            return torch.cat([weight, B], 1)
        wide[:, columns:] = B
        return wide

    @torch.no_grad()
    def prepare_decoding(self, dtype):
        """Before each rollout: bring LoRA into the forms in which `decode` takes it."""
        before = self.decode_lora
        self.decode_lora = {}
        if not self.use_adapter:
            return
        for weight in {self.weight, self.values}:
            if weight.interleaved:
                lora = weight.prepare_lora(
                    self.lora_A, self.lora_B, self.sizes, self.alpha / self.rank, dtype)
            else:
                lora = self.lora(dtype)
                if weight.wide is not None:
                    self.beside(weight.dequantize(dtype), lora[1])           # puts B' there
            self.decode_lora[weight] = renewed(before.get(weight), lora)

    def multiplier(self, rows):
        """The weight by which `decode` multiplies so many rows."""
        return self.values if self.values.in_order else self.weight.for_rows(rows)

    def interleaved(self, rows):
        """Whether `decode` takes so many rows of x interleaved, see PackedWeight."""
        return self.multiplier(rows).interleaved

    def decode(self, x):
        """forward(x) without gradient; x [slots, in]."""
        weight = self.multiplier(len(x))
        return weight.multiply(x, self.bias, self.decode_lora.get(weight))


class RMSNorm(qerl.RMSNorm):
    """qerl.RMSNorm, by a kernel."""
    decode_scale = None            # [the last rollout's noisy_weight]

    def prepare_decoding(self):
        """Before each rollout: put w + Z where recorded graphs read it."""
        if self.noisy_weight is not None:
            self.decode_scale = renewed(self.decode_scale, [self.noisy_weight])
            self.noisy_weight, = self.decode_scale

    def forward(self, x):
        return self.branch(x)[1]

    def branch(self, x, added=None, interleaved=False):
        """(x + added, its norm); interleaved: for a layer that reads the norm so, see PackedWeight."""
        if use_kernels(x):
            return kernels.FusedRMSNorm.apply(x, added, self.scale, self.eps, interleaved)
        x = x if added is None else x + added
        return x, super().forward(x)


def rotary(x, cos, sin):
    """qerl.rotary, by a kernel where all rows share the positions."""
    by_kernel = use_kernels(x) and cos.dim() == 2
    turn = kernels.FusedRotary.apply if by_kernel else qerl.rotary
    return turn(x, cos, sin)


def silu_mul(gate_up, interleaved=False):
    """gate_up [..., 2n] -> silu(gate) * up [..., n], as in qerl.MLP.forward."""
    if use_kernels(gate_up):
        return kernels.FusedSiluMul.apply(gate_up, interleaved)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def attends_in_line(q):
    """Whether kernels.attend_in_line takes the queries, and PyTorch's FlashAttention its gradient."""
    return kernels is not None and kernels.flash_runs_on(q)


def decode_attention(qkv, cos, sin, cache, layer, interleaved):
    """qerl.KVCache.attend for one token of each slot, with the rotary embedding of q and k.

    qkv [slots, (heads + 2 kv_heads) * D] of the new tokens; cos, sin [slots, D] of their positions.
    Returns [slots, heads * D].
    """
    kv_cache = cache.layers[layer]
    filled = cache.filled
    if use_kernels(qkv):
        return kernels.decode_attention(qkv, cos, sin, kv_cache, filled, interleaved)
    _, slots, kv_heads, _, D = kv_cache.shape
    heads = qkv.shape[1] // D - 2 * kv_heads
    q, k, v = qkv.view(slots, -1, D).split([heads, kv_heads, kv_heads], 1)       # [slots, heads, D]
    slot = torch.arange(slots, device=qkv.device)
    kv_cache[0, slot, :, filled] = rotary(k, cos, sin)
    kv_cache[1, slot, :, filled] = v

    length = filled + 1
    k, v = kv_cache[:, :, :, :length.max()].transpose(2, 3)                      # of all tokens so far
    there = length_mask(length, k.shape[1])[:, None, None]                       # [slots, 1, 1, longest]
    q = rotary(q, cos, sin)[:, None]                                             # [slots, 1, heads, D]
    return qerl.attention(q, k, v, there).flatten(1)


class Attention(qerl.Attention):
    """qerl.Attention, with kernels."""

    def forward(self, x, rope, cache=None):
        q, k, v = self.heads(self.qkv(x))
        q = rotary(self.q_norm(q), *rope)
        k = rotary(self.k_norm(k), *rope)
        y = qerl.attention(q, k, v) if cache is None else cache.attend(q, k, v, self.index)
        return self.o(y.flatten(2))

    def decode(self, x, rope, cache):
        """forward(x) for one new token of each slot, [slots, d], which enters the cache."""
        qkv = self.qkv.decode(x)
        if isinstance(self.q_norm, RMSNorm):
            q, k, v = self.heads(qkv)
            qkv = torch.cat([self.q_norm(q), self.k_norm(k), v], 1).flatten(1)
        # Turns q and k by rope, puts k and v at place cache.filled, and attends to all up to it.
        y = decode_attention(qkv, *rope, cache, self.index, self.o.interleaved(len(x)))
        return self.o.decode(y)


class MLP(qerl.MLP):
    """qerl.MLP, with a kernel."""

    def forward(self, x):
        return self.down(silu_mul(self.gate_up(x)))

    def decode(self, x):
        """forward(x) for one new token of each slot, [slots, d]."""
        y = silu_mul(self.gate_up.decode(x), self.down.interleaved(len(x)))
        return self.down.decode(y)


class Block(qerl.Block):
    """qerl.Block, which may keep nothing but its input for backward (gradient checkpointing).

    Its output is not added up: it is the pair (x, added), and whoever reads it adds the two.
    """
    recomputed = False             # set by Transformer.recompute_in_backward

    def forward(self, x, added, rope, cache=None):
        if not (self.recomputed and torch.is_grad_enabled()):
            return self.compute(x, added, rope, cache)
        x = x if added is None else x + added          # one tensor to keep instead of two
        # Reentrant recomputation gives a gradient only if its input asks for one. With
        # use_reentrant=False, today's default, it hooks every tensor: twice the host's work.
        return recompute(self.compute, x.requires_grad_(), None, rope, cache, use_reentrant=True,
                         preserve_rng_state=False)

    def compute(self, x, added, rope, cache):
        x, y = self.attention_norm.branch(x, added)
        x, y = self.mlp_norm.branch(x, self.attention(y, rope, cache))
        return x, self.mlp(y)

    def decode(self, x, added, rope, cache):
        """forward for one new token of each slot, x [slots, d].

        On Hopper these are eight kernels (Qwen2.5, to 128 slots and rank 128), if it is not exact.
        """
        x, y = self.attention_norm.branch(x, added, self.attention.qkv.interleaved(len(x)))
        y = self.attention.decode(y, rope, cache)
        x, y = self.mlp_norm.branch(x, y, self.mlp.gate_up.interleaved(len(x)))
        return x, self.mlp.decode(y)


# {a class of qerl.py: the one here that is made from it}
FASTER = {kind.__base__: kind for kind in (QuantLinear, RMSNorm, Attention, MLP, Block)}


class Transformer(qerl.Transformer):
    """qerl.Transformer; `decode` is `hidden` for one new token of every slot of the sampler."""
    recompute_blocks = 0           # how many, from the first on
    keep_sampler = False           # whether `sampler` is that of the last rollout; by machine.fitted
    sampler = None
    exact = False                  # whether it samples without noise what is trained; by decode_exactly
    in_order = False               # whether it does now; by sum_in_order

    def __init__(self, config, reader):
        super().__init__(config, reader)
        for module in self.modules():          # each keeps its tensors, and gets this file's methods
            module.__class__ = FASTER.get(type(module), type(module))

    def run(self, tokens, positions, blocks, cache):
        """tokens -> hidden states; blocks: the blocks or their `decode`."""
        x = F.embedding(tokens, self.embedding)
        added = None
        rope = self.rope(positions, x.dtype)
        for block in blocks:
            x, added = block(x, added, rope, cache)
        return self.norm.branch(x, added)[1]

    def hidden(self, tokens, cache=None):
        count = tokens.shape[1]
        positions = torch.arange(count, device=self.device) if cache is None else cache.positions(count)
        return self.run(tokens, positions, self.blocks, cache)

    def decode(self, tokens, cache):
        """The next token of every slot, int64 [slots], at cache.filled -> hidden states [slots, d]."""
        return self.run(tokens, cache.filled, [block.decode for block in self.blocks], cache)

    def decode_exactly(self):
        """Let a rollout's log-probabilities be token_logprobs', bit for bit, without noise -> can they?

        They are on Hopper in bfloat16 where the values of all weights are kept (machine.keep_values):
        decoding then multiplies by these instead of codes.
        """
        def kept(layer):
            return (type(layer) is QuantLinear and not layer.values.interleaved
                    and layer.values.format is FORMATS["bf16"] and layer.values.parts[0].shape[1] % 128 == 0)
        x = self.embedding
        fits = x.is_cuda and x.dtype == torch.bfloat16 and use_kernels(x) and kernels.is_hopper(x.device)
        self.exact = fits and all(map(kept, self.quantized_layers()))
        return self.exact

    def sum_in_order(self):
        """From a rollout on: without noise an exact model has one order of sums, with noise the fastest.

        In order each new number of rows is tried once, which takes milliseconds.
        """
        self.in_order = self.exact and self.norm.scale.equal(self.norm.weight)
        for layer in self.quantized_layers():
            layer.values.in_order = self.in_order

    def recompute_in_backward(self, blocks=None):
        """Gradient checkpointing: the first `blocks`, or all, keep only their input.

        In backward a block runs forward again, is differentiated and freed. Its dequantised
        weights live from this second forward to the end of its backward, so that each is
        dequantised once a pass. Gradients then come from .backward() without `inputs`, not from
        autograd.grad. Nobody reads the last product of the second forward, that of `down`: no
        gradient depends on it, and it is left out.
        """
        self.recompute_blocks = len(self.blocks) if blocks is None else blocks
        for i, block in enumerate(self.blocks):
            block.recomputed = recomputed = i < self.recompute_blocks
            block.mlp.down.output_unread = recomputed
            for module in block.modules():             # of which QuantLinear reads it
                module.keep_dequantized = recomputed


# --------------------------------------------------------------------------------------------------
# 2. Sampler
#
# qerl.generate by continuous batching. All slots decode together, a completion each. One that is done leaves
# its slot idle: it decodes on from an empty cache, and what it writes goes to a spare row. Once G
# slots are idle the next prompt takes them: its keys and values are computed once and copied to all.
# Once no prompt waits and half of the slots are idle, the other half goes on alone (from 32 slots
# on). Everything that a decode step needs lives in tensors of fixed shape on the device, so that on a
# GPU the whole step is one recorded CUDA graph (all its kernels, started by one launch), and the host
# looks at the slots only every 8 tokens.

IDLE = -1                  # in place of a slot's completion; as an index it is the spare last row
PREFILL_TOKENS = 32768     # of prompts that enter together, in one pass


class KVCache:
    """qerl.KVCache of slots; filled int64 [slots]: how many positions each holds.

    layers: of each layer a tensor [2, slots, kv_heads, max_len, head_dim], keys then values.
    """

    def __init__(self, model, slots, max_len):
        head_dim = model.blocks[0].attention.head_dim
        shape = 2, slots, model.config.num_key_value_heads, max_len, head_dim
        self.all_layers = [model.embedding.new_zeros(shape) for _ in model.blocks]
        self.all_filled = torch.zeros(slots, dtype=torch.long, device=model.device)
        self.use(slots)

    def use(self, slots):
        """Be a cache of the first `slots` slots."""
        self.layers = [kv[:, :slots] for kv in self.all_layers]
        self.filled = self.all_filled[:slots]

    def keep(self, slots):
        """Put these slots, int64 [fewer], first; layer by layer, so there is never a second cache."""
        fewer = len(slots)
        self.filled[:fewer] = self.filled[slots]
        for kv in self.layers:
            kv[:, :fewer] = kv[:, slots]


class Prefill(NamedTuple):
    """What Transformer.hidden of P prompts takes as its cache: it fills a KVCache.

    Keys and values of prompt p go to slots[p * G:(p + 1) * G]. The padding of shorter prompts lies
    behind `filled`, where nothing looks.
    """
    cache: KVCache
    slots: torch.Tensor            # int64 [P * G]

    def positions(self, count):
        return torch.arange(count, device=self.slots.device)

    def attend(self, q, k, v, layer):
        """q [P, T, heads, D], k and v [P, T, kv_heads, D] -> y [P, T, heads, D]."""
        P, T = k.shape[:2]
        groups = self.slots.view(P, -1)                                          # [P, G]
        kv = torch.stack([k, v]).transpose(2, 3)               # [2, P, kv_heads, T, head_dim]
        self.cache.layers[layer][:, groups, :, :T] = kv[:, :, None]              # the same for each of G
        if not attends_in_line(q):
            return qerl.attention(q, k, v)
        ends = torch.arange(0, P * T + 1, T, dtype=torch.int32, device=q.device)
        rows = (x.flatten(0, 1) for x in (q, k, v))
        return kernels.attend_in_line(*rows, ends, ends.new_zeros(2, P), T)[0].view_as(q)


def sample(logits, temperature=1.0, top_p=1.0, generator=None):
    """qerl.sample, on a GPU by a kernel with a random stream of its own."""
    if logits.is_cuda and temperature > 0 and use_kernels(logits):
        seed = torch.randint(2 ** 62, (1,), device=logits.device, generator=generator)
        return kernels.sample(logits, temperature, seed, top_p)
    return qerl.sample(logits, temperature, top_p, generator)


class Sampler:
    """The state of a `generate` call: what each slot is at, and the completions so far.

    Calls that differ in nothing but prompts, noise and LoRA may share one, with its cache and its CUDA
    graphs (Transformer.keep_sampler).
    """

    def __init__(self, model, max_len, count, slots, max_new_tokens, temperature, top_p, eos,
                 generator):
        device = model.device
        self.model = model
        self.temperature = temperature
        self.top_p = top_p
        self.generator = generator
        self.eos = torch.tensor(sorted(eos), dtype=torch.long, device=device)

        self.slots = torch.zeros(3, slots, dtype=torch.long, device=device)      # see `use`
        # In order the length of prompts is rounded up, so that their products have few sizes.
        self.unit = 32 if model.in_order else 1
        self.max_len = max_len = max_len + -max_len % self.unit
        self.cache = KVCache(model, slots, max_len)
        self.graphs = {}                                               # {slots: a step, recorded}
        self.read = None                                               # addresses that the graphs read

        # Of each completion, and of one more, into which idle slots write.
        self.logprobs = torch.zeros(count + 1, max_new_tokens, device=device)
        self.entropy = torch.zeros_like(self.logprobs)
        self.tokens = torch.zeros_like(self.logprobs, dtype=torch.long)
        self.length = torch.zeros_like(self.tokens[:, 0])
        self.limit = torch.full_like(self.length, max_new_tokens)
        self.finished = torch.zeros_like(self.length, dtype=torch.bool)
        self.start()

    def start(self):
        """Begin a rollout: all slots are idle and empty, and no completion has a token."""
        self.slots.zero_()[0] = IDLE
        for tensor in (self.cache.all_filled, self.logprobs, self.entropy, self.tokens, self.length,
                       self.finished):
            tensor.zero_()
        for module in self.model.modules():
            if isinstance(module, RMSNorm):
                module.prepare_decoding()
        for layer in self.model.quantized_layers():
            layer.prepare_decoding(self.model.embedding.dtype)
        read = [tensor.data_ptr() for tensor in tensors_of(self.model)]
        if read != self.read:
            self.graphs.clear()
            self.read = read
        self.use(self.slots.shape[1])

    def use(self, slots):
        """Decode with the first `slots` slots from now on."""
        # Of each slot: the completion that it continues, a row of `tokens`; its next token's column
        # there; the next input. How many keys and values it has is cache.filled.
        self.completion, self.position, self.token = self.slots[:, :slots]
        self.cache.use(slots)
        self.record()

    def record(self):
        """On a GPU with kernels `replay` runs a recorded CUDA graph of `step`; elsewhere it is None.

        Without kernels PyTorch's operations run, and some wait for the GPU, which a graph cannot. (None,
        not self.step: a sampler that refers to itself would keep its cache after the call.)
        """
        slots = len(self.completion)
        self.replay = None
        if self.model.device.type != "cuda" or not use_kernels(self.model.embedding):
            return
        if slots in self.graphs:
            self.replay = self.graphs[slots]
            self.replay()                      # a step, since recording takes one, too: both draw as much
        else:
            self.replay = self.graphs[slots] = kernels.record_graph(self.step, self.generator)

    def admit(self, prompts, slots, completions):
        """Let idle slots [P * G] begin the completions [P * G] of `prompts` (P lists of token ids).

        All but the last token of a prompt are prefilled, about PREFILL_TOKENS at a time; the last
        is the slot's first decode input.
        """
        device = self.model.device
        group = len(slots) // len(prompts)
        padded = to_device(pad_sequence(list(map(torch.tensor, prompts)), batch_first=True), device)
        last = to_device([len(p) - 1 for p in prompts], device)
        longest = padded.shape[1]
        if longest > 1:                                # a single token needs no prefill
            at_once = max(1, PREFILL_TOKENS // longest)
            filled = F.pad(padded[:, :-1], (0, (1 - longest) % self.unit))
            for tokens, chosen in zip(filled.split(at_once), slots.split(at_once * group)):
                self.model.hidden(tokens, Prefill(self.cache, chosen))
        first_input = padded.gather(1, last[:, None])[:, 0]
        self.token[slots] = first_input.repeat_interleave(group)
        self.cache.filled[slots] = last.repeat_interleave(group)
        self.completion[slots] = completions
        self.position[slots] = 0

    def steps(self, count):
        """`count` tokens for every slot; nothing waits for the device."""
        step = self.replay or self.step
        for _ in range(count):
            step()

    def step(self):
        """One token for every slot: decode, draw, write down, go on; in place, for the graph's sake."""
        hidden = self.model.decode(self.token, self.cache)                       # [slots, d]
        logits = linear(hidden, self.model.lm_head, in_order=self.model.in_order)        # [slots, V]
        token, logprob, entropy = sample(logits, self.temperature, self.top_p, self.generator)
        row = self.completion                          # [slots]; IDLE, -1, is the spare last row
        column = self.position                         # [slots]
        self.tokens[row, column] = token
        self.logprobs[row, column] = logprob
        self.entropy[row, column] = entropy
        so_far = column + 1
        ended = (token[:, None] == self.eos).any(1)
        self.length[row] = so_far
        self.finished[row] = ended
        self.token.copy_(token)
        # Every slot moves one token on; those that stop are idle and empty.
        stopped = ended | (so_far >= self.limit[row]) | (row == IDLE)
        self.completion.masked_fill_(stopped, IDLE)
        self.position.add_(1).masked_fill_(stopped, 0)
        self.cache.filled.add_(1).masked_fill_(stopped, 0)

    def shrink(self):
        """Keep the busy half of the slots when the other is idle: the last completions are then faster."""
        busy_first = (self.completion == IDLE).int().argsort(stable=True)
        kept = busy_first[:len(self.completion) // 2]
        self.slots[:, :len(kept)] = self.slots[:, kept]
        self.cache.keep(kept)
        self.use(len(kept))

    def rollout(self):
        """The completions, without the spare row, cut to the longest; copies."""
        longest = int(self.length[:-1].max())
        cut = [t[:-1, :longest] for t in (self.tokens, self.logprobs, self.entropy)]
        return Rollout(*(t.clone() for t in (*cut, self.length[:-1], self.finished[:-1])))


def tensors_of(thing):
    """All tensors of a module, a weight, or of a collection in one."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, torch.nn.Module) or hasattr(thing, "dequantize"):
        thing = vars(thing)
    parts = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (tuple, list)) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def take_sampler(model, max_len, *others):
    """A sampler that has begun: the last rollout's, if it was kept and is such a one, or a new one."""
    model.sum_in_order()
    asked = model.in_order, *others
    sampler, model.sampler = model.sampler, None
    if sampler and sampler.asked == asked and sampler.max_len >= max_len:
        sampler.start()
        return sampler
    sampler = None                                     # before there is a second cache
    sampler = Sampler(model, max_len, *others)
    sampler.asked = asked
    return sampler


@torch.no_grad()
def generate(model, prompts, max_new_tokens, group_size=1, temperature=1.0, top_p=1.0, eos=(),
             slots=256, generator=None, limits=None):
    """qerl.generate: sample group_size completions for each prompt -> Rollout, on model.device.

    limits: int64 [N], at how many tokens each completion is cut, if not all at max_new_tokens.
    """
    qerl.check_generate(prompts, max_new_tokens, group_size, temperature, top_p)
    count = len(prompts) * group_size
    slots = max(group_size, min(slots, count))
    max_len = max(map(len, prompts)) + max_new_tokens
    check_every = 8 if model.device.type == "cuda" else 1      # steps; each look waits for the GPU
    sampler = take_sampler(
        model, max_len, count, slots, max_new_tokens, temperature, top_p, eos, generator)
    sampler.limit[:-1] = max_new_tokens if limits is None else limits
    entered = 0                                                # prompts that have had their slots
    while True:
        idle = (sampler.completion == IDLE).nonzero()[:, 0]
        busy = len(sampler.completion) - len(idle)
        admitted = min(len(idle) // group_size, len(prompts) - entered)
        if not busy and not admitted:
            if model.keep_sampler:
                model.sampler = sampler
            return sampler.rollout()
        many = len(sampler.completion) >= 32                # so that at least 16 stay
        if many and entered == len(prompts) and busy <= len(idle):
            sampler.shrink()                                # `idle` is stale now: no prompt waits
        if busy:            # first, so that the GPU decodes while the host issues the prefill
            sampler.steps(check_every)
        if admitted:        # slots that were idle have stayed so
            first = entered * group_size
            completions = torch.arange(first, first + admitted * group_size, device=model.device)
            sampler.admit(prompts[entered:entered + admitted], idle[:len(completions)], completions)
            entered += admitted


# --------------------------------------------------------------------------------------------------
# 3. Log-probabilities
#
# The completions of a group share their prompt. So a batch goes through the layers as one line of
# tokens, in which a shared prompt stands once and padding never (as in Prefix Grouper, arXiv
# 2506.05433).

class Packing(NamedTuple):
    """A line of S tokens: P prompts, then B completions of n tokens in all. See pack.

    The last prompt may have no completion: it is padding.

    Transformer.hidden of the line takes it as its cache: a prompt attends to itself, and a completion to
    its prompt and to itself.
    """
    sizes: list                # tokens of each prompt, then of each completion
    owner: list                # of each completion: the number of its prompt
    largest: int               # tokens of the completions of a prompt, at most
    position: torch.Tensor     # int32 [S], of a token in its prompt + completion
    prefix: torch.Tensor       # int32 [2, P + B]: where each one's prompt begins and how long it is, or 0
    before: torch.Tensor       # int32 [n]: the token of the line before each token of the completions
    ends: torch.Tensor         # int32 [1 + P + B]: 0, and where each prompt and completion ends
    group_ends: torch.Tensor   # int32 [1 + P]: 0, and where the completions of each prompt end,
                               # counted from the first completion

    def positions(self, count):
        return self.position

    def attend(self, q, k, v, layer):
        """q [1, S, heads, D], k and v [1, S, kv_heads, D] -> y [1, S, heads, D]."""
        if attends_in_line(q):
            return kernels.PackedAttention.apply(q[0], k[0], v[0], self)[None]
        sizes, owner = self.sizes, self.owner
        P = len(sizes) - len(owner)

        def rows(x):
            """The line [1, S, heads, D] as padded rows of prompt + completion [B, T, heads, D]."""
            parts = x[0].split(sizes)
            joined = [torch.cat([parts[p], parts[P + i]]) for i, p in enumerate(owner)]
            return pad_sequence(joined, batch_first=True)

        y = qerl.attention(rows(q), rows(k), rows(v)).unbind()
        prompts = [y[owner.index(p)][:sizes[p]] for p in range(P)]
        completions = [y[i][sizes[p]:sizes[p] + sizes[P + i]] for i, p in enumerate(owner)]
        return torch.cat(prompts + completions)[None]


def pack(prompts, lengths, device, padding=0):
    """B prompts (lists) and the lengths of their completions, a list -> Packing.

    Neighbours with equal prompts share one. Rows "p q a" and "p q b c" -> line "p q a b c", position
    [0, 1, 2, 2, 3], before [1, 1, 3]. padding: tokens of one more prompt, without completions.
    """
    groups = [(len(prompt), len(list(rows))) for prompt, rows in itertools.groupby(prompts)]
    groups += [(padding, 0)] * (padding > 0)
    P = len(groups)
    owner = [p for p, (_, count) in enumerate(groups) for _ in range(count)]
    sizes = [size for size, _ in groups] + lengths
    starts = [0] * P + list(map(len, prompts))         # the position of each one's first token
    position = torch.cat([torch.arange(n, n + size) for n, size in zip(starts, sizes)])
    ends = torch.tensor([0, *itertools.accumulate(sizes)])
    places = ends[P:] - ends[P]                        # where completions begin, and the last ends
    before = torch.arange(ends[P], ends[-1]) - 1
    first = torch.tensor(lengths) > 0                  # of a completion that has one
    before[places[:-1][first]] = ends[1:][owner][first] - 1              # it follows its prompt's last
    group_ends = places[[0, *itertools.accumulate(count for _, count in groups)]]
    largest = int(group_ends.diff().max())
    prefix = torch.stack([F.pad(ends[owner], (P, 0)), torch.tensor(starts)])
    tensors = position, prefix, before, ends, group_ends
    return Packing(sizes, owner, largest, *(to_device(t, device).int() for t in tensors))


def token_logprob(logits, tokens, temperature, gradient):
    """logits [n, V], tokens int64 [n] -> log-probability of each token, float32 [n].

    It is that of softmax(z), z = logits / temperature. gradient: put its gradient [n, V],
    (1[token] - softmax(z)) / temperature, in the place of the logits.
    """
    if use_kernels(logits):
        return kernels.token_logprob(logits, tokens, temperature, gradient)
    logprobs = (logits.float() / temperature).log_softmax(-1)
    if gradient:
        logits.copy_((F.one_hot(tokens, logits.shape[1]) - logprobs.exp()) / temperature)
    return logprobs.gather(-1, tokens[:, None])[:, 0]


class OutputLogprobs(torch.autograd.Function):
    """hidden [n, d], lm_head [V, d], tokens int64 [n] -> log π(token) float32 [n], `chunk` at a time.

    The output layer is frozen, so that hidden alone needs a gradient. Forward computes it while the
    logits are there: they are not kept, and not computed again in backward.
    """

    @staticmethod
    def forward(ctx, hidden, lm_head, tokens, temperature, chunk, in_order):
        logprobs = []
        gradients = []
        for h, t in zip(hidden.split(chunk), tokens.split(chunk)):
            logits = linear(h, lm_head, in_order=in_order)
            logprobs.append(token_logprob(logits, t, temperature, ctx.needs_input_grad[0]))
            if ctx.needs_input_grad[0]:
                gradients.append(logits @ lm_head)
        ctx.save_for_backward(*gradients)
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx, grad):
        gradient = torch.cat(ctx.saved_tensors)
        return (grad[:, None] * gradient).to(gradient.dtype), None, None, None, None, None


ROWS = 256                 # in order a line is padded to a multiple of so many: its products have few sizes


def token_logprobs(model, prompts, completions, length, temperature=1.0, chunk=2048):
    """qerl.token_logprobs; the output layer runs on `chunk` tokens at a time.

    With `length` on the CPU the host never waits for the GPU.
    """
    assert temperature > 0, f"token_logprobs: temperature {temperature} is not positive"
    device = completions.device
    length = length.cpu()
    mask = length_mask(length, completions.shape[1])
    places = to_device(mask.flatten().nonzero()[:, 0], device)     # of the n tokens, in the line's order
    tokens = completions.flatten()[places]
    shared = [token for prompt, _ in itertools.groupby(prompts) for token in prompt]
    unit = ROWS if model.in_order else 1
    padding = -(len(shared) + len(tokens)) % unit
    packing = pack(prompts, length.tolist(), device, padding)
    line = torch.cat([to_device(shared + [0] * padding, device), tokens])
    hidden = model.hidden(line[None], packing)[0]                                           # [S, d]
    # The token before predicts a token. This is hidden[packing.before], but as an embedding lookup:
    # the gradient of indexing is slow on a GPU, and on several CPU threads adds up in any order, so that
    # no run could be repeated exactly.
    spare = -len(tokens) % unit
    hidden = F.embedding(F.pad(packing.before, (0, spare)), hidden)
    logprobs = OutputLogprobs.apply(
        hidden, model.lm_head, F.pad(tokens, (0, spare)), temperature, chunk, model.in_order)
    logprobs = logprobs[:len(tokens)]
    return torch.zeros(mask.numel(), device=device).scatter(0, places, logprobs).view_as(completions)


# --------------------------------------------------------------------------------------------------
# 4. Loading

class WeightReader(loading.WeightReader):
    """loading.WeightReader, which hands out the weights of this file."""
    formats = FORMATS

    def weight(self, format, sizes, *parts):
        """In tiles, where a kernel takes them."""
        device = torch.device(self.device)
        in_features = 2 * parts[0].shape[1]
        if format.table is E2M1 and kernels and kernels.tiles_fit(device, self.dtype, in_features, sizes):
            return format.tile(*parts)
        return PackedWeight(format, *parts)


def load_model(path, weights="nvfp4", lora_rank=0, device="cpu", dtype=None, lora_alpha=None,
               train_norms=False, reader_class=WeightReader):
    """qerl.load_model, by harness/loading.py, which reads more kinds of folders. Raises UserError.

    dtype: by default loading.default_dtype. Of several GPUs choose one by torch.cuda.set_device first:
    kernels start on the current one.
    """
    require(weights in FORMATS, f"weights {weights} are unknown; choose {', '.join(FORMATS)}")
    dtype = dtype or loading.default_dtype(device)
    require(dtype.is_floating_point, f"dtype {dtype} is not a floating-point type")
    folder = loading.model_folder(path)
    config = loading.read_config(folder)
    files = loading.open_tensors(folder, device)
    reader = reader_class(files, weights, lora_rank, lora_alpha, train_norms, device, dtype)
    model = Transformer(config, reader)
    reader.check_all_read()
    return model
