"""Dense, STE and SR-STE on translation, by an ordinary loop: a Transformer on Multi30k, LibreOffice's help or any parallel text.

    python examples/translation.py --data PATH/multi30k --method srste --pattern 2:4 --out srste.json
    python examples/translation.py --costs                                     # parameters and multiply-adds

What makes the network sparse are the two lines marked with <--. The embedding, which is also the softmax, stays dense. The JSON file has
settings, versions, the curve, BLEU with sacreBLEU's signature, SAD, costs and some translations. All steps of a run are
taken and the last weights are measured: nothing is chosen by the test set.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import nofm
from nofm.data.pairs import PairLoader
from nofm.data.subwords import cached_subwords
from nofm.data.text import CORPORA, Corpus, read_corpus
from nofm.tasks.transformer import SIZES, build_transformer
from nofm.tasks.translation import Translation, inverse_sqrt

console = Console()


def make_method(args: argparse.Namespace) -> nofm.Method:
    if args.method == "srste":
        return nofm.SRSTE(decay=args.decay, placement=args.placement)
    return {"dense": nofm.Dense, "ste": nofm.STE}[args.method]()


def train(args: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    subwords = cached_subwords([*corpus.train.source, *corpus.train.target], args.vocabulary, args.cache)
    loader = PairLoader(corpus, subwords, args.tokens, args.seed, device=device, max_length=args.max_length)
    model = build_transformer(args.model, subwords.rows, norm=args.norm, dropout=args.dropout, layers=args.layers)
    task = Translation(model, subwords.decode, label_smoothing=args.smoothing, beams=args.beams, alpha=args.alpha).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.98), eps=1e-9, fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(inverse_sqrt, warmup=args.warmup))

    console.print(nofm.sparsify_(model, args.pattern))  # <--
    nofm.attach(make_method(args), model, optimizer)  # <--

    average = AveragedModel(task, multi_avg_fn=get_ema_multi_avg_fn(args.ema)) if args.ema else None
    autocast = partial(torch.autocast, device.type, torch.bfloat16) if args.precision == "bf16" else nullcontext
    steps_of_epoch, epochs = loader.order.steps_per_epoch, args.steps / loader.order.steps_per_epoch
    shapes = ", ".join(f"{b.rows}x{b.width}" for b in loader.order.buckets)
    console.print(f"{subwords.size:,} tokens; {steps_of_epoch} steps an epoch, {epochs:.1f} epochs; shapes {shapes}")

    sad, curve, loss_sum = nofm.SAD(model), [], torch.zeros((), device=device)
    sad.record(0)
    began = time.perf_counter()
    batches = islice(map(loader.make, loader.keys(0)), args.steps)
    for step, batch in enumerate(batches, start=1):
        with autocast():
            loss = task(batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        loss_sum += loss.detach()
        if average is not None:
            average.update_parameters(task)
        if step % args.log_every == 0 or step == args.steps:
            sad.record(step)
            steps = step - (curve[-1]["step"] if curve else 0)
            curve.append({"step": step, "loss": loss_sum.item() / steps, "lr": schedule.get_last_lr()[0]})
            loss_sum.zero_()
            if step % args.eval_every == 0 and step < args.steps:
                curve[-1] |= measured(task, loader, autocast)
            seconds = time.perf_counter() - began
            console.print(f"step {step:6} {seconds:7.1f} s  " + "  ".join(f"{k} {v:.4g}" for k, v in curve[-1].items() if k != "step"))
    train_seconds = time.perf_counter() - began
    metrics = measured(task, loader, autocast)
    if average is not None:
        metrics |= {f"ema_{name}": value for name, value in measured(average.module, loader, autocast).items()}
    return {
        "metrics": metrics,
        "signature": task.signature,
        "samples": [sample._asdict() for sample in task.samples()],
        "sad": {"total": sad.between(0, args.steps).total, "weights": sad.between(0, args.steps).weights, "flip_rate": sad.flip_rate()},
        "cost": counted(model, args.length),
        "skipped_pairs": loader.skipped,
        "vocabulary": subwords.size,
        "steps_per_epoch": steps_of_epoch,
        "train_seconds": train_seconds,
        "curve": curve,
    }


@torch.no_grad()
def measured(task: Translation, loader: PairLoader, autocast: Any) -> dict[str, float]:
    task.eval()
    task.reset()
    sums: dict[str, Tensor] = {}
    for batch in loader.test():
        with autocast():
            for name, value in task.measure(batch).items():
                sums[name] = sums[name] + value if name in sums else value
    task.train()
    return task.metrics({name: float(value) for name, value in sums.items()})


# ---- costs ----


def counted(model: torch.nn.Module, length: int) -> dict[str, float]:
    """Parameters and multiply-adds for a source and a target of `length` tokens."""
    sentence = torch.zeros((1, length), dtype=torch.int64)
    cost = nofm.cost(model, [sentence, sentence])
    return {"params": cost.params, "params_sparse": cost.params_sparse, "macs": cost.macs, "macs_sparse": cost.macs_sparse}


def print_costs(length: int) -> None:
    """Transformer base with 37,000 tokens, counted in three ways."""
    rows: list[tuple[str, Any, str, str]] = [
        ("dense", None, "63", "10.2"),
        ("linear layers 2:4 (what nofm trains)", "2:4", "", ""),
        ("embedding and softmax too", {"embedding": "2:4", "output": "2:4", "*": "2:4"}, "31.5", "5.1"),
    ]
    columns = ("sparse", "params (M)", "paper", "multiply-adds (G)", "paper")
    table = Table(*columns, title=f"Transformer base, 37,000 tokens, sentences of {length} tokens each way")
    for name, pattern, params, flops in rows:
        model = build_transformer("transformer/base", 37_000)
        if pattern is not None:
            nofm.sparsify_(model, pattern)
        cost = counted(model, length)
        table.add_row(name, f"{cost['params_sparse'] / 1e6:.2f}", params, f"{cost['macs_sparse'] / 1e9:.2f}", flops)
    console.print(table)
    console.print(
        "The paper's 63 M -> 31.5 M are all matrices, the one of embeddings and softmax too; linear layers alone make 41 M. It gives no "
        "sentence length for its 10.2 G: with 155 tokens each way, the softmax counted, it is 10.2 G. Its 5.1 G is half of that; here "
        "products of activations with each other (0.44 G), in which no weight takes part, are not halved."
    )


# ---- command line ----


def options() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "--data", {"help": "folder of SPLIT.LANGUAGE files, or where the LibreOffice packages are unpacked"}
    yield "--corpus", {"choices": list(CORPORA), "default": "multi30k"}
    yield "--source", {"default": "en", "help": "language to translate from"}
    yield "--target", {"default": "de", "help": "language to translate into"}
    yield "--test", {"help": "split to measure on; test_2016_flickr for multi30k, otherwise test"}
    yield "--cache", {"type": Path, "help": "folder that keeps learned vocabularies"}
    yield "--vocabulary", {"type": int, "default": 8000, "help": "tokens, of both languages together"}
    yield "--max-length", {"type": int, "default": 128, "help": "longer training pairs are left out, and counted"}
    yield "--model", {"choices": list(SIZES), "default": "transformer/small"}
    yield "--layers", {"type": int, "help": "of the encoder, and of the decoder, if not the model's own; the recipe multi30k/small has 4"}
    yield "--dropout", {"type": float, "help": "if not the model's own"}
    yield "--norm", {"choices": ["post", "pre"], "default": "post"}
    yield "--method", {"choices": ["dense", "ste", "srste"], "default": "srste"}
    yield "--pattern", {"default": "2:4", "help": "N:M of the linear layers"}
    yield "--decay", {"type": float, "default": 2e-4, "help": "lambda of SR-STE"}
    yield "--placement", {"choices": ["gradient", "decoupled", "backward"], "default": "gradient", "help": "of SR-STE's term"}
    yield "--steps", {"type": int, "default": 8000}
    yield "--tokens", {"type": int, "default": 4096, "help": "source tokens of a step, and target tokens, with padding"}
    yield "--lr", {"type": float, "default": 1.4e-3, "help": "at its highest, at the end of the warm-up"}
    yield "--warmup", {"type": int, "default": 2000}
    yield "--smoothing", {"type": float, "default": 0.1, "help": "of labels"}
    yield "--ema", {"type": float, "default": 0.999, "help": "decay of an average of the weights, measured too; 0 for none"}
    yield "--beams", {"type": int, "default": 5}
    yield "--alpha", {"type": float, "default": 0.6, "help": "length penalty"}
    yield "--seed", {"type": int, "default": 0}
    yield "--device", {"default": "cuda" if torch.cuda.is_available() else "cpu"}
    yield "--precision", {"choices": ["fp32", "bf16"], "default": "bf16" if torch.cuda.is_available() else "fp32"}
    yield "--log-every", {"type": int, "default": 100}
    yield "--eval-every", {"type": int, "default": 2000, "help": "a multiple of --log-every"}
    yield "--length", {"type": int, "default": 155, "help": "tokens of the sentences that costs are counted for"}
    yield "--costs", {"action": "store_true", "help": "print the costs of Transformer base beside the paper's, and stop"}
    yield "--out", {"type": Path, "help": "JSON file for the results"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, settings in options():
        parser.add_argument(name, **settings)
    args = parser.parse_args()
    if args.costs:
        return print_costs(args.length)
    if args.data is None:
        parser.error("--data is needed: the folder of the corpus")
    try:
        result = train(args, read_corpus(args.corpus, args.data, args.source, args.target, args.test))
    except nofm.NofmError as error:
        parser.error(str(error))
    console.print(result["metrics"], result["signature"])
    for sample in result["samples"]:
        console.print(*(f"{key:11}{text}" for key, text in sample.items()), "", sep="\n", markup=False)
    if args.out is not None:
        device = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or "cpu"
        about = {"nofm": nofm.__version__, "torch": torch.__version__, "device": device}
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"settings": settings, "versions": about, **result}, indent=1, ensure_ascii=False))
    return None


if __name__ == "__main__":
    main()
