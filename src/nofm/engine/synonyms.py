"""Words that other tools use for settings, and what those are called here: for messages about keys that do not exist. Needs no torch.

Words that a key itself holds (momentum, batch-size, decay) are not listed: `resolve.near` finds them.
"""

from __future__ import annotations

__all__ = ["SYNONYMS"]

_WORDS = {
    "model.name": "arch architecture net network",
    "data.name": "dataset",
    "data.root": "data_dir data_folder data_path datadir dataroot path",
    "sparsity.pattern": "n m nm n_m",
    "sparsity.budget": "density",
    "sparsity.method.kind": "algorithm method",
    "sparsity.method.decay": "lam lambda lambda_w lmbda",
    "optim.kind": "opt optimiser optimizer",
    "optim.lr": "learningrate learning_rate",
    "optim.weight_decay": "l2 wd",
    "schedule.kind": "lr_schedule lr_scheduler scheduler",
    "engine.steps": "iterations iters max_iters",
    "engine.batch_size": "batch bs bsz per_device_train_batch_size",
    "engine.accumulate": "accum accumulate_grad_batches grad_accum gradient_accumulation_steps",
    "engine.clip": "clip_grad_norm max_grad_norm max_norm",
    "engine.precision": "amp bf16 dtype fp16 half",
    "engine.ema": "ema_decay",
    "engine.log_every": "log_interval log_steps print_freq",
    "engine.eval_every": "eval_freq eval_interval eval_steps",
    "engine.checkpoint_every": "save_every save_freq save_interval save_steps",
    "engine.track": "mlflow tensorboard wandb",
    "device": "accelerator cuda gpu gpus",
    "out": "logdir log_dir outdir output output_dir save_dir workdir work_dir",
}
SYNONYMS = {word: key for key, words in _WORDS.items() for word in words.split()}
