"""Translation by a Transformer (--data.root with SPLIT.LANGUAGE files). A step is so many tokens of either language.

The embedding, which is also the softmax, stays dense. The last weights are measured, and their average: nothing is chosen by the test set.
"""

from __future__ import annotations

from ..engine.config import (
    DataConfig,
    EngineConfig,
    MethodConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    SparsityConfig,
    TaskConfig,
)

__all__ = ["multi30k_small", "wmt14_base"]


def _adam(lr: float) -> OptimConfig:
    return OptimConfig(kind="adam", lr=lr, betas=(0.9, 0.98), eps=1e-9)


def multi30k_small() -> RunConfig:
    """A small Transformer on Multi30k, English to German, 2:4 SR-STE, 8,000 steps, sized for one GPU.

    29,000 short sentences want much dropout, and weights averaged over the last epochs, as published small systems have them. The
    learning rate is the Transformer paper's own for this width and warm-up.
    """
    return RunConfig(
        task=TaskConfig(kind="translation", label_smoothing=0.1, beams=5),
        model=ModelConfig(name="transformer/small", layers=4),
        data=DataConfig(name="multi30k", vocabulary=8000),
        sparsity=SparsityConfig(pattern="2:4", method=MethodConfig(kind="srste", decay=2e-4)),
        optim=_adam(1.4e-3),
        schedule=ScheduleConfig(kind="inverse_sqrt", warmup=2000),
        engine=EngineConfig(steps=8000, batch_size=4096, precision="bf16", ema=0.999, log_every=100, eval_every=2000),
    )


def wmt14_base() -> RunConfig:
    """Transformer base on WMT14 (train.en, train.de, newstest2014.*), 2:4 SR-STE, 300,000 steps."""
    return RunConfig(
        task=TaskConfig(kind="translation", label_smoothing=0.1, beams=4),
        model=ModelConfig(name="transformer/base"),
        data=DataConfig(name="parallel", vocabulary=37_000, test="newstest2014"),
        sparsity=SparsityConfig(pattern="2:4", method=MethodConfig(kind="srste", decay=2e-4)),
        optim=_adam(7e-4),
        schedule=ScheduleConfig(kind="inverse_sqrt", warmup=4000),
        # Not as CUDA graphs: each width of sentences would be one of its own, with memory for a softmax of 37,000 tokens.
        engine=EngineConfig(steps=300_000, batch_size=16_384, precision="bf16", ema=0.9999, graph="off", log_every=100, eval_every=10_000),
    )
