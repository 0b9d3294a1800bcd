"""Every way to get a run, a comparison, a search for settings or a sweep wrong: one line, and nothing is written."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
import torch
from commands import TINY_GLYPHS, refused

LIBRARY = "loss=pml loss.loss._target_=pytorch_metric_learning.losses"
TRAIN = {
    "validation=folds validation.num_folds=0": "validation.num_folds=0",
    "validation=folds validation.num_folds=5": "at least 10",
    "loss.alhpa=16": "unknown key 'loss.alhpa'. Did you mean 'alpha'?",
    "data.batch_size=x": "data.batch_size=x: expected a number",
    "root=mine": "unknown key 'root'. Did you mean 'dataset.root'?",
    "dataset=carz": "Did you mean 'cars'?",
    "backbone=resnet18 batch_norm=train": "backbone.weights=FILE",
    "backbone=resnet18 backbone.pretrained=false batch_norm=frozen": "add batch_norm=train",
    "backbone.pooling=median": "choose one of: auto, avg+max",
    "backbone.search_with=features regulariser=nested regulariser.nested.dims=[4]": "leave features out of",
    "+dataset.images.color_jitter=0.4": "unknown key dataset.images.color_jitter. Known in dataset.images: brightness,",
    "dataset.images.eval_crop=36 backbone=test_vit": "test_vit takes images of one size",
    "embedding_dim=0": "embedding_dim=0: expected a whole number of at least 1",
    "trainer.precision=8": "choose one of: 32, 32-true, bf16-mixed, 16-mixed",
    "data.eval_batch_size=-1": "data.eval_batch_size=-1: expected a whole number of at least 1",
    "dataset=folder dataset.csv=none.csv": "none.csv cannot be read",
    "recall_k=[0]": "recall_k=0",
    "recall_k=[]": "recall_k is empty",
    "~loss": "unknown key 'loss'",
    "loss=triplet loss.margin=-1": "loss.margin=-1: expected a finite number of at least 0",
    "loss=triplet data.images_per_class=3": "set data.batch_size=15, or data.images_per_class=null",
    "loss=pml": "loss.loss._target_ is needed",
    f"{LIBRARY}.NoLoss": "NoLoss",
    f"{LIBRARY}.FastAPLoss +loss.loss.bins=3": "unexpected keyword argument 'bins'",
    "seed=1,2": "seed=1,2 has several values: give one, add -m to a command for a sweep (from Python: a call for each)",
    "+callbacks.mine._target_=collections.OrderedDict": "callbacks.mine: expected a pytorch_lightning.Callback by its",
    "dataset=folder": "dataset.root=FOLDER",
    "data.batch_size=99999": "Set data.batch_size=64 or less",
    "seed=99999999999": "seed=99999999999: expected a finite number of at least 0 and at most 4.29497e+09",
    "trainer=null": "an override cannot be understood",
    "+trainer.callbacks=[1]": "trainer.callbacks: a run sets it itself: leave it out",
    "trainer.devices=2 data.batch_size=15": "cannot be divided over 2: set data.batch_size=16",
    "trainer.devices=2 trainer.strategy=ddp_spawn": "several devices train with trainer.strategy=ddp",
    "trainer.devices=0": "not a valid input using cpu accelerator",
    "+data.batchsize=1": "unknown key data.batchsize. Did you mean 'batch_size'?",
    "dataset.root=[1]": "dataset.root=[1]: expected a path",
    "backbone.name=5": "expected a string",
    "trainer.check_val_every_n_epoch=5": "does not divide trainer.max_epochs=1",
    "+trainer.val_check_interval=0.5": "trainer.val_check_interval: a run sets it itself: leave it out",
    "+trainer.max_steps=6 trainer.max_epochs=3 trainer.check_val_every_n_epoch=3": "trainer.max_steps=6 may end",
    "deterministic=yes_please": "deterministic=yes_please: expected true or false",
    "deterministic=true speed=fast trainer.benchmark=true": "is not reproducible. Add trainer.benchmark=false",
    "optimizer.warmup_epochs=1": "the backbone would never move",
    "run=../outside": "expected a name for the run folder",
    "data.decode=card": "data.crop_on=card is not known",
    "+callbacks.mine._target_=pytorch_lightning.callbacks.ModelCheckpoint +callbacks.mine.dirpath=runs/x "
    "+callbacks.mine.filename=best": "would write over best.ckpt",
    "recall_k=[1,9999]": "K=9999 is larger than the gallery",
}
if not torch.cuda.is_available():
    TRAIN["trainer.accelerator=gpu"] = "finds no GPU on this machine. Set trainer.accelerator=cpu"
COMPARE = {
    "losses=[proxy_anchor,triplett]": "loss=triplett is not known",
    "losses=triplet": "losses=triplet: expected a list",
    "loss=triplet": "a comparison takes losses=[...]",
    "losses=[proxy_anchor,triplet] data.batch_size=15": "loss=triplet: data.batch_size=15 is not a multiple of",
    "losses=[proxy_anchor,triplet] data.batch_size=48": "takes 12 classes and there are 8: set data.batch_size=32",
    "++seed=4": "a comparison takes seeds=[...]",
    "seeds=[-1]": "seed=-1: expected a whole number of at least 0",
    "debug=fdr": "a comparison needs the Recall of all images",
    "levels=70": "levels=70: expected a list, for example levels=[60,70]",
    "losses=[proxy_anchor,triplet] loss.alpha=16": "unknown key 'loss.alpha'",
    "validation=folds": "validation.fold=None: expected a whole number",
}
TUNE = {
    "": "search=None: expected, for each key, a list of values or a range with min and max: search='{optimizer.lr:",
    "search={loss.alpha:16}": "search={'loss.alpha': 16}: expected, for each key, a list of values or a range",
    "search={loss.alpha:[16]} loss.alpha=3": "loss.alpha is searched; give it in one place",
    "search={loss.alpha:[16]} validation=test": "the test classes would choose the settings: use",
    "search={loss.alpha:[16]} trials=0": "trials=0: expected a whole number",
    "search={loss.alpha:[16]} launcher=slurm": "choose one of: basic, local",
    "search={loss.alpha:[16]} trainer.devices=2": "a search trains on one device",
    "search={loss.alpha:[-1,16]}": "loss.alpha=-1: expected a finite number above 0",
}
SWEEP = {
    "launcher=local": "launcher=local: it runs the jobs of a sweep; add -m",
    "-m launcher=slurm": "launcher=slurm: Could not detect",
    "-m launcher=local launcher.jobs_at_once=0": "launcher.jobs_at_once=0: expected a whole number",
    "-m launcher=local trainer.devices=auto": "trainer.devices='auto': expected a whole number",
}
COMMANDS = [("train", TRAIN), ("compare", COMPARE), ("tune", TUNE), ("train", SWEEP)]


@pytest.mark.parametrize(
    ("name", "arguments", "message"), [(name, *row) for name, rows in COMMANDS for row in rows.items()]
)
def test_a_mistake_is_one_line_and_leaves_nothing(name, arguments, message, glyphs, tmp_path, monkeypatch):
    if name == "tune":
        pytest.importorskip("optuna")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))  # without SLURM's programs
    given = shlex.split(arguments)
    tiny = [] if any(each.startswith("dataset") for each in given) else [*TINY_GLYPHS, glyphs]
    assert message in refused(f"{name}.py", "run=x", *tiny, *given, cwd=tmp_path)
    assert not [each for each in tmp_path.rglob("*") if each.is_file() and each.name != "multirun.yaml"]
