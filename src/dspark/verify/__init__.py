"""Is the output still exactly the target's?

The room is pure: distributions and drafts come in, verdicts go out, and randomness arrives as keys (`Streams`).
`processed_probs` is the only definition of a sampling distribution, `accept` the only way draft tokens become output.
"""

from dspark.verify.accept import accept, accept_prob, residual, sample_draft
from dspark.verify.candidates import accept_fixed_children, accept_sampled_children, sampled_children_rule
from dspark.verify.noise import (
    ACCEPT,
    COUPLED,
    DRAFT,
    RECOVER,
    draw,
    gumbel,
    mix64,
    mix64_tensor,
    request_key,
    stream_gumbel,
    uniform,
)
from dspark.verify.probs import log_probs, processed_logits, processed_probs

__all__ = [
    "ACCEPT",
    "COUPLED",
    "DRAFT",
    "RECOVER",
    "accept",
    "accept_fixed_children",
    "accept_prob",
    "accept_sampled_children",
    "draw",
    "gumbel",
    "log_probs",
    "mix64",
    "mix64_tensor",
    "processed_logits",
    "processed_probs",
    "request_key",
    "residual",
    "sample_draft",
    "sampled_children_rule",
    "stream_gumbel",
    "uniform",
]
