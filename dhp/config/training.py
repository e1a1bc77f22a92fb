"""The configuration's section about objective, optimizer and length."""

from dataclasses import dataclass, field, replace
from typing import Any, Optional

from dhp.config.roles import BESIDE, FREE, HELD, key


@dataclass
class GroupConfig:
    """Parameters that are trained in another way than the rest; what is null is as in the section training."""

    parameters: list[str] = field(default_factory=list)
    """Which: parts and patterns, as in training.trainable. Empty: what the group's own name selects, as projector."""

    learning_rate: Optional[float] = None
    """Their peak step size."""

    weight_decay: Optional[float] = None
    """Their decay: 0 is what many give biases and norms, by `["*bias", "*norm*"]`."""

    warmup_steps: Optional[int] = None
    """Steps over which their learning rate rises from 0."""


@dataclass
class PreferenceConfig:
    """Objectives of preferences: dpo, kto and orpo."""

    beta: float = 0.1
    """dpo and kto: how strongly the model is held to the reference; orpo: the weight of the odds. Above 0."""

    label_smoothing: float = key(0.0, advanced=True)
    """dpo: the share of preferences that are taken for the other way round, in [0, 0.5)."""

    liked_weight: float = key(1.0, advanced=True)
    """kto: weight of answers that are liked."""

    disliked_weight: float = key(1.0, advanced=True)
    """kto: weight of those that are not."""

    reference: str = key("start", resume=HELD)
    """The model that dpo and kto compare with, by its log-probabilities of all answers, which are computed before the
    first step and kept in data.cache_dir, by model and sample: start (as the run begins: model_name, or
    text.lora.begin_from) | base (model_name, without adapters)."""


@dataclass
class EarlyStoppingConfig:
    """Ends the run where evaluations stop getting better."""

    metric: Optional[str] = key(None, resume=BESIDE)
    """What has to: eval_loss (down), eval_accuracy, eval_exact or, of preferences, eval_margin (up), of all of
    data.eval_datasets together; or of one of them, as eval_loss/NAME. Null: the run goes on to its last step."""

    patience: int = key(3, resume=BESIDE)
    """Evaluations in a row without it, behind which the run ends as at its last step, with a checkpoint."""

    min_delta: float = key(0.0, resume=BESIDE)
    """By how much it has to be better than the best before, in the metric's unit."""


@dataclass
class TrainingConfig:
    """The objective, the optimizer and the length of the run."""

    objective: str = "sft"
    """What a step minimizes: sft (the cross-entropy of each target token, mean over all of the step) | dpo | kto | orpo
    (of preferences, mean over those of the step: training.preference), or one that a module of plugins registers."""

    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    """Objectives of preferences."""

    batch_size: int = key(8, resume=HELD)
    """Samples a step over all replicas; batch_size = text.data × micro_batch_size × micro-batches a step. With
    data.balance=isf or balanced it gives the rows of a step, and samples vary: 4 may give steps of 2, 2, 4, 4."""

    micro_batch_size: int = key(1, resume=HELD)
    """Samples that one text replica holds in one forward pass."""

    schedule: str = key("sequential", resume=BESIDE)
    """Order of a step's micro-batches: sequential (one after the other) | vision_ahead (vision encodes the next one
    while text works on this one; one more micro-batch of vision activations in memory) | gpipe (all forward, then all
    back; all activations in memory) | 1f1b (a stage goes forward once for each stage after it, then in turn forward and
    back; with one text stage the same as vision_ahead) | interleaved (1f1b over text.virtual_stages runs of layers a
    stage, which wait less for one another; micro-batches a multiple of text.pipeline). All give the same gradients."""

    vision_batch: Optional[int] = key(1, resume=BESIDE)
    """Micro-batches whose pictures (and clips of sound) encoders take in one pass, assigned evenly to all of their
    actors; a step's last pass takes those that are left. Features wait until the decoder takes them, and the pass goes
    back once, when all of its gradients are there: fewer calls and fuller ones, for that many times the activations of
    an encoder. Null: those of the whole step. All give the same gradients."""

    optimizer: str = key("adamw", resume=HELD)
    """Who takes the steps: adamw | muon (matrices of hidden layers by their orthogonalized momentum, as
    torch.optim.Muon, all else by AdamW) | adafactor (no momentum; of a matrix, mean squares of rows and of columns
    alone, as transformers' Trainer has it). muon and adafactor go with zero_stage=0 or zero_engine=fsdp, which auto
    means then, and state_bytes=18."""

    learning_rate: float = 1e-3
    """Peak step size of the optimizer, for all that is trained."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's two decay rates, of the mean and of the mean square of the gradients; each in [0, 1)."""

    eps: float = 1e-8
    """AdamW's term added to the denominator; above 0."""

    weight_decay: float = 0.01
    """Decoupled decay of every parameter: each step takes learning_rate × weight_decay of it away."""

    muon_momentum: float = key(0.95, advanced=True)
    """Muon's decay rate of the mean of the gradients, in [0, 1); Nesterov's, as torch has it."""

    muon_adjust_lr: str = key("match_rms_adamw", advanced=True)
    """What Muon multiplies the learning rate of a matrix by: match_rms_adamw (0.2 × √ of its longer side, so that its
    updates have the size of AdamW's and both take one learning_rate) | original (√ of rows / columns, at least 1)."""

    trainable: list[str] = key(factory=list, resume=HELD)
    """What is trained. Parts: vision (a tower without its projector) | audio | projector (what leads from a tower to
    the decoder) | text (embedding, layers and head). Or patterns: pieces of a parameter's dotted name with * for any
    letters, as layers.0 or q_proj or "*norm.weight". What nothing trains has no gradient and no optimizer's state, and
    there is no backward where nothing before it is trained either. Empty: all."""

    frozen: list[str] = key(factory=list, resume=HELD)
    """What of it stays as it is all the same; parts and patterns as in trainable."""

    groups: dict[str, GroupConfig] = field(default_factory=dict)
    """Learning rates, decays and warm-ups of their own, by a name of your choice. Where several are about a parameter,
    the later one counts in what it says."""

    num_epochs: int = key(1, resume=BESIDE)
    """Passes over the data (epochs); max_steps, where set, beats it."""

    max_steps: Optional[int] = key(None, resume=BESIDE)
    """Optimizer steps of the run. Null: as many as num_epochs make."""

    warmup_ratio: float = key(0.0, resume=BESIDE)
    """Fraction of all steps over which the learning rate rises from 0; rounded up to whole steps."""

    warmup_steps: Optional[int] = key(None, resume=BESIDE)
    """Steps over which the learning rate rises from 0; beats warmup_ratio. Null: by warmup_ratio."""

    lr_scheduler_type: str = "constant"
    """Learning rate after the warm-up: constant | linear (down to min_lr at the end) | cosine (half a wave down to
    min_lr) | cosine_with_restarts (lr_num_cycles of these) | warmup_stable_decay (constant, and down to min_lr over the
    last lr_decay_steps). Each is transformers' schedule of that name, cosine with a min_lr its cosine_with_min_lr."""

    min_lr: float = 0.0
    """Learning rate at the end of a schedule that falls, a rate and no share of one. Groups with other rates fall to
    the same share of theirs, min_lr / learning_rate. With warmup_stable_decay the warm-up begins there as well."""

    lr_num_cycles: int = key(1, advanced=True)
    """Half waves of cosine_with_restarts: each begins at learning_rate again."""

    lr_decay_steps: Optional[int] = key(None, resume=BESIDE, advanced=True)
    """Last steps of the run, over which warmup_stable_decay falls; beats lr_decay_ratio. Null: by lr_decay_ratio."""

    lr_decay_ratio: float = key(0.1, resume=BESIDE, advanced=True)
    """Fraction of all steps over which warmup_stable_decay falls; rounded up to whole steps."""

    lr_decay_type: str = key("cosine", advanced=True)
    """How warmup_stable_decay falls: cosine (half a wave) | linear | 1-sqrt (fast, then slower)."""

    max_grad_norm: Optional[float] = None
    """Largest global gradient norm, over all stages; larger gradients are scaled to it. Null or 0: no clipping."""

    max_nonfinite_steps: int = key(3, resume=BESIDE, advanced=True)
    """Steps in a row whose loss or gradient is not finite that end the run. Fewer are skipped: nothing is updated, and
    their samples are named. 0 or 1: the first one ends it."""

    deterministic: bool = key(False, resume=FREE)
    """true: kernels that give the same bits each time alone, so that a run, resumed or not, is repeatable to the bit
    on GPUs too, as it is on CPUs anyway. Slower; an operation without such a kernel ends the run with its name."""

    log_interval: int = key(1, resume=BESIDE)
    """Steps between two printed lines; metrics.jsonl has every step all the same."""

    trace: Any = key(False, resume=BESIDE)
    """Write trace.json in run_dir: what every rank did when (forward, backward, transfer, collective, wait, data,
    optimizer), for https://ui.perfetto.dev or chrome://tracing: true, of all steps; [500, 510], of these. Costs little
    time, and some 100 KB a step and rank."""

    dry_run: bool = key(False, resume=BESIDE)
    """Check everything, print layout and memory by the model's shape, and end: no weights, GPUs, actors or run_dir."""

    checkpoint_dir: Optional[str] = key(None, resume=BESIDE)
    """Directory of the checkpoints. Null: `checkpoints` in run_dir."""

    save_steps: Optional[int] = key(None, resume=BESIDE)
    """Optimizer steps between two checkpoints, besides that of the end. Null: none between."""

    save_epochs: Optional[int] = key(None, resume=BESIDE)
    """Epochs between two checkpoints: there is one after the step that ends each so many-th. Null: none for epochs."""

    save_minutes: Optional[float] = key(None, resume=BESIDE)
    """Minutes between two checkpoints, by the clock, besides the others. Null: none by the clock."""

    save_in_background: bool = key(True, resume=BESIDE)
    """true: each rank copies what it saves to host memory, as much as its share of the checkpoint, which it keeps; a
    thread writes the copy while training goes on. false: training waits until all is written, with 256 MiB of
    copies."""

    save_timeout_s: float = key(1800.0, resume=BESIDE, advanced=True)
    """The longest that ranks may take to write a checkpoint, seconds; a run in which one takes longer fails."""

    save_final: bool = key(True, resume=BESIDE)
    """Write a checkpoint after the last step. False: what was trained after the last of save_steps and save_epochs is
    lost, all of it where neither is set."""

    save_total_limit: Optional[int] = key(None, resume=BESIDE)
    """Checkpoints that are kept, the newest ones, and the best one besides them; older ones are removed when a newer
    one is complete. Null: all."""

    eval_steps: Optional[int] = key(None, resume=BESIDE)
    """Optimizer steps between two evaluations on data.eval_datasets; there is one at the end in any case. Null: only
    that one."""

    eval_on_start: bool = key(False, resume=BESIDE)
    """Evaluate data.eval_datasets before the first step too: what the model knows and answers before it is trained."""

    eval_answers: int = key(0, resume=BESIDE)
    """Samples of each dataset of data.eval_datasets, its first ones, whose first answers are generated with each
    evaluation, the likeliest token each time, and shown with those of the dataset: in the log, metrics.jsonl and
    TensorBoard. With text.pipeline=1, expert=1, compile=false, and zero_stage up to 2 by DeepSpeed. 0: none."""

    eval_answer_tokens: int = key(64, resume=BESIDE, advanced=True)
    """The longest of these answers, tokens."""

    best_metric: Optional[str] = key(None, resume=BESIDE)
    """What says which checkpoint is best, the lower the better: eval_loss (of all of data.eval_datasets together) or
    eval_loss/NAME (of one of them). Each checkpoint is evaluated then, and `checkpoints/best` leads to the best one.
    Null: none is."""

    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    """Ends the run where evaluations stop getting better."""

    resume: str = key("never", resume=BESIDE)
    """Where the run begins: never (at step 1) | auto (after the newest sound checkpoint in checkpoint_dir, else at
    step 1; run_dir may hold the run that stopped) | PATH of a checkpoint or of a run: its newest one."""

    resume_changes: list[str] = key(factory=list, resume=BESIDE)
    """Settings that a resumed run may have otherwise than its checkpoint, though they decide how it trains, by key:
    [training.learning_rate, training.total_steps]. Without them it is refused. What decides its samples' order and what
    is trained cannot be changed."""

    empty_rows: bool = key(False, resume=BESIDE)
    """true: text.data need not divide the rows of a step (batch_size / micro_batch_size): the last micro-batch has
    empty ones. For a run that goes on with other numbers of replicas; the losses are the same."""

    max_restarts: int = key(0, resume=BESIDE)
    """Times that the run starts again by itself after a fault (a rank, node, Ray or the driver that died or hung), from
    its newest checkpoint or where it began; counted anew from each checkpoint on. Its driver is then a process of its
    own, watched by the one that was started. 0: a fault ends the run."""

    restart_wait_s: float = key(5.0, resume=BESIDE)
    """Seconds before the first restart, twice as long before each next one until there is a new checkpoint, at most
    300."""

    elastic: list[str] = key(factory=list, resume=BESIDE)
    """Layouts for fewer devices, in which the run goes on where a node stays away after a fault: each as settings,
    apart by spaces, as "text.num_actors=2 vision.num_actors=2", or auto, for layouts that are planned at the start. All
    are checked before the run begins; batch and rows are the same in each. With more devices again, the run goes back
    to the larger one at its next checkpoint. Needs max_restarts. Empty: it waits for all devices."""

    elastic_wait_s: float = key(60.0, resume=BESIDE)
    """Seconds that the run waits, after a fault, for the devices of its layout before it takes one of
    training.elastic."""

    loggers: list[str] = key(factory=list, resume=BESIDE)
    """Loggers that get every step besides metrics.jsonl and TensorBoard: wandb | mlflow | swanlab, several as
    [wandb, mlflow]. Packages of their own, to be installed; their environment variables act (WANDB_MODE=offline,
    MLFLOW_TRACKING_URI, SWANLAB_MODE=offline). One that fails never stops a run."""

    logger_project: Optional[str] = key(None, resume=BESIDE, advanced=True)
    """Where the loggers file the run: their project, MLflow's experiment. Null: the run's name."""


def without_evaluation(training: TrainingConfig) -> TrainingConfig:
    """The same, where data.eval_datasets says nothing to it."""
    never = EarlyStoppingConfig()
    return replace(
        training, eval_steps=None, eval_on_start=False, eval_answers=0, best_metric=None, early_stopping=never
    )
