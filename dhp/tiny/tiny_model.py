"""Makes a tiny random model and the tiny run's data."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
)

from dhp.config.parts import read_datasets
from dhp.config.schema import Config
from dhp.core.errors import ConfigError, ModelError
from dhp.core.files import new_folder, write_whole
from dhp.core.process import say_line
from dhp.core.text import did_you_mean, nearest
from dhp.models.config_file import save_model, write_tokenizer_config
from dhp.models.pretrained import name_accelerator
from dhp.tiny.looks import LOOKS, Look, family_names
from dhp.tiny.tiny_families import FAMILIES

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TEMPLATE = """\
{%- if messages[0]['role'] != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part['type'] == 'video' -%}
{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else -%}
{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def make_tiny_model(folder: Path, corpus: Iterable[str], seed: int = 0) -> Path:
    """Write a randomly initialised model, its tokenizer and its image processor to `folder`; return it.

    corpus: texts to train the tokenizer on. The same corpus and seed give the same files. A folder that
    already holds a model is left as it is; one that holds anything else is a ModelError. The folder
    appears complete or not at all, also when several processes make it at once."""
    if not folder.exists():
        with new_folder(folder) as partial:
            _write(partial, corpus, seed)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} exists but holds no model (no config.json). Remove it or choose another folder")
    return folder


def make_tokenizer(corpus: Iterable[str], vocab_size: int = 1024) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer with Qwen's special tokens and the ChatML template above.

    vocab_size: entries at most, special tokens not counted; a small corpus gives fewer."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer = normalizers.NFC(), Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    trained = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(merge) for merge in trained["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_config(tokenizer: PreTrainedTokenizerBase) -> Qwen2_5_VLConfig:
    """Sizes that leave every kind of sharding something to do, at about a million parameters.

    8 query heads share 4 key-value heads; windows of 2 × 2 merged patches give even small pictures
    several; two of four vision blocks attend to the whole image."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    end, turn_end = ids["<|endoftext|>"], ids["<|im_end|>"]
    ends = {"bos_token_id": end, "eos_token_id": turn_end, "pad_token_id": end}
    text = {
        "vocab_size": (len(tokenizer) // 16 + 1) * 16,  # rows for every token, divisible by any tensor degree
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        **ends,
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "depth": 4,
        "num_heads": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 56,  # pixels: 4 × 4 patches
        "fullatt_block_indexes": [1, 3],
        "out_hidden_size": 128,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        **ends,
    )


def _write(folder: Path, corpus: Iterable[str], seed: int) -> None:
    tokenizer = make_tokenizer(corpus)
    config = tiny_config(tokenizer)
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        bos_token_id=config.text_config.bos_token_id,
        eos_token_id=config.text_config.eos_token_id,
        pad_token_id=config.text_config.pad_token_id,
    )
    name_accelerator()
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    write_tokenizer_config(folder)
    Qwen2VLImageProcessorPil(
        patch_size=14, temporal_patch_size=2, merge_size=2, min_pixels=56 * 56, max_pixels=168 * 168
    ).save_pretrained(folder)


POSITIONS = 4096
SPREAD = 0.2  # standard deviation of the decoder's weights: with the usual 0.02 a narrow one likes all tokens alike
VIDEO = "{%- elif part['type'] == 'video' -%}"
RATE, MEL_BINS = 16_000, 16  # samples a second of sound; of its spectrum
# What the tokenizer learns its words from; whatever else is written is spelled in bytes.
CORPUS = ("What is in the picture? What colour is the shape? A red square and 12 blue circles. Which one is it?",)


def make_family(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the model, its tokenizer and its processors to a new folder; return it. name: a model type.

    The same seed gives the same files. Raises ModelError for another name, with the nearest one, and for a folder that
    exists."""
    look = _look(name)
    if folder.exists():
        raise ModelError(f"{folder} exists; name a new directory")
    import torch
    import transformers
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    from dhp.models.config_file import save_model, write_tokenizer_config
    from dhp.models.pretrained import name_accelerator

    logging.disable_progress_bar()  # small files
    tokenizer = _tokenizer(look)
    config = _config(name, look, tokenizer)
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for matrix in (one for one in model.parameters() if one.ndim >= 2 and not one.any()):
                matrix.normal_(0, SPREAD)  # a projector of zeros would hide the tower from all but itself
    ends = {one: getattr(config.get_text_config(), one) for one in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = transformers.GenerationConfig(**ends)
    name_accelerator()
    with new_folder(folder) as partial:
        save_model(model, partial)
        tokenizer.save_pretrained(partial)
        write_tokenizer_config(partial)
        _write_processors(name, look, partial)
    return folder


def _look(name: str) -> Look:
    look = LOOKS.get(name)
    if look is None:
        near = did_you_mean([nearest(name, LOOKS)])
        raise ModelError(f"{name} is no declared family{near}\n  those that can be made: {', '.join(family_names())}")
    if look.needs is not None:
        raise ModelError(
            f"{name}: its processor needs {look.needs}, which dhp does not depend on, so that no tiny model of it is "
            f"made. Those that can be: {', '.join(family_names())}"
        )
    return look


def _tokenizer(look: Look) -> Any:

    tokenizer = make_tokenizer(CORPUS, 400)
    tokens = dict.fromkeys([*look.ids.values(), *look.named.values(), *look.more])
    new = [token for token in tokens if token not in tokenizer.get_vocab()]
    tokenizer.add_special_tokens({"additional_special_tokens": new}, replace_extra_special_tokens=False)
    if look.named:
        tokenizer._set_model_specific_special_tokens(dict(look.named))
    template = CHAT_TEMPLATE
    for own, mark in (("image", look.image), ("video", look.video)):
        template = template.replace(f"'<|vision_start|><|{own}_pad|><|vision_end|>'", repr(mark))
    sound = "".join(look.named.get(key, "") for key in ("audio_bos_token", "audio_token", "audio_eos_token"))
    if sound:
        template = template.replace(VIDEO, f"{{%- elif part['type'] == 'audio' -%}}\n{{{{ '{sound}' }}}}\n{VIDEO}")
    tokenizer.chat_template = template
    return tokenizer


def _config(name: str, look: Look, tokenizer: Any) -> Any:
    """The tiny configuration with the tokenizer's numbers in the place of its own."""
    from transformers import CONFIG_MAPPING

    model_type, arguments = next(one for one in FAMILIES.values() if one[0] == name)
    number = tokenizer.convert_tokens_to_ids
    rows = (len(tokenizer) // 16 + 1) * 16  # for every token, divisible by any tensor degree
    ends = {"bos_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    ends["pad_token_id"] = tokenizer.pad_token_id
    text = _sized(arguments["text_config"], rows) | ends | {"max_position_embeddings": POSITIONS}
    text["initializer_range"] = SPREAD
    given = _sized(arguments, rows) | {"text_config": text}
    given |= {key: number(token) for key, token in look.ids.items()}
    if "visual_indicator_token_ids" in given:
        given["visual_indicator_token_ids"] = [number(token) for token in look.more[1:]]
    return CONFIG_MAPPING[model_type](**given)


def _sized(section: Mapping[str, Any], rows: int) -> dict[str, Any]:
    return {key: rows if key.startswith("vocab_size") else value for key, value in section.items()}


def _write_processors(name: str, look: Look, folder: Path) -> None:
    """preprocessor_config.json, in which sound is read too where the family hears; processor_config.json where the
    library's processor reads the family."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    kind, arguments = look.pictures
    settings = getattr(transformers, kind)(**arguments).to_dict()
    if "audio_token" in look.named:
        settings |= transformers.WhisperFeatureExtractor(feature_size=MEL_BINS, sampling_rate=RATE).to_dict()
    write_whole(folder / "preprocessor_config.json", json.dumps(settings, indent=2) + "\n")
    if look.processor is not None:
        own = {"processor_class": PROCESSOR_MAPPING[transformers.CONFIG_MAPPING[name]].__name__, **look.processor}
        write_whole(folder / "processor_config.json", json.dumps(own, indent=2) + "\n")


SAMPLES = 256


def make_tiny_assets(folder: Path, say: Callable[[str], None] = say_line, further: Collection[str] = ()) -> None:
    """Make `folder`/data (pictures and LLaVA annotations) and `folder`/model (a Hugging Face directory) if absent, and
    of FURTHER the datasets that are asked for. say: receives a line when there is something to make.

    The tokenizer learns the pictures' own text and nothing else, so that the same code gives the same model."""
    data, model = folder / "data", folder / "model"
    if not data.is_dir() or not model.is_dir():
        say(f"making the tiny model and dataset in {folder}")
    from dhp.tiny.made_pictures import make_dataset, texts

    make_dataset(data, samples=SAMPLES)
    for name in further:
        if not (folder / name).is_dir():
            say(f"making the dataset in {folder / name}")
            FURTHER[name](folder / name)
    if not (model / "config.json").is_file():
        from transformers.utils import logging

        logging.disable_progress_bar()  # one small file
        make_tiny_model(model, texts(data))


def _make_needles(folder: Path) -> None:
    from dhp.tiny.made_pictures import make_needles

    make_needles(folder, samples=512, frames=(16, 32, 48, 64))


def _make_notes(folder: Path) -> None:
    from dhp.tiny.made_pictures import make_notes

    make_notes(folder, samples=256, notes=32)


# Further datasets, by the folder of each: videos in which one frame is asked for; long texts.
FURTHER: dict[str, Callable[[Path], None]] = {"needles": _make_needles, "notes": _make_notes}


def make_tiny(config: Config, folder: str, say: Callable[[str], None]) -> None:
    """The tiny model and dataset below `folder`, as far as they are not there. Raises ConfigError."""

    read = [Path(config.data.data_registry[name].annotation_path).parent for name in read_datasets(config.data)]
    try:
        make_tiny_assets(Path(folder), say, [name for name in FURTHER if Path(folder) / name in read])
    except OSError as error:
        raise ConfigError(f"tiny_assets={folder} cannot be written ({error}); choose another") from error
