"""Networks as folders or repositories of the Hugging Face hub: config.json, model.safetensors, README.md."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from huggingface_hub import ModelCard, ModelHubMixin, snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from proxy_anchor.data.augment import CentralCrop
from proxy_anchor.errors import UsageError, reason_of
from proxy_anchor.utils import write_json

FORMAT = 1
CONFIG_FILE, WEIGHTS_FILE, CARD_FILE = "config.json", "model.safetensors", "README.md"


class SharedNet(
    nn.Module,
    ModelHubMixin,
    library_name="proxy_anchor",
    pipeline_tag="image-feature-extraction",
    tags=["metric-learning", "image-retrieval"],
    model_card_template=files("proxy_anchor.models").joinpath("model_card.md").read_text(encoding="utf-8"),
):
    """`save_pretrained(FOLDER)`, `from_pretrained(FOLDER or "user/name")` and `push_to_hub("user/name")`.

    Attributes:
        config: the arguments of `from_config`.
        prepare: how an image becomes pixels (3, crop, crop), as in evaluation.
        about: what is known of the training, plain types.
        card: the text of README.md; "" makes a short one.
    """

    config: dict[str, Any]
    prepare: CentralCrop
    about: dict[str, Any]
    card: str = ""

    def describe(self) -> dict[str, Any]:
        """The content of config.json: network, preprocessing and training data as plain types."""
        return {
            "format": FORMAT,
            "library_name": "proxy_anchor",
            "model": self.config,
            "images": {"crop": self.prepare.crop, "resize": self.prepare.resize, "interpolation": "bilinear"},
            "about": self.about,
        }

    def fingerprint(self) -> str:
        """32 hex digits over all tensors and the preprocessing: equal fingerprints mean equal embeddings."""
        model = {key: value for key, value in self.config.items() if key != "batch_norm"}
        digest = hashlib.sha256(json.dumps(model, sort_keys=True).encode())
        digest.update(f"{self.prepare.crop} {self.prepare.resize}".encode())
        for name, value in sorted(self.state_dict().items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())  # NumPy lacks bfloat16
        return digest.hexdigest()[:32]

    def save_pretrained(
        self, save_directory: str | Path, *, repo_id: str | None = None, push_to_hub: bool = False, **options: Any
    ) -> str | None:
        """Write config.json, model.safetensors and README.md, over those of an earlier network.

        An interruption leaves the earlier network, or a folder without config.json, which `from_pretrained` refuses.
        options: see `huggingface_hub.ModelHubMixin.save_pretrained`.
        """
        folder = Path(save_directory).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".saving-", dir=folder) as aside:
            super().save_pretrained(aside, **options)
            (folder / CONFIG_FILE).unlink(missing_ok=True)  # new with old files would be another network
            for name in (WEIGHTS_FILE, CARD_FILE, CONFIG_FILE):
                Path(aside, name).replace(folder / name)
        return self.push_to_hub(repo_id or folder.name, **options) if push_to_hub else None

    def _save_pretrained(self, save_directory: Path) -> None:
        write_json(save_directory / CONFIG_FILE, self.describe())
        write_tensors(save_directory / WEIGHTS_FILE, self)
        if self.card:
            (save_directory / CARD_FILE).write_text(self.card, encoding="utf-8")

    def generate_model_card(self, *args: Any, **more: Any) -> ModelCard:
        """A short card, for a network without `card`."""
        return super().generate_model_card(*args, net=self, **more)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> Self:
        """The network of a folder, or of the hub, in evaluation mode on the CPU.

        All tensors must fit, and no code of the source is executed.
        options: of `huggingface_hub.snapshot_download`: revision, token, cache_dir, local_files_only.

        Raises:
            UsageError: when it is missing, damaged, something else, or of another format.
        """
        source = folder = Path(pretrained_model_name_or_path)
        if not folder.is_dir():
            try:
                files = [CONFIG_FILE, WEIGHTS_FILE, CARD_FILE]
                folder = Path(snapshot_download(str(pretrained_model_name_or_path), allow_patterns=files, **options))
            except Exception as error:  # of the hub, the connection or the name, depending on the client version
                raise UsageError(
                    f"{source} is no folder here, and the hub does not give it ({reason_of(error)[:300]}): pass a "
                    "folder of save_pretrained, or user/name of a model on the hub."
                ) from error
        try:
            config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
            version, described, images = config["format"], config["model"], config["images"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{source}: {CONFIG_FILE} is missing, damaged, or not written by save_pretrained."
            ) from error
        if version != FORMAT:
            raise UsageError(f"{source} has format {version}; this version reads format {FORMAT}: save it again.")
        try:
            net = cls.from_config(described)  # type: ignore[attr-defined]  # of EmbeddingNet
            net.prepare = CentralCrop.of(images)
            net.load_state_dict(load_file(folder / WEIGHTS_FILE))
            card = folder / CARD_FILE
            net.card = card.read_text(encoding="utf-8") if card.is_file() else ""
        except (OSError, SafetensorError, RuntimeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{source} cannot be read ({reason_of(error)[:300]}): it is damaged, or its parts belong to two models."
            ) from error
        net.about = config.get("about", {})
        return net.eval()


def write_tensors(file: Path, module: nn.Module) -> None:
    """Write all tensors of a module."""
    # Copies: safetensors refuses tensors that share memory (as in CoaT), and channels-last ones.
    tensors = {name: value.clone(memory_format=torch.contiguous_format) for name, value in module.state_dict().items()}
    file.write_bytes(save(tensors, metadata={"format": "pt"}))  # its own files are readable by the owner alone
