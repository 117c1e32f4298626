"""Three GPU kernels for operations that are slow in plain PyTorch, each with a reference in PyTorch.

- `decode_attention`: one query token per row over the row's own length of a static cache.
- `sample_tokens`: greedy or Gumbel sampling. The noise is a pure function of (stream, token id).
- `distil`: the loss of a draft distribution against the trunk's. The gradient replaces the logits.

On a CPU the references run. TRITON_INTERPRET=1 runs the kernels on a CPU too, to compare them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the references are used
    triton = None

NEG_INF = float("-inf")


def uses_triton(x: Tensor) -> bool:
    return triton is not None and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


# ---- attention of a decode step


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """q [R, heads, D] over the first lengths [R] cells of keys, values [R, kv heads, capacity, D]."""
    if not uses_triton(q):
        return decode_attention_reference(q, keys, values, lengths)
    rows, heads, dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    q = q.contiguous()
    out = torch.empty_like(q)
    _decode_attention[(rows, kv_heads)](
        q, keys, values, out, lengths, capacity, dim**-0.5, heads // kv_heads, dim, 16, 64
    )
    return out


def decode_attention_reference(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    rows, heads, dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    grouped = q.view(rows, kv_heads, heads // kv_heads, dim).float()
    scores = grouped @ keys.float().transpose(-1, -2) * dim**-0.5
    masked = torch.arange(capacity, device=q.device) >= lengths[:, None]
    weights = scores.masked_fill(masked[:, None, None], NEG_INF).softmax(-1)
    return (weights @ values.float()).view(rows, heads, dim).to(q.dtype)


# ---- sampling the next token


def sample_tokens(logits: Tensor, temperature: Tensor, min_p: Tensor, streams: Tensor) -> Tensor:
    """argmax(logits / T + noise) over tokens of at least min_p times the best probability.

    logits [R, V]; temperature, min_p, streams [R]. Temperature 0 is greedy. Rows with the same stream get the
    same noise. The trunk's and the head's samples with one stream are therefore coupled.
    """
    if len(logits) == 0:
        return streams.new_empty(0)
    if not uses_triton(logits):
        return sample_tokens_reference(logits, temperature, min_p, streams)
    sampled = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _sample_tokens[(len(logits),)](
        logits, temperature, min_p, streams, sampled, logits.shape[1], logits.stride(0), 4096, num_warps=8
    )
    return sampled


def sample_tokens_reference(logits: Tensor, temperature: Tensor, min_p: Tensor, streams: Tensor) -> Tensor:
    """The same rule; the noise comes from another generator."""
    sampled = []
    for row, heat, floor, stream in zip(
        logits.float(), temperature.tolist(), min_p.tolist(), streams.tolist(), strict=True
    ):
        if heat == 0:
            sampled.append(row.argmax())
            continue
        scaled = row / heat
        scaled = scaled.masked_fill(scaled < scaled.max() + torch.tensor(floor + 1e-30).log(), NEG_INF)
        generator = torch.Generator(row.device).manual_seed(stream)
        exponential = torch.empty_like(scaled).exponential_(generator=generator)
        sampled.append((scaled - exponential.log()).argmax())
    return torch.stack(sampled)


# ---- the loss of a draft


@dataclass(frozen=True)
class Distilled:
    """The measurements of `distil` for each row."""

    divergence: Tensor  # [R] KL(trunk || draft)
    hit: Tensor  # [R] 1 where both have the same best token


def distil(
    drafts: Tensor, targets: Tensor, offsets: Tensor, hard: float, overlap: float, scale: Tensor
) -> Distilled:
    """Compare logits drafts [R, V] with targets [R, V]; overwrite drafts with the gradient times scale [R].

    The wanted distribution is (1 - hard) * the trunk's distribution + hard * its best token. The loss is the
    cross entropy against the wanted distribution, minus `overlap` * sum(min(draft, wanted)). offsets [V] are
    added to both: the logarithm of the number of tokens that a column represents.
    """
    if not uses_triton(drafts):
        return distil_reference(drafts, targets, offsets, hard, overlap, scale)
    found = torch.empty(2, len(drafts), device=drafts.device)
    sizes = (drafts.shape[1], overlap > 0, 2048)
    _distil[(len(drafts),)](
        drafts, targets, offsets, scale, found[0], found[1], hard, overlap, *sizes, num_warps=8
    )
    return Distilled(found[0], found[1])


def distil_reference(
    drafts: Tensor, targets: Tensor, offsets: Tensor, hard: float, overlap: float, scale: Tensor
) -> Distilled:
    log_q = (drafts.float() + offsets).log_softmax(-1)
    log_p = (targets.float() + offsets).log_softmax(-1)
    best = log_p.argmax(-1)
    wanted = log_p.exp() * (1 - hard)
    wanted[torch.arange(len(best)), best] += hard
    q = log_q.exp()
    short = (q < wanted).float()  # where the draft's probability is below the wanted one
    gradient = q - wanted + overlap * q * ((q * short).sum(-1, keepdim=True) - short)
    drafts.copy_(gradient * scale[:, None])
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    return Distilled(divergence, (log_q.argmax(-1) == best).float())


if triton is not None:

    @triton.jit
    def _decode_attention(
        q_ptr,
        key_ptr,
        value_ptr,
        out_ptr,
        length_ptr,
        capacity,
        scale,
        GROUP: tl.constexpr,  # query heads of one key head
        DIM: tl.constexpr,
        PADDED: tl.constexpr,  # GROUP, padded to the size that matrix units need
        BLOCK: tl.constexpr,
    ):
        """Online softmax over blocks of cells; one program for a row and a key head."""
        row = tl.program_id(0)
        kv_head = tl.program_id(1)
        length = tl.load(length_ptr + row).to(tl.int32)
        member = tl.arange(0, PADDED)
        dim = tl.arange(0, DIM)
        head = (row * tl.num_programs(1) + kv_head) * GROUP + member
        is_query = member[:, None] < GROUP
        q = tl.load(q_ptr + head[:, None] * DIM + dim[None, :], mask=is_query, other=0.0)
        base = (row.to(tl.int64) * tl.num_programs(1) + kv_head) * capacity * DIM
        peak = tl.full((PADDED,), -1e30, tl.float32)
        total = tl.zeros((PADDED,), tl.float32)
        read = tl.zeros((PADDED, DIM), tl.float32)
        for first in range(0, length, BLOCK):
            cell = first + tl.arange(0, BLOCK)
            where = base + cell[:, None] * DIM + dim[None, :]
            keys = tl.load(key_ptr + where, mask=cell[:, None] < length, other=0.0)
            values = tl.load(value_ptr + where, mask=cell[:, None] < length, other=0.0)
            scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
            scores = tl.where(cell[None, :] < length, scores, -1e30)
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp(scores - new_peak[:, None])
            shrink = tl.exp(peak - new_peak)
            total = total * shrink + tl.sum(weights, 1)
            seen = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            read = read * shrink[:, None] + seen
            peak = new_peak
        read = read / total[:, None]
        tl.store(
            out_ptr + head[:, None] * DIM + dim[None, :], read.to(out_ptr.dtype.element_ty), mask=is_query
        )

    @triton.jit
    def _better(value, index, best, best_index):
        """For each lane: the larger value and its index."""
        return tl.maximum(value, best), tl.where(value > best, index, best_index)

    @triton.jit
    def _lowest_index_of(best, best_index):
        return tl.min(tl.where(best == tl.max(best, 0), best_index, 1 << 30), 0)

    @triton.jit
    def _sample_tokens(
        logit_ptr, temperature_ptr, min_p_ptr, stream_ptr, sampled_ptr, vocab, stride, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0)
        logit_ptr += row.to(tl.int64) * stride
        lane = tl.arange(0, BLOCK)
        best = tl.full((BLOCK,), -1e30, tl.float32)
        best_index = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, vocab, BLOCK):
            index = first + lane
            x = tl.load(logit_ptr + index, mask=index < vocab, other=-1e30).to(tl.float32)
            best, best_index = _better(x, index, best, best_index)
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0.0:
            floor = tl.max(best, 0) + tl.log(tl.load(min_p_ptr + row) + 1e-30) * temperature
            stream = tl.load(stream_ptr + row)
            best = tl.full((BLOCK,), -1e30, tl.float32)
            for first in range(0, vocab, BLOCK):
                index = first + lane
                x = tl.load(logit_ptr + index, mask=index < vocab, other=-1e30).to(tl.float32)
                noise = -tl.log(-tl.log(tl.rand(stream, index)))
                x = tl.where(x >= floor, x / temperature + noise, -1e30)
                best, best_index = _better(x, index, best, best_index)
        tl.store(sampled_ptr + row, _lowest_index_of(best, best_index).to(tl.int64))

    @triton.jit
    def _distil(
        draft_ptr,
        target_ptr,
        offset_ptr,
        scale_ptr,
        divergence_ptr,
        hit_ptr,
        hard,
        overlap,
        columns,
        OVERLAPS: tl.constexpr,  # overlap > 0
        BLOCK: tl.constexpr,
    ):
        """Passes over a row: sums of both softmaxes; the draft's mass where it is too small; the gradient."""
        row = tl.program_id(0).to(tl.int64)
        draft_ptr += row * columns
        target_ptr += row * columns
        lane = tl.arange(0, BLOCK)
        q_peak = tl.full((BLOCK,), -1e30, tl.float32)
        p_peak = tl.full((BLOCK,), -1e30, tl.float32)
        q_best = tl.zeros((BLOCK,), tl.int32)
        p_best = tl.zeros((BLOCK,), tl.int32)
        q_sum = tl.zeros((BLOCK,), tl.float32)
        p_sum = tl.zeros((BLOCK,), tl.float32)
        gap_sum = tl.zeros((BLOCK,), tl.float32)  # of p * (target logit - draft logit)
        for first in range(0, columns, BLOCK):
            index = first + lane
            inside = index < columns
            offset = tl.load(offset_ptr + index, mask=inside, other=0.0)
            q = tl.load(draft_ptr + index, mask=inside, other=-60000.0).to(tl.float32) + offset
            p = tl.load(target_ptr + index, mask=inside, other=-60000.0).to(tl.float32) + offset
            q_old, p_old = q_peak, p_peak
            q_peak, q_best = _better(q, index, q_peak, q_best)
            p_peak, p_best = _better(p, index, p_peak, p_best)
            q_sum = q_sum * tl.exp(q_old - q_peak) + tl.exp(q - q_peak)
            shrink = tl.exp(p_old - p_peak)
            weight = tl.exp(p - p_peak)
            p_sum = p_sum * shrink + weight
            gap_sum = gap_sum * shrink + weight * (p - q)
        q_top = tl.max(q_peak, 0)
        p_top = tl.max(p_peak, 0)
        q_log_sum = q_top + tl.log(tl.sum(q_sum * tl.exp(q_peak - q_top), 0))
        p_lanes = tl.exp(p_peak - p_top)
        p_total = tl.sum(p_sum * p_lanes, 0)
        p_log_sum = p_top + tl.log(p_total)
        best = _lowest_index_of(p_peak, p_best)
        divergence = tl.sum(gap_sum * p_lanes, 0) / p_total - p_log_sum + q_log_sum
        tl.store(divergence_ptr + row, divergence)
        tl.store(hit_ptr + row, (_lowest_index_of(q_peak, q_best) == best).to(tl.float32))
        scale = tl.load(scale_ptr + row)
        short_mass = 0.0
        if OVERLAPS:
            lanes = tl.zeros((BLOCK,), tl.float32)
            for first in range(0, columns, BLOCK):
                index = first + lane
                inside = index < columns
                offset = tl.load(offset_ptr + index, mask=inside, other=0.0)
                q = tl.load(draft_ptr + index, mask=inside, other=-60000.0).to(tl.float32) + offset
                p = tl.load(target_ptr + index, mask=inside, other=-60000.0).to(tl.float32) + offset
                wanted = tl.exp(p - p_log_sum) * (1.0 - hard) + tl.where(index == best, hard, 0.0)
                q = tl.exp(q - q_log_sum)
                lanes += tl.where(q < wanted, q, 0.0)
            short_mass = tl.sum(lanes, 0)
        for first in range(0, columns, BLOCK):
            index = first + lane
            inside = index < columns
            offset = tl.load(offset_ptr + index, mask=inside, other=0.0)
            q = tl.load(draft_ptr + index, mask=inside, other=-60000.0).to(tl.float32) + offset
            p = tl.load(target_ptr + index, mask=inside, other=-60000.0).to(tl.float32) + offset
            wanted = tl.exp(p - p_log_sum) * (1.0 - hard) + tl.where(index == best, hard, 0.0)
            q = tl.exp(q - q_log_sum)
            gradient = q - wanted
            if OVERLAPS:
                gradient += overlap * q * (short_mass - tl.where(q < wanted, 1.0, 0.0))
            tl.store(draft_ptr + index, (gradient * scale).to(draft_ptr.dtype.element_ty), mask=inside)
