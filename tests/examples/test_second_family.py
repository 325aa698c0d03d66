"""A target of another family goes from its own text to a calibrated drafter by the same commands, with no option that
names the family."""

import json

import pytest
import torch

pytest.importorskip("transformers")

from tests.examples.toy_language import train_model, write_prompts  # noqa: E402

ENGINE = ["--dtype", "float32", "--device", "cpu"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("second")
    return str(train_model(folder / "model")), write_prompts(folder / "prompts.jsonl"), folder


@pytest.fixture
def command(run, made):
    def call(*args, target="--target"):
        result = run(*args[: args.index("--")], target, made[0], *ENGINE, *args[args.index("--") + 1 :])
        assert result.code == 0, result.err
        return result

    return call


def test_from_a_target_to_a_calibrated_drafter(command, made):
    model, prompts, folder = made
    data, drafter, results = folder / "data.npz", folder / "drafter", folder / "acceptance.json"
    respond = ["--temperatures", "0,1", "--max-tokens", "48", "--batch", "16", "--kv-gb", "0.05"]
    command("data", "respond", "--", "--prompts", str(prompts), "--out", str(data), *respond)
    sizes = ["--block", "4", "--rank", "16", "--batch-blocks", "32", "--held-out", "0.25", "--cache-gb", "0.1"]
    training = ["--data", str(data), "--steps", "400", "--lr", "4e-3", *sizes]
    assert "400 from step 0" in command("estimate", "--", *training).err
    trained = command("train", "--", *training, "--out", str(drafter), "--validate-blocks", "60").err
    assert "T=0" in trained and "T=1" in trained
    calibrate = ["--data", str(data), "--held-out", "1", "--blocks", "40", "--max-tokens", "40", "--temperatures", "0"]
    command("calibrate", "--", "--drafter", str(drafter), *calibrate, "--kv-gb", "0.05")
    assert json.loads((drafter / "calibration.json").read_text())
    count = ["--prompts", str(prompts), "--limit", "6", "--max-tokens", "40", "--temperatures", "0", "--kv-gb", "0.05"]
    command("acceptance", "--", "--drafter", str(drafter), "--proposer", "dspark", *count, "--json", str(results))
    assert json.loads((drafter / "config.json").read_text())["target_layer_ids"] == [0, 1]
    (cell,) = json.loads(results.read_text())["cells"]
    assert cell["acceptance_length"] > 2 and cell["sources"] == {"dspark": cell["steps"]}
    say = ["18 letters from q", "--exact", "--max-tokens", "40", "--kv-gb", "0.05"]
    drafted = command("generate", "--", *say, "--proposer", "dspark", "--drafter", str(drafter), "--stats", target="-m")
    plain = command("generate", "--", *say, "--proposer", "none", target="-m")
    assert drafted.out == plain.out and plain.out.startswith("q r s t u v")
