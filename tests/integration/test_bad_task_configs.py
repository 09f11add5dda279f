"""Configurations of translation, flow and detection that cannot be run: refused before data is opened, as those of test_bad_configs.py.

Data are files of the right names and nothing in them: a refusal that needs more would have opened data.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_bad_configs import Bad, arguments, walled_up  # noqa: F401 - a fixture

from nofm.cli.main import main

ROOTS = {
    "bccd/fasterrcnn": "{tmp}/coco",
    "nuclei/maskrcnn": "{tmp}/coco",
    "multi30k/small": "{tmp}/text",
    "flow/chairs": "{tmp}/chairs",
    "flow/stamps": "{tmp}/stamps",
}


def lay_out(root: Path) -> None:
    """Folders of the right layout."""
    names = [f"text/{split}.{language}" for split in ("train", "test_2016_flickr") for language in ("en", "de")]
    names += [f"chairs/data/0000{i}_{what}" for i in (1, 2) for what in ("img1.ppm", "img2.ppm", "flow.flo")]
    names += ["stamps/train.npz", "stamps/val.npz", "half/train.en", "half/train.de", "half/test_2016_flickr.en", "one/train.npz"]
    names += ["help/usr/share/libreoffice/help/en-US/text/page.html", "unmarked/data/00001_flow.flo", "empty/.keep"]
    names += ["coco/instances_train.json", "coco/annotations/instances_val2017.json", "started/run.json", "only/instances_train.json"]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (root / "chairs" / "FlyingChairs_train_val.txt").write_text("1\n2\n")


def translation(options: str, *says: str, root: str | None = "{tmp}/text") -> Bad:
    return Bad(f"--data.root {root} {options}" if root else options, says, recipe="multi30k/small")


def flow(options: str, *says: str, root: str = "{tmp}/stamps") -> Bad:
    return Bad(f"--data.root {root} {options}", says, recipe="flow/stamps")


def chairs(options: str, *says: str, root: str = "{tmp}/chairs") -> Bad:
    return Bad(f"--data.root {root} {options}", says, recipe="flow/chairs")


def detection(options: str, *says: str, root: str = "{tmp}/coco") -> Bad:
    return Bad(f"--data.root {root} {options}", says, recipe="bccd/fasterrcnn")


def digits(options: str, *says: str) -> Bad:
    return Bad(options, says)


TABLE = {
    # a setting of another task
    "beams for digits": digits("--task.beams 3", "--task.beams 3", "has no effect on classification; it belongs to translation"),
    "updates for digits": digits("--task.updates 3", "--task.updates 3", "has no effect on classification; it belongs to flow"),
    "the usual number of beams": digits("--task.beams 5", "--task.beams 5", "belongs to translation"),
    "layers for digits": digits("--model.layers 2", "--model.layers 2", "belongs to translation"),
    "post for digits": digits("--model.norm post", "--model.norm post", "batch or group"),
    "languages for digits": digits("--data.source fr", "--data.source fr", "belongs to translation"),
    "crop for a translation": translation("--data.crop 2", "--data.crop 2", "has no effect on translation", "classification"),
    "workers for a translation": translation("--data.loader workers", "--data.loader workers", "has no effect on translation"),
    "width for a translation": translation("--model.width 16", "--model.width 16", "has no effect on translation"),
    "crop size for a translation": translation("--data.crop_size 128 128", "--data.crop_size", "belongs to flow"),
    "channels of sentences": translation("--engine.channels_last", "--engine.channels_last true", "has no images"),
    "smoothing for flow": flow("--task.label_smoothing 0.1", "has no effect on flow", "classification, translation"),
    "mirrors for flow": flow("--data.flip", "--data.flip true", "has no effect on flow"),
    "task misspelled": digits(
        "--task.kind translate", "--task.kind translate", "detection, segmentation, translation, flow", "'translation'"
    ),
    "another task's data": translation("--data.name chairs", "--data.name chairs", "parallel, multi30k, libreoffice", "belongs to flow"),
    "another task for digits": digits(
        "--task.kind flow", "data.name = digits", "it belongs to classification", "chairs, sintel, kitti, middlebury, stamps for flow"
    ),
    # detection
    "boxes for digits": digits("--model.backbone {tmp}", "--model.backbone", "belongs to detection, segmentation"),
    "frozen digits": digits("--model.norm frozen", "--model.norm frozen", "batch or group for classification"),
    "smoothed boxes": detection("--task.label_smoothing 0.1", "has no effect on detection; it belongs to classification, translation"),
    "detector misspelled": detection("--model.name fasterrcnn_tinny", "fasterrcnn_resnet50_fpn or fasterrcnn_tiny", "'fasterrcnn_tiny'"),
    "masks by a detector of boxes": Bad(
        "--data.root {tmp}/coco --model.name fasterrcnn_tiny",
        ("maskrcnn_resnet50_fpn or maskrcnn_tiny for segmentation",),
        recipe="nuclei/maskrcnn",
    ),
    "frozen chance": detection("--model.norm frozen", "--model.norm frozen", "what chance has put there", "model.backbone"),
    "untrained chance": detection("--model.trainable_layers 3", "--model.trainable_layers 3", "give model.backbone, or train all 5"),
    "more stages than there are": detection("--model.trainable_layers 6", "--model.trainable_layers 6", "0 <= trainable_layers <= 5"),
    "backbone missing": detection("--model.backbone {tmp}/nowhere", "--model.backbone", "no such file or folder"),
    "backbone of a run that has not ended": detection(
        "--model.backbone {tmp}/started", "has no model.safetensors", "a finished run's folder"
    ),
    "backbone that is none": detection("--model.backbone {tmp}/started/run.json", "run.json: cannot be read as safetensors"),
    "norm of a transformer": detection("--model.norm pre", "--model.norm pre", "frozen, batch or group for detection"),
    "images of nothing": detection("--data.size 31", "--data.size 31", "size >= 32"),
    "longest below shortest": detection("--data.size 512 --data.max_size 500", "--data.max_size 500", "max_size >= 512"),
    "jitter backwards": detection("--data.scale_jitter 1.2 0.8", "--data.scale_jitter", "lowest <= highest"),
    "no json": detection("", "--data.root", "no COCO file of the split 'train'", root="{tmp}/empty"),
    "no json to be measured on": detection("", "--data.root", "no COCO file of the split 'val'", root="{tmp}/only"),
    "a split that has no json": detection("--data.test test", "--data.test test", "no COCO file of the split 'test'"),
    "a graph of boxes": detection("--engine.graph on --device cpu", "engine.graph = on"),
    # translation
    "no beam": translation("--task.beams 0", "--task.beams 0", "1 <= beams <= 64"),
    "too many beams": translation("--task.beams 65", "--task.beams 65", "1 <= beams <= 64"),
    "alpha negative": translation("--task.alpha=-1", "--task.alpha -1", "alpha >= 0"),
    "transformer misspelled": translation("--model.name transformer/smal", "transformer/base or transformer/small", "'transformer/small'"),
    "a cnn that translates": translation("--model.name cnn", "--model.name cnn", "transformer/base or transformer/small for translation"),
    "batch norm in a transformer": translation("--model.norm batch", "--model.norm batch", "post or pre"),
    "no layer": translation("--model.layers 0", "--model.layers 0", "layers >= 1"),
    "vocabulary below the bytes": translation("--data.vocabulary 258", "--data.vocabulary 258", "vocabulary >= 259"),
    "sentences of one token": translation("--data.max_length 1", "--data.max_length 1", "2 <= max_length <= 1024"),
    "sentences longer than positions": translation("--data.max_length 1025", "--data.max_length 1025", "<= 1024"),
    "source is target": translation("--data.source de", "data.target = none", "must differ from data.source, which is de"),
    "a path for a language": translation("--data.target ../de", "--data.target ../de", "a language as files end"),
    "no text": translation("", "data.root = none", "multi30k needs the folder of its files: --data.root PATH", root=None),
    "text folder missing": translation("", "--data.root", "no such folder", "did you mean", root="{tmp}/texts"),
    "text folder empty": translation("", "--data.root", "there is no train.en or train.en.gz", root="{tmp}/empty"),
    "one language missing": translation("", "there is no test_2016_flickr.de", "train.de", root="{tmp}/half"),
    "a split that is not there": translation("--data.test test_2017", "--data.test test_2017", "there is no test_2017.en"),
    "a language that is not there": translation("--data.target fr", "--data.root", "there is no train.fr"),
    "help without its packages": translation("--data.name libreoffice", "--data.root", "libreoffice-help-en-us"),
    "help in one language": translation("--data.name libreoffice", "unpack libreoffice-help-de there", root="{tmp}/help"),
    "a split of the help": translation("--data.name libreoffice --data.test tests", "train, valid, test", "'test'", root="{tmp}/help"),
    "cache is a file": translation("--data.cache {tmp}/text/train.en", "--data.cache", "is a file"),
    "no warm-up": translation("--schedule.warmup 0", "--schedule.warmup 0", "above 0 steps with inverse_sqrt"),
    "a shape for the inverse root": translation("--schedule.shape linear", "--schedule.shape linear", "belongs to onecycle"),
    "sharded embeddings": translation("--engine.parallel fsdp", "--engine.parallel fsdp", "one matrix", "use ddp"),
    "pattern no linear layer can have": translation("--sparsity.pattern 3:7", "sparsity.pattern = 3:7", "divisible by 7"),
    "rule that matches no part": translation(
        "--sparsity.pattern None --sparsity.rules encoder.9.*=2:4", "sparsity.rules", "encoder.9.*", "no layer"
    ),
    # flow
    "no update": flow("--task.updates 0", "--task.updates 0", "1 <= updates <= 64"),
    "too many updates in tests": flow("--task.test_updates 65", "--task.test_updates 65", "1 <= test_updates <= 64"),
    "gamma of nothing": flow("--task.gamma 0", "--task.gamma 0", "0 < gamma <= 1"),
    "gamma that grows": flow("--task.gamma 1.1", "--task.gamma 1.1", "0 < gamma <= 1"),
    "no flow at all": flow("--task.max_flow 0", "--task.max_flow 0", "max_flow > 0"),
    "raft misspelled": flow("--model.name raft", "--model.name raft", "raft_large, raft_small or raft_tiny", "did you mean"),
    "pretrained tiny": flow("--model.name raft_tiny --model.pretrained", "--model.pretrained true", "no published weights"),
    "crop not of eights": flow("--data.crop_size 250 320", "--data.crop_size", "divisible by 8"),
    "crop too small": flow("--data.crop_size 120 128", "--data.crop_size", "at least 128"),
    "stamps by workers": flow("--data.loader workers", "--data.loader workers", "resident for stamps"),
    "stamps to skip": flow("--data.corrupt skip", "--data.corrupt skip", "has no effect on stamps"),
    "one pack missing": flow("", "--data.root", "has no val.npz", "make_stamps.py", root="{tmp}/one"),
    "chairs without processes": chairs("--data.loader resident --engine.workers 0", "must be workers for chairs"),
    "chairs without marks": chairs("", "--data.root", "FlyingChairs_train_val.txt", root="{tmp}/unmarked"),
    "no chairs": chairs("", "--data.root", "{tmp}/empty", root="{tmp}/empty"),
    "sintel in the layout of chairs": chairs("--data.name sintel", "--data.root", "training"),
    "pairs that do not split": chairs("--engine.accumulate 3", "engine.batch_size = 10", "divisible by engine.accumulate 3"),
    "a graph of RAFT": flow("--engine.graph on --device cpu", "engine.graph = on"),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_bad_configuration_is_refused_and_explained(name, tmp_path, capsys, walled_up):  # noqa: F811
    lay_out(tmp_path)
    row = TABLE[name]
    code = main(arguments(row, tmp_path))
    message = capsys.readouterr().err
    assert code == 2, message
    for text in row.says:
        assert text.replace("{tmp}", str(tmp_path)) in message
    assert "Traceback" not in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("recipe", ROOTS)
def test_the_layouts_of_the_table_are_good_ones(recipe, tmp_path, walled_up):  # noqa: F811
    lay_out(tmp_path)
    with pytest.raises(AssertionError, match="got as far as data"):
        main(["train", recipe, "--data.root", ROOTS[recipe].replace("{tmp}", str(tmp_path)), "--out", str(tmp_path / "run")])
