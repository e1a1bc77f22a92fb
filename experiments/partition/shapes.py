"""What OmniBal (Yao et al. 2025, "OmniBal: Towards Fast Instruction-Tuning for Vision-Language Models via Omniverse
Computation Balance") published of its partition: figures alone."""

from dataclasses import dataclass, replace

from dhp.plan.count.row_bytes import NONE
from dhp.plan.cut.units import Saved, StageLink, Unit
from experiments.pair import TEXT, VISION

BMP_LAYERS = (22, 23, 24, 24)  # of InternViT 6B + InternLM2 20B


@dataclass(frozen=True)
class Columns:
    """Of one method: variances of stages' parameters, layers and forward times, hand-overs beside the first method's
    (MB), days of a GPU."""

    parameters: float
    layers: float
    forward: float
    hand_overs: float
    days: float


COLUMNS = {
    "parameters": Columns(0.03, 13.4, 93.6, 0.0, 42.2), "layers": Columns(0.64, 1.2, 20.1, 8.2, 30.6),
    "profile": Columns(0.85, 2.1, 6.5, 16.6, 30.9), "bmp": Columns(0.83, 1.5, 12.2, -21.0, 29.0),
}  # fmt: skip

# GB, by stage of the same model, cut as BMP has it: everything recomputed, then what recompute was left out for.
FREE = (58.2, 56.2, 32.5, 32.7)
FREE_AT_LAST = (12.3, 21.7, 24.7, 30.0)

# By model: layers a stage, and how many of them recompute.
STAGES = {
    "InternViT 6B + Llama3 8B": ((16, 17, 20, 24), (8, 7, 10, 24)),
    "InternViT 6B + InternLM2 20B": (BMP_LAYERS, (0, 0, 0, 0)),
    "InternViT 6B + Yi 34B": ((28, 29, 24, 24), (3, 2, 0, 0)),
    "InternViT 6B + Llama3 70B": ((22, 23, 13, 14, 14, 14, 13, 12), (11, 12, 8, 5, 3, 2, 0, 0)),
    "InternViT 6B + Qwen1.5 110B": ((21, 22, 13, 13, 14, 14, 14, 14), (6, 9, 1, 3, 0, 0, 0, 0)),
    "EVA 1B + InternLM2 20B": ((43, 16, 15, 14), (0, 0, 0, 0)),
    "EVA 4B + InternLM2 20B": ((39, 22, 21, 20), (10, 8, 1, 3)),
    "EVA 8B + InternLM2 20B": ((17, 18, 23, 22), (5, 5, 8, 10)),
    "EVA 18B + InternLM2 20B": ((18, 19, 25, 34), (2, 2, 0, 0)),
}


TILES, TOKENS = 9, 4096  # of a micro-batch: pictures' tiles and the decoder's tokens, as OmniBal packs them
VALUE = 2  # bytes
MERGED = 4  # values of neighbouring patches, which the projector makes one token of
LINK = StageLink(bytes_s=22e9, latency_s=30e-6)  # between the nodes of two stages
SAMPLES = 4  # of a pack: a token's attention spans half of its own
PRODUCTS, ATTENTION, MEMORY, REDUCED = 193e12, 172e12, 1.63e12, 200e9  # operations a second, then bytes a second


@dataclass(frozen=True)
class Tower:
    """layers that are used; hidden and inner: widths; rows: of a tile."""

    layers: int
    hidden: int
    inner: int
    rows: int = 1025

    @property
    def parameters(self) -> int:
        """Of a layer."""
        return 4 * self.hidden**2 + 2 * self.hidden * self.inner


@dataclass(frozen=True)
class Decoder:
    """heads, groups: of queries, and of keys and values. words: of the vocabulary."""

    layers: int
    hidden: int
    inner: int
    heads: int
    groups: int
    words: int

    @property
    def keys(self) -> int:
        """Width of the keys."""
        return self.hidden // self.heads * self.groups

    @property
    def parameters(self) -> int:
        """Of a layer."""
        return 2 * self.hidden**2 + 2 * self.hidden * self.keys + 3 * self.hidden * self.inner

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.words * self.hidden


@dataclass(frozen=True)
class Model:
    """Both parts with the published layout. factor: of a tower layer's seconds. frozen: the part that is not
    trained."""

    name: str
    tower: Tower
    decoder: Decoder
    tensor: int
    stages: int
    data: int
    factor: float
    frozen: str = ""


INTERNVIT = Tower(45, 3200, 12800)
EVA = {"1B": Tower(40, 1408, 6144), "4B": Tower(54, 1792, 15360), "8B": Tower(32, 4096, 20480),
       "18B": Tower(48, 5120, 25600)}  # fmt: skip
LLAMA3_8B = Decoder(32, 4096, 14336, 32, 8, 128256)
INTERNLM2_20B = Decoder(48, 6144, 16384, 48, 8, 92553)
YI_34B = Decoder(60, 7168, 20480, 56, 8, 64000)
LLAMA3_70B = Decoder(80, 8192, 28672, 64, 8, 128256)
QWEN_110B = Decoder(80, 8192, 49152, 64, 8, 152064)
INTERNVIT_FACTOR, EVA_FACTOR = 1.35, 1.0

MODELS = (
    Model("InternViT 6B + Llama3 8B", INTERNVIT, LLAMA3_8B, 1, 4, 8, INTERNVIT_FACTOR),
    Model("InternViT 6B + InternLM2 20B", INTERNVIT, INTERNLM2_20B, 2, 4, 4, INTERNVIT_FACTOR),
    Model("InternViT 6B + Yi 34B", INTERNVIT, YI_34B, 4, 4, 2, INTERNVIT_FACTOR),
    Model("InternViT 6B + Llama3 70B", INTERNVIT, LLAMA3_70B, 4, 8, 2, INTERNVIT_FACTOR),
    Model("InternViT 6B + Qwen1.5 110B", INTERNVIT, QWEN_110B, 8, 8, 1, INTERNVIT_FACTOR),
    Model("EVA 1B + InternLM2 20B", EVA["1B"], INTERNLM2_20B, 2, 4, 4, EVA_FACTOR),
    Model("EVA 4B + InternLM2 20B", EVA["4B"], INTERNLM2_20B, 2, 4, 4, EVA_FACTOR),
    Model("EVA 8B + InternLM2 20B", EVA["8B"], INTERNLM2_20B, 2, 4, 4, EVA_FACTOR),
    Model("EVA 18B + InternLM2 20B", EVA["18B"], INTERNLM2_20B, 4, 4, 4, EVA_FACTOR),
)


def model_named(name: str, frozen: str = "") -> Model:
    """One of MODELS."""
    return replace(next(model for model in MODELS if model.name == name), frozen=frozen)


def units_of(model: Model) -> tuple[Unit, ...]:
    """The tower's layers and the projector, then embedding, layers and head, all on one tensor rank."""
    vision_trains, text_trains = model.frozen != VISION, model.frozen != TEXT
    tower, decoder, rows = model.tower, model.decoder, TILES * model.tower.rows
    passed = rows // MERGED  # tokens that the projector makes
    projector = MERGED * tower.hidden * decoder.hidden + decoder.hidden**2
    own = [
        *(_tower_layer(model, at) for at in range(tower.layers)),
        Unit("projector", VISION, 0, 2 * projector * passed / PRODUCTS, 0.0, projector, 0.0,
             {NONE: Saved(2 * VALUE * passed * decoder.hidden)}, VALUE * passed * decoder.hidden),
    ]  # fmt: skip
    own[-2] = replace(own[-2], cut="never")
    embedding = Unit("embedding", TEXT, 0, 0.0, 0.0, decoder.embedding, cut="never")
    text = [embedding, *(_decoder_layer(model, at) for at in range(decoder.layers)), _head(model)]
    text[-2] = replace(text[-2], cut="never")
    backs = {VISION: 2.0 * vision_trains, TEXT: 2.0 if text_trains else 1.0 * vision_trains}
    trains = {VISION: vision_trains, TEXT: text_trains}
    return tuple(_finished(unit, model, backs[unit.part], trains[unit.part]) for unit in [*own, *text])


def _tower_layer(model: Model, at: int) -> Unit:
    tower, tensor = model.tower, model.tensor
    rows = TILES * tower.rows
    operations = 2 * tower.parameters * rows / PRODUCTS + 4 * rows * tower.rows * tower.hidden / ATTENTION
    moved = rows * (20 * tower.hidden + 6 * tower.inner / tensor) / MEMORY
    seconds = operations / tensor + moved + _reduced(rows * tower.hidden, tensor)
    saved = _choices(rows * tower.hidden * (8 + 24 / tensor), VALUE * rows * tower.hidden, model.factor * seconds)
    return Unit(f"vision {at}", VISION, 1, model.factor * seconds, 0.0, tower.parameters, 0.0, saved,
                VALUE * rows * tower.hidden)  # fmt: skip


def _decoder_layer(model: Model, at: int) -> Unit:
    decoder, tensor = model.decoder, model.tensor
    operations = 2 * decoder.parameters * TOKENS / PRODUCTS
    operations += 4 * TOKENS * (TOKENS / SAMPLES / 2) * decoder.hidden / ATTENTION
    moved = TOKENS * (20 * decoder.hidden + 6 * decoder.inner / tensor) / MEMORY
    seconds = operations / tensor + moved + _reduced(TOKENS * decoder.hidden, tensor)
    held = 16 * decoder.hidden + (8 * decoder.hidden + 8 * decoder.keys + 8 * decoder.inner) / tensor
    saved = _choices(TOKENS * held, VALUE * TOKENS * decoder.hidden, seconds)
    return Unit(f"text {at}", TEXT, 1, seconds, 0.0, decoder.parameters, 0.0, saved, VALUE * TOKENS * decoder.hidden)


def _head(model: Model) -> Unit:
    scores = TOKENS * model.decoder.words / model.tensor
    seconds = 2 * scores * model.decoder.hidden / PRODUCTS + 14 * scores / MEMORY
    return Unit("head", TEXT, 0, seconds, 0.0, model.decoder.embedding, 0.0, {NONE: Saved(6 * scores)})


def _reduced(values: float, tensor: int) -> float:
    return 2 * 2 * VALUE * values * (tensor - 1) / tensor / REDUCED


def _choices(held: float, recomputed: float, seconds: float) -> dict[str, Saved]:
    return {NONE: Saved(held), "all": Saved(recomputed, held - recomputed, seconds)}


def _finished(unit: Unit, model: Model, back: float, trains: bool) -> Unit:
    """With what depends on training. back: a backward's seconds by its forward's; 0: nothing is kept for it."""
    whole = unit.name == "projector"
    own = unit.parameters if whole else unit.parameters / model.tensor
    states = own * ((4 + 12 / model.data) if trains else 2)
    saved = unit.saved if back else {NONE: Saved(0.0)}
    return replace(unit, backward_s=back * unit.forward_s, states_bytes=states, saved=saved, trains=trains)
