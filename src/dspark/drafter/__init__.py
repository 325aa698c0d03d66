"""Guess a block: DSpark's parallel backbone and sequential head, and the folders they are stored in."""

from dspark.drafter.backbone import Backbone
from dspark.drafter.checkpoint import (
    check_identity,
    check_tensors,
    load_drafter,
    random_drafter,
    random_tensors,
    read_tensors,
    save_drafter,
    tensor_shapes,
)
from dspark.drafter.config import DrafterConfig
from dspark.drafter.drafter import Drafter, build_drafter, with_weights
from dspark.drafter.heads import ConfidenceHead, GatedHead, MarkovHead, NoHead, RnnHead, SequentialHead, build_head
from dspark.drafter.proposal import RulesAt, propose_block, sample_block
from dspark.drafter.vocabulary import DraftVocabulary

__all__ = [
    "Backbone",
    "ConfidenceHead",
    "DraftVocabulary",
    "Drafter",
    "DrafterConfig",
    "GatedHead",
    "MarkovHead",
    "NoHead",
    "RnnHead",
    "RulesAt",
    "SequentialHead",
    "build_drafter",
    "build_head",
    "check_identity",
    "check_tensors",
    "load_drafter",
    "propose_block",
    "random_drafter",
    "random_tensors",
    "read_tensors",
    "sample_block",
    "save_drafter",
    "tensor_shapes",
    "with_weights",
]
