"""What a machine and a model are said to be."""

import torch

from dspark.measure.bench.machine import MemoryPeak, describe, measure_peaks, model_size
from dspark.target import load_target
from tests.toy_models import VOCAB_SIZE, toy_config, toy_tensors, write_model

CPU = torch.device("cpu")


def test_this_machine():
    peaks = measure_peaks(CPU, read_bytes=1 << 20, matrix=64)
    assert peaks.bytes_per_s > 0 and peaks.flop_per_s > 0
    machine = describe(CPU)
    assert machine.cpu and machine.cores >= 1 and machine.threads == torch.get_num_threads()
    assert machine.versions["torch"] == torch.__version__ and "dspark" in machine.versions


def test_a_pass_reads_every_matrix_once(tmp_path):
    target = load_target(str(write_model(tmp_path / "toy", "qwen3")), CPU, "float32")
    tensors = toy_tensors(toy_config("qwen3"))
    layers = sum(t.numel() for name, t in tensors.items() if "_proj" in name)
    head = tensors["lm_head.weight"].numel()
    size = model_size(target, "float32")
    assert size.weight_bytes == 4 * (layers + head) and size.flop_per_token == 2 * layers
    assert size.head_flop == 2 * head == 2 * VOCAB_SIZE * 64
    assert size.kv_token_bytes == target.decoder.kv_token_bytes


def test_memory_is_at_least_what_a_cell_took():
    memory = MemoryPeak(CPU)
    memory.reset()
    before = memory.read()
    block = torch.ones(40 * 2**20, dtype=torch.uint8)
    after = memory.read()
    if before is not None and after is not None:  # the system says
        assert after >= block.numel()
