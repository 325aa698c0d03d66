"""The training loop: batches in pieces, AdamW on float32 masters, saves, resume."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dspark.data import Corpus
from dspark.drafter import Drafter, DrafterConfig, build_drafter, save_drafter, with_weights
from dspark.errors import TrainError
from dspark.target import Target
from dspark.target.linear import PlainLinear, linear_factory
from dspark.train.anchors import BatchPlan, Chunk
from dspark.train.features import DraftProbs, FeatureStore
from dspark.train.forward import Slots, chunk_slots, chunk_sums
from dspark.train.losses import OUTSIDE, LossSums, denominators, total_loss
from dspark.train.mixed import Bf16Linear
from dspark.train.processes import Alone, Processes, shared_total
from dspark.train.refine import refinement
from dspark.train.settings import TrainSettings, hidden_weight, learning_rate
from dspark.train.state import check_same_run, read_state, write_state

MOST_SKIPS = 8  # steps in a row without finite gradients before a run is given up
_FC = "fc.weight"
_WRITING = ("o_proj.weight", "down_proj.weight")
_LEAST_WRITTEN = 0.1  # smaller steps than that have not been tried
_SAMPLED_IDS = 4096  # whose embeddings say how large what these write is
_BETAS, _EPS = (0.9, 0.95), 1e-8


@dataclass(frozen=True)
class StepReport:
    """One optimiser step. Losses are means over the batch's weights; `agreement` is the mean of 1 - L1 / 2."""

    step: int  # steps done, this one included
    blocks: int  # seen since the run began
    loss: float
    ce: float
    l1: float
    bce: float
    hidden: float
    agreement: float
    grad_norm: float
    lr: float
    skipped: bool  # its gradients were not finite, so the weights stayed


class Trainer:
    """Owns the weights of one run. The step counter, weights and optimiser state are all that changes.

    `tap_sizes` are the usual sizes of the tapped dimensions, which differ by factors of hundreds. `fc` is kept as the
    weight of taps divided by them: one optimiser step then moves what `fc` makes of each by about as much.
    """

    def __init__(
        self,
        target: Target,
        corpus: Corpus,
        config: DrafterConfig,
        tensors: dict[str, Tensor],
        settings: TrainSettings,
        store: FeatureStore,
        processes: Processes | None = None,
        probs_bytes: float = 0.0,
        tap_sizes: Float[Tensor, " L*D"] | None = None,
    ):
        device = target.decoder.device
        self.target, self.corpus, self.config, self.settings = target, corpus, config, settings
        self.store, self.processes = store, processes or Alone()
        self.step = self.blocks = self.skipped = self._skips_in_a_row = 0
        self.seconds = 0.0  # of all processes of the run
        self.tensors = {name: t.detach().to(device).clone() for name, t in tensors.items()}
        self._tap_sizes = torch.ones(1, device=device) if tap_sizes is None else tap_sizes.to(device)
        self.tensors[_FC] *= self._tap_sizes
        self.weights = {name: t.requires_grad_() for name, t in self.tensors.items() if t.is_floating_point()}
        frozen = build_drafter(config, self.plain_tensors(), target.decoder, PlainLinear, share_head=False)
        vocabulary = frozen.vocabulary
        draft_ids = torch.arange(config.vocab_size, device=device) if vocabulary is None else vocabulary.ids
        head_rows = target.decoder.head_weight.to(device)[draft_ids].float()
        self.probs = DraftProbs(head_rows, corpus, probs_bytes)
        self._make = Bf16Linear if settings.bf16 else PlainLinear
        self._frozen = replace(frozen, lm_head=self._make(head_rows, None))  # whatever dtype the target has
        self._to_draft = torch.full((config.vocab_size,), OUTSIDE, device=device)
        self._to_draft[draft_ids] = torch.arange(draft_ids.shape[0], device=device)
        self.plan = BatchPlan(
            corpus.prompt_lens,
            [corpus.length(i) for i in range(len(corpus))],
            settings.batch_blocks,
            settings.chunk_blocks,
            settings.seed,
        )
        if not self.plan.num_anchors:
            raise TrainError("No response has two tokens or more, so there is nothing to learn; give longer responses.")
        self._positions = max(map(corpus.length, range(len(corpus)))) + config.block_size
        embedded = target.decoder.embed(corpus.ids[:_SAMPLED_IDS].to(device)).float()
        written = float(embedded.square().mean().sqrt())
        self._optimizer = _optimizer(self.weights, settings, min(max(written, _LEAST_WRITTEN), 1.0))

    def gradients(self, step: int) -> tuple[dict[str, float], int]:
        """Fill the weights' gradients for the batch of `step`, piece by piece; its mean losses and number of blocks.

        Pieces divide by the weights of the whole batch, so the result does not depend on how it is cut, nor on how
        many processes share it: each takes every `count`-th piece.
        """
        chunks = self.plan.batch(step)
        slots = [self._slots(chunk.sequence, chunk.anchors) for chunk in chunks]
        over = denominators(torch.cat([s.weights for s in slots]), torch.cat([s.labels for s in slots]))
        self._optimizer.zero_grad(set_to_none=True)
        ce = l1 = bce = hidden = 0.0
        for number in range(self.processes.index, len(chunks), self.processes.count):
            sums = self._chunk_sums(step, number, chunks[number], slots[number])
            torch.autograd.backward(total_loss(sums, over, hidden_weight(step, self.settings)))
            ce, l1, bce = ce + sums.ce.item(), l1 + sums.l1.item(), bce + sums.bce.item()
            hidden += sums.hidden.item()
        if self.processes.count > 1:
            ce, l1, bce, hidden = self._add_up(ce, l1, bce, hidden)
        means = {"ce": ce / max(over.labelled, 1e-12), "l1": l1 / over.all, "bce": bce / over.all}
        means["hidden"] = hidden / over.all
        return means, sum(len(chunk.anchors) for chunk in chunks)

    def _chunk_sums(self, step: int, number: int, chunk: Chunk, slots: Slots) -> LossSums:
        settings, device = self.settings, self.target.decoder.device
        temperature = self.corpus.temperatures[chunk.sequence]  # blocks as they would be drafted in such a text
        refine = refinement(settings.refine_prob, settings.seed, step, number, temperature, device)
        drafter = with_weights(self._frozen, self.plain_tensors(), self._positions, self._make)
        features = self.store[chunk.sequence]
        return chunk_sums(drafter, features, slots, self.probs(chunk.sequence, features, slots.rows), refine)

    def _add_up(self, *sums: float) -> list[float]:
        """Gradients and sums over all processes. A process without a chunk has no gradients, but all must add."""
        for weight in self.weights.values():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        totals = torch.tensor(sums, device=self.target.decoder.device)
        self.processes.add_up([*(w.grad for w in self.weights.values() if w.grad is not None), totals])
        return totals.tolist()

    def plan_steps(self, steps: int) -> None:
        """Set the length of a run that has not begun; with several processes the first one's word counts."""
        assert self.step == 0
        steps = int(self._total(0 if self.processes.index else steps))
        self.settings = replace(self.settings, steps=steps)

    def clear_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> Iterator[StepReport]:
        """Steps from where the run stands to its end, or until `should_stop`.

        Raises:
            TrainError: gradients were not finite `MOST_SKIPS` times in a row.
        """
        while self.step < self.settings.steps and not self._total(should_stop()):  # all stop at the same step
            yield self._one_step()

    def _total(self, number: float) -> float:
        return shared_total(number, self.processes, self.target.decoder.device)

    def _one_step(self) -> StepReport:
        began = time.perf_counter()
        means, blocks = self.gradients(self.step)
        lr, hidden = learning_rate(self.step, self.settings), hidden_weight(self.step, self.settings)
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.weights.values()), self.settings.clip))
        finite = math.isfinite(norm)
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = lr * group["scale"]
            self._optimizer.step()
        self._count_skip(not finite, norm)
        self.step += 1
        self.blocks += blocks
        self.seconds += time.perf_counter() - began
        loss = 0.1 * means["ce"] + 0.9 * means["l1"] + means["bce"] + hidden * means["hidden"]
        return StepReport(
            self.step, self.blocks, loss, **means, agreement=1 - means["l1"] / 2, grad_norm=norm, lr=lr,
            skipped=not finite,
        )  # fmt: skip

    def _count_skip(self, skipped: bool, norm: float) -> None:
        self.skipped += skipped
        self._skips_in_a_row = self._skips_in_a_row + 1 if skipped else 0
        if self._skips_in_a_row >= MOST_SKIPS:
            raise TrainError(
                f"The gradients were not finite (norm {norm}) in {MOST_SKIPS} steps in a row, the last one step "
                f"{self.step + 1}; start another --out with a lower --lr and --init-from this run."
            )

    def _slots(self, sequence: int, anchors: tuple[int, ...]) -> Slots:
        device = self.target.decoder.device
        return chunk_slots(
            self.corpus.sequence(sequence).to(device),
            self.corpus.prompt_lens[sequence],
            torch.tensor(anchors, device=device),
            self.config.block_size,
            self.settings.decay,
            self._to_draft,
        )

    # Saving -----------------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """What a saved run must share with this one to go on."""
        return {
            "settings": self.settings.to_dict() | {"mask_token_id": self.config.mask_token_id},
            "data": self.corpus.digest(),
            "target": self.target.fingerprint.weights,
        }

    def save(self, folder: Path) -> None:
        """Write the state, then the drafter in float16.

        Raises:
            TrainError: the disk does not take it.
        """
        state = {
            **self.identity(),
            "config": self.config.to_dict(),
            "step": self.step,
            "blocks": self.blocks,
            "skipped": self.skipped,
            "seconds": self.seconds,
            "tensors": {name: t.detach().cpu() for name, t in self.tensors.items()},
            "tap_sizes": self._tap_sizes.cpu(),
            "optimizer": self._optimizer.state_dict(),
        }
        write_state(folder, state)
        try:
            save_drafter(folder, self.config, self.half_tensors())
        except OSError as error:
            reason = error.strerror or str(error)
            raise TrainError(f"The drafter cannot be written to {folder} ({reason}); free some space there.") from None

    def resume(self, folder: Path) -> bool:
        """Take over the state saved in `folder`; whether there was one.

        Raises:
            TrainError: damaged, or of a run with other settings, data or target.
        """
        state = read_state(folder)
        if state is None:
            return False
        check_same_run(folder, state, self.identity())
        if "d2t" in self.tensors and not torch.equal(self.tensors["d2t"].cpu(), state["tensors"]["d2t"]):
            raise TrainError(f"The run in {folder} has another draft vocabulary; resume with the --init-from it had.")
        with torch.no_grad():
            for name, tensor in state["tensors"].items():
                self.tensors[name].copy_(tensor)
        self._tap_sizes = state["tap_sizes"].to(self._tap_sizes.device)
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.blocks, self.skipped = state["step"], state["blocks"], state["skipped"]
        self.seconds = state["seconds"]
        return True

    def plain_tensors(self) -> dict[str, Tensor]:
        """The weights as a backbone takes them, differentiable: `fc` of taps as they are."""
        return self.tensors | {_FC: self.tensors[_FC] / self._tap_sizes}

    def half_tensors(self) -> dict[str, Tensor]:
        """The weights as they are stored and served."""
        return {n: t.detach().half() if t.is_floating_point() else t for n, t in self.plain_tensors().items()}

    def served(self, dtype: str) -> Drafter:
        """The drafter as an engine would load it, linears packed for `dtype` (a resolved name)."""
        make = linear_factory(dtype, self.target.decoder.device)
        return build_drafter(self.config, self.half_tensors(), self.target.decoder, make)


def _optimizer(weights: dict[str, Tensor], settings: TrainSettings, written: float) -> torch.optim.Optimizer:
    """AdamW. What layers write stands beside embeddings, whose usual size is `written`: so much smaller are the
    natural weights that write it, and their steps."""

    # Markov rows are embeddings, most without a gradient in a step: decay would only wear them off.
    def group(chosen: Callable[[str, Tensor], bool], weight_decay: float, scale: float = 1.0) -> dict[str, Any]:
        params = [t for name, t in weights.items() if chosen(name, t)]
        return {"params": params, "weight_decay": weight_decay, "scale": scale}

    def decays(name: str, t: Tensor) -> bool:
        return t.dim() == 2 and "markov_head.markov" not in name

    groups = [
        group(lambda name, t: decays(name, t) and not name.endswith(_WRITING), settings.weight_decay),
        group(lambda name, t: decays(name, t) and name.endswith(_WRITING), settings.weight_decay, written),
        group(lambda name, t: not decays(name, t), 0.0),
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=_BETAS, eps=_EPS, fused=True)
