"""Checkpoints: public names, every key accounted for, broken files, full disks."""

import errno
import json
import os
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch_kda.kda import weights
from torch_kda.kda.model import KDAForCausalLM
from torch_kda.kda.presets import model_preset
from torch_kda.kda.weights import load_checkpoint, load_config, save_checkpoint
from torch_kda.tests.checks import assert_same
from torch_kda.tests.kda.oracle import Driver, hf_model, ours, row, tokens
from transformers import KimiLinearForCausalLM

SIZES = {"vocab_size": 40, "hidden_size": 32, "linear_num_heads": 3, "linear_head_dim": 16}
SIZES |= {"eos_token_ids": (2,), "bos_token_id": 1, "pad_token_id": 0, "intermediate_size": 40}


def small(seed: int | None = 0, **overrides) -> KDAForCausalLM:
    """A model with a layer of each kind; without a seed its weights are NaN."""
    config = model_preset(
        "tiny", **{**SIZES, "num_hidden_layers": 3, "mla_layers": (1,), **overrides}
    )
    model = KDAForCausalLM(config)
    if seed is None:
        for weight in model.parameters():
            weight.fill_(float("nan"))
    else:
        model.random_init(seed)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(small(), tmp_path)
    return tmp_path


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Put tensors into a checkpoint, or take them out of it; `__` stands for a dot."""
    path = folder / "model.safetensors"
    content = load_file(path) | {k.replace("__", "."): x for k, x in tensors.items()}
    save_file({name: x for name, x in content.items() if x is not None}, path)


def assert_equal(a: KDAForCausalLM, b: KDAForCausalLM) -> None:
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        rows = slice(None)
        if name.endswith("mixer.in_proj.weight"):  # its last rows only pad it
            mixer = a.get_submodule(name.removesuffix(".in_proj.weight"))
            rows = slice(sum(mixer.sections))
        assert_same(name, x[rows], y[rows])


def test_public_names() -> None:
    """Names and shapes of the released checkpoint, from its own list."""
    targets = weights._targets(KDAForCausalLM(model_preset("kimi-linear-48b-a3b"), "meta"))
    shapes = {name: list(target.shapes[0]) for name, target in targets.items()}
    kda = {
        **{f"{x}_proj.weight": [4096, 2304] for x in "qkv"},
        **{f"{x}_conv1d.weight": [4096, 1, 4] for x in "qkv"},
        **{f"{x}_a_proj.weight": [128, 2304] for x in "fg"},
        **{f"{x}_b_proj.weight": [4096, 128] for x in "fg"},
        **{"b_proj.weight": [32, 2304], "A_log": [1, 1, 32, 1], "dt_bias": [4096]},
        **{"o_norm.weight": [128], "o_proj.weight": [2304, 4096]},
    }
    mla = {
        **{"q_proj.weight": [6144, 2304], "kv_a_proj_with_mqa.weight": [576, 2304]},
        **{"kv_a_layernorm.weight": [512], "kv_b_proj.weight": [8192, 512]},
        **{"o_proj.weight": [2304, 4096]},
    }
    norms = {"input_layernorm.weight": [2304], "post_attention_layernorm.weight": [2304]}
    dense = {f"mlp.{x}_proj.weight": [9216, 2304] for x in ("gate", "up")}
    dense |= {"mlp.down_proj.weight": [2304, 9216]}
    sparse = {"gate.weight": [256, 2304], "gate.e_score_correction_bias": [256]}
    for expert in range(256):
        sparse |= {f"experts.{expert}.{x}.weight": [1024, 2304] for x in ("w1", "w3")}
        sparse |= {f"experts.{expert}.w2.weight": [2304, 1024]}
    sparse |= {f"shared_experts.{x}_proj.weight": [1024, 2304] for x in ("gate", "up")}
    sparse |= {"shared_experts.down_proj.weight": [2304, 1024]}
    sparse = {f"block_sparse_moe.{name}": shape for name, shape in sparse.items()}
    expected = {"model.embed_tokens.weight": [163840, 2304], "lm_head.weight": [163840, 2304]}
    expected |= {"model.norm.weight": [2304]}
    for i in range(27):
        attention = mla if i + 1 in (4, 8, 12, 16, 20, 24, 27) else kda
        layer = {f"self_attn.{name}": shape for name, shape in attention.items()} | norms
        layer |= dense if i == 0 else sparse
        expected |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    assert shapes == expected


def test_load_what_transformers_saved(tmp_path: Path) -> None:
    """Each weight is where it belongs, by transformers' own names in memory."""
    hf = hf_model(mla=[2], num_layers=2)
    model = ours(hf, tmp_path)
    theirs = hf.state_dict()
    kda, moe = model.blocks[0].mixer, model.blocks[1].mlp
    prefix = "model.layers.0.self_attn."
    names = ["q_proj", "k_proj", "v_proj", "forget_gate.f_a_proj", "g_a_proj", "b_proj"]
    fused = torch.cat([theirs[f"{prefix}{name}.weight"] for name in names])
    assert_same("in_proj", kda.in_proj.weight[: len(fused)], fused)
    assert (kda.in_proj.weight[len(fused) :] == 0).all()
    assert_same("conv", kda.conv_weight, theirs[prefix + "conv1d.weight"][:, 0])
    assert_same("A_log", kda.A_log, theirs[prefix + "forget_gate.A_log"].flatten())
    assert_same("dt_bias", kda.dt_bias.flatten(), theirs[prefix + "forget_gate.dt_bias"])
    prefix = "model.layers.1.mlp."
    shared = [theirs[f"{prefix}shared_experts.{x}_proj.weight"] for x in ("gate", "up", "down")]
    w13 = [*theirs[f"{prefix}experts.gate_up_proj"], torch.cat(shared[:2])]
    assert_same("w13", moe.w13, torch.stack(w13))
    w2 = [*theirs[f"{prefix}experts.down_proj"], shared[2]]
    assert_same("w2", moe.w2, torch.stack(w2))
    assert_same("bias", moe.choice_bias, theirs["model.layers.1.mlp.gate.e_score_correction_bias"])


@pytest.mark.parametrize("shard_bytes", [1 << 40, 60_000], ids=["one-file", "shards"])
def test_save_checkpoint_for_transformers(shard_bytes: int, tmp_path: Path) -> None:
    model = small(linear_num_heads=2)
    save_checkpoint(model, tmp_path, shard_bytes=shard_bytes)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (shard_bytes == 60_000)
    hf, report = KimiLinearForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    ids = tokens(21, vocab_size=40)
    driver = Driver(model)
    logits = driver.run_all(row(ids, 0, src=-1, dst=0, blocks=driver.blocks(21)))
    with torch.inference_mode():
        expected = hf(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("shard_bytes", [1 << 40, 60_000, 1], ids=["one", "some", "each"])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"dtype": "bfloat16"},
        {"q_lora_rank": 12, "use_mla_output_gate": True, "use_full_rank_gate": True},
        {"gate_lower_bound": -5.0, "num_shared_experts": 0, "qk_rope_head_dim": 0},
    ],
    ids=["plain", "bf16", "k3", "bounded"],
)
def test_round_trip(shard_bytes: int, overrides: dict, tmp_path: Path) -> None:
    model = small(**overrides)
    save_checkpoint(model, tmp_path, shard_bytes=shard_bytes)
    expected = replace(model.config, name=tmp_path.name)
    assert load_config(tmp_path) == expected
    again = small(seed=None, **overrides)
    load_checkpoint(again, tmp_path)
    assert_equal(again, model)
    assert not list(tmp_path.glob(".*"))  # no passing files
    save_checkpoint(model, tmp_path, shard_bytes=shard_bytes)  # over its own files


def test_load_single_file(folder: Path) -> None:
    model = small(seed=None)
    load_checkpoint(model, folder / "model.safetensors")
    assert_equal(model, small())


@pytest.mark.parametrize("names", ["mlp", "block_sparse_moe"])
def test_load_both_names_of_dense_layers(names: str, folder: Path) -> None:
    """Released files say mlp.*, those of transformers block_sparse_moe.*"""
    path = folder / "model.safetensors"
    content = {
        name.replace("layers.0.mlp.", f"layers.0.{names}."): x
        for name, x in load_file(path).items()
    }
    assert f"model.layers.0.{names}.up_proj.weight" in content
    save_file(content, path)
    model = small(seed=None)
    load_checkpoint(model, folder)
    assert_equal(model, small())
    both = {
        f"model__layers__0__{x}__up_proj__weight": torch.zeros(40, 32)
        for x in ("mlp", "block_sparse_moe")
    }
    change(folder, **both)
    with pytest.raises(ValueError, match="up_proj.weight is double"):
        load_checkpoint(model, folder)


@pytest.mark.parametrize("shape", [(1, 1, 3, 1), (3,), (4,)], ids=["kimi", "glm", "k3-padded"])
def test_load_shapes_of_A_log(shape: tuple[int, ...], folder: Path) -> None:
    """K3 pads its heads to a power of two: the first ones count."""
    values = torch.full((4,), float("nan"))
    values[:3] = torch.tensor([0.5, -1.0, 2.0])
    stored = values[: 4 if shape == (4,) else 3].view(shape)
    change(folder, model__layers__0__self_attn__A_log=stored)
    model = small(seed=None)
    load_checkpoint(model, folder)
    assert model.blocks[0].mixer.A_log.tolist() == [0.5, -1.0, 2.0]


@pytest.mark.parametrize("shape", [(5,), (2,), (1, 3), (3, 1, 1, 1)])
def test_load_wrong_shape_of_A_log(shape: tuple[int, ...], folder: Path) -> None:
    change(folder, model__layers__0__self_attn__A_log=torch.zeros(shape))
    with pytest.raises(ValueError, match=r"A_log must be \[1, 1, 3, 1\] or \[3\] or \[4\], got"):
        load_checkpoint(small(), folder)


def test_load_keeps_gates_in_fp32(folder: Path) -> None:
    """A bf16 model keeps what an fp32 file says of A_log and dt_bias to the last bit."""
    model = small(seed=None, dtype="bfloat16")
    load_checkpoint(model, folder)
    exact = small()
    for name in ("A_log", "dt_bias"):
        a, b = (getattr(m.blocks[0].mixer, name) for m in (model, exact))
        assert_same(name, a, b)
        assert (a != a.bfloat16().float()).any()
    assert_same("embed", model.embed, exact.embed.bfloat16())


def test_load_missing_and_unexpected(folder: Path) -> None:
    change(
        folder,
        model__norm__weight=None,
        model__layers__2__self_attn__o_norm__weight=None,
        model__layers__3__input_layernorm__weight=torch.zeros(32),
    )
    model = small()
    with pytest.raises(ValueError) as error:
        load_checkpoint(model, folder)
    text = str(error.value)
    assert "2 missing: model.layers.2.self_attn.o_norm.weight; model.norm.weight" in text
    assert "1 unexpected: model.layers.3.input_layernorm.weight" in text
    assert_equal(model, small())  # nothing was touched


def test_load_long_lists_are_cut(folder: Path) -> None:
    change(folder, **{f"extra{i}": torch.zeros(1) for i in range(30)})
    with pytest.raises(ValueError, match="30 unexpected: extra0; .* and 22 more"):
        load_checkpoint(small(), folder)


def test_load_wrong_shape_and_dtype(folder: Path) -> None:
    change(folder, model__norm__weight=torch.zeros(33))
    with pytest.raises(
        ValueError, match=r"model.norm.weight must be \[32\], got \[33\] in model.saf"
    ):
        load_checkpoint(small(), folder)
    change(folder, model__norm__weight=torch.zeros(32).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="model.norm.weight must be of .*BF16.*, got F8_E4M3"):
        load_checkpoint(small(), folder)


@pytest.mark.parametrize("keep", [0, 7, 50, 3000, -1], ids=lambda n: f"first{n}")
def test_load_truncated_file(keep: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    model = small()
    with pytest.raises(
        ValueError, match="cannot read .*/model.safetensors: .*is the file complete"
    ):
        load_checkpoint(model, folder)
    assert_equal(model, small())


@pytest.mark.parametrize("place", [0, 8, 12, 40])
def test_load_corrupt_header(place: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[place : place + 6] = b"\xff" * 6
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="cannot read .*/model.safetensors"):
        load_checkpoint(small(), folder)


def test_load_incomplete_folders(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="no model.safetensors and no model.safetensors.index.json"
    ):
        load_checkpoint(small(), tmp_path)
    with pytest.raises(ValueError, match="cannot read .*config.json"):
        load_config(tmp_path)
    save_checkpoint(small(), tmp_path, shard_bytes=60_000)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"cannot read .*{shard.name}"):
        load_checkpoint(small(), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for text, match in (
        ("{", "cannot read .*index.json"),
        ("[]", "no JSON object"),
        ("{}", "weight_map"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "must map keys to file names"),
        ('{"weight_map": {"a": 3}}', "must map keys to file names"),
    ):
        index.write_text(text)
        with pytest.raises(ValueError, match=match):
            load_checkpoint(small(), tmp_path)


def test_load_streams(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor of the file is held at a time, read for the model's device."""
    alive: list[weakref.ref] = []
    most = 0

    class Counting:
        def __init__(self, path: Path, framework: str, device: str) -> None:
            assert device == "cpu"
            self.file = safe_open(path, framework=framework, device=device)

        def __enter__(self) -> "Counting":
            self.file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.file.__exit__(*error)

        def __getattr__(self, name: str):
            return getattr(self.file, name)

        def get_tensor(self, key: str) -> Tensor:
            nonlocal most
            x = self.file.get_tensor(key)
            alive.append(weakref.ref(x))
            most = max(most, sum(ref() is not None for ref in alive))
            return x

    monkeypatch.setattr(weights, "safe_open", Counting)
    load_checkpoint(small(seed=None), folder)
    assert len(alive) == len(weights._targets(small()))
    assert most <= 2  # the one before may live until its name is given away


@pytest.mark.parametrize("fails_at", [1, 2, 4])
def test_save_on_full_disk(fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever file the space ends in, what was there stays and nothing new does."""
    save_checkpoint(small(), tmp_path, shard_bytes=60_000)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls = 0

    def fsync(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(weights.os, "fsync", fsync)
    with pytest.raises(RuntimeError, match="save_checkpoint: cannot write .*: No space left on"):
        save_checkpoint(small(seed=1), tmp_path, shard_bytes=60_000)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_save_on_dev_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is truly full: the error of the write itself, not of our own making."""
    open_full = Path("/dev/full").open  # bound before the patch
    monkeypatch.setattr(Path, "open", lambda _, mode: open_full(mode))
    with pytest.raises(RuntimeError, match="cannot write .*: No space left on device; nothing was"):
        save_checkpoint(small(), tmp_path)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_save_refuses_other_weights(folder: Path) -> None:
    with pytest.raises(
        ValueError, match="holds other weights .model.safetensors.; choose an empty"
    ):
        save_checkpoint(small(), folder, shard_bytes=60_000)
    assert not list(folder.glob("model-*"))


def test_save_is_the_public_format(folder: Path) -> None:
    """The safetensors library reads what we write, alignment and metadata included."""
    path = folder / "model.safetensors"
    size = int.from_bytes(path.read_bytes()[:8], "little")
    assert size % 8 == 0
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(weights._targets(small()))
    config = json.loads((folder / "config.json").read_text())
    assert config["linear_attn_config"]["full_attn_layers"] == [2]
