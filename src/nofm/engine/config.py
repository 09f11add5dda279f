"""`RunConfig`: everything that decides a training run, as frozen values. Needs no torch.

A recipe is a function that returns one; files and dotted options change fields of it. Field docstrings are the help text.
Lengths (`schedule.warmup`, `schedule.milestones`, `engine.eval_every`, `engine.checkpoint_every`) are in epochs where
`engine.epochs` says how long a run is, and in steps where `engine.steps` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from ..errors import NofmError

__all__ = [
    "ConfigError",
    "DataConfig",
    "EngineConfig",
    "MethodConfig",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "ScheduleConfig",
    "SparsityConfig",
    "TaskConfig",
]

Length: TypeAlias = float

# How pydantic reads these classes: a key that does not exist is an error, never ignored.
_FORBID: dict[str, object] = {"extra": "forbid"}


class ConfigError(NofmError):
    """A configuration that cannot be run. The message names the key and says what is allowed."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What is learned."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    kind: Literal["classification"] = "classification"
    """Which task."""
    label_smoothing: float = 0.0
    """Share of each label that is spread over all classes, 0 to below 1."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    name: str = "cnn"
    """cnn, cifar/resnet20, cifar/resnet32, cifar/resnet18, torchvision/NAME or timm/NAME."""
    width: int | None = None
    """Channels of the first convolution (cnn and cifar/ models)."""
    dropout: float | None = None
    """Dropout before the classifier (cnn and cifar/ models)."""
    norm: Literal["batch", "group"] | None = None
    """Normalisation (cnn and cifar/ models); batch where nothing is said."""
    pretrained: bool = False
    """Start from published weights (torchvision/ and timm/ models)."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images, and what is done to them."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    name: Literal["digits", "fashion", "cifar10", "folder"] = "digits"
    """digits comes with scikit-learn; fashion reads idx files; cifar10 PNG sheets or torchvision's layout; folder reads
    ROOT/train/CLASS/*.jpg and ROOT/val/CLASS/*.jpg, as ImageNet is laid out."""
    root: str | None = None
    """Folder of the data (all but digits)."""
    size: int | None = None
    """Side of the square that images are cut to (folder only; 224 where nothing is said)."""
    crop: int = 0
    """Random crops after padding by so many pixels (all but folder, which cuts at random anyway)."""
    flip: bool = False
    """Mirror half of the training images."""
    loader: Literal["resident", "workers"] = "resident"
    """resident keeps small data on the device and augments there; workers reads images in `engine.workers` processes."""
    corrupt: Literal["error", "skip"] = "error"
    """What to do about an image that cannot be read: stop and name it, or take the next one and count it (folder only)."""


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """How the sparse network is trained. Options that are not given have the method's own defaults."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    kind: str = "srste"
    """dense, ste, srste, asp: a name of nofm.METHODS."""
    decay: float | None = None
    """srste: lambda of the paper."""
    refine: Literal["weight", "sign", "gradient"] | None = None
    """srste: Eq. 4, 5 or 6."""
    placement: Literal["gradient", "decoupled", "backward"] | None = None
    """srste: where the term is added."""
    prune_at: int | None = None
    """asp: the step after which the mask is made and frozen."""


@dataclass(frozen=True, kw_only=True)
class SparsityConfig:
    """Which layers are sparse, and how."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    pattern: str | None = "2:4"
    """N:M for all layers that the preset does not keep dense."""
    rules: tuple[str, ...] = ()
    """Instead of a pattern: GLOB=N:M or GLOB=dense for layers by name, first match wins."""
    preset: Literal["default", "paper", "asp", "all"] = "default"
    """Which layers stay dense by custom."""
    skip: tuple[str, ...] = ()
    """Globs of layers that stay dense."""
    axis: Literal["input", "flat"] = "input"
    """Where groups lie."""
    method: MethodConfig = field(default_factory=MethodConfig)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    kind: Literal["sgd", "adam", "adamw"] = "sgd"
    """Which one."""
    lr: float = 0.1
    """The largest learning rate."""
    momentum: float | None = None
    """sgd: 0.9 where nothing is said."""
    nesterov: bool = False
    """sgd: Nesterov's momentum."""
    weight_decay: float = 0.0
    """On all weights; decoupled for adamw."""
    betas: tuple[float, float] | None = None
    """adam, adamw: 0.9 0.999 where nothing is said."""
    eps: float | None = None
    """adam, adamw: 1e-8 where nothing is said."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate moves, step by step."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    kind: Literal["cosine", "step", "onecycle", "constant"] = "cosine"
    """cosine to `final`, step by `gamma` at `milestones`, one cycle, or constant."""
    warmup: Length = 0.0
    """Linear warm-up from 0; for onecycle, the rising part. In epochs or steps, as the run."""
    final: float = 0.0
    """cosine: the learning rate at the end."""
    milestones: tuple[Length, ...] = ()
    """step: when to multiply by `gamma`."""
    gamma: float | None = None
    """step: 0.1 where nothing is said."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How long, how large, how exact, how often."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    epochs: float | None = None
    """Length of the run, in passes over the data."""
    steps: int | None = None
    """Length of the run in optimizer steps, instead of epochs."""
    batch_size: int = 64
    """Images of one optimizer step, over all processes and micro-batches together."""
    accumulate: int = 1
    """Micro-batches of a step."""
    clip: float | None = None
    """Largest norm of the gradient."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Autocast dtype. fp16 scales the loss."""
    tf32: bool = True
    """Let CUDA multiply fp32 matrices in TF32."""
    compile: bool = False
    """torch.compile the task."""
    channels_last: bool = False
    """Memory layout of images and convolutions."""
    deterministic: bool = False
    """Only algorithms that give the same bits every time; an operation without one is an error."""
    ema: float | None = None
    """Decay of an exponential moving average of the weights, between 0 and 1. It is evaluated and exported as well."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: copies of the model, or FSDP2 shards of it."""
    threads: int | None = None
    """CPU threads; torch's choice where nothing is said."""
    workers: int = 0
    """Processes that read images (data.loader workers)."""
    log_every: int = 20
    """Steps between two lines of the log, and between two SAD measurements."""
    eval_every: Length = 1.0
    """Epochs or steps between two evaluations; there is always one at the end."""
    checkpoint_every: Length | None = None
    """Epochs or steps between two checkpoints; there is always one at the end. As `eval_every` where nothing is said."""
    keep: int = 2
    """How many checkpoints to keep."""
    track: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Where events go besides events.jsonl."""
    histogram_every: int = 0
    """tensorboard: steps between two histograms of the sparse weights, 0 for none."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    seed: int = 0
    """Decides starting weights, the order of images and all other chance."""
    device: str = "auto"
    """auto (cuda where there is one), cpu, cuda or cuda:N."""
    out: str | None = None
    """Folder of the run; runs/RECIPE-TIME where nothing is said."""
