"""A sample becomes tokens and pixels, within limits."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import CLIPImageProcessorPil, GotOcr2ImageProcessorPil, Qwen2VLImageProcessorPil
from transformers.models.kosmos2_5.image_processing_pil_kosmos2_5 import Kosmos2_5ImageProcessorPil
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

from dhp.core.batch import IGNORED, PositionRange
from dhp.core.errors import ConfigError, DataError, ModelError
from dhp.data.read.records import Record, Turn
from dhp.data.sample.sample import Length, check_characters, check_length, longest_token, tile_arguments
from dhp.data.sample.tokens import NO_ACTORS, NO_TOWER
from tests.data.sample.made import make_preprocessor

END = "<|im_end|>"
HEAD = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"

# The same conversation format with the answers marked by the template itself.
MARKED = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}{% generation %}{{ message['content'][0]['text'] }}INSIDE{% endgeneration %}OUTSIDE
{%- else -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'][-1]['text'] + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
"""

# Like templates of reasoning models: earlier answers are shortened once a later one follows.
REWRITING = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' and loop.last -%}{{ '<think>\\n' }}{%- endif -%}
{{ message['content'][0]['text'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def talk(*texts, system=None, images=()) -> Record:
    """Questions and answers in turn; images are shown with the first question."""
    roles = ("user", "assistant") * len(texts)
    turns = [Turn(role, (text,)) for role, text in zip(roles, texts)]
    turns[0] = Turn("user", (*images, texts[0]))
    if system is not None:
        turns.insert(0, Turn("system", (system,)))
    return Record("set", 7, "dataset 'set', line 7 of x.jsonl", tuple(turns))


def runs(tokenizer, sample) -> list[str]:
    """The text of each unbroken run of target tokens."""
    marks = np.flatnonzero(np.diff(np.concatenate(([0], sample.labels != IGNORED, [0]))))
    return [tokenizer.decode(sample.input_ids[start:stop]) for start, stop in marks.reshape(-1, 2)]


def with_template(tokenizer, template):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def picture(folder: Path, width: int, height: int) -> Path:
    path = folder / f"{width}x{height}.png"
    Image.new("RGB", (width, height), (200, 30, 40)).save(path)
    return path


@pytest.mark.parametrize(
    "record, text, answers",
    [
        (
            talk("What is it?", "A circle."),
            HEAD + "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\nA circle.<|im_end|>\n",
            ["A circle." + END],
        ),
        (
            talk("Hi?", "Yes.", "Sure?", "No.", system="Be brief."),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"
            "Yes.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n",
            ["Yes." + END, "No." + END],
        ),
    ],
)
def test_the_text_and_its_targets(preprocessor, tokenizer, record, text, answers):
    sample = preprocessor()(record)
    assert tokenizer.decode(sample.input_ids) == text
    assert runs(tokenizer, sample) == answers
    targets = sample.labels != IGNORED
    assert np.array_equal(sample.labels[targets], sample.input_ids[targets])
    assert (sample.dataset, sample.position, sample.target_tokens) == ("set", 7, int(targets.sum()))
    assert sample.mm_token_type_ids.tolist() == [0] * len(sample.input_ids)
    assert (sample.pixels, sample.grids) == ((), ())


@pytest.mark.parametrize(
    "question",
    [
        "assistant",
        "Write assistant\nYes.",
        "<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n",
        "<|im_start|>assistant\n",
        "Yes.",
        "{% generation %}Yes.{% endgeneration %}",
        "\U0001f600 čeština Å",  # offsets count characters; the last one is composed by NFC
    ],
)
def test_no_question_can_become_a_target(preprocessor, tokenizer, question):
    sample = preprocessor()(talk(question, "Yes.", question, "No.", system=question))
    assert runs(tokenizer, sample) == ["Yes." + END, "No." + END]


@pytest.mark.parametrize(
    "answer", ["  padded ", "two\n\nlines\n", "a <|im_end|>\n b", "😀 é", "\nfirst", "assistant\n"]
)
def test_answers_are_learned_whole(preprocessor, tokenizer, answer):
    sample = preprocessor()(talk("Q?", answer))
    # A token that starts in the newline before the answer is the template's, so a leading one may be lost with it.
    assert runs(tokenizer, sample)[0] in (answer + END, answer.removeprefix("\n") + END)


def test_images_are_expanded_in_order(preprocessor, tokenizer, tmp_path):
    files = [picture(tmp_path, 56, 56), picture(tmp_path, 112, 56)]
    sample = preprocessor()(talk("Compare.", "Same.", images=files))
    assert sample.grids == ((1, 4, 4), (1, 4, 8))
    assert [pixels.shape for pixels in sample.pixels] == [(16, 1176), (32, 1176)]
    assert {pixels.dtype for pixels in sample.pixels} == {np.dtype(np.float32)}
    expected = "".join(f"<|vision_start|>{'<|image_pad|>' * n}<|vision_end|>" for n in (4, 8))
    assert tokenizer.decode(sample.input_ids) == (
        HEAD + f"<|im_start|>user\n{expected}Compare.<|im_end|>\n<|im_start|>assistant\nSame.<|im_end|>\n"
    )
    assert runs(tokenizer, sample) == ["Same." + END]
    is_image = sample.input_ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert np.array_equal(sample.mm_token_type_ids, is_image.astype(np.int64))
    rows = (sample.input_ids, sample.labels, sample.mm_token_type_ids)
    assert {row.dtype for row in rows} == {np.dtype(np.int64)}
    assert len({row.shape for row in rows}) == 1


def test_pixels_are_the_processors_own(preprocessor, tmp_path):
    path = picture(tmp_path, 112, 84)
    sample = preprocessor()(talk("Q?", "A.", images=[path]))
    processor = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=168 * 168)
    expected = processor(images=[Image.open(path)], return_tensors="np")["pixel_values"]
    assert np.array_equal(sample.pixels[0], expected)


@pytest.mark.parametrize(
    "bounds, grid",
    [
        ({}, (1, 10, 10)),
        ({"max_pixels": 56 * 56}, (1, 4, 4)),
        ({"min_pixels": 168 * 168}, (1, 12, 12)),
        ({"min_pixels": 196 * 196, "max_pixels": 196 * 196}, (1, 14, 14)),
    ],
)
def test_pixel_bounds_take_effect(preprocessor, tmp_path, bounds, grid):
    sample = preprocessor(**bounds)(talk("Q?", "A.", images=[picture(tmp_path, 140, 140)]))
    assert sample.grids == (grid,)


@pytest.mark.parametrize("bounds", [{"min_pixels": 0}, {"max_pixels": 100}, {"min_pixels": 200, "max_pixels": 100}])
def test_impossible_pixel_bounds(preprocessor, bounds):
    with pytest.raises(ConfigError, match="0 < data.min_pixels <= data.max_pixels, got"):
        preprocessor(**bounds)


def test_pixel_bounds_need_a_processor_that_scales_by_area(preprocessor):
    preprocessor(image_processor=CLIPImageProcessorPil())
    with pytest.raises(ConfigError, match="CLIPImageProcessorPil does not scale images by area"):
        preprocessor(image_processor=CLIPImageProcessorPil(), max_pixels=100)


@pytest.mark.parametrize("question, answer", [("<|image_pad|>?", "A."), ("Q?", "<|image_pad|>")])
@pytest.mark.parametrize("count", [0, 1])
def test_a_placeholder_in_the_text_is_refused(preprocessor, tmp_path, question, answer, count):
    files = [picture(tmp_path, 56, 56)] * count
    reason = rf"line 7 of x\.jsonl: {count + 1} image placeholder tokens for {count} images: .*'<\|image_pad\|>'"
    with pytest.raises(DataError, match=reason):
        preprocessor()(talk(question, answer, images=files))


def test_a_template_that_drops_images_is_refused(preprocessor, tokenizer, tmp_path):
    blind = with_template(tokenizer, MARKED)
    with pytest.raises(DataError, match="0 image placeholder tokens for 1 images: .* drops images"):
        preprocessor(tokenizer=blind)(talk("Q?", "A.", images=[picture(tmp_path, 56, 56)]))


def test_generation_blocks_are_used_where_a_template_has_them(preprocessor, tokenizer):
    sample = preprocessor(tokenizer=with_template(tokenizer, MARKED))(talk("Hi?", "Yes.", "Sure?", "No."))
    assert runs(tokenizer, sample) == ["Yes.INSIDE", "No.INSIDE"]


@pytest.mark.parametrize("after", ["<|im_end|>\\n", "<|im_end|>"])
@pytest.mark.parametrize("inside", [True, False])
def test_the_end_of_turn_token_is_learned_wherever_the_block_ends(preprocessor, tokenizer, after, inside):
    block = "{% endgeneration %}"
    end = f"{{{{ '{after}' }}}}"
    template = MARKED.replace(f"INSIDE{block}OUTSIDE", end + block if inside else block + end)
    sample = preprocessor(tokenizer=with_template(tokenizer, template))(talk("Hi?", "Yes.", "Sure?", "No."))
    assert runs(tokenizer, sample) == ["Yes." + END, "No." + END]


def test_a_template_that_rewrites_earlier_answers_is_refused_where_it_matters(preprocessor, tokenizer):
    rewriting = preprocessor(tokenizer=with_template(tokenizer, REWRITING))
    assert runs(tokenizer, rewriting(talk("Hi?", "Yes."))) == ["<think>\nYes." + END]
    with pytest.raises(DataError, match="writes turn 2 differently once more turns follow"):
        rewriting(talk("Hi?", "Yes.", "Sure?", "No."))


def test_a_template_may_refuse_a_conversation(preprocessor, tokenizer):
    strict = with_template(tokenizer, "{{ raise_exception('no system role here') }}")
    with pytest.raises(DataError, match="line 7 of .* refuses it: no system role here"):
        preprocessor(tokenizer=strict)(talk("Hi?", "Yes.", system="Be brief."))


def test_a_template_that_writes_no_answer_gives_no_target(preprocessor, tokenizer):
    silent = with_template(tokenizer, "Hi? Yes.{% generation %}{% endgeneration %}")
    with pytest.raises(DataError, match="leaves out or rewrites text of turn 2"):
        preprocessor(tokenizer=silent)(talk("Hi?", "Yes."))
    unmarked = with_template(tokenizer, "Hi? Yes.{% if false %}{% generation %}{% endgeneration %}{% endif %}")
    with pytest.raises(DataError, match="no target token"):
        preprocessor(tokenizer=unmarked)(talk("Hi?", "Yes."))


def test_pictures_side_by_side_are_refused_where_the_model_takes_them_for_one(preprocessor, tokenizer, tmp_path):
    bare = with_template(
        tokenizer,
        "{% for m in messages %}<|im_start|>{% for p in m.content %}{{ p.text or '<|image_pad|>' }}{% endfor %}"
        "<|im_end|>{% endfor %}",
    )
    first, second = picture(tmp_path, 56, 56), picture(tmp_path, 56, 84)
    answer = Turn("assistant", ("Red.",))
    apart, touching = (
        Record("set", 7, "line 7 of x.jsonl", (Turn("user", parts), answer))
        for parts in ((first, "and", second, "?"), (first, second, "?"))
    )
    assert len(preprocessor(tokenizer=bare, pictures_apart=True)(apart).grids) == 2
    assert len(preprocessor(tokenizer=bare)(touching).grids) == 2
    with pytest.raises(DataError, match=r"^line 7 of x\.jsonl: two pictures stand side by side"):
        preprocessor(tokenizer=bare, pictures_apart=True)(touching)


def test_a_tokenizer_without_a_template_is_a_model_error(preprocessor, tokenizer):
    with pytest.raises(ModelError, match="has no chat template"):
        preprocessor(tokenizer=with_template(tokenizer, None))


@pytest.mark.parametrize(
    "size, reason", [(None, "does not exist"), ((2000, 5), r"\(2000 × 5\) cannot be scaled: .*aspect ratio")]
)
def test_an_unusable_image_is_named_with_its_place(preprocessor, tmp_path, size, reason):
    path = picture(tmp_path, *size) if size else tmp_path / "gone.png"
    with pytest.raises(DataError, match=rf"^dataset 'set', line 7 of x\.jsonl: image {path} {reason}"):
        preprocessor()(talk("Q?", "A.", images=[path]))


class Counting(Qwen2VLImageProcessorPil):
    """Notes the sizes that it scales."""

    def __call__(self, images, **options):
        self.seen = [*getattr(self, "seen", []), images[0].size]
        return super().__call__(images=images, **options)


class ByTiles(Counting):
    """Means something else by patches."""

    def get_number_of_image_patches(self, height, width, images_kwargs=None):
        return 7


class Unsure(Counting):
    """Knows the bounds by other names."""

    def get_number_of_image_patches(self, height, width, images_kwargs):
        return images_kwargs["tiles"]


@pytest.mark.parametrize("kind, by_formula", [(Counting, True), (ByTiles, False), (Unsure, False)])
@pytest.mark.parametrize("bounds", [{}, {"max_pixels": 70 * 70}])
def test_lengths_come_from_the_formula_or_a_blank_picture(preprocessor, tmp_path, kind, by_formula, bounds):
    processor = kind(min_pixels=56 * 56, max_pixels=168 * 168)
    make = preprocessor(image_processor=processor, **bounds)
    for width, height in ((100, 30), (30, 100), (100, 30)):
        record = talk("Compare.", "Same.", images=[picture(tmp_path, width, height), picture(tmp_path, 77, 301)])
        sample = make(record)
        assert make.measure(record)[:2] == (int(sample.mm_token_type_ids.sum()), len(sample.input_ids))
    processor.seen = []
    for _ in range(3):
        make.measure(record)
        make.measure(talk("And?", "So.", images=[picture(tmp_path, 123, 45)]))
    assert processor.seen == ([] if by_formula else [(123, 45)])


def test_a_processor_that_does_not_scale_is_not_measured_by_its_formula(preprocessor, tmp_path):
    make = preprocessor(image_processor=Qwen2VLImageProcessorPil(do_resize=False))
    record = talk("Q?", "A.", images=[picture(tmp_path, 28, 1400)])
    sample, length = make(record), make.measure(record)
    assert (length.vision, length.text) == (50, len(sample.input_ids))
    assert (length.patches, length.squares) == (len(sample.pixels[0]), len(sample.pixels[0]) ** 2)


def test_the_length_of_text_alone(preprocessor):
    sample = preprocessor()(talk("Hi?", "Yes."))
    assert preprocessor().measure(talk("Hi?", "Yes.")) == Length(
        0, len(sample.input_ids), targets=sample.target_tokens, pairs=len(sample.input_ids) ** 2
    )


@pytest.mark.parametrize(
    "question, files, bounds, reason",
    [
        ("<|image_pad|>?", [(56, 56)], {}, "2 image placeholder tokens for 1 images"),
        ("Q?", [None], {}, "does not exist"),
        ("Q?", [(2000, 5)], {}, r"\(2000 × 5\) cannot be scaled: .*aspect ratio"),
        ("Q?", [(140, 140)], {"max_tokens": 20}, r"\(25 of images and videos\) are more than data.max_tokens=20"),
    ],
)
def test_a_sample_is_refused_in_the_same_words_when_it_is_measured(
    preprocessor, tmp_path, question, files, bounds, reason
):
    paths = [picture(tmp_path, *size) if size else tmp_path / "gone.png" for size in files]
    errors = []
    for use in (preprocessor(**bounds), preprocessor(**bounds).measure):
        with pytest.raises(DataError, match=rf"^dataset 'set', line 7 of x\.jsonl: .*{reason}") as raised:
            use(talk(question, "A.", images=paths))
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


def test_a_sample_of_just_as_many_tokens_is_used(preprocessor, tmp_path):
    record = talk("Q?", "A.", images=[picture(tmp_path, 140, 140)])
    length = len(preprocessor()(record).input_ids)
    exact, short = preprocessor(max_tokens=length), preprocessor(max_tokens=length - 1)
    assert len(exact(record).input_ids) == length and exact.measure(record)[:2] == (25, length)
    for use in (short, short.measure):
        with pytest.raises(DataError, match=rf"{length} tokens .* are more than data.max_tokens={length - 1}"):
            use(record)


def test_the_fingerprint_is_that_of_all_settings(preprocessor, tokenizer):
    settings = [{}, {"max_pixels": 999_999}, {"max_tokens": 9}, {"videos": None}, {"image_processor": Counting()}]
    settings += [{"tokenizer": with_template(tokenizer, MARKED)}]
    prints = [preprocessor(**changes).fingerprint() for changes in settings]
    assert len(set(prints)) == len(settings)
    assert [preprocessor(**changes).fingerprint() for changes in settings] == prints


def test_the_fingerprint_is_that_of_the_system_text(preprocessor):
    prints = {preprocessor(system_prompt=text).fingerprint() for text in (None, "", "Be brief.")}
    assert len(prints) == 3


def test_a_system_text_for_all_samples_that_have_none(preprocessor, tokenizer):
    make = preprocessor(system_prompt="Be kind.")
    told = [tokenizer.decode(make(talk("Hi?", "Yes.", system=own)).input_ids) for own in (None, "Be brief.")]
    assert [text.partition("<|im_end|>")[0] for text in told] == [
        "<|im_start|>system\nBe kind.",
        "<|im_start|>system\nBe brief.",
    ]
    assert make.measure(talk("Hi?", "Yes.")).text == len(make(talk("Hi?", "Yes.")).input_ids)


def test_a_run_that_hears_nothing_says_why(preprocessor):
    record = talk("<audio>Who?", "Ann.")
    for why in (NO_TOWER, NO_ACTORS):
        with pytest.raises(DataError, match=f"1 <audio> tags in the human turns, but {why[:20]}"):
            preprocessor(no_audio=why)(record)


def test_the_fingerprint_does_not_change_with_use(preprocessor, tokenizer):
    cutting = copy.deepcopy(tokenizer)
    cutting.backend_tokenizer.enable_truncation(5)  # as a tokenizer's file may have it; no call here cuts
    make = preprocessor(tokenizer=cutting)
    before = make.fingerprint()
    assert make.measure(talk("Hi?", "Yes.")) == preprocessor().measure(talk("Hi?", "Yes."))
    assert make.fingerprint() == before


def test_what_fits_passes() -> None:
    check_length(Length(vision=90, text=100), None, None)
    check_length(Length(90, 100), 100, PositionRange(100, of_pictures=True))
    check_length(Length(90, 100), None, PositionRange(10, of_pictures=False))


@pytest.mark.parametrize(
    ("most", "positions", "told"),
    [
        (99, None, r"100 tokens \(90 of images and videos\) are more than data.max_tokens=99"),
        (None, PositionRange(99, True), r"100 tokens are more than the 99 positions .* data.max_tokens=99 with"),
        (None, PositionRange(9, False), "10 tokens beside 90 of images and videos are more than the 9 positions"),
    ],
)
def test_what_does_not_is_told(most: int | None, positions: PositionRange | None, told: str) -> None:
    with pytest.raises(DataError, match=told):
        check_length(Length(90, 100), most, positions)


def tokenizer(model=None, normalizer=None, before=None, added=()) -> dict:
    vocab = {letter: number for number, letter in enumerate([*"abĠe", "ab", "aba"])}
    made = Tokenizer(model or models.BPE(vocab, [("a", "b"), ("ab", "a")]))
    made.pre_tokenizer = before or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_special_tokens(list(added))
    return json.loads(made.to_str())


@pytest.mark.parametrize(
    ("backend", "longest"),
    [
        (tokenizer(), 3),
        (tokenizer(normalizer=normalizers.NFC()), 3),
        (tokenizer(added=["<|image_pad|>"]), 13),
        (tokenizer(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])), 3),
        (tokenizer(normalizer=normalizers.Replace("  ", " ")), None),
        (tokenizer(normalizer=normalizers.NFKC()), None),
        (tokenizer(normalizer=normalizers.Strip()), None),
        (tokenizer(before=pre_tokenizers.Whitespace()), None),
        (tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")), None),
        (tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")), None),
    ],
)
def test_the_longest_token_where_there_is_one(backend: dict, longest: int | None) -> None:
    assert longest_token(backend) == longest


def test_a_token_that_takes_space_along_has_no_bound() -> None:
    backend = tokenizer(added=["<x>"])
    backend["added_tokens"][0]["lstrip"] = True
    assert longest_token(backend) is None


@pytest.mark.parametrize(
    ("text", "pictures", "longest", "most", "positions"),
    [
        ("aba" * 10, 0, 3, 10, None),
        ("aba" * 12, 2, 3, 10, None),
        ("aba" * 10, 0, 3, None, PositionRange(10, True)),
        ("aba" * 11, 0, 3, None, None),
        ("aba" * 11, 0, None, 10, None),
        ("e\u0301" * 30, 0, 3, 10, None),  # one character each in normal form C
    ],
)
def test_a_text_that_may_fit_passes(text, pictures, longest, most, positions) -> None:
    check_characters(text, pictures, longest, most, positions)


@pytest.mark.parametrize(
    ("most", "positions", "named"),
    [
        (10, None, "10 tokens \\(data.max_tokens\\)"),
        (None, PositionRange(10, False), "10 tokens \\(the positions that the model knows\\)"),
        (11, PositionRange(10, True), "10 tokens \\(the pos"),
    ],
)
def test_a_text_that_cannot_fit_is_refused(most, positions, named) -> None:
    with pytest.raises(DataError, match=f"31 characters are more than {named}"):
        check_characters("a" * 31, 0, 3, most, positions)


SIDE = 28


def tiled() -> GotOcr2ImageProcessorPil:
    """As InternVL's: tiles of one side, a thumbnail beside several."""
    return GotOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE}, crop_to_patches=True, max_patches=12)


@pytest.mark.parametrize(("most", "tiles"), [(None, 5), (12, 5), (4, 5), (3, 4), (2, 3), (1, 1)])
def test_a_wide_image_becomes_so_many(tokenizer, tmp_path: Path, most: int | None, tiles: int) -> None:
    """4:1, so it is cut into 4 in a row, or as many as there may be, and a thumbnail beside several."""
    Image.new("RGB", (400, 100)).save(tmp_path / "wide.png")
    processor = tiled()

    def patches(output):
        pixels = output["pixel_values"]
        return pixels.reshape(len(pixels), -1), (len(pixels), 1, 1)

    seen = {"image_processor": processor, "image_tokens": lambda grid: grid[0], "patches": patches}
    reader = make_preprocessor(tokenizer, **seen, image_arguments=tile_arguments(processor, most))
    turns = (Turn("user", (tmp_path / "wide.png", "What?")), Turn("assistant", ("A wall.",)))
    record = Record("a", 1, "a: row 1", turns)
    sample = reader(record)
    assert sample.grids == ((tiles, 1, 1),) and sample.pixels[0].shape == (tiles, 3 * SIDE * SIDE)
    assert reader.measure(record)[:2] == (tiles, len(sample.input_ids))
    other = make_preprocessor(tokenizer, image_processor=processor, image_arguments=tile_arguments(processor, 9))
    assert reader.fingerprint() != other.fingerprint()


def test_the_name_is_the_processors_own() -> None:
    assert tile_arguments(tiled(), None) == {} and tile_arguments(tiled(), 6) == {"max_patches": 6}
    assert tile_arguments(MllamaImageProcessorPil(), 3) == {"max_image_tiles": 3}


@pytest.mark.parametrize("kind", [Qwen2VLImageProcessorPil, Kosmos2_5ImageProcessorPil])
def test_a_processor_without_tiles_is_refused(kind: type) -> None:
    """Kosmos has a max_patches that counts patches."""
    with pytest.raises(ConfigError, match=f"data.max_tiles=4, but {kind.__name__} has no setting"):
        tile_arguments(kind(), 4)


def test_fewer_than_the_processors_least_are_refused() -> None:
    with pytest.raises(ConfigError, match="data.max_tiles=1 < min_patches=2"):
        tile_arguments(GotOcr2ImageProcessorPil(crop_to_patches=True, min_patches=2), 1)
