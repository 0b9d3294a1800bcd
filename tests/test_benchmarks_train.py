"""Every choice of `dataset=` trains one epoch on its look-alike, as a command."""

import lookalikes as look
import pytest
from commands import run_ok

MAKE = {
    "cub": look.make_cub,
    "cars": look.make_cars_two_folders,
    "sop": look.make_sop,
    "inshop": look.make_inshop,
    "folder": look.make_folder,
}


@pytest.mark.parametrize("dataset", MAKE)
def test_one_epoch(dataset, tmp_path):
    MAKE[dataset](tmp_path / "data")
    output = run_ok(
        "train.py",
        "run=x",
        f"dataset={dataset}",
        "dataset.root=data",
        *(["dataset.allow_partial=true"] if dataset != "folder" else []),
        "backbone=test_resnet",
        "backbone.pretrained=false",
        "batch_norm=train",
        "data.batch_size=4",
        "data.num_workers=0",
        "embedding_dim=16",
        "recall_k=[1,2]",
        "optimizer.warmup_epochs=0",
        "trainer.max_epochs=1",
        "trainer.enable_progress_bar=false",
        "dataset.images.crop=32",
        "dataset.images.resize=36",
        cwd=tmp_path,
    )
    assert "epoch 1/1:" in output
    if dataset == "inshop":
        assert "6 query images of 3 classes, 5 gallery images of 3 classes" in output
        assert "images from img/" in output
    assert (tmp_path / "runs" / "x" / "result.json").is_file()
