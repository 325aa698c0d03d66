"""Where random numbers come from: a hash of what is being drawn, so nothing depends on the order of calls.

A generator with state would tie a token to everything drawn before it: to the drafter, the block size and the batch.
Here every draw is an integer hash of its own name, the same integers on every device, so a draw can be repeated by
whoever knows the name (the drafter guesses with the target's noise) and by nobody else.

The hash is SplitMix64 (Steele, Lea, Flood 2014), read at an index instead of in sequence: `mix64(state + (i+1)*gamma)`
is its output number i. Names are chained: the output is the state of the next level.

    key                = request_key(seed, choice)
    coupled            : key -> COUPLED -> absolute position -> token id
    rejection          : key -> DRAFT | ACCEPT | RECOVER -> step -> slot (-> token id)
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Float64, Int, Int64
from torch import Tensor

from dspark.verify.largest import largest_ids

# The streams of one request. Independent of each other: equal step and slot give unrelated numbers.
COUPLED, DRAFT, ACCEPT, RECOVER = range(4)

Noise = Callable[[Int[Tensor, " S"]], Float64[Tensor, " S"]]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31

# 52 bits, not 53: (b + 0.5) / 2^52 is exact in fp64, while (2^53 - 1 + 0.5) rounds up and would give u = 1.
_BITS = 52


def mix64(x: int) -> int:
    """SplitMix64's finaliser, a bijection of the 64-bit integers. Takes any int (modulo 2^64), returns 0..2^64-1."""
    x &= _MASK
    for shift, factor in _ROUNDS:
        x = (x ^ (x >> shift)) * factor & _MASK
    return x ^ (x >> _LAST_SHIFT)


def mix64_tensor(x: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """`mix64` of every element, on the element's two's complement bits; products wrap around on every device."""
    for shift, factor in _ROUNDS:
        x = (x ^ _logical_shift(x, shift)) * _signed(factor)
    return x ^ _logical_shift(x, _LAST_SHIFT)


def request_key(seed: int, choice: int = 0) -> int:
    """The 64-bit key of one output sequence: of a request's seed and the index of the choice (`n > 1`)."""
    return _output(_output(0, seed), choice)


def gumbel(key: int, position: int, token_ids: Int[Tensor, " S"]) -> Float64[Tensor, " S"]:
    """Noise of rule `coupled`: standard Gumbel values, a pure function of (key, absolute position, token id).

    Source: shared-Gumbel coupling, arXiv 2408.07978.
    """
    return _gumbel(_output(_output(key, COUPLED), position), token_ids)


def stream_gumbel(key: int, stream: int, step: int, slot: int, token_ids: Int[Tensor, " S"]) -> Float64[Tensor, " S"]:
    """Noise of rule `rejection` for drawing a token: standard Gumbel values of one slot of one decoding step."""
    return _gumbel(_slot_state(key, stream, step, slot), token_ids)


def uniform(key: int, stream: int, step: int, slot: int) -> float:
    """A number in the open interval (0, 1) for one slot of one decoding step."""
    return ((_slot_state(key, stream, step, slot) >> (64 - _BITS)) + 0.5) * 2.0**-_BITS


def draw(probs: Float[Tensor, " V"], noise: Noise) -> int:
    """A token from a distribution: argmax(log p + noise) over the tokens with p > 0, in float64.

    A token of probability 1 is taken without noise, so greedy rows cost next to nothing.
    """
    likeliest = int(largest_ids(probs[None])[0])
    if probs[likeliest] >= 1:
        return likeliest
    vocab = probs.shape[0]
    # Gathering a small support is cheap; of a large one it costs more than noise for all, where log 0 keeps p = 0 out.
    if 4 * int(probs.count_nonzero()) < vocab:
        support = probs.nonzero().squeeze(1)
        return int(support[_winner(probs[support], noise(support))])
    return _winner(probs, noise(torch.arange(vocab, device=probs.device)))


def _winner(probs: Float[Tensor, " S"], noise: Float64[Tensor, " S"]) -> int:
    return int(largest_ids((probs.double().log() + noise)[None])[0])


def _slot_state(key: int, stream: int, step: int, slot: int) -> int:
    # By (step, slot) and not by position: a rejected block is drafted again at the same positions, and a planner that
    # saw a confidence made from the first draw must not meet that draw again, or its choice would be look-ahead.
    return _output(_output(_output(key, stream), step), slot)


def _output(state: int, index: int) -> int:
    return mix64(state + (index + 1) * _GAMMA)


def _gumbel(state: int, token_ids: Int[Tensor, " S"]) -> Float64[Tensor, " S"]:
    hashed = mix64_tensor((token_ids.long() + 1) * _signed(_GAMMA) + _signed(state))
    u = (_logical_shift(hashed, 64 - _BITS).double() + 0.5) * 2.0**-_BITS
    return -torch.log(-torch.log(u))


def _logical_shift(x: Int64[Tensor, "*shape"], bits: int) -> Int64[Tensor, "*shape"]:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch has no unsigned 64-bit shift


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
