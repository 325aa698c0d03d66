"""Make a drafter: anchors and batches, losses, the target's features, the training loop, rollout validation."""

from dspark.train.anchors import BatchPlan, Chunk, response_anchors, slot_mask
from dspark.train.estimate import Estimate, estimate
from dspark.train.features import CacheLimits, Features, FeatureStore, feature_bytes, target_probs
from dspark.train.losses import Denominators, LossSums, denominators, loss_sums, slot_weights, total_loss
from dspark.train.prepare import new_trainer, sizes_of
from dspark.train.processes import Processes, join_processes
from dspark.train.session import Session, SessionPlan, Validation
from dspark.train.settings import TrainSettings, learning_rate
from dspark.train.trainer import StepReport, Trainer
from dspark.train.validate import Rollout, roll_out, roll_out_sampled, rollout_anchors, sampled_anchors

__all__ = [
    "BatchPlan",
    "CacheLimits",
    "Chunk",
    "Denominators",
    "Estimate",
    "FeatureStore",
    "Features",
    "LossSums",
    "Processes",
    "Rollout",
    "Session",
    "SessionPlan",
    "StepReport",
    "TrainSettings",
    "Trainer",
    "Validation",
    "denominators",
    "estimate",
    "feature_bytes",
    "join_processes",
    "learning_rate",
    "loss_sums",
    "new_trainer",
    "response_anchors",
    "roll_out",
    "roll_out_sampled",
    "rollout_anchors",
    "sampled_anchors",
    "sizes_of",
    "slot_mask",
    "slot_weights",
    "target_probs",
    "total_loss",
]
