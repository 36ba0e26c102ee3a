"""Checkpoints on disk: safetensors under the public Kimi-Linear names, read and written."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import ModelConfig
from .hf_config import read_hf_config, write_hf_config
from .layers import GatedMLP, MoE
from .mixers import AttentionMixer, KDAMixer
from .model import Block, KDAForCausalLM

FILE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
LISTED = 8  # faults and keys that an error names; it counts the rest
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_READABLE = ("F64", "F32", "BF16", "F16")


def load_config(folder: str | Path) -> ModelConfig:
    """The model that a folder's `config.json` describes.

    Raises:
        ValueError: there is none, or it is not one of kimi_linear.
        NotImplementedError: it asks for something that is not built here.
    """
    path = Path(folder).resolve() / "config.json"
    return read_hf_config(_read_json(path), name=path.parent.name)


@torch.inference_mode()
def load_checkpoint(model: KDAForCausalLM, source: str | Path) -> None:
    """Fill a model from a safetensors file, or from a folder with one file or an index of shards.

    Tensors go one by one from the file into their place on the model's device and take its dtype.
    Names, shapes and dtypes of all files are checked before the first weight is touched.

    Raises:
        ValueError: a file is missing, corrupt or truncated; keys are missing, unexpected or
            double; a shape or dtype does not fit. The message names the file and the keys.
    """
    targets = _targets(model)
    files = _checkpoint_files(Path(source))
    _check_keys(files, targets, source)
    for module in model.modules():
        if isinstance(module, KDAMixer):  # rows that only pad it have no name in the file
            module.in_proj.weight[sum(module.sections) :].zero_()
    for path in files:
        with _opened(path, model.embed.device) as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                place = targets[_known_name(key, targets)].place
                values = file.get_tensor(key).flatten()[: place.numel()]
                place.copy_(values.view(place.shape))


def save_checkpoint(
    model: KDAForCausalLM, folder: str | Path, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a model as a folder that `load_checkpoint` and transformers read.

    Every file is written beside its final name and renamed when all are complete, so a failure
    leaves the folder as it was. Weights come to the host one by one.

    Args:
        shard_bytes: A file that has reached this size is followed by another.

    Raises:
        ValueError: the folder holds other weights.
        RuntimeError: a file cannot be written, as on a full disk.
    """
    targets = _targets(model)
    shards = _shards(targets, shard_bytes)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [FILE_NAME]
    files: dict[str, Callable[[Path], None]] = {
        name: lambda path, shard=shard: _write_safetensors(path, shard)
        for name, shard in zip(names, shards, strict=True)
    }
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(x.place.nbytes for x in targets.values())},
            "weight_map": {key: name for name, x in zip(names, shards, strict=True) for key in x},
        }
        files[INDEX_NAME] = lambda path: _write_json(path, index)
    files["config.json"] = lambda path: _write_json(path, write_hf_config(model.config))
    _write_together(Path(folder), files)


class _Target(NamedTuple):
    """Where a tensor of a file belongs."""

    place: Tensor  # a part of a parameter
    shapes: tuple[tuple[int, ...], ...]  # in a file; the first one is written


def _targets(model: KDAForCausalLM) -> dict[str, _Target]:
    """Public name of each tensor of a checkpoint, and its place in the model's fused parameters."""
    places = {
        "model.embed_tokens.weight": model.embed,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.lm_head.weight,
    }
    targets = {name: _Target(place, (tuple(place.shape),)) for name, place in places.items()}
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        parts = _kda_places if isinstance(block.mixer, KDAMixer) else _attention_places
        layer = {
            "input_layernorm.weight": block.mixer_norm.weight,
            "post_attention_layernorm.weight": block.mlp_norm.weight,
            **{f"self_attn.{name}": place for name, place in parts(block.mixer).items()},
            **_mlp_places(block.mlp),
        }
        for name, place in layer.items():
            shapes = (_shape_in_file(name, place),)
            if name == "self_attn.A_log":
                heads = place.numel()
                # as in Kimi-Linear, in GLM, and in K3, which pads 96 heads to 128
                shapes = ((1, 1, heads, 1), (heads,), (1 << (heads - 1).bit_length(),))
            targets[f"model.layers.{i}.{name}"] = _Target(place, shapes)
    return targets


def _shape_in_file(name: str, place: Tensor) -> tuple[int, ...]:
    """Its own; but a file has all shared experts as one, with the hidden channels of all."""
    if "shared_experts" not in name:
        return tuple(place.shape)
    first, second, third = place.shape
    return (first, second * third) if "down_proj" in name else (first * second, third)


def _kda_places(mixer: Any) -> dict[str, Tensor]:
    assert isinstance(mixer, KDAMixer)
    size = mixer.num_heads * mixer.head_dim
    rows = mixer.in_proj.weight[: sum(mixer.sections)]
    qkv, f_a, gate, beta = rows.split(mixer.sections)
    places: dict[str, Tensor] = {
        "f_a_proj.weight": f_a,
        "f_b_proj.weight": mixer.gates_b[0],
        "b_proj.weight": beta,
        "A_log": mixer.A_log,
        "dt_bias": mixer.dt_bias.view(-1),
        "o_norm.weight": mixer.o_norm,
        "o_proj.weight": mixer.o_proj.weight,
    }
    for letter, projection, conv in zip(
        "qkv", qkv.split(size), mixer.conv_weight.split(size), strict=True
    ):
        places[f"{letter}_proj.weight"] = projection
        places[f"{letter}_conv1d.weight"] = conv.unsqueeze(1)
    if len(mixer.gates_b) == 1:
        return places | {"g_proj.weight": gate}
    return places | {"g_a_proj.weight": gate, "g_b_proj.weight": mixer.gates_b[1]}


def _attention_places(mixer: Any) -> dict[str, Tensor]:
    assert isinstance(mixer, AttentionMixer)
    q, latent, gate = mixer.in_proj.weight.split(mixer.sections)
    places: dict[str, Tensor] = {
        "kv_a_proj_with_mqa.weight": latent,
        "kv_a_layernorm.weight": mixer.latent_norm.weight,
        "kv_b_proj.weight": mixer.kv_b.weight,
        "o_proj.weight": mixer.o_proj.weight,
    }
    if mixer.q_norm is None or mixer.q_b is None:
        places["q_proj.weight"] = q
    else:
        places["q_a_proj.weight"] = q
        places["q_a_layernorm.weight"] = mixer.q_norm.weight
        places["q_b_proj.weight"] = mixer.q_b.weight
    return places | ({"g_proj.weight": gate} if gate.shape[0] > 0 else {})


def _mlp_places(mlp: Any) -> dict[str, Tensor]:
    if isinstance(mlp, GatedMLP):
        return _gated_places("mlp", mlp)
    assert isinstance(mlp, MoE)
    prefix = "block_sparse_moe"
    places: dict[str, Tensor] = {
        f"{prefix}.gate.weight": mlp.router.weight,
        f"{prefix}.gate.e_score_correction_bias": mlp.choice_bias,
    }
    for expert in range(mlp.router.weight.shape[0]):
        w1, w3 = mlp.w13[expert].chunk(2)
        for name, place in (("w1", w1), ("w2", mlp.w2[expert]), ("w3", w3)):
            places[f"{prefix}.experts.{expert}.{name}.weight"] = place
    if mlp.num_shared_experts:
        gate, up = mlp.w13[-mlp.num_shared_experts :].chunk(2, dim=1)
        down = mlp.w2[-mlp.num_shared_experts :].transpose(0, 1)
        for name, place in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            places[f"{prefix}.shared_experts.{name}.weight"] = place
    return places


def _gated_places(prefix: str, mlp: GatedMLP) -> dict[str, Tensor]:
    gate, up = mlp.gate_up.weight.chunk(2)
    places = {"gate_proj": gate, "up_proj": up, "down_proj": mlp.down.weight}
    return {f"{prefix}.{name}.weight": place for name, place in places.items()}


def _known_name(key: str, targets: Mapping[str, _Target]) -> str:
    """A file's key as `_targets` has it: transformers writes dense layers as block_sparse_moe."""
    alias = key.replace(".block_sparse_moe.", ".mlp.")
    return alias if key not in targets and alias in targets else key


def _check_keys(files: list[Path], targets: Mapping[str, _Target], source: str | Path) -> None:
    found: dict[str, Path] = {}
    faults: list[str] = []
    for path in files:
        with _opened(path) as file:
            for key in file.keys():  # noqa: SIM118
                name = _known_name(key, targets)
                if name in found:
                    faults.append(f"{key} is double, in {found[name].name} and {path.name}")
                found[name] = path
                if name in targets:
                    part, shapes = file.get_slice(key), targets[name].shapes
                    shape, dtype = tuple(part.get_shape()), part.get_dtype()
                    if shape not in shapes:
                        wanted = " or ".join(str(list(x)) for x in shapes)
                        faults.append(f"{key} must be {wanted}, got {list(shape)} in {path.name}")
                    if dtype not in _READABLE:
                        faults.append(f"{key} must be of {_READABLE}, got {dtype} in {path.name}")
    for word, keys in (("unexpected", found.keys() - targets), ("missing", targets.keys() - found)):
        if keys:
            faults.insert(0, f"{len(keys)} {word}: {_listed(sorted(keys))}")
    if faults:
        raise ValueError(f"load_checkpoint: {source} is no checkpoint of it: {_listed(faults)}")


def _listed(items: list[str]) -> str:
    rest = len(items) - LISTED
    return "; ".join(items[:LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _checkpoint_files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    index = source / INDEX_NAME
    if not index.is_file():
        if not (source / FILE_NAME).is_file():
            raise ValueError(f"load_checkpoint: no {FILE_NAME} and no {INDEX_NAME} in {source}")
        return [source / FILE_NAME]
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(_is_file_name(name) for name in shards.values()):
        raise ValueError(f"load_checkpoint: weight_map of {index} must map keys to file names")
    return [source / name for name in sorted(set(shards.values()))]


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name


@contextmanager
def _opened(path: Path, device: torch.device | str = "cpu") -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"load_checkpoint: cannot read {path}: {error}; is the file complete?"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"cannot read {path}: it holds no JSON object")
    return content


def _shards(targets: Mapping[str, _Target], shard_bytes: int) -> list[dict[str, _Target]]:
    shards: list[dict[str, _Target]] = [{}]
    size = 0
    for name, target in targets.items():
        if size >= shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = target
        size += target.place.nbytes
    return shards


def _write_safetensors(path: Path, tensors: Mapping[str, _Target]) -> None:
    """Written by hand: one tensor at a time comes to the host, and errors keep their errno."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (place, shapes) in tensors.items():
        begin, end = end, end + place.nbytes
        dtype = _DTYPE_NAMES[place.dtype]
        header[name] = {"dtype": dtype, "shape": shapes[0], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    chunks = (x.place.cpu().contiguous().view(-1).view(torch.uint8) for x in tensors.values())
    _write(path, (len(text).to_bytes(8, "little"), text), (x.numpy().data for x in chunks))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    _write(path, [json.dumps(content, indent=2).encode()])


def _write(path: Path, *chunks: Iterable[bytes | memoryview]) -> None:
    with path.open("wb") as file:
        for group in chunks:
            for chunk in group:
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _write_together(folder: Path, files: Mapping[str, Callable[[Path], None]]) -> None:
    """Write all files under passing names, then rename them in order; or leave none."""
    others = {path.name for path in folder.glob("*.safetensors")} - files.keys()
    others |= {INDEX_NAME} - files.keys() if (folder / INDEX_NAME).exists() else set()
    if others:
        raise ValueError(
            f"save_checkpoint: {folder} holds other weights ({_listed(sorted(others))}); "
            "choose an empty folder"
        )
    parts = {name: folder / f".{name}.{os.getpid()}.part" for name in files}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, write in files.items():
            write(parts[name])
        for name, part in parts.items():
            part.replace(folder / name)
    except OSError as error:
        raise RuntimeError(
            f"save_checkpoint: cannot write to {folder}: {error.strerror}; nothing was left there"
        ) from error
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
