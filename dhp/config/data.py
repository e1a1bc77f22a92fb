"""The configuration's section about samples and how they are read."""

from dataclasses import dataclass, field
from typing import Optional

from dhp.config.roles import BESIDE, FREE, HELD, key


@dataclass
class DatasetEntry:
    """The files of one dataset, and how they are read."""

    annotation_path: str = key("", resume=BESIDE)
    """A .json file (a list of samples), a .jsonl file (a sample a line), a .parquet file, a WebDataset .tar shard; or a
    folder of .parquet or .tar files, or one that Hugging Face's `Dataset.save_to_disk` wrote. A pattern as
    shards-{000..127}.tar gives several. All but the last may be behind an address: s3://, gs://, hf://, http://."""

    data_path: str = key("", resume=BESIDE)
    """Directory that the paths of images and videos start from, or the address of one; none may leave it. Empty: no
    such files."""

    format: str = "auto"
    """How conversations are written: llava | sharegpt | openai | alpaca | swift | auto (found from the first samples).
    Or text: a row is {text: …} for continued pre-training, without a chat template; all its tokens are learned, and
    those beyond max_tokens are cut off."""

    columns: dict[str, str] = field(default_factory=dict)
    """Keys of these samples that have other names than the format's: its name on the left, this file's on the right, as
    {messages: dialogue, images: photos}. role, content, from and value are those of each turn."""

    keep_newlines: bool = False
    """Keep the newline between a tag (<image>) and the text beside it, as LLaMA-Factory and ms-swift do. False: it
    belongs to the tag, as in Qwen's own script."""

    weight: float = key(1.0, resume=BESIDE)
    """How often an epoch shows each sample, on average: 2 is twice, 0.5 each time another half."""


@dataclass
class LimitsConfig:
    """How much a row may hold where data.balance makes packs; a sample beyond it has a row of its own."""

    rule: str = "mean"
    """Where the limits below that are null come from: mean (as they say) | paper (OmniBal's: text is the longest
    sample, vision that times image tokens / tokens of all samples, full_text is text − 128, full_vision is vision)."""

    text: Optional[int] = None
    """Tokens, those of images included (Q_t of ISF). Null: training.micro_batch_size × the mean sample's."""

    vision: Optional[int] = None
    """Tokens of images and videos (Q_v); with balanced the mean of a step's rows. Null: as text, with isf twice that,
    since images go to any vision rank and it is text that must be even."""

    full_text: Optional[int] = None
    """isf: tokens from which on a row is kept (Q'_t). Null: text less 1/32 of it, 128 at most."""

    full_vision: Optional[int] = None
    """isf: image tokens from which on a row is kept (Q'_v). Null: vision less 1/32 of it."""


@dataclass
class DataConfig:
    """Which samples are read, and how."""

    datasets: list[str] = key(factory=list, resume=HELD)
    """Names from data_registry, read as one dataset in this order. `name%50`: the same random half in each epoch."""

    eval_datasets: list[str] = key(factory=list, resume=BESIDE)
    """Names from data_registry that the loss is measured on and nothing is trained on, every training.eval_steps and at
    the end. Each sample once, in the file's order; `name%50` is always the same half. Empty: none."""

    data_registry: dict[str, DatasetEntry] = key(factory=dict, resume=BESIDE)
    """Known datasets, by a name of your choice."""

    system_prompt: Optional[str] = None
    """System text of samples that have none. Empty: an empty one, in the place of the chat template's own. Null: none
    is added, and the template writes its own, if it has one."""

    chat_template: Optional[str] = None
    """A file with the Jinja template that conversations are written by (chat_template.jinja of some model, for
    example); an export takes it along. Null: the model's own."""

    learn_empty_thoughts: bool = key(False, advanced=True)
    """Learn the empty block of thoughts (<think></think>) too that a chat template writes before an answer without any:
    the model then learns not to think. False: the block is read, and not learned."""

    learn_newline: bool = False
    """Learn the newline too that a template writes behind an answer's end token, as LLaMA-Factory, ms-swift, TRL and
    Qwen's own script do. False: what ends an answer is learned last."""

    positions: str = "published"
    """Rotary positions of what is behind a video: published (behind its greatest position, as the models' makers train
    and serve them) | library (as the installed transformers has them, which from 5.3 on begins earlier for Qwen2-VL,
    Qwen2.5-VL and ERNIE 4.5 VL)."""

    min_pixels: Optional[int] = None
    """Smallest area of an image, pixels; smaller ones are enlarged. Null: the model's own setting."""

    max_pixels: Optional[int] = None
    """Largest area of an image, pixels; larger ones are reduced. Null: the model's own setting."""

    reduced_jpeg: bool = False
    """Decode a JPEG file at a half, a quarter or an eighth of its size where that is at least 1.5 times what the model
    sees of it: large photographs are read faster, and pixels differ a little from those that serving would show
    (docs/data.md). For models that see a picture in about its own size, as Qwen's; refused for others."""

    max_tiles: Optional[int] = None
    """Most tiles that an image is cut into, of models that see images as tiles of one size, as InternVL; a thumbnail
    is not counted. Null: the model's own setting."""

    packing: bool = True
    """Lay the samples of a micro-batch one behind another in one row, without padding, each seeing itself only. False:
    a row a sample, padded to the longest."""

    balance: str = key("random", resume=HELD)
    """Which samples share a row and which rows a step, so that devices do not wait for one another: random
    (training.micro_batch_size samples a row) | isf (iterative sampling and filtering: packs of constant vision and
    text) | balanced (packs of constant text, steps of constant vision), of about so many samples in the mean; or one
    that a module of plugins registers. All but random need every sample's length, measured once from file headers and
    kept in cache_dir."""

    limits: LimitsConfig = key(factory=LimitsConfig, resume=HELD)

    locality_slack: float = key(0.01, resume=BESIDE, advanced=True)
    """Images are encoded on the device, or else the node, of the text replica that needs them, as far as the busiest
    vision replica gets no more than this fraction of work beyond the most even way. 0: only where evenness costs
    nothing."""

    balance_window: Optional[int] = key(None, resume=HELD)
    """Samples of a random order that are balanced together, each window measured while the one before it is trained on:
    for datasets too large to be measured before the first step; needs training.max_steps. Null: an epoch."""

    isf_passes: int = key(10, resume=HELD, advanced=True)
    """isf: most passes of sampling and filtering; the packs of the last one are kept, however full they are."""

    long_tokens: Optional[int] = key(None, resume=HELD)
    """Tokens from which on a sample counts as long: a step then has long samples or shorter ones, each kind balanced by
    itself, so that text actors that share rows work together on long ones and apart on short ones. Needs data.balance
    other than random. Null: rows mix them."""

    fullest_first: Optional[bool] = key(None, resume=HELD)
    """Begin the first epoch with its fullest steps, that of the longest row and that with most image tokens, so that
    recompute=auto measures the most that a run will need; with balance_window, those of the first window. All else
    stays in order. Needs data.balance other than random. Null: true where a part that is trained has recompute=auto and
    data.balance is not random."""

    cache_dir: Optional[str] = key(None, resume=BESIDE)
    """Directory of measured lengths, of copies of files from addresses and of compiled graphs, for all runs. Null: dhp
    in $XDG_CACHE_HOME or ~/.cache."""

    cache_gib: Optional[float] = key(50.0, resume=BESIDE, advanced=True)
    """GiB of copies in cache_dir of annotations and media that are read from addresses (s3://, gs://, hf://, http://);
    beyond it, those go that were not used for longest. Null: no bound."""

    fetch_tries: int = key(5, resume=BESIDE, advanced=True)
    """Tries of a request to such an address, with growing pauses between them, before its file counts as unreadable."""

    fetch_s: float = key(300.0, resume=BESIDE, advanced=True)
    """Seconds that all tries of such a request may take, one large file included."""

    cache_features: Optional[str] = key(None, resume=BESIDE)
    """Directory in which what a frozen tower makes of each picture is kept, for all runs: a picture that is there is
    neither decoded nor encoded. Needs training.frozen=[vision,projector]. On several nodes: one that all of them share.
    Null: nothing is kept."""

    cache_features_gib: Optional[float] = key(None, resume=BESIDE, advanced=True)
    """GiB of files in cache_features beyond which a run adds none; nothing is ever removed. Null: no bound."""

    num_workers: int = key(0, resume=BESIDE)
    """Processes that read, decode and preprocess, each a step at a time. 0: the dataset actor does it. The run says how
    many would keep up when training waits for data."""

    prefetch: Optional[int] = key(None, resume=BESIDE)
    """Steps that are read ahead of the one submitted last. Null: one for each worker."""

    shuffle: bool = key(True, resume=HELD)
    """New order of the samples in each epoch, by seed. False: the annotation file's order."""

    max_tokens: Optional[int] = None
    """Longest sample, tokens with those of its images; a longer one is defective (on_bad_sample), or of the format text
    cut. Null: any length."""

    video_fps: float = 2.0
    """Frames a second that are taken of a video; at least 4 of each, where it has as many."""

    video_max_frames: int = 768
    """Most frames that are taken of a video, spread evenly."""

    video_max_pixels: Optional[int] = None
    """Largest area of a video's frame, pixels; larger ones are reduced. Null: as max_pixels."""

    pin_memory: bool = key(True, resume=FREE)
    """On GPUs, vision and sound actors fetch the next step's patches into page-locked memory while a step runs, so that
    their copy to the GPU waits for nothing and overlaps with the GPU's work. It holds one step's patches."""

    video_whole_frames: Optional[int] = key(256, resume=BESIDE)
    """Most frames of a video that one process decodes whole. Of a longer one each vision actor's share is decoded
    apart, from the key frames before it, by any of num_workers, so no process holds it all. Null: every
    video is decoded whole."""

    allow_http: bool = key(False, resume=BESIDE)
    """Fetch images and videos whose path is an http or https address, each time they are needed. False: refused."""

    on_bad_sample: str = key("error", resume=FREE)
    """What a missing or broken image or a malformed sample does: error (the run ends) | skip (named and counted)."""
