"""Warm start: a drafter whose layers begin as the target's last ones, reading the deepest tap.

`fc` passes the deepest tap through and `hidden_norm` is the norm the target's next layer gives it, so where that layer
is the one copied, context keys and values are the target's own. Heads that share keys and values get copies of them.
Drafters normalise queries and keys; where the target does not, the gains give each dimension the root mean square it
has in the target, measured on a few texts. Biases are left out: drafters have none. The final norm keeps the target's
proportions but begins as softly as every run's: at full size the first CE on SmolLM2 is 22 in place of 4.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dspark.data import Corpus
from dspark.drafter import DrafterConfig
from dspark.errors import TrainError
from dspark.target import PassRow, Target
from dspark.target.layers import rms_norm
from dspark.target.load import SafetensorsFolder
from dspark.target.spec import ModelSpec
from dspark.train.start import FIRST_NORM

_MEASURED_TEXTS, _MEASURED_TOKENS = 8, 256  # texts, and tokens of each


def warm_tensors(config: DrafterConfig, target: Target, corpus: Corpus) -> dict[str, Tensor]:
    """Weights of `fc`, `hidden_norm`, `norm` and all layers, float32 on CPU.

    Raises:
        TrainError: the drafter has more layers than the target, or key/value heads the target's cannot be copied to.
    """
    spec = target.spec
    if config.num_layers > spec.num_layers:
        raise TrainError(
            f"A warm start copies layers and the drafter has {config.num_layers}, the target {spec.num_layers}; "
            "give fewer --layers."
        )
    if config.num_kv_heads % spec.num_kv_heads:
        raise TrainError(
            f"A warm start copies key/value heads and the drafter has {config.num_kv_heads}, the target "
            f"{spec.num_kv_heads}; give a multiple of that as --kv-heads."
        )
    first, deepest = spec.num_layers - config.num_layers, config.target_layer_ids[-1]
    with ExitStack() as files:
        stored = SafetensorsFolder(target.folder, files)
        passed = torch.eye(spec.hidden_size)
        tensors = {
            "fc.weight": F.pad(passed, ((len(config.target_layer_ids) - 1) * spec.hidden_size, 0)),
            "hidden_norm.weight": stored[f"model.layers.{deepest + 1}.input_layernorm.weight"].float(),
            "norm.weight": FIRST_NORM * stored["model.norm.weight"].float(),
        }
        before = range(first - 1, spec.num_layers - 1)  # what goes into the copied layers
        measured = () if spec.qk_norm else measured_taps(target, corpus, before).chunk(len(before), dim=1)
        for i in range(config.num_layers):
            prefix = f"model.layers.{first + i}."
            layer = {n.removeprefix(prefix): stored[n].float() for n in stored if n.startswith(prefix)}
            if not spec.qk_norm:
                layer |= _measured_gains(layer, measured[i], spec)
            for name in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"):
                layer[name] = repeat_heads(layer[name], spec.num_kv_heads, config.num_kv_heads)
            tensors |= {f"layers.{i}.{n}": t for n, t in layer.items() if n.endswith(".weight")}
    return tensors


def repeat_heads(weight: Float[Tensor, "n D"], heads: int, wanted: int) -> Float[Tensor, "m D"]:
    """Rows of `heads` key or value heads, each head copied so that there are `wanted` in the order of their queries."""
    per_head = weight.view(heads, -1, weight.shape[1])
    return per_head.repeat_interleave(wanted // heads, dim=0).flatten(0, 1)


def norm_gains(heads: Float[Tensor, "T heads head_dim"], eps: float) -> Float[Tensor, " head_dim"]:
    """Gains that give normalised vectors the root mean square per dimension that `heads` have."""
    normed = rms_norm(heads, heads.new_ones(heads.shape[-1]), eps)
    return heads.square().mean((0, 1)).sqrt() / normed.square().mean((0, 1)).sqrt().clamp(min=1e-6)


def _measured_gains(layer: Mapping[str, Tensor], inputs: Float[Tensor, "T D"], spec: ModelSpec) -> dict[str, Tensor]:
    """Gains of one layer's queries and keys, from what goes into it."""
    normed = rms_norm(inputs, layer["input_layernorm.weight"], spec.rms_eps)
    gains = {}
    for name in ("q", "k"):
        projected = F.linear(normed, layer[f"self_attn.{name}_proj.weight"], layer.get(f"self_attn.{name}_proj.bias"))
        gains[f"self_attn.{name}_norm.weight"] = norm_gains(
            projected.view(projected.shape[0], -1, spec.head_dim), spec.rms_eps
        )
    return gains


def tap_sizes(taps: Float[Tensor, "T L*D"]) -> Float[Tensor, " L*D"]:
    """Root mean square of each tapped dimension. They differ by factors of hundreds, and so would what `fc` hears."""
    return taps.square().mean(dim=0).sqrt().clamp(min=1e-3)


@torch.no_grad()
def measured_taps(target: Target, corpus: Corpus, taps: Sequence[int]) -> Float[Tensor, "T L*D"]:
    """Outputs of the layers `taps`, float32 on CPU, over the first texts of the data but for their first tokens, where
    models keep a few huge numbers."""
    decoder = target.decoder
    pool = decoder.new_pool(2 * _MEASURED_TOKENS)
    found = []
    for i in range(min(_MEASURED_TEXTS, len(corpus))):
        ids = corpus.sequence(i)[:_MEASURED_TOKENS].to(decoder.device)
        _, tapped = decoder.run(ids, [PassRow(0, 0, ids.shape[0])], pool, taps)
        assert tapped is not None
        found.append(tapped[1:].float().cpu())
    return torch.cat(found)
