"""The peer of the model bench has our weights and gives our logits."""

import json
from pathlib import Path

import torch
from torch_kda.kda.model import KDAForCausalLM
from torch_kda.kda.presets import model_preset
from torch_kda.profiles import peer_fla
from torch_kda.tests.checks import assert_rms
from torch_kda.tests.kda.oracle import Driver, row, tokens


def test_peer_model_is_ours() -> None:
    model = KDAForCausalLM(model_preset("tiny"))
    model.random_init(0)
    driver = Driver(model)
    ids = tokens(40)
    ours = driver.run_all(row(ids, 0, src=-1, dst=0, blocks=driver.blocks(40)))
    peer = peer_fla.peer_model(model)
    with torch.inference_mode():
        theirs = peer(torch.tensor([ids])).logits[0]
    assert_rms("logits", ours, theirs, 1e-4)
    assert peer.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()


def test_main(tmp_path: Path) -> None:
    """All of the program but FLA's kernels, on a CPU."""
    out = tmp_path / "peer.json"
    options = ["--model", "tiny", "--device", "cpu", "--prefill", "40", "--decode", "2"]
    peer_fla.main([*options, "--context", "20", "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["layers"] == 4
    assert found["prefill_ms"]["40"] > 0 and found["decode_us"]["2"] > 0
