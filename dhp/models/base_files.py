"""Weight files of the model that a run began with, and those of its export, which are like them."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dhp.core.errors import ModelError
from dhp.core.files import write_whole
from dhp.models.pretrained import check_weight_files

KEYS = "base_keys.json"  # in a checkpoint: what the files of the model hold that its run began with
RECORD = "dhp_export.json"  # what an export took from its base, and what it could not take
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
BASE, WIDER = "base", "wider"  # number formats of an export: those of the base's files; or, where wider, the weights'
FORMATS = (BASE, WIDER, "float32", "bfloat16", "float16")
LARGEST_FILE = 50 * 10**9  # bytes, where no base says another; the library's own bound
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. kind: its number format, as safetensors names it."""

    file: Path
    kind: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def dtype(self) -> torch.dtype | None:
        """None for another than floating numbers of 16 bits or more."""
        return _FLOATS.get(self.kind)


def find_directory(model_name: str) -> Path | None:
    """The directory of a model, or of a hub id's newest copy in the local cache; None: there is none."""
    if Path(model_name).expanduser().is_dir():
        return Path(model_name).expanduser()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_name, local_files_only=True))
    except (OSError, ValueError):  # no copy there, or no hub id at all
        return None


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """What the safetensors files of a model's folder hold, by key; empty where it has none. Raises ModelError for files
    that cannot be read, and for an index that leads elsewhere."""
    check_weight_files(folder)
    index, found = folder / INDEX, dict[str, StoredTensor]()
    if index.is_file():
        names = dict.fromkeys(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    else:
        names = dict.fromkeys([WEIGHTS] if (folder / WEIGHTS).is_file() else [])
    for file in map(folder.joinpath, names):
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118
                    own = tensors.get_slice(key)
                    shape = tuple(own.get_shape())
                    nbytes = tensors.get_tensor(key).nbytes
                    found[key] = StoredTensor(file, own.get_dtype(), shape, nbytes)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} cannot be read ({error}). Copy the model again") from error
    return found


def describe_tensors(folder: Path | None) -> str:
    """What `stored_tensors` finds, for a file `KEYS`; "": nothing that can be read."""
    try:
        stored = {} if folder is None else stored_tensors(folder)
    except ModelError:  # ranks that read these files say so, or never read them
        stored = {}
    named = {key: [one.file.name, one.kind, list(one.shape), one.nbytes] for key, one in stored.items()}
    return json.dumps(named) if named else ""


def described_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The same of a file `KEYS` in `folder`, where the tensors themselves are not; empty where there is no such file.
    Raises ModelError for one of another form."""
    if not (folder / KEYS).is_file():
        return {}
    try:
        rows = json.loads((folder / KEYS).read_text(encoding="utf-8")).items()
        found = {k: StoredTensor(folder / n, str(kind), tuple(map(int, s)), int(b)) for k, (n, kind, s, b) in rows}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{folder / KEYS} is not what a checkpoint writes ({error!r}). Use another checkpoint"
        ) from error
    if any(one.file.parent != folder or one.file.suffix != ".safetensors" for one in found.values()):
        raise ModelError(f"{folder / KEYS} names files outside of its folder. Use another checkpoint")
    return found


def read_stored(key: str, stored: StoredTensor) -> Tensor:
    """The tensor, mapped from its file."""
    with safe_open(stored.file, framework="pt") as tensors:
        found: Tensor = tensors.get_tensor(key)
        return found


@dataclass(frozen=True)
class Unloaded:
    """Keys of a base that no weight of an export is written under. carried: those that the model's class does not load;
    changed: those of them that do not fit any more; gone: those whose file is not there; tied: those of weights that
    are written under another key."""

    carried: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()

    def tell(self) -> str:
        """In words; "": there are none."""
        notes = []
        if self.carried:
            notes.append(
                f"{_count(self.carried)} that the model's class does not load went along byte for byte, untrained: "
                f"{_groups(self.carried)}" + ("; " + _DRAFTS if any("mtp" in key for key in self.carried) else "")
            )
        if self.changed:
            notes.append(
                f"left out: {_count(self.changed)}, whose shapes were those before the vocabulary or a width "
                f"changed: {_groups(self.changed)}; what reads them has to be trained anew"
            )
        if self.gone:
            notes.append(
                f"left out: {_count(self.gone)} that the model's class does not load, as the base is not there: "
                f"{_groups(self.gone)}; what reads them, as servers that draft by mtp, finds none"
            )
        if self.tied:
            verb = "is" if len(self.tied) == 1 else "are"
            notes.append(f"{_count(self.tied)} {verb} written once, as config.json ties them: {_groups(self.tied)}")
        return "; ".join(notes)


_DRAFTS = "layers that predict further tokens (mtp) follow the model as it was before, and draft less well now"


def find_unloaded(
    stored: Mapping[str, StoredTensor],
    published: Mapping[str, Sequence[int]],
    loaded: Mapping[str, str],
    held: Collection[str],
) -> Unloaded:
    """What becomes of the keys that `published`, of an export's shapes by key, lacks. loaded: by key, the weight that
    the library reads it into. held: weights of the model."""
    written = {loaded[key] for key in published}
    lacking = [key for key in stored if key not in published and loaded[key] not in written]
    unknown = [key for key in lacking if loaded[key] not in held]
    before = {
        size
        for key, shape in published.items()
        if key in stored
        for size, now in zip(stored[key].shape, shape, strict=False)
        if size != now
    }
    changed = tuple(key for key in unknown if before.intersection(stored[key].shape))
    rest = [key for key in unknown if key not in changed]
    carried = tuple(key for key in rest if stored[key].file.is_file())
    gone = tuple(key for key in rest if not stored[key].file.is_file())
    return Unloaded(carried, changed, gone, tuple(key for key in lacking if loaded[key] in held))


def find_formats(
    stored: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor], loaded: Mapping[str, str], dtype: str
) -> dict[str, torch.dtype]:
    """The number format in which each tensor of an export is written. stored: of its base. tensors: by key. loaded: by
    key, the weight that it is. dtype: of `FORMATS`. A key that the base lacks has that of most of its numbers."""
    sizes: Counter[torch.dtype] = Counter()
    by_weight = dict[str, torch.dtype]()
    for key, one in stored.items():
        if one.dtype is not None:
            sizes[one.dtype] += one.nbytes // one.dtype.itemsize
            by_weight[loaded[key]] = one.dtype
    most = sizes.most_common(1)[0][0] if sizes else None
    found = {}
    for key, tensor in tensors.items():
        own = by_weight.get(loaded[key], most) if key not in stored else stored[key].dtype
        if dtype not in (BASE, WIDER):
            own = getattr(torch, dtype)
        if own is None or not tensor.is_floating_point():
            own = tensor.dtype
        found[key] = torch.promote_types(own, tensor.dtype) if dtype == WIDER else own
    return found


def place_tensors(sizes: Mapping[str, int], stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    """The file of each tensor, by key: the base's where it has all of these keys, else files of at most the size of
    its largest. sizes: bytes by key."""
    if sizes.keys() <= stored.keys():
        return {key: stored[key].file.name for key in sizes}
    held: Counter[str] = Counter()
    for one in stored.values():
        held[one.file.name] += one.nbytes
    most, numbers, filled, number = max(held.values(), default=LARGEST_FILE), dict[str, int](), 0, 1
    for key, size in sizes.items():
        if filled and filled + size > most:
            number, filled = number + 1, 0
        numbers[key], filled = number, filled + size
    names = {n: WEIGHTS if number == 1 else f"model-{n:05d}-of-{number:05d}.safetensors" for n in range(1, number + 1)}
    return {key: names[n] for key, n in numbers.items()}


def write_files(
    out_dir: Path, places: Mapping[str, str], tensor_of: Callable[[str], Tensor], parameters: int
) -> dict[torch.dtype, int]:
    """Write tensors file by file, with an index where there are several, and read each back; how many numbers have
    which format. places: of each key. parameters: of the model. Raises ModelError for a file that reads otherwise."""
    numbers: Counter[torch.dtype] = Counter()
    total = 0
    for name in dict.fromkeys(places.values()):
        tensors = {key: tensor_of(key).contiguous() for key, place in places.items() if place == name}
        save_file(tensors, out_dir / name, metadata={"format": "pt"})
        with safe_open(out_dir / name, framework="pt") as written:
            if set(written.keys()) != tensors.keys():
                raise ModelError(f"{out_dir / name} holds other keys than were written. Is its disk sound?")
            for key, tensor in tensors.items():
                if not torch.equal(_bytes(written.get_tensor(key)), _bytes(tensor)):
                    raise ModelError(f"{out_dir / name}: {key} reads otherwise than it was written. Is its disk sound?")
                total += tensor.nbytes
                if tensor.is_floating_point():
                    numbers[tensor.dtype] += tensor.numel()
    if set(places.values()) != {WEIGHTS}:
        about = {"total_parameters": parameters, "total_size": total}
        index = {"metadata": about, "weight_map": dict(sorted(places.items()))}
        write_whole(out_dir / INDEX, json.dumps(index, indent=2) + "\n")
    return dict(numbers)


def write_record(out_dir: Path, dtype: str, formats: Mapping[str, torch.dtype], unloaded: Unloaded) -> None:
    """Write `RECORD`: the keys of the base that came along or did not, and how many tensors have which format."""
    counted = Counter(str(one).removeprefix("torch.") for one in formats.values())
    about = {"dtype": dtype, "tensors": dict(sorted(counted.items()))}
    keys = {"carried": unloaded.carried, "left_out": [*unloaded.changed, *unloaded.gone], "tied": unloaded.tied}
    write_whole(out_dir / RECORD, json.dumps(about | keys, indent=2) + "\n")


def round_to(key: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a number format. Raises ModelError where a number is too large for it."""
    cast = tensor.to(dtype)
    if cast is not tensor and tensor.is_floating_point() and not torch.equal(cast.isfinite(), tensor.isfinite()):
        raise ModelError(f"{key} has numbers that are too large for {dtype}: export with --dtype bfloat16 or float32")
    return cast


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _count(keys: Sequence[str]) -> str:
    return f"{len(keys)} key{'s' * (len(keys) != 1)} of the base"


def _groups(keys: Sequence[str]) -> str:
    """`mtp.layers.* (12), a.weight`."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        groups.setdefault(key.partition(".")[0], []).append(key)
    return ", ".join(of[0] if len(of) == 1 else f"{name}.* ({len(of)})" for name, of in groups.items())
