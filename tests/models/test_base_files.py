"""An export has the keys, number formats and files of the model that training began with."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dhp.core.errors import ModelError
from dhp.core.torch_private import persistent_buffers
from dhp.models import export
from dhp.models.base_files import RECORD, WIDER, StoredTensor, find_unloaded, place_tensors, stored_tensors
from dhp.models.export import save_whole
from dhp.models.file_keys import in_file_form, loaded_names, weights_to_save
from dhp.models.load import load_part, model_class
from dhp.models.registry import load_family
from dhp.tiny.tiny_model import make_family
from tests.helpers.tiny_families import FAMILIES, save_family

EXACT = "A_log"  # kept in float32 among bfloat16
DRAFTS = {"mtp.layers.0.mlp.up_proj.weight": torch.full((3, 5), 0.1), "mtp.norm.weight": torch.arange(5).float()}
MATRIX = "model.language_model.layers.0.mlp.up_proj.weight"


def read(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118
    return found


def write(folder: Path, tensors: dict[str, Tensor], files: int) -> None:
    """The tensors of a model in several files, every so many in one."""
    (folder / "model.safetensors").unlink()
    names = [f"model-{n + 1:05d}-of-{files:05d}.safetensors" for n in range(files)]
    places = {key: names[number % files] for number, key in enumerate(tensors)}
    for name in names:
        save_file({key: one for key, one in tensors.items() if places[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As published: bfloat16 with some float32, layers that predict further tokens, three files."""
    folder = make_family("qwen3_5", tmp_path_factory.mktemp("base") / "model")
    tensors = {key: one if EXACT in key else one.bfloat16() for key, one in read(folder).items()}
    assert any(EXACT in key for key in tensors)
    write(folder, tensors | {key: one.to(torch.bfloat16) for key, one in DRAFTS.items()}, files=3)
    return folder


def weights_of(base: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    model = model_class(str(base)).from_pretrained(base, dtype=torch.float32)
    held = {name: one.detach() for name, one in model.named_parameters()} | persistent_buffers(model)
    return {name: one.to(dtype) if one.is_floating_point() else one for name, one in held.items()}


def places(folder: Path) -> dict[str, str]:
    return dict(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_an_untrained_model_is_exported_byte_for_byte_into_the_same_files(
    base: Path, tmp_path: Path, held: torch.dtype
) -> None:
    """Held in 16 bits, a float32 weight of the base that was not trained comes back unrounded."""
    notes = save_whole(base, weights_of(base, held), tmp_path, base)
    before, after = read(base), read(tmp_path)
    assert before.keys() == after.keys() and not [key for key in before if not same(before[key], after[key])]
    assert any(not torch.equal(one, one.bfloat16().float()) for key, one in before.items() if EXACT in key)
    assert places(base) == places(tmp_path)
    about = json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]
    assert about["total_size"] == sum(one.nbytes for one in after.values())
    assert notes.startswith(
        "2 keys of the base that the model's class does not load went along byte for byte, untrained"
    )
    assert "mtp.* (2); layers that predict further tokens (mtp) follow the model as it was" in notes
    record = json.loads((tmp_path / RECORD).read_text())
    assert sorted(record["carried"]) == sorted(DRAFTS) and record["left_out"] == record["tied"] == []
    counted = sum(one.dtype is torch.float32 for one in before.values())
    assert record["tensors"] == {"bfloat16": len(before) - len(DRAFTS) - counted, "float32": counted}


def test_what_was_trained_is_written_in_the_bases_formats(base: Path, tmp_path: Path) -> None:
    weights = {name: one + 0.3 for name, one in weights_of(base, torch.float32).items()}
    save_whole(base, weights, tmp_path, base)
    after, before = read(tmp_path), read(base)
    assert {key: one.dtype for key, one in after.items()} == {key: one.dtype for key, one in before.items()}
    assert torch.equal(after[MATRIX], weights[MATRIX].bfloat16())
    exact = next(key for key in after if EXACT in key)
    assert torch.equal(after[exact], weights[exact])
    assert all(same(after[key], before[key]) for key in DRAFTS)
    loaded = model_class(str(tmp_path)).from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(loaded.get_parameter(MATRIX), weights[MATRIX].bfloat16().float())


def test_a_float32_tensor_of_a_run_in_16_bits_is_its_master_weight(base: Path, tmp_path: Path) -> None:
    masters = {name: one + 0.3 for name, one in weights_of(base, torch.float32).items()}
    weights = {name: one.bfloat16() for name, one in masters.items()}
    asked: list[str] = []
    save_whole(base, weights, tmp_path, base, exact=lambda name: asked.append(name) or masters[name])
    exact = [key for key in read(base) if EXACT in key]
    assert sorted(asked) == sorted(exact)
    assert all(torch.equal(read(tmp_path)[key], masters[key]) for key in exact)
    assert not torch.equal(masters[exact[0]], weights[exact[0]].float())


@pytest.mark.parametrize(
    ("dtype", "wanted"), [("float32", torch.float32), ("bfloat16", torch.bfloat16), (WIDER, torch.float32)]
)
def test_another_format_is_that_of_all(base: Path, tmp_path: Path, dtype: str, wanted: torch.dtype) -> None:
    weights = weights_of(base, torch.float32)
    save_whole(base, weights, tmp_path, base, dtype)
    after = read(tmp_path)
    assert {one.dtype for key, one in after.items() if key not in DRAFTS} == {wanted}
    assert torch.equal(after[MATRIX], weights[MATRIX].to(wanted))
    assert all(after[key].dtype is torch.bfloat16 for key in DRAFTS) and places(tmp_path) == places(base)


def test_numbers_that_a_format_cannot_hold_are_an_error(base: Path, tmp_path: Path) -> None:
    weights = weights_of(base, torch.float32)
    weights[MATRIX] = weights[MATRIX] + 1e5
    with pytest.raises(ModelError, match=f"{MATRIX} has numbers that are too large for torch.float16: .*--dtype"):
        save_whole(base, weights, tmp_path, base, "float16")


def test_without_a_base_formats_are_those_of_the_weights(base: Path, tmp_path: Path) -> None:
    assert save_whole(base, weights_of(base, torch.float32), tmp_path) == ""
    after = read(tmp_path)
    assert {one.dtype for one in after.values()} == {torch.float32} and not after.keys() & DRAFTS.keys()
    assert not (tmp_path / RECORD).exists() and (tmp_path / "model.safetensors").is_file()


def test_other_keys_than_the_bases_go_into_files_no_larger_than_its_largest() -> None:
    stored = {key: StoredTensor(Path(file), "I8", (1,), size) for key, file, size in (("a", "1", 6), ("b", "2", 8))}
    assert place_tensors({"b": 8, "a": 6}, stored) == {"b": "2", "a": "1"}
    files = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    wanted = {"a": files[0], "x": files[0], "y": files[1], "z": files[2]}
    assert place_tensors({"a": 4, "x": 4, "y": 1, "z": 9}, stored) == wanted
    assert place_tensors({"a": 4, "x": 4}, stored) == dict.fromkeys("ax", "model.safetensors")


def test_keys_that_no_longer_fit_are_named_and_left_out(base: Path) -> None:
    stored = stored_tensors(base)
    shapes = {key: one.shape for key, one in stored.items() if key not in DRAFTS}
    loaded = {key: key for key in stored}
    assert find_unloaded(stored, shapes, loaded, shapes).changed == ()
    name = "model.language_model.embed_tokens.weight"
    wider = shapes | {name: (shapes[name][0] + 2, shapes[name][1])}
    with_head = stored | {"mtp.head.weight": stored[name]}
    found = find_unloaded(with_head, wider, loaded | {"mtp.head.weight": "mtp.head.weight"}, shapes)
    assert found.changed == ("mtp.head.weight",) and sorted(found.carried) == sorted(DRAFTS)
    assert "left out: 1 key of the base, whose shapes were those before the vocabulary" in found.tell()


def test_a_tied_head_is_written_once_and_said(tmp_path: Path) -> None:
    base = make_family("llava", tmp_path / "base")
    tensors = read(base)
    head, embedding = (next(key for key in tensors if end in key) for end in ("lm_head", "embed_tokens"))
    tensors[head] = tensors[embedding].clone()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((base / "config.json").read_text())
    content["tie_word_embeddings"] = content["text_config"]["tie_word_embeddings"] = True
    (base / "config.json").write_text(json.dumps(content))
    notes = save_whole(base, weights_of(base, torch.float32), tmp_path / "out", base)
    assert notes == f"1 key of the base is written once, as config.json ties them: {head}"
    assert read(tmp_path / "out").keys() == tensors.keys() - {head}


def test_keys_of_another_form_are_not_carried_beside_what_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base has the names of modules, the export those of files: both would be read, the base's untrained."""
    base = make_family("llava", tmp_path / "base")
    weights = weights_of(base, torch.float32)
    assert not weights.keys() & read(base).keys()
    save_file({name: one.bfloat16() for name, one in weights.items()}, base / "model.safetensors", {"format": "pt"})
    assert save_whole(base, weights, tmp_path / "out", base) == ""
    after = read(tmp_path / "out")
    assert not after.keys() & weights.keys() and {one.dtype for one in after.values()} == {torch.bfloat16}
    monkeypatch.setattr(export, "loaded_names", lambda model, keys: {key: key for key in keys})
    assert f"{len(weights)} keys of the base" in save_whole(base, weights, tmp_path / "wrong", base)


@pytest.mark.parametrize("family", ["llava", "qwen3_5", "qwen3_vl_moe"])
def test_keys_of_files_are_those_of_save_pretrained(family: str, tmp_path: Path) -> None:
    model = model_class(str(make_family(family, tmp_path / "made"))).from_pretrained(tmp_path / "made")
    model.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    held = weights_to_save(model)
    ours = in_file_form(model, dict(held))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    loaded = loaded_names(model, [*theirs, "mtp.norm.weight"])
    assert loaded["mtp.norm.weight"] == "mtp.norm.weight"
    assert (ours.keys() != held.keys()) == (family == "llava")
    assert all(held[loaded[key]] is not None for key in theirs) and set(loaded.values()) >= held.keys()


@pytest.mark.families
@pytest.mark.parametrize("name", FAMILIES)
def test_of_no_family_a_key_is_lost_or_carried_that_the_model_loads(name: str, tmp_path: Path) -> None:
    base = Path(save_family(name, tmp_path / "base"))
    write(base, before := read(base), files=2)
    assert save_whole(base, weights_of(base, torch.float32), tmp_path / "out", base) == ""
    after = read(tmp_path / "out")
    assert before.keys() == after.keys() and not [key for key in before if not same(before[key], after[key])]
    assert places(base) == places(tmp_path / "out")


@pytest.mark.parametrize("part", ["vision", "text"])
def test_each_part_loads_beside_keys_that_the_class_ignores(base: Path, part: str) -> None:
    load_part(str(base), load_family(str(base)).outside(part), torch.float32)
