"""Every choice of `dataset=` trains one epoch on its look-alike."""

import lookalikes as look
import pytest
from commands import TINY_FOLDER, compose_train

from train import train

MAKE = {
    "cub": look.make_cub,
    "cars": look.make_cars_two_folders,
    "sop": look.make_sop,
    "inshop": look.make_inshop,
    "folder": look.make_folder,
}


@pytest.mark.parametrize("dataset", MAKE)
def test_one_epoch(dataset, tmp_path, capsys):
    MAKE[dataset](tmp_path / "data")
    overrides = [*TINY_FOLDER, f"dataset={dataset}", f"dataset.root={tmp_path}/data", "data.batch_size=4"]
    overrides += ["recall_k=[1,2]", "trainer.max_epochs=1"]
    overrides += ["dataset.allow_partial=true"] if dataset != "folder" else []
    result = train(compose_train(*overrides), tmp_path / "run")
    assert result["last"]["epoch"] == 1
    assert (tmp_path / "run" / "result.json").is_file()
    if dataset == "inshop":
        output = capsys.readouterr().out
        assert "6 query images of 3 classes, 5 gallery images of 3 classes" in output
        assert "images from img/" in output
