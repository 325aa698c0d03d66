"""config.json: round trip, foreign folders, and one sentence for everything that can be wrong with it."""

import json

import pytest

from dspark.artifacts import Fingerprint
from dspark.drafter import DrafterConfig
from dspark.errors import DrafterError

from .toys import make_config, target_spec

IDENTITY = Fingerprint("w1", "t1", "c1", "toy")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head": "gated", "draft_vocab_size": 8, "target": IDENTITY},
        {"head": "rnn", "confidence_with_markov": False, "token_free_confidence": True},
        {"head": "none", "markov_rank": 0, "confidence": False, "confidence_with_markov": False},
    ],
)
def test_round_trip(changes):
    config = make_config(**changes)
    assert DrafterConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_keys_other_engines_read():
    values = make_config(draft_vocab_size=8).to_dict()
    expected = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "intermediate_size": 20,
        "rope_theta": 100.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "vocab_size": 40,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "target_layer_ids": [-1, 1, 2],
        "mask_token_id": 39,
        "markov_rank": 5,
        "markov_head_type": "vanilla",
        "block_size": 4,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
        "is_causal": False,
        "draft_vocab_size": 8,
    }
    assert {key: values[key] for key in expected} == expected
    assert values["dspark"].keys() == {"format", "head", "token_free_confidence", "target"}
    assert "draft_vocab_size" not in make_config().to_dict()


def test_transformers_reads_it():
    from transformers import Qwen3Config

    ours = make_config(target_layer_ids=(1,))
    theirs = Qwen3Config(**{k: v for k, v in ours.to_dict().items() if k != "architectures"})
    assert theirs.rope_parameters["rope_theta"] == ours.rope_theta
    assert (theirs.head_dim, theirs.rms_norm_eps, theirs.layer_types) == (6, 1e-6, ["full_attention"] * 2)


@pytest.mark.parametrize(("kind", "head"), [("vanilla", "markov"), ("gated", "gated"), ("rnn", "rnn")])
def test_deepspec_folder(kind, head):
    values = make_config().to_dict() | {"markov_head_type": kind, "num_anchors": 512}
    for key in ("dspark", "sample_from_anchor", "is_causal", "rope_parameters"):
        del values[key]
    assert DrafterConfig.from_dict(values) == make_config(head=head)


def test_deepspec_folder_without_head():
    values = make_config().to_dict() | {"markov_rank": 0, "enable_confidence_head": False}
    del values["dspark"], values["markov_head_type"]
    config = DrafterConfig.from_dict(values)
    assert (config.head, config.markov_rank, config.confidence) == ("none", 0, False)


def speculators_values(**changes):
    """As vllm-project/speculators writes it: sizes nested, taps counted from the embedding, so ours + 1."""
    ours = make_config(draft_vocab_size=8).to_dict()
    outer = ("draft_vocab_size", "mask_token_id", "markov_rank", "markov_head_type", "block_size")
    outer += ("enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor")
    values = {key: ours[key] for key in outer}
    values |= {"architectures": ["DSparkDraftModel"], "model_type": "speculators", "speculators_model_type": "dspark"}
    values["aux_hidden_state_layer_ids"] = [0, 2, 3]
    moved = (*outer, "architectures", "dspark", "target_layer_ids", "is_causal")
    values["transformer_layer_config"] = {key: value for key, value in ours.items() if key not in moved}
    return values | changes


def test_speculators_folder():
    config = DrafterConfig.from_dict(speculators_values())
    assert config == make_config(draft_vocab_size=8)
    assert config.target_layer_ids == (-1, 1, 2)


def test_speculators_whole_vocabulary_and_left_out_defaults():
    values = speculators_values(draft_vocab_size=40)
    for key in ("rms_norm_eps", "head_dim", "max_position_embeddings", "rope_theta", "rope_parameters"):
        del values["transformer_layer_config"][key]
    config = DrafterConfig.from_dict(values)
    assert config.draft_vocab_size is None
    assert (config.rms_eps, config.head_dim, config.context, config.rope_theta) == (1e-6, 128, 32768, 10000.0)


BAD = {
    "taps not ascending": ({"target_layer_ids": [2, 1]}, r"target_layer_ids is \[2, 1\].*ascending"),
    "tap twice": ({"target_layer_ids": [1, 1]}, "ascending"),
    "tap below the embedding": ({"target_layer_ids": [-2, 1]}, "from -1"),
    "no taps": ({"target_layer_ids": []}, r"target_layer_ids is \[\]"),
    "taps not a list": ({"target_layer_ids": "1,2"}, "target_layer_ids is '1,2'"),
    "tap not whole": ({"target_layer_ids": [1.5]}, "target_layer_ids"),
    "mask outside": ({"mask_token_id": 40}, "mask_token_id is 40; allowed is a token id from 0 to 39"),
    "mask negative": ({"mask_token_id": -1}, "mask_token_id is -1"),
    "block size": ({"block_size": 0}, "block_size is 0; allowed is a whole number of 1 or more"),
    "block size text": ({"block_size": "4"}, "block_size is '4'"),
    "rank": ({"markov_rank": 0}, "markov_rank is 0"),
    "heads": ({"num_key_value_heads": 3}, r"num_kv_heads is 3; allowed is a divisor of num_heads \(4\)"),
    "odd head": ({"head_dim": 5}, "head_dim is 5; allowed is an even number"),
    "theta": ({"rope_theta": -1.0, "rope_parameters": None}, "rope_theta is -1.0"),
    "draft vocabulary": ({"draft_vocab_size": 41}, "draft_vocab_size is 41; allowed is 1 to 39"),
    "architecture": ({"architectures": ["LlamaForCausalLM"]}, "architectures is 'LlamaForCausalLM'; allowed is Qwen3"),
    "model type": ({"model_type": "gemma"}, "model_type is 'gemma'"),
    "bias": ({"attention_bias": True}, "attention_bias is True; allowed is false"),
    "causal": ({"is_causal": True}, "is_causal is True"),
    "masks only": ({"sample_from_anchor": False}, "sample_from_anchor is False"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "scaled": ({"logit_scale": 2.0}, "logit_scale is 2.0"),
    "yarn": ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
    "window": ({"layer_types": ["sliding_attention"]}, r"layer_types is \['sliding_attention'\]"),
    "head": ({"dspark": {"format": 1, "head": "mlp"}}, "head is 'mlp'; allowed is one of none, markov, gated, rnn"),
    "format": ({"dspark": {"format": 2}}, "dspark.format is 2; this version of dspark reads 1"),
    "no format": ({"dspark": {}}, "dspark.format is None"),
    "unknown own key": ({"dspark": {"format": 1, "depth": 3}}, "dspark.depth is 3"),
    "own settings": ({"dspark": 3}, "dspark is 3; allowed is an object"),
    "identity": ({"dspark": {"format": 1, "target": {"weights": "x"}}}, "fingerprint lacks tokenizer, template"),
    "identity text": ({"dspark": {"format": 1, "target": "toy"}}, "dspark.target is 'toy'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_one_sentence(name):
    changes, says = BAD[name]
    with pytest.raises(DrafterError, match=says) as caught:
        DrafterConfig.from_dict(make_config().to_dict() | changes)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize("kind", ["vanilla", "mlp"])
def test_unknown_foreign_head(kind):
    values = make_config().to_dict() | {"markov_head_type": kind}
    del values["dspark"]
    if kind == "vanilla":
        assert DrafterConfig.from_dict(values).head == "markov"
    else:
        with pytest.raises(DrafterError, match="markov_head_type is 'mlp'; allowed is one of vanilla, gated, rnn"):
            DrafterConfig.from_dict(values)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3'; allowed is dspark"),
        ({"aux_hidden_state_layer_ids": [0, -1]}, "aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is None"),
        ({"transformer_layer_config": None}, "transformer_layer_config is None"),
        ({"sample_from_anchor": False}, "sample_from_anchor is False"),
    ],
)
def test_bad_speculators_settings(changes, says):
    with pytest.raises(DrafterError, match=says):
        DrafterConfig.from_dict(speculators_values(**changes))


def test_speculators_must_state_where_it_samples():
    values = speculators_values()
    del values["sample_from_anchor"]
    with pytest.raises(DrafterError, match="sample_from_anchor"):
        DrafterConfig.from_dict(values)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size", "mask_token_id", "block_size"])
def test_missing_settings_are_named(key):
    values = make_config().to_dict()
    del values[key]
    with pytest.raises(DrafterError, match=f"'{key}' is missing"):
        DrafterConfig.from_dict(values)


def test_confidence_with_markov_needs_a_head():
    with pytest.raises(DrafterError, match="confidence_head_with_markov"):
        make_config(head="none", markov_rank=0)


@pytest.mark.parametrize(
    ("changes", "target", "says"),
    [
        ({"hidden_size": 20}, {}, "hidden size 20, this target has 16"),
        ({"vocab_size": 48}, {}, "vocabulary size 48, this target has 40"),
        ({"target_layer_ids": (1, 3)}, {}, r"target layer 3; a target of 4 layers has taps -1 to 2 \(the last"),
        ({"target_layer_ids": (1, 9)}, {}, "target layer 9"),
        ({"mask_token_id": 2}, {}, "mask token 2 is the target's end token"),
        ({}, {"eos_token_id": [5, 39]}, "mask token 39 is the target's end token"),
    ],
)
def test_does_not_fit_the_target(changes, target, says):
    with pytest.raises(DrafterError, match=says):
        make_config(**changes).check_fits(target_spec(**target))


def test_fits_the_target():
    make_config().check_fits(target_spec(), pad_id=0)
    with pytest.raises(DrafterError, match="mask token 39 is the target's padding token"):
        make_config().check_fits(target_spec(), pad_id=39)


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "has no config.json"), ("{", "is not valid JSON"), ("[1]", "holds a JSON list"), ("{}", "architectures")],
)
def test_unreadable_folders(tmp_path, text, says):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(DrafterError, match=says) as caught:
        DrafterConfig.load(tmp_path)
    assert str(tmp_path) in str(caught.value)
