"""`RunConfig`: everything that decides a training run, as frozen values. Needs no torch.

A recipe is a function that returns one; files and dotted options change fields of it. Field docstrings are the help text.
Settings that only some tasks, methods or optimizers have are None where nothing is said: so one that is given to another is noticed.
Lengths (`schedule.warmup`, `schedule.milestones`, `engine.eval_every`, `sparsity.method.prune_at` and all others of type Length) are in
epochs where `engine.epochs` says how long a run is, and in steps where `engine.steps` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, TypeAlias

from ..errors import NofmError

__all__ = [
    "ConfigError",
    "DataConfig",
    "EngineConfig",
    "Length",
    "MethodConfig",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "ScheduleConfig",
    "SparsityConfig",
    "TaskConfig",
]

Length: TypeAlias = Annotated[float, "in the unit of the run"]  # so that counting.py finds them

# How pydantic reads these classes: a key that does not exist is an error, never ignored.
_FORBID: dict[str, object] = {"extra": "forbid"}


class ConfigError(NofmError):
    """A configuration that cannot be run. The message names the key and says what is allowed."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What is learned."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    kind: Literal["classification", "detection", "segmentation", "translation", "flow"] = "classification"
    """Which task."""
    label_smoothing: float = 0.0
    """Share of each label that is spread over all classes, 0 to below 1 (classification, translation)."""
    beams: int | None = None
    """translation: how many hypotheses a search keeps, 1 to 64; 5 where nothing is said. 1 is greedy."""
    alpha: float | None = None
    """translation: length penalty of the search, 0 for none; 0.6 where nothing is said."""
    updates: int | None = None
    """flow: refinements in training, 1 to 64; 12 where nothing is said."""
    test_updates: int | None = None
    """flow: refinements in tests; as in training where nothing is said."""
    gamma: float | None = None
    """flow: how much less each refinement counts in the loss than the one after it; 0.8 where nothing is said."""
    max_flow: float | None = None
    """flow: pixels that move farther do not count in the loss; 400 where nothing is said."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    name: str = "cnn"
    """classification: cnn, cifar/resnet20, cifar/resnet32, cifar/resnet18, cifar/regnetx_002 (to 032), torchvision/NAME or timm/NAME.
    detection: fasterrcnn_resnet50_fpn or fasterrcnn_tiny. segmentation: maskrcnn_resnet50_fpn or maskrcnn_tiny. translation:
    transformer/base or transformer/small. flow: raft_large, raft_small or raft_tiny."""
    width: int | None = None
    """Channels of the first convolution (cnn and cifar/resnet models)."""
    layers: int | None = None
    """Layers of the encoder and of the decoder (transformer/ models); 6 of base and 3 of small where nothing is said."""
    dropout: float | None = None
    """Dropout before the classifier (cnn and cifar/resnet models), or after every part (transformer/ models)."""
    norm: Literal["batch", "group", "frozen", "post", "pre"] | None = None
    """Normalisation: batch or group (cnn and cifar/resnet models), batch where nothing is said; also frozen (detectors), which it is where
    nothing is said and a backbone is given; after or before every part (transformer/ models), after it, post, where nothing is said."""
    batch_parts: int | None = None
    """Pieces of a batch that the 16-channel convolutions of cifar/resnet20 and cifar/resnet32 take side by side: the same numbers but for
    rounding, in less time on a GPU, where 4 is best. 1 where nothing is said."""
    pretrained: bool = False
    """Start from published weights (torchvision/ and timm/ models, raft_large and raft_small)."""
    weights: str | None = None
    """Start from weights of this very network: a finished run's folder (its model-ema.safetensors for the average) or a safetensors file;
    {seed} in it is the seed, so that each of several runs starts from another ("runs/dense/seed-{seed}"). classification: where the data
    have other classes, from all but its classifier's."""
    backbone: str | None = None
    """detection, segmentation: a run's folder or a safetensors file of a classification network that the ResNet begins with."""
    trainable_layers: int | None = None
    """detection, segmentation: stages of the ResNet that are trained, from the last, 0 to 5. All; with a frozen norm 3, as is custom."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images or texts, and what is done to them."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    name: Literal[
        "digits", "fashion", "cifar10", "folder",
        "coco",
        "parallel", "multi30k", "libreoffice",
        "chairs", "sintel", "kitti", "middlebury", "stamps",
    ] = "digits"  # fmt: skip
    """digits comes with scikit-learn; fashion reads idx files; cifar10 PNG sheets with JSON labels, or the binary version's .bin files;
    folder reads ROOT/train/CLASS/*.jpg and ROOT/val/CLASS/*.jpg, as ImageNet is laid out. detection, segmentation: coco reads the json
    files of the splits train and val and their images, as COCO and others lay them out. translation: parallel reads ROOT/train.en and
    train.de, test.en and test.de, plain or gzipped; multi30k its own splits; libreoffice the unpacked help packages. flow: chairs, sintel,
    kitti and middlebury as they are laid out; stamps ROOT/train.npz and ROOT/val.npz of examples/make_stamps.py."""
    root: str | None = None
    """Folder of the data (all but digits)."""
    size: int | None = None
    """Side of the square that images are cut to (folder; 224 where nothing is said), or pixels of the shorter side that they are
    resized to (detection, segmentation; 800 where nothing is said)."""
    max_size: int | None = None
    """detection, segmentation: pixels that the longer side has at most; 1333 where nothing is said."""
    scale_jitter: tuple[float, float] | None = None
    """detection, segmentation: training images are resized by a factor between these two and cut or padded back to their size."""
    crop: int = 0
    """classification: random crops after padding by so many pixels (all but folder, which cuts at random anyway)."""
    crop_size: tuple[int, int] | None = None
    """flow: height and width that training pairs are cut to, divisible by 8; 368 496 where nothing is said."""
    flip: bool = False
    """Mirror half of the training images."""
    loader: Literal["resident", "workers"] = "resident"
    """resident keeps small data on the device and augments there; workers reads images in `engine.workers` processes."""
    corrupt: Literal["error", "skip"] = "error"
    """What to do about an image that cannot be read: stop and name it, or take the next one and count it (folder, coco, and flow's
    files)."""
    source: str | None = None
    """translation: the language to translate from, as files end; en where nothing is said."""
    target: str | None = None
    """translation: the language to translate to; de where nothing is said."""
    held_out: int | None = None
    """digits, fashion, cifar10: so many training images (the last; of digits, whose neighbours are by one hand, evenly spaced ones) are
    not trained on but measured on, in place of the test images: to choose options by. `nofm evaluate RUN --name test
    --data.held_out none` then measures what was chosen on the test images."""
    test: str | None = None
    """The split to be measured on: translation, test, of multi30k test_2016_flickr, where nothing is said; detection and segmentation,
    val where nothing is said; flow, val, what its layout holds out, or of data that was not trained on all (nofm evaluate)."""
    vocabulary: int | None = None
    """translation: tokens that both languages share, at least 259; 8000 where nothing is said."""
    max_length: int | None = None
    """translation: longer sentences, in tokens, are not trained on; 128 where nothing is said."""
    cache: str | None = None
    """translation: a folder to keep vocabularies in, so that each is learned once."""


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """How the sparse network is trained. Options that are not given have the method's own defaults."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    kind: str = "srste"
    """dense, ste, srste or asp for N:M; with sparsity.pattern 1:1 the unstructured gmp, rigl, set, snfs, dsr, deepr, str, dnw, snip,
    lottery and ste_unstructured."""
    decay: float | Literal["auto"] | None = None
    """srste: lambda of the paper, or auto to find it by the flip rate in the first `probe` steps. str: weight decay of thresholds beyond
    that of the weights."""
    refine: Literal["weight", "sign", "gradient"] | None = None
    """srste: what the term is made of: weight (Eq. 4, where nothing is said), sign (Eq. 5) or gradient (Eq. 6)."""
    placement: Literal["gradient", "decoupled", "backward"] | None = None
    """srste: where the term is added: to the gradient (as in the paper, where nothing is said), decoupled, to the weight itself as
    AdamW's decay, or in backward, as the code released with the paper does."""
    target: float | None = None
    """srste with decay auto: the flip rate wanted, as share of weights in a step; 0.6 of STE's own where nothing is said."""
    probe: Length | None = None
    """srste with decay auto: how long to look for it, about a tenth of the run, from begin_at on; 1000 steps where nothing is
    said."""
    prune_at: Length | None = None
    """asp: when the mask is made and frozen, in epochs or steps, as the run; must be given, but for weights that are trained already
    (model.weights, model.pretrained, model.backbone), of which it is made at once."""
    sparsity: float | None = None
    """unstructured methods: share of all sparse weights that is pruned, between 0 and 1."""
    allocation: Literal["uniform", "erk", "global"] | None = None
    """unstructured methods: whether all layers have the same density, or small ones a higher one; global (gmp, ste_unstructured, dnw,
    lottery): all weights of the network compete."""
    every: Length | None = None
    """methods that prune or rewire many times: from one time to the next, 100 steps where nothing is said. lottery: length of the first
    training."""
    begin_at: Length | None = None
    """gmp: when sparsity begins to rise. srste: a dense start, up to when layers compute with all their weights; or, with ramp_at, a
    gradual one. In epochs or steps, as the run."""
    ramp_at: Length | None = None
    """srste with begin_at: a gradual start, from when on layers compute with fewer and fewer weights, down to their pattern at begin_at: 8,
    4, 2 and 1 of 16 at 1:16, 3 and 2 of 4 at 2:4. In epochs or steps, as the run."""
    end_at: Length | None = None
    """methods that prune or rewire many times: from when on masks stay. gmp and rigl need it, and three quarters of the run is usual."""
    batches: int | None = None
    """snip: how many steps' gradients to measure sensitivity with."""
    rounds: int | None = None
    """lottery: how many times to prune and go back."""
    rewind_to: Length | None = None
    """lottery: the moment to go back to."""
    initial: float | None = None
    """str: what s starts as; the threshold is sigmoid(s)."""
    seed: int | None = None
    """set, rigl, snfs, dsr, deepr: decides which connections are drawn at random."""
    drop: float | None = None
    """set, rigl, snfs: share of the connections that a rewiring replaces. dsr: share of all sparse weights that it is to prune."""
    smoothing: float | None = None
    """snfs: how much of the smoothed gradient stays in a step, between 0 and 1."""
    threshold: float | None = None
    """dsr: the magnitude to prune below, at the start."""
    tolerance: float | None = None
    """dsr: how far from the aim the number of pruned weights may be before the threshold moves, as a share."""
    l1: float | None = None
    """deepr: the pull of every connection towards zero."""
    temperature: float | None = None
    """deepr: of the noise on every connection."""


@dataclass(frozen=True, kw_only=True)
class SparsityConfig:
    """Which layers are sparse, and how."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    pattern: str | None = "2:4"
    """N:M for all layers that the preset does not keep dense."""
    rules: tuple[str, ...] = ()
    """Instead of a pattern: GLOB=N:M or GLOB=dense for layers by name, first match wins."""
    preset: Literal["default", "paper", "asp", "all"] = "default"
    """Which layers stay dense by custom: the first convolution and the classifier (default), the classifier (paper), those that NVIDIA's
    ASP leaves out (asp), or none (all)."""
    skip: tuple[str, ...] = ()
    """Globs of layers that stay dense."""
    axis: Literal["input", "flat"] = "input"
    """Where groups lie: along the input channels (input), as sparse hardware reads them, or along the flattened kernel (flat)."""
    budget: float | None = None
    """Instead of a pattern: the share of weights kept in sparse layers, and in those that it leaves dense, above 0 and up to 1; patterns
    differ by layer."""
    allocation: Literal["uniform", "erk", "magnitude", "sensitivity"] | None = None
    """with budget: how layers share it, see nofm.allocate_patterns; erk where nothing is said. magnitude: of the starting weights.
    sensitivity: their (gradient x weight)^2 on the first batch."""
    candidates: tuple[str, ...] = ()
    """with budget: the patterns to choose from, dense among them; 1:64 1:32 1:16 1:8 1:4 2:4 dense where nothing is said."""
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
    fused: bool = False
    """srste on a CUDA device: its term inside the optimizer's own pass over the weights, where it costs no time of its own."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate moves, step by step."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    kind: Literal["cosine", "step", "onecycle", "constant", "inverse_sqrt"] = "cosine"
    """cosine to `final`, step by `gamma` at `milestones`, one cycle, constant, or down with the inverse root of the step."""
    warmup: Length = 0.0
    """Linear warm-up from 0; for onecycle, the rising part. In epochs or steps, as the run."""
    final: float = 0.0
    """cosine: the learning rate at the end."""
    milestones: tuple[Length, ...] = ()
    """step: when to multiply by `gamma`."""
    restarts: tuple[Length, ...] = ()
    """cosine, onecycle: when to begin again, for methods that train more than once (asp, lottery)."""
    restart_warmup: bool = False
    """Begin again with the warm-up, for a training that is repeated whole (asp); without it from the top."""
    gamma: float | None = None
    """step: 0.1 where nothing is said."""
    shape: Literal["cosine", "linear"] | None = None
    """onecycle: how the rate moves up and down; cosine where nothing is said."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How long, how large, how exact, how often."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    epochs: float | None = None
    """Length of the run, in passes over the data. Lengths of a recipe that has steps, or is too long for it, are scaled to it."""
    steps: int | None = None
    """Length of the run in optimizer steps, instead of epochs. Lengths of a recipe that has epochs, or is too long for it, are scaled."""
    batch_size: int = 64
    """Images (flow: pairs; translation: tokens of either language, padding included) of one optimizer step, over all processes and
    micro-batches together."""
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
    graph: Literal["auto", "on", "off"] = "auto"
    """Whole steps as CUDA graphs, so that small networks train at the GPU's speed and not the host's. auto: on one CUDA device with
    resident data, but not with fp16, whose loss scale the host must see, and not for detection and segmentation."""
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
