"""The causal stage inside a block: what the previous token adds to a slot's logits, and how sure the drafter is.

One formula serves training and serving: a head turns (state, W1 of the previous token, hidden) into a small latent,
and `W2 latent` is the bias. `step` does that for one slot, `block_bias` for a whole teacher-forced block.
Source: arXiv 2607.05147 (sequential heads and confidence head).
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dspark.drafter.config import DrafterConfig
from dspark.target.linear import Linear, LinearFactory


def apply_rows(linear: Linear, x: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows m"]:
    """A `Linear`, which takes [T, n], over any leading shape."""
    y = linear(x.reshape(-1, x.shape[-1]))
    return y.view(*x.shape[:-1], y.shape[-1])


class NoHead:
    """No sequential stage: every slot's logits are the backbone's, whatever was sampled before. Rank 0, bias 0."""

    def __init__(self, draft_vocab: int):
        self._draft_vocab = draft_vocab

    def embed(self, previous: Int[Tensor, "*rows"], like: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows 0"]:
        return like.new_empty((*previous.shape, 0))

    def start(self, hidden: Float[Tensor, "B D"]) -> Float[Tensor, "B 0"]:
        return hidden.new_empty((hidden.shape[0], 0))

    def step(
        self, state: Float[Tensor, "B 0"], embedded: Float[Tensor, "B 0"], hidden: Float[Tensor, "B D"]
    ) -> tuple[Float[Tensor, "B V_draft"], Float[Tensor, "B 0"]]:
        return self.block_bias(embedded, hidden), state

    def block_bias(
        self, embedded: Float[Tensor, "*rows 0"], hidden: Float[Tensor, "*rows D"]
    ) -> Float[Tensor, "*rows V_draft"]:
        return hidden.new_zeros(()).expand(*hidden.shape[:-1], self._draft_vocab)


class MarkovHead:
    """`bias_k = W2 W1[x_{k-1}]`: first-order transitions of rank r. x_0 is the anchor; W1 covers the full vocabulary.

    Subclasses change how the latent before W2 is made.
    """

    def __init__(self, tensors: Mapping[str, Tensor], make: LinearFactory):
        self._w1 = tensors["markov_head.markov_w1.weight"]  # looked up row by row, so it stays in its own dtype
        self._w2 = make(tensors["markov_head.markov_w2.weight"], None)

    def embed(self, previous: Int[Tensor, "*rows"], like: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows r"]:
        """W1 of the previous tokens, in the dtype of `like`; the confidence head reads it too."""
        return F.embedding(previous, self._w1).to(like.dtype)

    def start(self, hidden: Float[Tensor, "B D"]) -> Float[Tensor, "B r"]:
        """The state before slot 1: zeros."""
        return hidden.new_zeros((hidden.shape[0], self._w1.shape[1]))

    def step(
        self, state: Float[Tensor, "B r"], embedded: Float[Tensor, "B r"], hidden: Float[Tensor, "B D"]
    ) -> tuple[Float[Tensor, "B V_draft"], Float[Tensor, "B r"]]:
        """One slot: bias for its logits, and the state for the next slot."""
        latent, state = self._latent(state, embedded, hidden)
        return self._w2(latent), state

    def block_bias(
        self, embedded: Float[Tensor, "*rows K r"], hidden: Float[Tensor, "*rows K D"]
    ) -> Float[Tensor, "*rows K V_draft"]:
        """Every slot of teacher-forced blocks, differentiable; equal to K calls of `step` from `start`."""
        latent, _ = self._latent(embedded, embedded, hidden)  # memoryless: the state is not read
        return apply_rows(self._w2, latent)

    def _latent(self, state: Tensor, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return embedded, state


class GatedHead(MarkovHead):
    """`bias_k = W2 (sigmoid(G [h_k; W1 x_{k-1}]) * W1 x_{k-1})`: the context decides how much the transition counts."""

    def __init__(self, tensors: Mapping[str, Tensor], make: LinearFactory):
        super().__init__(tensors, make)
        self._gate = make(tensors["markov_head.gate_proj.weight"], tensors["markov_head.gate_proj.bias"])

    def _latent(self, state: Tensor, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid(apply_rows(self._gate, torch.cat((hidden, embedded), dim=-1)))
        return gate * embedded, state


class RnnHead(MarkovHead):
    """A recurrent state over the block: one linear map of `[s_{k-1}; W1 x_{k-1}; h_k]` gives gate g, candidate c and
    output o; `s_k = sig(g) * s_{k-1} + (1 - sig(g)) * tanh(c)`, `bias_k = W2 tanh(o)`, s_0 = 0.
    """

    def __init__(self, tensors: Mapping[str, Tensor], make: LinearFactory):
        super().__init__(tensors, make)
        self._joint = make(tensors["markov_head.joint_proj.weight"], tensors["markov_head.joint_proj.bias"])

    def block_bias(
        self, embedded: Float[Tensor, "*rows K r"], hidden: Float[Tensor, "*rows K D"]
    ) -> Float[Tensor, "*rows K V_draft"]:
        state, latents = torch.zeros_like(embedded[..., 0, :]), []
        for slot in range(embedded.shape[-2]):
            latent, state = self._latent(state, embedded[..., slot, :], hidden[..., slot, :])
            latents.append(latent)
        return apply_rows(self._w2, torch.stack(latents, dim=-2))

    def _latent(self, state: Tensor, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        joint = apply_rows(self._joint, torch.cat((state, embedded, hidden), dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)


SequentialHead = NoHead | MarkovHead
_HEADS = {"markov": MarkovHead, "gated": GatedHead, "rnn": RnnHead}


def build_head(config: DrafterConfig, tensors: Mapping[str, Tensor], make: LinearFactory) -> SequentialHead:
    """The head `config` names, over checkpoint tensors (names as in docs/checkpoints.md)."""
    return NoHead(config.draft_vocab) if config.head == "none" else _HEADS[config.head](tensors, make)


class ConfidenceHead:
    """`c_k = sigmoid(w . features + b)`: probability that token k is kept given that all before it were.

    Features are `[h_k; W1 x_{k-1}]`, or `h_k` alone for a token-free head (`with_markov` false), whose values are known
    before anything is sampled.
    """

    def __init__(self, weight: Float[Tensor, "1 n"], bias: Float[Tensor, " 1"], with_markov: bool):
        self._weight, self._bias, self._with_markov = weight, bias, with_markov

    def logits(
        self, hidden: Float[Tensor, "*rows D"], embedded: Float[Tensor, "*rows r"] | None = None
    ) -> Float[Tensor, "*rows"]:
        """Before the sigmoid: what the training loss and temperature scaling work on."""
        features = hidden
        if self._with_markov:
            assert embedded is not None
            features = torch.cat((hidden, embedded), dim=-1)
        return F.linear(features, self._weight, self._bias).squeeze(-1)

    def __call__(
        self, hidden: Float[Tensor, "*rows D"], embedded: Float[Tensor, "*rows r"] | None = None
    ) -> Float[Tensor, "*rows"]:
        """Probabilities, in float32 or wider."""
        logits = self.logits(hidden, embedded)
        return torch.sigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
