"""Rules between settings, as tables: exclusions and reasons."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType, SimpleNamespace
from typing import Literal

from dhp.config.data import DataConfig, LimitsConfig
from dhp.config.parts import DECODER, parts
from dhp.config.ranges import SEQUENTIAL, require, require_choice
from dhp.config.schema import Config, PartConfig
from dhp.config.vocabulary import shown_value
from dhp.core.errors import ConfigError
from dhp.core.parameters import ADAMW, BFLOAT16, EXACT_STATES, FORMS, MUON, OPTIMIZERS, names_experts
from dhp.core.text import did_you_mean, nearest

# Why something is refused: by what it is, or by the library or the device that would do it; or nobody built it here.
Limit = Literal["cannot be", "not built"]
CANNOT: Limit = "cannot be"
NOT_BUILT: Limit = "not built"


@dataclass(frozen=True)
class Rule:
    """Settings that exclude each other. keys: dotted, separated by spaces; the error begins with them and their values,
    as `A=1 with B=2 and C=3`. when: whether they do, by the resolved section of a part, and by the configuration where
    the rule is about a whole run. says: the rest of the error.

    In keys and says, {name} is the part, {p} its section, {c} the configuration. limit: whether they could go
    together."""

    keys: str
    when: Callable[..., bool]
    says: str
    limit: Limit = CANNOT

    def error(self, name: str, part: PartConfig, config: Config | None) -> ConfigError:
        """The error for a part of that name."""
        settings = SimpleNamespace(**{**(vars(config) if config else {}), name: part})
        keys = self.keys.format(name=name).split()
        first, *others = (f"{key}={shown_value(attrgetter(key)(settings))}" for key in keys)
        shown = f"{first} with {' and '.join(others)}" if others else first
        return ConfigError(shown + self.says.format(name=name, p=part, c=config))


def check_rules(rules: Sequence[Rule], name: str, part: PartConfig, config: Config | None = None) -> None:
    """Raises ConfigError for the first rule that a resolved part breaks. config: of the run, for rules about it."""
    for rule in rules:
        if rule.when(part, *([] if config is None else [config])):
            raise rule.error(name, part, config)


def goes_with(
    key: str, asked: Callable[[PartConfig], bool], leave: str, *others: tuple[str, object, str], limit: Limit = CANNOT
) -> list[Rule]:
    """Rules of a setting that goes with one value of others alone. asked: whether a part has it. leave: the way
    without it. others: key, the value or values that it goes with, why."""
    rules = []
    for other, fits, why in others:
        values = fits if isinstance(fits, tuple) else (fits,)

        def when(p: PartConfig, other: str = other, values: tuple[object, ...] = values) -> bool:
            return asked(p) and attrgetter(other)(p) not in values

        needed = " or ".join(map(shown_value, values))
        says = f": {why}. Set {{name}}.{other}={needed}, or {leave}."
        rules.append(Rule(f"{{name}}.{key} {{name}}.{other}", when, says, limit))
    return rules


FLASH_ATTENTION_2 = "flash_attention_2"
DEEPSPEED, FSDP = "deepspeed", "fsdp"
FILLING = ("isf", "balanced")  # methods of balance that fill rows
_WHOLE = "bitsandbytes rounds blocks of whole matrices, of which each actor would have a part"

# Of one part, with degrees.
PART_RULES: tuple[Rule, ...] = (
    Rule("{name}.attention_backend {name}.dtype",
         lambda p: p.attention_backend == FLASH_ATTENTION_2 and p.dtype != "bfloat16",
         ": its kernels have 16-bit formats alone. Set {name}.dtype=bfloat16, or {name}.attention_backend=auto, "
         "PyTorch's own kernels."),
    Rule("{name}.virtual_stages {name}.pipeline", lambda p: p.virtual_stages > 1 and p.pipeline == 1,
         ": virtual stages are runs of layers that the stages of a pipeline take in turn. Set {name}.pipeline to 2 or "
         "more, or {name}.virtual_stages=1."),
    Rule("{name}.pipeline {name}.parallelism", lambda p: p.pipeline > 1 and p.parallelism == "autotp",
         ": DeepSpeed's layers are not cut into stages. Set {name}.parallelism=tensor or pipeline, or "
         "{name}.pipeline=1."),
    Rule("{name}.zero_engine {name}.zero_stage {name}.expert",
         lambda p: p.zero_stage and p.zero_engine == DEEPSPEED and p.expert > 1,
         ": DeepSpeed sums and cuts over all replicas whatever is no layer of its own class for experts, but "
         "expert({p.expert}) > 1 gives replicas different ones. Set {name}.zero_engine=fsdp with {name}.zero_stage=2 "
         "or 3, {name}.zero_stage=0, or {name}.expert=1."),
    Rule("{name}.parallelism {name}.ulysses {name}.ring",
         lambda p: p.ring * p.ulysses > 1 and p.parallelism == "autotp",
         ": DeepSpeed's layers know no shared sequence. Set {name}.parallelism=tensor or sequence."),
    Rule("{name}.parallelism {name}.zero_stage", lambda p: p.parallelism == "deepspeed" and not p.zero_stage,
         ": DeepSpeed is here for its ZeRO stages, and stage 0 cuts nothing. Set {name}.zero_stage=1 (cuts the "
         "optimizer's state), 2 (gradients too) or 3 (weights too), or {name}.parallelism=data for replicas without "
         "DeepSpeed."),
    Rule("{name}.zero_stage {name}.parallelism", lambda p: p.zero_stage and p.parallelism == "autotp",
         ": DeepSpeed's layers are not cut any further. Set {name}.parallelism=tensor, whose states are cut with "
         "zero_stage 2 or 3, or {name}.zero_stage=0."),
    Rule("{name}.zero_stage {name}.dtype",
         lambda p: p.zero_stage and p.zero_engine == DEEPSPEED and p.dtype == "float64",
         ": DeepSpeed, which does the ZeRO stages, has no float64. Set {name}.zero_engine=fsdp with "
         "{name}.zero_stage=2 or 3, {name}.zero_stage=0, or {name}.dtype=float32."),
    Rule("{name}.zero_engine {name}.zero_stage {name}.tensor",
         lambda p: p.zero_stage and p.zero_engine == DEEPSPEED and p.tensor > 1,
         ": DeepSpeed cuts what all actors of a part hold alike, but tensor({p.tensor}) > 1 gives them different "
         "slices of each matrix. Set {name}.zero_engine=fsdp with {name}.zero_stage=2 or 3, or {name}.tensor=1."),
    Rule("{name}.state_bytes {name}.dtype", lambda p: p.state_bytes != EXACT_STATES and p.dtype != BFLOAT16,
         ": the forms of states are of a part that computes in 16 bits; in {p.dtype}, weight, sum and moments have its "
         f"format. Set {{name}}.dtype={BFLOAT16}, or leave {{name}}.state_bytes out."),
    Rule("{name}.state_bytes {name}.zero_engine {name}.zero_stage",
         lambda p: p.state_bytes != EXACT_STATES and p.zero_stage and p.zero_engine == DEEPSPEED,
         f": DeepSpeed's ZeRO holds {FORMS[EXACT_STATES].equation} bytes a parameter and no other form. Set "
         "{name}.zero_engine=fsdp with {name}.zero_stage=2 or 3 (and {name}.parallelism=data in the place of "
         f"deepspeed), {{name}}.zero_stage=0, or {{name}}.state_bytes={EXACT_STATES}."),
    Rule("{name}.sequence_sharded_norms {name}.tensor", lambda p: p.sequence_sharded_norms and p.tensor == 1,
         ": it is tensor actors that share out a sequence's tokens between blocks. Set {name}.tensor=2 or more, or "
         "leave {name}.sequence_sharded_norms out."),
    Rule("{name}.sequence_sharded_norms {name}.parallelism",
         lambda p: p.sequence_sharded_norms and p.parallelism == "autotp",
         ": DeepSpeed's layers sum over all tokens. Set {name}.parallelism=tensor, or leave "
         "{name}.sequence_sharded_norms out."),
    Rule("{name}.host_moments {name}.zero_engine {name}.zero_stage",
         lambda p: p.host_moments and p.zero_stage and p.zero_engine == DEEPSPEED,
         ": DeepSpeed's ZeRO keeps its states where the weights are. Set {name}.zero_engine=fsdp with "
         "{name}.zero_stage=2 or 3, {name}.zero_stage=0, or {name}.host_moments=false."),
    Rule("{name}.host_moments {name}.dtype", lambda p: p.host_moments and p.dtype == "float64",
         ": rows are updated in float32. Set {name}.dtype=float32, or {name}.host_moments=false.", NOT_BUILT),
    *goes_with(
        "compile", lambda p: p.compile, "{name}.compile=false",
        ("recompute", "none", "what a layer keeps is chosen call by call, and a compiled layer has no such calls"),
        ("tensor", 1, "collectives between the slices of a layer are not compiled here"),
        ("expert", 1, "the exchange of rows between experts is not compiled here"),
        ("zero_stage", 0, "weights and gradients that come and go inside a layer are not compiled here"),
        limit=NOT_BUILT,
    ),
    *goes_with(
        "mlp_chunks", lambda p: p.mlp_chunks > 1, "{name}.mlp_chunks=1",
        ("compile", False, "chunks of an MLP are computed again in backward, each by itself"),
        ("expert", 1, "chunks of an MLP would be sent to experts one after another, in backward again"),
        limit=NOT_BUILT,
    ),
    Rule("{name}.lora.rank {name}.parallelism", lambda p: p.lora.rank and p.parallelism == "autotp",
         ": DeepSpeed puts layers of its own in the place of those that adapters stand beside. Set "
         "{name}.parallelism=tensor."),
    *goes_with(
        "lora.quantization", lambda p: p.lora.quantization is not None, "leave {name}.lora.quantization out",
        ("tensor", 1, _WHOLE),
        ("expert", 1, _WHOLE),
        ("zero_stage", 0, "ZeRO copies, casts and cuts weights as numbers, not as packed bits"),
        ("compile", False, "bitsandbytes' products in compiled layers were never tested here"),
        ("recompute", ("none", "full"),
         "what a layer keeps is chosen by kinds of products, and bitsandbytes' is none of the known ones"),
        ("lora.dora", False, "its norms would be those of the weights before they were rounded"),
    ),
    Rule("{name}.lora.quantization {name}.dtype", lambda p: p.lora.quantization is not None and p.dtype == "float64",
         ": there is no way back from four bits to float64. Set {name}.dtype=bfloat16, or leave "
         "{name}.lora.quantization out."),
    *goes_with(
        "lora.targets", lambda p: any(map(names_experts, p.lora.targets)), "name no experts in {name}.lora.targets",
        ("tensor", 1, "an actor has a slice of each expert's matrices, of which their adapters would have to be cut"),
        ("expert", 1, "an actor has some of the experts, of which their adapters would have to be taken"),
        ("zero_stage", 0, "adapters of experts are added to weights inside a layer, where ZeRO takes them away"),
        ("compile", False, "adapters of experts are added to weights in each call, by code that is not compiled"),
        ("lora.dropout", 0.0, "adapters of experts are added to weights: of no states could some be left out"),
        ("lora.dora", False, "peft's adapters of experts train no norms"),
        limit=NOT_BUILT,
    ),
)  # fmt: skip

# Of a part in a run.
RUN_RULES: tuple[Rule, ...] = (
    # DeepSpeed's ZeRO stage 3 counts micro-batches by forward passes: the backward of each must precede the next one.
    Rule("{name}.zero_stage {name}.zero_engine training.schedule",
         lambda p, c: p.zero_stage == 3 and p.zero_engine == DEEPSPEED and c.training.schedule != "sequential",
         ": with two micro-batches on their way, DeepSpeed loses gradients without a word. Set "
         "training.schedule=sequential, {name}.zero_engine=fsdp, or {name}.zero_stage=2, which keeps whole weights on "
         "each actor."),
    Rule("{name}.pipeline {name}.zero_stage {name}.zero_engine",
         lambda p, c: p is not c.text and p.pipeline > 1 and p.zero_stage == 3 and p.zero_engine == DEEPSPEED,
         ": DeepSpeed gathers weights at the beginning of each module and drops them at its end, and a stage leaves "
         "the tower's forward before that. Set {name}.zero_engine=fsdp, or {name}.zero_stage=2."),
    Rule("vision.pipeline data.cache_features",
         lambda p, c: c.vision.pipeline > 1 and c.data.cache_features is not None,
         ": features are kept by the actors that have the whole tower. Set vision.pipeline=1: a frozen tower whose "
         "features are kept runs once a picture.", NOT_BUILT),
    Rule("cluster.chain cluster.collocate", lambda p, c: c.cluster.chain and not c.cluster.collocate,
         ": a chain shares the devices where the tower ends and the decoder begins. Set cluster.chain=false for stages "
         "with devices of their own, or leave cluster.collocate out."),
    Rule("cluster.chain vision.num_actors vision.pipeline text.num_actors text.pipeline",
         lambda p, c: c.cluster.chain
         and c.vision.num_actors * c.text.pipeline != c.text.num_actors * c.vision.pipeline,
         ": stages of a chain have as many actors, or one of them would have devices to itself: "
         "vision.num_actors / vision.pipeline = text.num_actors / text.pipeline. Change one of them, or set "
         "cluster.chain=false."),
    Rule("{name}.virtual_stages training.schedule", lambda p, c: p is not c.text and p.virtual_stages > 1,
         ": the runs of layers of a tower's stages are not interleaved. Set {name}.virtual_stages=1; "
         "text.virtual_stages interleaves the decoder's.", NOT_BUILT),
    Rule("training.schedule text.virtual_stages",
         lambda p, c: c.training.schedule == "interleaved" and c.text.virtual_stages == 1,
         ": it takes a stage's runs of layers in turn, and there is one. Set text.virtual_stages to 2 or more (and "
         "text.pipeline), or training.schedule=1f1b."),
    Rule("text.virtual_stages training.schedule",
         lambda p, c: c.text.virtual_stages > 1 and c.training.schedule not in ("interleaved", "sequential"),
         ", which knows one run of layers a stage. Set training.schedule=interleaved, or text.virtual_stages=1."),
    Rule("{name}.attention_backend cluster.device",
         lambda p, c: p.attention_backend == FLASH_ATTENTION_2 and c.cluster.device == "cpu",
         ": its kernels run on GPUs. Set {name}.attention_backend=auto, PyTorch's own kernels, or "
         "cluster.device=cuda."),
    Rule("{name}.lora.quantization cluster.device",
         lambda p, c: p.lora.quantization is not None and c.cluster.device != "cuda",
         ": bitsandbytes' kernels for it are made for GPUs, and on a CPU each product would unpack its whole matrix "
         "first. Set cluster.device=cuda, or leave {name}.lora.quantization out."),
)  # fmt: skip

# Of balanced rows and the rest of a run.
BALANCE_RULES: tuple[Rule, ...] = (
    Rule("data.balance data.packing", lambda p, c: c.data.balance in FILLING and not c.data.packing,
         ": it fills rows with samples of any length, which padding would undo. Set data.packing=true, or "
         "data.balance=random"),
    Rule("data.balance data.shuffle", lambda p, c: c.data.balance != "random" and not c.data.shuffle,
         ": which samples share a step is the method's to say. Set data.shuffle=true, or data.balance=random"),
    Rule("data.long_tokens data.balance", lambda p, c: c.data.long_tokens is not None and c.data.balance == "random",
         ", which knows no lengths. Set data.balance=balanced, or leave it out"),
    Rule("data.fullest_first data.balance", lambda p, c: c.data.fullest_first and c.data.balance == "random",
         ", which knows no lengths. Set data.balance=balanced, or leave it out"),
)  # fmt: skip
WINDOW_RULES: tuple[Rule, ...] = (
    Rule("data.balance_window data.balance", lambda p, c: c.data.balance == "random", ", which balances nothing"),
    Rule("data.balance_window", lambda p, c: c.data.balance_window < c.training.batch_size,
         " is less than a step: balance_window({c.data.balance_window}) < "
         "training.batch_size({c.training.batch_size}). The larger it is, the more even steps are; some hundred steps "
         "are enough"),
    Rule("data.balance_window", lambda p, c: c.training.max_steps is None,
         " without training.max_steps: how many steps an epoch has is known only once all its samples are measured, "
         "and the learning rate needs the number before. Set training.max_steps"),
    Rule("training.save_epochs data.balance_window", lambda p, c: c.training.save_epochs is not None,
         ": with which step an epoch ends is known only when it is measured. Set training.save_steps"),
)  # fmt: skip


def check_run(config: Config) -> None:
    """Check the parts of a resolved configuration with the run's other settings. Raises ConfigError."""
    for name, part in parts(config).items():
        check_rules(RUN_RULES, name, part, config)
        for kind, kernel in read_kernels(name, part.kernels).items():
            if kernel in ON_GPUS and config.cluster.device == "cpu":
                raise ConfigError(
                    f"{name}.kernels={part.kernels} with cluster.device=cpu: {kind}:{kernel} runs on GPUs. Set "
                    f"{name}.kernels=auto, which takes what is proved on this device, or cluster.device=cuda."
                )
    counted = [f"{name}.recompute=auto" for name, part in parts(config).items() if part.recompute == "auto"]
    counted += ["memory.accounting=true"] if config.memory.accounting else []
    counted += ["text.partition_trials=true"] if config.text.partition_trials else []
    for name, part in parts(config).items() if counted else ():
        quantized = f"{name}.lora.quantization"
        if part.lora.quantization is not None:
            raise ConfigError(
                f"{quantized}={part.lora.quantization} with {counted[0]}: what activations take is counted by the "
                f"weights that operations read, and bitsandbytes' are packed. Leave {quantized} out, or change "
                f"{counted[0]}."
            )
        if part.compile:
            raise ConfigError(
                f"{name}.compile=true with {counted[0]}: what activations take is counted call by call, in all parts, "
                f"and a compiled layer has no such calls. Set {name}.compile=false, or change {counted[0]}."
            )
    check_budget(config)
    check_trials(config)


def check_trials(config: Config) -> None:
    """Trials need cuts that they can change. Raises ConfigError."""
    if not config.text.partition_trials:
        return
    if not any((part.pipeline or 1) > 1 and part.cuts is None for part in parts(config).values()):
        raise ConfigError(
            "text.partition_trials=true, and no part has several stages (pipeline) without cuts by hand: there is "
            "nothing to cut. Leave text.partition_trials out"
        )
    if config.training.schedule == SEQUENTIAL and config.text.partition is None:
        raise ConfigError(
            "text.partition_trials=true with training.schedule=sequential, under which every cut takes as long. Set "
            "training.schedule=1f1b, or leave text.partition_trials out"
        )


def check_budget(config: Config) -> None:
    """A plan needs a budget in bytes. Raises ConfigError where a part is to have a plan and there is no budget, and no
    GPU to read it from."""
    for name, part in parts(config).items():
        if part.recompute == "auto" and config.memory.budget_gib is None and config.cluster.device == "cpu":
            raise no_budget(f"{name}.recompute")


def no_budget(key: str) -> ConfigError:
    """The error for `key`=auto on devices whose memory cannot be read."""
    return ConfigError(
        f"{key}=auto without memory.budget_gib: how much may be kept? What is left is read from GPUs alone. Set "
        "memory.budget_gib to what activations may take on one device, GiB: its memory less what a dry run "
        f"(training.dry_run=true) counts, or {key}=full"
    )


def check_balance(config: Config) -> None:
    """Requirements of balanced rows on other keys. Raises ConfigError."""
    data, method = config.data, config.data.balance
    check_rules(BALANCE_RULES, DECODER, config.text, config)
    _check_limits(data.limits, method, method in FILLING)
    if method != "isf" and data.isf_passes != DataConfig.isf_passes:
        raise ConfigError(f"data.isf_passes={data.isf_passes} with data.balance={method}: that is for isf")
    if data.balance_window is not None:
        check_rules(WINDOW_RULES, DECODER, config.text, config)


def _check_limits(limits: LimitsConfig, method: str, packs: bool) -> None:
    for name, value in vars(limits).items():
        if value not in (None, LimitsConfig.rule) and not packs:
            raise ConfigError(f"data.limits.{name}={value} with data.balance={method}, which fills no rows to it")
        if value is not None and method != "isf" and name.startswith("full_"):
            raise ConfigError(f"data.limits.{name}={value} with data.balance={method}: only isf asks what is full")
    for name in ("text", "vision"):
        most, full = getattr(limits, name), getattr(limits, f"full_{name}")
        if most is not None and full is not None and full > most:
            raise ConfigError(f"data.limits.full_{name}={full} > data.limits.{name}={most}: no row would ever be full")


def check_state_bytes(name: str, part: PartConfig) -> None:
    """Raises ConfigError for bytes that no form of states has. Which layouts hold which form is in `PART_RULES`."""
    if part.state_bytes not in FORMS:
        forms = "; ".join(form.equation for form in FORMS.values())
        raise ConfigError(
            f"{name}.state_bytes={part.state_bytes} does not exist; choose from {', '.join(map(str, FORMS))}, bytes of "
            f"a parameter with dtype={BFLOAT16}: {forms}"
        )


_DTYPES = (BFLOAT16, "float32", "float64")
_BACKENDS = ("auto", "sdpa", FLASH_ATTENTION_2)
AUTO, PLAIN = "auto", "plain"
TORCH, COMPILED, WRITTEN, PADDED = "torch", "compiled", "written", "padded"
# Kinds of elementwise work of a layer, and the kernels for it, the fastest first; and plain: the module's own
# code. torch: a kernel of PyTorch's. compiled: ours, by torch.compile. written: ours, operation by operation. padded:
# with zeros up to a width that matrix units take.
KERNELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"norm": (TORCH, COMPILED, WRITTEN), "rotary": (COMPILED, WRITTEN), "gate": (COMPILED,), "mlp": (PADDED,)}
)
ON_GPUS = (TORCH, COMPILED)  # on CPUs PyTorch's norm is made of pieces, and compiling takes longer than it saves


def read_kernels(name: str, text: str) -> dict[str, str]:
    """The kernel of each kind of elementwise work, from `norm:written,gate:plain` or `auto`. Raises ConfigError."""
    found = dict.fromkeys(KERNELS, AUTO)
    for item in () if text == AUTO else text.split(","):
        kind, _, kernel = (word.strip() for word in item.partition(":"))
        if kind not in KERNELS or kernel not in (AUTO, PLAIN, *KERNELS[kind]):
            known = [f"{k}:{one}" for k, own in KERNELS.items() for one in (*own, PLAIN)]
            raise ConfigError(
                f"{name}.kernels={text}: {item!r} names no kernel. Give auto, or some of {', '.join(known)}, with "
                f"commas between them{did_you_mean([nearest(item.strip(), known)])}"
            )
        found[kind] = kernel
    return found


def check_formats(name: str, part: PartConfig) -> None:
    """Check the part's number format, attention backend and kernels. Raises ConfigError."""
    if part.dtype in ("bf16", "float16", "fp16"):
        raise ConfigError(
            f"{name}.dtype={part.dtype} does not exist: of the 16-bit formats there is bfloat16, whose range is that "
            f"of float32, so that no loss has to be scaled. Set {name}.dtype=bfloat16."
        )
    require_choice(f"{name}.dtype", part.dtype, _DTYPES)
    require_choice(f"{name}.attention_backend", part.attention_backend, _BACKENDS)
    read_kernels(name, part.kernels)


MATCH_ADAMW, ORIGINAL = ADJUSTMENTS = ("match_rms_adamw", "original")

# Of optimizers other than AdamW, in a part of a run.
OPTIMIZER_RULES: tuple[Rule, ...] = (
    Rule("training.optimizer {name}.zero_stage {name}.zero_engine",
         lambda p, c: p.zero_stage and p.zero_engine == DEEPSPEED,
         ": DeepSpeed cuts weights into ranges of elements and updates each by itself, but {c.training.optimizer} "
         "needs whole rows and columns. Set {name}.zero_engine=fsdp with {name}.zero_stage=2 or 3 (and "
         "{name}.parallelism=data in the place of deepspeed), {name}.zero_stage=0, or training.optimizer=adamw."),
    Rule("training.optimizer {name}.state_bytes", lambda p, c: p.state_bytes != EXACT_STATES,
         f": forms of states below {EXACT_STATES} bytes are AdamW's. Leave {{name}}.state_bytes out, or set "
         "training.optimizer=adamw.", NOT_BUILT),
    Rule("training.optimizer {name}.host_moments", lambda p, c: p.host_moments,
         ": rows of AdamW's moments come from host memory one after another, but {c.training.optimizer} needs whole "
         "matrices. Set {name}.host_moments=false, or training.optimizer=adamw."),
    Rule("training.optimizer {name}.parallelism", lambda p, c: p.parallelism == "autotp",
         ": DeepSpeed's layers were never tested with it here. Set {name}.parallelism=tensor, or "
         "training.optimizer=adamw.", NOT_BUILT),
)  # fmt: skip


def with_engine(optimizer: str, part: PartConfig) -> PartConfig:
    """The part with zero_engine=fsdp in the place of auto where the optimizer goes with that one alone."""
    asked = optimizer != ADAMW and part.zero_stage >= 2 and part.parallelism != DEEPSPEED
    return replace(part, zero_engine=FSDP) if asked and part.zero_engine == "auto" else part


def check_optimizer(config: Config) -> None:
    """Rules of the optimizer of a resolved configuration. Raises ConfigError."""
    training = config.training
    require_choice("training.optimizer", training.optimizer, OPTIMIZERS, {"adam": ADAMW, "adamw_torch": ADAMW})
    require_choice("training.muon_adjust_lr", training.muon_adjust_lr, ADJUSTMENTS)
    momentum = training.muon_momentum
    require(0 <= momentum < 1, "training.muon_momentum", momentum, "0 <= muon_momentum < 1")
    for key, default in (("muon_momentum", 0.95), ("muon_adjust_lr", MATCH_ADAMW)):
        value, alone = getattr(training, key), training.optimizer == MUON
        require(alone or value == default, f"training.{key}", value, "training.optimizer=muon, which alone reads it")
    if training.optimizer != ADAMW:
        for name, part in parts(config).items():
            check_rules(OPTIMIZER_RULES, name, part, config)
