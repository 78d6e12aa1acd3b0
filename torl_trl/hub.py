"""Saves of a run on the Hugging Face Hub, pushed in the background: training neither waits nor fails for a push."""

import contextlib
import logging
import os
import shlex
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from huggingface_hub import HfApi, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils._http import default_client_factory
from transformers.trainer import TRAINING_ARGS_NAME

from torl_trl.data import first_line
from torl_trl.errors import UserError
from torl_trl.run_folder import CONFIG_NAME, CURVES_NAME, METRICS_NAME

if TYPE_CHECKING:
    from torl_trl.config import ToRLConfig

logger = logging.getLogger(__name__)

SILENCE_SECONDS = 120
"""A request ends when its server is silent for so long; huggingface_hub itself would wait forever."""
RUN_FILES = ("README.md", CONFIG_NAME, METRICS_NAME, CURVES_NAME, "evaluation.json")
MODEL_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.jinja"),
    *("configuration_*.py", "modeling_*.py", "tokenization_*.py"),
)
"""What a push takes and nothing else: a run's folder may hold anything."""
_NOT_PUSHED = " ".join(f'--exclude "{pattern}"' for pattern in ("*.bin", "*.pt*", "checkpoint-*", "rollouts/*"))


def open_repo(args: "ToRLConfig") -> str:
    """Make the run's repository if there is none and return its id. Raises `UserError` where no push could succeed."""
    if "wandb" in args.report_to and os.environ.get("WANDB_LOG_MODEL", "false") != "false":
        raise UserError(
            "push_to_hub is true and WANDB_LOG_MODEL is set, with which transformers pushes the run's whole folder: "
            "unset one of them."
        )
    set_client_factory(hub_client)
    api, name = HfApi(token=args.hub_token), args.hub_model_id or Path(args.output_dir).resolve().name
    off = "or set push_to_hub: false"
    try:
        role = api.whoami().get("auth", {}).get("accessToken", {}).get("role")
        repo = api.create_repo(name, private=args.hub_private_repo, exist_ok=True)
        if args.hub_revision:
            api.create_branch(repo.repo_id, branch=args.hub_revision, exist_ok=True)
        if args.hub_private_repo and not api.repo_info(repo.repo_id).private:
            logger.warning("%s is there and public, and a push leaves it so: set another hub_model_id?", repo)
    except LocalTokenNotFoundError as error:
        raise UserError(f"There is no token for the Hub: run `hf auth login`, set HF_TOKEN, {off}.") from error
    except HFValidationError as error:
        raise UserError(f"hub_model_id {name!r} is no name of a repository: give one such as user/model.") from error
    except HfHubHTTPError as error:
        remedy = "check the token, its rights and hub_model_id"
        raise UserError(f"The Hub does not open {name!r} ({first_line(error)}): {remedy}, {off}.") from error
    except (httpx.HTTPError, OSError) as error:
        remedy = "check the network and HF_ENDPOINT"
        raise UserError(f"The Hub at {api.endpoint} is not reached ({error}): {remedy}, {off}.") from error
    if role == "read":
        raise UserError(f"The token for the Hub may only read: give one that may write to {repo.repo_id!r}, {off}.")
    return repo.repo_id


class HubPush:
    """Pushes to a repository, one after the other, on the main process. `failed` counts those that failed."""

    def __init__(self, args: "ToRLConfig", repo_id: str):
        self.url = f"{HfApi().endpoint}/{repo_id}"
        self.failed = 0
        self._args = args
        self._repo_id = repo_id
        self._thread: threading.Thread | None = None
        self._aside = Path(args.output_dir) / ".push"
        shutil.rmtree(self._aside, ignore_errors=True)  # left by a run that was killed

    def start(self, model: Path, message: str, *, branch: str | None = None, resumable: str | None = None) -> None:
        """Push the model in a folder, with the run's files, as they are now; all that takes time is in a thread.

        `branch` keeps this state under a name of its own; `resumable` is the folder in the repository that gets the
        whole checkpoint.
        """
        before = self._thread if self._thread and self._thread.is_alive() else None
        if before and not (self._args.hub_always_push or branch):
            logger.info("%s: not pushed, the push before goes on; hub_always_push: true would queue it.", message)
            return

        def push() -> None:
            if before:
                before.join()
            with self._counting(message, model):
                commit = api.upload_folder(
                    repo_id=self._repo_id,
                    folder_path=files,
                    commit_message=message,
                    revision=self._args.hub_revision,
                    delete_patterns=f"{resumable}/*" if resumable else None,
                )
                if branch:
                    api.create_branch(self._repo_id, branch=branch, revision=commit.oid, exist_ok=True)
                logger.info("%s: pushed to %s", message, self.url)
            shutil.rmtree(files, ignore_errors=True)

        with self._counting(message, model):
            api, files = HfApi(token=self._args.hub_token), self._take(model, resumable)
            self._thread = threading.Thread(target=push, name="hub push", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait for all pushes."""
        if self._thread and self._thread.is_alive():
            logger.info("Waiting for the push to %s.", self.url)
            self._thread.join()

    def _take(self, model: Path, resumable: str | None) -> Path:
        """A folder with what is pushed: hard links, since checkpoints are large, never change, and may be removed."""
        self._aside.mkdir(parents=True, exist_ok=True)
        files = Path(tempfile.mkdtemp(dir=self._aside))
        for path in {path for pattern in MODEL_FILES for path in model.glob(pattern)}:
            _link(path, files / path.name)
        for path in model.rglob("*") if resumable else ():
            if path.is_file() and path.name != TRAINING_ARGS_NAME:
                _link(path, files / resumable / path.relative_to(model))
        for path in map(Path(self._args.output_dir).joinpath, RUN_FILES):
            if path.exists():
                shutil.copy(path, files)
        return files

    @contextlib.contextmanager
    def _counting(self, message: str, model: Path) -> Iterator[None]:
        """Whatever a push fails of, the run goes on."""
        try:
            yield
        except Exception as error:
            self.failed += 1
            logger.warning(
                "%s: the push to %s failed (%s). Nothing is lost, it is all in %s, and a later save pushes again; by "
                "hand: hf upload %s %s . %s",
                *(message, self.url, first_line(error), model, self._repo_id, shlex.quote(str(model)), _NOT_PUSHED),
            )


def hub_client() -> httpx.Client:
    """A client for `set_client_factory` whose requests end when the Hub is silent."""
    client = default_client_factory()
    client.timeout = httpx.Timeout(SILENCE_SECONDS)
    return client


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
